"""Runs plans: the one executor behind blocking, non-blocking and persistent calls.

A *program* is a plan on real memory.  It is started, and then advanced: without blocking by whoever
has time (`advance`), or to its end by a caller that waits (`run`).  Its first run posts ordinary
messages and checks their lengths; from the second on it starts persistent requests.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from mpi4py import MPI

from ..errors import MismatchError, StallError
from ..settings import number
from . import record
from .transport.bound import Bound

_testall = MPI.Request.Testall
_startall = MPI.Prequest.Startall
_pause: Callable[[], Any] = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)
_ASK = "do all ranks pass the same count, type and op? MPICOLL_CHECK=1 tells"


class Patience:
    """How a rank waits: it yields for a while, then naps, and says so when nothing comes.

    Parameters
    ----------
    spins
        Polls before the first nap: many where every rank has a core, few where ranks share cores.

    Notes
    -----
    `MPICOLL_STALL` (seconds, default 60) is when a waiting rank says whom it waits for;
    `MPICOLL_TIMEOUT` (seconds, default never) is when it gives up.
    """

    def __init__(self, spins: int) -> None:
        self.spins = spins
        self.stall = number("MPICOLL_STALL", 60.0)
        self.timeout = number("MPICOLL_TIMEOUT", inf)

    def wait(self, poll: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Return when `poll()` is true."""
        for _ in range(self.spins):
            if poll():
                return
            _pause()
        nap, began, reported = 20e-6, time.monotonic(), False
        while not poll():
            time.sleep(nap)
            nap = min(nap * 1.5, 500e-6)
            waited = time.monotonic() - began
            if waited > self.stall and not reported:
                before = f"; last calls: {record.latest()}" if record.recent else ""
                print(
                    f"mpicoll: waiting for {waited:.0f} s: {describe()}{before}", file=sys.stderr, flush=True
                )
                reported = True
            if waited > self.timeout:
                raise StallError(f"no progress for {waited:.0f} s: {describe()}")


def tag_limit() -> int:
    """The highest tag that this MPI takes."""
    return MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767


class Strand:
    """Rounds that follow one another on one tag.

    Parameters
    ----------
    comm
        The private communicator.
    rounds
        The rounds, bound to memory.
    tag
        The lane of the call, plus the slot of the slice.
    """

    def __init__(self, comm: MPI.Intracomm, rounds: Sequence[Bound], tag: int) -> None:
        self.comm, self.rounds, self.tag = comm, rounds, tag
        self.warm: list[list[MPI.Prequest]] | None = None
        self.runs = 0
        self.at = 0
        self.live: list[Any] = []

    def start(self) -> bool:
        """Begin a run; False when there is nothing to do."""
        if self.runs == 1 and self.warm is None:
            self.warm = [self._persistent(r) for r in self.rounds]
        self.at = -1
        return self.next()

    def next(self) -> bool:
        """Post the next round; False when there is none."""
        self.at += 1
        if self.at == len(self.rounds):
            self.runs += 1
            return False
        current = self.rounds[self.at]
        for function, arguments in current.before:
            function(*arguments)
        if self.warm is not None:
            self.live = self.warm[self.at]
            if self.live:
                _startall(self.live)
        else:
            self.live = self._ordinary(current)
        return True

    def test(self) -> bool:
        """Whether the round's messages are through; if so, it has landed."""
        if self.live:
            if self.warm is not None:
                if not _testall(self.live):
                    return False
            elif not self._test_checked():
                return False
        current = self.rounds[self.at]
        if current.gate is not None and not current.gate():
            return False
        for function, arguments in current.after:
            function(*arguments)
        return True

    def _test_checked(self) -> bool:
        """A first run's test: what arrived must be as long as what was expected."""
        statuses = [MPI.Status() for _ in self.live]
        try:
            if not _testall(self.live, statuses):
                return False
        except MPI.Exception as error:
            if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
                raise
            raise MismatchError(
                f"{self.describe()}: a message is longer than expected ({error}); {_ASK}"
            ) from error
        for (peer, expected), status in zip(self.rounds[self.at].recvs, statuses, strict=False):
            got = status.Get_count(MPI.BYTE)
            if got != expected.size:
                raise MismatchError(
                    f"{self.describe()}: got {got} bytes from rank {peer}, expected {expected.size}; {_ASK}"
                )
        return True

    def _ordinary(self, current: Bound) -> list[MPI.Request]:
        comm, tag = self.comm, self.tag
        requests = [comm.Irecv([data, data.size, MPI.BYTE], peer, tag) for peer, data in current.recvs]
        return requests + [comm.Isend([data, data.size, MPI.BYTE], peer, tag) for peer, data in current.sends]

    def _persistent(self, current: Bound) -> list[MPI.Prequest]:
        comm, tag = self.comm, self.tag
        requests = [comm.Recv_init([data, data.size, MPI.BYTE], peer, tag) for peer, data in current.recvs]
        return requests + [
            comm.Send_init([data, data.size, MPI.BYTE], peer, tag) for peer, data in current.sends
        ]

    def describe(self) -> str:
        """The round under way, and whom it waits for."""
        current = self.rounds[min(self.at, len(self.rounds) - 1)]
        peers = sorted({peer for peer, _ in (*current.sends, *current.recvs)})
        if current.gate is not None:
            peers = current.gate.missing()
        return f"rank {self.comm.rank}, round {self.at} of {len(self.rounds)}, peers {peers}"

    def free(self) -> None:
        """Free the persistent requests.  Local."""
        for requests in self.warm or ():
            for request in requests:
                request.Free()
        self.warm = None


