"""What a run shows while it trains and at its end, and what it leaves behind."""

from __future__ import annotations

import csv
import hashlib
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import mpicoll
from mpicoll.io.text import replacing

LINE_EVERY = 5.0  # seconds between lines where there is no terminal to draw a bar on
GUESS = math.log(256)  # nats per byte where every byte is as likely as any other


@dataclass
class Curve:
    """What the run has measured so far."""

    loss: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    communicating: float = 0.0


class Report:
    """Shows how the run is doing: a bar on a terminal, else a line every few seconds; rank 0 only."""

    def __init__(self, steps: int, tokens: int, progress: Progress) -> None:
        self.steps, self.tokens = steps, tokens  # tokens: in a step, on all ranks
        self.progress, self.console = progress, progress.console
        self.task = progress.add_task("", total=steps)
        self.last = time.perf_counter()

    def __call__(self, step: int, curve: Curve) -> None:
        """Show the state after a step, unless the last one shown is too recent."""
        pause = 0.1 if self.console.is_terminal else LINE_EVERY
        if time.perf_counter() - self.last < pause and step < self.steps:
            return
        self.last = time.perf_counter()
        recent = curve.loss[-50:]
        held_out = f"{list(curve.validation.values())[-1]:.3f}" if curve.validation else "-"
        line = (
            f"loss {sum(recent) / len(recent):.3f}  validation {held_out}  "
            f"{step * self.tokens / curve.seconds / 1e3:.0f}k tokens/s  "
            f"communicating {curve.communicating / curve.seconds:.0%}"
        )
        self.progress.update(self.task, completed=step, description=line)
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self.steps}  {line}")


def terminal_console(rank: int) -> Console:
    """Return a console that is silent on all ranks but 0, and draws only where somebody looks."""
    # Open MPI gives each rank a terminal of its own; if nobody sits behind mpirun it has no width.
    seen = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
    told = "TTY_COMPATIBLE" in os.environ  # by `mpicoll run`, which knows: rich obeys it
    terminal = None if told else seen
    return Console(quiet=rank != 0, soft_wrap=True, highlight=False, markup=False, force_terminal=terminal)


def bar(console: Console) -> Progress:
    """Make the bar of what takes a while; it is drawn on terminals only."""
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def counted(ranks: int) -> str:
    """Return a number of ranks in words."""
    return f"{ranks} {'ranks' if ranks > 1 else 'rank'}"


def check_finite(loss: float, step: int, remedy: str) -> None:
    """End the run if it cannot go on; on every rank, for all have the same loss."""
    if not math.isfinite(loss):
        raise click.ClickException(f"the loss is {loss} at step {step}; try {remedy}")


def check_alike(comm: mpicoll.Intracomm, console: Console, params: np.ndarray, show: bool) -> None:
    """End the run if the ranks' parameters differ; show their digests if wanted."""
    digests = comm.allgather(hashlib.sha256(params).hexdigest()[:16])
    if show:
        console.print(f"parameters on ranks 0 to {comm.size - 1}: {' '.join(digests)}")
    if len(set(digests)) > 1:
        raise click.ClickException(f"the ranks' parameters differ: {' '.join(digests)}")


def show_text(console: Console, text: bytes) -> None:
    """Print what the model has written, as far as it can be printed."""
    shown = text.decode(errors="replace")
    console.print("".join(char if char.isprintable() or char == "\n" else "?" for char in shown))


def conclude(console: Console, curve: Curve, unigram: float, remedy: str, about: str = "") -> None:
    """Say how the run ended; end it with an error, on every rank, where guessing would do as well."""
    final = curve.validation[len(curve.loss)]
    if not final < GUESS:
        raise click.ClickException(
            f"the run has diverged: its validation loss is {final:.4g} nats per byte, that of guessing "
            f"ln 256 = {GUESS:.4f}; try {remedy}"
        )
    console.print(
        f"{about}validation loss {final:.4f} nats per byte, unigram entropy {unigram:.4f}, "
        f"gain {unigram - final:.4f}; {curve.seconds:.1f} s, {curve.communicating / curve.seconds:.0%} of it "
        f"communicating"
    )


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
