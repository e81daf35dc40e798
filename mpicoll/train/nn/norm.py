"""Layer norm: every row gets mean 0 and variance 1, then a learnt gain and bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.nn.layer import Layer, ignore, namespace, wide

if TYPE_CHECKING:
    from mpicoll.train.nn.dropout import Draw
    from mpicoll.train.nn.layer import Array, Arrays, Ready

__all__ = ["LayerNorm"]


class LayerNorm(Layer):
    """Layer normalisation over the last axis (Ba, Kiros and Hinton, 2016).

    Parameters
    ----------
    name
        Its parameters are ``name.gain`` and ``name.bias``, each of shape (width,).
    width
        Length of the last axis.
    eps
        Added to the variance.
    """

    def __init__(self, name: str, width: int, eps: float = 1e-5) -> None:
        self.gain, self.bias, self.eps = f"{name}.gain", f"{name}.bias", eps
        self.shapes = {self.gain: (width,), self.bias: (width,)}

    def start(self, random: np.random.Generator) -> Iterator[tuple[str, Array]]:
        """Yield a gain of one and a bias of zero."""
        yield self.gain, np.ones(self.shapes[self.gain])
        yield self.bias, np.zeros(self.shapes[self.bias])

    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Return ``(x - mean) / sqrt(variance + eps) * gain + bias``; statistics in float32 at least."""
        xp, centred = namespace(x), wide(x)
        centred = centred - centred.mean(axis=-1, keepdims=True)
        inverse = 1 / xp.sqrt(xp.square(centred).mean(axis=-1, keepdims=True) + self.eps)
        centred *= inverse
        y = centred * params[self.gain]
        y += params[self.bias]
        return y.astype(x.dtype, copy=False), (centred, inverse)

    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Return what of dy is neither along the mean nor along x, divided by the standard deviation."""
        (normal, inverse), slope, rows = saved, wide(dy), tuple(range(dy.ndim - 1))
        grads[self.bias][...] = slope.sum(axis=rows)
        ready(self.bias)
        along = slope * normal
        grads[self.gain][...] = along.sum(axis=rows)
        ready(self.gain)
        dx = slope * params[self.gain]
        along *= params[self.gain]
        dx -= normal * along.mean(axis=-1, keepdims=True) + dx.mean(axis=-1, keepdims=True)
        dx *= inverse
        return dx.astype(dy.dtype, copy=False)
