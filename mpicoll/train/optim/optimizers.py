"""SGD and Adam(W): from averaged gradients to new parameters, in place, without communication.

The replicas stay alike because every rank does the same arithmetic on the same bits: the same parameters
to start from (`broadcast_parameters`) and the same averaged gradients at every step (`Buckets.average`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.buckets import Buckets, Flat, runs, zeros_like
from mpicoll.train.optim.checks import check_params

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Arrays = Mapping[str, Array]

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]

BLOCK = 1 << 16  # elements updated at once: what lies between two lines of arithmetic stays in cache


class Optimizer(ABC):
    """What the optimizers share: parameters, learning rate, state, and the walk over the arrays.

    Where the parameters are a `Flat` and the gradients `Buckets` or a `Flat`, arrays that are neighbours in
    both are updated in one go, so that a step costs a few calls per bucket and not per array.

    Parameters
    ----------
    params
        Name -> array, updated in place.
    lr
        The learning rate, or a schedule: a function from the number of steps taken to the learning rate.
    weight_decay
        The share of a parameter that pulls it to zero; what it means exactly is the subclass's.
    undecayed
        Names of parameters without weight decay, such as biases.

    Options that may be None are then what the class says.

    Attributes
    ----------
    lr : float
        Assign to change it; a schedule assigns it before each step.
    steps : int
        Steps taken so far.
    slots : dict of str to mapping
        The state: for each of its kinds (such as ``"velocity"``), name -> array.
    """

    kinds: tuple[str, ...] = ()  #: of state
    options: tuple[str, ...] = ("weight_decay", "undecayed")  #: attributes that `state_dict` holds
    elementwise = True  #: whether elements are updated without regard to the array they belong to
    weight_decay = 0.0

    def __init__(
        self,
        params: Arrays,
        lr: float | Callable[[int], float],
        weight_decay: float | None = None,
        undecayed: Collection[str] = (),
    ) -> None:
        check_params(params)
        self.schedule = lr if callable(lr) else None
        self.lr = lr(0) if callable(lr) else lr
        self._choose(weight_decay=weight_decay)
        if not self.lr >= 0:
            raise ValueError(f"lr must not be negative, got {self.lr}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        for name in undecayed:
            if name not in params:
                raise ValueError(f"undecayed: {name!r} is no parameter")
        self.params, self.undecayed = params, sorted(undecayed)
        self.steps = 0
        self.slots = {kind: zeros_like(params) for kind in self.kinds}
        self._seen: Arrays | None = None
        self._work: list[tuple[Any, ...]] = []

    def _choose(self, **options: Any) -> None:
        """Set the options that were given; the others stay the class's own."""
        vars(self).update({name: value for name, value in options.items() if value is not None})

    def step(self, gradients: Arrays) -> None:
        """Update every parameter from its gradient; names in `gradients` without a parameter are ignored."""
        if gradients is not self._seen:
            self._work = list(self._plan(gradients))
            # the layouts of these never change; the arrays in another mapping may be others next time
            self._seen = gradients if isinstance(gradients, (Buckets, Flat)) else None
        if self.schedule is not None:
            self.lr = self.schedule(self.steps)
        self.steps += 1
        for param, gradient, decay, *state in self._work:
            self._update(param, gradient, decay, *state)
        if self._seen is None:
            self._work = []

    @abstractmethod
    def _update(self, param: Array, gradient: Array, decay: float | None, *state: Array) -> None:
        """Update a parameter, or a stretch of several, in place.

        `decay` is None for the undecayed; `state` is in the order of `kinds`.
        """

    def _plan(self, gradients: Arrays) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of each call of `_update`, after a look at all gradients."""
        for name, param in self.params.items():
            if name not in gradients:
                raise ValueError(f"no gradient for parameter {name!r}")
            if gradients[name].shape != param.shape:
                raise ValueError(
                    f"gradient of {name!r} has shape {gradients[name].shape}, its parameter {param.shape}"
                )
        bare = frozenset(self.undecayed)
        mappings = [self.params, gradients, *self.slots.values()]
        for names in runs(self.params, gradients, bare.__contains__):
            decay = None if names[0] in bare else self.weight_decay
            if len(names) > 1 and self.elementwise:
                param, gradient, *state = (_stretch(mapping, names) for mapping in mappings)
                for at in range(0, param.size, BLOCK):
                    block = slice(at, at + BLOCK)
                    yield param[block], gradient[block], decay, *(array[block] for array in state)
            else:
                for name in names:
                    param, gradient, *state = (mapping[name] for mapping in mappings)
                    yield param, gradient, decay, *state

    def state_dict(self) -> dict[str, Any]:
        """Return all that a later run needs to go on: numbers, and the arrays of the state themselves."""
        return {
            "optimizer": type(self).__name__,
            "steps": self.steps,
            "lr": self.lr,
            "options": {option: getattr(self, option) for option in self.options},
            "slots": {kind: dict(arrays) for kind, arrays in self.slots.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the arrays are copied into those of this optimizer.

        Raises
        ------
        ValueError
            When it is the state of another optimizer or of other parameters; then nothing has changed.
        """
        if state["optimizer"] != type(self).__name__:
            raise ValueError(f"this is the state of {state['optimizer']}, expected {type(self).__name__}")
        for kind, arrays in self.slots.items():
            theirs = state["slots"].get(kind, {})
            for name, array in arrays.items():
                if name not in theirs:
                    raise ValueError(f"the state has no {kind} of parameter {name!r}")
                if theirs[name].shape != array.shape:
                    got = f"{theirs[name].shape}, the parameter {array.shape}"
                    raise ValueError(f"{kind} of {name!r} has shape {got}")
        for kind, arrays in self.slots.items():
            for name, array in arrays.items():
                array[...] = state["slots"][kind][name]
        self.steps, self.lr = state["steps"], state["lr"]
        for option in self.options:
            setattr(self, option, state["options"][option])
        self._seen = None  # the options may part stretches otherwise


