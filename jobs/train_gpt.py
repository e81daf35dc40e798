"""Train a byte-level GPT on text, data parallel on any number of ranks, as one file of settings says.

    python jobs/train_gpt.py jobs/gpt.toml
    mpicoll run -n 2 jobs/train_gpt.py jobs/gpt.toml --set model.width=64
    mpirun -n 4 python jobs/train_gpt.py my.json --resume

Dropout included, the run is the same on any number of ranks but for the rounding of sums.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import asdict
from pathlib import Path

import click
import gpt_config
import numpy as np
from gpt import GPT
from gpt_config import Config
from gpt_saver import Saver
from mpi4py import MPI
from ngram import entropy
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from settings import ConfigError
from train_text import (
    CACHE,
    Curve,
    Report,
    Settings,
    failing_together,
    open_data,
    start,
    terminal_console,
    write_curve,
)

import mpicoll
from mpicoll.checkpoint import CheckpointError
from mpicoll.data import DataError
from mpicoll.nn import Draw
from mpicoll.optim import (
    BF16,
    FP16,
    LAMB,
    LARS,
    SGD,
    Adam,
    AdamW,
    DistributedOptimizer,
    Int8,
    PowerSGD,
    TopK,
    broadcast_parameters,
    clip_by_global_norm,
    warmup,
)
from mpicoll.optim.schedules import cosine
from mpicoll.sampler import Sampler, part
from mpicoll.timeline import Timeline

OPTIMIZERS = {"adam": Adam, "adamw": AdamW, "lamb": LAMB, "lars": LARS, "sgd": SGD}
COMPRESSIONS = {"fp16": FP16, "bf16": BF16, "int8": Int8, "topk": TopK, "powersgd": PowerSGD}
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
) -> tuple[GPT, Curve]:
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
    window = np.arange(model.context + 1)
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
            with timeline.span("forward", step=step):
                summed, saved = model.forward(
                    windows, Draw(wanted.seed, step, sampler.part.start + mine.start)
                )
            with timeline.span("backward", step=step):
                model.backward(saved, scale, optimizer.gradients, ready)
            loss += scale * summed
        optimizer.metrics["loss"][...] = loss
        before = time.perf_counter()
        with timeline.span("wait for the average", step=step):
            optimizer.synchronize()
        curve.communicating += time.perf_counter() - before
        timeline.look()
        curve.loss.append(float(optimizer.metrics["loss"]))
        if not math.isfinite(curve.loss[-1]):
            problem = (
                f"the loss is {curve.loss[-1]} at step {step}; try optimizer.lr below {config.optimizer.lr:g}"
            )
            raise click.ClickException(problem)  # on every rank: all have the same loss
        with timeline.span("update", step=step), optimizer.skip_synchronize():
            if config.optimizer.clip:
                clip_by_global_norm(optimizer.gradients, config.optimizer.clip)
            optimizer.step()
        if step in evaluations:
            with timeline.span("evaluate", step=step):
                curve.validation[step] = evaluate(model, held_out, comm)
        curve.seconds = time.perf_counter() - begin
        if saver:
            saver.save(step, model, optimizer, curve)
        if report:
            report(step, curve)
    optimizer.free()
    return model, curve


def make_optimizer(config: Config, model: GPT, comm: mpicoll.Intracomm) -> DistributedOptimizer:
    """Make the optimizer that the settings name, for the replicas on `comm`."""
    chosen, travel, steps = config.optimizer, config.communication, config.training.steps
    schedule, rising = cosine(chosen.lr, steps, chosen.final), round(chosen.warmup * steps)
    if rising:
        schedule = warmup(schedule, rising, start=chosen.lr / rising)
    own = {
        key: getattr(chosen, key)
        for key in ("weight_decay", "betas", "eps", "momentum", "nesterov")
        if getattr(chosen, key) is not None
    }
    vectors = [name for name, array in model.params.items() if array.ndim < 2]
    optimizer = OPTIMIZERS[chosen.name](model.params, schedule, undecayed=vectors, **own)
    sizes = {key: value for key in ("ratio", "rank") if (value := getattr(travel, key)) is not None}
    compression = None if travel.compression == "none" else COMPRESSIONS[travel.compression](**sizes)
    return DistributedOptimizer(
        optimizer,
        comm,
        bucket_cap_mb=travel.bucket_mb,
        backward_passes_per_step=config.training.passes,
        compression=compression,
        metrics=["loss"],
        overlap=travel.overlap,
    )


def evaluate(model: GPT, text: np.ndarray, comm: mpicoll.Intracomm) -> float:
    """Return the mean loss on sequences spread evenly over `text`, every rank computing its part of them."""
    count = min(SEQUENCES, len(text) - model.context)
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
    ranks = f"{comm.size} {'ranks' if comm.size > 1 else 'rank'}"
    progress.console.print(f"{ranks}, {(len(text) + len(held_out)) / 1e6:.1f} MB: {data.source}")
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
        out.mkdir(parents=True, exist_ok=True)
    bar = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn()
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        text, held_out, checksum = read_text(comm, wanted, progress)
    unigram, timeline = min(entropy(text), entropy(held_out)), Timeline(comm)
    tokens = Settings(steps=wanted.training.steps, batch=wanted.training.batch * wanted.model.context)
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        saver = Saver(comm, wanted, checksum, resume) if wanted.checkpoint.every or resume else None
        try:
            report = Report(tokens, progress)
            model, curve = train(comm, text, held_out, wanted, report=report, saver=saver, timeline=timeline)
            if saver:
                saver.close()
        except CheckpointError as error:  # on every rank, with the same words
            raise click.ClickException(str(error)) from error

    digests = comm.allgather(hashlib.sha256(model.params.flat).hexdigest()[:16])
    if check:
        console.print(f"parameters on ranks 0 to {comm.size - 1}: {' '.join(digests)}")
    if len(set(digests)) > 1:
        raise click.ClickException(f"the ranks' parameters differ: {' '.join(digests)}")
    if wanted.output.trace:
        with failing_together(comm):
            timeline.write(out / "trace.json")
        console.print(f"timeline: {out / 'trace.json'} (open it in ui.perfetto.dev)")
    if comm.rank == 0:
        sample = model.sample(wanted.output.prompt.encode(), wanted.output.sample, wanted.training.seed)
        shown = sample.decode(errors="replace")
        console.print("".join(char if char.isprintable() or char == "\n" else "?" for char in shown))
        console.print(f"loss curve: {write_curve(out, curve, unigram, wanted.output.plot)}")
    final = curve.validation[wanted.training.steps]
    console.print(
        f"{model.params.flat.size} parameters: validation loss {final:.4f} nats per byte, unigram entropy "
        f"{unigram:.4f}, gain {unigram - final:.4f}; {curve.seconds:.1f} s, "
        f"{curve.communicating / curve.seconds:.0%} of it communicating"
    )


if __name__ == "__main__":
    start(main)
