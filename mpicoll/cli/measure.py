"""The program that ``mpicoll bench`` launches: all candidates in turn in one run, on every rank.

    mpicoll run -n 2 -m mpicoll.cli.measure SPECIFICATION

Rank 0 prints lines of JSON, marked with `MARK`: one about the ranks, and one per size. The timed region is
what a training step does: write the buffer, call, read the result. Before it the ranks meet in the MPI's own
barrier; the time of an iteration is that of the slowest rank. Every candidate's call of an iteration comes
before the next iteration, each time in another order, so that whatever else the machine does meets all of
them alike.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.cli import launcher
from mpicoll.cli.launch import THREADS
from mpicoll.cli.results import MARK
from mpicoll.cli.workload import Workload, dtype_of
from mpicoll.plans import algorithms

WARMUP, FEWEST, MOST = 3, 5, 100
PAIRS = 2000


class Candidate:
    """One way to serve the call: whose communicator, which algorithm, in what memory.

    Attributes
    ----------
    label
        Its name in tables.
    ran
        The algorithm that served, as counted by the communicator, and its transport.
    trouble
        Why it cannot serve here; None where it can.
    """

    def __init__(self, given: dict[str, Any], work: Workload) -> None:
        self.label: str = given["label"]
        self.work = work
        self.ran = "native"
        self.trouble: str | None = None
        self.wrong = 0
        self.algorithm = given["algorithm"]
        if self.algorithm and ":" in self.algorithm:
            self.algorithm = algorithms.load(self.algorithm)
        self.native = given["native"]

    def warm(self, size: int, turn: int) -> None:
        """One checked iteration; find out what serves."""
        before = _counts(self.work.collective)
        try:
            self.iterate(size, turn)
        except (ValueError, TypeError, KeyError, BufferError, MPI.Exception) as exc:
            # raised before anything is sent, on every rank alike: the others can still be measured
            self.trouble = str(exc)
            return
        after = _counts(self.work.collective)
        served = [name for name in after if after[name] != before.get(name, 0)]
        self.ran = "native" if self.native else "+".join(served)
        if self.ran != "native":
            self.ran += f"/{self.work.transport(size, self.algorithm)}"
        self.wrong += self.work.wrong(size, turn)

    def iterate(self, size: int, turn: int) -> int:
        """Write, call, read; the nanoseconds it took."""
        work = self.work
        start = perf_counter_ns()
        work.produce(size, turn)
        work.call(size, self.algorithm)
        work.consume(size)
        return perf_counter_ns() - start


def _counts(collective: str) -> dict[str, int]:
    return dict(mpicoll.stats().get(collective, {}))


def measure(
    plain: MPI.Intracomm, candidates: list[Candidate], size: int, seconds: float, iters: int | None
) -> tuple[list[Candidate], np.ndarray]:
    """Time all candidates at one size; those that serve, and nanoseconds[candidate, iteration]."""
    for turn in range(WARMUP):
        for candidate in candidates:
            if candidate.trouble is None:
                candidate.warm(size, turn)
    able = [candidate for candidate in candidates if candidate.trouble is None]
    if iters is None:
        start = perf_counter_ns()
        for candidate in able:
            plain.Barrier()
            candidate.iterate(size, 0)
        slowest = plain.allreduce(perf_counter_ns() - start, op=MPI.MAX) * 1e-9
        iters = int(min(max(seconds / slowest, FEWEST), MOST))
    times = np.zeros((len(able), iters), np.int64)
    for turn in range(iters):
        for position in range(len(able)):
            which = (position + turn) % len(able)
            plain.Barrier()
            times[which, turn] = able[which].iterate(size, turn)
            if turn == iters - 1:
                able[which].wrong += able[which].work.wrong(size, turn)
    plain.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
    for candidate in able:
        candidate.wrong = plain.allreduce(candidate.wrong)
    return able, times


def sweep(spec: dict[str, Any], plain: MPI.Intracomm, ours: mpicoll.Intracomm) -> Iterator[dict[str, Any]]:
    """Measure every size of the specification; what results.py reads."""
    sizes, dtype = spec["sizes"], dtype_of(spec["dtype"])
    place: dict[str, Callable[..., np.ndarray]] = {"ordinary": np.empty, "window": ours.empty}
    works: list[Workload] = []
    shared = True
    for given in spec["candidates"]:
        # memory of its own: what one call leaves in the caches must not be charged to another
        work = Workload(plain if given["native"] else ours, spec, dtype, native=given["native"])
        work.allocate(max(sizes), place[given["memory"]])
        works.append(work)
        if given["memory"] == "window":
            shared = shared and in_window(work.send) and in_window(work.recv)
    shared = plain.allreduce(shared, op=MPI.LAND)
    end = perf_counter_ns() + spec["seconds"] * 1e9
    for index, size in enumerate(sizes):
        # what small sizes leave of their share goes to the large ones
        share = plain.bcast((end - perf_counter_ns()) * 1e-9 / (len(sizes) - index))
        candidates = [Candidate(*each) for each in zip(spec["candidates"], works, strict=True)]
        for candidate, each in zip(candidates, spec["candidates"], strict=True):
            if each["memory"] == "window" and not shared:
                candidate.trouble = "the ranks have no shared window, or no room in it (see MPICOLL_ARENA)"
        first = spec["launch"] % len(candidates)
        turned = candidates[first:] + candidates[:first]
        able, times = measure(plain, turned, size, share, spec["iters"])
        nbytes, count = candidates[0].work.reported(size)
        yield {
            "nbytes": nbytes,
            "count": count,
            "samples": {c.label: row.tolist() for c, row in zip(able, times, strict=True)},
            "ran": {c.label: c.ran for c in able},
            "wrong": {c.label: c.wrong for c in able},
            "trouble": {c.label: c.trouble for c in candidates if c.trouble is not None},
        }


def in_window(array: np.ndarray) -> bool:
    """Whether memory is not NumPy's own: `comm.empty` gives ordinary arrays where there is no window."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is not None


