"""How a state is cut into pieces, and who writes which; the same on every rank, and without MPI."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

__all__ = [
    "CheckpointError",
    "DamagedError",
    "Entry",
    "Piece",
    "Shard",
    "cut",
    "dtype_name",
    "dtype_of",
    "entries",
    "overlap",
]

SMALL = 1 << 20  #: bytes under which an array is not cut: a piece has its cost
LARGE = 1 << 28  #: bytes of the largest piece: one is held in memory where it must be copied

Index: TypeAlias = tuple[int, ...]


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: says which, why, and what is left of it."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what was saved: an older one may serve."""


@dataclass(frozen=True)
class Shard:
    """One rank's block of an array that is spread over the ranks.

    Ranks may hold the same block (replicas of a shard): one of them writes it.  All blocks together must
    cover the array, and blocks that differ must not overlap.

    Parameters
    ----------
    array
        The block.
    shape
        The shape of the whole array.
    start
        Where the block begins in it, an index for every axis.

    Examples
    --------
    >>> part = Shard(np.zeros((2, 5)), shape=(8, 5), start=(4, 0))    # rows 4 and 5 of 8
    """

    array: Any
    shape: Sequence[int]
    start: Sequence[int]


@dataclass(frozen=True)
class Entry:
    """A named array of the state as this rank sees it."""

    name: str
    array: Any
    shape: Index
    start: Index
    whole: bool  #: every rank has all of it

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        dtype: np.dtype[Any] = np.dtype(self.array.dtype)
        return dtype

    def describe(self) -> tuple[str, Index, str, bool]:
        """Return what must be the same on every rank."""
        return self.name, self.shape, dtype_name(self.dtype), self.whole


@dataclass(frozen=True)
class Piece:
    """A block of an array that lies in one file."""

    file: int
    source: int  #: the rank whose memory it is taken from
    start: Index
    shape: Index

    def within(self, origin: Index) -> tuple[slice, ...]:
        """Return where the piece lies in a block that begins at `origin`."""
        return tuple(slice(a - o, a - o + n) for a, o, n in zip(self.start, origin, self.shape, strict=True))


def entries(state: Mapping[str, Any]) -> list[Entry]:
    """Flatten a state: mappings within mappings become names with slashes."""
    found = list(_entries(state, ""))
    names = [entry.name for entry in found]
    groups = {name[:i] for name in names for i, char in enumerate(name) if char == "/"}
    for name in names:
        if name in groups or names.count(name) > 1:
            raise CheckpointError(f"two things in the state are called {name!r}")
    if not found:
        raise CheckpointError("the state holds no array")
    return found


