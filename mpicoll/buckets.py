"""Flat buffers: many named arrays laid out in few contiguous ones, so that one call moves them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from mpicoll.comm import Intracomm

__all__ = ["Buckets", "Flat"]

BUCKET_NBYTES = 1 << 22  #: beyond a few MiB a larger bucket is no faster, and the first one is ready later


class Flat(Mapping[str, "NDArray[Any]"]):
    """Named arrays laid out one after another in one flat buffer.

    A mapping from names to views: writing to a view writes to `flat`, and the other way round.

    Parameters
    ----------
    shapes
        Name -> shape, in the order of the layout.
    dtype
        The type of every array.
    empty
        Makes the buffer from a count and a dtype: `comm.empty` places it in the node-shared window.

    Examples
    --------
    >>> params = Flat({"weight": (2, 3), "bias": (3,)})
    >>> params["bias"][:] = 1
    >>> params.flat.tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: DTypeLike = np.float32,
        empty: Callable[[int, Any], NDArray[Any]] = np.empty,
    ) -> None:
        ends = np.cumsum([0, *(math.prod(shape) for shape in shapes.values())]).tolist()
        self.flat: NDArray[Any] = empty(ends[-1], np.dtype(dtype))
        self.flat[...] = 0
        self._views = {
            name: self.flat[start:stop].reshape(tuple(shape))
            for (name, shape), start, stop in zip(shapes.items(), ends, ends[1:], strict=False)
        }

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Flat:
        """Copy arrays of one dtype into a new flat buffer."""
        dtypes = {array.dtype for array in arrays.values()}
        if len(dtypes) > 1:
            raise ValueError(f"one flat buffer holds one dtype, got {sorted(map(str, dtypes))}")
        flat = cls({name: array.shape for name, array in arrays.items()}, dtypes.pop() if dtypes else float)
        for name, array in arrays.items():
            flat[name][...] = array
        return flat

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class Buckets(Mapping[str, "NDArray[Any]"]):
    """Gradients as views in flat buckets, averaged in place over a communicator.

    A mapping from the parameters' names to arrays of the same shapes, to be written by the backward pass
    (``np.matmul(..., out=gradients[name])``), so that nothing is packed before a call or unpacked after it.
    The buckets come from ``comm.empty``: on one node they lie in memory that its ranks share.

    Parameters
    ----------
    params
        Name -> array, in the order of the forward pass. Buckets are filled in reverse: the last layer's
        gradients are the first to be complete.
    comm
        The ranks to average over.
    nbytes
        A bucket is closed before it outgrows this. An array larger than this has a bucket of its own.

    Attributes
    ----------
    buckets : list of Flat
        In the order in which a backward pass completes them.
    """

    def __init__(
        self, params: Mapping[str, NDArray[Any]], comm: Intracomm, nbytes: int = BUCKET_NBYTES
    ) -> None:
        self.comm = comm
        self.buckets = [
            Flat({name: params[name].shape for name in names}, params[names[0]].dtype, comm.empty)
            for names in _fill(params, nbytes)
        ]
        holder = {name: bucket for bucket in self.buckets for name in bucket}
        self._views = {name: holder[name][name] for name in params}

    def average(self) -> None:
        """Replace every gradient by its average over the ranks; collective."""
        from mpi4py import MPI  # here: laying arrays out needs no MPI

        from mpicoll.op import AVG

        for bucket in self.buckets:
            self.comm.Allreduce(MPI.IN_PLACE, bucket.flat, op=AVG)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def _fill(params: Mapping[str, NDArray[Any]], nbytes: int) -> list[list[str]]:
    """Return the names of each bucket, last parameter first; a bucket holds one dtype."""
    buckets: list[list[str]] = []
    room, dtype = 0, np.dtype(np.void)
    for name in reversed(list(params)):
        array = params[name]
        if not buckets or array.nbytes > room or array.dtype != dtype:
            buckets.append([])
            room, dtype = nbytes, array.dtype
        buckets[-1].append(name)
        room -= array.nbytes
    return buckets
