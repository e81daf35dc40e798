"""Backward passes counted, and their gradients summed, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

__all__ = ["Passes"]


class Passes:
    """Which gradients are ready, after how many of the backward passes of a step.

    Parameters
    ----------
    gradients
        Where each pass leaves its gradients, and the last one finds the sum over all.
    count
        Passes per step.
    """

    def __init__(self, gradients: Arrays, count: int) -> None:
        self.gradients, self.count = gradients, count
        self._sums = {
            name: np.zeros(array.shape, np.float32 if array.itemsize == 2 else array.dtype)
            for name, array in (gradients.items() if count > 1 else ())
        }
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._seen = dict.fromkeys(self.gradients, 0)

    def add(self, name: str) -> bool:
        """Count a gradient of one pass; whether it was the last of the step."""
        if name not in self._seen:
            raise ValueError(f"{name!r} is no parameter")
        seen = self._seen[name]
        if seen == self.count:
            passes = "one backward pass" if self.count == 1 else f"{self.count} backward passes"
            raise ValueError(
                f"gradient of {name!r} is ready once more before step(): there is to be {passes}"
            )
        if self.count > 1:
            if seen == 0:
                self._sums[name][...] = self.gradients[name]
            else:
                self._sums[name][...] += self.gradients[name]
            if seen == self.count - 1:
                self.gradients[name][...] = self._sums[name]
        self._seen[name] = seen + 1
        return seen + 1 == self.count

    def late(self) -> Iterator[str]:
        """Yield the parameters that this pass has not reached yet, from the last."""
        latest = max(self._seen.values(), default=0)
        names = [name for name, seen in self._seen.items() if seen < latest] or list(self._seen)
        yield from reversed(names)

    def settle(self) -> None:
        """End the passes: what was reached less often counts as far as it came, in the extreme as zero.

        Where none was reached by any pass, all are taken as they stand.
        """
        if any(self._seen.values()):
            for name, seen in self._seen.items():
                if seen < self.count:
                    self.gradients[name][...] = self._sums[name] if seen else 0
        elif self.count > 1:
            raise RuntimeError(
                f"no gradient was ready since the last step: with {self.count} backward passes per step, "
                f"call grad_ready() after each"
            )