def _entries(state: Mapping[str, Any], prefix: str) -> Iterator[Entry]:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if not isinstance(key, str) or "\0" in key or {"", ".", ".."} & set(key.split("/")):
            raise CheckpointError(f"the state has a name that HDF5 cannot hold: {name!r}")
        if isinstance(value, Mapping):
            yield from _entries(value, f"{name}/")
            continue
        array = value.array if isinstance(value, Shard) else value
        if not isinstance(array, np.ndarray) and not (hasattr(array, "get") and hasattr(array, "set")):
            kind = type(array).__name__
            raise CheckpointError(f"{name}: {kind} is not an array; what is no array goes into extra=")
        try:
            dtype_name(np.dtype(array.dtype))
        except TypeError:
            raise CheckpointError(f"{name}: arrays of {array.dtype} cannot be kept") from None
        if not isinstance(value, Shard):
            yield Entry(name, array, tuple(array.shape), (0,) * array.ndim, True)
            continue
        shape, start = tuple(map(int, value.shape)), tuple(map(int, value.start))
        inside = len(shape) == len(start) == array.ndim and all(
            0 <= at and at + count <= whole
            for at, count, whole in zip(start, array.shape, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{name}: a block of shape {array.shape} at {start} does not lie in shape {shape}"
            )
        yield Entry(name, array, shape, start, False)


def cut(
    mine: Sequence[Entry], blocks: Sequence[Mapping[str, tuple[Index, Index]]], files: Sequence[int]
) -> dict[str, list[Piece]]:
    """Return the pieces of every array.

    Parameters
    ----------
    mine
        The entries of this rank; of those that are whole only what `describe` tells is used.
    blocks
        For every rank, where its shards lie: name -> (start, shape).
    files
        For every rank, the number of the file that its pieces go to; the first rank of a file writes it.
    """
    writers = [files.index(file) for file in range(max(files) + 1)]
    pieces: dict[str, list[Piece]] = {}
    turn = 0
    for entry in mine:
        if entry.whole:
            parts = list(_parts(entry.shape, entry.dtype.itemsize, len(writers)))
            owners = [(turn + i) % len(writers) for i in range(len(parts))]
            turn += len(parts)
            pieces[entry.name] = [
                Piece(file, writers[file], *part) for file, part in zip(owners, parts, strict=True)
            ]
        else:
            first: dict[tuple[Index, Index], int] = {}
            for rank, block in enumerate(blocks):
                if math.prod(block[entry.name][1]):
                    first.setdefault(block[entry.name], rank)
            _check_cover(entry.name, entry.shape, list(first))
            pieces[entry.name] = [Piece(files[rank], rank, *block) for block, rank in first.items()]
    return pieces


def _parts(shape: Index, itemsize: int, writers: int) -> Iterator[tuple[Index, Index]]:
    """Cut a shape across its longest axis."""
    nbytes = math.prod(shape) * itemsize
    if not nbytes:
        return
    axis = max(range(len(shape)), key=lambda axis: shape[axis], default=0)
    count = max(1, min(writers, nbytes // SMALL), -(-nbytes // LARGE))
    count = min(count, shape[axis]) if shape else 1
    for i in range(count):
        start, size = [0] * len(shape), list(shape)
        if shape:
            start[axis] = i * shape[axis] // count
            size[axis] = (i + 1) * shape[axis] // count - start[axis]
        yield tuple(start), tuple(size)


def _check_cover(name: str, shape: Index, blocks: list[tuple[Index, Index]]) -> None:
    """Blocks must cover an array, each element once."""
    starts = np.array([start for start, _ in blocks], np.int64).reshape(len(blocks), len(shape))
    stops = starts + np.array([size for _, size in blocks], np.int64).reshape(starts.shape)
    for i in range(len(blocks)):
        meet = (np.maximum(starts[:i], starts[i]) < np.minimum(stops[:i], stops[i])).all(axis=1)
        if meet.any():
            other = blocks[int(meet.argmax())]
            raise CheckpointError(
                f"{name}: the ranks' blocks overlap: shape {other[1]} at {other[0]} and "
                f"shape {blocks[i][1]} at {blocks[i][0]}"
            )
    held, needed = sum(math.prod(size) for _, size in blocks), math.prod(shape)
    if held != needed:
        raise CheckpointError(f"{name}: the ranks' blocks hold {held} of {needed} elements of shape {shape}")


def overlap(
    pieces: Iterable[Piece], start: Index, shape: Index
) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the number of every piece that meets a block, and where they meet in the piece, in the block."""
    for number, piece in enumerate(pieces):
        low = [max(a, b) for a, b in zip(piece.start, start, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(piece.start, piece.shape, start, shape, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece.start, strict=True))
            yield number, inside, tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a name that `dtype_of` understands; TypeError for what is not a number."""
    if dtype.kind in "biufc":
        return dtype.str
    if getattr(ml_dtypes, dtype.name, None) is dtype.type and dtype.itemsize <= 2:
        return dtype.name
    raise TypeError(f"{dtype} is not a type of numbers")


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype that `dtype_name` named."""
    return np.dtype(getattr(ml_dtypes, name, name))
