"""What ``mpicoll bench-step`` measured: its statistics, and how they are shown. Pure, as results.py is.

A line of a launch holds samples in nanoseconds: of each kind of step (overlap), or of steps without the other
ranks and with them, in pairs (overhead). What is shown is computed from them launch by launch; the median of
the launches, and the lowest and the highest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from mpicoll.cli import results

COMM = ("comm", "comm at once")

Line = dict[str, Any]


def spread(values: Iterable[float], digits: int) -> str:
    """The median with the lowest and the highest."""
    found = list(values)
    middle, lowest, highest = (f"{value:.{digits}f}" for value in (median(found), min(found), max(found)))
    return f"{middle} ({lowest}..{highest})"


def milliseconds(samples: list[int]) -> float:
    """The median of a launch."""
    return median(samples) * 1e-6


def hidden(line: Line, kind: str) -> float:
    """The share of the communication, or of the compute where that is less, that a step does not wait for.

    The communication is that of the better way: what another way would save is not hidden.
    """
    took: dict[str, float] = {name: milliseconds(samples) for name, samples in line["samples"].items()}
    compute, comm = took["compute"], min(took[name] for name in COMM)
    return (compute + comm - took[kind]) / min(compute, comm)


def times_blocking(line: Line, kind: str) -> float:
    """How long a step takes, as a multiple of the blocking one."""
    return milliseconds(line["samples"][kind]) / milliseconds(line["samples"]["blocking"])


def added(line: Line, label: str) -> float:
    """Milliseconds that the other ranks add to a step: the median difference of a pair."""
    pairs = zip(line["samples"][label]["with"], line["samples"][label]["without"], strict=True)
    return median(along - without for along, without in pairs) * 1e-6


def table(result: dict[str, Any]) -> Iterator[list[str]]:
    """The head of the table, then a row for each kind of step, or for each way to make steps together."""
    lines = [line for launch in result["launches"] for line in launch["lines"]]
    rows = _kinds if result["spec"]["what"] == "overlap" else _pairs
    yield from rows(lines)


def _kinds(lines: list[Line]) -> Iterator[list[str]]:
    yield ["step", "time (ms)", "hidden", "times blocking"]
    for kind in lines[0]["samples"]:
        time = spread((milliseconds(line["samples"][kind]) for line in lines), 1)
        if kind in ("compute", *COMM):
            yield [kind, time, "-", "-"]
        else:
            share = spread((hidden(line, kind) for line in lines), 2)
            yield [kind, time, share, spread((times_blocking(line, kind) for line in lines), 2)]


def _pairs(lines: list[Line]) -> Iterator[list[str]]:
    yield ["step with", "without it (ms)", "with it (ms)", "added (ms)"]
    for label in lines[0]["samples"]:
        without, along = (
            spread((milliseconds(line["samples"][label][side]) for line in lines), 2)
            for side in ("without", "with")
        )
        yield [label, without, along, spread((added(line, label) for line in lines), 2)]


def heading(result: dict[str, Any]) -> list[str]:
    """What was measured, where, and how to read it."""
    spec = result["spec"]
    if spec["what"] == "overlap":
        compute = median(line["seconds"] for launch in result["launches"] for line in launch["lines"])
        size = results.readable(int(spec["bucket_mb"] * (1 << 20)))
        measured = (
            f"{spec['buckets']} buckets of {size}, {compute * 1e3:.3g} ms of {spec['compute']} for each"
        )
        timed = "the slowest rank's"
    else:
        measured = f"{spec['iters']} pairs of steps of a small network"
        timed = "that of the rank to which most is added"
    threads = result["machine"]["threads"] or "not limited"
    where = f"{results.ranks(result)}, BLAS threads: {threads}"
    return results.surroundings(result, f"{spec['what']}, {where}; {measured}", timed)


def as_table(result: dict[str, Any]) -> str:
    """The table with all that belongs to it."""
    head, *rows = results.aligned(list(table(result)))
    about = [*heading(result), *results.doubts(result), "", head]
    lines = [*(f"# {line}" for line in about), *(f"  {row}" for row in rows)]
    lines.append(f"# Wrong values: {wrong(result)} {'FAILED' if wrong(result) else 'OK'}")
    return "\n".join(line.rstrip() for line in lines)


def as_markdown(result: dict[str, Any]) -> str:
    """The table alone."""
    head, *rows = table(result)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---", *["---:"] * 3], *rows])


def wrong(result: dict[str, Any]) -> int:
    """Averaged gradients, or parameters, that were not what they should be."""
    return sum(sum(line["wrong"].values()) for launch in result["launches"] for line in launch["lines"])
