"""A small training that stops when it is told and goes on where it was: run by test_slurm.py under Slurm.

    resumed.py FOLDER STEPS [STOP...]     at each step STOP rank 0 sends the batch script the signal

Every rank adds to a weight what depends on the step and the rank, so that a step lost or taken twice shows.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.data import replacing
from mpicoll.slurm import Notice


def main(folder, steps, *stops):
    comm = mpicoll.Intracomm(MPI.COMM_WORLD)
    saved, first, weights = folder / "weights.npy", 0, np.zeros(1000)
    if saved.exists():
        values = np.load(saved)
        first, weights = int(values[0]), values[1:]
    if comm.rank == 0:
        sys.stdout.write(f"start at step {first}, restart {os.environ.get('SLURM_RESTART_COUNT', '0')}\n")
        sys.stdout.flush()
    notice = Notice(comm)
    for step in range(first + 1, steps + 1):
        gradient = np.sin(weights + step * (comm.rank + 1))
        comm.Allreduce(MPI.IN_PLACE, gradient, op=mpicoll.op.AVG)
        weights -= 0.1 * gradient
        if comm.rank == 0 and step in stops:
            subprocess.run(
                ["scancel", "--batch", "--signal=USR1", os.environ["SLURM_JOB_ID"]], check=True, timeout=60
            )
        if stops:
            time.sleep(0.1)  # a step takes its time: the signal arrives some steps later
        told = notice.agreed()
        if told or step == steps:
            if comm.rank == 0:
                with replacing(saved) as temporary, temporary.open("wb") as file:
                    np.save(file, np.concatenate([[step], weights]))
            comm.Barrier()
        if told and step < steps:
            notice.requeue()
            return
    if comm.rank == 0:
        sys.stdout.write(f"done: {weights.sum():.17g}\n")


main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
