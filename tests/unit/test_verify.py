"""The verifier refuses what is wrong, naming rank, round and chunk, and derives what is right."""

import re

import pytest

from mpicoll.plans.algorithms import Algorithm, get
from mpicoll.plans.plan import IN, LEFT, OUT, RIGHT, TMP, Copy, Recv, Send
from mpicoll.plans.verify import PlanError, admit, check, trace


def fault(collective, function, size, chunks=None, *, commutative=True, **options):
    """Return the error with which a broken plan is refused."""
    broken = Algorithm(collective, "broken", function, commutative, cut=chunks, takes=tuple(options))
    with pytest.raises(PlanError) as caught:
        check(broken, size, **options)
    error = caught.value
    assert isinstance(error, ValueError)
    numbers = (("rank", error.rank), ("round", error.round), ("chunk", error.chunk))
    for word, number in numbers:
        assert number is None or re.search(rf"\b{word} {number}\b", str(error))
    return error


def at(error):
    return error.rank, error.round, error.chunk


def ring(rank, size, hops=None):
    left, right = (rank - 1) % size, (rank + 1) % size
    for hop in range(hops or size - 1):
        yield [Send(right, (rank - hop) % size), Recv(left, (left - hop) % size, reduce=True)]


def test_a_dropped_step_is_a_lost_contribution():
    error = fault("reduce_scatter", lambda rank, size: ring(rank, size, hops=2), 4)
    assert at(error) == (0, 2, 0)
    assert "without the contribution of ranks 1-3" in str(error)


def test_a_step_dropped_by_one_rank():
    def plan(rank, size):
        rounds = list(get("allreduce", "ring").plan(rank, size))
        yield from rounds if rank != 2 else rounds[:1] + rounds[2:]

    error = fault("allreduce", plan, 4)
    assert at(error) == (2, 2, 2) and "chunk 3 arrives in chunk 2, the place of another" in str(error)


def test_a_contribution_that_counts_twice():
    error = fault("allreduce", lambda rank, size: ring(rank, size, hops=size), 4)
    assert at(error)[1] == 4 and error.chunk is not None
    assert "counts the contribution of rank" in str(error) and "twice" in str(error)


def test_recursive_doubling_without_folding_counts_twice():
    def plan(rank, size):
        for hop in (1, 2):
            yield [Send((rank + hop) % size, 0), Recv((rank - hop) % size, 0, reduce=True)]

    assert at(fault("allreduce", plan, 3, 1))[1:] == (2, 0)


def test_a_deadlock_that_buffering_would_hide():
    def plan(rank, size):
        yield [Send((rank + 1) % size, 0)]
        yield [Recv((rank - 1) % size, 0, reduce=True)]

    error = fault("allreduce", plan, 3, 1)
    assert at(error) == (0, 1, 0)
    assert "deadlock" in str(error) and "rank 2 in round 1 sends chunk 0 to rank 0" in str(error)


def test_a_deadlock_of_some_ranks_names_the_circle():
    def plan(rank, size):
        if rank == 0:
            yield [Recv(1, 0, reduce=True)]
        else:
            yield [Recv(3 - rank, 0, reduce=True)]
            yield [Send(3 - rank, 0)]

    error = fault("allreduce", plan, 3, 1)
    assert "deadlock in a circle: rank 1 in round 1 awaits chunk 0 from rank 2; rank 2" in str(error)


def test_an_unmatched_send():
    def plan(rank, size):
        yield from ring(rank, size)
        if rank == 1:
            yield [Send(0, 2)]

    error = fault("reduce_scatter", plan, 3)
    assert at(error) == (1, 3, 2)
    assert "unmatched message: sends chunk 2 to rank 0, which has ended its plan" in str(error)


def test_an_unmatched_receive():
    def plan(rank, size):
        if rank == 0:
            yield [Recv(1, [0, 1], reduce=True)]

    assert "unmatched message: awaits chunks 0-1 from rank 1" in str(fault("allreduce", plan, 2))


def test_lengths_that_differ():
    def plan(rank, size):
        yield [Send(1 - rank, 0), Recv(1 - rank, [0, 1], reduce=True)]

    error = fault("allreduce", plan, 2)
    assert at(error)[1:] == (1, 0)
    assert "awaits chunks 0-1 from rank" in str(error) and "sends chunk 0 to rank" in str(error)