def overhead(plain: MPI.Intracomm, ours: mpicoll.Intracomm) -> dict[str, Any]:
    """Pairs of an 8-byte Allreduce, mpi4py's own and ours where it goes native, one right after the other."""
    send, recv = np.ones(1), np.zeros(1)
    before = _counts("allreduce")
    times = np.zeros((2, PAIRS), np.int64)
    calls = (plain.Allreduce, ours.Allreduce)
    for turn in range(-PAIRS // 10, PAIRS):
        for which in (turn % 2, 1 - turn % 2):
            call = calls[which]
            start = perf_counter_ns()
            call(send, recv)
            taken = perf_counter_ns() - start
            if turn >= 0:
                times[which, turn] = taken
    after = _counts("allreduce")
    mine = float(np.median(times[1] - times[0]))
    served = [name for name in after if after[name] != before.get(name, 0)]
    return {
        "nbytes": 8,
        "count": 1,
        "added": plain.allreduce(mine, op=MPI.MAX),
        "samples": {"native": times[0].tolist(), "auto": times[1].tolist()},
        "ran": {"native": "native", "auto": "+".join(served)},
        "wrong": {"native": 0, "auto": int(recv[0] != plain.size)},
        "trouble": {},
    }


def communicators(window: int) -> tuple[MPI.Intracomm, mpicoll.Intracomm]:
    """The MPI's own communicator of all ranks, and ours with room for so many bytes of each rank."""
    if window:
        room = (window + (32 << 20)) * 16 // 15
        os.environ.setdefault("MPICOLL_ARENA", str(max(room, 256 << 20)))
    return MPI.COMM_WORLD.Dup(), mpicoll.Intracomm(MPI.COMM_WORLD)


def tell(plain: MPI.Intracomm, lines: Iterator[dict[str, Any]]) -> None:
    """Print what a reader must know of the ranks, then each line as it comes; free the communicator."""
    about = {
        "library": str(launcher.library(MPI.Get_library_version())),
        "hosts": len(set(plain.allgather(MPI.Get_processor_name()))),
        "ranks": plain.size,
        "threads": "/".join(dict.fromkeys(filter(None, map(os.environ.get, THREADS)))),
    }
    if plain.rank == 0:
        print(MARK + json.dumps(about), flush=True)
    for line in lines:
        if plain.rank == 0:
            print(MARK + json.dumps(line), flush=True)
    plain.Free()


def main() -> None:
    """Measure what the specification in the first argument says."""
    spec = json.loads(sys.argv[1])
    inside = sum(each["memory"] == "window" for each in spec["candidates"])
    plain, ours = communicators(2 * inside * max(spec["sizes"]))
    tell(plain, iter([overhead(plain, ours)]) if spec["call_overhead"] else sweep(spec, plain, ours))


if __name__ == "__main__":
    main()
