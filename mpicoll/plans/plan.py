"""The vocabulary of plans: three operations, two helpers, four combinators.

A *plan* is one rank's part of a collective: an iterable of *rounds*, and a round is a list of
operations that are in flight together. Plans speak of numbered *chunks* of a vector, never of bytes,
types or MPI, so the same plan is verified, drawn and run.

Three rules give a plan its meaning:

- **A round reads at its start and lands at its end.** Sends and copies see the chunks as they were
  when the round began. Results are stored when every operation of the round is finished, in list
  order, so the reductions of a round apply in the order in which they are written.
- **Chunk lists give the wire order.** The k-th chunk of a `Send` lands in the k-th chunk of the `Recv`
  that it meets.
- **Rounds need not align across ranks.** The n-th send from a to b meets the n-th receive of b from a.

A rank has three buffers. `OUT` is the working vector; it starts as the rank's contribution and ends as
the result. `IN` is the caller's send buffer, for the few plans that need it after they have written to
`OUT`. `TMP` is scratch: its chunk i is as long as chunk i (modulo their number) of `OUT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import index
from typing import Final, Literal, TypeAlias

Buffer: TypeAlias = Literal["in", "out", "tmp"]
IN: Final = "in"
OUT: Final = "out"
TMP: Final = "tmp"

Reduce: TypeAlias = Literal[False, True, "left", "right"]
LEFT: Final = "left"
RIGHT: Final = "right"

Chunks: TypeAlias = int | Iterable[int]


def _tuple(chunks: Chunks) -> tuple[int, ...]:
    return tuple(chunks) if isinstance(chunks, Iterable) else (index(chunks),)


@dataclass(frozen=True, slots=True, init=False)
class Send:
    """Send chunks to a peer.

    Parameters
    ----------
    peer
        The receiving rank.
    chunks
        A chunk index or any iterable of them, in wire order.
    buf
        The buffer that is read: `OUT`, `IN` or `TMP`.
    """

    peer: int
    chunks: tuple[int, ...]
    buf: Buffer

    def __init__(self, peer: int, chunks: Chunks, buf: Buffer = OUT) -> None:
        object.__setattr__(self, "peer", peer)
        object.__setattr__(self, "chunks", _tuple(chunks))
        object.__setattr__(self, "buf", buf)


@dataclass(frozen=True, slots=True, init=False)
class Recv:
    """Receive chunks from a peer, and store or reduce them.

    Parameters
    ----------
    peer
        The sending rank.
    chunks
        A chunk index or any iterable of them, in wire order.
    buf
        The buffer that is written: `OUT` or `TMP`.
    reduce
        False stores what arrives. Otherwise it is combined with what is there: `LEFT` and `RIGHT` name
        the side of the operator on which the received value stands; True promises no order, which
        only commutative operators allow.
    """

    peer: int
    chunks: tuple[int, ...]
    buf: Buffer
    reduce: Reduce

    def __init__(self, peer: int, chunks: Chunks, buf: Buffer = OUT, reduce: Reduce = False) -> None:
        object.__setattr__(self, "peer", peer)
        object.__setattr__(self, "chunks", _tuple(chunks))
        object.__setattr__(self, "buf", buf)
        object.__setattr__(self, "reduce", reduce)


@dataclass(frozen=True, slots=True, init=False)
class Copy:
    """Copy or reduce chunks within the rank.

    Parameters
    ----------
    src, dst
        Pairs of a buffer and chunks, equally many on both sides.
    reduce
        As in `Recv`; the value from `src` is the received one.
    """

    src: tuple[Buffer, tuple[int, ...]]
    dst: tuple[Buffer, tuple[int, ...]]
    reduce: Reduce

    def __init__(
        self, src: tuple[Buffer, Chunks], dst: tuple[Buffer, Chunks], reduce: Reduce = False
    ) -> None:
        object.__setattr__(self, "src", (src[0], _tuple(src[1])))
        object.__setattr__(self, "dst", (dst[0], _tuple(dst[1])))
        object.__setattr__(self, "reduce", reduce)


Op: TypeAlias = Send | Recv | Copy
Round: TypeAlias = Sequence[Op]
Plan: TypeAlias = Iterator[Round]


def arc(start: int, count: int, size: int) -> list[int]:
    """Return `count` consecutive chunks on a circle of `size`: at most two contiguous runs.

    >>> arc(3, 4, 5)
    [3, 4, 0, 1]
    """
    return [(start + i) % size for i in range(count)]


def pieces(chunks: Iterable[int]) -> list[range]:
    """Return the contiguous runs of a chunk list: what an executor can move without packing.

    >>> pieces([3, 4, 0, 1, 1])
    [range(3, 5), range(0, 2), range(1, 2)]
    """
    runs: list[range] = []
    for c in chunks:
        if runs and runs[-1].stop == c:
            runs[-1] = range(runs[-1].start, c + 1)
        else:
            runs.append(range(c, c + 1))
    return runs


def on(
    group: Sequence[int] | None,
    plan: Iterable[Iterable[Op]],
    chunks: Sequence[Chunks] | None = None,
    scratch: Callable[[int], int] | None = None,
) -> Plan:
    """Run a plan for ranks 0..len(group)-1 on the ranks in `group`, and on other chunks.

    Parameters
    ----------
    group
        `group[i]` takes the part of rank i; None leaves the ranks alone.
    plan
        The plan to rename.
    chunks
        `chunks[i]`, one chunk or many, takes the place of chunk i of `IN` and `OUT`; None leaves them alone.
    scratch
        `scratch(i)` takes the place of chunk i of `TMP`; None leaves them alone.
    """

    def peer(rank: int) -> int:
        return rank if group is None else group[rank]

    def place(buf: Buffer, old: tuple[int, ...]) -> tuple[int, ...]:
        if buf == TMP:
            return old if scratch is None else tuple(map(scratch, old))
        if chunks is None:
            return old
        return tuple(new for c in old for new in _tuple(chunks[c]))

    for ops in plan:
        renamed: list[Op] = []
        for op in ops:
            if isinstance(op, Send):
                renamed.append(Send(peer(op.peer), place(op.buf, op.chunks), op.buf))
            elif isinstance(op, Recv):
                renamed.append(Recv(peer(op.peer), place(op.buf, op.chunks), op.buf, op.reduce))
            else:
                (a, src), (b, dst) = op.src, op.dst
                renamed.append(Copy((a, place(a, src)), (b, place(b, dst)), op.reduce))
        yield renamed


def reverse(plan: Iterable[Iterable[Op]], reduce: Reduce = True) -> Plan:
    """Run a plan of sends and receives backwards in time: every message goes the other way.

    Broadcast becomes reduce, and allgather becomes reduce-scatter, for commutative operators. With
    `reduce=False`, scatter becomes gather.
    """
    for ops in reversed(list(plan)):
        turned: list[Op] = []
        for op in ops:
            if isinstance(op, Copy):
                raise TypeError("a plan with local copies has no reverse")
            if isinstance(op, Send):
                turned.append(Recv(op.peer, op.chunks, op.buf, reduce))
            else:
                turned.append(Send(op.peer, op.chunks, op.buf))
        yield turned


def together(*plans: Iterable[Iterable[Op]]) -> Plan:
    """Run plans on disjoint chunks at once, round by round in flight together."""
    for rounds in zip_longest(*plans, fillvalue=()):
        yield [op for ops in rounds for op in ops]


def sliced(plans: Sequence[Iterable[Iterable[Op]]], chunks: int) -> Plan:
    """Run plans on successive slices of the vector, each one round after the one before.

    One slice is on the wire while another is reduced. Slice i is the chunks `i*chunks` to
    `(i+1)*chunks - 1` of the whole. Where rounds of different ranks do not align, a slice may wait for
    another: verify what comes out.
    """

    def slice_of(i: int, plan: Iterable[Iterable[Op]]) -> list[Round]:
        def scratch(c: int) -> int:  # a place as long as before, apart from the other slices' places
            return c // chunks * chunks * len(plans) + i * chunks + c % chunks

        return [[]] * i + list(on(None, plan, range(i * chunks, (i + 1) * chunks), scratch))

    return together(*(slice_of(i, plan) for i, plan in enumerate(plans)))
