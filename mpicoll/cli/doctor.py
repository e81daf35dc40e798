"""``mpicoll doctor``: is this machine ready, and if not, why not. MPI starts in children only."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from mpicoll import __version__
from mpicoll.cli import diagnose, fabric, gpus, launcher, leftovers, pmi, probe, run
from mpicoll.cli.finding import LEVELS, Finding
from mpicoll.cli.launch import THREADS, Machine, prepare

SINGLE = """
from mpi4py import MPI
names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
print(names.get(MPI.Query_thread(), "MULTIPLE"))
"""
PAIR = """
from mpi4py import MPI
world = MPI.COMM_WORLD
print(f"size={world.allreduce(1)};")
"""
MARKS = {"ok": ("+", "green"), "note": ("-", "dim"), "warning": ("!", "yellow"), "error": ("x", "bold red")}


Launcher = tuple[str, launcher.Mpi, str | None]  # path, its MPI, srun's plugin


def gather(path: str | None = None) -> dict[str, Any]:
    """Facts about this Python, the MPIs it could meet, and this machine."""
    loaded = probe.loaded()
    broken = "error" in loaded
    libmpi = None if broken else next(iter(loaded["libmpi"]), None)
    found = list(probe.launchers(libmpi, path=path))
    chosen = None if broken else choose(loaded, libmpi)
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "mpicoll": f"{__version__}, {Path(__file__).parents[1]}",
        "mpi4py": mpi4py_origin(),
        "loaded": loaded,
        "libraries": probe.libraries(),
        "mpicc": shutil.which("mpicc", path=path),
        "launchers": [(str(where), mpi.name, mpi.version) for where, mpi in found],
        "chosen": (chosen[0], chosen[2]) if chosen else None,
        "launch": {} if broken else try_launch(loaded, chosen, path),
        "init": None if broken else try_alone(),
        "shm": {"size": shm.total if shm else 0, "free": shm.free if shm else 0},
        "leftovers": {str(path): about.st_blocks * 512 for path, about in leftovers.abandoned().items()},
        "cores": {"physical": probe.cores(), "quota": probe.quota()},
        "threads": {name: os.environ[name] for name in THREADS if name in os.environ},
        "fabric": fabric.examine(),
        "gpus": gpus.examine(libmpi),
        "pmi": pmi.examine(os.environ),
        "slurm": slurm(),
    }


def mpi4py_origin() -> dict[str, str] | None:
    """Version of mpi4py and where it came from: a PyPI wheel fits many MPIs, a site's build its own."""
    try:
        distribution = metadata.distribution("mpi4py")
    except metadata.PackageNotFoundError:
        return None
    where = str(distribution.locate_file("mpi4py"))
    tags = distribution.read_text("WHEEL") or ""
    if (distribution.read_text("INSTALLER") or "").strip() == "conda":
        origin = "conda package"
    elif "manylinux" in tags or "musllinux" in tags or "macosx" in tags:
        origin = "wheel from PyPI"
    elif "dist-packages" in where and not tags:
        origin = "the distribution's package"
    else:
        origin = "built for this site's MPI"
    return {"version": distribution.version, "origin": origin, "path": where}


def try_alone() -> dict[str, str]:
    """MPI_Init in one process: its thread level, or what went wrong."""
    began = time.time()
    code, out, err = probe.output([sys.executable, "-c", SINGLE], env=probe.unlaunched(os.environ))
    leftovers.remove(began)  # without mpirun, Open MPI leaves its shared memory
    if code == 0:
        return {"thread": out.split()[-1]}
    return {"error": next(iter(err.strip().splitlines()), f"exit code {code}")}


def choose(loaded: dict[str, Any], libmpi: str | None) -> Launcher | None:
    """The launcher that `mpicoll run` takes; None where none fits, which the list of launchers tells."""
    try:
        return run.find(launcher.library(loaded["library"]), libmpi, Machine.here().allocation, None)
    except click.ClickException:
        return None


def try_launch(loaded: dict[str, Any], chosen: Launcher | None, path: str | None) -> dict[str, Any]:
    """Start 2 ranks with the launcher `mpicoll run` takes and with the first mpirun on the PATH."""
    mpi, machine = launcher.library(loaded["library"]), Machine.here()
    program = [sys.executable, "-c", PAIR]
    environ = probe.unlaunched(os.environ)
    tried = [chosen] if chosen else []
    first = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if first and not (chosen and same_file(first, chosen[0])):
        tried.append((first, probe.identify(first), None))
    results = {}
    for where, starter, plugin in tried:
        launch = prepare(
            where, starter, mpi, 2, program, machine, oversubscribe=True, threads=1, plugin=plugin
        )
        code, out, err = probe.output(launch.argv, timeout=30, env={**environ, **launch.env})
        sizes = [int(size) for size in re.findall(r"size=(\d+);", out)]
        words = " / ".join(line.strip() for line in err.splitlines() if line.strip(" -\n"))
        results[where] = {"code": code, "sizes": sizes, "words": words[:400]}
    return results


def same_file(one: str, other: str) -> bool:
    """Whether two launchers are one: mpirun and mpiexec of a folder often are."""
    return (Path(one).parent, Path(one).resolve()) == (Path(other).parent, Path(other).resolve())


def slurm() -> dict[str, str] | None:
    """Slurm's version, the MPI plugins of its srun, and the one it takes by itself."""
    if shutil.which("srun") is None:
        return None
    code, version, _ = probe.output(["srun", "--version"])
    plugins = "".join(probe.output(["srun", "--mpi=list"])[1:])
    config = probe.output(["scontrol", "show", "config"])[1]
    default = re.search(r"^MpiDefault\s*=\s*(\w+)", config, re.MULTILINE)
    # inside a step this variable says what started it
    chosen = None if "SLURM_STEP_ID" in os.environ else os.environ.get("SLURM_MPI_TYPE")
    return {
        "version": version.strip() if code == 0 else "",
        "plugins": plugins,
        "default": chosen or (default[1] if default else ""),
    }


def show(findings: list[Finding]) -> None:
    """Print findings; plain where the output is not a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        mark, style = MARKS[finding.level]
        console.print(
            Text(f"{mark} {finding.topic:<14} {finding.text}", style="" if finding.level == "ok" else style)
        )
        if finding.cause:
            console.print(Text(f"    cause   {finding.cause}"))
            console.print(Text(f"    remedy  {finding.remedy}"))
    count = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    if count["error"]:
        console.print(Text(f"{count['error']} broken, {count['warning']} to look at", style="bold red"))
    else:
        console.print(
            Text(f"ready; {count['warning']} to look at" if count["warning"] else "ready", style="green")
        )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print facts and findings as JSON.")
def command(as_json: bool) -> None:
    """Examine this machine: Python, mpi4py, MPI libraries, launchers, memory, cores, networks, GPUs, Slurm.

    Starts MPI only in child processes with a time limit. The exit code is 1 where something is broken.
    """
    facts = gather()
    findings = diagnose.diagnose(facts)
    broken = any(finding.level == "error" for finding in findings)
    if as_json:
        click.echo(
            json.dumps(
                {"ready": not broken, "findings": list(map(asdict, findings)), "facts": facts}, indent=1
            )
        )
    else:
        show(findings)
    sys.exit(1 if broken else 0)
