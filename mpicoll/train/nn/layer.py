"""What every layer is: the shapes of its parameters, a forward function, and the backward that undoes it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.train.nn.dropout import Draw

    Array = NDArray[Any]
    Arrays = Mapping[str, Array]
    Ready = Callable[[str], Any]

__all__ = ["Layer", "ignore", "namespace", "wide"]


def ignore(name: str) -> None:
    """Do nothing about a gradient that is ready."""


class Layer(ABC):
    """A function with parameters, and its derivative.

    A layer holds no arrays. Parameters and gradients are mappings from names to arrays that the caller
    owns, so the same layer runs on a `Flat`, on gradient `Buckets` in the window, or on plain dicts; on
    NumPy or on CuPy arrays.

    Attributes
    ----------
    shapes : dict
        Parameter's name -> shape, in the order in which the forward pass uses them.
    """

    shapes: Mapping[str, tuple[int, ...]]

    def start(self, random: np.random.Generator) -> Iterator[tuple[str, Array]]:
        """Yield name and initial value of every parameter; nothing where there are none."""
        yield from ()

    @abstractmethod
    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Return the output, and what the backward pass will need.

        Parameters
        ----------
        params
            Name -> array.
        x
            Input, samples along the first axis. It is not changed.
        draw
            Where random numbers come from; None leaves them out, as one does to evaluate.
        """

    @abstractmethod
    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Write the parameters' gradients into `grads`, and return that of the input.

        Parameters
        ----------
        params
            As they were in the forward pass.
        saved
            What the forward pass returned beside its output; used up.
        dy
            Gradient of the loss by the output. It is not changed.
        grads
            Name -> array to write to; what was there is lost.
        ready
            Called with a parameter's name once its gradient is written. The last layer's come first:
            averaging them can begin while the layers before are still computing.
        """


def namespace(array: Array) -> Any:
    """Return the module whose functions work on this array: numpy, or cupy for what CuPy made."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def wide(array: Array) -> Array:
    """Return 2-byte floats as float32, in which sums and exponentials of them are safe."""
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array
