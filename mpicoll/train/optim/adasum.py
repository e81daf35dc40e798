"""Adasum: a sum that adds what is orthogonal and averages what is parallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.train.buckets import Flat

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["adasum"]


def adasum(bucket: Flat, comm: MPI.Intracomm) -> None:
    """Replace each array by the Adasum (Maleki et al., 2021) of all ranks' arrays; collective.

    Two vectors combine to ``a (1 - a.b / 2 a.a) + b (1 - a.b / 2 b.b)``, each array by itself; more than two
    combine in pairs, in the order of ranks. The result has the same bits on every rank.

    Cost: ceil(log2 P) messages of the whole bucket, and two more for some where P is no power of two.

    Parameters
    ----------
    bucket
        The arrays, laid out alike on every rank.
    comm
        The ranks; messages on it must be Adasum's alone.
    """
    other = np.empty_like(bucket.flat)
    views = dict(zip(bucket, _views(bucket, other), strict=True))
    for peer, gives, takes in _partners(comm.rank, comm.size):
        requests = []
        if takes is not None:
            requests.append(comm.Irecv(other.view(np.uint8), peer))
        if gives:
            requests.append(comm.Isend(bucket.flat.view(np.uint8), peer))
        MPI.Request.Waitall(requests)
        if takes == "whole":
            bucket.flat[...] = other
        elif takes == "part":
            for name, mine in bucket.items():
                first, second = (mine, views[name]) if comm.rank < peer else (views[name], mine)
                mine[...] = _combine(first, second)


def _partners(rank: int, size: int) -> Iterator[tuple[int, bool, str | None]]:
    """Yield with whom a rank exchanges: (peer, whether it gives, what it takes: "part", "whole" or None).

    The last ranks beyond a power of two first give what they have to a partner, and get the whole at the end.
    """
    core = 1 << (size.bit_length() - 1)
    if rank >= core:
        yield rank - core, True, None
        yield rank - core, False, "whole"
        return
    late = rank + core if rank + core < size else None
    if late is not None:
        yield late, False, "part"
    for bit in range(core.bit_length() - 1):
        yield rank ^ (1 << bit), True, "part"
    if late is not None:
        yield late, True, None


def _combine(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return the Adasum of two arrays; dot products in float64."""
    wide = np.float32 if a.itemsize == 2 else a.dtype
    x, y = a.astype(wide, copy=False), b.astype(wide, copy=False)
    dot = float((x * y).sum(dtype=np.float64))
    shares = []
    for z in x, y:
        square = float(np.square(z).sum(dtype=np.float64))
        shares.append(1 - dot / (2 * square) if square else 1.0)
    return shares[0] * x + shares[1] * y


def _views(bucket: Flat, memory: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield arrays that lie in `memory` as those of the bucket lie in its own."""
    at = 0
    for array in bucket.values():
        yield memory[at : at + array.size].reshape(array.shape)
        at += array.size
