"""Look at this machine and at the MPI that mpi4py would load, without loading it into this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicoll.cli import launcher

# Run by a child: loading an MPI can crash or hang, and even without MPI_Init it leaves traces in a process.
LOADED = """
import json, re, sys
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
maps = {line.split()[-1] for line in open("/proc/self/maps")} if sys.platform == "linux" else set()
name = re.compile(r".*/(libmpi(_\\w+)?|libmpich\\w*)\\.so[.\\d]*")
found = sorted(filter(name.fullmatch, maps))
print(json.dumps({"library": MPI.Get_library_version().strip("\\0 \\n"), "libmpi": found,
                  "mpi4py": mpi4py.__version__, "file": MPI.__file__}))
"""


def output(
    argv: Sequence[str], timeout: float = 20, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command; a code of -1 where it cannot run or takes too long."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout, env=env, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return -1, "", f"{argv[0]}: no answer within {timeout:g} s"
    except OSError as error:
        return -1, "", f"{argv[0]}: {error.strerror}"
    return done.returncode, done.stdout, done.stderr


def loaded(python: str = sys.executable) -> dict[str, Any]:
    """What mpi4py of this Python loads: library version string, files, versions; or an ``error``."""
    code, out, err = output([python, "-c", LOADED], env=unlaunched(os.environ))
    if code == 0:
        facts: dict[str, Any] = json.loads(out.splitlines()[-1])
        return facts
    lines = [line for line in err.strip().splitlines() if line.strip()]
    # mpi4py lists every file it tried: its first line names the trouble
    start = next((i for i, line in enumerate(lines) if line.split(":")[0].endswith("Error")), len(lines) - 1)
    return {"error": lines[start].strip() if lines else f"exit code {code}"}


def unlaunched(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an MPI launcher put there, so that a child is not taken for a rank."""
    prefixes = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "PRTE_LAUNCHED", "HYDI_")
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def identify(path: Path | str) -> launcher.Mpi:
    """The MPI a launcher belongs to, by its own word."""
    _, out, err = output([str(path), "--version"], timeout=10, env=as_root(os.environ))
    return launcher.launcher(out + err)


def as_root(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with which Open MPI's mpirun runs for root."""
    return {**environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def launchers(
    libmpi: str | None, python: str = sys.executable, path: str | None = None
) -> Iterator[tuple[Path, launcher.Mpi]]:
    """Every launcher found, with its MPI, the likeliest first; links to the same file are listed once."""
    seen: set[Path] = set()
    search = os.environ.get("PATH", "") if path is None else path
    for candidate in launcher.candidates(libmpi, python, search):
        target = candidate.parent / candidate.resolve().name  # mpirun and mpiexec are often one file
        if target not in seen:
            seen.add(target)
            yield candidate, identify(candidate)


def cores() -> int:
    """Physical cores this process may use: its affinity, hardware threads of a core counted once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        shared = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(shared.read_text().strip() if shared.exists() else str(cpu))
    return len(siblings)


def infiniband() -> list[str]:
    """InfiniBand and RoCE devices of this machine."""
    root = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
