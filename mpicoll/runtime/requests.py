"""What non-blocking and persistent calls return: real MPI requests that know their operation.

`Request` is a generalized request, so it may stand beside ordinary ones in `MPI.Request.Waitall`.
`Prequest` is a synchronous send to this process: starting it rings, and the progress engine receives the
message when the collective has ended; so `MPI.Prequest.Startall` takes it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from mpi4py import MPI

from .execute import Patience, tag_limit
from .progress import Operation, Runs, engine

_tags = count()


class Request(MPI.Grequest):
    """A non-blocking collective in flight.  `Wait` and `Test` drive it in the calling thread."""

    report: _Report
    patience: Patience
    keep: Any  # the arguments: they live as long as the request

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait for the collective; raises what went wrong in it."""
        if self != MPI.REQUEST_NULL:
            self.report.here = True
            try:
                engine.wait(self.report.operation, self.patience)
            except BaseException:
                if not self.report.operation.done:  # out of patience
                    raise
            super().Wait(status)
            self.report.deliver()
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Whether the collective has ended.  Moves it on."""
        if self == MPI.REQUEST_NULL:
            return super().Test(status)
        if not self.report.operation.done:
            engine.poll()
        if not self.report.operation.done:
            return False
        self.report.here = True
        super().Wait(status)
        self.report.deliver()
        return True

    def wait(self, status: MPI.Status | None = None) -> Any:
        """As `Wait`, and returns None as the lower-case form does."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any]:
        """As `Test`, with None for the message."""
        return self.Test(status), None


class _Report:
    """Says what went wrong in an operation: to a wait of ours as it is, to one in C as a code."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.here = False  # whether a wait of ours asks

    def __call__(self, status: MPI.Status) -> None:
        if not self.here:
            self.deliver()

    def deliver(self) -> None:
        """Raise it."""
        if self.operation.error is not None:
            raise self.operation.error


def nonblocking(
    program: Runs,
    lane: deque[Operation],
    prelude: list[Callable[[], Any]],
    finale: list[Callable[[], Any]],
    patience: Patience,
    *,
    threaded: bool,
    failed: Callable[[BaseException], None],
    keep: Any,
) -> Request:
    """Start a non-blocking operation."""

    def completed(error: BaseException | None) -> None:
        if error is not None:
            failed(error)
        handle.Complete()

    operation = Operation(program, lane, prelude, finale, completed)
    report = _Report(operation)
    handle = MPI.Grequest.Start(report, None, None)
    request = Request(handle)
    request.report, request.patience, request.keep = report, patience, keep
    engine.submit(operation, threaded=threaded)
    return request


class Prequest(MPI.Prequest):
    """A persistent collective: `Start`, `Wait` or `Test`, any number of times, then `Free`."""

    def _setup(
        self,
        program: Any,
        prelude: list[Callable[[], Any]],
        finale: list[Callable[[], Any]],
        patience: Patience,
        tag: int,
        threaded: bool,
        note: Callable[[], None],
        failed: Callable[[BaseException], None],
        freed: Callable[[], None] | None,
        keep: Any,
    ) -> None:
        self._program, self._patience, self._lane = program, patience, deque[Operation]()
        self._prelude, self._finale = prelude, finale
        self._tag, self._threaded = tag, threaded
        self._note, self._failed, self._freed, self._keep = note, failed, freed, keep
        self._message: MPI.Message | None = None
        self._operation: Operation | None = None
        engine.bells[tag] = self
        if threaded:
            engine.ring()

    def Start(self) -> None:
        """Begin a run."""
        with engine.lock:
            super().Start()
            self._begin()

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait for the run; raises what went wrong in it."""
        operation = self._current()
        if operation is not None:
            try:
                engine.wait(operation, self._patience)
            except BaseException:
                if operation.done:
                    super().Wait(status)
                raise
        return super().Wait(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Whether the run has ended.  Moves it on."""
        operation = self._current()
        if operation is not None:
            engine.poll()
            if not operation.done:
                return False
            super().Wait(status)
            if operation.error is not None:
                raise operation.error
            return True
        return super().Test(status)

    def Free(self) -> None:
        """Free the requests of the program.  Local."""
        engine.bells.pop(self._tag, None)
        self._program.free()
        if self._freed is not None:
            self._freed()
        super().Free()

    def _current(self) -> Operation | None:
        """The run under way; one that was started in C may not have been noticed yet."""
        while self._operation is None and engine.poll():
            pass
        return self._operation

    def rung(self, message: MPI.Message) -> None:
        """The engine found the message of a start."""
        self._message = message
        if self._operation is None:
            self._begin()

    def _begin(self) -> None:
        self._note()
        self._operation = Operation(self._program, self._lane, self._prelude, self._finale, self._ended)
        engine.submit(self._operation, threaded=self._threaded)

    def _ended(self, error: BaseException | None) -> None:
        """Complete the request: receive the message of its start."""
        if error is not None:
            self._failed(error)
        if self._message is None:
            engine.bell().Recv([bytearray(0), 0, MPI.BYTE], 0, self._tag)
        else:
            self._message.Recv([bytearray(0), 0, MPI.BYTE])
        self._message = self._operation = None


def persistent(
    program: Any,
    prelude: list[Callable[[], Any]],
    finale: list[Callable[[], Any]],
    patience: Patience,
    *,
    threaded: bool,
    freed: Callable[[], None] | None,
    note: Callable[[], None],
    failed: Callable[[BaseException], None],
    keep: Any,
) -> Prequest:
    """Make a persistent request for a program."""
    tag = next(_tags) % tag_limit()
    request = Prequest(engine.bell().Ssend_init([bytearray(0), 0, MPI.BYTE], 0, tag))
    request._setup(program, prelude, finale, patience, tag, threaded, note, failed, freed, keep)
    return request
