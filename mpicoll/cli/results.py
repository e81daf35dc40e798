"""What a benchmark measured: its statistics, and how they are shown. Pure: reads kept files anywhere.

A result is a dictionary that goes to JSON as it is::

    {"format": "mpicoll-bench-1", "command": [...], "spec": {...}, "machine": {...}, "versions": {...},
     "launches": [{"load": [...], "lines": [one per size, as measure.py prints them]}]}

All samples are kept: nanoseconds of each iteration, the slowest rank's. What is shown is computed from
them: the median of a launch's iterations, then the median of the launches; ratios are taken inside a launch,
where both sides ran in turn, and their spread is the lowest and the highest launch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mpicoll.io.files import replacing
from mpicoll.plans.algorithms import OWNED, REDUCTIONS, ROOTED

MARK = "mpicoll-measured "  # what a launch's rank 0 prints before a result and launches.py reads
FORMAT, STEP_FORMAT = "mpicoll-bench-1", "mpicoll-step-1"
COMMANDS = {FORMAT: "mpicoll bench", STEP_FORMAT: "mpicoll bench-step"}
BASE = "native"


@dataclass(frozen=True)
class Row:
    """One candidate at one size. Times are microseconds, bandwidths GB/s."""

    nbytes: int
    count: int
    candidate: str
    ran: str
    time: float
    algbw: float
    busbw: float
    wrong: int
    ratio: float | None
    lowest: float | None
    highest: float | None

    @property
    def compared(self) -> str:
        """The ratio with its spread; empty without a baseline."""
        if self.ratio is None or self.candidate == BASE:
            return "-"
        return f"{self.ratio:.2f} ({self.lowest:.2f}..{self.highest:.2f})"


def bus_factor(collective: str, size: int) -> float:
    """What nccl-tests multiply algbw by, so that it compares with the hardware's bandwidth."""
    if collective == "allreduce":
        return 2 * (size - 1) / size
    if collective in OWNED:
        return (size - 1) / size
    return 1.0


def rows(result: dict[str, Any]) -> Iterator[Row]:
    """Every size and candidate, in the order they were asked for."""
    launches = [launch["lines"] for launch in result["launches"]]
    size, collective = result["machine"]["ranks"], result["spec"]["collective"]
    for lines in zip(*launches, strict=True):
        for given in result["spec"]["candidates"]:
            label = given["label"]
            if not all(label in line["samples"] for line in lines):
                continue
            medians = [median(line["samples"][label]) for line in lines]
            ratios = [
                median(line["samples"][BASE]) / own
                for line, own in zip(lines, medians, strict=True)
                if BASE in line["samples"]
            ]
            seconds = median(medians) * 1e-9
            algbw = lines[0]["nbytes"] / seconds * 1e-9
            ran = dict.fromkeys(line["ran"][label] for line in lines)
            yield Row(
                lines[0]["nbytes"],
                lines[0]["count"],
                label,
                "/".join(ran),
                seconds * 1e6,
                algbw,
                algbw * bus_factor(collective, size),
                sum(line["wrong"][label] for line in lines),
                median(ratios) if ratios else None,
                min(ratios, default=None),
                max(ratios, default=None),
            )


def heading(result: dict[str, Any]) -> list[str]:
    """What was measured, where, and how to read it."""
    spec = result["spec"]
    timed = "the call" if spec["call_overhead"] else "write, call, read"
    place = "in place" if spec["in_place"] else "out of place"
    measured = f"{spec['collective']}, {ranks(result)}, {place}"
    return surroundings(result, measured, f"{timed} on every rank, the slowest rank's")


def ranks(result: dict[str, Any]) -> str:
    """How many ranks there were, and hosts if several."""
    machine = result["machine"]
    return f"{machine['ranks']} ranks" + (f" on {machine['hosts']} hosts" if machine["hosts"] > 1 else "")


def surroundings(result: dict[str, Any], measured: str, timed: str) -> list[str]:
    """The command, what it measured, where, and what its times are."""
    machine, launches = result["machine"], result["launches"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    loads = ", ".join(f"{launch['load'][0]:.2f}" for launch in launches)
    return [
        " ".join(result["command"]),
        f"{measured}; {result['date']}",
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}; load at the start: {loads}",
        f"{machine['library']}; {versions}",
        f"time: {timed}; median of each launch, median of {len(launches)} launches",
    ]


def troubles(result: dict[str, Any]) -> list[str]:
    """Why candidates are missing and figures doubtful, each once."""
    left_out = {
        f"{label} left out: {why}"
        for launch in result["launches"]
        for line in launch["lines"]
        for label, why in line["trouble"].items()
    }
    return [*sorted(left_out), *doubts(result)]


def doubts(result: dict[str, Any]) -> list[str]:
    """Whether the machine had other work: the load before the first launch, since later ones hold our own."""
    load = result["launches"][0]["load"][0]
    if load <= result["machine"]["cores"] / 2:
        return []
    return [f"the machine was not idle (load {load:.1f}): measure again when it is"]


