"""The ranks of a communicator as members of an arena: staging slots and a barrier for every lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpi4py import MPI

from ...select.slicing import slot_nbytes
from .arena import Arena, translated
from .fence import ROW_NBYTES, Fence


@dataclass(frozen=True, slots=True)
class Lane:
    """What a lane has of the window.

    Attributes
    ----------
    slots
        Offsets of this rank's two staging slots.
    row
        Offset of this rank's row of the barrier.
    fence
        The barrier.
    """

    slots: tuple[int, int]
    row: int
    fence: Fence


class Neighbours:
    """The ranks of a communicator as members of an arena.

    Attributes
    ----------
    arena
        The shared window.
    ranks
        The arena's rank of every rank of the communicator.
    lanes
        The lanes that are open, the same on all ranks.
    """

    def __init__(self, arena: Arena, comm: MPI.Intracomm) -> None:
        self.arena, self.comm = arena, comm
        self.ranks = translated(comm, arena.group)
        self.slot_nbytes = slot_nbytes(comm.size)
        self.lanes: dict[int, Lane] = {}
        self._retired: list[tuple[int, int]] = []  # neighbours may still read it

    def open(self, lanes: Sequence[int]) -> int:
        """Reserve slots for lanes, as many in this order as all ranks have room for.  Collective.

        Returns
        -------
        int
            How many were opened.
        """
        mine: list[tuple[int, int]] = []
        for _ in lanes:
            slots = self.arena.allocate(2 * self.slot_nbytes)
            row = None if slots is None else self.arena.allocate(ROW_NBYTES)
            if slots is None or row is None:
                if slots is not None:
                    self.arena.release(slots, 2 * self.slot_nbytes)
                break
            self.arena.view(self.arena.rank, row, ROW_NBYTES)[:] = 0
            mine.append((slots, row))
        everybody = self.comm.allgather(mine)
        opened = min(map(len, everybody))
        for i, lane in enumerate(lanes[:opened]):
            slots, row = mine[i]
            rows = [(self.ranks[r], theirs[i][1]) for r, theirs in enumerate(everybody)]
            fence = Fence(self.arena, self.comm, rows)
            self.lanes[lane] = Lane((slots, slots + self.slot_nbytes), row, fence)
        for slots, row in mine[opened:]:
            self.arena.release(slots, 2 * self.slot_nbytes)
            self.arena.release(row, ROW_NBYTES)
        return opened

    def close(self, lane: int) -> None:
        """Give the slots of a lane back, whose last run ended with a barrier.  Local."""
        if lane in self.lanes:
            closed = self.lanes.pop(lane)
            self.arena.release(closed.slots[0], 2 * self.slot_nbytes)
            self.retire(closed.row, ROW_NBYTES)

    def retire(self, offset: int, nbytes: int) -> None:
        """Give a part of the segment back once the communicator is freed: neighbours may still read it."""
        self._retired.append((offset, nbytes))

    def free(self) -> None:
        """Give everything back.  Local, after a barrier of the ranks."""
        for lane in list(self.lanes):
            self.close(lane)
        for part in self._retired:
            self.arena.release(*part)
        self._retired.clear()
