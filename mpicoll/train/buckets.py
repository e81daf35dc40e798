"""Flat buffers: many named arrays laid out in few contiguous ones, so that one call moves them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from mpicoll.comm.intracomm import Intracomm

__all__ = ["Buckets", "Flat", "runs", "zeros_like"]

BUCKET_NBYTES = 1 << 22  #: beyond a few MiB a larger bucket is no faster, and the first one is ready later


class _Views(Mapping[str, "NDArray[Any]"]):
    """A mapping from names to the views that a subclass makes."""

    _views: dict[str, NDArray[Any]]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class Flat(_Views):
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
        self._places = dict(zip(shapes, zip(ends, ends[1:], strict=False), strict=False))
        self._views = {
            name: self.flat[slice(*self._places[name])].reshape(tuple(shape))
            for name, shape in shapes.items()
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

    def run(self, names: Sequence[str]) -> NDArray[Any] | None:
        """Return the stretch of `flat` that holds these arrays in this order; None where there are gaps."""
        places = [self._places[name] for name in names]
        if any(stop != start for (_, stop), (start, _) in zip(places, places[1:], strict=False)):
            return None
        return self.flat[places[0][0] : places[-1][1]]


class Buckets(_Views):
    """Gradients as views in flat buckets, averaged in place over a communicator.

    A mapping from the parameters' names to arrays of the same shapes, to be written by the backward pass
    (``np.matmul(..., out=gradients[name])``), so that nothing is packed before a call or unpacked after it.
    The buckets come from ``comm.empty``: on one node they lie in memory that its ranks share.

    Parameters
    ----------
    params
        Name -> array, in the order of the forward pass. Buckets are filled in reverse: the last layer's
        gradients are the first to be complete. Within a bucket the order is that of `params`.
    comm
        The ranks to average over.
    nbytes
        A bucket is closed before it outgrows this. An array larger than this has a bucket of its own.
    groups
        Which arrays go together whatever their size: lists of names, or the number of groups of about equal
        size. Names in no group share buckets by `nbytes`.

    Attributes
    ----------
    buckets : list of Flat
        In the order in which a backward pass completes them.

    Raises
    ------
    ValueError
        For groups that do not fit the parameters.
    """

    def __init__(
        self,
        params: Mapping[str, NDArray[Any]],
        comm: Intracomm,
        nbytes: int = BUCKET_NBYTES,
        groups: int | Sequence[Collection[str]] | None = None,
    ) -> None:
        self.comm = comm
        self.buckets = [
            Flat({name: params[name].shape for name in names}, params[names[0]].dtype, comm.empty)
            for names in _arrange(params, nbytes, groups)
        ]
        holder = {name: bucket for bucket in self.buckets for name in bucket}
        self._views = {name: holder[name][name] for name in params}

    def average(self) -> None:
        """Replace every gradient by its average over the ranks; collective."""
        from mpi4py import MPI  # here: laying arrays out needs no MPI

        from mpicoll.memory.op import AVG

        for bucket in self.buckets:
            self.comm.Allreduce(MPI.IN_PLACE, bucket.flat, op=AVG)


def zeros_like(
    arrays: Mapping[str, NDArray[Any]], dtype: DTypeLike | None = None
) -> Mapping[str, NDArray[Any]]:
    """Return zeros laid out as the arrays are, of their own dtypes or of another."""
    if isinstance(arrays, Flat):
        shapes = {name: array.shape for name, array in arrays.items()}
        return Flat(shapes, arrays.flat.dtype if dtype is None else dtype)
    return {name: np.zeros_like(array, dtype, order="C") for name, array in arrays.items()}


def runs(
    params: Mapping[str, NDArray[Any]],
    gradients: Mapping[str, NDArray[Any]],
    alike: Callable[[str], Hashable] = lambda name: None,
) -> Iterator[list[str]]:
    """Yield the names of each longest stretch that lies in one piece in `params` and in `gradients`.

    Arithmetic on a stretch costs one call for all its arrays. Only a `Flat` and `Buckets` have stretches of
    more than one array; a stretch ends where `alike` of a name differs. Names that are not parameters are
    left out.
    """
    pieces: Sequence[Mapping[str, Any]] = gradients.buckets if isinstance(gradients, Buckets) else [gradients]
    for piece in pieces:
        stretch: list[str] = []
        for name in piece:
            if name not in params:
                continue
            joined = stretch and all(_joined(arrays, stretch[-1], name) for arrays in (piece, params))
            if stretch and not (joined and alike(stretch[-1]) == alike(name)):
                yield stretch
                stretch = []
            stretch.append(name)
        if stretch:
            yield stretch


def _joined(arrays: Mapping[str, NDArray[Any]], one: str, other: str) -> bool:
    return isinstance(arrays, Flat) and arrays.run([one, other]) is not None


def _arrange(
    params: Mapping[str, NDArray[Any]], nbytes: int, groups: int | Sequence[Collection[str]] | None
) -> list[list[str]]:
    """Return the names of each bucket, in the order in which a backward pass completes the buckets."""
    if groups is None:
        return _fill(params, nbytes)
    if isinstance(groups, bool) or (isinstance(groups, int) and groups < 1):
        raise ValueError(f"groups must be a positive number or lists of names, got {groups!r}")
    if isinstance(groups, int):
        total = sum(array.nbytes for array in params.values())
        return _fill(params, -(-total // groups), most=groups)
    grouped = [name for group in groups for name in group]
    for name in grouped:
        if name not in params:
            raise ValueError(f"groups: {name!r} is no parameter")
        if grouped.count(name) > 1:
            raise ValueError(f"groups: parameter {name!r} is in more than one group")
    rest = {name: array for name, array in params.items() if name not in set(grouped)}
    order = {name: k for k, name in enumerate(params)}
    buckets = _fill(rest, nbytes)
    for group in groups:
        if group:
            buckets += _fill({name: params[name] for name in sorted(group, key=order.__getitem__)}, None)
    return sorted(buckets, key=lambda names: -order[names[0]])  # complete when its first layer is


def _fill(params: Mapping[str, NDArray[Any]], nbytes: int | None, most: int | None = None) -> list[list[str]]:
    """Return the names of each bucket, the last parameters' first; a bucket holds one dtype.

    `nbytes` is the room of a bucket, None for any; at most `most` buckets are closed for want of room.
    """
    buckets: list[list[str]] = []
    room, dtype = 0.0, np.dtype(np.void)
    for name in reversed(list(params)):
        array = params[name]
        full = array.nbytes > room and (most is None or len(buckets) < most)
        if not buckets or full or array.dtype != dtype:
            buckets.append([])
            room, dtype = math.inf if nbytes is None else nbytes, array.dtype
        buckets[-1].append(name)
        room -= array.nbytes
    return [names[::-1] for names in buckets]
