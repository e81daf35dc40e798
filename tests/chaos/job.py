"""A small training run that saves at every other step, and resumes: python job.py FOLDER STEPS"""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

JOBS = Path(__file__).parents[2] / "jobs"
sys.path.insert(0, str(JOBS))

from ngram import Model  # noqa: E402

import mpicoll  # noqa: E402
from mpicoll.io.checkpoint import Checkpoints  # noqa: E402
from mpicoll.io.sampler import Sampler  # noqa: E402
from mpicoll.train.buckets import Buckets  # noqa: E402
from mpicoll.train.optim import Adam  # noqa: E402

CONTEXT, BATCH, SEED = 4, 30, 1


def main(folder: str, steps: int) -> None:
    comm = mpicoll.Intracomm(MPI.COMM_WORLD)
    text = np.frombuffer((JOBS / "train_text.py").read_bytes(), np.uint8)
    model = Model(CONTEXT, 16, 512, SEED)
    gradients = Buckets({**model.params, "loss": np.zeros(1, np.float32)}, comm)
    optimizer = Adam(model.params, 1e-3)
    sampler = Sampler(len(text) - CONTEXT, BATCH, seed=SEED, rank=comm.rank, size=comm.size)
    state = {"params": model.params, "optimizer": optimizer.state_dict()["slots"]}
    with Checkpoints(folder, comm, keep=2, model="chaos") as checkpoints:
        saved = checkpoints.load(state)
        optimizer.steps = saved.step if saved else 0
        losses = saved.extra if saved else []
        tell(comm, "resumed", optimizer.steps, *comm.allgather(os.getpid()))
        while optimizer.steps < steps:
            starts = sampler[optimizer.steps]
            windows = text[starts[:, None] + np.arange(CONTEXT + 1)]
            model.backward(windows, comm.size / BATCH, gradients)
            gradients.average()
            optimizer.step(gradients)
            losses.append(float(gradients["loss"][0]))
            if optimizer.steps % 2 == 0:
                checkpoints.save(optimizer.steps, state, losses, wait=optimizer.steps % 4 == 0)
            tell(comm, "step", optimizer.steps)
    digest = hashlib.sha256(model.params.flat.tobytes() + str(losses).encode()).hexdigest()
    tell(comm, "done", *comm.allgather(digest))


def tell(comm: mpicoll.Intracomm, *words: object) -> None:
    if comm.rank == 0:
        print(*words, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
