"""Whether a process was started as one of several ranks and yet is alone in its MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import LaunchError

SIZES = {  # what launchers tell their ranks
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's mpiexec or srun",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def check(size: int, library: str) -> None:
    """Refuse to be one of several singletons.

    A launcher that belongs to another MPI starts N ranks each of which believes to be the only one: N times
    the work, and exit code 0.

    Parameters
    ----------
    size
        Of COMM_WORLD.
    library
        The name of the MPI that is loaded.

    Raises
    ------
    LaunchError
        If the launcher of this very process started more ranks than there are.
    """
    if size > 1:
        return
    parent = _environment(os.getppid())
    for variable, launcher in SIZES.items():
        told = os.environ.get(variable, "")
        # what our parent has as well was not told to us: a rank may start other programs
        if told.isdigit() and int(told) > 1 and variable not in parent:
            raise LaunchError(
                f"{variable}={told}: {launcher} started {told} ranks, but this one is alone in {library}; "
                "the launcher belongs to another MPI or lacks its plugin. Start with `mpicoll run`, or with "
                "the launcher of this MPI; `mpicoll doctor` shows which one that is"
            )


def _environment(pid: int) -> Mapping[str, str]:
    """The environment that a process was started with; empty where it is not ours to read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
