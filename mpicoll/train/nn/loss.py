"""Cross-entropy of predicted odds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.nn.layer import namespace, wide

if TYPE_CHECKING:
    from mpicoll.train.nn.layer import Array

__all__ = ["cross_entropy", "cross_entropy_backward"]


def cross_entropy(logits: Array, targets: Array) -> tuple[float, Any]:
    """Return the summed loss in nats of predicting `targets`, and what the backward pass will need.

    Parameters
    ----------
    logits
        Log-odds of every token, up to a constant: (..., vocabulary).
    targets
        The tokens that came: (...).
    """
    xp = namespace(logits)
    rows = wide(logits).reshape(-1, logits.shape[-1])
    which = xp.arange(len(rows)), targets.reshape(-1)
    rows = rows - rows.max(axis=1, keepdims=True)
    rows -= xp.log(xp.exp(rows).sum(axis=1, keepdims=True))
    return -float(rows[which].sum(dtype=np.float64)), (rows, which, logits.shape, logits.dtype)


def cross_entropy_backward(saved: Any, scale: float = 1.0) -> Array:
    """Return the gradient by the logits of `scale` times the summed loss: the odds minus what came."""
    rows, which, shape, dtype = saved
    gradient: Array = namespace(rows).exp(rows)
    gradient[which] -= 1
    gradient *= scale
    return gradient.astype(dtype, copy=False).reshape(shape)
