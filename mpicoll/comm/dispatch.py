"""How a call is served: built, checked, chosen, run.  Three forms, one way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from ..memory.address import address_of
from ..memory.op import AVG, PREDEFINED
from ..plans.algorithms import NATIVE, get
from ..plans.algorithms.registry import Function
from ..runtime import record
from ..runtime.execute import Program
from ..runtime.progress import Operation
from ..runtime.requests import nonblocking, persistent
from ..select.selection import Choice
from ..select.slicing import slices_for
from .arguments import BUILDERS, Call
from .context import BLOCKING, LANES, State

# `algorithm=`: a name, or a function of (rank, size) that yields rounds
Asked: TypeAlias = str | Function | None


def run(comm: MPI.Intracomm, state: State, name: str, asked: Asked, arguments: tuple[Any, ...]) -> None:
    """A blocking call."""
    key = None if asked is not None or record.timed or state.checks else _fingerprint(name, arguments)
    known = state.known.get(key)
    if known is not None and state.broken is None:
        program, finale, entry, event = known
        program.used = next(state.calls)
        _run_program(state, program)
        for function in finale:
            function()
        entry.calls += 1
        entry.nbytes += event[2]
        record.recent.append(event)
        return
    began = perf_counter() if record.timed else 0.0
    call, choice, alike = _prepare(state, name, name, asked, arguments)
    native = choice.algorithm == NATIVE
    finale = call.finale(native=native)
    if native:
        getattr(MPI.Intracomm, name)(comm, *call.arguments)
    else:
        program = state.program(call, choice, alike, BLOCKING)
        prelude = call.prelude(native=False, again=False)
        for function in prelude:
            function()
        _run_program(state, program)
        if key is not None and not prelude and not call.problem.finale:
            event = call.problem.collective, choice.algorithm, call.problem.nbytes
            state.known[key] = program, finale, record.total(*event[:2]), event
    for function in finale:
        function()
    elapsed = perf_counter() - began if record.timed else 0.0
    record.note(call.problem.collective, choice.algorithm, call.problem.nbytes, elapsed)


def _fingerprint(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What makes two calls run the same program, told at a glance; None where it takes a closer look."""
    key: list[Any] = [name]
    for x in arguments:
        kind = type(x)
        if kind is np.ndarray:
            if not x.flags.carray:
                return None
            key += (address_of(x), x.nbytes, x.dtype)
        elif kind is int or x is None or x is MPI.IN_PLACE or x is AVG:
            key.append(x)
        elif kind is MPI.Op and MPI._handleof(x) in PREDEFINED:
            key.append(MPI._handleof(x))
        else:
            return None
    return tuple(key)


def _run_program(state: State, program: Program) -> None:
    """Run to the end.  Whatever ends a run early leaves messages behind."""
    try:
        program.run()
    except BaseException as error:
        _break(state, error)
        raise


def begin(
    comm: MPI.Intracomm, state: State, name: str, asked: Asked, arguments: tuple[Any, ...]
) -> MPI.Request:
    """A non-blocking call."""
    form = f"I{name.lower()}"
    call, choice, alike = _prepare(state, form, name, asked, arguments)
    if choice.algorithm == NATIVE or (not state.threaded and asked is None and call.native):
        _tell_of_threads(state, choice)
        choice = replace(choice, entry=get(call.problem.collective, NATIVE))
        function = partial(getattr(MPI.Intracomm, form), comm, *call.arguments)
        record.note(call.problem.collective, NATIVE, call.problem.nbytes)
        if not call.packed():
            return function()
        program: Any = NativeRun(function, form)
        queue: deque[Operation] = deque()
    else:
        record.note(call.problem.collective, choice.algorithm, call.problem.nbytes)
        lane = state.issued % LANES
        state.issued += 1  # only here, where all ranks come together: lanes must agree
        program = state.program(call, _on_lane(state, choice, lane + 1), alike, lane + 1)
        queue = state.lanes[lane]
    native = choice.algorithm == NATIVE
    prelude, finale = call.prelude(native=native, again=False), call.finale(native=native)
    return nonblocking(
        program,
        queue,
        prelude,
        finale,
        state.patience,
        threaded=state.threaded,
        failed=partial(_break, state),
        keep=(call, arguments),
    )


