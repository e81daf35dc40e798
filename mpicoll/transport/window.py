"""Loads and stores in a node's shared window: the same plans without messages.

A Send publishes where its bytes lie in the sender's segment; a Recv reads them there, or reduces
straight from there.  Between the rounds of a plan stands one node barrier.  What does not lie in the
window, and what the round itself overwrites, is first copied into a staging slot of the sender's
segment; two slots, used in turn, are enough, since a barrier lies between their uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

from ..algorithms import Algorithm, get
from ..arrays import Workspace
from ..cutting import IN_PLACE_NBYTES, slot_nbytes
from ..errors import MismatchError
from ..execute import Patience, Program, Strand
from ..op import Call
from ..plan import sliced
from .arena import Arena
from .bound import Bound, bind, calls
from .lower import TEMPORARY, Layout, Lowering, Move, Place, Step
from .problem import WORK, Problem

SLOTS = ("even", "odd")
INFO = "info"
_versions = count(1)


@dataclass(slots=True)
class Neighbours:
    """The ranks of a communicator as members of an arena.

    Attributes
    ----------
    arena
        The shared window.
    ranks
        The arena's rank of every rank of the communicator.
    slots
        Offsets of this rank's staging slots, one pair per lane.
    lanes
        How many lanes have slots on every rank.
    """

    arena: Arena
    ranks: list[int]
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    lanes: int = 0

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one staging slot."""
        return slot_nbytes(len(self.ranks))

    def reserve(self, lane: int) -> tuple[int, int] | None:
        """The staging slots of a lane; None where the arena has no room for them."""
        if lane not in self.slots:
            start = self.arena.allocate(2 * self.slot_nbytes)
            if start is None:
                return None
            self.slots[lane] = (start, start + self.slot_nbytes)
        return self.slots[lane]

    def release(self, lane: int) -> None:
        """Give the slots of a lane back.  Local."""
        if lane in self.slots:
            self.arena.release(self.slots.pop(lane)[0], 2 * self.slot_nbytes)

    def free(self) -> None:
        """Give all slots back.  Local."""
        for lane in list(self.slots):
            self.release(lane)


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
    tag: int,
    patience: Patience,
    workspace: Workspace,
    near: Neighbours,
    lane: int,
    *,
    slices: int,
) -> Program:
    """A program of loads and stores for one call.  Never communicates.

    The lane's staging slots must have been reserved.
    """
    size, rank, arena = problem.size, problem.rank, near.arena
    chunks = algorithm.chunks(size)
    layout = problem.layout(chunks, algorithm.weights(size), slices)
    plans = [algorithm.plan(rank, size, root=problem.root) for _ in range(slices)]
    inside = {}
    if problem.nbytes >= IN_PLACE_NBYTES:
        offsets = {base: arena.find(data) for base, data in problem.memory.items() if data.size}
        inside = {base: offset for base, offset in offsets.items() if offset is not None}
    lowering = WindowLowering(layout, inside)
    steps = lowering.lower(sliced(plans, chunks))
    memory = {
        WORK: workspace.take(WORK, _work_extent(layout)),
        TEMPORARY: workspace.take(TEMPORARY, lowering.temporary),
        **problem.memory,
    }
    staging = Staging(near, lane, lowering.scratch)
    for slot, offset in zip(SLOTS, staging.offsets, strict=True):
        memory[slot] = arena.view(arena.rank, offset, staging.nbytes)
    landing = Landing(problem, lowering, steps, memory, near, staging)
    title = f"{problem.collective} {algorithm.name} in the window, {problem.nbytes} bytes"
    return WindowProgram(Strand(comm, landing.rounds(size, rank), tag), title, patience, landing)


def _work_extent(layout: Layout) -> int:
    return max((place.stop for place in layout.out if place.base == WORK), default=0)


