"""The vocabulary of plans and its combinators."""

import doctest
import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicoll.plans.algorithms.peers import factors, log2ceil, receive_schedule, skips
from mpicoll.plans.plan import (
    IN,
    LEFT,
    OUT,
    RIGHT,
    TMP,
    Copy,
    Recv,
    Send,
    arc,
    on,
    pieces,
    reverse,
    sliced,
    together,
)


def test_chunks_become_tuples():
    assert Send(1, 3) == Send(1, [3]) == Send(1, range(3, 4))
    assert Recv(1, range(3)).chunks == (0, 1, 2)
    assert Copy((IN, 0), (TMP, [1])) == Copy((IN, (0,)), (TMP, (1,)))


def test_defaults_are_the_working_vector_and_a_plain_store():
    assert (Send(0, 0).buf, Recv(0, 0).buf, Recv(0, 0).reduce) == (OUT, OUT, False)


def test_operations_are_hashable_and_frozen():
    op = Recv(1, [2], reduce=LEFT)
    assert op in {op}
    with pytest.raises(AttributeError):
        op.peer = 2


@given(st.lists(st.integers(0, 20)))
def test_pieces_are_the_list_in_runs(chunks):
    runs = pieces(chunks)
    assert [c for run in runs for c in run] == chunks
    assert all(a.stop != b.start for a, b in zip(runs, runs[1:], strict=False))


@given(st.integers(1, 50).flatmap(lambda p: st.tuples(st.integers(0, 99), st.integers(0, p), st.just(p))))
def test_an_arc_has_at_most_two_runs(case):
    start, count, size = case
    chunks = arc(start, count, size)
    assert len(set(chunks)) == count
    assert len(pieces(chunks)) <= 2


def test_on_renames_ranks_and_chunks():
    plan = [[Send(1, [0, 1]), Recv(1, 1, reduce=RIGHT)], [Copy((TMP, 1), (OUT, 0), reduce=LEFT)]]
    assert list(on([4, 7], plan, [5, (8, 9)])) == [
        [Send(7, [5, 8, 9]), Recv(7, [8, 9], reduce=RIGHT)],
        [Copy((TMP, 1), (OUT, 5), reduce=LEFT)],
    ]
    assert list(on(None, plan)) == plan


def test_reverse_turns_messages_round():
    plan = [[Send(1, 0)], [Send(2, 0), Recv(3, 1)]]
    assert list(reverse(plan)) == [[Recv(2, 0, reduce=True), Send(3, 1)], [Recv(1, 0, reduce=True)]]
    assert list(reverse(plan, reduce=False))[-1] == [Recv(1, 0)]
    with pytest.raises(TypeError, match="no reverse"):
        list(reverse([[Copy((IN, 0), (OUT, 0))]]))


def test_together_pads_the_shorter_plan():
    assert list(together([[Send(1, 0)]], [[Send(2, 1)], [Send(3, 1)]])) == [
        [Send(1, 0), Send(2, 1)],
        [Send(3, 1)],
    ]


def test_slices_follow_each_other_by_a_round():
    plans = [[[Send(1, 0)], [Recv(1, 1)]] for _ in range(2)]
    assert list(sliced(plans, 2)) == [[Send(1, 0)], [Recv(1, 1), Send(1, 2)], [Recv(1, 3)]]


@given(st.integers(1, 5000))
def test_skips_halve_and_cover(size):
    found = skips(size)
    assert (found[0], found[-1], len(found)) == (1, size, log2ceil(size) + 1)
    assert all(b in (2 * a, 2 * a - 1) for a, b in zip(found, found[1:], strict=False))


@given(st.integers(2, 400).flatmap(lambda p: st.tuples(st.integers(0, p - 1), st.just(p))))
def test_every_phase_of_a_circulant_schedule_brings_each_block_once(case):
    rank, size = case
    blocks = receive_schedule(rank, size)
    q = log2ceil(size)
    assert len(blocks) == q
    if rank:
        assert {b % q for b in blocks} == set(range(q))
        assert sum(b >= 0 for b in blocks) == 1


def test_factors():
    assert (factors(1), factors(48), factors(7), factors(22)) == ([], [2, 2, 2, 2, 3], [7], None)


@pytest.mark.parametrize("name", ["plan", "trace", "verify", "draw", "algorithms.registry"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"mpicoll.plans.{name}"))
    assert result.attempted and not result.failed
