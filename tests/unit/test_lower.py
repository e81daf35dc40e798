"""Lowering, interpreted in one process: every algorithm's steps move and reduce the right bytes."""

from collections import defaultdict, deque

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.memory.buffer import parse
from mpicoll.memory.op import Reducer
from mpicoll.plans.algorithms import NATIVE, registry
from mpicoll.plans.plan import Recv, Send, sliced
from mpicoll.runtime.transport.bound import bind, calls
from mpicoll.runtime.transport.lower import SCRATCH, TEMPORARY, Layout, Lowering, Place, joined
from mpicoll.runtime.transport.mpi import _slice
from mpicoll.runtime.transport.problem import INPUT, OUTPUT, WORK, Problem, cut
from mpicoll.runtime.transport.window import SLOTS, WindowLowering
from mpicoll.select.slicing import window_demand

SIZES = range(1, 7)
ITEM = 8
ENTRIES = [
    entry
    for entries in registry.values()
    for name, entry in entries.items()
    if name not in (NATIVE, "dissemination")
]


class Case:
    """A collective on random vectors: every rank's problem, and what its output must be."""

    def __init__(self, entry, size, root, in_place, seed):
        random = np.random.default_rng(seed)
        collective = entry.collective
        lengths = random.integers(0, 9, size) if collective == "reduce_scatter" else [random.integers(0, 40)]
        self.counts = tuple(int(n) for n in lengths)
        self.entry, self.size, self.root = entry, size, root
        n = sum(self.counts) * (size if collective in ("allgather", "alltoall") else 1)
        self.sent = [random.integers(0, 99, n) for _ in range(size)]
        self.total = sum(self.sent)
        self.problems = [self.problem(rank, in_place) for rank in range(size)]

    def problem(self, rank, in_place):
        collective, sent, n = self.entry.collective, self.sent[rank].copy(), self.sent[rank].size
        part = self.span(rank)
        memory = {INPUT: sent}
        if collective == "bcast":
            memory = {OUTPUT: sent if rank == self.root else np.zeros(n, int)}
        elif collective == "reduce" and rank != self.root:
            pass
        elif collective == "reduce_scatter":
            memory[OUTPUT] = np.zeros(part.stop - part.start, int)
        elif in_place and collective != "alltoall":
            memory = {OUTPUT: sent}
        else:
            memory[INPUT] = sent[part].copy() if collective == "allgather" else sent
            memory[OUTPUT] = np.zeros(n, int)
        reducer = Reducer(MPI.SUM, parse(sent, "sendbuf", writable=False))
        data = {base: array.view(np.uint8) for base, array in memory.items()}
        return Problem(collective, rank, self.size, self.root, self.counts, ITEM, data, reducer)

    def span(self, rank):
        counts = self.counts if len(self.counts) == self.size else self.counts * self.size
        if self.entry.collective not in ("reduce_scatter", "allgather", "alltoall"):
            return slice(0, sum(self.counts))
        return slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    def check(self):
        collective = self.entry.collective
        for rank, problem in enumerate(self.problems):
            if OUTPUT not in problem.memory:
                continue
            got = problem.memory[OUTPUT].view(int)
            if collective == "bcast":
                want = self.sent[self.root]
            elif collective == "allgather":
                want = np.concatenate([each[self.span(r)] for r, each in enumerate(self.sent)])
            elif collective == "alltoall":
                want = np.concatenate([each[self.span(rank)] for each in self.sent])
            else:
                want = self.total[self.span(rank)]
            assert (got == want).all(), f"rank {rank}"


def nodes_of(size):
    return [list(range(size))[i : i + 2] for i in range(0, size, 2)]


def cases(entry):
    nodes = {size: nodes_of(size) if size % 2 == 0 else [list(range(size))] for size in SIZES}
    for size in SIZES:
        if entry.unmet(size, nodes=nodes[size]):
            continue
        for root in {0, size - 1} if "root" in entry.takes else {0}:
            for in_place in (False, True):
                for seed in range(2):
                    yield Case(entry, size, root, in_place, seed), nodes[size]


def extent(places, base):
    return max((place.stop for place in places if place.base == base), default=0)


def memories(lowering, layout, problem):
    made = {SCRATCH: lowering.scratch, TEMPORARY: lowering.temporary, WORK: extent(layout.out, WORK)}
    return {base: np.full(nbytes, 0xEE, np.uint8) for base, nbytes in made.items()} | problem.memory


