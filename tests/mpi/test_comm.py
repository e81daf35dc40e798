"""The communicator: what its collectives take, what they refuse, and what they say about themselves."""

import math

import ml_dtypes
import numpy as np
import pytest
from forms import DENSE, DERIVED, FORMS, perform, untouched
from mpi4py import MPI

import mpicoll
from mpicoll import ArgumentError
from mpicoll.memory.op import AVG

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
N = 840  # a multiple of every size up to 8
ALL = sum(range(1, SIZE + 1))


@pytest.fixture(scope="module")
def comm(world):
    comm = mpicoll.Intracomm(world.Dup())
    yield comm
    comm.Free()


def mine(n=N, rank=RANK):
    return np.arange(n, dtype=float) * (rank + 1)


def gathered(blocks):
    return np.concatenate([np.asarray(block) for block in blocks])


def kind(kinds, shift):
    """Another form on every rank: what runs must not depend on it."""
    names = list(kinds)
    return kinds[names[(shift + 4 * RANK) % len(names)]]


# -- forms of buffers ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("algorithm", [None, "circulant"])
@pytest.mark.parametrize("shift", range(len(DENSE)))
def test_every_rank_may_pass_another_form(comm, shift, algorithm, form):
    send, _, _ = kind(DENSE, shift)(mine())
    recv, got, around = kind(DENSE, shift + 7)(np.zeros(N))
    perform(comm, form, "Allreduce", send, recv, algorithm=algorithm)
    np.testing.assert_array_equal(got, np.arange(N) * ALL)
    assert untouched(around, N)
    perform(comm, form, "Allreduce", MPI.IN_PLACE, recv, algorithm=algorithm)
    np.testing.assert_array_equal(got, np.arange(N) * ALL * SIZE)
    assert untouched(around, N)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("algorithm", [None, "binomial"])
@pytest.mark.parametrize("shift", range(len(DENSE | DERIVED)))
def test_moves_between_layouts(comm, shift, algorithm, form):
    root = shift % SIZE
    buf, got, around = kind(DENSE | DERIVED, shift)(mine(rank=root) if RANK == root else np.zeros(N))
    perform(comm, form, "Bcast", buf, root, algorithm=algorithm)
    np.testing.assert_array_equal(np.asarray(got), mine(rank=root))
    assert untouched(around, N)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("algorithm", [None, "direct"])