class Staging:
    """The two staging slots of a program: its lane's, or slots of its own where those are too short.

    Where they lie is published, so this is no other rank's affair.
    """

    def __init__(self, near: Neighbours, lane: int, nbytes: int) -> None:
        self.arena, self.own = near.arena, None
        self.nbytes = near.slot_nbytes
        self.offsets = near.slots[lane]
        if nbytes > self.nbytes:
            self.nbytes = -(-nbytes // 64) * 64
            self.own = self.arena.allocate(2 * self.nbytes)
            if self.own is None:
                raise MemoryError(f"no room in the shared window for {2 * nbytes} bytes of staging")
            self.offsets = self.own, self.own + self.nbytes

    def free(self) -> None:
        """Give slots of its own back.  Local."""
        if self.own is not None:
            self.arena.release(self.own, 2 * self.nbytes)
            self.own = None


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

    A rank's publications stand in a table in its segment, written once.  A run begins with an allgather
    of where the tables are and which call they belong to; only when that has changed since the last
    run are the tables read again.
    """

    def __init__(
        self,
        problem: Problem,
        lowering: WindowLowering,
        steps: list[Step],
        memory: dict[Any, np.ndarray],
        near: Neighbours,
        staging: Staging,
    ) -> None:
        self.staging = staging
        self.problem, self.steps, self.memory, self.near = problem, steps, memory, near
        self.landings: list[list[Call]] = [[] for _ in steps]
        self.seen = b""
        bases = {**lowering.inside, **dict(zip(SLOTS, staging.offsets, strict=True))}
        published = lowering.published
        longest = max((len(places) for places in published.values()), default=0)
        table = np.zeros((problem.size, max(longest, 1)), np.int64)
        for peer, places in published.items():
            table[peer, : len(places)] = [bases[place.base] + place.start for place in places]
        self.table_nbytes = table.nbytes
        self.at = near.arena.allocate(table.nbytes)
        if self.at is None:
            staging.free()
            raise MemoryError("no room in the shared window for a table of publications")
        near.arena.view(near.arena.rank, self.at, table.nbytes)[:] = table.reshape(-1).view(np.uint8)
        self.info = np.zeros((problem.size, 4), np.int64)
        signature = crc32(repr(problem.signature).encode())
        self.info[problem.rank] = signature, self.at, table.shape[1], next(_versions)

    def rounds(self, size: int, rank: int) -> list[Bound]:
        """Barriers with what is copied before and read after them.  The last ends the reading."""
        fence = (self.near.arena.sync, ())
        whole = self.info.reshape(-1).view(np.uint8)
        row = whole.size // size
        places = [Place(INFO, r * row, (r + 1) * row) for r in range(size)]
        exchange = Lowering(Layout(places)).lower(get("allgather", "circulant").plan(rank, size))
        signal = Lowering(Layout([])).lower(get("barrier", "dissemination").plan(rank, size))
        rounds: list[Bound] = []
        for t, step in enumerate([*self.steps, Step()]):
            barrier = [bind(s, {INFO: whole, "scratch": whole}, None) for s in (signal if t else exchange)]
            barrier = barrier or [Bound()]
            barrier[0].before += [*calls(step.before, self.memory, None), fence]
            barrier[-1].after += [fence] if t else [fence, (self.resolve, ())]
            if t < len(self.steps):
                barrier[-1].after.append((self.land, (t,)))
            rounds += barrier
        return rounds

    def land(self, t: int) -> None:
        """Read and reduce what round `t` receives."""
        for function, arguments in self.landings[t]:
            function(*arguments)

    def resolve(self) -> None:
        """Read the peers' tables if any peer's has changed."""
        now = self.info.tobytes()
        if now == self.seen:
            return
        size, rank, arena = self.problem.size, self.problem.rank, self.near.arena
        odd = [r for r in range(size) if self.info[r, 0] != self.info[rank, 0]]
        if odd:
            raise MismatchError(
                f"{self.problem.collective}: rank {rank} passed {self.problem.signature[1:]}, "
                f"ranks {odd} passed something else (counts, item size, op, root); all must be the same"
            )
        tables = {}
        for peer in range(size):
            _, at, longest, _ = (int(x) for x in self.info[peer])
            raw = arena.view(self.near.ranks[peer], at, size * longest * 8)
            tables[peer] = raw.view(np.int64).reshape(size, longest)[rank]
        for t, step in enumerate(self.steps):
            self.landings[t] = calls(step.after, _Reach(self, tables), self.problem.reducer)
        self.seen = now

    def free(self) -> None:
        """Give the table and the staging back.  Local."""
        self.staging.free()
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
