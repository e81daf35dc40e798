"""The program that ``mpicoll bench-step`` launches: training steps of several kinds in turn in one run.

    mpicoll run -n 2 -m mpicoll.cli.measure_step SPECIFICATION

Rank 0 prints lines of JSON, marked with `MARK`: one about the ranks, and what was measured. Before every step
the ranks meet in the MPI's own barrier. Each kind of step is made once before the next turn, and the order
changes from turn to turn, so that whatever else the machine does meets all of them alike. Every kind has
gradients in memory of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.cli.measure import communicators, tell
from mpicoll.cli.results_step import COMM
from mpicoll.train.buckets import Flat
from mpicoll.train.optim import SGD, Adam, DistributedOptimizer

WARMUP, WARMUP_PAIRS = 2, 50
CALIBRATION = 0.3  # seconds
SIDE = 256  # of the matrices whose products are the compute
LAYERS, WIDTH, BATCH = 4, 256, 32  # of the network whose step is short
SHAPES = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}  # of a layer

Arrays = Mapping[str, np.ndarray]


# -- overlap ---------------------------------------------------------------------------------------


class Overlap:
    """A step, its two halves each alone, and its forms that overlap them or do not.

    A step computes, writes the gradient of a bucket and says that it is ready, bucket by bucket, and ends
    with ``optimizer.step()``, where SGD with a rate of 0 makes the update. ``compute`` is this step by the
    optimizer of one rank, which sends nothing. ``comm`` is ``synchronize()`` of gradients that were written
    before, bucket after bucket; ``comm at once`` is the same by the optimizer that overlaps. So the blocking
    step is the sum of ``compute`` and ``comm``: nothing counts in neither half, or in both.

    Attributes
    ----------
    seconds
        What the compute of each bucket takes.
    wrong
        Elements of averaged gradients that were not what they should be, by kind of step.
    """

    def __init__(self, plain: MPI.Intracomm, ours: mpicoll.Intracomm, spec: dict[str, Any]) -> None:
        self.plain = plain
        count = int(spec["bucket_mb"] * (1 << 20)) // 4
        params = Flat({f"w{k}": (count,) for k in range(spec["buckets"])})
        alone = mpicoll.Intracomm(MPI.COMM_SELF)
        self.optimizers = {
            kind: DistributedOptimizer(
                SGD(params, 0.0), comm, bucket_cap_mb=spec["bucket_mb"], overlap=overlap
            )
            for kind, comm, overlap in (
                ("compute", alone, False),
                ("comm", ours, False),
                ("comm at once", ours, True),
                ("blocking", ours, False),
                ("overlapped", ours, True),
                ("default", ours, None),
            )
        }
        if self.optimizers["default"].overlap:
            del self.optimizers["default"]  # the same as overlapped
        self.names = list(reversed(list(params)))
        self.wrong = dict.fromkeys(self.optimizers, 0)
        self.seconds = spec["seconds"]
        if self.seconds == "comm":
            communication = np.median(self.samples(COMM, 5), axis=1).min() * 1e-9
            self.seconds = float(communication) / len(self.names)
        make = products if spec["compute"] == "matmul" else idle
        self.compute = make(plain, self.seconds)

    def samples(self, kinds: Sequence[str], iters: int) -> np.ndarray:
        """Make steps of these kinds in turn; nanoseconds[kind, turn] of the slowest rank."""
        times = np.zeros((len(kinds), iters), np.int64)
        for turn in range(-WARMUP, iters):
            for position in range(len(kinds)):
                which = (position + turn) % len(kinds)
                taken = self.iterate(kinds[which], turn)
                if turn >= 0:
                    times[which, turn] = taken
        self.plain.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
        return times

    def iterate(self, kind: str, turn: int) -> int:
        """Make a step of this kind; the nanoseconds it took."""
        optimizer = self.optimizers[kind]
        value = float(self.plain.rank + turn % 5 + 1)
        taken = (self._communicate if kind in COMM else self._step)(optimizer, value)
        mean = value if kind == "compute" else (self.plain.size - 1) / 2 + turn % 5 + 1
        for bucket in optimizer.gradients.buckets:
            self.wrong[kind] += int(np.count_nonzero(abs(bucket.flat - mean) > 1e-6 * mean))
        return taken

    def _step(self, optimizer: DistributedOptimizer, value: float) -> int:
        self.plain.Barrier()
        start = perf_counter_ns()
        for name in self.names:
            self.compute()
            optimizer.gradients[name][...] = value
            optimizer.grad_ready(name)
        optimizer.step()
        return perf_counter_ns() - start

    def _communicate(self, optimizer: DistributedOptimizer, value: float) -> int:
        for name in self.names:
            optimizer.gradients[name][...] = value
        self.plain.Barrier()
        start = perf_counter_ns()
        optimizer.synchronize()
        taken = perf_counter_ns() - start
        with optimizer.skip_synchronize():
            optimizer.step()
        return taken


def products(plain: MPI.Intracomm, seconds: float) -> Callable[[], None]:
    """Matrix products that take so long on the slowest rank while all compute; as many on every rank."""
    factor = np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32)
    result = np.empty_like(factor)
    made = 0
    plain.Barrier()
    start = now = perf_counter()
    while now - start < CALIBRATION:
        np.matmul(factor, factor, out=result)
        made, now = made + 1, perf_counter()
    count = max(1, round(seconds / plain.allreduce((now - start) / made, op=MPI.MAX)))

    def compute() -> None:
        for _ in range(count):
            np.matmul(factor, factor, out=result)

    return compute


def idle(plain: MPI.Intracomm, seconds: float) -> Callable[[], None]:
    """What a rank does for so long while a device computes."""
    return lambda: time.sleep(seconds)


def overlap(spec: dict[str, Any], plain: MPI.Intracomm, ours: mpicoll.Intracomm) -> dict[str, Any]:
    """Time every kind of step; nanoseconds of the slowest rank."""
    steps = Overlap(plain, ours, spec)
    kinds = list(steps.optimizers)
    times = steps.samples(kinds, spec["iters"])
    return {
        "seconds": steps.seconds,
        "samples": {kind: row.tolist() for kind, row in zip(kinds, times, strict=True)},
        "wrong": {kind: plain.allreduce(wrong) for kind, wrong in steps.wrong.items()},
    }


# -- overhead --------------------------------------------------------------------------------------


class Pair:
    """A step of a small network with Adam's update, by one rank for itself and by all ranks together."""

    def __init__(self, plain: MPI.Intracomm, ours: mpicoll.Intracomm) -> None:
        shapes = {f"{kind}{k}": shape for k in range(LAYERS) for kind, shape in SHAPES.items()}
        self.lone, self.shared, self.gradients = Flat(shapes), Flat(shapes), Flat(shapes)
        self.lone.flat[:] = np.random.default_rng(0).standard_normal(self.lone.flat.size) / 16
        self.shared.flat[:] = self.lone.flat
        self.optimizer = Adam(self.lone, 1e-3)
        self.distributed = DistributedOptimizer(Adam(self.shared, 1e-3), ours)
        self.batch = np.random.default_rng(plain.rank).standard_normal((BATCH, WIDTH), np.float32)

    def without(self) -> None:
        """Make a step for itself."""
        backward(self.batch, self.lone, self.gradients, lambda name: None)
        self.optimizer.step(self.gradients)

    def along(self) -> None:
        """Make a step with the other ranks."""
        optimizer = self.distributed
        backward(self.batch, optimizer.params, optimizer.gradients, optimizer.grad_ready)
        optimizer.step()

    def replica(self) -> np.ndarray:
        """Parameters that are the same on every rank."""
        return self.shared.flat


