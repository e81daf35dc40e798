"""Any optimizer, on any number of ranks, compressed or not: the training of one rank, and the same bits."""

import functools

import ml_dtypes
import numpy as np
import pytest
from mlp import Problem, same_bits, train
from mpi4py import MPI

import mpicoll
from mpicoll.train.buckets import Buckets, Flat
from mpicoll.train.optim import (
    BF16,
    FP16,
    LAMB,
    LARS,
    SGD,
    Adam,
    AdamW,
    DistributedOptimizer,
    Int8,
    PowerSGD,
    TopK,
    allreduce_metrics,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    clip_by_global_norm,
)
from mpicoll.train.optim.adasum import adasum

STEPS = 100
CAP = 0.005  # MiB: the test problem has several buckets

OPTIMIZERS = {
    "sgd": lambda params: SGD(params, 0.3),
    "momentum": lambda params: SGD(params, 0.1, 0.9),
    "nesterov": lambda params: SGD(params, 0.1, 0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda params: Adam(params, 3e-3),
    "adamw": lambda params: AdamW(params, 3e-3, undecayed=["b0", "b1", "b2"]),
    "lars": lambda params: LARS(params, 1.0, trust=0.02, undecayed=["b0", "b1", "b2"]),
    "lamb": lambda params: LAMB(params, 1e-2),
}


@functools.cache
def alone():
    return mpicoll.Intracomm(MPI.COMM_SELF)


@functools.cache
def lone_loss(name, steps=STEPS):
    problem = Problem()
    return train(problem, DistributedOptimizer(OPTIMIZERS[name](problem.params), alone()), alone(), steps)


def loss_of(comm, name, steps=STEPS, passes=1, clip=None, **options):
    """Train, see that the replicas are alike, and return the loss and the optimizer."""
    problem = Problem()
    optimizer = DistributedOptimizer(
        OPTIMIZERS[name](problem.params), comm, backward_passes_per_step=passes, **options
    )
    loss = train(problem, optimizer, comm, steps, passes, clip)
    assert same_bits(comm, problem.params.flat)
    return loss, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_on_one_rank(comm, name):
    loss, optimizer = loss_of(comm, name, bucket_cap_mb=CAP)
    assert loss == pytest.approx(lone_loss(name), rel=1e-4)
    state = optimizer.state_dict()
    assert state["steps"] == STEPS
    assert same_bits(comm, *(array for slot in state["slots"].values() for array in slot.values()))


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"gradient_predivide_factor": 7.0}, 1e-4),
        ({"groups": 3, "overlap": True}, 1e-4),
        ({"groups": [["b2", "w0"], ["w1"]], "overlap": True}, 1e-4),
        ({"bucket_cap_mb": 0, "overlap": True}, 1e-4),
        ({"passes": 3, "overlap": True}, 1e-4),
        ({"passes": 2, "overlap": False}, 1e-4),
        ({"compression": FP16()}, 1e-3),
        ({"compression": FP16(), "gradient_predivide_factor": 1.5, "passes": 2}, 1e-3),
    ],
)
def test_no_setting_changes_the_training(comm, options, tolerance):
    loss, _ = loss_of(comm, "momentum", **options)
    assert loss == pytest.approx(lone_loss("momentum"), rel=tolerance)


# the share of bytes that two ranks send; for top-k, each rank hears from all others
COMPRESSIONS = {
    "fp16": (FP16(), "momentum", 0.5),
    "bf16": (BF16(), "momentum", 0.5),
    "int8": (Int8(), "momentum", 0.35),
    "int8 adam": (Int8(block=64), "adam", 0.30),
    "topk": (TopK(0.1), "sgd", 0.21),
    "powersgd": (PowerSGD(4), "momentum", 0.37),
    "topk late": (TopK(0.1, start=100), "adam", 0.21),
    "powersgd late": (PowerSGD(4, start=100), "adam", 0.37),
}


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressed_training_ends_within_one_percent(comm, name):
    compression, kind, share = COMPRESSIONS[name]
    steps = 400 if isinstance(compression, (TopK, PowerSGD)) else STEPS
    loss, optimizer = loss_of(comm, kind, steps, compression=compression, bucket_cap_mb=CAP)
    assert loss == pytest.approx(lone_loss(kind, steps), rel=0.01)
    if comm.size == 2:
        assert optimizer.sent_share <= share


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ["none", *COMPRESSIONS])
def test_overlap_changes_nothing(comm, name, passes):
    compression, kind, _ = COMPRESSIONS.get(name, (None, "adam", 1.0))
    ends = []
    for overlap in False, True:
        _, optimizer = loss_of(
            comm, kind, 12, passes, compression=compression, bucket_cap_mb=CAP, overlap=overlap
        )
        assert len(optimizer.gradients.buckets) > 1
        ends.append(optimizer.params.flat)
    if name in ("int8", "int8 adam", "topk"):  # every rank adds what it has received by itself
        assert np.array_equal(*ends)
    np.testing.assert_allclose(*ends, rtol=1e-3, atol=1e-4)


