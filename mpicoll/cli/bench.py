"""``mpicoll bench``: our collectives against the MPI's own, side by side in one run, several runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from mpicoll.cli import results
from mpicoll.cli.launches import Program, keep_option, kept, launches_option, measured, save, show_option
from mpicoll.cli.values import Finite, NewFile
from mpicoll.plans import algorithms, verify

MOST = 1 << 40  # bytes
START = 1.5  # seconds that a launch takes before it measures
OPS = ("sum", "prod", "min", "max", "avg")
SHOWN = {"nccl": results.as_nccl, "json": results.as_json, "markdown": results.as_markdown}
DTYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip


class Size(click.ParamType):
    """Bytes with an optional suffix: 8, 64K, 4M, 1G (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of a size as people write it."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", value.strip(), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is no size: expected bytes, such as 8, 64K, 4M or 1G", param, ctx)
        nbytes = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]
        if not 1 <= nbytes <= MOST:
            self.fail(f"{value!r} is no size between 1 and 1024G", param, ctx)
        return nbytes


def sizes(first: int, last: int, factor: int) -> list[int]:
    """From the first, each `factor` times the one before, and the last."""
    found = []
    while first <= last:
        found.append(first)
        first *= factor
    if found and found[-1] != last:
        found.append(last)
    return found


def candidates(names: list[str], memory: str) -> list[dict[str, Any]]:
    """The MPI's own first, then each algorithm in each kind of memory."""
    chosen = [{"label": results.BASE, "algorithm": None, "memory": "ordinary", "native": True}]
    kinds = ("ordinary", "window") if memory == "both" else (memory,)
    for name in names:
        if name == results.BASE:
            continue
        label = name.rpartition(":")[2]
        for kind in kinds:
            chosen.append({
                "label": label if kind == "ordinary" else f"{label}/window",
                "algorithm": None if name == "auto" else name,
                "memory": kind,
                "native": False,
            })  # fmt: skip
    return chosen


def check(collective: str, names: list[str], ranks: int, root: int) -> None:
    """Refuse, before anything is launched, what no launch could run; verify the user's own."""
    nodes = [list(range(ranks))]
    for name in names:
        if name in ("auto", results.BASE):
            continue
        try:
            algorithm = algorithms.get(collective, name)
            if name not in algorithms.registry[collective]:
                algorithm = verify.admit(collective, algorithms.load(name), ranks, root=root, nodes=nodes)
        except (ValueError, OSError, SyntaxError, ImportError, AttributeError) as exc:
            raise click.UsageError(f"algorithm {name}: {exc}") from exc
        if unmet := algorithm.unmet(ranks, nodes=nodes):
            raise click.UsageError(f"{collective} {algorithm.name} cannot serve {ranks} ranks: {unmet}")


def wanted(names: str, own: tuple[str, ...]) -> list[str]:
    """The algorithms that were asked for, each once, in order."""
    listed = [name.strip() for name in names.split(",") if name.strip()]
    return list(dict.fromkeys([*listed, *own]))


# fmt: off
@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("collective", type=click.Choice(algorithms.COLLECTIVES), required=False,
                metavar="COLLECTIVE")
@click.option("-n", "--ranks", type=click.IntRange(1, 1_000_000), default=2, show_default=True,
              help="Ranks of a launch.")
@click.option("-b", "--from", "first", type=Size(), default="8", show_default=True, help="Smallest size.")
@click.option("-e", "--to", "last", type=Size(), default="64M", show_default=True, help="Largest size.")
@click.option("-f", "--factor", type=click.IntRange(2), default=2, show_default=True,
              help="From size to size.")
@click.option("--algorithms", "names", default="auto", show_default=True, metavar="NAMES",
              help="What to compare with the MPI's own, with commas between; auto is our selection.")
@click.option("--algorithm", "own", multiple=True, metavar="FILE.py:FUNCTION",
              help="And your own; repeatable.")
@click.option("--memory", type=click.Choice(["window", "ordinary", "both"]), default="both",
              show_default=True, help="Arrays from comm.empty, ordinary arrays, or both.")
@click.option("-d", "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True,
              help="Elements.")