class Program:
    """A plan on real memory, cut into strands of which a few are in flight at a time.

    Parameters
    ----------
    strands
        In the order in which they start; strand i and strand i + width share a tag and scratch.
    width
        How many are in flight.
    title
        What runs, for messages.
    """

    def __init__(self, strands: Sequence[Strand], width: int, title: str, patience: Patience) -> None:
        self.strands, self.width, self.title, self.patience = strands, width, title, patience
        self._followers = {id(a): b for a, b in zip(strands, strands[width:], strict=False)}
        self.used = 0  # when it was last called, by a count of calls
        self.users = 0  # operations that hold it: it must not be freed under them
        self._active: list[Strand] = []

    def start(self) -> None:
        """Begin a run."""
        self._active = [strand for strand in self.strands[: self.width] if strand.start()]

    def advance(self) -> bool:
        """Move every strand that can move; True when all have ended.  Never blocks."""
        for strand in list(self._active):
            if strand.test():
                self._follow(strand)
        return not self._active

    def run(self) -> None:
        """Run to the end: start, and wait for one strand after the other."""
        if len(self.strands) == 1:  # no strands to take turns: every microsecond counts here
            strand = self.strands[0]
            under_way = strand.start()
            while under_way:
                if not strand.test():
                    self._wait(strand)
                under_way = strand.next()
            return
        self.start()
        while self._active:
            for strand in list(self._active):
                if not strand.test():
                    self._wait(strand)
                self._follow(strand)

    def _wait(self, strand: Strand) -> None:
        self.patience.wait(strand.test, lambda: f"{self.title}: {strand.describe()}")

    def _follow(self, strand: Strand) -> None:
        """After a round has landed: the strand's next round, else the next strand in its place."""
        if strand.next():
            return
        i = self._active.index(strand)
        follower = self._followers.get(id(strand))  # no other may have this strand's tag and scratch
        if follower is not None:
            self._active[i] = follower
            follower.start()  # strands of one program have equally many rounds
        else:
            del self._active[i]

    def describe(self) -> str:
        """What it waits for."""
        return "; ".join(f"{self.title}: {s.describe()}" for s in self._active[:1])

    def free(self) -> None:
        """Free its persistent requests.  Local."""
        for strand in self.strands:
            strand.free()
