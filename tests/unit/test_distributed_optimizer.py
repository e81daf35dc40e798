"""The optimizer wrapper's rules, on one rank; schedules; clipping."""

import math

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.train.buckets import Flat
from mpicoll.train.optim import (
    FP16,
    SGD,
    DistributedOptimizer,
    Int8,
    PowerSGD,
    TopK,
    clip_by_global_norm,
    scale_lr,
    schedules,
    warmup,
)
from mpicoll.train.optim.exchange import narrow


@pytest.fixture(scope="module")
def comm():
    return mpicoll.Intracomm(MPI.COMM_SELF)


def params():
    return {"a": np.zeros((2, 3)), "b": np.zeros(4)}


def wrap(comm, **options):
    return DistributedOptimizer(SGD(params(), 1.0), comm, **options)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_on_one_rank_is_that_of_the_optimizer(comm, overlap):
    optimizer = wrap(comm, overlap=overlap, compression=Int8(), gradient_predivide_factor=3.0)
    for step in (1, 2):
        optimizer.grad_ready("b", np.full(4, 2.0))
        optimizer.gradients["a"][...] = 1.0
        optimizer.grad_ready("a")
        optimizer.step()
        assert (optimizer.params["a"] == -step).all() and (optimizer.params["b"] == -2 * step).all()
    assert optimizer.steps == 2 and optimizer.sent_share == 1.0
    optimizer.lr = 0.25
    assert optimizer.optimizer.lr == optimizer.lr == 0.25


def test_gradients_are_summed_over_passes(comm):
    optimizer = wrap(comm, backward_passes_per_step=3)
    for k in range(3):
        optimizer.grad_ready("b", np.full(4, 10.0**k))
        if k < 2:
            optimizer.grad_ready("a", np.full((2, 3), k + 1.0))
    optimizer.step()  # the last pass has not reached a
    assert (optimizer.params["b"] == -111).all() and (optimizer.params["a"] == -3).all()
    optimizer.grad_ready("b", np.ones(4))
    optimizer.step()  # no pass has reached a
    assert (optimizer.params["b"] == -112).all() and (optimizer.params["a"] == -3).all()


def test_a_pass_may_end_without_names(comm):
    optimizer = wrap(comm, backward_passes_per_step=2)
    for k in range(2):
        optimizer.grad_ready("b", np.full(4, k + 1.0))
        optimizer.gradients["a"][...] = k + 5
        optimizer.grad_ready()
    optimizer.step()
    assert (optimizer.params["b"] == -3).all() and (optimizer.params["a"] == -11).all()


def test_small_floats_are_summed_wide(comm):
    theta = {"a": np.zeros(1, np.float16)}
    optimizer = DistributedOptimizer(SGD(theta, 1.0), comm, backward_passes_per_step=9)
    for k in range(9):
        optimizer.grad_ready("a", np.full(1, 2048 if k == 0 else 1, np.float16))  # 2048 + 1 rounds to 2048
    optimizer.step()
    assert theta["a"][0] == -2056


def test_zero_grad_begins_anew(comm):
    optimizer = wrap(comm)
    optimizer.grad_ready("a", np.ones((2, 3)))
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.params["a"].any()


def test_clipping_in_between(comm):
    optimizer = wrap(comm)
    optimizer.gradients["b"][...] = 10
    optimizer.synchronize()
    assert clip_by_global_norm(optimizer.gradients, 2.0) == pytest.approx(20)
    with optimizer.skip_synchronize():
        optimizer.step()
    np.testing.assert_allclose(optimizer.params["b"], -1.0)


