"""Layers: gradients against differences and PyTorch's, dropout's draws, low precision, other namespaces."""

import sys
import types

import ml_dtypes
import numpy as np
import pytest

from mpicoll.train import nn
from mpicoll.train.buckets import Flat

WIDTH, LENGTH, SAMPLES, VOCABULARY = 6, 5, 3, 7


def layers():
    """Every layer, small, with an input for it."""
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, LENGTH, WIDTH))
    tokens = random.integers(0, VOCABULARY - 1, (SAMPLES, LENGTH), np.uint8)  # one token never comes
    attention, norm = nn.CausalAttention("attention", WIDTH, 2), nn.LayerNorm("norm", WIDTH)
    block = [nn.Residual([norm, attention, nn.Dropout(0.3)]), nn.Linear("head", WIDTH, VOCABULARY)]
    return {
        "linear": (nn.Linear("linear", WIDTH, 4), x),
        "norm": (norm, x),
        "gelu": (nn.GELU(), x),
        "dropout": (nn.Dropout(0.4), x),
        "attention": (attention, x),
        "positions": (nn.Positions("positions", LENGTH + 2, WIDTH), x),
        "embedding": (nn.Embedding("embedding", VOCABULARY, WIDTH), tokens),
        "residual": (block[0], x),
        "stack": (nn.Stack([nn.Embedding("embedding", VOCABULARY, WIDTH), *block]), tokens),
    }


CASES = sorted(layers())


def start(layer, dtype=np.float64, seed=1):
    """Return parameters with the layer's initial values, shaken so that none is zero or one."""
    random, params = np.random.default_rng(seed), Flat(layer.shapes, dtype)
    for name, value in layer.start(random):
        params[name][...] = value + 0.1 * random.standard_normal(value.shape)
    return params


def draw():
    return nn.Draw(seed=1, step=2)


def ran(layer, params, x, weights):
    """Return input's gradient, parameters' gradients and the names in the order in which they were ready."""
    y, saved = layer.forward(params, x, draw())
    grads, order = Flat(layer.shapes, params.flat.dtype), []
    grads.flat[...] = np.nan  # what was there is lost
    dx = layer.backward(params, saved, weights.reshape(y.shape), grads, order.append)
    return dx, grads, order


def slope(loss, array):
    """Return the derivative of loss() by every element of an array, by central differences."""
    result = np.empty(array.shape)
    for at in np.ndindex(array.shape):
        value = array[at]
        above, below = (loss() for array[at] in (value + 1e-6, value - 1e-6))
        array[at] = value
        result[at] = (above - below) / 2e-6
    return result


@pytest.mark.parametrize("case", CASES)
def test_gradients_agree_with_differences(case):
    layer, x = layers()[case]
    params = start(layer)
    weights = np.random.default_rng(2).standard_normal(layer.forward(params, x)[0].shape)

    def loss():
        return float((layer.forward(params, x, draw())[0] * weights).sum())

    before = x.copy(), weights.copy(), params.flat.copy()
    dx, grads, order = ran(layer, params, x, weights)
    assert all(np.array_equal(*pair) for pair in zip(before, (x, weights, params.flat), strict=True))
    for name, param in params.items():
        np.testing.assert_allclose(grads[name], slope(loss, param), rtol=1e-6, atol=1e-7, err_msg=name)
    if x.dtype.kind == "f":
        np.testing.assert_allclose(dx, slope(loss, x), rtol=1e-6, atol=1e-7)
    assert sorted(order) == sorted(layer.shapes)


def test_the_last_layers_gradients_are_ready_first():
    layer, x = layers()["stack"]
    params = start(layer)
    *_, order = ran(layer, params, x, np.ones((SAMPLES, LENGTH, VOCABULARY)))
    first = [name.split(".")[0] for name in order]
    assert sorted(first, key=["head", "attention", "norm", "embedding"].index) == first


@pytest.mark.parametrize("case", CASES)
def test_no_samples_give_no_gradient(case):
    layer, x = layers()[case]
    params = start(layer)
    y, saved = layer.forward(params, x[:0], draw())
    grads = Flat.of({name: np.ones(shape) for name, shape in layer.shapes.items()}) if layer.shapes else {}
    layer.backward(params, saved, np.zeros_like(y), grads, nn.layer.ignore)
    assert len(y) == 0 and not any(gradient.any() for gradient in grads.values())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_low_precision_is_near_the_exact(case, dtype):
    layer, x = layers()[case]
    params = start(layer, dtype)
    exact = Flat.of({name: param.astype(np.float64) for name, param in params.items()}) if params else params
    x = x.astype(dtype) if x.dtype.kind == "f" else x
    wide = x.astype(np.float64) if x.dtype != np.uint8 else x
    near, true = layer.forward(params, x, draw())[0], layer.forward(exact, wide, draw())[0]
    weights = np.random.default_rng(2).standard_normal(true.shape).astype(dtype)
    found, grads, _ = ran(layer, params, x, weights)
    expected, exact_grads, _ = ran(layer, exact, wide, weights.astype(np.float64))
    eps = float(ml_dtypes.finfo(dtype).eps)
    for got, want in [(near, true), (found, expected), *((grads[n], exact_grads[n]) for n in grads)]:
        tolerance = 20 * eps * max(1, np.abs(want).max())
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=tolerance)
    if dtype == np.float16 and x.dtype != np.uint8:
        assert near.dtype == found.dtype == dtype


