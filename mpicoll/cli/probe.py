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
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, errors="replace"
        )
    except OSError as error:
        return -1, "", f"{argv[0]}: {error.strerror}"
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.terminate()  # a launcher ends its ranks first
        try:
            child.communicate(timeout=3)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return -1, "", f"{argv[0]}: no answer within {timeout:g} s"
    return child.returncode, out, err


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
    # SLURM_MPI_TYPE, left by srun, would give another MPI's daemons its plugin
    prefixes = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "PRTE_LAUNCHED", "HYDI_", "SLURM_MPI_TYPE")
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(prefixes) or name.startswith("PMIX_MCA_")
    }


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
    seen: set[tuple[Path, int]] = set()
    search = os.environ.get("PATH", "") if path is None else path
    for candidate in launcher.candidates(libmpi, python, search):
        same = candidate.parent, candidate.stat().st_size  # mpirun and mpiexec: a link, or a wheel's copy
        if same not in seen:
            seen.add(same)
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


def quota() -> float | None:
    """CPUs the control group allows, None where it sets no limit."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        path = Path("/sys/fs/cgroup") / name
        if path.exists():
            period = path.with_name("cpu.cfs_period_us")
            return parse_quota(path.read_text() + (period.read_text() if period.exists() else ""))
    return None


def parse_quota(text: str) -> float | None:
    """CPUs from ``"200000 100000"``; ``"max 100000"`` and ``"-1 100000"`` mean no limit."""
    allowed, period = (text.split() + ["100000"])[:2]
    return int(allowed) / int(period) if allowed.isdigit() else None


def libraries() -> dict[str, str]:
    """Every MPI library within reach, and how it is reached."""
    places = [(sys.prefix, "this environment")]
    places += [(os.environ["CONDA_PREFIX"], "conda")] if "CONDA_PREFIX" in os.environ else []
    folders = [(Path(prefix) / "lib", where) for prefix, where in places]
    folders += [
        (Path(entry), "LD_LIBRARY_PATH")
        for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if entry
    ]
    found: dict[str, str] = {}
    for folder, where in folders:
        sizes = {path.stat().st_size: path.resolve() for path in sorted(folder.glob("libmpi.so*"))}
        for path in sizes.values():  # a wheel holds copies where others have links
            found.setdefault(str(path), where)
    for name in parse_ldconfig(output(["/sbin/ldconfig", "-p"])[1]):
        found.setdefault(str(Path(name).resolve()), "ldconfig")
    return found


def parse_ldconfig(text: str) -> list[str]:
    """Paths of MPI libraries in the output of ``ldconfig -p``."""
    pairs = (line.split(" => ") for line in text.splitlines() if " => " in line)
    names = ("libmpi.so", "libmpich.so")
    return [path.strip() for name, path in pairs if name.strip().startswith(names)]