def test_clipping_between_synchronize_and_step(comm):
    norms = []

    def clip(gradients):
        norms.append(clip_by_global_norm(gradients, 0.5))

    loss, _ = loss_of(comm, "sgd", bucket_cap_mb=CAP, clip=clip)
    mine, norms = norms, []
    problem = Problem()
    lone = DistributedOptimizer(OPTIMIZERS["sgd"](problem.params), alone())
    assert loss == pytest.approx(train(problem, lone, alone(), STEPS, clip=clip), rel=1e-4)
    np.testing.assert_allclose(mine, norms, rtol=1e-3)
    assert max(mine) > 0.5


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("compression", [None, Int8()])
def test_ranks_may_use_parameters_in_any_order_or_not_at_all(comm, overlap, compression):
    params = {name: np.zeros(5, np.float32) for name in "abcdef"}
    optimizer = DistributedOptimizer(
        SGD(params, 1.0), comm, bucket_cap_mb=0, overlap=overlap, compression=compression
    )
    for step in range(1, 4):
        names = list(np.random.default_rng(10 * step + comm.rank).permutation(list("abcde")))
        for gradient in optimizer.gradients.values():
            gradient[...] = 1e6  # left over: must not be taken for a gradient
        for name in names:
            if name != "c" or comm.rank == 0:
                optimizer.grad_ready(name, np.full(5, 8.0, np.float32))
        optimizer.step()
        for name in "abde":
            np.testing.assert_allclose(params[name], -8.0 * step, rtol=1e-5)
        np.testing.assert_allclose(params["c"], -8.0 * step / comm.size, rtol=1e-5)
        assert not params["f"].any()


def test_without_names_gradients_are_taken_as_they_stand(comm):
    params = {"a": np.zeros(3), "b": np.zeros((2, 2), np.float32)}
    for op, factor in ("average", 1.0), ("sum", comm.size):
        optimizer = DistributedOptimizer(SGD(params, 0.0), comm, op=op, metrics=["loss", "hits"])
        for array in (*optimizer.gradients.values(), optimizer.metrics["loss"]):
            array[...] = comm.rank
        optimizer.metrics["hits"][...] = 1
        optimizer.synchronize()
        for array in (*optimizer.gradients.values(), optimizer.metrics["loss"]):
            np.testing.assert_allclose(array, (comm.size - 1) / 2 * factor)
        assert optimizer.metrics["hits"] == factor


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("compression", [None, FP16(), Int8(), TopK(0.5), PowerSGD(1)])
def test_gradients_of_other_types(comm, dtype, compression):
    params = {"a": np.zeros((6, 7), dtype), "b": np.zeros(3, dtype), "c": np.zeros((0, 2), dtype)}
    optimizer = DistributedOptimizer(
        SGD(params, 1.0), comm, compression=compression, backward_passes_per_step=2
    )
    for _ in range(2):
        for name, gradient in optimizer.gradients.items():
            gradient[...] = (comm.rank + 1) * (1 if name == "b" else 2)
        optimizer.grad_ready()
    optimizer.synchronize()
    mean = (comm.size + 1) / 2
    for name, gradient in optimizer.gradients.items():
        assert gradient.dtype == dtype
        if not isinstance(compression, TopK) or comm.size == 1:
            expected = 2 * mean * (1 if name == "b" else 2)
            np.testing.assert_allclose(gradient.astype(np.float64), expected, rtol=0.02)
    assert same_bits(comm, *optimizer.gradients.values())


