"""The barrier of ranks that share a window: counters that each rank writes and the others read.

A store and a few loads, where messages cost ten times as much.  Whoever waits polls with patience like
every other wait, and keeps the MPI going meanwhile: a late rank may depend on a message of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from .arena import Arena

ROW_NBYTES = 64  # a cache line: what a rank tells is its own to write
WORDS = 4  # after the counter, what a rank tells about its call
EARLY, EVERY = 256, 32  # so many polls drive the MPI now and then only, later ones all do


class Fence:
    """One lane's barrier.

    Parameters
    ----------
    arena
        The window.
    comm
        A communicator of the ranks, to keep the MPI going.
    rows
        Per rank of `comm`, its rank in the arena and the offset of its row, which starts as zeros.
    """

    def __init__(self, arena: Arena, comm: MPI.Intracomm, rows: Sequence[tuple[int, int]]) -> None:
        self.arena, self.comm = arena, comm
        self.rows = [memoryview(arena.view(r, offset, ROW_NBYTES)).cast("q") for r, offset in rows]
        self.mine = self.rows[comm.rank]
        self.others = [(r, row) for r, row in enumerate(self.rows) if r != comm.rank]
        self.epoch = 0
        self._seen = 0  # of the others, how many have arrived
        self._polls = 0

    def tell(self, words: Sequence[int]) -> None:
        """Write what the others may read after the next barrier.  The last word is a version."""
        if self.mine[WORDS] != words[-1]:
            for i, word in enumerate(words, 1):
                self.mine[i] = word

    def versions(self) -> list[int]:
        """The last word of every rank: while they are the same, so is all that was told."""
        return [row[WORDS] for row in self.rows]

    def told(self, rank: int) -> tuple[int, ...]:
        """What a rank told."""
        return tuple(self.rows[rank][1 : WORDS + 1])

    def arrive(self) -> None:
        """Say that this rank is there; what it stored before is visible to whoever passes."""
        self.arena.sync()
        self.epoch += 1
        self.mine[0] = self.epoch
        self._seen = self._polls = 0

    def __call__(self) -> bool:
        """Whether all ranks are there."""
        others, epoch = self.others, self.epoch
        while self._seen < len(others):
            if others[self._seen][1][0] < epoch:
                self._polls += 1
                if self._polls > EARLY or self._polls % EVERY == 0:
                    self.comm.Iprobe()
                return False
            self._seen += 1
        self.arena.sync()
        return True

    def missing(self) -> list[int]:
        """The ranks that are not there yet."""
        return [r for r, row in self.others if row[0] < self.epoch]
