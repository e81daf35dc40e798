"""A Chrome trace of what each rank does when: Perfetto and chrome://tracing open it."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.comm.intracomm import Intracomm

__all__ = ["Timeline"]

CALLS = ("Allreduce", "Reduce", "Bcast", "Allgather", "Reduce_scatter", "Reduce_scatter_block", "Alltoall")


class Timeline:
    """Records spans of time on every rank, and writes them all to one file.

    Making one is collective: the ranks' clocks are set by their leaving a barrier together, which is right to
    some microseconds on a node and to a message's time between nodes.

    Parameters
    ----------
    comm
        The ranks.

    Attributes
    ----------
    on : bool
        Whether anything is recorded; assign to choose the steps to trace.

    Examples
    --------
    >>> timeline = Timeline(comm)                           # doctest: +SKIP
    >>> with timeline.span("forward", step=3):              # doctest: +SKIP
    ...     y = model(x)
    >>> timeline.write(Path("trace.json"))                  # doctest: +SKIP
    """

    def __init__(self, comm: Intracomm) -> None:
        self.comm = comm
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[str, int] = {}
        self.on = True
        self._flying: list[tuple[str, str, float, MPI.Request]] = []  # name, lane, start, handle
        comm.Barrier()  # ranks leave the first when the slowest has entered, from wherever they came;
        comm.Barrier()  # so they enter the second at nearly one time, and leave it at nearly one time
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def span(self, name: str, lane: str = "compute", **details: Any) -> Iterator[None]:
        """Record how long the body takes.

        Parameters
        ----------
        name
            What it is called.
        lane
            The row that shows it, beside those of other lanes of this rank.
        **details
            Shown when the span is selected.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter(), lane, **details)

    def add(self, name: str, start: float, stop: float, lane: str = "compute", **details: Any) -> None:
        """Record a span whose ends, by `time.perf_counter`, are known."""
        if not self.on:
            return
        event = {"name": name, "ph": "X", "dur": _microseconds(stop - start)}
        self._events.append({**event, **self._place(start, lane), "args": details})

    def mark(self, name: str, lane: str = "compute", **details: Any) -> None:
        """Record that something happens now."""
        if not self.on:
            return
        event = {"name": name, "ph": "i", "s": "t", "args": details}
        self._events.append({**event, **self._place(time.perf_counter(), lane)})

    def traced(self, comm: Intracomm) -> Intracomm:
        """Return the communicator with its collectives recorded, in lanes called "communication".

        A non-blocking one is in flight from the call until `look`, or the next call, finds it complete.
        """
        return cast("Intracomm", _Traced(comm, self))

    def look(self) -> None:
        """Record which of the calls in flight are complete by now; cheap, and it does not move them on."""
        now, flying = time.perf_counter(), self._flying
        self._flying = []
        for call in flying:
            name, lane, start, request = call
            if request.Get_status():
                self.add(name, start, now, lane)
            else:
                self._flying.append(call)

    def write(self, path: Path) -> None:
        """Write the spans of all ranks to one JSON file, as rank 0 sees the disk; collective.

        Raises
        ------
        OSError
            On every rank, where rank 0 cannot write.
        """
        from mpicoll.io.text import replacing

        events = self.comm.gather([*self._names(), *self._events])
        problem = None
        if events is not None:
            trace: dict[str, Any] = {"traceEvents": sum(events, []), "displayTimeUnit": "ms"}
            try:
                with replacing(path) as temporary:
                    temporary.write_text(json.dumps(trace))
            except OSError as error:
                problem = error
        problem = self.comm.bcast(problem)
        if problem is not None:
            raise problem

    def _free_lane(self) -> str:
        """Return a lane without a call in flight: spans of one row must not overlap."""
        self.look()
        taken = {lane for _, lane, _, _ in self._flying}
        lanes = ("communication" if k == 1 else f"communication {k}" for k in itertools.count(1))
        return next(lane for lane in lanes if lane not in taken)

    def _place(self, start: float, lane: str) -> dict[str, Any]:
        """Say when an event begins and in which row it is shown."""
        row = self._lanes.setdefault(lane, len(self._lanes))
        return {"ts": _microseconds(start - self._start), "pid": self.comm.rank, "tid": row}

    def _names(self) -> Iterator[dict[str, Any]]:
        """Yield the events that give this rank and its lanes their names."""
        rank = {"ph": "M", "pid": self.comm.rank}
        yield {**rank, "name": "process_name", "args": {"name": f"rank {self.comm.rank}"}}
        yield {**rank, "name": "process_sort_index", "args": {"sort_index": self.comm.rank}}
        for lane, row in self._lanes.items():
            yield {**rank, "tid": row, "name": "thread_name", "args": {"name": lane}}


class _Traced:
    """Stands for a communicator, and tells a timeline of its calls."""

    def __init__(self, comm: Intracomm, timeline: Timeline) -> None:
        self._comm, self._timeline = comm, timeline

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._comm, name)
        if name in CALLS:
            return partial(self._blocking, method, name)
        if name[0] == "I" and name[1:].capitalize() in CALLS:
            return partial(self._nonblocking, method, name)
        return method

    def _blocking(self, method: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        with self._timeline.span(name, self._timeline._free_lane()):
            return method(*args, **kwargs)

    def _nonblocking(self, method: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        lane, start = self._timeline._free_lane(), time.perf_counter()
        request = method(*args, **kwargs)
        if self._timeline.on:
            self._timeline._flying.append((name, lane, start, request))
        return request


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