def test_misuse_is_told(comm):
    optimizer = wrap(comm)
    with pytest.raises(ValueError, match="'x' is no parameter"):
        optimizer.grad_ready("x", np.ones(1))
    with pytest.raises(ValueError, match=r"gradient of 'b' has shape \(3,\), its parameter \(4,\)"):
        optimizer.grad_ready("b", np.ones(3))
    with pytest.raises(ValueError, match="needs the name"):
        optimizer.grad_ready(None, np.ones(3))
    optimizer.grad_ready("b")
    with pytest.raises(ValueError, match="'b' is ready once more before step.*one backward pass"):
        optimizer.grad_ready("b")
    with pytest.raises(RuntimeError, match="nothing was synchronized"), optimizer.skip_synchronize():
        optimizer.step()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="with optimizer.skip_synchronize"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="after synchronize.. and before step"):
        optimizer.grad_ready("a")
    with pytest.raises(RuntimeError, match="call grad_ready.. after each"):
        wrap(comm, backward_passes_per_step=2).step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "max"}, "op must be one of average, sum, adasum, got 'max'"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb must be a finite number, not negative, got -1"),
        ({"bucket_cap_mb": math.inf}, "bucket_cap_mb must be a finite number, not negative, got inf"),
        ({"bucket_cap_mb": math.nan}, "bucket_cap_mb must be a finite number, not negative, got nan"),
        ({"bucket_cap_mb": "4"}, "bucket_cap_mb must be a finite number, not negative, got '4'"),
        ({"backward_passes_per_step": 0}, "must be a whole number of at least 1, got 0"),
        ({"backward_passes_per_step": 1.5}, "must be a whole number of at least 1, got 1.5"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor must be between 1e-30 and 1e30, got 0"),
        ({"gradient_predivide_factor": math.inf}, "gradient_predivide_factor must be between"),
        ({"gradient_predivide_factor": 2, "op": "sum"}, "is for op 'average', got 'sum'"),
        ({"compression": "fp16"}, r"compression must be an object such as FP16\(\), got 'fp16'"),
        ({"compression": FP16(), "op": "adasum"}, "Adasum cannot be compressed"),
        ({"groups": [["z"]]}, "'z' is no parameter"),
    ],
)
def test_settings_that_cannot_be_are_refused(comm, options, message):
    with pytest.raises(ValueError, match=message):
        wrap(comm, **options)


def test_compressions_refuse_what_cannot_be():
    for make, message in [
        (lambda: Int8(block=6), "block must be a positive multiple of 4, got 6"),
        (lambda: TopK(0), "ratio must be above 0 and at most 1, got 0"),
        (lambda: TopK(1.5), "ratio must be"),
        (lambda: PowerSGD(0), "rank must be at least 1, got 0"),
        (lambda: PowerSGD(4, start=-1), "start must not be negative, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_rounding_to_two_bytes_is_rounding(dtype, half):
    random = np.random.default_rng(0)
    numbers = random.standard_normal(100_000) * 10.0 ** random.uniform(-12, 6, 100_000)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 65519, 65520, 2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-25]
    source = np.concatenate([numbers, edges]).astype(dtype)
    target = np.zeros(source.shape, half)
    narrow(source, target)
    with np.errstate(over="ignore"):
        assert np.array_equal(target, source.astype(np.float32).astype(half), equal_nan=True)


def test_norms_of_any_layout():
    flat = Flat({"a": (3, 50_000), "b": (2,)})
    flat.flat[:] = 3
    expected = 3 * math.sqrt(150_002)
    assert clip_by_global_norm(flat, 1e9) == pytest.approx(expected, rel=1e-12)
    assert (flat.flat == 3).all()
    strided = {"a": np.ones((4, 4), np.float16)[:, ::2]}
    assert clip_by_global_norm(strided, 1.0) == pytest.approx(math.sqrt(8))
    np.testing.assert_allclose(strided["a"], 1 / math.sqrt(8), rtol=1e-3)
    broken = {"a": np.array([1.0, np.inf])}
    assert clip_by_global_norm(broken, 1.0) == math.inf and broken["a"][0] == 1
    with pytest.raises(ValueError, match="max_norm must be positive"):
        clip_by_global_norm(broken, 0)


def test_schedules():
    at = (0, 5, 10, 20)
    for schedule, expected in [
        (schedules.constant(2.0), [2, 2, 2, 2]),
        (schedules.linear(1.0, 10, final=0.2), [1, 0.6, 0.2, 0.2]),
        (schedules.polynomial(1.0, 10, power=2), [1, 0.25, 0, 0]),
        (schedules.cosine(1.0, 10), [1, 0.5, 0, 0]),
        (schedules.inverse_sqrt(1.0, 5), [1, 1, math.sqrt(0.5), 0.5]),
        (schedules.piecewise(1.0, {10: 0.1, 5: 0.5}), [1, 0.5, 0.1, 0.1]),
        (warmup(schedules.constant(1.0), 10, start=0.5), [0.5, 0.75, 1, 1]),
        (warmup(schedules.linear(1.0, 20), 10), [0, 0.25, 0.5, 0]),
    ]:
        assert [schedule(step) for step in at] == pytest.approx(expected)
    assert scale_lr(0.1, 4, passes=2) == pytest.approx(0.8)
    assert scale_lr(0.1, 4, rule="sqrt") == pytest.approx(0.2)
    for bad in (
        lambda: scale_lr(0.1, 0),
        lambda: scale_lr(0.1, 2, rule="cubic"),
        lambda: warmup(schedules.constant(1), 0),
        lambda: schedules.cosine(1.0, 0),
    ):
        with pytest.raises(ValueError, match="must be"):
            bad()
