"""Train a small language model on the source text of Python's standard library, on any number of ranks.

Every rank computes the gradient of its part of a global batch; mpicoll averages the gradients in place. So
the run is the same on 1, 2, 3 or 4 ranks, but for the rounding of sums taken in another order.

    python jobs/train_text.py
    mpicoll run -n 2 jobs/train_text.py
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from ngram import Model, entropy
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

import mpicoll
from mpicoll.io.sampler import Sampler, part
from mpicoll.io.text import DataError, TextData, make_folder, pack_text, stdlib_sources
from mpicoll.train.buckets import Buckets
from mpicoll.train.optim import Adam, broadcast_parameters

ROWS = 2048  # rows evaluated at once: the hidden layer of so many stays in cache


@dataclass(frozen=True)
class Settings:
    """What decides the run; the number of ranks does not."""

    steps: int = 6000
    batch: int = 768
    context: int = 8
    embed: int = 16
    hidden: int = 256
    lr: float = 6e-3
    seed: int = 1

    @property
    def remedy(self) -> str:
        """What to do about a loss that is too high."""
        return f"--lr below {self.lr:g}"


@np.errstate(all="ignore")  # of what overflows, the loss tells
def train(
    comm: mpicoll.Intracomm,
    text: np.ndarray,
    held_out: np.ndarray,
    settings: Settings,
    report: Report | None = None,
) -> tuple[Model, Curve]:
    """Train on `text`; the same curve and the same parameters on every rank of `comm`."""
    curve = Curve()
    model = Model(settings.context, settings.embed, settings.hidden, settings.seed)
    broadcast_parameters(model.params, comm)
    # The loss rides in the gradients' bucket: every rank knows the global loss, at no extra call.
    gradients = Buckets({**model.params, "loss": np.zeros(1, np.float32)}, comm)
    optimizer = Adam(model.params, settings.lr)
    sampler = Sampler(
        len(text) - settings.context, settings.batch, seed=settings.seed, rank=comm.rank, size=comm.size
    )
    window = np.arange(settings.context + 1)
    # Gradients are summed here and averaged over ranks there: with this scale the result is the mean over the
    # global batch, also where it does not divide and ranks have unequal parts.
    scale = comm.size / settings.batch
    evaluations = {settings.steps * k // 20 for k in range(1, 21)}

    start = time.perf_counter()
    for step in range(1, settings.steps + 1):
        model.backward(text[sampler[step - 1][:, None] + window], scale, gradients)
        before = time.perf_counter()
        gradients.average()
        curve.communicating += time.perf_counter() - before
        curve.loss.append(float(gradients["loss"][0]))
        check_finite(curve.loss[-1], step, settings.remedy)
        optimizer.lr = settings.lr * rate(step / settings.steps)
        optimizer.step(gradients)
        if step in evaluations:
            curve.validation[step] = evaluate(model, held_out, comm)
        curve.seconds = time.perf_counter() - start
        if report:
            report(step, curve)
    return model, curve


def rate(done: float) -> float:
    """Return the share of the learning rate: a short warm-up, then down along a cosine."""
    return min(done / 0.02, 1.0) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * done)))


def evaluate(model: Model, text: np.ndarray, comm: mpicoll.Intracomm, count: int = 16384) -> float:
    """Return the mean loss on windows spread evenly over `text`, every rank computing its part of them."""
    starts = np.linspace(0, len(text) - model.context - 1, min(count, len(text) - model.context), dtype=int)
    windows = text[starts[part(len(starts), comm.rank, comm.size), None] + np.arange(model.context + 1)]
    total = np.zeros(1)
    for first in range(0, len(windows), ROWS):
        total += model.loss(windows[first : first + ROWS])
    comm.Allreduce(MPI.IN_PLACE, total)
    return float(total[0]) / len(starts)


def open_data(
    comm: mpicoll.Intracomm, data: Path | None, cache: Path, files: int | None, progress: Progress
) -> TextData:
    """Open the text on every rank; where a node has no packed copy, its first rank packs one."""
    kind = f"first-{files}-files-of-" if files else ""
    path = data or cache / f"{kind}stdlib-{platform.python_version()}.h5"
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    with failing_together(comm):
        if node.rank == 0 and not data and not path.exists():
            progress.console.print(f"packing Python's standard library into {path}")
            pack_text(stdlib_sources()[:files], path, progress=progress if comm.rank == 0 else None)
    node.Free()
    with failing_together(comm):
        text = TextData(path)
    with failing_together(comm):
        if len(set(comm.allgather(text.sha256))) > 1:
            raise DataError(f"{path}: not the same text on every rank; copy one node's file to the others")
    return text


@contextmanager
def failing_together(comm: mpicoll.Intracomm) -> Iterator[None]:
    """Let no rank run on, to wait forever for one that failed: one error, raised on all of them."""
    problem = None
    try:
        yield
    except (OSError, ValueError) as error:
        problem = f"{error} (rank {comm.rank})"
    problems = [problem for problem in comm.allgather(problem) if problem]
    if problems:
        raise click.ClickException(problems[0])


DEFAULT = Settings()
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpicoll"
POSITIVE = click.IntRange(min=1)
FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(context_settings={"show_default": True})
@click.option("--steps", type=POSITIVE, default=DEFAULT.steps, help="Steps to train.")
@click.option("--batch", type=POSITIVE, default=DEFAULT.batch, help="Bytes predicted per step, on all ranks.")
@click.option("--context", type=POSITIVE, default=DEFAULT.context, help="Bytes the model looks back.")
@click.option("--embed", type=POSITIVE, default=DEFAULT.embed, help="Width of a byte's vector.")
@click.option("--hidden", type=POSITIVE, default=DEFAULT.hidden, help="Width of the hidden layer.")
@click.option(
    "--lr", type=click.FloatRange(0, min_open=True), default=DEFAULT.lr, help="Highest learning rate."
)
@click.option("--seed", type=click.IntRange(0), default=DEFAULT.seed, help="Of the parameters and batches.")
@click.option("--data", type=click.Path(path_type=Path), help="Packed text to use, not Python's library.")
@click.option("--cache", type=FOLDER, default=CACHE, help="Where the packed library is kept.")
@click.option("--files", type=POSITIVE, help="Pack only so many files of the library.")
@click.option("--out", type=FOLDER, default=Path("runs/train_text"), help="Where the loss curve goes.")
@click.option("--plot/--no-plot", default=True, help="Draw the loss curve.")
@click.option("--check", is_flag=True, help="Print every rank's digest of the parameters.")
def main(
    data: Path | None, cache: Path, files: int | None, out: Path, plot: bool, check: bool, **options: Any
):
    """Train a byte-level n-gram model on Python's standard library, on as many ranks as there are."""
    comm, settings = mpicoll.Intracomm(MPI.COMM_WORLD), Settings(**options)
    console = terminal_console(comm.rank)
    with failing_together(comm):
        if comm.rank == 0:
            make_folder(out)
    with bar(console) as progress:
        text = open_data(comm, data, cache, files, progress)
    with failing_together(comm), text:
        train_part, held_out = (text[where] for where in text.split())
        if min(len(train_part), len(held_out)) <= settings.context:
            raise DataError(f"{text.path}: {len(text)} bytes are too few for a context of {settings.context}")
    megabytes = (len(train_part) + len(held_out)) / 1e6
    console.print(f"{counted(comm.size)}, {megabytes:.1f} MB: {text.source}")
    unigram = min(entropy(train_part), entropy(held_out))
    with bar(console) as progress:
        model, curve = train(
            comm, train_part, held_out, settings, Report(settings.steps, settings.batch, progress)
        )

    check_alike(comm, console, model.params.flat, check)
    if comm.rank == 0:
        show_text(console, model.sample(b"def ", 400, settings.seed))
    with failing_together(comm):
        if comm.rank == 0:
            console.print(f"loss curve: {write_curve(out, curve, unigram, plot)}")
    conclude(console, curve, unigram, settings.remedy)


def start(command: click.Command = main) -> None:
    """Run the command line; of an error that all ranks share, rank 0 tells."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *about, **more: f"Warning: {message}\n"  # not which line of ours
    try:
        command(standalone_mode=False)
    except click.ClickException as error:
        if MPI.COMM_WORLD.rank == 0:
            error.show()
        MPI.COMM_WORLD.Barrier()  # a launcher ends all ranks once one has failed: rank 0 first has its say
        sys.exit(error.exit_code)
    finally:
        warnings.formatwarning = before


if __name__ == "__main__":
    start()
