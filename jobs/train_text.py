"""Train a small language model on the source text of Python's standard library, on any number of ranks.

Every rank computes the gradient of its part of a global batch; mpicoll averages the gradients in place. So
the run is the same on 1, 2, 3 or 4 ranks, but for the rounding of sums taken in another order.

    python jobs/train_text.py
    mpicoll run -n 2 jobs/train_text.py
"""

from __future__ import annotations

import csv
import hashlib
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from ngram import Model, entropy
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import mpicoll
from mpicoll.buckets import Buckets
from mpicoll.data import DataError, TextData, pack_text, replacing, stdlib_sources
from mpicoll.optim import Adam, broadcast_parameters
from mpicoll.sampler import Sampler, part

ROWS = 2048  # rows evaluated at once: the hidden layer of so many stays in cache
LINE_EVERY = 5.0  # seconds between lines where there is no terminal to draw a bar on


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


@dataclass
class Curve:
    """What the run has measured so far."""

    loss: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    communicating: float = 0.0


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
        if not math.isfinite(curve.loss[-1]):
            problem = f"the loss is {curve.loss[-1]} at step {step}; try --lr below {settings.lr:g}"
            raise click.ClickException(problem)  # on every rank: all have the same loss
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


class Report:
    """Shows how the run is doing: a bar on a terminal, else a line every few seconds; rank 0 only."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings, self.progress, self.console = settings, progress, progress.console
        self.task = progress.add_task("", total=settings.steps)
        self.last = time.perf_counter()

    def __call__(self, step: int, curve: Curve) -> None:
        """Show the state after a step, unless the last one shown is too recent."""
        pause = 0.1 if self.console.is_terminal else LINE_EVERY
        if time.perf_counter() - self.last < pause and step < self.settings.steps:
            return
        self.last = time.perf_counter()
        recent = curve.loss[-50:]
        held_out = f"{list(curve.validation.values())[-1]:.3f}" if curve.validation else "-"
        line = (
            f"loss {sum(recent) / len(recent):.3f}  validation {held_out}  "
            f"{step * self.settings.batch / curve.seconds / 1e3:.0f}k tokens/s  "
            f"communicating {curve.communicating / curve.seconds:.0%}"
        )
        self.progress.update(self.task, completed=step, description=line)
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self.settings.steps}  {line}")


def terminal_console(rank: int) -> Console:
    """Return a console that is silent on all ranks but 0, and draws only where somebody looks."""
    # Open MPI gives each rank a terminal of its own; if nobody sits behind mpirun it has no width.
    seen = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
    told = "TTY_COMPATIBLE" in os.environ  # by `mpicoll run`, which knows: rich obeys it
    terminal = None if told else seen
    return Console(quiet=rank != 0, soft_wrap=True, highlight=False, markup=False, force_terminal=terminal)


def write_curve(out: Path, curve: Curve, unigram: float, plot: bool) -> str:
    """Write the loss curve as CSV, and as PNG where matplotlib is installed; say what was written."""
    with replacing(out / "loss.csv") as temporary, temporary.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "loss", "validation"])
        for step, loss in enumerate(curve.loss, 1):
            rows.writerow([step, f"{loss:.6f}", curve.validation.get(step, "")])
    if not plot:
        return str(out / "loss.csv")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return (
            f"{out / 'loss.csv'} (no picture: matplotlib is not installed; mpicoll's extra 'plot' brings it)"
        )
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(curve.loss) + 1), curve.loss, linewidth=0.5, alpha=0.6, label="training batch")
    axes.plot(list(curve.validation), list(curve.validation.values()), "o-", label="validation")
    axes.axhline(unigram, linestyle="--", color="grey", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.legend()
    with replacing(out / "loss.png") as temporary:
        figure.savefig(temporary, dpi=150)
    return f"{out / 'loss.png'} and {out / 'loss.csv'}"


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
    bar = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn()
    with failing_together(comm):
        out.mkdir(parents=True, exist_ok=True)
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        text = open_data(comm, data, cache, files, progress)
    with failing_together(comm), text:
        train_part, held_out = (text[where] for where in text.split())
        if min(len(train_part), len(held_out)) <= settings.context:
            raise DataError(f"{text.path}: {len(text)} bytes are too few for a context of {settings.context}")
    megabytes = (len(train_part) + len(held_out)) / 1e6
    console.print(f"{comm.size} {'ranks' if comm.size > 1 else 'rank'}, {megabytes:.1f} MB: {text.source}")
    unigram = min(entropy(train_part), entropy(held_out))
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        model, curve = train(comm, train_part, held_out, settings, Report(settings, progress))

    digests = comm.allgather(hashlib.sha256(model.params.flat).hexdigest()[:16])
    if check:
        console.print(f"parameters on ranks 0 to {comm.size - 1}: {' '.join(digests)}")
    if len(set(digests)) > 1:
        raise click.ClickException(f"the ranks' parameters differ: {' '.join(digests)}")
    if comm.rank == 0:
        sample = model.sample(b"def ", 400, settings.seed).decode(errors="replace")
        console.print("".join(char if char.isprintable() or char == "\n" else "?" for char in sample))
        console.print(f"loss curve: {write_curve(out, curve, unigram, plot)}")
    final = curve.validation[settings.steps]
    console.print(
        f"validation loss {final:.4f} nats per byte, unigram entropy {unigram:.4f}, "
        f"gain {unigram - final:.4f}; {curve.seconds:.1f} s, {curve.communicating / curve.seconds:.0%} of it "
        f"communicating"
    )


def start(command: click.Command = main) -> None:
    """Run the command line; of an error that all ranks share, rank 0 tells."""
    try:
        command(standalone_mode=False)
    except click.ClickException as error:
        if MPI.COMM_WORLD.rank == 0:
            error.show()
        MPI.COMM_WORLD.Barrier()  # a launcher ends all ranks once one has failed: rank 0 first has its say
        sys.exit(error.exit_code)


if __name__ == "__main__":
    start()
