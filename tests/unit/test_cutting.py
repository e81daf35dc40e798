"""How messages are cut: counts of segments and slices, and what a plan needs in a staging slot."""

import pytest

from mpicoll.plans.algorithms import NATIVE, get, registry
from mpicoll.select.slicing import (
    MOST,
    SEGMENT_NBYTES,
    scattered,
    segments_for,
    slices_for,
    slot_nbytes,
    window_demand,
    window_slices_for,
)

MIB = 1 << 20


def test_segments_only_for_algorithms_that_take_them():
    assert segments_for(get("allreduce", "ring"), 1 << 30) == 1
    chain = get("bcast", "chain")
    assert segments_for(chain, 0) == segments_for(chain, SEGMENT_NBYTES) == 1
    assert segments_for(chain, SEGMENT_NBYTES + 1) == 2 and segments_for(chain, 1 << 40) == MOST


@pytest.mark.parametrize("nodes", [[[0, 1, 2, 3]], [[0, 1], [2, 3]]])
def test_slices_grow_with_the_message(nodes):
    ring = get("allreduce", "ring")
    counts = [slices_for(ring, nbytes, 4, nodes) for nbytes in (0, 1, 1000, MIB, 64 * MIB, 1 << 40)]
    assert counts[0] == counts[1] == counts[2] == 1 and counts == sorted(counts) and counts[-1] == MOST
    assert slices_for(get("barrier", "dissemination"), 0, 4, nodes) == 1
    assert slices_for(get("allgather", "bruck"), 1 << 30, 4, nodes) == 1


def test_scattered():
    assert scattered(get("allgather", "ring"), 5) and not scattered(get("allgather", "bruck"), 5)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_slices_fit_a_staging_slot(size):
    for entries in registry.values():
        for name, entry in entries.items():
            if name == NATIVE or entry.unmet(size, nodes=[list(range(size))]):
                continue
            need = window_demand(entry, size, 0)
            if need is None:
                continue
            for nbytes in (1, MIB, 100 * MIB):
                part = -(-nbytes // window_slices_for(nbytes, need, size))
                assert part * need <= slot_nbytes(size), entry


def test_plans_that_do_not_suit_a_window():
    assert window_demand(get("bcast", "chain"), 4, 0) is None
    assert window_demand(get("barrier", "dissemination"), 4, 0) is None
    assert window_demand(get("allreduce", "direct"), 4, 0) is not None
    assert window_slices_for(0, 0, 4) == 1
