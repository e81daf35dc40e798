"""Layers one after the other, and layers beside which the input goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.nn.layer import Layer, ignore

if TYPE_CHECKING:
    from mpicoll.train.nn.dropout import Draw
    from mpicoll.train.nn.layer import Array, Arrays, Ready

__all__ = ["Residual", "Stack"]


class Stack(Layer):
    """Layers one after the other.

    Parameters
    ----------
    layers
        In the order of the forward pass. No two may have a parameter of the same name.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)
        self.shapes = {}
        for layer in self.layers:
            for name, shape in layer.shapes.items():
                if name in self.shapes:
                    raise ValueError(f"two layers have a parameter {name!r}")
                self.shapes[name] = shape

    def start(self, random: np.random.Generator) -> Iterator[tuple[str, Array]]:
        """Yield the initial values of all layers."""
        for layer in self.layers:
            yield from layer.start(random)

    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Apply the layers in turn."""
        saved = []
        for layer in self.layers:
            x, save = layer.forward(params, x, draw)
            saved.append(save)
        return x, saved

    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Undo the layers from the last, dropping what each had saved."""
        for layer in reversed(self.layers):
            dy = layer.backward(params, saved.pop(), dy, grads, ready)
        return dy


class Residual(Stack):
    """Layers whose output is added to their input."""

    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Return x plus what the layers make of it."""
        y, saved = super().forward(params, x, draw)
        return x + y, saved

    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Return dy plus what comes back through the layers."""
        return dy + super().backward(params, saved, dy, grads, ready)
