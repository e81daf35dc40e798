"""One call of a collective: its buffers, and where they put the chunks of a plan.

"Slices" are cuts of the message that run the same plan one after the other.  Where the caller says who
owns what (allgather, reduce_scatter, alltoall) every chunk is cut; elsewhere the vector is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from ...memory.address import address_of
from ...memory.op import Reducer
from ...plans.algorithms import OWNED, ROOTED
from .lower import Layout, Place

INPUT, OUTPUT, WORK = "in", "out", "work"


@dataclass(slots=True)
class Problem:
    """What a rank asks for, in terms that transports understand.

    Attributes
    ----------
    collective
        Its name.
    rank, size, root
        As in the communicator; root is 0 where there is none.
    counts
        Elements of the vector (one number), or of every rank's chunk (one number per rank).
    itemsize
        Bytes of an element; 1 where elements are only moved.
    memory
        The bytes of `in`, `out` and `work`; `in` is absent where the caller passed IN_PLACE.
    reducer
        The operator, for reductions.
    prelude, finale
        Calls before the start and after the end: copies of what must not be overwritten, unpacking.
    """

    collective: str
    rank: int
    size: int
    root: int
    counts: tuple[int, ...]
    itemsize: int
    memory: dict[Any, np.ndarray]
    reducer: Reducer | None = None
    prelude: list[Callable[[], Any]] = field(default_factory=list)
    finale: list[Callable[[], Any]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the full vector: what selection calls the message size."""
        parts = self.size if self.collective in ("allgather", "alltoall") else 1
        return sum(self.counts) * self.itemsize * parts

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be the same on every rank."""
        op = self.reducer and (self.reducer.name, str(self.reducer.dtype))
        return self.collective, self.counts, self.itemsize, op, self.root

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two calls run the same program: the signature, and this rank's addresses."""
        op = self.reducer and self.reducer.key
        where = tuple(
            (base, address_of(data), data.size) for base, data in self.memory.items() if base != WORK
        )
        return self.collective, self.counts, self.itemsize, op, self.root, where

    def layout(self, chunks: int, weights: Sequence[Fraction] | None, slices: int) -> Layout:
        """Places of `slices * chunks` chunks: chunk c of slice s has number `s * chunks + c`."""
        maker = _owned if self.collective in OWNED else _vector
        return maker(self, chunks, weights, slices)


def in_words(signature: Sequence[Any]) -> str:
    """What a rank asks for, for people: of `Problem.signature`."""
    collective, counts, itemsize, op, root = signature
    shown = counts[0] if len(counts) == 1 else list(counts[:8])
    words = [f"count {shown}", f"{itemsize} bytes each"]
    if op:
        words.append(f"{op[0]} of {op[1]}")
    if collective in ROOTED:
        words.append(f"root {root}")
    return ", ".join(words)


def cut(
    start: int, stop: int, chunks: int, weights: Sequence[Fraction] | None, unit: int
) -> list[tuple[int, int]]:
    """Cut bytes `start` to `stop` into chunks at multiples of `unit`: equal parts, or as `weights` say."""
    count = (stop - start) // unit
    if weights is None:
        edges = [count * i // max(chunks, 1) for i in range(chunks + 1)]
    else:
        edges = [0, *(int(count * part) for part in accumulate(weights))]
    return [(start + a * unit, start + b * unit) for a, b in zip(edges, edges[1:], strict=False)]


def _vector(p: Problem, chunks: int, weights: Sequence[Fraction] | None, slices: int) -> Layout:
    """allreduce, reduce, bcast, barrier: every rank has a whole vector."""
    nbytes = p.counts[0] * p.itemsize
    parts = [
        part
        for a, b in cut(0, nbytes, slices, None, p.itemsize)
        for part in cut(a, b, chunks, weights, p.itemsize)
    ]
    base = OUTPUT if OUTPUT in p.memory else WORK
    out = [Place(base, *part) for part in parts]
    source = [Place(INPUT, *part) for part in parts] if INPUT in p.memory else None
    return Layout(out, source, None, range(len(parts)) if base == OUTPUT else ())


def _owned(p: Problem, chunks: int, weights: Sequence[Fraction] | None, slices: int) -> Layout:
    """allgather, reduce_scatter, alltoall: chunk r is rank r's, or comes from it or goes to it."""
    counts = p.counts if len(p.counts) == p.size else p.counts * p.size
    edges = [0, *(n * p.itemsize for n in accumulate(counts))]
    grid = [cut(a, b, slices, None, p.itemsize) for a, b in zip(edges, edges[1:], strict=False)]
    parts = [grid[c][s] for s in range(slices) for c in range(p.size)]
    mine = range(p.rank, len(parts), p.size)

    def shifted(base: str) -> dict[int, Place]:
        return {c: Place(base, a - edges[p.rank], b - edges[p.rank]) for c in mine for a, b in (parts[c],)}

    if p.collective == "alltoall":
        places = [Place(OUTPUT, *part) for part in parts]
        return Layout(places, None, [Place(INPUT, *part) for part in parts])
    if p.collective == "allgather":
        places = [Place(OUTPUT, *part) for part in parts]
        own = shifted(INPUT) if INPUT in p.memory else {}
        return Layout(places, [own.get(c, place) for c, place in enumerate(places)], None, mine)
    own = shifted(OUTPUT)
    out = [own.get(c, Place(WORK, *part)) for c, part in enumerate(parts)]
    return Layout(out, [Place(INPUT, *part) for part in parts], None, mine)
