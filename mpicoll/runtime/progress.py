"""Moves what is in flight: operations, the lanes they wait for, and the thread that serves C-level waits.

A caller that waits drives all operations itself.  The thread only matters to waits that Python does not
see (`MPI.Request.Waitall` and its kin), and to owners that compute meanwhile; so it sleeps in the
kernel when nothing is in flight, naps longer and longer while its owner computes (longer from the start
where operations take long), and stands back while somebody drives.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from mpi4py import MPI

from .execute import Patience

HOT = 3  # polls with a mere yield between them, after something short ended
FIRST_NAP, LONGEST_NAP, IDLE_NAP = 50e-6, 1e-3, 400e-6
STEADY_NAP = 500e-6  # the first nap, at most, after something long: a poll takes 30 us from who computes
SHARE = 32  # a first nap is this part of what the last operation took


class Runs(Protocol):
    """What can be started and advanced: a `Program`, or something of the MPI's own."""

    users: int

    def start(self) -> None:
        """Begin a run."""

    def advance(self) -> bool:
        """Move on without blocking; True when it has ended."""

    def describe(self) -> str:
        """What it waits for."""


class Rings(Protocol):
    """A persistent call: its start sends a message to this process."""

    def rung(self, message: MPI.Message) -> None:
        """The message has been found."""

    def Free(self) -> None:
        """Free it."""


class Operation:
    """One non-blocking call, or one run of a persistent one.

    Parameters
    ----------
    program
        What runs.
    lane
        The queue in which it waits for its predecessor: operations of one lane share tags.
    prelude, finale
        Calls before the start and after the end.
    completed
        Called when it has ended, with what went wrong.
    """

    def __init__(
        self,
        program: Runs,
        lane: deque[Operation],
        prelude: list[Callable[[], Any]],
        finale: list[Callable[[], Any]],
        completed: Callable[[BaseException | None], None],
    ) -> None:
        self.program, self.lane = program, lane
        self.prelude, self.finale, self.completed = prelude, finale, completed
        program.users += 1
        self.began = 0.0
        self.done = False
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Start the run.  It is at the head of its lane."""
        self.began = time.monotonic()
        for call in self.prelude:
            call()
        self.program.start()

    def advance(self) -> bool:
        """Move on; True when it has ended."""
        if self.program.advance():
            for call in self.finale:
                call()
            self.done = True
        return self.done


class Engine:
    """All operations in flight in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.live: list[Operation] = []
        self.bells: dict[int, Rings] = {}  # by tag
        self.drivers = 0
        self.nap = FIRST_NAP  # the thread's first one after something ended
        self.doorbell: MPI.Intracomm | None = None
        self._bell: int | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, operation: Operation, *, threaded: bool) -> None:
        """Start an operation, or queue it behind its predecessor in the lane."""
        with self.lock:
            operation.lane.append(operation)
            if operation.lane[0] is operation:
                self._begin(operation)
        if threaded:
            self.ring()

    def poll(self) -> bool:
        """Move everything that can move; whether anything ended or a bell rang."""
        with self.lock:
            moved = self._answer() if self.bells else False
            for operation in list(self.live):
                try:
                    ended = operation.advance()
                except BaseException as error:
                    operation.error, operation.done = error, True
                    ended = True
                if ended:
                    moved = True
                    self._end(operation)
            return moved

    def wait(self, operation: Operation, patience: Patience) -> None:
        """Drive until an operation has ended; raises what went wrong in it."""

        def ended() -> bool:
            if not operation.done:
                self.poll()
            return operation.done

        if not operation.done:
            self.drivers += 1
            try:
                patience.wait(ended, operation.program.describe)
            finally:
                self.drivers -= 1
        if operation.error is not None:
            raise operation.error

    def ring(self) -> None:
        """Wake the thread; make it first if there is none."""
        if self._thread is None:
            self._bell = os.eventfd(0) if hasattr(os, "eventfd") else None
            self._wake = threading.Event()
            self._thread = threading.Thread(target=self._serve, name="mpicoll-progress", daemon=True)
            self._thread.start()
        if self._bell is not None:
            os.eventfd_write(self._bell, 1)
        else:
            self._wake.set()

    def bell(self) -> MPI.Intracomm:
        """The communicator on which persistent calls ring: this process alone."""
        if self.doorbell is None:
            self.doorbell = MPI.Intracomm(MPI.COMM_SELF).Dup()
        return self.doorbell

    def stop(self) -> None:
        """End the thread.  At exit, before the MPI is finalized."""
        self._stopping = True
        if self._thread is not None:
            self.ring()
            self._thread.join(5)

    def _begin(self, operation: Operation) -> None:
        try:
            operation.begin()
        except BaseException as error:
            operation.error, operation.done = error, True  # whoever waits raises it
            self._end(operation)
        else:
            self.live.append(operation)

    def _end(self, operation: Operation) -> None:
        if operation in self.live:
            self.live.remove(operation)
        lane = operation.lane
        lane.popleft()
        operation.program.users -= 1
        taken = time.monotonic() - operation.began
        self.nap = min(max(taken / SHARE, FIRST_NAP), STEADY_NAP)
        operation.completed(operation.error)
        if lane:
            self._begin(lane[0])

    def _answer(self) -> bool:
        """Start the persistent calls that rang."""
        message = self.bell().Improbe(0, MPI.ANY_TAG, status := MPI.Status())
        if message is None:
            return False
        self.bells[status.tag].rung(message)
        return True

    def _serve(self) -> None:
        _exact_naps()
        polls, nap = 0, self.nap
        while not self._stopping:
            if not self.live and not self.bells:
                self._sleep()
                polls, nap = 0, self.nap
                time.sleep(FIRST_NAP)  # whoever submitted may wait at once and drive by itself
                continue
            if not self.drivers and self.poll():
                polls, nap = 0, self.nap
                continue
            polls += 1
            if polls <= HOT and self.nap == FIRST_NAP and not self.drivers:
                time.sleep(0)
            else:
                time.sleep(nap)
                nap = min(nap * 1.5, LONGEST_NAP if self.live else IDLE_NAP)

    def _sleep(self) -> None:
        if self._bell is not None:
            os.eventfd_read(self._bell)
        else:
            self._wake.wait()
            self._wake.clear()


def _exact_naps() -> None:
    """Naps of this thread end on time: Linux adds 50 us by default."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, ctypes.c_ulong(1), 0, 0, 0)


engine = Engine()
_caches: weakref.WeakSet[Any] = weakref.WeakSet()


def at_exit(cache: Any) -> None:
    """Have a cache of programs freed before the MPI ends: MPICH complains of requests left behind."""
    _caches.add(cache)


def _finish() -> None:
    engine.stop()
    for request in list(engine.bells.values()):
        request.Free()
    for cache in list(_caches):
        cache.free()


atexit.register(_finish)
