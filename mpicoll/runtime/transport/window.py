"""Loads and stores in a node's shared window: the same plans without messages.

A Send publishes where its bytes lie in the sender's segment; a Recv reads them there, or reduces
straight from there.  Between the rounds of a plan stands one node barrier.  What does not lie in the
window, and what the round itself overwrites, is first copied into a staging slot of the sender's
segment; two slots, used in turn, are enough, since a barrier lies between their uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

from ...errors import MismatchError
from ...memory.address import Workspace
from ...memory.op import Call
from ...plans.algorithms import Algorithm
from ...plans.plan import sliced
from ..execute import Patience, Program, Strand
from .bound import Bound, calls
from .lower import TEMPORARY, Layout, Lowering, Move, Place, Step
from .neighbours import Lane, Neighbours
from .problem import WORK, Problem, in_words

SLOTS = ("even", "odd")
_versions = count(1)


class WindowLowering(Lowering):
    """Lowers sends to publications and receives to reads of the peer's memory.

    Parameters
    ----------
    layout
        Where the chunks lie.
    inside
        Offsets in this rank's segment of those memories that lie in it.
    """

    def __init__(self, layout: Layout, inside: dict[Any, int]) -> None:
        super().__init__(layout)
        self.inside = inside
        self.published: dict[int, list[tuple[Any, int, int]]] = defaultdict(list)  # peer -> places
        self._received: dict[int, int] = defaultdict(int)
        self._rounds = 0

    def round(self, ops: Sequence[Any]) -> Step:
        """Lower one round; its packed bytes lie in the slot of its parity."""
        self._base = SLOTS[self._rounds % 2]
        self._packs: dict[tuple[Place, ...], Place] = {}
        self._rounds += 1
        return super().round(ops)

    def send(self, peer: int, places: list[Place]) -> None:
        """Publish where the bytes lie, packed first if they lie elsewhere or are overwritten now."""
        whole = places[0] if len(places) == 1 else None
        if whole is None or whole.base not in self.inside or self._overwritten(whole):
            whole = self.pack(places)
        self.published[peer].append(whole)

    def _overwritten(self, place: Place) -> bool:
        return any(
            w.base == place.base and w.start < place.stop and place.start < w.stop for w in self._writes
        )

    def pack(self, places: list[Place]) -> Place:
        """As in the base class, but the same bytes only once a round."""
        key = tuple(places)
        if key not in self._packs:
            self._packs[key] = super().pack(places)
        return self._packs[key]

    def take(self, nbytes: int) -> Place:
        """Room in the round's staging slot."""
        return super().take(nbytes)._replace(base=self._base)

    def store(self, peer: int, target: Place) -> None:
        """Copy from the peer's memory."""
        if target.nbytes:
            self._step.after.append(Move(target, self.incoming(peer, target.nbytes)))
        else:
            self.incoming(peer, 0)

    def incoming(self, peer: int, nbytes: int) -> Place:
        """The peer's next publication to this rank."""
        k = self._received[peer]
        self._received[peer] += 1
        return Place(("remote", peer, k), 0, nbytes)


def compile_window(
    problem: Problem,
    algorithm: Algorithm,
    comm: MPI.Intracomm,
    patience: Patience,
    workspace: Workspace,
    near: Neighbours,
    lane: int,
    *,
    slices: int,
    shared: bool,
) -> Program:
    """A program of loads and stores for one call, on an open lane.  Never communicates.

    `shared` tells whether other programs run on the lane too; else its slots go when the program goes.
    """
    size, rank, arena = problem.size, problem.rank, near.arena
    chunks = algorithm.chunks(size)
    layout = problem.layout(chunks, algorithm.weights(size), slices)
    plans = [algorithm.plan(rank, size, root=problem.root) for _ in range(slices)]
    inside = {}
    if problem.nbytes >= arena.in_place_nbytes:
        offsets = {base: arena.find(data) for base, data in problem.memory.items() if data.size}
        inside = {base: offset for base, offset in offsets.items() if offset is not None}
    lowering = WindowLowering(layout, inside)
    steps = lowering.lower(sliced(plans, chunks))
    memory = {
        WORK: workspace.take(WORK, layout.extent(WORK)),
        TEMPORARY: workspace.take(TEMPORARY, lowering.temporary),
        **problem.memory,
    }
    # Neighbours may read the last round's bytes after this rank has returned.  Those lie in the second of
    # the two slots, and the next program begins with the first; only what is not staged needs a last barrier.
    lasting = problem.nbytes >= arena.in_place_nbytes or not shared
    if lasting or len(steps) % 2:
        steps.append(Step())
    landing = Landing(problem, lowering, steps, memory, near, near.lanes[lane])
    title = f"{problem.collective} {algorithm.name} in the window, {problem.nbytes} bytes"
    return WindowProgram(Strand(comm, landing.rounds(), tag=0), title, patience, landing)