@pytest.mark.parametrize("name", ["vector", "resized", "contiguous"])
def test_derived_blocks(comm, name, algorithm, form):
    """Blocks of a derived type on even ranks, plain doubles on odd ones."""
    count = N // SIZE if name == "resized" else 1
    derived = {
        "vector": lambda: MPI.DOUBLE.Create_vector(N // SIZE, 1, 2).Create_resized(0, 16 * (N // SIZE)),
        "resized": lambda: MPI.DOUBLE.Create_resized(0, 16),
        "contiguous": lambda: MPI.DOUBLE.Create_contiguous(N // SIZE),
    }[name]().Commit()
    wide = 1 if name == "contiguous" or RANK % 2 else 2
    send, recv = np.full(N * wide, -1.0), np.full(N * wide, -1.0)
    send[::wide] = mine()
    spec = (lambda a: a) if RANK % 2 else (lambda a: [a, count, derived])
    perform(comm, form, "Alltoall", spec(send), spec(recv), algorithm=algorithm)
    block = N // SIZE
    want = np.concatenate([mine(rank=r)[RANK * block :][:block] for r in range(SIZE)])
    np.testing.assert_array_equal(recv[::wide], want)
    assert wide == 1 or (recv[1::wide] == -1).all()
    recv[:] = -1.0
    part = send[: block * wide]
    perform(comm, form, "Allgather", spec(part), spec(recv), algorithm=algorithm)
    np.testing.assert_array_equal(recv[::wide], np.concatenate([mine(rank=r)[:block] for r in range(SIZE)]))
    derived.Free()


@pytest.mark.parametrize("algorithm", [None, "ring", "recursive_doubling", "direct"])
@pytest.mark.parametrize("count", [1, 5, 20000])
def test_pair_types_have_holes(comm, count, algorithm):
    pair = np.dtype([("value", "f8"), ("where", "i4")], align=True)
    send, recv = np.zeros(count, pair), np.zeros(count, pair)
    send["value"], send["where"] = (RANK + np.arange(count)) % SIZE, RANK
    comm.Allreduce([send, MPI.DOUBLE_INT], [recv, MPI.DOUBLE_INT], op=MPI.MAXLOC, algorithm=algorithm)
    assert (recv["value"] == SIZE - 1).all()
    assert (recv["where"] == (SIZE - 1 - np.arange(count)) % SIZE).all()


@pytest.mark.parametrize("form", FORMS)
def test_scalars_and_nothing(comm, form):
    for algorithm in (None, "direct"):
        total = np.array(0.0)
        perform(comm, form, "Allreduce", np.float64(RANK + 1), total, algorithm=algorithm)
        assert total == ALL
        perform(comm, form, "Allreduce", np.empty(0), np.empty(0), algorithm=algorithm)
        perform(comm, form, "Allgather", np.empty(0, "i4"), np.empty(0, "i4"), algorithm=algorithm)
        perform(comm, form, "Bcast", [None, 0, MPI.INT], 0, algorithm=algorithm)
        counts = [3] + [0] * (SIZE - 1)
        part = np.zeros(counts[RANK])
        perform(comm, form, "Reduce_scatter", mine(3), part, counts, algorithm=algorithm)
        assert (part == (np.arange(3) * ALL)[: part.size]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [N, 60000])  # the MPI's own, and a plan
def test_in_place(comm, form, n):
    if n % SIZE:
        n -= n % SIZE
    block, whole = n // SIZE, np.arange(n) * ALL
    x = mine(n)
    perform(comm, form, "Reduce_scatter_block", MPI.IN_PLACE, x)
    np.testing.assert_array_equal(x[:block], whole[RANK * block :][:block])
    x = mine(n)
    perform(comm, form, "Reduce_scatter", MPI.IN_PLACE, x, [block] * SIZE)
    np.testing.assert_array_equal(x[:block], whole[RANK * block :][:block])
    x = mine(n)
    perform(comm, form, "Reduce", *((MPI.IN_PLACE, x) if RANK == SIZE - 1 else (x, None)), MPI.SUM, SIZE - 1)
    assert RANK != SIZE - 1 or (x == whole).all()
    x = mine(n)
    perform(comm, form, "Allgather", MPI.IN_PLACE, x)
    np.testing.assert_array_equal(x, np.concatenate([mine(n, r)[r * block :][:block] for r in range(SIZE)]))
    x = mine(n)
    perform(comm, form, "Alltoall", MPI.IN_PLACE, x)
    np.testing.assert_array_equal(
        x, np.concatenate([mine(n, r)[RANK * block :][:block] for r in range(SIZE)])
    )


def test_read_only_input(comm):
    send, recv = mine(20000), np.zeros(20000)
    send.flags.writeable = False
    comm.Allreduce(send, recv)
    np.testing.assert_array_equal(recv, send / (RANK + 1) * ALL)
    constant = mine(20000, 0)
    constant.flags.writeable = RANK != 0
    comm.Bcast(constant, root=0)
    with pytest.raises(ArgumentError, match="recvbuf: the array is read-only"):
        comm.Allreduce(recv, send)


def test_counts_that_ranks_tell_each_other(comm):
    counts = [2 * rank for rank in range(SIZE)]
    part = np.zeros(counts[RANK])
    comm.Reduce_scatter(mine(sum(counts)), part)
    first = sum(counts[:RANK])
    np.testing.assert_array_equal(part, np.arange(first, first + part.size) * ALL)


def test_counts_are_told_where_layouts_differ(comm):
    whole = np.repeat(mine(2 * SIZE), 2)[::2] if RANK == 0 else mine(2 * SIZE)
    part = np.zeros(2)
    comm.Reduce_scatter(whole, part)
    np.testing.assert_array_equal(part, np.arange(2 * RANK, 2 * RANK + 2) * ALL)


# -- operators -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_average(comm, form, dtype):
    for n, algorithm in ((5, None), (5, "ring"), (70000, None)):
        x = np.full(n, RANK + 1).astype(dtype)
        perform(comm, form, "Allreduce", MPI.IN_PLACE, x, AVG, algorithm=algorithm)
        np.testing.assert_allclose(x.astype("c16"), ALL / SIZE, rtol=0.01)
    part = np.zeros(7).astype(dtype)
    perform(comm, form, "Reduce_scatter_block", np.full(7 * SIZE, RANK + 1).astype(dtype), part, AVG)
    np.testing.assert_allclose(part.astype("c16"), ALL / SIZE, rtol=0.01)


def test_average_refuses_integers(comm):
    with pytest.raises(ArgumentError, match="op: AVG is not defined for int64"):
        comm.Allreduce(np.zeros(3, int), np.zeros(3, int), op=AVG)


def test_half_precision_sums_round_once(comm):
    """Two-byte floats are summed in float32: small addends must not vanish one by one."""
    for dtype, small in (("f2", 2.0**-11), (ml_dtypes.bfloat16, 2.0**-8)):
        x = np.full(100, 1.0 if RANK == 0 else small).astype(dtype)
        comm.Allreduce(MPI.IN_PLACE, x, algorithm="direct")
        assert (x == np.array(1 + (SIZE - 1) * small).astype(dtype)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [6, 30000])
def test_order_of_a_noncommutative_operator(comm, form, n):
    """2x2 matrices modulo a prime, multiplied in rank order."""

    def multiply(left, right, _):
        a, b = (np.frombuffer(x, "i8").reshape(-1, 2, 2) for x in (left, right))
        b[:] = a @ b % 10007

    op, kind = MPI.Op.Create(multiply, commute=False), MPI.INT64_T.Create_contiguous(4).Commit()
    each = [np.random.default_rng(rank).integers(0, 10007, (n, 2, 2)) for rank in range(SIZE)]
    want = each[0]
    for other in each[1:]:
        want = want @ other % 10007
    recv = np.zeros_like(want)
    perform(comm, form, "Allreduce", [each[RANK], n, kind], [recv, n, kind], op)
    assert (recv == want).all()
    recv[:] = 0
    perform(comm, form, "Reduce", [each[RANK], n, kind], [recv, n, kind] if RANK == 0 else None, op, 0)
    assert RANK or (recv == want).all()
    part, block = np.zeros_like(want[: n // SIZE]), n // SIZE
    send = [np.ascontiguousarray(each[RANK][: block * SIZE]), block, kind]
    perform(comm, form, "Reduce_scatter_block", send, [part, block, kind], op)
    assert (part == want[RANK * block :][:block]).all()
    with pytest.raises(ArgumentError, match="ring reorders its operands"):
        comm.Allreduce([each[RANK], n, kind], [recv, n, kind], op, algorithm="ring")
    op.Free()
    kind.Free()


def test_logical_operators_on_bool(comm):
    bits, got = np.array([RANK == 0, True, False]), np.zeros(3, bool)
    for op, want in ((MPI.LOR, [1, 1, 0]), (MPI.LAND, [SIZE == 1, 1, 0]), (MPI.SUM, [1, 1, 0])):
        comm.Allreduce(bits, got, op)
        assert got.tolist() == [bool(x) for x in want]


# -- refusals -----------------------------------------------------------------------------------------------

X, Y = np.zeros(4), np.zeros(4)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("Allreduce", (X, np.zeros(4, "f4")), r"sendbuf: type float64, expected float32"),
        ("Allreduce", (X, np.zeros(5)), r"sendbuf: got 4, expected 5 elements"),
        ("Allreduce", (np.zeros(5), X), r"sendbuf: got 5, expected 4 elements"),
        ("Allreduce", ("abc", X), r"sendbuf: got str, expected an array"),
        ("Allreduce", (X, object()), r"recvbuf: got object, expected an array"),
        ("Allreduce", (X, np.array([None] * 4)), r"recvbuf: dtype object holds Python objects"),
        ("Allreduce", (X, b"12345678" * 4), r"recvbuf: the array is read-only"),
        ("Allreduce", ([X, 9, MPI.DOUBLE], [Y, 9, MPI.DOUBLE]), r"9 elements of 8 bytes .* 32 bytes"),
        ("Allreduce", ([X, -1, MPI.DOUBLE], Y), r"sendbuf: -1 elements"),
        ("Allreduce", ([X, 4, "nonsense"], Y), r"sendbuf: unknown type code 'nonsense'"),
        ("Allreduce", ([X, 4, MPI.DATATYPE_NULL], Y), r"sendbuf: the datatype is null"),
        ("Allreduce", ([1, 2, 3, 4, 5], Y), r"sendbuf: a list of 5 items"),
        ("Allreduce", (X.astype("c16"), Y.astype("c16"), MPI.MAX), r"op: MAX is not defined for complex128"),
        ("Allreduce", (X, Y, "sum"), r"op: got 'sum', expected an MPI.Op"),
        ("Allreduce", (X, Y, np.add), r"op: got <ufunc 'add'>, expected an MPI.Op"),
        ("Allreduce", (X, Y, MPI.OP_NULL), r"op: got .*, expected an MPI.Op"),
        ("Allreduce", (X, Y, MPI.BAND), r"op: BAND is not defined for float64"),
        ("Allreduce", (np.zeros(4, "V8"), np.zeros(4, "V8")), r"op: SUM is not defined for \|V8"),
        ("Allreduce", (np.zeros(4, "i4,f4"), np.zeros(4, "i4,f4")), r"op: SUM is not defined for"),
        ("Reduce", (X, Y, MPI.SUM, SIZE), rf"root: got {SIZE}, expected a rank from 0 to {SIZE - 1}"),
        ("Bcast", (X, -1), r"root: got -1"),
        ("Bcast", (X, 1.5), r"root: got 1.5"),
        ("Allgather", (X, np.zeros(4 * SIZE + 1)), r"recvbuf|sendbuf: got 32, expected"),
        ("Allgather", (X, np.zeros(5 * SIZE)), r"sendbuf: got 32, expected 40 bytes"),
        ("Alltoall", (np.zeros(SIZE), np.zeros(2 * SIZE)), r"sendbuf: got 8, expected 16 bytes"),
        ("Reduce_scatter", (X, Y, [1] * (SIZE + 1)), rf"recvcounts: .*, expected {SIZE} counts"),
        ("Reduce_scatter", (X, Y, 4), r"recvcounts: got 4, expected a count for every rank"),
        ("Reduce_scatter", (X, Y, [2.5] * SIZE), r"recvcounts: got 2.5, expected an integer"),
        ("Reduce_scatter", (X, Y, [None] * SIZE), r"recvcounts: got None, expected an integer"),
        ("Reduce_scatter", (X, Y, [-1] * SIZE), r"recvcounts: .* counts of at least 0"),
        ("Reduce_scatter", (np.zeros(4 * SIZE), np.zeros(3), [4] * SIZE), r"recvbuf: got 3, expected 4"),
        ("Reduce_scatter", (MPI.IN_PLACE, X), r"recvcounts: None with IN_PLACE"),
        ("Reduce_scatter_block", (np.zeros(4 * SIZE + 1), X), rf"sendbuf: got .*{SIZE} times recvbuf"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_refused_before_anything_is_sent(comm, name, arguments, words, form):
    algorithm = "direct"  # the MPI's own words differ
    with pytest.raises(ArgumentError, match=words) as caught:
        perform(comm, form, name, *arguments, algorithm=algorithm)
    assert isinstance(caught.value, (MPI.Exception, ValueError))
    assert caught.value.Get_error_class() != MPI.SUCCESS
    comm.Barrier(algorithm="dissemination")  # still usable


@pytest.mark.parametrize("form", FORMS)
def test_unknown_algorithms(comm, form):
    for given, words in {
        "rign": r"no allreduce algorithm 'rign' \(did you mean 'ring'\?\)",
        5: r"algorithm: got 5, expected a name or a function",
    }.items():
        with pytest.raises(ArgumentError, match=words):
            perform(comm, form, "Allreduce", X, Y, algorithm=given)


def test_functions_are_verified_first(comm):
    def lossy(rank, size):
        yield []

    if SIZE > 1:
        with pytest.raises(ArgumentError, match=r"algorithm: .*(rank|chunk) \d"):
            comm.Allreduce(X, Y, algorithm=lossy)
    x = np.full(5, RANK + 1.0)
    comm.Allreduce(MPI.IN_PLACE, x, algorithm=mpicoll.algorithms.registry["allreduce"]["ring"].function)
    assert (x == ALL).all()


def test_what_the_environment_names_is_verified_first(world, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text("def lossy(rank, size):\n    yield []\n")
    monkeypatch.setenv("MPICOLL_ALLREDUCE", f"{tmp_path / 'mine.py'}:lossy")
    comm = mpicoll.Intracomm(world.Dup())
    if SIZE > 1:
        with pytest.raises(ArgumentError, match=r"allreduce lossy: rank 0.*chunk \d"):
            comm.Allreduce(X, Y)
    comm.Free()


def test_what_is_registered_is_verified_first(comm):
    @mpicoll.algorithms.register("allreduce")
    def unordered(rank, size):
        yield from mpicoll.algorithms.registry["allreduce"]["ring"].function(rank, size)

    try:
        if SIZE > 1:
            with pytest.raises(ArgumentError, match="out of rank order, but is declared to keep it"):
                comm.Allreduce(X, Y, algorithm="unordered")
    finally:
        del mpicoll.algorithms.registry["allreduce"]["unordered"]


@pytest.mark.skipif(not SIZE & (SIZE - 1), reason="needs a number of ranks that is no power of two")
def test_requirements(world, monkeypatch, capfd):
    monkeypatch.setenv("MPICOLL_ALLGATHER", "recursive_doubling")
    comm = mpicoll.Intracomm(world.Dup())
    whole = np.zeros(SIZE)
    with pytest.raises(ArgumentError, match=f"needs a power of two, not {SIZE}"):
        comm.Allgather(np.ones(1), whole, algorithm="recursive_doubling")
    for _ in range(3):
        comm.Allgather(np.full(1, RANK + 1.0), whole)  # the next rule serves
    assert whole.sum() == ALL
    told = capfd.readouterr().err
    assert told.count("MPICOLL_ALLGATHER") == (RANK == 0), told
    comm.Free()


@pytest.mark.parametrize("variable", ["MPICOLL_ALLREDUCE", "MPICOLL_TRANSPORT"])
def test_wrong_preferences(world, monkeypatch, variable):
    monkeypatch.setenv(variable, "rign")
    with pytest.raises(ValueError, match="rign"):
        mpicoll.Intracomm(world.Dup())


def test_null_and_foreign_communicators(world):
    with pytest.raises(ArgumentError, match="not null"):
        mpicoll.Intracomm(MPI.COMM_NULL)
    with pytest.raises(TypeError):
        mpicoll.Intracomm(5)


# -- mismatch between ranks -------------------------------------------------------------------------------


@pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("form", FORMS)
def test_other_arguments_are_found(world, monkeypatch, form):
    monkeypatch.setenv("MPICOLL_CHECK", "1")
    comm = mpicoll.Intracomm(world.Dup())
    last = RANK == SIZE - 1
    x = np.zeros(4 + last)
    cases = [
        (("Allreduce", MPI.IN_PLACE, x), {}),
        (("Allreduce", MPI.IN_PLACE, X.astype("f4" if last else "f8")), {}),
        (("Allreduce", MPI.IN_PLACE, X, MPI.MAX if last else MPI.SUM), {}),
        (("Bcast", X, int(last)), {}),
        (("Allreduce", MPI.IN_PLACE, X), {"algorithm": "ring" if last else "direct"}),
        (("Bcast", X, 0) if last else ("Allreduce", MPI.IN_PLACE, X), {}),
    ]
    for arguments, chosen in cases:
        with pytest.raises(mpicoll.errors.MismatchError, match=rf"ranks \[{SIZE - 1}\] differ from rank 0"):
            perform(comm, form, *arguments, **chosen)
        perform(comm, form, "Allreduce", MPI.IN_PLACE, X)  # nothing was sent: still usable
    comm.Free()


# -- what it says ------------------------------------------------------------------------------------------


def test_explain(comm):
    choice = comm.explain("allreduce", nbytes=8)
    assert choice.algorithm == "native" and "the MPI's own" in str(choice)
    choice = comm.explain("allreduce", nbytes=1 << 24, algorithm="ring")
    assert choice.algorithm == "ring" and choice.rule.why == "algorithm=" and "ring" in str(choice)
    assert comm.explain("bcast", nbytes=1 << 24, root=SIZE - 1).transport in ("mpi", "window")
    assert comm.explain("allreduce", nbytes=8, dtype=ml_dtypes.bfloat16, op=AVG).algorithm != "native"
    with pytest.raises(ArgumentError, match="collective: got 'allreduc', expected one of allreduce"):
        comm.explain("allreduc", nbytes=8)


@pytest.mark.parametrize("form", FORMS)
def test_stats_count_under_the_blocking_name(comm, form):
    before = mpicoll.stats().get("allreduce", {})
    perform(comm, form, "Allreduce", X, Y, algorithm="ring")
    after = mpicoll.stats()["allreduce"]
    assert after["ring"] == before.get("ring", 0) + 1
    assert sum(after.values()) == sum(before.values()) + 1


def test_what_is_explained_is_what_runs(comm):
    for n in (10, 9000, 300000):
        name = comm.explain("allreduce", nbytes=8 * n).algorithm
        before = mpicoll.stats().get("allreduce", {}).get(name, 0)
        comm.Allreduce(MPI.IN_PLACE, np.zeros(n))
        assert mpicoll.stats()["allreduce"][name] == before + 1


def test_predefined_communicator_cannot_be_freed(world):
    comm = mpicoll.Intracomm(world)
    with pytest.raises(MPI.Exception):
        comm.Free()
    x = np.ones(20000)
    comm.Allreduce(MPI.IN_PLACE, x)
    assert (x == SIZE).all() and math.isfinite(x[0])
