"""From chunks to memory: one rank's rounds as messages and calls on places.

A *place* is `(base, start, stop)`: bytes of one of the plan's memories.  Lowering decides where every
chunk is read and written; it knows nothing of requests, windows or dtypes.  What differs between
transports is one question, `incoming`: where does a received run appear?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...plans.plan import IN, LEFT, OUT, Copy, Recv, Send, pieces

SCRATCH, TEMPORARY = "scratch", "temporary"  # memories that are sized by lowering


class Place(NamedTuple):
    """Bytes `start` to `stop` of memory `base`."""

    base: Any
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


def joined(places: Iterable[Place]) -> list[Place]:
    """The fewest places that hold the same bytes in the same order."""
    runs: list[Place] = []
    for place in places:
        if runs and runs[-1].nbytes == 0:
            runs.pop()
        if runs and place.nbytes == 0:
            continue
        if runs and runs[-1].base == place.base and runs[-1].stop == place.start:
            runs[-1] = Place(place.base, runs[-1].start, place.stop)
        else:
            runs.append(place)
    return runs


@dataclass(slots=True)
class Layout:
    """Where the chunks of a call lie.

    Attributes
    ----------
    out
        The place of every chunk of `OUT`.
    source
        Where a chunk of `OUT` is read until it is first written; None where it starts in place.
    inp
        The place of every chunk of `IN`, for plans that read it.
    result
        The chunks that the caller must find in `out` at the end.
    """

    out: Sequence[Place]
    source: Sequence[Place] | None = None
    inp: Sequence[Place] | None = None
    result: Iterable[int] = ()

    def extent(self, base: Any) -> int:
        """Bytes that a memory must have to hold what of `out` lies in it."""
        return max((place.stop for place in self.out if place.base == base), default=0)


class Move(NamedTuple):
    """`target = source`, or with two operands `target = left op right`."""

    target: Place
    left: Place
    right: Place | None = None


@dataclass(slots=True)
class Step:
    """A lowered round: copies before it starts, its messages, and what is done when it lands."""

    before: list[Move] = field(default_factory=list)
    sends: list[tuple[int, Place]] = field(default_factory=list)
    recvs: list[tuple[int, Place]] = field(default_factory=list)
    after: list[Move] = field(default_factory=list)


class Lowering:
    """Lowers the rounds of one rank, in order.

    Parameters
    ----------
    layout
        Where the chunks lie.
    alike
        Whether the two ends of every message split into the same runs of chunks, so that up to
        `RUNS` runs may travel as messages of their own and need no packing.
    """

    RUNS = 2

    def __init__(self, layout: Layout, *, alike: bool = True) -> None:
        self.layout = layout
        self.alike = alike
        self.written: set[int] = set()
        self.scratch = 0  # bytes of scratch that the widest round needs
        self.temporary = 0
        self._tmp: dict[int, Place] = {}

    def lower(self, plan: Iterable[Sequence[Any]]) -> list[Step]:
        """Lower a whole plan; the last step completes what no message wrote."""
        steps = [self.round(ops) for ops in plan]
        rest = [c for c in self.layout.result if c not in self.written] if self.layout.source else []
        moves = [Move(self.layout.out[c], self.layout.source[c]) for c in rest if self.layout.source]
        moves = [m for m in moves if m.left != m.target]
        if moves:
            if not steps:
                steps.append(Step())
            steps[-1].after += moves
        return steps

    def round(self, ops: Sequence[Any]) -> Step:
        """Lower one round: it reads at its start and lands at its end."""
        self._step, self._used, self._landed = Step(), 0, set()
        self._reads = {
            self.current(buf, c)
            for op in ops
            if not isinstance(op, Recv)
            for buf, cs in (_read(op),)
            for c in cs
        }
        self._writes = {
            self.target(buf, c)
            for op in ops
            if not isinstance(op, Send)
            for buf, cs in (_written(op),)
            for c in cs
        }
        for op in ops:
            if isinstance(op, Send):
                for run in self._runs(op.chunks):
                    self.send(op.peer, joined(self.current(op.buf, c) for c in run))
            elif isinstance(op, Recv):
                for run in self._runs(op.chunks):
                    self.recv(op, run)
            else:
                self.copy(op)
        self.written |= self._landed
        self.scratch = max(self.scratch, self._used)
        return self._step

    def send(self, peer: int, places: list[Place]) -> None:
        """One message; several places are packed first."""
        self._step.sends.append((peer, places[0] if len(places) == 1 else self.pack(places)))

    def recv(self, op: Recv, run: Sequence[int]) -> None:
        """One message, received where it belongs if that is one place that nobody reads now."""
        targets = [self.target(op.buf, c) for c in run]
        whole = joined(targets)
        if not op.reduce and len(whole) == 1 and not self._reads.intersection(targets):
            self.store(op.peer, whole[0])
            self._mark(op.buf, run)
            return
        arrived = self.incoming(op.peer, sum(t.nbytes for t in targets))
        self._land(op.buf, run, arrived, op.reduce)

    def store(self, peer: int, target: Place) -> None:
        """Receive straight into the target."""
        self._step.recvs.append((peer, target))

    def incoming(self, peer: int, nbytes: int) -> Place:
        """Receive into scratch."""
        place = self.take(nbytes)
        self._step.recvs.append((peer, place))
        return place

    def copy(self, op: Copy) -> None:
        """A local copy or reduction; the source is kept aside if the round overwrites it."""
        for c, d in zip(op.src[1], op.dst[1], strict=True):
            source = self.current(op.src[0], c)
            if source in self._writes:
                source = self.pack([source])
            self._land(op.dst[0], [d], source, op.reduce)

    def pack(self, places: list[Place]) -> Place:
        """Gather places into scratch before the round starts."""
        whole = self.take(sum(p.nbytes for p in places))
        at = whole.start
        for p in places:
            self._step.before.append(Move(Place(whole.base, at, at + p.nbytes), p))
            at += p.nbytes
        return whole

    def take(self, nbytes: int) -> Place:
        """Scratch for the round, on a cache line."""
        start, self._used = self._used, self._used + -(-nbytes // 64) * 64
        return Place(SCRATCH, start, start + nbytes)

    def current(self, buf: str, chunk: int) -> Place:
        """Where a chunk is read now."""
        if buf == OUT and self.layout.source and chunk not in self.written and chunk not in self._landed:
            return self.layout.source[chunk]
        return self.target(buf, chunk)

    def target(self, buf: str, chunk: int) -> Place:
        """Where a chunk is written."""
        if buf == OUT:
            return self.layout.out[chunk]
        if buf == IN:
            return (self.layout.inp or self.layout.source or self.layout.out)[chunk]
        if chunk not in self._tmp:
            nbytes = self.layout.out[chunk % len(self.layout.out)].nbytes
            self._tmp[chunk] = Place(TEMPORARY, self.temporary, self.temporary + nbytes)
            self.temporary += -(-nbytes // 64) * 64
        return self._tmp[chunk]

    def _land(self, buf: str, run: Sequence[int], arrived: Place, reduce: Any) -> None:
        """Store or reduce what arrived, piece by piece, in list order."""
        at = arrived.start
        for piece in pieces(run):
            for mine, target in self._coalesced(buf, piece, bool(reduce)):
                got = Place(arrived.base, at, at + target.nbytes)
                at += target.nbytes
                operands = () if not reduce else (got, mine) if reduce == LEFT else (mine, got)
                self._step.after.append(Move(target, *(operands or (got,))))
        self._mark(buf, run)

    def _coalesced(self, buf: str, piece: Sequence[int], reduce: bool) -> list[tuple[Place, Place]]:
        """Neighbouring chunks whose present and future places are neighbours as well."""
        pairs: list[tuple[Place, Place]] = []
        for c in piece:
            target = self.target(buf, c)
            mine = self.current(buf, c) if reduce else target
            if not target.nbytes:
                continue
            if pairs:
                one, two = joined([pairs[-1][0], mine]), joined([pairs[-1][1], target])
                if len(one) == len(two) == 1:
                    pairs[-1] = (one[0], two[0])
                    continue
            pairs.append((mine, target))
        return pairs

    def _mark(self, buf: str, run: Sequence[int]) -> None:
        if buf == OUT:
            self._landed.update(run)

    def _runs(self, chunks: Sequence[int]) -> Sequence[Sequence[int]]:
        """The chunk runs that travel as messages of their own."""
        runs = pieces(chunks)
        return runs if runs and self.alike and len(runs) <= self.RUNS else [chunks]


def _read(op: Send | Copy) -> tuple[str, Sequence[int]]:
    return (op.buf, op.chunks) if isinstance(op, Send) else op.src


def _written(op: Recv | Copy) -> tuple[str, Sequence[int]]:
    return (op.buf, op.chunks) if isinstance(op, Recv) else op.dst