def test_a_broken_order():
    def plan(rank, size):
        peer = rank ^ 1
        yield [Send(peer, 0), Recv(peer, 0, reduce=LEFT)]  # right for the upper rank only

    error = fault("allreduce", plan, 2, 1, commutative=False)
    assert at(error) == (0, 1, 0)
    assert "out of rank order" in str(error)
    commuting = check(Algorithm("allreduce", "swapped", plan, True, cut=1), 2)
    assert not commuting.ordered and commuting.same_bits


def test_ring_does_not_keep_order_and_direct_does():
    assert not check(get("allreduce", "ring"), 4).ordered
    assert check(get("allreduce", "direct"), 4).ordered


def test_different_bits_on_different_ranks():
    def plan(rank, size):
        """Everyone sends to everyone and adds from the left neighbour on."""
        others = [(rank - hop) % size for hop in range(1, size)]
        yield [Send(peer, 0) for peer in others] + [Recv(peer, 0, reduce=True) for peer in others]

    report = check(Algorithm("allreduce", "careless", plan, True, cut=1), 3)
    assert not report.same_bits
    assert report.rounds == 1 and report.fanout == 2


def test_a_read_of_what_is_not_set():
    def scratch(rank, size):
        yield [Send(1 - rank, 0, TMP), Recv(1 - rank, 0, reduce=True)]

    error = fault("allreduce", scratch, 2, 1)
    assert at(error) == (0, 1, 0) and "reads TMP chunk 0, which is not set yet" in str(error)

    def early(rank, size):
        yield [Send(1 - rank, 1 - rank), Recv(1 - rank, rank)]

    assert "reads chunk 1, which is not set" in str(fault("allgather", early, 2))


def test_the_send_buffer_is_there_in_alltoall_only():
    def plan(rank, size):
        yield [Copy((IN, 0), (OUT, 0))]

    assert "reads IN chunk 0" in str(fault("allreduce", plan, 2))


def test_a_chunk_in_the_place_of_another():
    def plan(rank, size):
        yield [Send(1 - rank, rank), Recv(1 - rank, rank, TMP)]

    error = fault("allgather", plan, 2)
    assert at(error) == (0, 1, 0) and "chunk 1 arrives in TMP chunk 0, the place of another" in str(error)


def test_a_reduction_where_nothing_is_to_reduce():
    def plan(rank, size):
        yield [Send(1 - rank, rank), Recv(1 - rank, 1 - rank, reduce=True)]

    assert "holds no operand" in str(fault("allgather", plan, 2))


def test_two_writes_in_a_round():
    def plan(rank, size):
        others = [peer for peer in range(size) if peer != rank]
        yield [Send(peer, 0) for peer in others] + [Recv(peer, 0) for peer in others]

    error = fault("allreduce", plan, 3, 1)
    assert at(error)[1:] == (1, 0) and "two writes to chunk 0" in str(error)


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([Send(2, 0)], "no other rank of 2"),
        ([Send(0, 0)], "no other rank of 2"),
        ([Send(1, 2)], "no chunk 2, the vector has 2"),
        ([Recv(1, -1)], "no chunk -1"),
        ([Send(1, 0, "temp")], "no TEMP chunk 0"),
        ([Recv(1, 0, IN)], "writes to the send buffer"),
        ([Recv(1, 0, reduce="sum")], "reduces in an unknown way"),
        ([Copy((OUT, [0, 1]), (TMP, 0))], "unequal numbers"),
        (Send(1, 0), "a round is a list"),
        ([(1, 0)], "no Send, Recv or Copy"),
    ],
)
def test_what_is_no_round(ops, words):
    def plan(rank, size):
        if rank == 0:
            yield []
            yield ops

    error = fault("allreduce", plan, 2)
    assert (error.rank, error.round) == (0, 2) and words in str(error)


def test_a_plan_that_raises():
    def plan(rank, size):
        yield []
        if rank == 1:
            yield [Send([0, 0][rank + 1], 0)]

    error = fault("allreduce", plan, 2)
    assert at(error) == (1, 2, None)
    assert "the plan raises IndexError: list index out of range" in str(error)
    assert isinstance(error.__cause__, IndexError)


def test_a_plan_that_is_none():
    assert "returns None, but a plan yields rounds" in str(fault("allreduce", lambda rank, size: None, 2))


