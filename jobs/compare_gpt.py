"""Train the GPT once with each of several settings, and say what they change: its loss, the bytes it sends.

    mpicoll run -n 2 jobs/compare_gpt.py jobs/gpt.toml
    mpicoll run -n 2 jobs/compare_gpt.py --run model.width=64 --run "model.width=96 optimizer.lr=2e-3"

All runs have the same start, the same batches and the same held-out text.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
from gpt_config import Config
from gpt_optimizer import sent_share
from mpi4py import MPI
from report import Report, bar, terminal_console
from rich.progress import Progress
from train_gpt import evaluate, read_config, read_text, train
from train_text import failing_together, start

import mpicoll
from mpicoll.data import replacing

ROW = "{:<84} {:>7} {:>7} {:>7} {:>10}"


def usual(config: Config) -> list[str]:
    """Return what is compared where nothing is named: all compressions, and both precisions of 2 bytes."""
    thin = f"powersgd communication.rank=16 communication.start={config.training.steps // 4}"
    kinds = "none", "fp16", "bf16", "int8", "topk communication.ratio=0.1", thin
    return [
        *(f"communication.compression={kind}" for kind in kinds),
        *(f"precision.dtype={dtype}" for dtype in ("float16", "bfloat16")),
    ]


def measure(
    comm: mpicoll.Intracomm,
    text: np.ndarray,
    held_out: np.ndarray,
    config: Config,
    sequences: int,
    progress: Progress,
) -> dict[str, float]:
    """Train once; return the loss at the end, and the bytes sent by a step on average and if compressed."""
    report = Report(config.training.steps, config.training.batch * config.model.context, progress)
    model, _, optimizer = train(comm, text, held_out, config, report=report)
    nbytes = sum(gradient.nbytes for gradient in optimizer.gradients.values())
    return {
        "loss": evaluate(model, held_out, comm, sequences),
        "sent": nbytes * sent_share(config, optimizer),
        "compressed": nbytes * optimizer.sent_share,
    }


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--set", "changes", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting of all runs.")
@click.option("--run", "runs", multiple=True, metavar="'SECTION.KEY=VALUE ...'", help="Those of one run.")
@click.option("--sequences", type=click.IntRange(1), default=4096, help="So many are evaluated at the end.")
@click.option("--keep", type=click.Path(path_type=Path, dir_okay=False), help="JSON file for the results.")
def main(
    config: Path | None, changes: tuple[str, ...], runs: tuple[str, ...], sequences: int, keep: Path | None
) -> None:
    """Train the GPT of CONFIG with the settings of each --run, and compare them with those of the first."""
    comm = mpicoll.Intracomm(MPI.COMM_WORLD)
    common, console = read_config(comm, config, changes), terminal_console(comm.rank)
    chosen = {run: read_config(comm, config, (*changes, *run.split())) for run in runs or usual(common)}
    with bar(console) as progress:
        text, held_out, checksum = read_text(comm, common, progress)
    console.print(ROW.format("settings", "loss", "", "sent", "compressed"))
    results: dict[str, dict[str, float]] = {}
    for run, wanted in chosen.items():
        with bar(console) as progress:
            results[run] = result = measure(comm, text, held_out, wanted, sequences, progress)
        first = next(iter(results.values()))
        loss, sent, compressed = (result[key] / first[key] for key in result)
        shown = f"{result['loss']:.4f}", f"{loss - 1:+.2%}", f"{sent:.1%}", f"{compressed:.1%}"
        console.print(ROW.format(run, *shown))
    kept = {"ranks": comm.size, "text": checksum, "sequences": sequences, "config": asdict(common)}
    with failing_together(comm):
        if keep and comm.rank == 0:
            with replacing(keep) as temporary:
                temporary.write_text(json.dumps({**kept, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    start(main)