def exchange(programs):
    """Run ranks' bound rounds as messages: whoever can go on does; a message is read when it is sent."""
    boxes = defaultdict(deque)
    at = dict.fromkeys(range(len(programs)), -1)

    def post(rank):
        at[rank] += 1
        if at[rank] < len(programs[rank]):
            current = programs[rank][at[rank]]
            for function, arguments in current.before:
                function(*arguments)
            for peer, data in current.sends:
                boxes[rank, peer].append(data.copy())

    for rank in at:
        post(rank)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            current = program[at[rank]]
            needs = defaultdict(int)
            for peer, _ in current.recvs:
                needs[peer] += 1
            if all(len(boxes[peer, rank]) >= n for peer, n in needs.items()):
                for peer, target in current.recvs:
                    message = boxes[peer, rank].popleft()
                    assert message.size == target.size, (rank, peer)
                    target[:] = message
                for function, arguments in current.after:
                    function(*arguments)
                post(rank)
                moved = True
    assert all(at[rank] == len(program) for rank, program in enumerate(programs)), "stuck"
    assert not any(boxes.values()), "messages left"


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_messages(entry, alike, slices):
    segments = 4 if "segments" in entry.takes else 1
    for case, nodes in cases(entry):
        chunks = entry.chunks(case.size, segments=segments, nodes=nodes)
        weights = entry.weights(case.size, nodes=nodes)
        for s in range(slices):
            programs = []
            for rank, problem in enumerate(case.problems):
                layout = _slice(problem.layout(chunks, weights, slices), s, chunks)
                lowering = Lowering(layout, alike=alike)
                plan = entry.plan(rank, case.size, root=case.root, segments=segments, nodes=nodes)
                steps = lowering.lower(plan)
                if WORK not in problem.memory:
                    problem.memory[WORK] = np.zeros(16 * 1024, np.uint8)
                memory = memories(lowering, layout, problem)
                programs.append([bind(step, memory, problem.reducer) for step in steps])
            exchange(programs)
        for problem in case.problems:
            problem.memory.pop(WORK)
        case.check()


class Reach(dict):
    """A rank's memories, and those of its peers where they have published."""

    def __missing__(self, base):
        _, peer, k = base
        published = self.ranks[peer][0].published[self.rank][k]
        return self.ranks[peer][1][published.base][published.start :]


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("inside", ["all", "none", "odd ranks"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_window(entry, inside, slices):
    """One barrier per round; between barriers, ranks land in either order with the same result."""
    for turn, (case, _) in enumerate(cases(entry)):
        if window_demand(entry, case.size, case.root) is None:
            continue
        chunks = entry.chunks(case.size)
        ranks = []
        for rank, problem in enumerate(case.problems):
            layout = problem.layout(chunks, entry.weights(case.size), slices)
            shared = inside == "all" or (inside == "odd ranks" and rank % 2)
            lowering = WindowLowering(layout, dict.fromkeys(problem.memory, 0) if shared else {})
            plans = [entry.plan(rank, case.size, root=case.root) for _ in range(slices)]
            steps = lowering.lower(sliced(plans, chunks))
            memory = Reach(memories(lowering, layout, problem))
            memory |= {slot: np.full(1 << 14, 0xEE, np.uint8) for slot in SLOTS}
            ranks.append((lowering, memory, steps, problem))
        for rank, (_, memory, _, _) in enumerate(ranks):
            memory.ranks, memory.rank = ranks, rank
        for t in range(max(len(steps) for _, _, steps, _ in ranks)):
            for stage in ("before", "after"):
                for _, memory, steps, problem in ranks[:: -1 if (t + turn) % 2 else 1]:
                    for function, arguments in calls(getattr(steps[t], stage), memory, problem.reducer):
                        function(*arguments)
        case.check()


def test_places_join_where_they_touch():
    a, b, c = Place("x", 0, 8), Place("x", 8, 16), Place("y", 16, 24)
    assert joined([a, b, c]) == [Place("x", 0, 16), c]
    assert joined([a, Place("x", 99, 99), b]) == [Place("x", 0, 16)]
    assert joined([b, a]) == [b, a]
    assert len(joined([Place("x", 3, 3)])) == 1


def test_cut_covers_everything_at_multiples_of_the_unit():
    for nbytes in (0, 8, 80, 8 * 13):
        for chunks in (1, 3, 7):
            parts = cut(16, 16 + nbytes, chunks, None, 8)
            assert [a for a, _ in parts[1:]] == [b for _, b in parts[:-1]] and len(parts) == chunks
            assert parts[0][0] == 16 and parts[-1][1] == 16 + nbytes
            assert all((b - a) % 8 == 0 for a, b in parts)


def test_a_round_that_overwrites_what_it_sends_uses_scratch():
    layout = Layout([Place("out", 0, 8), Place("out", 8, 16)])
    step = Lowering(layout).round([Send(1, 0), Recv(1, 0)])
    assert step.recvs[0][1].base == SCRATCH and step.after[0].target == layout.out[0]
    step = Lowering(layout).round([Send(1, 0), Recv(1, 1)])
    assert step.recvs == [(1, layout.out[1])] and not step.after


def test_runs_travel_apart_only_where_both_ends_cut_alike():
    layout = Layout([Place("out", 8 * i, 8 * i + 8) for i in range(6)])
    chunks = [4, 5, 0, 1]
    assert len(Lowering(layout).round([Send(1, chunks)]).sends) == 2
    packed = Lowering(layout, alike=False).round([Send(1, chunks)])
    assert len(packed.sends) == 1 and [move.left for move in packed.before] == joined(
        layout.out[c] for c in chunks
    )
