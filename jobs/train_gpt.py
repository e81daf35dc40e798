"""Train a byte-level GPT on text, data parallel on any number of ranks, as one file of settings says.

    python jobs/train_gpt.py jobs/gpt.toml
    mpicoll run -n 2 jobs/train_gpt.py jobs/gpt.toml --set model.width=64
    mpirun -n 4 python jobs/train_gpt.py my.json --resume

Dropout included, the run is the same on any number of ranks but for the rounding of sums.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click
import gpt_config
import numpy as np
from gpt import GPT
from gpt_config import Config
from gpt_optimizer import loss_scale, make_optimizer, sent_share, update
from gpt_saver import Saver
from mpi4py import MPI
from ngram import entropy
from report import (
    Curve,
    Report,
    bar,
    check_alike,
    check_finite,
    conclude,
    counted,
    show_text,
    terminal_console,
    write_curve,
)
from rich.progress import Progress
from settings import ConfigError
from train_text import CACHE, failing_together, open_data, start

import mpicoll
from mpicoll.io.checkpoint import CheckpointError
from mpicoll.io.sampler import Sampler, part
from mpicoll.io.text import DataError, make_folder
from mpicoll.train.nn import Draw
from mpicoll.train.optim import DistributedOptimizer, broadcast_parameters
from mpicoll.train.timeline import Timeline

SEQUENCES = 256  # of the held-out text that are evaluated
AT_ONCE = 32  # sequences evaluated in one forward pass


@np.errstate(all="ignore")  # of what overflows, the loss tells
def train(
    comm: mpicoll.Intracomm,
    text: np.ndarray,
    held_out: np.ndarray,
    config: Config,
    *,
    report: Report | None = None,
    saver: Saver | None = None,
    timeline: Timeline | None = None,
) -> tuple[GPT, Curve, DistributedOptimizer]:
    """Train on `text`; the same curve and the same parameters on every rank of `comm`."""
    wanted, trace, curve = config.training, config.output.trace or (0, 0), Curve()
    model = GPT(**asdict(config.model), seed=wanted.seed)
    broadcast_parameters(model.params, comm)
    timeline = timeline or Timeline(comm)
    optimizer = make_optimizer(config, model, timeline.traced(comm))
    first = saver.restore(model, optimizer, curve) if saver else 0
    sampler = Sampler(
        len(text) - model.context, wanted.batch, seed=wanted.seed, rank=comm.rank, size=comm.size
    )
    window, place = np.arange(model.context + 1), part(wanted.batch, comm.rank, comm.size).start
    # What passes and ranks sum and average with this scale is the mean over the bytes of the global batch,
    # also where it does not divide and ranks have unequal parts.
    scale = comm.size / (wanted.batch * model.context)
    evaluations = {wanted.steps * k // wanted.evaluations for k in range(1, wanted.evaluations + 1)}

    def ready(name: str) -> None:
        timeline.look()
        optimizer.grad_ready(name)

    begin = time.perf_counter() - curve.seconds
    for step in range(first + 1, wanted.steps + 1):
        timeline.on = trace[0] <= step <= trace[1]
        starts, loss = sampler[step - 1], 0.0
        for k in range(wanted.passes):
            mine = part(len(starts), k, wanted.passes)
            windows = text[starts[mine, None] + window]
            draw = Draw(wanted.seed, step, first=place + mine.start)
            with timeline.span("forward", step=step):
                summed, saved = model.forward(windows, draw)
            with timeline.span("backward", step=step):
                model.backward(saved, scale * loss_scale(optimizer), optimizer.gradients, ready)
            loss += scale * summed
        optimizer.metrics["loss"][...] = loss
        before = time.perf_counter()
        with timeline.span("wait for the average", step=step):
            optimizer.synchronize()
        curve.communicating += time.perf_counter() - before
        timeline.look()
        curve.loss.append(float(optimizer.metrics["loss"]))
        check_finite(curve.loss[-1], step, remedy(config))
        with timeline.span("update", step=step):
            update(model, optimizer, config.optimizer.clip)
        if step in evaluations:
            with timeline.span("evaluate", step=step):
                curve.validation[step] = evaluate(model, held_out, comm)
        curve.seconds = time.perf_counter() - begin
        if report:
            report(step, curve)
        if saver and saver.save(step, model, optimizer, curve):
            break
    return model, curve, optimizer


def evaluate(model: GPT, text: np.ndarray, comm: mpicoll.Intracomm, count: int = SEQUENCES) -> float:
    """Return the mean loss on sequences spread evenly over `text`, every rank computing its part of them."""
    count = min(count, len(text) - model.context)
    starts = np.linspace(0, len(text) - model.context - 1, count, dtype=int)
    windows = text[starts[part(count, comm.rank, comm.size), None] + np.arange(model.context + 1)]
    total = np.zeros(1)
    for first in range(0, len(windows), AT_ONCE):
        total += model.forward(windows[first : first + AT_ONCE])[0]
    comm.Allreduce(MPI.IN_PLACE, total)
    return float(total[0]) / (count * model.context)


def read_config(comm: mpicoll.Intracomm, path: Path | None, changes: tuple[str, ...]) -> Config:
    """Read the settings on rank 0, for all."""
    config, problem = None, None
    if comm.rank == 0:
        try:
            config = gpt_config.load(path, changes, comm.size)
        except ConfigError as error:
            problem = str(error)
    config, problem = comm.bcast((config, problem))
    if problem:
        raise click.UsageError(problem)
    return config


def read_text(
    comm: mpicoll.Intracomm, config: Config, progress: Progress
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the training text, the held-out text and the checksum of both."""
    wanted = config.data
    file = Path(wanted.file) if wanted.file else None
    data = open_data(comm, file, Path(wanted.cache) if wanted.cache else CACHE, wanted.files, progress)
    with failing_together(comm), data:
        text, held_out = (data[where] for where in data.split(wanted.validation))
        need = config.model.context + config.training.batch
        if len(text) < need or len(held_out) <= config.model.context:
            raise DataError(
                f"{data.path}: {len(text)} bytes to train on and {len(held_out)} held out are too few for "
                f"batches of {config.training.batch} sequences of {config.model.context} bytes"
            )
    progress.console.print(f"{counted(comm.size)}, {(len(text) + len(held_out)) / 1e6:.1f} MB: {data.source}")
    return text, held_out, data.sha256


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--set", "changes", multiple=True, metavar="SECTION.KEY=VALUE", help="Replace one setting.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint, if there is one.")
@click.option("--check", is_flag=True, help="Print every rank's digest of the parameters.")
def main(config: Path | None, changes: tuple[str, ...], resume: bool, check: bool) -> None:
    """Train a byte-level GPT as the file CONFIG (JSON or TOML) says, on as many ranks as there are."""
    comm = mpicoll.Intracomm(MPI.COMM_WORLD)
    wanted, console = read_config(comm, config, changes), terminal_console(comm.rank)
    out = Path(wanted.output.folder)
    with failing_together(comm):
        if comm.rank == 0:
            make_folder(out)
    with bar(console) as progress:
        text, held_out, checksum = read_text(comm, wanted, progress)
    timeline = Timeline(comm)
    with bar(console) as progress:
        try:
            saving = wanted.checkpoint.every or resume
            saver = Saver(comm, wanted, checksum, resume, progress.console) if saving else None
            report = Report(wanted.training.steps, wanted.training.batch * wanted.model.context, progress)
            model, curve, optimizer = train(
                comm, text, held_out, wanted, report=report, saver=saver, timeline=timeline
            )
            if saver:
                saver.close()
        except CheckpointError as error:  # on every rank, with the same words
            raise click.ClickException(str(error)) from error

    if wanted.output.trace:
        with failing_together(comm):
            timeline.write(out / "trace.json")
        console.print(f"timeline: {out / 'trace.json'} (open it in ui.perfetto.dev)")
    check_alike(comm, console, model.params.flat, check)
    unigram, done = min(entropy(text), entropy(held_out)), len(curve.loss)
    if comm.rank == 0 and done == wanted.training.steps:
        prompt = wanted.output.prompt.encode()
        show_text(console, model.sample(prompt, wanted.output.sample, wanted.training.seed))
    with failing_together(comm):
        if comm.rank == 0:
            console.print(f"loss curve: {write_curve(out, curve, unigram, wanted.output.plot)}")
    if done < wanted.training.steps:
        console.print(f"stopped at step {done}, as the job ends; --resume goes on")
        return
    share = sent_share(wanted, optimizer)
    about = f"{model.params.flat.size} parameters, {share:.1%} of their gradients' bytes sent: "
    conclude(console, curve, unigram, remedy(wanted), about)


def remedy(config: Config) -> str:
    """Say what to do about a loss that is too high."""
    return f"optimizer.lr below {config.optimizer.lr:g}"


if __name__ == "__main__":
    start(main)
