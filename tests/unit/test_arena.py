"""The shared window's arithmetic and allocator, without a window."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicoll.memory.address import address_of
from mpicoll.runtime.transport.arena import (
    ALIGNMENT,
    DEFAULT_NBYTES,
    LARGE,
    LEAST_NBYTES,
    RESERVE,
    Arena,
    empty,
)
from mpicoll.runtime.transport.arena import segment_nbytes as nbytes_of

NBYTES = 1 << 20


@pytest.fixture(scope="module")
def arena():
    return Arena(MPI.COMM_SELF, NBYTES)


@pytest.mark.parametrize(
    ("ranks", "free", "wanted", "nbytes"),
    [
        (2, 1 << 34, DEFAULT_NBYTES, DEFAULT_NBYTES),
        (2, None, DEFAULT_NBYTES, DEFAULT_NBYTES),
        (2, 64 << 20, DEFAULT_NBYTES, 16 << 20),  # a container: half of 64 MiB, for two
        (8, 64 << 20, DEFAULT_NBYTES, 0),
        (2, 1 << 34, 0, 0),
        (2, 1 << 34, LEAST_NBYTES, LEAST_NBYTES),
        (2, 1 << 34, LEAST_NBYTES - 1, 0),
        (2, 100 << 20, 1 << 34, 25 << 20),
    ],
)
def test_segment_nbytes(ranks, free, wanted, nbytes):
    assert nbytes_of(ranks, free, wanted) == nbytes


@given(st.integers(1, 300), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_segments_fit_half_the_room(ranks, free, wanted):
    nbytes = nbytes_of(ranks, free, wanted)
    assert nbytes % 4096 == 0 and ranks * nbytes <= free // 2
    assert nbytes == 0 or nbytes >= LEAST_NBYTES


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, NBYTES // 3)), max_size=40))
def test_allocator(arena, actions):
    """Parts never overlap, and all room comes back."""
    held = []
    for take, nbytes in actions:
        if take or not held:
            start = arena.allocate(nbytes)
            if start is not None:
                assert start % ALIGNMENT == 0 and start + nbytes <= NBYTES
                assert all(start >= s + n or start + nbytes <= s for s, n in held if n and nbytes)
                held.append((start, nbytes))
        else:
            arena.release(*held.pop(nbytes % len(held)))
    for part in held:
        arena.release(*part)
    arena._collect()
    assert arena._free == [(0, NBYTES)]


def test_large_parts_leave_room_for_tables(arena):
    starts = []
    while (start := arena.allocate(LARGE)) is not None:
        starts.append(start)
    assert starts and arena.empty((NBYTES,), np.dtype("u1")) is None
    table = arena.allocate(NBYTES // RESERVE)
    assert table is not None
    for start in starts:
        arena.release(start, LARGE)
    arena.release(table, NBYTES // RESERVE)


def test_find(arena):
    x = empty(arena, (10, 3), "f4")
    offset = arena.find(x.reshape(-1).view("u1"))
    assert offset is not None and arena.address + offset == address_of(x)
    assert (arena.view(0, offset, x.nbytes) == x.reshape(-1).view("u1")).all()
    assert arena.find(np.zeros(10, "u1")) is None


def test_no_arena_gives_ordinary_arrays():
    x = empty(None, 5, "c8")
    assert x.shape == (5,) and x.dtype == "c8" and address_of(x) % ALIGNMENT == 0
    with pytest.raises(ValueError, match="expected lengths of at least 0"):
        empty(None, (2, -1), "f4")