class WindowProgram(Program):
    """A program whose first round tells everybody where everybody's publications are."""

    def __init__(self, strand: Strand, title: str, patience: Patience, landing: Landing) -> None:
        super().__init__([strand], 1, title, patience)
        self.landing = landing

    def free(self) -> None:
        """Free the persistent requests and the table of publications.  Local."""
        super().free()
        self.landing.free()


class Landing:
    """What a rank reads after each barrier: resolved when it is known where the peers' bytes lie.

    A rank's publications stand in a table in its segment, written once.  With the first barrier of a run
    the ranks tell each other where their tables are and which call they belong to; only when that has
    changed since the last run are the tables read again.
    """

    def __init__(
        self,
        problem: Problem,
        lowering: WindowLowering,
        steps: list[Step],
        memory: dict[Any, np.ndarray],
        near: Neighbours,
        lane: Lane,
    ) -> None:
        self.problem, self.steps, self.memory = problem, steps, memory
        self.near, self.fence = near, lane.fence
        self.landings: list[list[Call]] = [[] for _ in steps]
        self.seen: list[int] = []
        longest = max([1, *(len(places) for places in lowering.published.values())])
        self.table_nbytes = problem.size * longest * 8
        self.at = near.arena.allocate(self.table_nbytes)
        if self.at is None:
            raise MemoryError("no room in the shared window for a table of publications")
        self._publish(lowering, self._stage(lowering.scratch, lane), longest)
        signature = crc32(repr(problem.signature).encode())
        self.words = signature, self.at, longest, next(_versions)

    def _stage(self, nbytes: int, lane: Lane) -> dict[str, int]:
        """Offsets of the staging slots: the lane's, or longer ones, since where they are concerns nobody."""
        slots, room = lane.slots, self.near.slot_nbytes
        arena = self.near.arena
        if nbytes > room:
            start = arena.allocate(2 * nbytes)
            if start is None:
                self.free()
                raise MemoryError(f"no room in the shared window for {2 * nbytes} bytes of staging")
            self.near.retire(start, 2 * nbytes)
            slots, room = (start, start + nbytes), nbytes
        for slot, offset in zip(SLOTS, slots, strict=True):
            self.memory[slot] = arena.view(arena.rank, offset, room)
        return dict(zip(SLOTS, slots, strict=True))

    def _publish(self, lowering: WindowLowering, slots: dict[str, int], longest: int) -> None:
        """Write the table: for every rank, where in this one's segment the bytes for it lie."""
        arena, bases = self.near.arena, {**lowering.inside, **slots}
        table = arena.view(arena.rank, self.at, self.table_nbytes).view(np.int64).reshape(-1, longest)
        table[:] = 0
        for peer, places in lowering.published.items():
            table[peer, : len(places)] = [bases[place.base] + place.start for place in places]

    def rounds(self) -> list[Bound]:
        """Barriers with what is copied before and read after them."""
        rounds: list[Bound] = []
        for t, step in enumerate(self.steps):
            before = [*calls(step.before, self.memory, None), (self.fence.arrive, ())]
            after: list[Call] = [(self.land, (t,))]
            if t == 0:
                before.insert(0, (self.fence.tell, (self.words,)))
                after.insert(0, (self.resolve, ()))
            rounds.append(Bound(before=before, gate=self.fence, after=after))
        return rounds

    def land(self, t: int) -> None:
        """Read and reduce what round `t` receives."""
        for function, arguments in self.landings[t]:
            function(*arguments)

    def resolve(self) -> None:
        """Read the peers' tables if any peer's has changed."""
        versions = self.fence.versions()
        if versions == self.seen:
            return
        size, rank, arena = self.problem.size, self.problem.rank, self.near.arena
        now = [self.fence.told(r) for r in range(size)]
        odd = [r for r in range(size) if now[r][0] != now[rank][0]]
        if odd:
            raise MismatchError(
                f"{self.problem.collective}: rank {rank} passed {in_words(self.problem.signature)}, "
                f"ranks {odd} passed something else; MPICOLL_CHECK=1 tells what"
            )
        tables = {}
        for peer, (_, at, longest, _) in enumerate(now):
            raw = arena.view(self.near.ranks[peer], at, size * longest * 8)
            tables[peer] = raw.view(np.int64).reshape(size, longest)[rank]
        for t, step in enumerate(self.steps):
            self.landings[t] = calls(step.after, _Reach(self, tables), self.problem.reducer)
        self.seen = versions

    def free(self) -> None:
        """Give the table back.  Local: every rank read it before it came to the second barrier."""
        if self.at is not None:
            self.near.arena.release(self.at, self.table_nbytes)
            self.at = None


class _Reach(dict[Any, np.ndarray]):
    """The rank's own memories, and its peers' publications by `("remote", peer, k)`."""

    def __init__(self, landing: Landing, tables: dict[int, np.ndarray]) -> None:
        super().__init__(landing.memory)
        self.near, self.tables = landing.near, tables

    def __missing__(self, base: tuple[str, int, int]) -> np.ndarray:
        _, peer, k = base
        return self.near.arena.segments[self.near.ranks[peer]][int(self.tables[peer][k]) :]