class SGD(Optimizer):
    """Gradient descent with momentum: ``velocity = momentum * velocity + gradient``.

    Parameters
    ----------
    params
        Name -> array.
    lr
        Learning rate or schedule.
    momentum
        0 for plain gradient descent.
    nesterov
        Look ahead: step along ``gradient + momentum * velocity`` (Sutskever et al., 2013).
    weight_decay
        Added to the gradient, times the parameter.
    undecayed
        Names of parameters without weight decay.
    """

    kinds = ("velocity",)
    options = ("momentum", "nesterov", *Optimizer.options)
    momentum = 0.0

    def __init__(
        self,
        params: Arrays,
        lr: float | Callable[[int], float],
        momentum: float | None = None,
        *,
        nesterov: bool = False,
        weight_decay: float | None = None,
        undecayed: Collection[str] = (),
    ) -> None:
        super().__init__(params, lr, weight_decay, undecayed)
        self._choose(momentum=momentum)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        self.nesterov = nesterov

    def _update(self, param: Array, gradient: Array, decay: float | None, *state: Array) -> None:
        (velocity,) = state
        if decay:
            gradient = gradient + decay * param
        velocity *= self.momentum
        velocity += gradient
        param -= self.lr * (gradient + self.momentum * velocity if self.nesterov else velocity)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), with decoupled weight decay (Loshchilov and Hutter, 2019).

    Parameters
    ----------
    params
        Name -> array.
    lr
        Learning rate or schedule.
    betas
        Decay rates of the running averages of the gradient and of its square.
    eps
        Added to the denominator.
    weight_decay
        The share of a parameter that a step at learning rate 1 takes away; 0 is plain Adam.
    undecayed
        Names of parameters without weight decay.
    """

    kinds = ("mean", "square")
    options = ("betas", "eps", *Optimizer.options)
    eps = 1e-8

    def __init__(
        self,
        params: Arrays,
        lr: float | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = None,
        weight_decay: float | None = None,
        undecayed: Collection[str] = (),
    ) -> None:
        super().__init__(params, lr, weight_decay, undecayed)
        self._choose(eps=eps)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        self.betas = betas

    def _update(self, param: Array, gradient: Array, decay: float | None, *state: Array) -> None:
        change = self._change(self.lr, gradient, *state)
        if decay:
            param *= 1 - self.lr * decay
        param -= change

    def _change(self, scale: float, gradient: Array, mean: Array, square: Array) -> Array:
        """Return `scale` times the corrected mean over the root of the corrected square, as a new array."""
        beta1, beta2 = self.betas
        mean *= beta1
        mean += (1 - beta1) * gradient
        square *= beta2
        square += (1 - beta2) * np.square(gradient)
        denominator = np.sqrt(square / (1 - beta2**self.steps))
        denominator += self.eps
        change = (scale / (1 - beta1**self.steps)) * mean
        change /= denominator
        return change


class AdamW(Adam):
    """`Adam` whose weight decay is 0.01 unless told otherwise."""

    weight_decay = 0.01


def _stretch(mapping: Arrays, names: list[str]) -> Array:
    """Return neighbouring arrays as one."""
    if isinstance(mapping, Buckets):
        mapping = next(bucket for bucket in mapping.buckets if names[0] in bucket)
    found = mapping.run(names) if isinstance(mapping, Flat) else None
    assert found is not None
    return found
