"""Mixed precision trains like float32, the same bits on every rank, whoever overflows."""

import functools

import numpy as np
import pytest
from mlp import BATCH, SAMPLES, Problem, same_bits
from mpi4py import MPI

import mpicoll
from mpicoll.io.sampler import Sampler
from mpicoll.train.buckets import Flat
from mpicoll.train.optim import FP16, SGD, Adam, DistributedOptimizer, Int8, TopK, broadcast_optimizer_state
from mpicoll.train.parallel import LossScale, MixedPrecision

STEPS = 100


def train(comm, dtype, passes=1, **options):
    """Train with 2-byte parameters and gradients, or float32 for None; return the loss and the optimizer."""
    problem = Problem()
    optimizer = Adam(problem.params, 3e-3)
    if dtype:
        scale = LossScale(2.0**24) if dtype == "float16" else None  # too large: it must shrink first
        optimizer = MixedPrecision(optimizer, dtype, loss_scale=scale, max_norm=100.0)
    wrapped = DistributedOptimizer(
        optimizer, comm, bucket_cap_mb=0.003, backward_passes_per_step=passes, **options
    )
    sampler = Sampler(SAMPLES, BATCH, seed=3, rank=comm.rank, size=comm.size)
    made = 0
    while made < STEPS:
        scale = comm.size / BATCH * (optimizer.scale if dtype else 1.0)
        for rows in np.array_split(sampler[made], passes):
            # NumPy computes in float32: what has 2 bytes is rounded when it is read and written
            params = {name: param.astype(np.float32) for name, param in wrapped.params.items()}
            with np.errstate(over="ignore"):
                problem.backward(params, rows, scale, wrapped.gradients, wrapped.grad_ready)
        made += wrapped.step() is not False
    assert same_bits(comm, problem.params.flat, *wrapped.params.values())
    return problem.loss(), optimizer


@functools.cache
def float32_loss():
    return train(mpicoll.Intracomm(MPI.COMM_SELF), None)[0]


@pytest.mark.parametrize(("passes", "overlap"), [(1, False), (2, True)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_bytes_train_as_four(comm, dtype, passes, overlap):
    loss, optimizer = train(comm, dtype, passes, overlap=overlap)
    assert loss == pytest.approx(float32_loss(), rel=0.01)
    assert (optimizer.skipped > 0) == (dtype == "float16")


@pytest.mark.parametrize("compression", [FP16(), Int8()])
def test_gradients_of_two_bytes_may_be_compressed(comm, compression):
    loss, _ = train(comm, "float16", compression=compression)
    assert loss == pytest.approx(float32_loss(), rel=0.01)


@pytest.mark.parametrize("compression", [None, Int8(), TopK(0.25)])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_overflow_on_one_rank_is_one_of_all(comm, compression, bad):
    masters = Flat({"a": (40,)})
    optimizer = MixedPrecision(SGD(masters, 1.0), "float16", loss_scale=LossScale(1024.0))
    wrapped = DistributedOptimizer(optimizer, comm, compression=compression)
    for step in range(4):
        wrapped.gradients["a"][...] = 512.0
        if step == 1 and comm.rank == comm.size - 1:
            wrapped.gradients["a"][7] = bad
        assert wrapped.step() == (step != 1)
        assert (
            comm.allgather((optimizer.scale, optimizer.skipped))
            == [(1024.0 if step < 1 else 512.0, int(step >= 1))] * comm.size
        )
    assert same_bits(comm, masters.flat) and np.isfinite(masters.flat).all()


def test_parts_have_one_norm_and_one_decision(comm):
    masters = Flat({"a": (4,)})
    optimizer = MixedPrecision(SGD(masters, 1.0), "float16", loss_scale=2.0, max_norm=1.0, comm=comm)
    optimizer.step({"a": np.full(4, 2.0, np.float16)})
    assert optimizer.norm == pytest.approx(2 * np.sqrt(comm.size))
    np.testing.assert_allclose(masters.flat, -1 / optimizer.norm, rtol=1e-6)
    dynamic = MixedPrecision(SGD(masters, 1.0), "float16", comm=comm)
    assert not dynamic.step({"a": np.full(4, np.inf if comm.rank == 0 else 1.0, np.float16)})


def test_a_nan_loss_is_an_error_on_every_rank(comm):
    wrapped = DistributedOptimizer(MixedPrecision(SGD(Flat({"a": (40,)}), 1.0)), comm)
    wrapped.gradients["a"][...] = np.nan if comm.rank == 0 else 1.0
    with pytest.raises(FloatingPointError, match="step 1 is not finite"):
        wrapped.step()
    wrapped.gradients["a"][...] = 1.0
    wrapped.step()
    assert wrapped.steps == 1


def test_a_state_is_broadcast_with_masters_and_scale(comm):
    masters = Flat({"a": (4,)})
    masters.flat[:] = 1 + comm.rank / 3
    optimizer = MixedPrecision(Adam(masters, 0.1), "float16", loss_scale=LossScale(2.0 ** (4 + comm.rank)))
    broadcast_optimizer_state(optimizer, comm, root=comm.size - 1)
    assert optimizer.scale == 2.0 ** (3 + comm.size)
    expected = np.float32(1 + (comm.size - 1) / 3)
    assert (masters.flat == expected).all() and (optimizer.params["a"] == np.float16(expected)).all()


def test_adasum_refuses_copies(comm):
    with pytest.raises(ValueError, match="Adasum needs an optimizer whose state does not copy"):
        DistributedOptimizer(MixedPrecision(SGD(Flat({"a": (4,)}), 1.0)), comm, op="adasum")
