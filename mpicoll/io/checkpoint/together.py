"""Ranks that fail together: an error on one is an error on all, with the same words."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll.io.checkpoint.layout import CheckpointError, DamagedError

__all__ = ["Together", "said"]

T = TypeVar("T")
Problem: TypeAlias = tuple[type[CheckpointError], str]  #: what is raised, and its words
NAP = 2e-3  #: longest pause between two looks, seconds: who waits for a disk must not take a core


class Together:
    """A communicator of our own, on which ranks agree.

    Attributes
    ----------
    threaded : bool
        Whether a thread may communicate beside the others, on every rank.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        # Split, not Dup: a duplicate would take over what hangs on the communicator.
        self.comm = MPI.Intracomm.Split(MPI.Intracomm(comm), 0, comm.Get_rank())
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.threaded = min(self.gather(MPI.Query_thread())) == MPI.THREAD_MULTIPLE

    def gather(self, value: T) -> list[T]:
        """Return every rank's value; waits without burning a core."""
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        counts = np.empty(self.size, np.int64)
        _wait(self.comm.Iallgather(np.array([mine.size]), counts))
        theirs = np.empty(counts.sum(), np.uint8)
        _wait(self.comm.Iallgatherv(mine, [theirs, counts]))
        return [pickle.loads(part.tobytes()) for part in np.split(theirs, np.cumsum(counts)[:-1])]

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Raise on every rank what is raised inside on any, once all ranks have come to the end."""
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        self._raise_first(self.gather(_problem(own)), own)

    def on_root(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on rank 0 and return on every rank what it returned, or raise what it raised."""
        own: Exception | None = None
        value = None
        if self.rank == 0:
            try:
                value = function(*arguments)
            except Exception as error:
                own = error
        problem, value = self.comm.bcast((_problem(own), value))
        self._raise_first([problem], own)
        return value

    def _raise_first(self, problems: list[Problem | None], own: Exception | None) -> None:
        for rank, problem in enumerate(problems):
            if problem:
                kind, words = problem
                alone = len(problems) > 1 and problems.count(problem) < len(problems)
                raise kind(f"rank {rank}: {words}" if alone else words) from own

    def close(self) -> None:
        """Give back the communicator."""
        if self.comm != MPI.COMM_NULL:
            self.comm.Free()


def said(error: Exception) -> str:
    """Return an error in words, the file first."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _problem(error: Exception | None) -> Problem | None:
    if error is None:
        return None
    return DamagedError if isinstance(error, DamagedError) else CheckpointError, said(error)


def _wait(request: MPI.Request) -> None:
    nap = 0.0
    while not request.Test():
        time.sleep(nap)
        nap = min(nap + 2e-5, NAP)
