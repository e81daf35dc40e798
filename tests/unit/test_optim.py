"""Flat buffers, buckets' layout, optimizers, and the job's gradient against differences."""

import copy
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from mpicoll.train.buckets import Buckets, Flat
from mpicoll.train.optim import LAMB, LARS, SGD, Adam, AdamW

JOBS = Path(__file__).parents[2] / "jobs"


class OneRank:
    """As much of a communicator as laying out buckets needs."""

    empty = staticmethod(np.empty)


def params():
    random = np.random.default_rng(0)
    shapes = {"a": (3, 4), "b": (), "c": (0, 2), "d": (5,)}
    return Flat.of({name: random.standard_normal(shape) for name, shape in shapes.items()})


def test_flat_arrays_are_views_in_order():
    flat = Flat({"a": (2, 3), "b": (), "c": (0,), "d": (2,)})
    assert flat.flat.dtype == np.float32
    assert (flat.flat == 0).all()
    flat["a"][...] = [[1, 2, 3], [4, 5, 6]]
    flat["b"][...] = 7
    flat["d"][...] = [8, 9]
    assert flat.flat.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert list(flat) == ["a", "b", "c", "d"]
    flat.flat[:] = 0
    assert not flat["a"].any()
    assert all(array.base is not None and array.flags.c_contiguous for array in flat.values())