def prepare(
    comm: MPI.Intracomm, state: State, name: str, asked: Asked, info: MPI.Info, arguments: tuple[Any, ...]
) -> MPI.Prequest:
    """A persistent call."""
    call, choice, alike = _prepare(state, f"{name}_init", name, asked, arguments)
    own = getattr(MPI.Intracomm, f"{name}_init", None)
    native = choice.algorithm == NATIVE or (
        not state.threaded and asked is None and call.native and own is not None
    )
    if native:
        _tell_of_threads(state, choice)
        choice = replace(choice, entry=get(call.problem.collective, NATIVE))
        if own is not None and not call.packed():
            record.note(call.problem.collective, NATIVE, call.problem.nbytes)
            return own(comm, *call.arguments, info)
        program: Any = _native_again(comm, name, call, info)
        freed = None
    else:
        lane = LANES + 1 + state.persistent
        state.persistent += 1  # only here, as above
        program = state.compile(call, _with_slots(state, choice, lane), alike, lane)
        freed = partial(state.release, lane)
    return persistent(
        program,
        call.prelude(native=native, again=True),
        call.finale(native=native),
        state.patience,
        threaded=state.threaded,
        note=partial(record.note, call.problem.collective, choice.algorithm, call.problem.nbytes),
        failed=partial(_break, state),
        freed=freed,
        keep=(call, arguments),
    )


def _native_again(comm: MPI.Intracomm, name: str, call: Call, info: MPI.Info) -> NativeRun:
    """The MPI's persistent form, since other ranks may use it without us; before MPI 4 its `I` form."""
    own = getattr(MPI.Intracomm, f"{name}_init", None)
    if own is None:
        return NativeRun(partial(getattr(MPI.Intracomm, f"I{name.lower()}"), comm, *call.arguments), name)
    request = own(comm, *call.arguments, info)

    def start() -> MPI.Request:
        request.Start()
        return request

    return NativeRun(start, name, request)


class NativeRun:
    """The MPI's own non-blocking collective with the face of a program.

    For calls that have something left to do at the end: unpack, or divide.
    """

    users = 0

    def __init__(
        self, function: Callable[[], MPI.Request], title: str, request: MPI.Prequest | None = None
    ) -> None:
        self.function, self.title, self.persistent = function, title, request

    def start(self) -> None:
        """Begin a run."""
        self.request = self.function()

    def advance(self) -> bool:
        """Whether it has ended."""
        return self.request.Test()

    def describe(self) -> str:
        """What it waits for."""
        return f"{self.title} of the MPI"

    def free(self) -> None:
        """Free the persistent request, if there is one."""
        if self.persistent is not None and self.persistent != MPI.REQUEST_NULL:
            self.persistent.Free()


def _prepare(
    state: State, form: str, name: str, asked: Asked, arguments: tuple[Any, ...]
) -> tuple[Call, Choice, bool]:
    state.usable()
    call = BUILDERS[name](state.at, *arguments)
    if state.checks:
        state.check(call, form if asked is None else f"{form} by {getattr(asked, '__name__', asked)}")
    choice, alike = state.choose(call, asked)
    return call, choice, alike


def _tell_of_threads(state: State, choice: Choice) -> None:
    """Say what is lost where the MPI's own serves although a plan was chosen."""
    if choice.algorithm != NATIVE:
        state.tell("without MPI_THREAD_MULTIPLE on every rank the MPI's own serve the I- and _init forms")


def _on_lane(state: State, choice: Choice, lane: int) -> Choice:
    """Without staging slots for the lane, which all ranks know, messages serve."""
    if choice.transport != "window" or (state.near is not None and lane in state.near.lanes):
        return choice
    return _by_messages(state, choice)


def _with_slots(state: State, choice: Choice, lane: int) -> Choice:
    """Reserve staging slots for a persistent call.  Its making is collective, so the ranks can agree."""
    if choice.transport != "window" or state.near is None:
        return choice
    if state.near.open([lane]):
        return choice
    return _by_messages(state, choice)


def _by_messages(state: State, choice: Choice) -> Choice:
    slices = slices_for(choice.entry, choice.nbytes, state.size, state.nodes)
    return replace(choice, transport="mpi", slices=slices)


def _break(state: State, error: BaseException) -> None:
    state.broken = f"{type(error).__name__}: {error}"
