"""Are these ranks one job, of the MPI and the size they should be? Batch scripts ask before the program runs.

    srun --mpi=pmix python -m mpicoll.cli.ready openmpi 8 4

With a launcher that an MPI does not understand every process is rank 0 of 1 and ends with code 0: a job of
eight trainings that write over each other's checkpoints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import mpi4py

from mpicoll.cli import launcher

RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def first(environ: Mapping[str, str]) -> bool:
    """Whether this process is the one to speak, by what its launcher says: MPI may not have started."""
    rank = next((environ[name] for name in RANKS if name in environ), environ.get("SLURM_PROCID", "0"))
    return rank == "0"


def unlike(wanted: str, loaded: launcher.Mpi) -> str | None:
    """Why the MPI that is loaded is not the one the script was made for."""
    if loaded.name == wanted:
        return None
    return (
        f"mpi4py of {sys.executable} loads {loaded}, and this script is for {launcher.TITLES[wanted]}: "
        "load that MPI's module or environment, or change `mpi` in the profile and render the script again"
    )


def apart(ranks: int, nodes: int, size: int, hosts: int, loaded: launcher.Mpi) -> str | None:
    """Why this is not one job of so many ranks on so many nodes."""
    if size == 1 < ranks:
        return (
            f"each of {ranks} processes is rank 0 of 1: {loaded} does not understand what started them; "
            "use the plugin of srun that it was built for, or its own launcher"
        )
    if size != ranks:
        return f"{size} ranks were started, expected {ranks}"
    if hosts != nodes:
        return f"{ranks} ranks run on {hosts} nodes, expected {nodes}"
    return None


def main(wanted: str, ranks: int, nodes: int) -> int:
    """Check, speak once, and return the exit code."""
    mpi4py.rc.initialize = False  # the wrong MPI may abort in MPI_Init: name it before
    from mpi4py import MPI

    loaded = launcher.library(MPI.Get_library_version())
    problem = unlike(wanted, loaded)
    if problem is None:
        MPI.Init_thread()
        world = MPI.COMM_WORLD
        hosts = len(set(world.allgather(MPI.Get_processor_name())))
        problem = apart(ranks, nodes, world.size, hosts, loaded)
        if problem is None and world.rank == 0:
            sys.stdout.write(f"{ranks} ranks on {hosts} node{'s' * (hosts > 1)}, {loaded}\n")
        MPI.Finalize()
    if problem and first(os.environ):
        sys.stderr.write(f"mpicoll: {problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:4])))
