"""Every registered algorithm: right at every number of ranks, at the cost it states, in time."""

import sys
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product, zip_longest
from math import prod
from time import process_time

import pytest

from mpicoll.plans import algorithms
from mpicoll.plans.algorithms import (
    POWER_OF_TWO,
    ROOTED,
    Algorithm,
    Sizes,
    allreduce,
    get,
    register,
    registry,
)
from mpicoll.plans.algorithms.hierarchical import rails
from mpicoll.plans.algorithms.peers import factors, inorder, log2ceil, postorder, power_of_two_below
from mpicoll.plans.algorithms.registry import load_entry_points
from mpicoll.plans.plan import Recv, Send, sliced
from mpicoll.plans.verify import check

ALL = [entry for entries in registry.values() for entry in entries.values() if entry.function]
L = log2ceil


def two_nodes(size):
    cut = (size + 2) // 3
    return [list(ranks) for ranks in (range(cut), range(cut, size)) if ranks]


def blocks(*counts):
    return [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]


def cases(algorithm, size):
    """The options to verify for one size: every root of few ranks, several numbers of segments."""
    roots, segments = [0], [1]
    if "root" in algorithm.takes:
        roots = range(size) if size <= 8 else [0, size // 2, size - 1]
    if "segments" in algorithm.takes:
        segments = [1, 2, 3, 7, 12] if size <= 8 else [1, 5, 8]
    both = product(roots, segments) if size <= 8 else zip_longest(roots, segments, fillvalue=0)
    return [dict(root=r, segments=s or 1, nodes=two_nodes(size)) for r, s in both]


def folding(size):
    """Rounds that folding to a power of two costs."""
    return 0 if POWER_OF_TWO.allows(size) else 1


def depth(tree, size, *args):
    return max(tree(v, *args)[2] for v in range(size))


# The rounds and the most chunks that a rank sends, as functions of size and segments; None: not stated.
COSTS = {
    "allreduce ring": (lambda p, s: 2 * (p - 1), lambda p, s: 2 * (p - 1)),
    "allreduce circulant": (lambda p, s: 2 * L(p), lambda p, s: 2 * (p - 1)),
    "allreduce direct": (lambda p, s: 2 * (p > 1), lambda p, s: 2 * (p - 1)),
    "allreduce recursive_doubling": (lambda p, s: L(p) + folding(p), None),
    "allreduce halving_doubling": (
        lambda p, s: 2 * (p.bit_length() - 1 + folding(p)),
        lambda p, s: 2 * (power_of_two_below(p) - 1) + folding(p) * power_of_two_below(p),
    ),
    "allreduce halving_swing": (
        lambda p, s: 2 * (p.bit_length() - 1 + folding(p)),
        lambda p, s: 2 * (power_of_two_below(p) - 1) + folding(p) * power_of_two_below(p),
    ),
    "allreduce recursive_multiplying": (
        lambda p, s: len(factors(p)),
        lambda p, s: sum(f - 1 for f in factors(p)),
    ),
    "allreduce double_binary_tree": (None, None),
    "allreduce dual_root": (
        lambda p, s: s + 2 * max(postorder(v, p // 2, p)[2] for v in range(p // 2, p)) if p > 1 else 0,
        None,
    ),
    "allreduce split_rail": (None, None),
    "reduce_scatter ring": (lambda p, s: p - 1, lambda p, s: p - 1),
    "reduce_scatter circulant": (lambda p, s: L(p), lambda p, s: p - 1),
    "reduce_scatter direct": (lambda p, s: int(p > 1), lambda p, s: p - 1),
    "reduce_scatter recursive_halving": (lambda p, s: L(p), lambda p, s: p - 1),
    "reduce_scatter pat": (lambda p, s: L(p), lambda p, s: p - 1),
    "reduce_scatter ordered": (lambda p, s: L(p) + folding(p), lambda p, s: p - 1 + folding(p)),
    "reduce_scatter ordered_pairwise": (lambda p, s: p - 1, lambda p, s: p - 1),
    "allgather ring": (lambda p, s: p - 1, lambda p, s: p - 1),
    "allgather circulant": (lambda p, s: L(p), lambda p, s: p - 1),
    "allgather bruck": (lambda p, s: L(p), lambda p, s: p - 1),
    "allgather direct": (lambda p, s: int(p > 1), lambda p, s: p - 1),
    "allgather recursive_doubling": (lambda p, s: L(p), lambda p, s: p - 1),
    "allgather neighbor_exchange": (lambda p, s: p // 2, lambda p, s: p - 1),
    "allgather pat": (lambda p, s: L(p), lambda p, s: p - 1),
    "bcast binomial": (lambda p, s: L(p), lambda p, s: L(p)),
    "bcast circulant": (lambda p, s: s - 1 + L(p) if p > 1 else 0, None),
    "bcast chain": (lambda p, s: p - 2 + s if p > 1 else 0, lambda p, s: s * (p > 1)),
    "bcast binary": (None, lambda p, s: s * min(2, p - 1)),
    "bcast direct": (lambda p, s: int(p > 1), lambda p, s: p - 1),
    "reduce binomial": (lambda p, s: L(p), lambda p, s: int(p > 1)),
    "reduce circulant": (lambda p, s: s - 1 + L(p) if p > 1 else 0, None),
    "reduce chain": (lambda p, s: p - 2 + s if p > 1 else 0, lambda p, s: s * (p > 1)),
    "reduce binary": (None, lambda p, s: s * (p > 1)),
    "reduce direct": (lambda p, s: int(p > 1), lambda p, s: int(p > 1)),
    "reduce ordered": (None, lambda p, s: int(p > 1)),
    "alltoall pairwise": (lambda p, s: p - 1, lambda p, s: p - 1),
    "alltoall direct": (lambda p, s: int(p > 1), lambda p, s: p - 1),
    "alltoall bruck": (
        lambda p, s: L(p),
        lambda p, s: sum(d.bit_count() for d in range(p)),
    ),
    "barrier dissemination": (lambda p, s: L(p), lambda p, s: 0),
}


def test_every_algorithm_states_its_cost():
    assert set(COSTS) == {str(algorithm) for algorithm in ALL}


@pytest.mark.parametrize("algorithm", ALL, ids=str)
def test_every_size_up_to_64(algorithm):
    rounds, sent = COSTS[str(algorithm)]
    ordered = True
    for size in range(1, 65):
        for options in cases(algorithm, size):
            if algorithm.unmet(size, nodes=options["nodes"]):
                continue
            report = check(algorithm, size, **options)
            ordered &= report.ordered
            where = f"{algorithm} on {size} ranks, {options}"
            assert report.same_bits and report.alike, where
            assert report.staged == 0 or str(algorithm) == "alltoall bruck", where
            segments = options["segments"]
            for stated, found in (rounds, report.rounds), (sent, report.sent):
                expected = stated and stated(size, segments)
                assert expected is None or found == expected, where
    assert algorithm.commutative == (not ordered), "the declared flag is what verification finds"


LOGARITHMIC = "circulant recursive_doubling halving_doubling bruck pat binomial ordered dissemination".split()


@pytest.mark.parametrize("algorithm", [a for a in ALL if a.name in LOGARITHMIC], ids=str)
def test_samples_above_64(algorithm):
    for size in (100, 128, 257):
        if not algorithm.unmet(size) and not (size == 257 and algorithm.collective == "alltoall"):
            report = check(algorithm, size, root=size // 3, segments=9)
            assert report.same_bits and report.alike


@pytest.mark.parametrize(
    "algorithm",
    [a for a in ALL if a.collective in ("allreduce", "reduce", "bcast") and "nodes" not in a.takes],
    ids=str,
)
def test_slices_keep_what_the_whole_promises(algorithm):
    ordered = True
    for size in (1, 2, 3, 5, 8, 12):
        n = algorithm.chunks(size, segments=2) if not algorithm.unmet(size) else 0

        def plan(rank, size, root=0, n=n):
            return sliced([algorithm.plan(rank, size, root=root, segments=2) for _ in range(3)], n)

        if n:
            thrice = Algorithm(
                algorithm.collective, "sliced", plan, algorithm.commutative, takes=("root",), cut=3 * n
            )
            report = check(thrice, size, root=size - 1)
            once = check(algorithm, size, root=size - 1, segments=2)
            assert report.sent == 3 * once.sent and report.same_bits
            ordered &= report.ordered
    assert algorithm.commutative == (not ordered)


@pytest.mark.parametrize(
    "algorithm",
    [get(c, n) for c in ("reduce_scatter", "allgather") for n in ("ring", "circulant", "direct", "pat")],
    ids=str,
)
def test_uneven_counts_change_nothing_but_volumes(algorithm):
    for size in range(1, 30):
        counts = [Fraction((7 * c * c + 3) % 5) for c in range(size)]
        report = check(replace(algorithm, weigh=lambda size, counts=counts: counts), size)
        assert sum(report.volumes) == (size - 1) * sum(counts)
        if algorithm.collective == "reduce_scatter":
            assert list(report.volumes) == [sum(counts) - own for own in counts]


SHAPES = [
    (3, 5, 1),
    (4, 4, 4),
    (1, 1, 1, 1),
    (2, 3),
    (8,),
    (1, 7),
    (6, 4, 4, 2),
    (3, 5, 7, 2, 1),
    (16, 16, 15),
    (1,),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_split_rail_sends_the_least_across_nodes(shape):
    nodes, size = blocks(*shape), sum(shape)
    algorithm = get("allreduce", "split_rail")
    report = check(algorithm, size, nodes=nodes)
    weights = algorithm.weights(size, nodes=nodes)
    assert report.same_bits and report.alike
    assert report.rounds == 2 * L(max(shape)) + 2 * L(len(shape))
    assert sum(weights) == 1 and len(weights) == algorithm.chunks(size, nodes=nodes)
    home = {rank: node for node in nodes for rank in node for node in [tuple(node)]}
    for rank in range(size):
        across = sum(
            weights[c]
            for ops in algorithm.plan(rank, size, nodes=nodes)
            for op in ops
            if isinstance(op, Send) and op.peer not in home[rank]
            for c in op.chunks
        )
        assert across == Fraction(2 * (len(nodes) - 1), len(nodes)) / len(home[rank])


def test_split_rail_on_scattered_ranks():
    nodes = [[0, 3, 4], [1], [2, 5]]
    assert check(get("allreduce", "split_rail"), 6, nodes=nodes).same_bits
    assert [owners for _, owners in rails(nodes)] == [[0, 1, 2], [3, 1, 2], [3, 1, 5], [4, 1, 5]]


FAST = [
    a
    for a in ALL
    if a.name not in ("pairwise", "ordered_pairwise", "direct")
    and "nodes" not in a.takes
    and not a.unmet(4096)
]


@pytest.mark.parametrize("algorithm", FAST, ids=str)
def test_a_plan_for_4096_ranks_builds_in_100_ms(algorithm):
    def build():
        began = process_time()
        for _ in algorithm.plan(1234, 4096, root=77, segments=32):
            pass
        return process_time() - began

    assert min(build() for _ in range(3)) < 0.1 * slowness()


@cache
def slowness():
    """How much slower this machine runs Python than the one the limits were set on; at least 1."""

    def work():
        began = process_time()
        seen = {}
        for i in range(100_000):
            seen[i % 64, i % 63] = (i, seen.get((i % 63, i % 64)))
        return process_time() - began

    return max(1.0, min(work() for _ in range(5)) / 0.014)


@pytest.mark.parametrize("algorithm", ALL, ids=str)
def test_verifying_64_ranks_takes_100_ms(algorithm):
    if algorithm.unmet(64, nodes=two_nodes(64)):
        pytest.skip("does not serve 64 ranks")

    def verify():
        began = process_time()
        check(algorithm, 64, nodes=two_nodes(64))
        return process_time() - began

    assert min(verify() for _ in range(5)) < 0.1 * slowness()


def test_every_reduction_has_an_algorithm_that_keeps_order_at_every_size():
    for collective in algorithms.REDUCTIONS:
        for size in (1, 2, 3, 7, 12, 64):
            assert any(
                not a.unmet(size, commutative=False)
                for a in registry[collective].values()
                if a.function is not None
            )


def test_each_algorithm_says_what_it_is_costs_and_comes_from():
    for algorithm in ALL:
        first, *rest = algorithm.function.__doc__.strip().splitlines()
        text = " ".join(rest)
        assert first.endswith(".")
        assert "Cost: " in text and "Source: " in text, str(algorithm)
        assert ("a commutative op" in text) == algorithm.commutative, str(algorithm)


def test_rooted_collectives_take_a_root():
    assert all(("root" in a.takes) == (a.collective in ROOTED) for a in ALL)


def test_native_is_registered_and_has_no_plan():
    for collective in algorithms.COLLECTIVES:
        native = get(collective, "native")
        assert native.function is None and native.unmet(3, commutative=False) is None
        with pytest.raises(ValueError, match="no plan"):
            native.plan(0, 2)


def test_unmet_says_why():
    assert "a power of two, not 6" in get("allgather", "recursive_doubling").unmet(6)
    assert "commutative" in get("allreduce", "ring").unmet(4, commutative=False)
    assert "every node" in get("allreduce", "split_rail").unmet(4)
    assert get("allreduce", "recursive_doubling").unmet(6, commutative=False) is None


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"no allreduce algorithm 'rign' \(did you mean 'ring'\?\); known: native, "
    ):
        get("allreduce", "rign")
    with pytest.raises(ValueError, match=r"no collective 'all_reduce' \(did you mean 'allreduce'\?\)"):
        get("all_reduce", "ring")


def flat(rank, size, root=0):
    """Send from the root to all."""
    if rank == root:
        yield [Send(peer, 0) for peer in range(size) if peer != root]
    else:
        yield [Recv(root, 0)]


@pytest.fixture
def scratch_registry(monkeypatch):
    for collective in "bcast", "barrier":
        monkeypatch.setitem(registry, collective, dict(registry[collective]))


def test_register_as_a_decorator(scratch_registry):
    even = Sizes("an even number", lambda size: size % 2 == 0)
    assert register("bcast", "mine", chunks=1, sizes=even)(flat) is flat
    mine = get("bcast", "mine")
    assert mine is get("bcast", flat)
    assert (mine.takes, mine.chunks(7), mine.commutative) == (("root",), 1, False)
    assert mine.unmet(3) == "bcast mine needs an even number, not 3"
    with pytest.raises(ValueError, match="already an algorithm bcast mine"):
        register("bcast", "mine")(allreduce.ring)
    register("bcast", "mine", chunks=2)(flat)
    assert get("bcast", "mine").chunks(7) == 2, "a cell that is run again defines it anew"


def test_register_minds_the_attribute(scratch_registry):
    def mine(rank, size):
        return iter(())

    mine.chunks = lambda nodes: len(nodes)
    register("barrier")(mine)
    assert get("barrier", "mine").chunks(3, nodes=[[0, 1], [2]]) == 2


def test_a_function_that_is_not_registered():
    found = get("bcast", flat)
    assert (found.name, found.function, found.chunks(5)) == ("flat", flat, 5)
    assert found.commutative, "its order is not known before it is verified"
    with pytest.raises(ValueError, match=r"takes \(rank\); it must take \(rank, size\)"):
        get("bcast", lambda rank: iter(()))
    with pytest.raises(ValueError, match="radix"):
        get("bcast", lambda rank, size, radix: iter(()))
    with pytest.raises(TypeError, match="not 3"):
        get("bcast", 3)


def test_a_file_registers_once(tmp_path, monkeypatch, scratch_registry):
    file = tmp_path / "registers.py"
    file.write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "from beside_registers import chunks\n"
        "from mpicoll.algorithms import register\n"
        "@dataclasses.dataclass\n"
        "class Shape:\n"
        "    rows: int\n"
        '@register("barrier", chunks=chunks)\n'
        "def mine(rank, size):\n"
        "    return iter(())\n"
    )
    (tmp_path / "beside_registers.py").write_text("chunks = 0\n")
    found = get("barrier", f"{file}:mine")
    assert found is get("barrier", "mine")
    assert found is get("barrier", f"{tmp_path}/../{tmp_path.name}/registers.py:mine"), "not run again"


def test_a_file_that_can_be_imported(tmp_path, monkeypatch, scratch_registry):
    for name in "imported_first", "loaded_first":
        code = f"from mpicoll.algorithms import register\n@register('barrier', '{name}')\n"
        (tmp_path / f"{name}.py").write_text(f"{code}def mine(rank, size):\n    return iter(())\n")
    monkeypatch.syspath_prepend(tmp_path)
    import imported_first

    assert get("barrier", f"{tmp_path}/imported_first.py:mine").function is imported_first.mine
    found = get("barrier", f"{tmp_path}/loaded_first.py:mine")
    import loaded_first

    assert loaded_first.mine is found.function


def test_what_is_no_file_and_function():
    for word in "mine:ring", "mine.py":
        with pytest.raises(ValueError, match="path/file.py:function"):
            get("barrier", word)


def test_entry_points(monkeypatch, scratch_registry):
    from importlib.metadata import EntryPoint

    points = [EntryPoint("mine", "no_such_module_of_mine", "mpicoll.algorithms")]
    monkeypatch.setattr(sys.modules[register.__module__], "entry_points", lambda group: points)
    load_entry_points.cache_clear()
    lost = r"no barrier algorithm 'mine'.*; entry point mine = no_such_module_of_mine .* ModuleNotFoundError"
    with pytest.raises(ValueError, match=lost):
        get("barrier", "mine")
    load_entry_points.cache_clear()


def test_a_function_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def nothing(rank, size):\n    return iter(())\nnothing.chunks = 1\n")
    found = get("allreduce", f"{file}:nothing")
    assert (found.name, found.chunks(9)) == ("nothing", 1)
    assert get("allreduce", f"{file}:nothing").function is found.function, "the file is run once"
    with pytest.raises(ValueError, match=r"did you mean 'nothing'\?"):
        algorithms.load(f"{file}:nothin")
    with pytest.raises(ValueError, match="no file"):
        algorithms.load(f"{tmp_path}/other.py:nothing")


def test_chunks_and_weights_get_what_they_name():
    entry = Algorithm("allreduce", "x", flat, cut=lambda size, segments: size * segments)
    assert entry.chunks(3, segments=4) == 12
    halves = replace(entry, cut=None, weigh=lambda nodes: [Fraction(1, len(nodes))] * len(nodes))
    assert halves.chunks(4, nodes=blocks(2, 2)) == 2
    assert prod(halves.weights(4, nodes=blocks(2, 2))) == Fraction(1, 4)
    assert entry.weights(4) is None


def test_double_binary_tree_rounds():
    for size in range(3, 65):
        report = check(get("allreduce", "double_binary_tree"), size, segments=12)
        assert report.rounds == 12 // 2 + 2 * max(inorder(v, size)[2] for v in range(size)) - 1