@pytest.mark.parametrize("compression", [Int8(), TopK(0.1), PowerSGD(2)])
def test_nothing_is_lost_only_late(comm, compression):
    """What has been applied and what is still owed is what the ranks have put in."""
    bucket = Flat({"a": (20, 30), "b": (9,)}, np.float64)
    exchange = compression.exchange(bucket, comm)
    random = np.random.default_rng(comm.rank)
    given, got = np.zeros(bucket.flat.size), np.zeros(bucket.flat.size)
    for _ in range(10):
        bucket.flat[...] = random.standard_normal(bucket.flat.size)
        given += bucket.flat
        for _ in exchange.run(lambda name, *args, **options: getattr(comm, name)(*args, **options)):
            pass
        got += bucket.flat
    owed = np.zeros(bucket.flat.size)
    state = exchange.state()
    if isinstance(compression, PowerSGD):
        owed[:600] = state["residual"]
    else:
        owed += state["residual"].reshape(-1)[: owed.size]
        if "sum_residual" in state:
            share = state["sum_residual"].size
            mine = owed[comm.rank * share : (comm.rank + 1) * share]
            mine += state["sum_residual"].reshape(-1)[: mine.size]
    comm.Allreduce(MPI.IN_PLACE, given)
    comm.Allreduce(MPI.IN_PLACE, owed)
    np.testing.assert_allclose(got + owed, given, atol=1e-3)


