"""Causal self-attention: every place looks at itself and at those before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.nn.layer import Layer, ignore, namespace, wide
from mpicoll.train.nn.linear import Linear

if TYPE_CHECKING:
    from mpicoll.train.nn.dropout import Draw
    from mpicoll.train.nn.layer import Array, Arrays, Ready

__all__ = ["CausalAttention"]


class CausalAttention(Layer):
    """Multi-head attention with a causal mask (Vaswani and others, 2017): (samples, length, width).

    Parameters
    ----------
    name
        Its parameters are those of two linear layers, ``name.qkv`` (queries, keys and values, in this
        order, the heads of each one after the other) and ``name.out``.
    width
        Of the input and the output.
    heads
        How many; they share the width.
    scale
        Of the output's weights at the start, as in `Linear`.
    """

    def __init__(self, name: str, width: int, heads: int, scale: float | None = None) -> None:
        if heads < 1 or width % heads:
            raise ValueError(f"width {width} is no multiple of {heads} heads")
        self.heads = heads
        self.qkv = Linear(f"{name}.qkv", width, 3 * width)
        self.out = Linear(f"{name}.out", width, width, scale)
        self.shapes = {**self.qkv.shapes, **self.out.shapes}

    def start(self, random: np.random.Generator) -> Iterator[tuple[str, Array]]:
        """Yield what the two linear layers start from."""
        yield from self.qkv.start(random)
        yield from self.out.start(random)

    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Return ``softmax(mask(q k^T / sqrt(width of a head))) v``, through the output layer."""
        xp, (samples, length, width) = namespace(x), x.shape
        qkv, saved_in = self.qkv.forward(params, x)
        q, k, v = self._heads(qkv)
        scores = wide(q @ k.swapaxes(-1, -2))
        scores *= q.shape[-1] ** -0.5
        scores += xp.triu(xp.full((length, length), -np.inf, scores.dtype), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        odds = scores.astype(x.dtype, copy=False)
        seen = (odds @ v).swapaxes(1, 2).reshape(samples, length, width)
        y, saved_out = self.out.forward(params, seen)
        return y, (saved_in, qkv, odds, saved_out)

    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Go back through the output layer, the weighted sum, the softmax, the products, the input layer."""
        saved_in, qkv, odds, saved_out = saved
        xp, (q, k, v) = namespace(dy), self._heads(qkv)
        d_seen = self.out.backward(params, saved_out, dy, grads, ready)
        d_seen = d_seen.reshape(v.swapaxes(1, 2).shape).swapaxes(1, 2)
        d_qkv = xp.empty_like(qkv)
        d_q, d_k, d_v = self._heads(d_qkv)
        d_v[...] = odds.swapaxes(-1, -2) @ d_seen
        d_scores = wide(d_seen @ v.swapaxes(-1, -2))
        d_scores *= odds
        d_scores -= odds * d_scores.sum(axis=-1, keepdims=True)
        d_scores *= q.shape[-1] ** -0.5
        d_scores = d_scores.astype(dy.dtype, copy=False)
        d_q[...] = d_scores @ k
        d_k[...] = d_scores.swapaxes(-1, -2) @ q
        return self.qkv.backward(params, saved_in, d_qkv, grads, ready)

    def _heads(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Return views of queries, keys and values, each (samples, heads, length, width of a head)."""
        samples, length, width = qkv.shape
        split = qkv.reshape(samples, length, 3, self.heads, width // 3 // self.heads)
        q, k, v = split.transpose(2, 0, 3, 1, 4)
        return q, k, v
