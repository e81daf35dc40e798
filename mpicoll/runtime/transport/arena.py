"""Memory that all ranks of a node can load from and store to.

One arena is made with a communicator whose ranks share a node, and every communicator derived from it
uses the same one.  Each rank owns a segment and hands out parts of it by itself: where a part lies is
published by whoever sends from it, so nobody else needs to know the order of allocations.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from ...memory.address import address_of, aligned_empty, host_view
from ...settings import number

ALIGNMENT = 64
DEFAULT_NBYTES = 256 << 20
LEAST_NBYTES = 8 << 20  # below this the staging slots leave no room for arrays
# Where cores share no cache, shorter vectors are staged even if they lie in the window: lines that a
# neighbour has read cost their owner more to write again than a copy.  Longer ones have left the caches.
IN_PLACE_NBYTES = 8 << 20
CHEAP_NBYTES = 256 << 10  # where they cost less: what is staged needs one barrier less
RESERVE = 16  # arrays and staging slots leave this part of a segment (one of 16) to tables
LARGE = 256 << 10
SHM = "/dev/shm"
_made: list[Arena] = []  # of this process, in an order that the ranks of each have in common


def segment_nbytes(ranks: int, free: int | None, wanted: int) -> int:
    """Bytes of a rank's segment: what was asked for, within half of the room in shared memory.

    Parameters
    ----------
    ranks
        Ranks on the node.
    free
        Free bytes in shared memory, None where that is unknown.
    wanted
        `MPICOLL_ARENA`, or `DEFAULT_NBYTES`.

    Returns
    -------
    int
        0 where the room is too small to be useful.
    """
    nbytes = wanted if free is None else min(wanted, free // 2 // ranks)
    return 0 if nbytes < LEAST_NBYTES else nbytes // 4096 * 4096


def translated(comm: MPI.Intracomm, group: MPI.Group) -> list[int]:
    """For every rank of a communicator its rank in a group."""
    mine = comm.Get_group()
    return list(MPI.Group.Translate_ranks(mine, list(range(mine.size)), group))


def shared_memory_free() -> int | None:
    """Free bytes in the file system that holds shared windows."""
    try:
        stat = os.statvfs(SHM)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def create(node: MPI.Intracomm) -> Arena | None:
    """Make the arena of a node.  Collective over `node`; every rank gets one or none does.

    Where the ranks have one in common already, from another communicator, they share it.  Otherwise
    the room is checked first: an MPI that runs out of shared memory does not fail, it crashes on first
    touch (MPICH) or hangs one rank (Open MPI).
    """
    if node.size == 1:
        return None
    wanted = number("MPICOLL_ARENA", DEFAULT_NBYTES)
    if node.allreduce(wanted > 0, MPI.LAND):
        for arena in _made:
            if MPI.UNDEFINED not in translated(node, arena.group):
                return arena
    nbytes = segment_nbytes(node.size, shared_memory_free(), wanted)
    nbytes = node.allreduce(nbytes, MPI.MIN)
    if not nbytes:
        if node.rank == 0 and wanted:
            need = node.size * LEAST_NBYTES * 2 >> 20
            warnings.warn(
                f"mpicoll: {SHM} has too little room for a shared window (expected {need} MiB free for "
                f"{node.size} ranks); ranks of this node exchange messages instead. In a container, start it "
                "with a larger --shm-size",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
    arena = Arena(node, nbytes)
    if not _rewriting_is_dear(arena, node):
        arena.in_place_nbytes = CHEAP_NBYTES
    _made.append(arena)
    return arena


def _rewriting_is_dear(arena: Arena, node: MPI.Intracomm, nbytes: int = 256 << 10, times: int = 9) -> bool:
    """Whether writing lines again that a neighbour has read costs more than staging them.  Collective.

    It does where the ranks' cores share no cache; then short vectors are staged wherever they lie.  Staging
    copies into lines that a neighbour has read too, but a copy need not fetch what it replaces.
    """
    mine = arena.view(arena.rank, 0, nbytes).view(np.float32)
    aside = arena.view(arena.rank, nbytes, nbytes).view(np.float32)
    theirs = arena.view((arena.rank + 1) % node.size, 0, 2 * nbytes).view(np.uint64)
    spent = []
    for _ in range(times):
        node.Barrier()
        np.bitwise_xor.reduce(theirs)
        node.Barrier()
        marks = [perf_counter()]
        for write in (partial(mine.fill, 1), partial(mine.fill, 2), partial(np.copyto, aside, mine)):
            write()
            marks.append(perf_counter())
        spent.append(np.diff(marks))
    again, before, copied = np.median(spent, axis=0)
    return 2 * node.allreduce(int(again - before > copied)) > node.size


class Arena:
    """A node's shared window, and this rank's allocator of its own segment.

    Never freed before the MPI ends: arrays may outlive every communicator, and reading a freed window
    is a crash.

    Attributes
    ----------
    in_place_nbytes
        Vectors of at least so many bytes that lie in the window are read where they are; shorter ones are
        staged.  The same on all ranks.
    """

    def __init__(self, node: MPI.Intracomm, nbytes: int) -> None:
        self.window = MPI.Win.Allocate_shared(nbytes, 1, comm=node)
        self.window.Lock_all()  # an epoch, or MPICH refuses Sync
        self.rank = node.rank
        self.group = node.Get_group()
        self.nbytes = nbytes
        self.in_place_nbytes = IN_PLACE_NBYTES
        memories = [self.window.Shared_query(r)[0] for r in range(node.size)]
        self.segments = [np.frombuffer(memory, np.uint8, nbytes) for memory in memories]
        self.address = address_of(self.segments[self.rank])
        self._free = [(0, nbytes)]  # (start, stop), sorted
        self._returned: deque[tuple[int, int]] = deque()  # by finalizers, which may run in between
        self._lock = threading.Lock()

    def sync(self) -> None:
        """Order this rank's loads and stores with those of its neighbours."""
        self.window.Sync()

    def allocate(self, nbytes: int, spare: int = 0) -> int | None:
        """Offset of a free part of this rank's segment, first fit; None where there is none.

        `spare` bytes must be left.  Large parts always leave some to small ones, such as tables.
        """
        need = _aligned(nbytes)
        with self._lock:
            self._collect()
            spare = self.nbytes // RESERVE if need >= LARGE else spare
            if need > sum(stop - start for start, stop in self._free) - spare:
                return None
            for i, (start, stop) in enumerate(self._free):
                if stop - start >= need:
                    self._free[i : i + 1] = [(start + need, stop)] if stop - start > need else []
                    return start
        return None

    def release(self, start: int, nbytes: int) -> None:
        """Give a part back.  From any thread, at any time."""
        self._returned.append((start, start + _aligned(nbytes)))

    def _collect(self) -> None:
        """Join returned parts with their free neighbours."""
        parts = self._free
        while self._returned:
            parts.append(self._returned.popleft())
        parts.sort()
        self._free = parts[:1]
        for a, b in parts[1:]:
            if a == self._free[-1][1]:
                self._free[-1] = (self._free[-1][0], b)
            else:
                self._free.append((a, b))

    def find(self, data: np.ndarray) -> int | None:
        """Offset of bytes that lie in this rank's segment, None for all others."""
        offset = address_of(data) - self.address
        return offset if 0 <= offset <= self.nbytes - data.size else None

    def view(self, rank: int, offset: int, nbytes: int) -> np.ndarray:
        """Bytes of another rank's segment."""
        return self.segments[rank][offset : offset + nbytes]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
        """An uninitialised array in this rank's segment, given back when its last view is gone."""
        nbytes = prod(shape) * dtype.itemsize
        offset = self.allocate(nbytes, spare=self.nbytes // RESERVE)
        if offset is None:
            return None
        whole = host_view(self.address + offset, nbytes)
        weakref.finalize(whole, self.release, offset, nbytes).atexit = False
        return whole.view(dtype).reshape(shape)


def _aligned(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


def empty(arena: Arena | None, shape: Any, dtype: Any) -> np.ndarray:
    """An array in the arena, or an ordinary one on a cache line where there is no arena or no room."""
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"empty: shape {shape} of {dtype}, expected lengths of at least 0 and plain numbers")
    array = arena.empty(shape, dtype) if arena else None
    if array is None:
        array = aligned_empty(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    return array
