"""Give each rank of a node a GPU of its own, and let it see the others: run between launcher and program.

    srun ... python -m mpicoll.cli.place python script.py

The list of visible devices is rotated by the rank's place on its node. So the program uses device 0
everywhere, and CUDA can still open the memory of the node's other ranks, which it cannot where each rank sees
only its own device.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

LISTS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Slurm's comes last: under mpirun and mpiexec it is that of the daemon which started the rank.
PLACES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MVP_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
)


def local_rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank's place on its node, None where no launcher tells it."""
    return next((int(environ[name]) for name in PLACES if environ.get(name, "").isdecimal()), None)


def place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the device lists with this rank's own device in front.

    Raises
    ------
    ValueError
        Where no device is visible, or nothing tells the rank's place.
    """
    local = local_rank(environ)
    if local is None:
        raise ValueError(f"nothing tells this rank's place on its node: none of {', '.join(PLACES)} is set")
    lists = {name: environ[name].split(",") for name in LISTS if environ.get(name)}
    if not lists:
        raise ValueError(
            f"no GPU is visible: neither {' nor '.join(LISTS)} is set; does the job ask for --gpus-per-node?"
        )
    found = {}
    for name, devices in lists.items():
        own = local % len(devices)
        found[name] = ",".join(devices[own:] + devices[:own])
    return found


def main(argv: list[str]) -> None:
    """Become the program, with its device in front."""
    try:
        devices = place(os.environ)
    except ValueError as error:
        # what is true of a node is said once for it
        sys.exit(1 if local_rank(os.environ) else f"mpicoll: {platform.node()}: {error}")
    os.execvpe(argv[0], argv, {**os.environ, **devices})


if __name__ == "__main__":
    main(sys.argv[1:])