def test_flat_copy_keeps_values_and_refuses_two_dtypes():
    arrays = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.ones(2)}
    flat = Flat.of(arrays)
    assert all(np.array_equal(flat[name], arrays[name]) for name in arrays)
    assert not np.shares_memory(flat["a"], arrays["a"])
    with pytest.raises(ValueError, match="one dtype, got"):
        Flat.of({"a": np.zeros(1), "b": np.zeros(1, np.float32)})
    assert Flat.of({}).flat.size == 0


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (10**6, [["a", "b", "c", "d"]]),
        (48, [["b", "c", "d"], ["a"]]),  # an array larger than a bucket has one of its own
        (40, [["c", "d"], ["b"], ["a"]]),
        (8, [["d"], ["b", "c"], ["a"]]),
    ],
)
def test_buckets_are_filled_from_the_last_layer(nbytes, expected):
    assert [list(bucket) for bucket in Buckets(params(), OneRank, nbytes).buckets] == expected


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (1, [["a", "b", "c", "d"]]),
        (2, [["b", "c", "d"], ["a"]]),
        (9, [["d"], ["b", "c"], ["a"]]),
        ([["d", "a"]], [["b", "c"], ["a", "d"]]),
        ([["a"], ["b"], [], ["c"]], [["d"], ["c"], ["b"], ["a"]]),
    ],
)
def test_groups_share_a_bucket(groups, expected):
    assert [list(bucket) for bucket in Buckets(params(), OneRank, groups=groups).buckets] == expected


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (0, "groups must be a positive number or lists of names, got 0"),
        (True, "groups must be"),
        ([["x"]], "'x' is no parameter"),
        ([["a"], ["b", "a"]], "parameter 'a' is in more than one group"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        Buckets(params(), OneRank, groups=groups)


def test_no_parameters_need_no_bucket():
    assert Buckets({}, OneRank).buckets == []
    assert [list(b) for b in Buckets({"a": np.zeros((0, 2))}, OneRank, 0).buckets] == [["a"]]


def test_buckets_look_like_the_parameters_and_hold_one_dtype():
    mixed = {"a": np.ones((2, 2)), "b": np.ones(3, np.float32), "c": np.ones(3, np.float32)}
    buckets = Buckets(mixed, OneRank)
    assert [list(bucket) for bucket in buckets.buckets] == [["b", "c"], ["a"]]
    assert list(buckets) == ["a", "b", "c"] and len(buckets) == 3
    for name, array in mixed.items():
        assert (buckets[name].shape, buckets[name].dtype) == (array.shape, array.dtype)
    buckets["b"][...] = 5
    assert buckets.buckets[0].flat.tolist() == [5, 5, 5, 0, 0, 0]


def test_sgd_is_the_textbook():
    theta = params()
    start, velocity = theta.flat.copy(), np.zeros(theta.flat.size)
    optimizer = SGD(theta, lr=0.1, momentum=0.9)
    gradient = Flat.of(params())
    for step in range(1, 6):
        gradient.flat[:] = np.sin(step * np.arange(gradient.flat.size))
        optimizer.step(gradient)
        velocity = 0.9 * velocity + gradient.flat
        start -= 0.1 * velocity
        np.testing.assert_allclose(theta.flat, start, rtol=1e-13)
    assert optimizer.steps == 5


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_the_paper(decay):
    theta = params()
    expected = theta.flat.copy()
    m, v = np.zeros_like(expected), np.zeros_like(expected)
    optimizer = Adam(theta, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    gradient = Flat.of(params())
    for step in range(1, 8):
        gradient.flat[:] = np.cos(step * np.arange(gradient.flat.size))
        optimizer.step(gradient)
        m = 0.8 * m + 0.2 * gradient.flat
        v = 0.95 * v + 0.05 * gradient.flat**2
        expected *= 1 - 0.01 * decay
        expected -= 0.01 * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-6)
        np.testing.assert_allclose(theta.flat, expected, rtol=1e-12)


def test_nesterov_and_weight_decay_are_the_textbook():
    theta = params()
    expected, velocity = theta.flat.copy(), np.zeros(theta.flat.size)
    optimizer = SGD(theta, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2)
    gradient = Flat.of(params())
    for step in range(1, 6):
        gradient.flat[:] = np.sin(step * np.arange(gradient.flat.size))
        optimizer.step(gradient)
        slope = gradient.flat + 0.2 * expected
        velocity = 0.9 * velocity + slope
        expected -= 0.1 * (slope + 0.9 * velocity)
        np.testing.assert_allclose(theta.flat, expected, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_scales_every_array_by_its_size(nesterov):
    theta = params()
    expected = {name: array.copy() for name, array in theta.items()}
    velocity = {name: np.zeros_like(array) for name, array in theta.items()}
    optimizer = LARS(theta, 0.5, 0.9, nesterov=nesterov, weight_decay=0.1, trust=0.01, undecayed=["b"])
    gradient = Flat.of(params())
    for step in range(1, 5):
        gradient.flat[:] = np.sin(step + np.arange(gradient.flat.size))
        optimizer.step(gradient)
        for name, w in expected.items():
            g, rate = gradient[name], 0.5
            if name != "b":
                length = np.sqrt((g**2).sum()) + 0.1 * np.sqrt((w**2).sum())
                rate *= 0.01 * np.sqrt((w**2).sum()) / length if length else 1
                g = g + 0.1 * w
            velocity[name] = 0.9 * velocity[name] + rate * g
            w -= rate * g + 0.9 * velocity[name] if nesterov else velocity[name]
            np.testing.assert_allclose(theta[name], w, rtol=1e-12)


@pytest.mark.parametrize("limit", [None, 1.5])
def test_lamb_scales_every_array_by_its_size(limit):
    theta = params()
    expected = {name: array.copy() for name, array in theta.items()}
    m, v = np.zeros(theta.flat.size), np.zeros(theta.flat.size)
    optimizer = LAMB(theta, 0.1, (0.8, 0.95), 1e-6, weight_decay=0.1, limit=limit, undecayed=["b"])
    gradient = Flat.of(params())
    for step in range(1, 5):
        gradient.flat[:] = np.cos(step * np.arange(gradient.flat.size))
        optimizer.step(gradient)
        m = 0.8 * m + 0.2 * gradient.flat
        v = 0.95 * v + 0.05 * gradient.flat**2
        change = Flat({name: array.shape for name, array in expected.items()}, float)
        change.flat[:] = (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-6)
        for name, w in expected.items():
            r, rate = change[name], 0.1
            if name != "b":
                r = r + 0.1 * w
                if w.size:
                    rate *= min(np.sqrt((w**2).sum() / (r**2).sum()), limit or np.inf)
            w -= rate * r
            np.testing.assert_allclose(theta[name], w, rtol=1e-12)


ALL = [
    lambda p: SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.1, undecayed=["b"]),
    lambda p: AdamW(p, 0.1, undecayed=["a", "d"]),
    lambda p: LARS(p, 0.1, undecayed=["b"]),
    lambda p: LAMB(p, 0.1, undecayed=["b"]),
]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("nbytes", [0, 40, 10**6])
def test_neighbours_are_updated_as_each_array_alone(make, nbytes):
    flat = params()
    single = {name: array.copy() for name, array in flat.items()}
    buckets = Buckets({**flat, "loss": np.zeros(1)}, OneRank, nbytes)
    one, other = make(flat), make(single)
    for step in range(3):
        for gradient in buckets.values():
            gradient[...] = np.sin(step + np.arange(gradient.size)).reshape(gradient.shape)
        one.step(buckets)
        other.step(dict(buckets))
        assert all(np.array_equal(flat[name], single[name]) for name in single)
    for kind, slot in one.slots.items():
        assert all(np.array_equal(slot[name], other.slots[kind][name]) for name in single)


def test_options_that_are_not_given_are_the_optimizers_own():
    for make, own in [
        (SGD, {"momentum": 0.0, "weight_decay": 0.0}),
        (LARS, {"momentum": 0.9, "weight_decay": 1e-4}),
        (Adam, {"eps": 1e-8, "weight_decay": 0.0}),
        (AdamW, {"eps": 1e-8, "weight_decay": 0.01}),
        (LAMB, {"eps": 1e-6, "weight_decay": 0.01}),
    ]:
        options = make(params(), 0.1).state_dict()["options"]
        assert options == {**options, **own}
        changed = dict.fromkeys(own, 0.5)
        options = make(params(), 0.1, **changed).state_dict()["options"]
        assert options == {**options, **changed}


def test_a_long_stretch_is_updated_whole():
    theta = Flat({"a": (300, 300), "b": (70_000,), "c": (3,)})
    gradient = Flat({name: array.shape for name, array in theta.items()})
    gradient.flat[:] = 1
    optimizer = Adam(theta, 0.5)
    optimizer.step(gradient)
    np.testing.assert_allclose(theta.flat, -0.5, rtol=1e-6)
    assert len(optimizer._work) == 3 and optimizer._work[0][0].ndim == 1


@pytest.mark.parametrize("make", ALL)
def test_a_saved_state_goes_on_bit_by_bit(make):
    theta = params()
    gradients = [{name: np.sin(k + array) for name, array in params().items()} for k in range(6)]
    optimizer = make(theta)
    for gradient in gradients[:3]:
        optimizer.step(gradient)
    saved, resumed = copy.deepcopy(optimizer.state_dict()), Flat.of(dict(theta))
    other = make(resumed)
    other.load_state_dict(saved)
    assert other.steps == 3
    for gradient in gradients[3:]:
        optimizer.step(gradient)
        other.step(gradient)
    assert np.array_equal(theta.flat, resumed.flat)


def test_a_state_that_does_not_fit_is_refused():
    state = Adam(params()).state_dict()
    with pytest.raises(ValueError, match="this is the state of Adam, expected SGD"):
        SGD(params(), 0.1).load_state_dict(state)
    other = Adam({"a": np.zeros((3, 4)), "e": np.zeros(2)})
    with pytest.raises(ValueError, match="the state has no mean of parameter 'e'"):
        other.load_state_dict(state)
    other = Adam({"a": np.zeros((4, 3))})
    with pytest.raises(ValueError, match=r"mean of 'a' has shape \(3, 4\), the parameter \(4, 3\)"):
        other.load_state_dict(state)
    assert not other.slots["mean"]["a"].any() and other.steps == 0


def test_a_schedule_sets_the_rate_of_each_step():
    theta = {"x": np.zeros(1)}
    optimizer = SGD(theta, lambda step: [1.0, 0.5, 0.25][step])
    seen = []
    for _ in range(3):
        optimizer.step({"x": np.ones(1)})
        seen.append((optimizer.lr, float(theta["x"][0])))
    assert seen == [(1.0, -1.0), (0.5, -1.5), (0.25, -1.75)]


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, 0.9), lambda p: Adam(p, 0.1)])
def test_optimizers_keep_dtype_and_descend(make):
    theta = {"x": np.full(4, 3, np.float32)}
    same, optimizer = theta["x"], make(theta)
    for _ in range(200):
        optimizer.step({"x": 2 * theta["x"], "loss": np.ones(1)})
    assert theta["x"] is same and same.dtype == np.float32
    assert np.abs(same).max() < 0.3


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1), lambda p: Adam(p, 0.1)])
def test_bad_gradients_change_nothing(make):
    theta = params()
    before, optimizer = theta.flat.copy(), make(theta)
    with pytest.raises(ValueError, match="no gradient for parameter 'd'"):
        optimizer.step({name: theta[name] for name in "abc"})
    with pytest.raises(ValueError, match=r"gradient of 'd' has shape \(4,\), its parameter \(5,\)"):
        optimizer.step({**theta, "d": np.ones(4)})
    assert np.array_equal(theta.flat, before) and optimizer.steps == 0


