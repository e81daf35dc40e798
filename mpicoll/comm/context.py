"""What a communicator of ours carries: its private twin, its rules, its programs.

The state hangs on the MPI handle as an attribute, so every Python object for one handle shares it.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from dataclasses import replace
from heapq import nsmallest
from itertools import count
from operator import itemgetter
from typing import Any

from mpi4py import MPI

from ..errors import ArgumentError, MismatchError
from ..memory.address import Workspace
from ..plans import verify
from ..plans.algorithms import SHIPPED, Algorithm, get
from ..plans.algorithms.registry import Function
from ..runtime.execute import Patience, Program, tag_limit
from ..runtime.progress import Operation, at_exit, engine
from ..runtime.transport import arena as arenas
from ..runtime.transport.mpi import WIDTH, compile_messages
from ..runtime.transport.problem import in_words
from ..runtime.transport.window import Neighbours, compile_window
from ..select.selection import Choice, Selection, Setting
from .arguments import Call, Caller

LANES = 8  # non-blocking calls in flight at once; further ones queue
DERIVED_LANES = 2  # of them with staging slots, in derived communicators: the window is for arrays too
KEPT = 256  # programs kept per communicator: a dozen buckets on every lane
BLOCKING = 0
_told_once: set[str] = set()


class State:
    """The state of one communicator.

    Parameters
    ----------
    comm
        The user's communicator.  Making the state is collective over it.
    parent
        The state of the communicator it was derived from, whose node map and arena it shares.
    """

    def __init__(self, comm: MPI.Intracomm, parent: State | None = None) -> None:
        self.private = MPI.Intracomm(comm).Dup()
        self.rank, self.size = self.private.rank, self.private.size
        self.at = Caller(self.private, self.rank, self.size)
        self.threaded = self.private.allreduce(MPI.Query_thread(), MPI.MIN) == MPI.THREAD_MULTIPLE
        self.homes = self._find_homes(parent)
        places = sorted(set(self.homes), key=self.homes.index)
        self.nodes = [[r for r, home in enumerate(self.homes) if home == place] for place in places]
        self.near = self._find_neighbours(parent)
        if parent is None:
            self._node.Free()
        self.selection = Selection(Setting(self.size, self.nodes, self.near is not None))
        self.checks = os.environ.get("MPICOLL_CHECK", "0") not in ("", "0")
        self.patience = Patience(spins=20 if self.crowded else 2000)
        self.programs: dict[tuple[Any, ...], Program] = {}
        self.calls = count(1)
        self.known: dict[Any, tuple[Any, ...]] = {}  # blocking calls that may skip all checks
        self.lanes: list[deque[Operation]] = [deque() for _ in range(LANES)]
        self.issued = 0  # non-blocking calls
        self._workspaces = [Workspace() for _ in range(LANES + 1)]  # the blocking lane's, and the others'
        self.persistent = 0  # persistent calls made
        self.broken: str | None = None
        self._admitted: dict[tuple[Any, ...], Algorithm] = {}
        self._reports: dict[tuple[Any, ...], verify.Report] = {}
        self._tags = (tag_limit() + 1) // WIDTH * WIDTH
        at_exit(self)

    def _find_homes(self, parent: State | None) -> list[int]:
        """For every rank what its node's ranks have in common; and whether they have to share cores."""
        if parent is not None:
            self.crowded = parent.crowded
            return [parent.homes[r] for r in arenas.translated(self.private, parent.private.Get_group())]
        node = self.private.Split_type(MPI.COMM_TYPE_SHARED)
        self._node = node
        cores: set[int] = set().union(*node.allgather(_cores()))  # a launcher may bind each rank to its own
        self.crowded = node.size > len(cores)
        return self.private.allgather(node.bcast(self.rank))

    def _find_neighbours(self, parent: State | None) -> Neighbours | None:
        """The shared window, where all ranks are on one node and have room for a staging slot."""
        if len(self.nodes) > 1 or self.size == 1:
            return None
        if parent is not None and parent.near is not None:
            arena = parent.near.arena
        else:
            arena = arenas.create(self._node if parent is None else self.private)
        if arena is None:
            return None
        near = Neighbours(arena, self.private)
        most = LANES if parent is None else DERIVED_LANES
        return near if near.open(range(most + 1)) else None

    def choose(self, call: Call, algorithm: str | Function | None) -> tuple[Choice, bool]:
        """What serves a call, and whether its messages are cut alike at both ends."""
        problem, reducer = call.problem, call.problem.reducer
        commutative = reducer is None or reducer.commutative
        choice = self.explain(
            problem.collective, problem.nbytes, commutative, call.native, algorithm, problem.root
        )
        report = self._verified(choice.entry, problem.root, choice.segments)
        if choice.passed and choice.slight:
            self.tell(choice.slight)
        return choice, report is None or report.alike

    def explain(
        self,
        collective: str,
        nbytes: int,
        commutative: bool,
        native: bool,
        algorithm: str | Function | None,
        root: int = 0,
    ) -> Choice:
        """What would serve a call."""
        entry = None if algorithm is None else self._admit(collective, algorithm, root)
        try:
            return self.selection.choose(
                collective, nbytes, commutative=commutative, native=native, algorithm=entry, root=root
            )
        except ValueError as error:
            raise ArgumentError(f"algorithm: {error}") from error

    def _admit(self, collective: str, algorithm: str | Function, root: int) -> Algorithm:
        """An algorithm that was asked for: a registered name, or a function."""
        if not isinstance(algorithm, str) and not callable(algorithm):
            raise ArgumentError(
                f"algorithm: got {algorithm!r}, expected a name or a function of (rank, size)"
            )
        key = collective, algorithm, root
        if key not in self._admitted:
            try:
                entry = get(collective, algorithm)
            except ValueError as error:
                raise ArgumentError(f"algorithm: {error}") from error
            report = self._verified(entry, root)
            if report is not None and report.ordered:
                entry = replace(entry, commutative=False)
            self._admitted[key] = entry
        return self._admitted[key]

    def _verified(self, entry: Algorithm, root: int, segments: int = 1) -> verify.Report | None:
        """What the verifier says of an algorithm here, before it is first used; None for one of ours."""
        if SHIPPED.get((entry.collective, entry.name)) is entry:
            return None
        key = entry, root, segments
        if key not in self._reports:
            try:
                report = verify.check(entry, self.size, root=root, segments=segments, nodes=self.nodes)
            except ValueError as error:
                raise ArgumentError(f"algorithm: {entry}: {error}") from error
            self._reports[key] = report
        return self._reports[key]

    def program(self, call: Call, choice: Choice, alike: bool, lane: int) -> Program:
        """The program for a call, compiled if it is the first of its kind.  Never communicates."""
        key = (lane, choice.entry, choice.transport, choice.slices, choice.segments, *call.problem.key)
        program = self.programs.get(key)
        if program is None:
            if len(self.programs) >= KEPT:  # before it is made: nothing uses the new one yet
                self._evict(KEPT // 4)  # many at once: one for every new array would search them all
            program = self.programs[key] = self.compile(call, choice, alike, lane)
        program.used = next(self.calls)
        return program

    def _evict(self, number: int) -> bool:
        """Free programs that have not been used for longest and are not in use.  Local."""
        idle = [(program.used, key) for key, program in self.programs.items() if not program.users]
        for _, key in nsmallest(number, idle, key=itemgetter(0)):
            self.programs.pop(key).free()
        if idle:
            self.known.clear()
        return bool(idle)

    def compile(self, call: Call, choice: Choice, alike: bool, lane: int) -> Program:
        """Compile a program for a call.  Never communicates."""
        problem, entry, tag = call.problem, choice.entry, lane * WIDTH % self._tags
        workspace = self._workspaces[lane] if lane <= LANES else Workspace()
        if choice.transport == "window" and self.near is not None:
            while True:
                try:
                    return compile_window(
                        problem,
                        entry,
                        self.private,
                        self.patience,
                        workspace,
                        self.near,
                        lane,
                        slices=choice.slices,
                        shared=lane <= LANES,
                    )
                except MemoryError:  # tables of earlier programs fill the window
                    if not self._evict(1):
                        raise
        return compile_messages(
            problem,
            entry,
            self.private,
            tag,
            self.patience,
            workspace,
            segments=choice.segments,
            slices=choice.slices,
            alike=alike,
            nodes=self.nodes,
        )

    def check(self, call: Call, form: str) -> None:
        """With `MPICOLL_CHECK=1`: compare what the ranks are about to do."""
        mine = form, *call.problem.signature
        everybody = self.private.allgather(mine)
        odd = [r for r, other in enumerate(everybody) if other != everybody[0]]
        if odd:
            told = "; ".join(
                f"rank {r} {everybody[r][0]}: {in_words(everybody[r][1:])}" for r in (0, *odd[:4])
            )
            raise MismatchError(
                f"the ranks call different collectives: ranks {odd} differ from rank 0 ({told})"
            )

    def tell(self, words: str) -> None:
        """Say something on rank 0, once in a process."""
        if self.rank == 0 and words not in _told_once:
            _told_once.add(words)
            print(f"mpicoll: {words}", file=sys.stderr, flush=True)

    def release(self, lane: int) -> None:
        """Give the staging slots of a persistent call back.  Local."""
        if self.near is not None:
            self.near.close(lane)

    def usable(self) -> None:
        """Raise if an earlier error left messages behind."""
        if self.broken:
            raise ArgumentError(
                f"this communicator cannot be used since an error in it: {self.broken}", MPI.ERR_COMM
            )

    def drain(self) -> None:
        """Complete the non-blocking calls in flight, as the MPI does for its own before it frees."""
        for lane in self.lanes:
            while lane:
                operation = lane[0]
                try:
                    engine.wait(operation, self.patience)
                except BaseException:
                    if not operation.done:
                        raise  # otherwise whoever waits for the operation hears of it

    def free(self) -> None:
        """Free all programs and give shared memory back.  Local."""
        for program in self.programs.values():
            program.free()
        self.programs.clear()
        self.known.clear()
        self._workspaces.clear()
        if self.near is not None:
            self.near.free()


def _cores() -> set[int]:
    """The cores that this process may use."""
    return set(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


_keyvals: list[int] = []  # one, made when it is first needed


def attach(comm: MPI.Intracomm, state: State) -> None:
    """Hang a state on an MPI handle."""
    if not _keyvals:
        _keyvals.append(MPI.Comm.Create_keyval())  # without a copy function: Dup does not pass it on
    comm.Set_attr(_keyvals[0], state)


def attached(comm: MPI.Intracomm) -> State | None:
    """The state that hangs on an MPI handle."""
    return comm.Get_attr(_keyvals[0]) if _keyvals and comm != MPI.COMM_NULL else None


def detach(comm: MPI.Intracomm) -> None:
    """Take the state off an MPI handle."""
    comm.Delete_attr(_keyvals[0])