def test_numbers_that_are_not_whole():
    half = fault("allreduce", lambda rank, size: iter([[Send(size / 2, 0)]]), 2)
    assert half.what.endswith("1.0 is no rank")
    half = fault("allreduce", lambda rank, size: iter([[Send(1 - rank, [0, 0.5])]]), 2)
    assert half.what.endswith("0.5 is no chunk")


def test_a_plan_that_does_not_end(monkeypatch):
    monkeypatch.setattr("mpicoll.plans.interpret.ENDLESS", 50)

    def plan(rank, size):
        while True:
            yield []

    assert "does not end" in str(fault("allreduce", plan, 2))


def test_wrong_ends():
    def swapped(rank, size):
        yield [Copy((IN, rank), (OUT, rank)), Send(1 - rank, rank, IN), Recv(1 - rank, 1 - rank)]

    error = fault("alltoall", swapped, 2)
    assert "ends with the chunk from rank 1 to rank 1 instead" in str(error)
    error = fault("bcast", lambda rank, size, root: iter(()), 2, 1, root=1)
    assert at(error) == (0, 0, 0) and "without a result" in str(error)


def test_a_barrier_that_lets_one_through():
    def plan(rank, size):
        yield [Send((rank + 1) % size, ()), Recv((rank - 1) % size, ())]

    error = fault("barrier", plan, 3, 0)
    assert at(error) == (0, 1, None) and "without having heard of rank 1" in str(error)


def test_alike_is_false_where_one_side_cuts_a_message_otherwise():
    def plan(rank, size):
        """One run where it is sent, three where it arrives."""
        if rank == 0:
            yield [Send(1, [0, 1, 2])]
        else:
            yield [Recv(0, [0, 4, 2], TMP)]
            yield [Copy((TMP, [0, 4, 2]), (OUT, [0, 1, 2]))]

    report = check(Algorithm("bcast", "uneven", plan, cut=3), 2)
    assert not report.alike and report.pieces == 1


def test_staged_counts_stores_into_what_is_being_sent():
    def swap(rank, size):
        peer = 1 - rank
        yield [Copy((OUT, 0), (TMP, 0))]
        yield [Send(peer, 0, TMP), Recv(peer, 0, TMP)]
        yield [Copy((TMP, 0), (OUT, 0), reduce=LEFT if peer < rank else RIGHT)]

    report = check(Algorithm("allreduce", "swap", swap, cut=1), 2)
    assert report.staged == 2 and report.ordered and report.same_bits


def test_admit_finds_out_whether_order_is_kept():
    def mine(rank, size):
        peer = rank ^ 1
        if peer < size:
            yield [Send(peer, range(size)), Recv(peer, range(size), reduce=LEFT if peer < rank else RIGHT)]

    assert admit("allreduce", mine, 2).commutative is False
    assert admit("reduce_scatter", ring_to_own, 5).commutative is True
    with pytest.raises(PlanError):
        admit("allreduce", mine, 3)


def ring_to_own(rank, size):
    for hop in range(1, size):
        give, take = (rank - hop) % size, (rank - hop - 1) % size
        yield [Send((rank + 1) % size, give), Recv((rank - 1) % size, take, reduce=True)]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("ring", dict(root=4), "no root 4 among 4 ranks"),
        ("ring", dict(segments=0), "4 ranks and 0 segments"),
        ("split_rail", {}, "every node"),
        ("split_rail", dict(nodes=[[0, 1], [2]]), "each of 4 ranks once"),
        ("native", {}, "there is no plan"),
    ],
)
def test_what_cannot_be_checked(name, options, words):
    with pytest.raises(ValueError, match=words):
        check(get("allreduce", name), 4, **options)


def test_a_trace_keeps_every_step_up_to_the_fault():
    whole = trace(get("allreduce", "ring"), 4)
    assert (whole.error, whole.time, len(whole.messages), len(whole.landings)) == (None, 6, 24, 24)
    broken = trace(Algorithm("allreduce", "x", lambda rank, size: ring(rank, size, size), True), 4)
    assert broken.report is None and broken.time == 4 and broken.error.round == 4


def test_reports():
    report = check(get("allreduce", "circulant"), 5)
    assert (report.rounds, report.sent, report.messages, report.pieces) == (6, 8, 30, 2)
    assert [float(volume) for volume in report.volumes] == [1.6] * 5