def test_cross_entropy_is_the_textbook_and_its_gradient_the_difference():
    random = np.random.default_rng(0)
    logits, targets = random.standard_normal((2, 3, VOCABULARY)), random.integers(0, VOCABULARY, (2, 3))
    odds = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(odds, targets[..., None], -1)).sum()
    loss, saved = nn.cross_entropy(logits, targets)
    assert loss == pytest.approx(expected, rel=1e-12)
    gradient = nn.cross_entropy_backward(saved, 0.5)
    differences = slope(lambda: 0.5 * nn.cross_entropy(logits, targets)[0], logits)
    np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-8)


def test_cross_entropy_of_huge_and_of_no_logits():
    huge = np.array([[1e4, -1e4, 0]], np.float32)
    loss, saved = nn.cross_entropy(huge, np.array([1]))
    assert loss == 2e4 and np.array_equal(nn.cross_entropy_backward(saved), [[1, -1, 0]])
    loss, saved = nn.cross_entropy(np.empty((0, 4, 3), np.float16), np.empty((0, 4), int))
    gradient = nn.cross_entropy_backward(saved)
    assert loss == 0 and gradient.shape == (0, 4, 3) and gradient.dtype == np.float16


def test_attention_does_not_look_ahead():
    layer, x = layers()["attention"]
    params = start(layer)
    before = layer.forward(params, x)[0]
    x[:, 3] += 1
    after = layer.forward(params, x)[0]
    assert np.array_equal(before[:, :3], after[:, :3]) and not np.allclose(before[:, 3:], after[:, 3:])


def test_attention_with_large_scores_is_finite():
    layer, x = layers()["attention"]
    params = start(layer, np.float32)
    y, saved = layer.forward(params, (1e4 * x).astype(np.float32))
    grads = Flat(layer.shapes)
    assert np.isfinite(layer.backward(params, saved, y, grads, nn.layer.ignore)).all()
    assert np.isfinite(y).all() and np.isfinite(grads.flat).all()


def test_dropout_keeps_the_mean_and_the_share():
    layer = nn.Dropout(0.25)
    y, keep = layer.forward({}, np.ones((100, 1000), np.float32), draw())
    assert set(np.unique(y)) == {0, np.float32(4 / 3)}
    assert abs(keep.mean() - 0.75) < 5e-3 and abs(y.mean() - 1) < 5e-3
    assert abs(np.corrcoef(keep[:-1].ravel(), keep[1:].ravel())[0, 1]) < 0.01
    assert np.array_equal(layer.backward({}, keep, np.ones_like(y), {}), y)