def aligned(table: list[list[str]]) -> list[str]:
    """Lines of a table whose columns end below each other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.rjust, cells, widths)) for cells in table]


COLUMNS = {
    "size": "(B)",
    "count": "(elements)",
    "type": "",
    "redop": "",
    "root": "",
    "candidate": "",
    "ran": "",
    "time": "(us)",
    "algbw": "(GB/s)",
    "busbw": "(GB/s)",
    "#wrong": "",
    "times native": "(launches)",
}


def as_nccl(result: dict[str, Any]) -> str:
    """The table of nccl-tests, with one row per candidate and its ratio against the MPI's own collective."""
    spec, found = result["spec"], list(rows(result))
    redop = spec["op"] if spec["collective"] in REDUCTIONS else "none"
    root = str(spec["root"]) if spec["collective"] in ROOTED else "-1"
    table = [list(COLUMNS), list(COLUMNS.values())]
    for row in found:
        numbers = [f"{row.time:.2f}", f"{row.algbw:.3f}", f"{row.busbw:.3f}", str(row.wrong)]
        named = [spec["dtype"], redop, root, row.candidate, row.ran]
        table.append([str(row.nbytes), str(row.count), *named, *numbers, row.compared])
    drawn = aligned(table)
    lines = [f"# {line}" for line in [*heading(result), *troubles(result), "", *drawn[:2]]]
    lines += [f"  {line}" for line in drawn[2:]]
    added = [
        line["added"] * 1e-3 for launch in result["launches"] for line in launch["lines"] if "added" in line
    ]
    if added:
        spread = f"{median(added):+.2f} us ({min(added):+.2f}..{max(added):+.2f})"
        lines.append(f"# added by an 8-byte call that goes native to mpi4py's own: {spread}")
    else:
        for label in dict.fromkeys(row.candidate for row in found):
            mean = fmean(row.busbw for row in found if row.candidate == label)
            lines.append(f"# Avg bus bandwidth, {label}: {mean:.3f} GB/s")
    wrong = sum(row.wrong for row in found)
    lines.append(f"# Out of bounds values: {wrong} {'FAILED' if wrong else 'OK'}")
    return "\n".join(line.rstrip() for line in lines)


def as_markdown(result: dict[str, Any]) -> str:
    """One row per size: the MPI's own time, and each candidate's ratio against it."""
    found = list(rows(result))
    labels = list(dict.fromkeys(row.candidate for row in found if row.candidate != BASE))
    table = {(row.nbytes, row.candidate): row for row in found}
    lines = [
        f"| size | {BASE} (µs) | "
        + " | ".join(f"{label}: times {BASE} (launches)" for label in labels)
        + " |",
        "|---:|---:|" + "---:|" * len(labels),
    ]
    for nbytes in dict.fromkeys(row.nbytes for row in found):
        base = table.get((nbytes, BASE))
        cells = [table[nbytes, label] if (nbytes, label) in table else None for label in labels]
        shown = " | ".join(f"{cell.compared}, {cell.ran}" if cell else "-" for cell in cells)
        lines.append(f"| {readable(nbytes)} | {f'{base.time:.1f}' if base else '-'} | {shown} |")
    return "\n".join(lines)


def check_plot(path: Path) -> None:
    """RuntimeError where nothing can be drawn, ValueError where not to this kind of file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise RuntimeError("plots need matplotlib: pip install matplotlib") from exc
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ValueError(f"{path}: unknown kind of picture; known are .{', .'.join(sorted(kinds))}")


def plot(result: dict[str, Any], path: Path) -> None:
    """Ratio against the MPI's own over size, with the launches' spread, as an image."""
    from matplotlib.figure import Figure

    found = list(rows(result))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for label in dict.fromkeys(row.candidate for row in found if row.candidate != BASE):
        chosen = [row for row in found if row.candidate == label and row.ratio is not None]
        x = [row.nbytes for row in chosen]
        (line,) = axes.plot(x, [row.ratio for row in chosen], marker="o", markersize=3, label=label)
        lowest, highest = [row.lowest for row in chosen], [row.highest for row in chosen]
        axes.fill_between(x, lowest, highest, alpha=0.2, color=line.get_color())
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label=f"the MPI's own ({BASE})")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: readable(int(value)))
    axes.set_xlabel("size of the full vector")
    axes.set_ylabel("times as fast as the MPI's own")
    axes.set_ylim(bottom=0)
    machine = result["machine"]
    axes.set_title(f"{result['spec']['collective']}, {machine['ranks']} ranks, {machine['library']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def readable(nbytes: int) -> str:
    """8 B, 64 KiB, 1 MiB: exact where it is one of these, else with one decimal."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:g} {units[0]}" if value == int(value) else f"{value:.1f} {units[0]}"


def load(path: Path, expected: str = FORMAT) -> dict[str, Any]:
    """A kept result in the format that is expected; ValueError where the file is none."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        kind = result["format"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as exc:
        raise ValueError(f"{path} is not a result of {COMMANDS[expected]}") from exc
    if kind != expected:
        remedy = f": show it with {COMMANDS[kind]}" if str(kind) in COMMANDS else ""
        raise ValueError(f"{path} is in format {kind!r}, this command reads {expected!r}{remedy}")
    return result


def as_json(result: dict[str, Any]) -> str:
    """A line of JSON for each thing said once, and one for each size of each launch."""
    said = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items() if key != "launches"]
    launches = []
    for launch in result["launches"]:
        lines = ",\n".join(json.dumps(line, separators=(",", ":")) for line in launch["lines"])
        launches.append(f'{{"load": {json.dumps(launch["load"])}, "lines": [\n{lines}]}}')
    said.append(f'"launches": [{", ".join(launches)}]')
    return "{" + ",\n".join(said) + "}"


def save(result: dict[str, Any], path: Path) -> None:
    """Keep a result in a file."""
    with replacing(path) as temporary:
        temporary.write_text(as_json(result) + "\n")
