"""LARS and LAMB: optimizers for large global batches, whose step follows the size of each array."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.optim.optimizers import Adam, Optimizer

if TYPE_CHECKING:
    from mpicoll.optim.optimizers import Array, Arrays

__all__ = ["LAMB", "LARS"]


class LARS(Optimizer):
    """Gradient descent whose rate is scaled layer by layer (You, Gitman and Ginsburg, 2017).

    The gradient of an array, decay included, is scaled by
    ``trust * |param| / (|gradient| + decay * |param|)``, so that no layer moves by more than a small share of
    its own size.

    Parameters
    ----------
    params
        Name -> array.
    lr
        Learning rate or schedule.
    momentum
        0 for none.
    weight_decay
        Added to the gradient, times the parameter.
    trust
        The share of its size that an array moves at learning rate 1.
    undecayed
        Names of parameters without weight decay, which are not scaled either: biases and norms.
    """

    kinds = ("velocity",)
    options = ("momentum", "trust", *Optimizer.options)
    elementwise = False

    def __init__(
        self,
        params: Arrays,
        lr: float | Callable[[int], float],
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
        undecayed: Collection[str] = (),
    ) -> None:
        super().__init__(params, lr, weight_decay, undecayed)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if not trust > 0:
            raise ValueError(f"trust must be positive, got {trust}")
        self.momentum, self.trust = momentum, trust

    def _update(self, param: Array, gradient: Array, decay: float | None, *state: Array) -> None:
        (velocity,) = state
        scale = self.lr
        if decay is not None:
            size, slope = norm(param), norm(gradient)
            gradient = gradient + decay * param
            if size and slope:
                scale *= self.trust * size / (slope + decay * size)
        velocity *= self.momentum
        velocity += scale * gradient
        param -= velocity


class LAMB(Adam):
    """Adam whose step is scaled layer by layer (You et al., 2020).

    Adam's direction, decay included, is scaled by ``|param| / |direction|``.

    Parameters
    ----------
    params
        Name -> array.
    lr
        Learning rate or schedule.
    betas, eps
        As in `Adam`.
    weight_decay
        Added to Adam's direction, times the parameter.
    limit
        The scale is cut here; None never cuts it.
    undecayed
        Names of parameters without weight decay, which are not scaled either: biases and norms.
    """

    options = ("limit", *Adam.options)
    elementwise = False

    def __init__(
        self,
        params: Arrays,
        lr: float | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        limit: float | None = 10.0,
        undecayed: Collection[str] = (),
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, undecayed)
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
