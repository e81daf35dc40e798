"""Vectors for tokens, and for places in a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.nn.layer import Layer, ignore, namespace, wide

if TYPE_CHECKING:
    from mpicoll.train.nn.dropout import Draw
    from mpicoll.train.nn.layer import Array, Arrays, Ready

__all__ = ["Embedding", "Positions"]


class _Table(Layer):
    """Rows of one matrix, normally distributed at the start."""

    def __init__(self, name: str, rows: int, width: int, scale: float = 1.0) -> None:
        self.weight, self.scale = f"{name}.weight", scale
        self.shapes = {self.weight: (rows, width)}

    def start(self, random: np.random.Generator) -> Iterator[tuple[str, Array]]:
        """Yield normally distributed vectors."""
        yield self.weight, self.scale * random.standard_normal(self.shapes[self.weight])


class Embedding(_Table):
    """A vector for every token: tokens (samples, length) -> vectors (samples, length, width).

    Parameters
    ----------
    name
        Its parameter is ``name.weight``, of shape (vocabulary, width).
    vocabulary, width
        How many tokens there are, and how long a vector is.
    scale
        Width of the normal distribution that the vectors start from.
    """

    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Return every token's vector."""
        return params[self.weight][x], x

    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Add up the gradients of every token; return dy, for tokens have none.

        As a product with a matrix that says which row has which token: the order of its sums is fixed, so
        a GPU gives the same bits at every run, which additions at random places do not.
        """
        xp, (vocabulary, width) = namespace(dy), self.shapes[self.weight]
        has = saved.reshape(1, -1) == xp.arange(vocabulary)[:, None]
        xp.matmul(has.astype(dy.dtype), dy.reshape(-1, width), out=grads[self.weight])
        ready(self.weight)
        return dy


class Positions(_Table):
    """Adds a vector for every place: (samples, length, width), length up to the context.

    Parameters
    ----------
    name
        Its parameter is ``name.weight``, of shape (context, width).
    context, width
        The longest sequence, and how long a vector is.
    scale
        Width of the normal distribution that the vectors start from.
    """

    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Return x plus the vectors of its places."""
        length, context = x.shape[1], self.shapes[self.weight][0]
        if length > context:
            raise ValueError(f"{self.weight} has {context} places, got a sequence of {length}")
        return x + params[self.weight][:length], None

    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Return dy; a place's gradient is the sum over the samples, zero beyond their length."""
        gradient, length = grads[self.weight], dy.shape[1]
        gradient[:length] = wide(dy).sum(axis=0)
        gradient[length:] = 0
        ready(self.weight)
        return dy
