"""Launches of a benchmark: the same program on the same ranks several times, and what it says each time."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mpicoll import __version__
from mpicoll.cli import results
from mpicoll.cli.values import NewFile

RUN = (sys.executable, "-c", "from mpicoll.cli import main; main()", "run", "--quiet")
TOLD = re.compile("MPICOLL_|OMPI_MCA_|MPICH_|MPIR_|UCX_|FI_|I_MPI_|(OMP|OPENBLAS|MKL)_NUM_THREADS")


launches_option = click.option(
    "--launches", type=click.IntRange(1), default=5, show_default=True, help="Runs; a single one misleads."
)
show_option = click.option(
    "--show",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Show a kept result again instead of measuring.",
)
keep_option = click.option(
    "-w",
    "--keep",
    type=NewFile(),
    metavar="FILE.json",
    help="Keep everything measured, all samples.",
)


@dataclass(frozen=True)
class Program:
    """What the ranks of a launch run, and what they print.

    Attributes
    ----------
    module
        Run with the specification as its argument; rank 0 prints marked lines of JSON: first what there is
        to know of the ranks, then what was measured.
    format
        Of the result that is kept.
    lines
        How many lines of what was measured a launch prints.
    label
        What a line is about, for those who watch.
    packages
        Whose versions are kept.
    """

    module: str
    format: str
    lines: int
    label: Callable[[dict[str, Any]], str]
    packages: tuple[str, ...] = ("mpi4py", "numpy")


def machine() -> dict[str, Any]:
    """What a reader must know of the machine to judge the figures; no names of hosts or people."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = models[0] if models else cpu
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of what takes part besides the MPI."""
    found = {"Python": platform.python_version(), "mpicoll": __version__}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def launch(
    program: Program,
    spec: dict[str, Any],
    options: list[str],
    told: Callable[[dict[str, Any]], None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One launch: what it says of the ranks, and its lines, each told of as it comes."""
    argv = [*RUN, *options, "-m", program.module, json.dumps(spec)]
    about: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for text in job.stdout:
            _, mark, line = text.partition(results.MARK)
            if not mark:
                sys.stderr.write(text)
            elif not about:
                about = json.loads(line)
            else:
                lines.append(json.loads(line))
                told(lines[-1])
    if job.returncode or len(lines) != program.lines:
        told_above = f"a launch ended early, with exit code {job.returncode}: see its messages above"
        raise click.ClickException(told_above)
    return about, lines


def measured(program: Program, spec: dict[str, Any], options: list[str], launches: int) -> dict[str, Any]:
    """All launches by ``mpicoll run`` with these options, with a bar where somebody watches."""
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    about: dict[str, Any] = {}
    done = []
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[label]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=launches * program.lines, label="")
        for number in range(launches):
            bar.update(task, description=f"launch {number + 1} of {launches}", label="starting")
            load = os.getloadavg()

            def told(line: dict[str, Any]) -> None:
                bar.update(task, advance=1, label=program.label(line))

            about, lines = launch(program, {**spec, "launch": number}, options, told)
            done.append({"load": load, "lines": lines})
    return {
        "format": program.format,
        "command": ["mpicoll", *sys.argv[1:]],
        "date": date,
        "spec": spec,
        "machine": {**machine(), **about},
        "versions": versions(program.packages),
        "environment": {name: value for name, value in sorted(os.environ.items()) if TOLD.match(name)},
        "launches": done,
    }


def save(result: dict[str, Any], path: Path) -> None:
    """Keep a result, which was shown already: whatever happens now, it is not lost."""
    try:
        results.save(result, path)
    except OSError as exc:
        raise click.ClickException(f"{path}: not kept: {exc.strerror}") from exc


def kept(path: Path, format: str) -> dict[str, Any]:
    """A result that was kept, in this format."""
    try:
        return results.load(path, format)
    except ValueError as exc:
        raise click.ClickException(str(exc)) from exc
