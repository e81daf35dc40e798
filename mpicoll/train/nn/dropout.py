"""Dropout whose zeros follow from the seed, the step and the sample, not from the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.io.sampler import mix
from mpicoll.train.nn.layer import Layer, ignore, namespace

if TYPE_CHECKING:
    from mpicoll.train.nn.layer import Array, Arrays, Ready

__all__ = ["Draw", "Dropout"]

LANES = 4  # numbers of 16 bits drawn at once
LEVELS = 1 << 16


@dataclass
class Draw:
    """Random numbers for one forward pass over a rank's part of a global batch.

    Every rank draws its own part of one stream that runs over the samples of the global batch: no two
    ranks draw the same numbers, and a sample gets the same ones whichever rank it is dealt to.

    Parameters
    ----------
    seed
        Another seed, another stream.
    step
        The step; each has a stream of its own.
    first
        Which sample of the global batch is this rank's first: `part(batch, rank, size).start`.
    """

    seed: int
    step: int
    first: int = 0
    _layer: int = field(default=0, init=False, repr=False)

    def __call__(self, shape: tuple[int, ...], xp: Any = np) -> Array:
        """Return uniform numbers of 16 bits for the next layer, samples along the first axis."""
        self._layer += 1
        key = np.zeros(1, np.uint64)
        for word in self.seed, self.step, self._layer:
            key = mix(key ^ np.uint64(word))
        start = self.first * math.prod(shape[1:])
        stop = start + math.prod(shape)
        words = xp.arange(start // LANES, -(-stop // LANES), dtype=np.uint64)
        words ^= key[0]
        offset = start % LANES
        lanes: Array = mix(words).view(np.uint16)[offset : offset + stop - start]
        return lanes.reshape(shape)


class Dropout(Layer):
    """Sets a share of the values to zero, and scales the others up so that the mean stays.

    Parameters
    ----------
    rate
        The share, in steps of 1/65536.
    """

    shapes = {}

    def __init__(self, rate: float) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"rate must be in [0, 1), got {rate}")
        self.threshold = min(round(rate * LEVELS), LEVELS - 1)

    def forward(self, params: Arrays, x: Array, draw: Draw | None = None) -> tuple[Array, Any]:
        """Return x with holes; x itself where there is no `draw` or nothing to drop."""
        if draw is None or not self.threshold:
            return x, None
        keep = draw(x.shape, namespace(x)) >= self.threshold
        return self._apply(x, keep), keep

    def backward(self, params: Arrays, saved: Any, dy: Array, grads: Arrays, ready: Ready = ignore) -> Array:
        """Return dy with the same holes."""
        return dy if saved is None else self._apply(dy, saved)

    def _apply(self, x: Array, keep: Array) -> Array:
        y: Array = x * keep
        y *= LEVELS / (LEVELS - self.threshold)
        return y
