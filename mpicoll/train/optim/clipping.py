"""Gradients cut to a length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.buckets import Buckets, Flat

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray

__all__ = ["clip_by_global_norm", "global_norm"]

BLOCK = 1 << 16  # elements squared at once, in cache


def global_norm(gradients: Mapping[str, NDArray[Any]], comm: MPI.Intracomm | None = None) -> float:
    """Return the Euclidean norm of all gradients as one vector; collective where there is a `comm`.

    Squares are summed in float64, without BLAS, so that replicas with the same bits get the same norm.

    Parameters
    ----------
    gradients
        Name -> array.
    comm
        Ranks that hold different parts of the gradients (tensor parallel, ZeRO). None for replicas.
    """
    pieces = [bucket.flat for bucket in gradients.buckets] if isinstance(gradients, Buckets) else None
    if pieces is None:
        pieces = [gradients.flat] if isinstance(gradients, Flat) else list(gradients.values())
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in pieces:
            line = piece.reshape(-1)
            for at in range(0, line.size, BLOCK):
                wide = line[at : at + BLOCK].astype(np.float64)
                total += float(np.square(wide, out=wide).sum())
    if comm is not None:
        total = sum(comm.allgather(total))  # in the order of ranks: the same bits everywhere
    return math.sqrt(total)


def clip_by_global_norm(
    gradients: Mapping[str, NDArray[Any]], max_norm: float, comm: MPI.Intracomm | None = None
) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`; return what it was.

    To be called between ``synchronize`` and ``step``: it is the averaged gradient that must not be too long.
    Gradients that are not finite are left as they are.

    Parameters
    ----------
    gradients
        Name -> array, changed in place.
    max_norm
        The longest that is left as it is.
    comm
        As for `global_norm`.

    Examples
    --------
    >>> gradients = {"a": np.array([3.0]), "b": np.array([4.0])}
    >>> clip_by_global_norm(gradients, 1.0)
    5.0
    >>> gradients["b"].round(6).tolist()
    [0.8]
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    norm = global_norm(gradients, comm)
    if max_norm < norm < math.inf:
        for gradient in gradients.values():
            np.multiply(gradient, gradient.dtype.type(max_norm / norm), out=gradient)
    return norm
