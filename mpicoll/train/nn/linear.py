"""``y = x @ weight + bias``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.nn.layer import Layer, ignore, namespace, wide

if TYPE_CHECKING:
    from mpicoll.train.nn.dropout import Draw
    from mpicoll.train.nn.layer import Array, Arrays, Ready

__all__ = ["Linear"]


class Linear(Layer):
    """A matrix applied to the last axis.

    Parameters
    ----------
    name
        Its parameters are ``name.weight``, of shape (inputs, outputs), and ``name.bias``.
    inputs, outputs
        Widths before and after.
    scale
        The weights start from a normal distribution of this width; None: 1 / sqrt(inputs), which keeps
        the size of what goes through.
    """

    def __init__(self, name: str, inputs: int, outputs: int, scale: float | None = None) -> None:
        self.weight, self.bias = f"{name}.weight", f"{name}.bias"
        self.shapes = {self.weight: (inputs, outputs), self.bias: (outputs,)}
        self.scale = inputs**-0.5 if scale is None else scale

    def start(self, random: np.random.Generator) -> Iterator[tuple[str, Array]]:
        """Yield normally distributed weights and a bias of zero."""
        yield self.weight, self.scale * random.standard_normal(self.shapes[self.weight])
        yield self.bias, np.zeros(self.shapes[self.bias])

    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Return ``x @ weight + bias``."""
        weight = params[self.weight]
        y = x.reshape(-1, len(weight)) @ weight  # one large product, not one per sample
        y += params[self.bias]
        return y.reshape(*x.shape[:-1], weight.shape[1]), x

    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Return ``dy @ weight.T``; the parameters' gradients are sums over all but the last axis."""
        weight, xp = params[self.weight], namespace(dy)
        rows, x = dy.reshape(-1, weight.shape[1]), saved.reshape(-1, weight.shape[0])
        grads[self.bias][...] = wide(rows).sum(axis=0)
        ready(self.bias)
        xp.matmul(x.T, rows, out=grads[self.weight])
        ready(self.weight)  # before the input's gradient: the sooner it travels, the more is hidden
        return (rows @ weight.T).reshape(saved.shape)
