"""SGD and Adam(W): from averaged gradients to new parameters, in place, without communication.

The replicas stay alike because every rank does the same arithmetic on the same bits: the same parameters
to start from (`broadcast_parameters`) and the same averaged gradients at every step (`Buckets.average`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

__all__ = ["SGD", "Adam", "Optimizer"]


class Optimizer(ABC):
    """What the optimizers share: the parameters, the learning rate, and the walk over the arrays.

    Attributes
    ----------
    params
        Name -> array, updated in place.
    lr : float
        The learning rate; a schedule assigns it before each step.
    steps : int
        Steps taken so far.
    """

    def __init__(self, params: Arrays, lr: float) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must not be negative, got {lr}")
        self.params = params
        self.lr = lr
        self.steps = 0

    def step(self, gradients: Arrays) -> None:
        """Update every parameter from its gradient; names in `gradients` without a parameter are ignored."""
        for name, param in self.params.items():
            if name not in gradients:
                raise ValueError(f"no gradient for parameter {name!r}")
            if gradients[name].shape != param.shape:
                raise ValueError(
                    f"gradient of {name!r} has shape {gradients[name].shape}, its parameter {param.shape}"
                )
        self.steps += 1
        for name, param in self.params.items():
            self._update(name, param, gradients[name])

    @abstractmethod
    def _update(self, name: str, param: NDArray[Any], gradient: NDArray[Any]) -> None:
        """Update one parameter in place."""

    def _zeros(self) -> dict[str, NDArray[Any]]:
        return {name: np.zeros_like(param) for name, param in self.params.items()}


class SGD(Optimizer):
    """Gradient descent with momentum: ``velocity = momentum * velocity + gradient``.

    Parameters
    ----------
    params
        Name -> array.
    lr
        Learning rate.
    momentum
        0 for plain gradient descent.
    """

    def __init__(self, params: Arrays, lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, lr)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        self.momentum = momentum
        self.velocity = self._zeros()

    def _update(self, name: str, param: NDArray[Any], gradient: NDArray[Any]) -> None:
        velocity = self.velocity[name]
        velocity *= self.momentum
        velocity += gradient
        param -= self.lr * velocity


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), with decoupled weight decay (AdamW; Loshchilov and Hutter, 2019).

    Parameters
    ----------
    params
        Name -> array.
    lr
        Learning rate.
    betas
        Decay rates of the running averages of the gradient and of its square.
    eps
        Added to the denominator.
    weight_decay
        The share of a parameter that a step at learning rate 1 takes away; 0 is plain Adam.
    """

    def __init__(
        self,
        params: Arrays,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.mean = self._zeros()
        self.square = self._zeros()

    def _update(self, name: str, param: NDArray[Any], gradient: NDArray[Any]) -> None:
        (beta1, beta2), mean, square = self.betas, self.mean[name], self.square[name]
        mean *= beta1
        mean += (1 - beta1) * gradient
        square *= beta2
        square += (1 - beta2) * np.square(gradient)
        denominator = np.sqrt(square / (1 - beta2**self.steps))
        denominator += self.eps
        param *= 1 - self.lr * self.weight_decay
        param -= (self.lr / (1 - beta1**self.steps)) * mean / denominator
