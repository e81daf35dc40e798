"""Mixed precision: masters, loss scale, clipping, errors."""

import copy
import math

import ml_dtypes
import numpy as np
import pytest

from mpicoll.train.buckets import Flat
from mpicoll.train.optim import SGD, Adam
from mpicoll.train.parallel import LossScale, MixedPrecision

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def masters(flat=True):
    random = np.random.default_rng(0)
    arrays = {"a": random.standard_normal((3, 4)), "b": random.standard_normal(5)}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    return Flat.of(arrays) if flat else arrays


def gradients(optimizer, value):
    return {name: np.full(param.shape, value, param.dtype) for name, param in optimizer.params.items()}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_remember_what_the_parameters_cannot(dtype, flat):
    theta = masters(flat)
    start = {name: array.copy() for name, array in theta.items()}
    optimizer = MixedPrecision(SGD(theta, 1e-5), dtype, loss_scale=4.0)
    for _ in range(100):
        assert optimizer.step(gradients(optimizer, 4.0))
    for name, array in theta.items():
        np.testing.assert_allclose(array, start[name] - 1e-3, atol=2e-6)
        assert optimizer.params[name].dtype == DTYPES[dtype]
        assert np.array_equal(optimizer.params[name], array.astype(DTYPES[dtype]))


def test_the_scale_follows_overflows():
    optimizer = MixedPrecision(SGD(masters(), 0.0), "float16", loss_scale=LossScale(8.0, growth_steps=3))
    seen = []
    for bad in (0, 0, 0, 0, math.inf, 0, math.nan, math.inf, 0, 0, 0):
        made = optimizer.step({**gradients(optimizer, 1.0), "a": np.full((3, 4), bad or 1.0, np.float16)})
        assert made == (not bad)
        seen.append(optimizer.scale)
    assert seen == [8, 8, 16, 16, 8, 8, 4, 2, 2, 2, 4]
    assert optimizer.skipped == 3 and optimizer.steps == 8


def test_a_step_that_is_skipped_changes_nothing():
    theta = masters()
    optimizer = MixedPrecision(Adam(theta, 0.1), "float16")
    before = copy.deepcopy(optimizer.state_dict())
    assert not optimizer.step(gradients(optimizer, math.inf))
    after = optimizer.state_dict()
    assert after["steps"] == 0 and after["slots"]["loss_scale"]["scale"] == 2.0**15
    for slot in "mean", "square", "master":
        assert all(np.array_equal(after["slots"][slot][name], before["slots"][slot][name]) for name in theta)


def test_when_no_scale_helps_it_is_an_error():
    for dtype, scale in ("bfloat16", None), ("float16", 128.0), ("float16", LossScale(1.0)):
        theta = masters()
        start = theta.flat.copy()
        optimizer = MixedPrecision(SGD(theta, 1.0), dtype, loss_scale=scale)
        with pytest.raises(FloatingPointError, match="gradient of step 1 is not finite at loss scale"):
            optimizer.step(gradients(optimizer, math.nan))
        assert np.array_equal(theta.flat, start)


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_the_norm_is_that_of_the_gradient_without_the_scale(scale):
    theta = masters()
    start = theta.flat.copy()
    optimizer = MixedPrecision(SGD(theta, 1.0), "float16", loss_scale=scale, max_norm=0.5)
    optimizer.step(gradients(optimizer, scale))
    assert optimizer.norm == pytest.approx(math.sqrt(17))
    np.testing.assert_allclose(start - theta.flat, 0.5 / math.sqrt(17), rtol=1e-4)
    optimizer.step({**gradients(optimizer, 0.01 * scale), "loss": np.full(1, 1e9)})  # not a gradient
    assert optimizer.norm == pytest.approx(0.01 * math.sqrt(17), rel=1e-3)


def test_a_saved_state_goes_on_bit_by_bit():
    one = MixedPrecision(Adam(masters(), 0.01), "float16", loss_scale=LossScale(64.0, growth_steps=2))
    for k in range(3):
        one.step(gradients(one, k + 0.5))
    saved = copy.deepcopy(one.state_dict())
    blank = Flat({name: array.shape for name, array in masters().items()})
    other = MixedPrecision(Adam(blank, 0.5), "float16", loss_scale=LossScale(64.0, growth_steps=2))
    other.load_state_dict(saved)
    assert (other.scale, other.lr, other.steps) == (one.scale, 0.01, 3)
    for k in range(3):
        one.step(gradients(one, k - 1.5))
        other.step(gradients(other, k - 1.5))
    assert np.array_equal(blank.flat, one.masters.flat)
    assert all(np.array_equal(one.params[name], other.params[name]) for name in one.params)
    del saved["slots"]["master"]["b"]
    with pytest.raises(ValueError, match=r"the state has no master 'b' of shape \(5,\)"):
        other.load_state_dict(saved)


def test_misuse_is_told():
    for make, message in [
        (
            lambda: MixedPrecision(SGD(masters(), 0.1), "float8"),
            "must be 'float16' or 'bfloat16', got 'float8'",
        ),
        (lambda: MixedPrecision(SGD(masters(), 0.1), max_norm=0), "max_norm must be positive"),
        (
            lambda: MixedPrecision(SGD({"a": np.zeros(2, np.float16)}, 0.1)),
            "master parameter 'a' is float16, expected float32 or float64",
        ),
        (lambda: LossScale(0), "a loss scale needs"),
        (lambda: LossScale(factor=1), "a loss scale needs"),
        (lambda: LossScale(growth_steps=0), "growth_steps must be at least 1 or None, got 0"),
        (lambda: MixedPrecision(SGD(masters(), 0.1)).step({}), "no gradient for parameter 'a'"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
