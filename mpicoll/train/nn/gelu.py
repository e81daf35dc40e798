"""GELU: a smooth ``max(0, x)``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mpicoll.train.nn.layer import Layer, ignore, namespace

if TYPE_CHECKING:
    from mpicoll.train.nn.dropout import Draw
    from mpicoll.train.nn.layer import Array, Arrays, Ready

__all__ = ["GELU"]

A, B = math.sqrt(2 / math.pi), 0.044715


class GELU(Layer):
    """Gaussian error linear unit, in its form with tanh (Hendrycks and Gimpel, 2016)."""

    shapes = {}

    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Return ``x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2``."""
        bent = x * x
        bent *= A * B
        bent += A
        bent *= x
        namespace(x).tanh(bent, out=bent)
        y = bent + 1
        y *= x
        y *= 0.5
        return y, (x, bent)

    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Return ``dy ((1 + t) + x (1 - t^2) t') / 2``, t being the tanh and t' its argument's slope."""
        x, bent = saved
        dx: Array = x * x
        dx *= 3 * A * B
        dx += A
        dx *= x
        dx *= 1 - bent * bent
        dx += bent
        dx += 1
        dx *= dy
        dx *= 0.5
        return dx