@click.option("-o", "--op", type=click.Choice(OPS), default="sum", show_default=True, help="Reduction.")
@click.option("-r", "--root", type=click.IntRange(0), default=0, show_default=True,
              help="Root of bcast and reduce.")
@click.option("--in-place/--out-of-place", default=None,
              help="Where the result goes. [default: in place for allreduce, as gradients do]")
@launches_option
@click.option("--iters", type=click.IntRange(1, 1_000_000),
              help="Iterations per size and launch, not by --seconds.")
@click.option("--seconds", type=Finite(1), default=100, show_default=True,
              help="Time to fill with iterations, all launches together.")
@click.option("--call-overhead", is_flag=True,
              help="Instead: what our call adds to mpi4py's own where 8 bytes go native, in pairs.")
@show_option
@click.option("--format", type=click.Choice(list(SHOWN)), default="nccl", show_default=True,
              help="What is printed.")
@keep_option
@click.option("--plot", type=NewFile(), metavar="FILE.png", help="Draw the ratios.")
# fmt: on
def command(
    collective: str | None,
    ranks: int,
    first: int,
    last: int,
    factor: int,
    names: str,
    own: tuple[str, ...],
    memory: str,
    dtype: str,
    op: str,
    root: int,
    in_place: bool | None,
    launches: int,
    iters: int | None,
    seconds: float,
    call_overhead: bool,
    show: Path | None,
    format: str,
    keep: Path | None,
    plot: Path | None,
) -> None:
    """Measure COLLECTIVE: our algorithms against the MPI's own, in turn in one run, several runs.

    The timed region is what a program does: write the buffer, call, read the result. Results are checked.

    \b
    mpicoll bench allreduce                           8 B to 64 MiB on 2 ranks, about two minutes
    mpicoll bench bcast -n 4 --algorithms auto,binomial -b 1M -e 1M
    mpicoll bench allreduce --algorithm mine.py:ring  your own algorithm beside them
    mpicoll bench --show kept.json --format markdown  a kept result again
    """  # noqa: D301  click reads the \\b
    if plot and plot == keep:
        raise click.UsageError("--keep and --plot name one file")
    if plot:
        try:
            results.check_plot(plot)
        except RuntimeError as exc:
            raise click.ClickException(str(exc)) from exc
        except ValueError as exc:
            raise click.UsageError(str(exc)) from exc
    if show:
        result = kept(show, results.FORMAT)
    else:
        if collective is None:
            raise click.UsageError("which collective? One of " + ", ".join(algorithms.COLLECTIVES))
        if call_overhead and collective != "allreduce":
            raise click.UsageError("--call-overhead measures allreduce")
        if root >= ranks:
            raise click.UsageError(f"root {root} is no rank of {ranks}")
        asked = wanted(names, own)
        check(collective, asked, ranks, root)
        swept = [8] if call_overhead else [0] if collective == "barrier" else sizes(first, last, factor)
        if not swept:
            raise click.UsageError("no size: --from is larger than --to")
        spec = {
            "collective": collective,
            "sizes": swept,
            "dtype": "float64" if call_overhead else dtype,
            "op": op,
            "root": root,
            "in_place": collective == "allreduce" if in_place is None else in_place,
            "candidates": candidates(asked, memory),
            "iters": iters,
            "seconds": max(seconds / launches - START, 0),
            "call_overhead": call_overhead,
        }
        if call_overhead:
            spec |= {"op": "sum", "in_place": False, "candidates": candidates(["auto"], "ordinary")}
        reached = lambda line: results.readable(line["nbytes"])
        program = Program("mpicoll.cli.measure", results.FORMAT, len(swept), reached)
        result = measured(program, spec, ["-n", str(ranks)], launches)
    click.echo(SHOWN[format](result))
    if keep:
        save(result, keep)
    if plot:
        try:
            results.plot(result, plot)
        except (OSError, RuntimeError) as exc:  # a kind of picture may need a program that is not there
            raise click.ClickException(f"{plot}: not drawn: {exc}") from exc
    if any(row.wrong for row in results.rows(result)):
        raise click.ClickException("wrong results: see the column #wrong")
