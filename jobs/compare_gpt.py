"""Train the GPT once with each of several settings, and say what they change: its loss, the bytes it sends.

    mpicoll run -n 2 jobs/compare_gpt.py jobs/gpt.toml
    mpicoll run -n 2 jobs/compare_gpt.py --run model.width=64 --run "model.width=96 optimizer.lr=2e-3"

All settings meet the same starts, the same batches and the same held-out text, seed by seed.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev

import click
import numpy as np
from gpt_config import Config
from gpt_optimizer import sent_share
from mpi4py import MPI
from report import Report, bar, terminal_console
from rich.console import Console
from train_gpt import evaluate, read_config, read_text, train
from train_text import failing_together, start

import mpicoll
from mpicoll.io.text import check_folder, replacing

ROW = "{:<96} {:>7} {:>7} {:>7} {:>7} {:>10}"


def usual(config: Config) -> list[str]:
    """Return what is compared where nothing is named: all compressions, and both precisions of 2 bytes."""
    late = f"communication.start={config.training.steps // 4}"
    topk, thin = (
        "topk communication.ratio=0.2",
        f"powersgd communication.rank={max(config.model.width // 4, 1)}",
    )
    kinds = "none", "fp16", "bf16", "int8", f"{topk} {late}", f"{thin} {late}"
    return [
        *(f"communication.compression={kind}" for kind in kinds),
        *(f"precision.dtype={dtype}" for dtype in ("float16", "bfloat16")),
    ]


@dataclass(frozen=True)
class Result:
    """What became of the runs with some settings: the loss for each seed, and the bytes that a step sends."""

    losses: list[float]
    sent: float  # on average
    compressed: float  # in a step that is compressed

    def row(self, run: str, first: Result) -> str:
        """Compare with the first settings, seed by seed; with several seeds, say how sure the mean is."""
        more = [loss / other - 1 for loss, other in zip(self.losses, first.losses, strict=True)]
        error = f"{stdev(more) / math.sqrt(len(more)):.2%}" if len(more) > 1 else ""
        sent, compressed = self.sent / first.sent, self.compressed / first.compressed
        return ROW.format(
            run, f"{mean(self.losses):.4f}", f"{mean(more):+.2%}", error, f"{sent:.1%}", f"{compressed:.1%}"
        )


def measure(
    comm: mpicoll.Intracomm,
    text: np.ndarray,
    held_out: np.ndarray,
    config: Config,
    seeds: int,
    sequences: int,
    console: Console,
) -> Result:
    """Train once with each seed."""
    losses = []
    for seed in range(config.training.seed, config.training.seed + seeds):
        one = replace(config, training=replace(config.training, seed=seed))
        with bar(console) as progress:
            report = Report(one.training.steps, one.training.batch * one.model.context, progress)
            model, _, optimizer = train(comm, text, held_out, one, report=report)
        losses.append(evaluate(model, held_out, comm, sequences))
    nbytes = sum(gradient.nbytes for gradient in optimizer.gradients.values())
    return Result(losses, nbytes * sent_share(config, optimizer), nbytes * optimizer.sent_share)


@click.command(context_settings={"show_default": True})
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--set", "changes", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting of all runs.")
@click.option("--run", "runs", multiple=True, metavar="'SECTION.KEY=VALUE ...'", help="Those of one run.")
@click.option("--seeds", type=click.IntRange(1), default=1, help="Runs with each settings.")
@click.option("--sequences", type=click.IntRange(1), default=4096, help="So many are evaluated at the end.")
@click.option("--keep", type=click.Path(path_type=Path, dir_okay=False), help="JSON file for the results.")
def main(
    config: Path | None,
    changes: tuple[str, ...],
    runs: tuple[str, ...],
    seeds: int,
    sequences: int,
    keep: Path | None,
) -> None:
    """Train the GPT of CONFIG with the settings of each --run, and compare them with those of the first."""
    comm = mpicoll.Intracomm(MPI.COMM_WORLD)
    common, console = read_config(comm, config, changes), terminal_console(comm.rank)
    chosen = {run: read_config(comm, config, (*changes, *run.split())) for run in runs or usual(common)}
    if len({repr(wanted) for wanted in chosen.values()}) < len(runs):
        raise click.UsageError("two --run say the same; --seeds 2 trains each twice")
    with failing_together(comm):
        if keep and comm.rank == 0:
            check_folder(keep.resolve().parent)
    with bar(console) as progress:
        text, held_out, checksum = read_text(comm, common, progress)
    console.print(ROW.format("settings", "loss", "", "+-" if seeds > 1 else "", "sent", "compressed"))
    results: dict[str, Result] = {}
    failed: dict[str, str] = {}
    kept = {"ranks": comm.size, "text": checksum, "sequences": sequences, "config": asdict(common)}
    for run, wanted in chosen.items():
        try:
            results[run] = measure(comm, text, held_out, wanted, seeds, sequences, console)
        except click.ClickException as error:  # on every rank: it has diverged, the next may not
            if not results:  # and there is nothing to compare the next with
                raise click.ClickException(f"{run}: {error.message}") from error
            failed[run] = error.message
            console.print(f"{run}  {error.message}")
        else:
            console.print(results[run].row(run, next(iter(results.values()))))
        kept.update(results={run: asdict(result) for run, result in results.items()}, failed=failed)
        with failing_together(comm):  # after each: the next one may fail, hours later
            if keep and comm.rank == 0:
                with replacing(keep) as temporary:
                    temporary.write_text(json.dumps(kept, indent=1) + "\n")
    if failed:
        raise click.ClickException(f"{len(failed)} of {len(chosen)} settings did not train to the end")


if __name__ == "__main__":
    start(main)