def backward(x: np.ndarray, params: Arrays, gradients: Arrays, ready: Callable[[str], None]) -> None:
    """Gradients of half the mean square of the network's outputs, each said to be ready once it is."""
    values = [x]
    for k in range(LAYERS):
        values.append(np.tanh(values[-1] @ params[f"w{k}"] + params[f"b{k}"]))
    delta = values[-1] / BATCH
    for k in reversed(range(LAYERS)):
        delta = delta * (1 - values[k + 1] ** 2)
        np.matmul(values[k].T, delta, out=gradients[f"w{k}"])
        ready(f"w{k}")
        delta.sum(0, out=gradients[f"b{k}"])
        ready(f"b{k}")
        delta = delta @ params[f"w{k}"].T


def overhead(spec: dict[str, Any], plain: MPI.Intracomm, ours: mpicoll.Intracomm) -> dict[str, Any]:
    """Pairs of a step without the other ranks and one with them, one directly after the other."""
    pairs: dict[str, Any] = {"DistributedOptimizer": Pair(plain, ours)}
    if spec["against"] == "ddp":
        from mpicoll.cli.measure_ddp import TorchPair  # here: only who compares needs PyTorch

        pairs["DistributedDataParallel"] = TorchPair(plain, LAYERS, WIDTH, BATCH)
    times = np.zeros((len(pairs), 2, spec["iters"]), np.int64)
    for turn in range(-WARMUP_PAIRS, spec["iters"]):
        for pair, kept in zip(pairs.values(), times, strict=True):
            for which in (turn % 2, 1 - turn % 2):
                step = pair.along if which else pair.without
                plain.Barrier()
                start = perf_counter_ns()
                step()
                taken = perf_counter_ns() - start
                if turn >= 0:
                    kept[which, turn] = taken
    return {
        "samples": {label: _worst(plain, kept) for label, kept in zip(pairs, times, strict=True)},
        "wrong": {label: _unlike(plain, pair.replica()) for label, pair in pairs.items()},
    }


def _worst(plain: MPI.Intracomm, times: np.ndarray) -> dict[str, list[int]]:
    """Samples of the rank to whose step most is added."""
    added = plain.allgather(float(np.median(times[1] - times[0])))
    without, along = plain.bcast(times.tolist(), root=added.index(max(added)))
    return {"without": without, "with": along}


def _unlike(plain: MPI.Intracomm, replica: np.ndarray) -> int:
    """Parameters that are not those of rank 0, over all ranks."""
    return int(plain.allreduce(int(np.count_nonzero(replica != plain.bcast(replica)))))


def main() -> None:
    """Measure what the specification in the first argument says."""
    spec = json.loads(sys.argv[1])
    measures = {"overlap": overlap, "overhead": overhead}
    vectors = int(spec["buckets"] * spec["bucket_mb"] * (1 << 20)) if spec["what"] == "overlap" else 0
    plain, ours = communicators(5 * vectors)
    tell(plain, iter([measures[spec["what"]](spec, plain, ours)]))


if __name__ == "__main__":
    main()