def test_compression_begins_at_a_step_of_the_optimizers_and_goes_on_from_its_memory(comm):
    random = np.random.default_rng(comm.rank)
    contributions = random.standard_normal((6, 40)).astype(np.float32)

    def run(first, last, memory=None):
        params = {"a": np.zeros(40, np.float32)}
        optimizer = DistributedOptimizer(SGD(params, 1.0), comm, compression=TopK(0.1, start=2))
        optimizer.optimizer.steps = first  # programs that resume set it when they like
        for name, array in (memory or {}).items():
            optimizer.local_state()[name][...] = array
        for row in contributions[first:last]:
            optimizer.gradients["a"][...] = row
            optimizer.step()
        return params["a"], {name: array.copy() for name, array in optimizer.local_state().items()}

    whole = run(0, 6)[0]
    for end in 1, 3:  # before the first compressed step and after it
        begun, memory = run(0, end)
        np.testing.assert_allclose(begun + run(end, 6, memory)[0], whole, atol=1e-6)
    exact = contributions[:2].copy()
    comm.Allreduce(MPI.IN_PLACE, exact)
    np.testing.assert_allclose(run(0, 2)[0], -exact.sum(axis=0) / comm.size, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("compression", [FP16(), BF16(), Int8(), TopK(0.1), PowerSGD(2)])
def test_what_is_not_finite_reaches_all_and_does_not_stay(comm, compression, bad):
    params = {"a": np.zeros((20, 30), np.float32)}
    optimizer = DistributedOptimizer(SGD(params, 0.0), comm, compression=compression)
    for step in range(30):
        optimizer.gradients["a"][...] = 1.0
        if step == 3 and comm.rank == comm.size - 1:
            optimizer.gradients["a"][5, 5] = bad
        with np.errstate(invalid="ignore"):
            optimizer.step()
        assert np.isfinite(optimizer.gradients["a"]).all() == (step != 3)
    if not isinstance(compression, TopK) or comm.size == 1:
        np.testing.assert_allclose(optimizer.gradients["a"], 1.0, rtol=0.02)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_adasum_is_the_formula(comm, dtype):
    random = np.random.default_rng(0)
    everybody = random.standard_normal((comm.size, 12)).astype(dtype)
    bucket = Flat({"a": (2, 3), "b": (6,)}, dtype)
    bucket.flat[...] = everybody[comm.rank]
    private = MPI.Intracomm(comm).Dup()
    adasum(bucket, private)
    private.Free()

    def pair(x, y):
        dot = x @ y
        return x * (1 - dot / (2 * x @ x)) + y * (1 - dot / (2 * y @ y))

    def tree(vectors):
        core = 1 << (len(vectors).bit_length() - 1)
        rows = [pair(v, w) for v, w in zip(vectors, vectors[core:], strict=False)] + vectors[
            len(vectors) - core : core
        ]
        while len(rows) > 1:
            rows = [pair(rows[k], rows[k + 1]) for k in range(0, len(rows), 2)]
        return rows[0]

    wide = everybody.astype(np.float64)
    for part in slice(0, 6), slice(6, 12):
        expected = tree([row[part] for row in wide])
        np.testing.assert_allclose(bucket.flat[part], expected, rtol=1e-6 if dtype == np.float64 else 0.02)
    assert same_bits(comm, bucket.flat)


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel(comm):
    params = {"own": np.zeros(comm.size), "same": np.zeros(4)}
    optimizer = DistributedOptimizer(SGD(params, 1.0), comm, op="adasum")
    optimizer.gradients["own"][...] = np.eye(comm.size)[comm.rank]
    optimizer.gradients["same"][...] = 3.0
    optimizer.step()
    np.testing.assert_allclose(params["own"], -1.0)
    np.testing.assert_allclose(params["same"], -3.0)
    with pytest.raises(RuntimeError, match="nothing to skip"), optimizer.skip_synchronize():
        pass
    optimizer.free()


def test_adasum_trains_and_keeps_replicas_alike(comm):
    loss, optimizer = loss_of(comm, "momentum", op="adasum", bucket_cap_mb=CAP)
    optimizer.free()
    assert loss < 0.2 * Problem().loss()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_is_broadcast_and_training_goes_on_alike(comm, name):
    problem = Problem()
    optimizer = DistributedOptimizer(OPTIMIZERS[name](problem.params), comm)
    root = comm.size - 1
    if comm.rank == root:  # only one rank has trained before
        lone = DistributedOptimizer(optimizer.optimizer, alone())
        train(problem, lone, alone(), 5)
        optimizer.lr = 0.05
    broadcast_parameters(problem.params, comm, root)
    broadcast_optimizer_state(optimizer, comm, root)
    assert (optimizer.steps, optimizer.lr) == (5, 0.05)
    train(problem, optimizer, comm, 5)
    assert same_bits(comm, problem.params.flat)


def test_unlike_replicas_are_an_error_on_every_rank(comm):
    if comm.size == 1:
        pytest.skip("one rank is like itself")
    last = comm.size - 1
    odd = comm.rank == last
    params = Flat({"a": (2, 3), "b": (4 if odd else 5,)})
    with pytest.raises(ValueError, match=rf"rank {last} has 'b' \(4,\) float32, rank 0 'b' \(5,\) float32"):
        broadcast_parameters(params, comm)
    params = {name: np.zeros(2) for name in ("ab" if odd else "abc")}
    with pytest.raises(ValueError, match=rf"rank {last} has only 2 of them, rank 0 'c'"):
        broadcast_parameters(params, comm)
    same = {"a": np.zeros(2)}
    with pytest.raises(ValueError, match=rf"optimizers differ: rank {last} has Adam, rank 0 SGD"):
        broadcast_optimizer_state(Adam(same) if odd else SGD(same, 1.0), comm)
    with pytest.raises(ValueError, match="metrics differ: rank"):
        allreduce_metrics({"x" if odd else "y": 1.0}, comm)
    comm.Barrier()


def test_objects_of_any_size_go_round(comm):
    root = comm.size - 1
    for obj in {"a": [1, None, "x"]}, np.arange(200_000), None, b"":
        got = broadcast_object(obj if comm.rank == root else "not this", comm, root)
        assert np.array_equal(got, obj) if isinstance(obj, np.ndarray) else got == obj
    with pytest.raises(ValueError, match="cannot be pickled"):
        broadcast_object((lambda: None) if comm.rank == root else 1, comm, root)


def test_metrics_are_weighted(comm):
    ranks = np.arange(comm.size)
    got = allreduce_metrics({"loss": comm.rank, "one": 1}, comm, weight=comm.rank + 1)
    assert got == {"loss": pytest.approx(np.average(ranks, weights=ranks + 1)), "one": 1.0}
    alone_counts = allreduce_metrics({"x": 2.0 if comm.rank == 0 else np.nan}, comm, weight=comm.rank == 0)
    assert alone_counts == {"x": 2.0}
    with pytest.raises(ValueError, match="weights must be positive"):
        allreduce_metrics({"x": 1.0}, comm, weight=0)


def test_a_norm_over_parts(comm):
    parts = {"a": np.full((2, 2), comm.rank + 1.0)}
    whole = np.sqrt(4 * sum((rank + 1.0) ** 2 for rank in range(comm.size)))
    assert clip_by_global_norm(parts, whole / 2, comm) == pytest.approx(whole)
    np.testing.assert_allclose(parts["a"], (comm.rank + 1) / 2)


def test_groups_lie_together(comm):
    params = {name: np.zeros(4, np.float32) for name in "abcdef"}
    layout = [list(b) for b in Buckets(params, comm, 32, groups=[["f", "a"], ["c"]]).buckets]
    assert layout == [["d", "e"], ["c"], ["b"], ["a", "f"]]