def test_bad_hyperparameters_are_refused():
    for make, message in [
        (lambda: SGD(params(), -1), "lr must not be negative, got -1"),
        (
            lambda: Adam({"index": np.arange(3)}, 0.1),
            "parameter 'index' is of int64, expected real floating-point numbers",
        ),
        (lambda: SGD({"w": np.ones(2, complex)}, 0.1), "parameter 'w' is of complex128, expected real"),
        (lambda: SGD({"w": [1.0, 2.0]}, 0.1), "parameter 'w' is a list, expected an array"),
        (lambda: SGD({"w": np.float32(1)}, 0.1), "parameter 'w' is a float32, expected an array"),
        (lambda: SGD({"w": np.broadcast_to(1.0, 3)}, 0.1), "parameter 'w' is read-only"),
        (
            lambda: SGD({"w": np.ones(2, ">f4")}, 0.1),
            "'w' is of >f4, not this machine's byte order",
        ),
        (lambda: SGD(None, 0.1), "params must map names to arrays, got a NoneType"),
        (lambda: Adam(params(), math.nan), "lr must not be negative, got nan"),
        (lambda: SGD(params(), 0.1, 1.0), "momentum must be in"),
        (lambda: Adam(params(), betas=(0.9, 1.0)), "betas must be in"),
        (lambda: SGD(params(), 0.1, nesterov=True), "nesterov needs a momentum"),
        (lambda: SGD(params(), 0.1, weight_decay=-1), "weight_decay must not be negative"),
        (lambda: AdamW(params(), undecayed=["x"]), "undecayed: 'x' is no parameter"),
        (lambda: LARS(params(), 0.1, trust=0), "trust must be positive"),
        (lambda: LARS(params(), 0.1, momentum=1), "momentum must be in"),
        (lambda: LAMB(params(), limit=0), "limit must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.fixture
def ngram(monkeypatch):
    monkeypatch.syspath_prepend(str(JOBS))
    yield pytest.importorskip("ngram")
    sys.modules.pop("ngram")


def test_the_jobs_gradient_agrees_with_differences(ngram):
    random = np.random.default_rng(1)
    model = ngram.Model(context=3, embed=4, hidden=5, seed=2, dtype=np.float64)
    model.params.flat[:] = random.standard_normal(model.params.flat.size) / 2
    windows = random.integers(0, 6, (11, 4), np.uint8)  # few bytes: they recur within a window
    gradients = Flat.of({**model.params, "loss": np.zeros(1)})
    model.backward(windows, 0.3, gradients)
    assert gradients["loss"][0] == pytest.approx(0.3 * model.loss(windows), rel=1e-12)

    gradient = Flat.of({name: gradients[name] for name in model.params}).flat
    for i in [*np.flatnonzero(gradient)[::3], *np.flatnonzero(gradient == 0)[::50]]:
        losses = []
        for change in 1e-5, -2e-5:
            model.params.flat[i] += change
            losses.append(model.loss(windows))
        model.params.flat[i] += 1e-5
        assert 0.3 * (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient[i], rel=1e-6, abs=1e-9)


def test_no_windows_give_no_gradient(ngram):
    """A rank whose part of a batch is empty."""
    model = ngram.Model(context=3, embed=4, hidden=5, seed=2)
    gradients = Flat.of({**model.params, "loss": np.ones(1, np.float32)})
    gradients.flat[:] = 1
    model.backward(np.empty((0, 4), np.uint8), 1.0, gradients)
    assert not gradients.flat.any()


def test_entropy_of_known_texts(ngram):
    assert ngram.entropy(np.zeros(9, np.uint8)) == 0
    assert ngram.entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(math.log(256))


def test_sample_starts_with_the_prompt(ngram):
    model = ngram.Model(context=3, embed=4, hidden=5, seed=2)
    text = model.sample(b"def ", 20, seed=1)
    assert text.startswith(b"def ") and len(text) == 24
    assert text == model.sample(b"def ", 20, seed=1)