def test_dropout_to_evaluate_or_of_nothing_changes_nothing():
    x = np.ones((2, 3))
    for layer, source in (nn.Dropout(0.5), None), (nn.Dropout(0), draw()):
        y, saved = layer.forward({}, x, source)
        assert y is x and layer.backward({}, saved, x, {}) is x


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_draws_do_not_depend_on_the_number_of_ranks(size, width):
    whole = nn.Draw(seed=5, step=9)
    expected = [whole((7, width)), whole((7, 2, width))]
    ends = [7 * rank // size for rank in range(size + 1)]
    parts = [nn.Draw(seed=5, step=9, first=first) for first in ends[:-1]]
    counts = [stop - first for first, stop in zip(ends, ends[1:], strict=False)]
    for shape, want in ((width,), expected[0]), ((2, width), expected[1]):
        drawn = [part((count, *shape)) for part, count in zip(parts, counts, strict=True)]
        assert np.array_equal(np.concatenate(drawn), want)


def test_draws_differ_by_seed_step_layer_and_sample():
    seen = set()
    for seed, step, first in (1, 2, 0), (2, 2, 0), (1, 3, 0), (2, 1, 0), (1, 2, 1):
        source = nn.Draw(seed, step, first)
        seen |= {source((1, 64)).tobytes() for _ in range(2)}
    assert len(seen) == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Dropout(1.0), r"rate must be in \[0, 1\), got 1.0"),
        (lambda: nn.CausalAttention("a", 6, 4), "width 6 is no multiple of 4 heads"),
        (lambda: nn.Stack([nn.LayerNorm("a", 2)] * 2), "two layers have a parameter 'a.gain'"),
        (
            lambda: nn.Positions("p", 4, 2).forward(start(nn.Positions("p", 4, 2)), np.ones((1, 5, 2))),
            "p.weight has 4 places, got a sequence of 5",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Elsewhere(np.ndarray):
    """An array of another library, as far as its functions can tell."""

    __module__ = "elsewhere.core"


@pytest.mark.parametrize("case", [*CASES, "loss"])
def test_arrays_are_made_by_their_own_library(case, monkeypatch):
    """As for CuPy: functions are taken from the module of the arrays, and nothing is made by numpy."""
    used = set()

    def function(name):
        def call(*args, **kwargs):
            used.add(name)
            made = getattr(np, name)(*args, **kwargs)
            return made.view(Elsewhere) if isinstance(made, np.ndarray) else made

        return call

    library = types.ModuleType("elsewhere")
    for name in "arange empty_like exp full log matmul sqrt square tanh triu".split():
        setattr(library, name, function(name))
    monkeypatch.setitem(sys.modules, "elsewhere", library)
    if case == "loss":
        logits = np.ones((2, 3)).view(Elsewhere)
        assert nn.namespace(logits) is library
        _, saved = nn.cross_entropy(logits, np.zeros(2, int).view(Elsewhere))
        assert isinstance(nn.cross_entropy_backward(saved), Elsewhere)
        return
    layer, x = layers()[case]
    params = {name: value.view(Elsewhere) for name, value in start(layer).items()}
    y, saved = layer.forward(params, x.view(Elsewhere), draw())
    grads = {name: np.empty_like(value) for name, value in params.items()}
    dx = layer.backward(params, saved, np.ones_like(y), grads, nn.layer.ignore)
    assert isinstance(y, Elsewhere) and isinstance(dx, Elsewhere)
    assert used or case == "positions"


class TestAgainstTorch:
    """The same numbers from the same parameters in PyTorch, forward and backward."""

    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    def compare(self, torch, layer, x, module):
        """Compare a layer to module(parameters, input), both as double."""
        params = start(layer)
        theirs = {name: torch.tensor(value, requires_grad=True) for name, value in params.items()}
        inputs = torch.tensor(x, requires_grad=x.dtype.kind == "f")
        expected = module(theirs, inputs)
        weights = np.random.default_rng(2).standard_normal(expected.shape)
        (expected * torch.tensor(weights)).sum().backward()
        y, theirs_y = layer.forward(params, x)[0], expected.detach().numpy()
        np.testing.assert_allclose(y, theirs_y, rtol=1e-10, atol=1e-12)
        dx, grads, _ = ran(layer, params, x, weights)
        for name, gradient in grads.items():
            np.testing.assert_allclose(gradient, theirs[name].grad.numpy(), rtol=1e-9, atol=1e-11)
        if inputs.requires_grad:
            np.testing.assert_allclose(dx, inputs.grad.numpy(), rtol=1e-9, atol=1e-11)

    def test_linear(self, torch):
        linear = torch.nn.functional.linear
        self.compare(
            torch, *layers()["linear"], lambda p, x: linear(x, p["linear.weight"].T, p["linear.bias"])
        )

    def test_embedding(self, torch):
        self.compare(torch, *layers()["embedding"], lambda p, x: p["embedding.weight"][x.long()])

    def test_positions(self, torch):
        self.compare(torch, *layers()["positions"], lambda p, x: x + p["positions.weight"][: x.shape[1]])

    def test_norm(self, torch):
        norm = torch.nn.functional.layer_norm
        self.compare(torch, *layers()["norm"], lambda p, x: norm(x, (WIDTH,), p["norm.gain"], p["norm.bias"]))

    def test_gelu(self, torch):
        gelu = torch.nn.functional.gelu
        self.compare(torch, *layers()["gelu"], lambda p, x: gelu(x, approximate="tanh"))

    def test_attention(self, torch):
        def attention(p, x):
            qkv = x @ p["attention.qkv.weight"] + p["attention.qkv.bias"]
            q, k, v = (part.reshape(SAMPLES, LENGTH, 2, -1).transpose(1, 2) for part in qkv.split(WIDTH, -1))
            seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return seen.transpose(1, 2).reshape(x.shape) @ p["attention.out.weight"] + p["attention.out.bias"]

        self.compare(torch, *layers()["attention"], attention)

    def test_cross_entropy(self, torch):
        random = np.random.default_rng(0)
        logits, targets = random.standard_normal((6, VOCABULARY)), random.integers(0, VOCABULARY, 6)
        theirs = torch.tensor(logits, requires_grad=True)
        expected = torch.nn.functional.cross_entropy(theirs, torch.tensor(targets), reduction="sum")
        expected.backward()
        loss, saved = nn.cross_entropy(logits, targets)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        gradient = nn.cross_entropy_backward(saved)
        np.testing.assert_allclose(gradient, theirs.grad.numpy(), rtol=1e-10, atol=1e-14)
