"""LARS and LAMB: optimizers for large global batches, whose step follows the size of each array."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.optim.optimizers import SGD, Adam

if TYPE_CHECKING:
    from mpicoll.train.optim.optimizers import Array, Arrays

__all__ = ["LAMB", "LARS"]


class LARS(SGD):
    """`SGD` whose rate is scaled layer by layer (You, Gitman and Ginsburg, 2017).

    The gradient of an array, decay included, is scaled by
    ``trust * |param| / (|gradient| + decay * |param|)``, so that no layer moves by more than a small share of
    its own size.

    Parameters
    ----------
    params
        Name -> array.
    lr
        Learning rate or schedule.
    trust
        The share of its size that an array moves at learning rate 1.
    others, named
        The options of `SGD`; momentum is 0.9 and weight decay 1e-4 unless told otherwise. The undecayed are
        not scaled either: biases and norms.
    """

    options = ("trust", *SGD.options)
    elementwise = False
    momentum, weight_decay = 0.9, 1e-4

    def __init__(
        self,
        params: Arrays,
        lr: float | Callable[[int], float],
        *others: Any,
        trust: float = 1e-3,
        **named: Any,
    ) -> None:
        super().__init__(params, lr, *others, **named)
        if not trust > 0:
            raise ValueError(f"trust must be positive, got {trust}")
        self.trust = trust

    def _update(self, param: Array, gradient: Array, decay: float | None, *state: Array) -> None:
        (velocity,) = state
        scale = self.lr
        if decay is not None:
            size, slope = norm(param), norm(gradient)
            gradient = gradient + decay * param
            if size and slope:
                scale *= self.trust * size / (slope + decay * size)
        change = scale * gradient
        velocity *= self.momentum
        velocity += change
        param -= change + self.momentum * velocity if self.nesterov else velocity


class LAMB(Adam):
    """Adam whose step is scaled layer by layer (You et al., 2020).

    Adam's direction, decay included, is scaled by ``|param| / |direction|``.

    Parameters
    ----------
    params
        Name -> array.
    limit
        The scale is cut here; None never cuts it.
    others, named
        The options of `Adam`; eps is 1e-6 and weight decay, which is added to the direction, 0.01 unless told
        otherwise. The undecayed are not scaled either: biases and norms.
    """

    options = ("limit", *Adam.options)
    elementwise = False
    eps, weight_decay = 1e-6, 0.01

    def __init__(self, params: Arrays, *others: Any, limit: float | None = 10.0, **named: Any) -> None:
        super().__init__(params, *others, **named)
        if limit is not None and not limit > 0:
            raise ValueError(f"limit must be positive or None, got {limit}")
        self.limit = limit

    def _update(self, param: Array, gradient: Array, decay: float | None, *state: Array) -> None:
        change = self._change(1.0, gradient, *state)
        scale = self.lr
        if decay is not None:
            change += decay * param
            size, length = norm(param), norm(change)
            if size and length:
                scale *= size / length if self.limit is None else min(size / length, self.limit)
        param -= scale * change


def norm(array: Array) -> float:
    """Return the Euclidean norm, summed in float64 and without BLAS, whose bits depend on the processor."""
    wide: Any = array.astype(np.float32) if array.itemsize == 2 else array
    return math.sqrt(np.square(wide).sum(dtype=np.float64))
