"""How one bucket is summed over the ranks: as it is, or in 2-byte floats.

An exchange runs in stages. Each stage begins one collective, and the local work of the next waits for it; so
the exchanges of several buckets run side by side, and every rank begins their collectives in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpicoll.memory.op import AVG

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.comm.intracomm import Intracomm
    from mpicoll.train.buckets import Flat

    Call = Callable[..., MPI.Request | None]

__all__ = ["BF16", "FP16", "Average", "Compression", "Delayed", "Exchange", "Plain", "narrow", "scale"]

BLOCK = 1 << 15  # elements converted at once, in cache


class Exchange(ABC):
    """The summing of one bucket.

    Attributes
    ----------
    flat
        The bucket's memory: a rank's contribution before, the sum of all ranks' after.
    sent : int
        Bytes that a rank sends at each run, where the collectives send as little as possible.
    step : int
        Steps that the optimizer has taken before the next run.
    """

    sent = step = 0

    def __init__(self, bucket: Flat, comm: Intracomm) -> None:
        self.flat: NDArray[Any] = bucket.flat
        self.comm = comm

    @abstractmethod
    def run(self, call: Call) -> Iterator[MPI.Request | None]:
        """Yield what each stage's ``call(collective, ...)`` returned; the caller waits for it."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Return this rank's memory of earlier runs by name; empty where there is none."""
        return {}

    def _count(self, nbytes: int, rounds: int = 2) -> None:
        """Count a collective over vectors of `nbytes`: two rounds for an allreduce, one for half of it."""
        self.sent += rounds * nbytes * (self.comm.size - 1) // self.comm.size


class Plain(Exchange):
    """Sums a bucket as it is."""

    def __init__(self, bucket: Flat, comm: Intracomm) -> None:
        super().__init__(bucket, comm)
        self._count(self.flat.nbytes)

    def run(self, call: Call) -> Iterator[MPI.Request | None]:
        """Run it: one allreduce."""
        yield call("Allreduce", MPI.IN_PLACE, self.flat, op=MPI.SUM)


class Average(Plain):
    """Averages a bucket as it is."""

    def run(self, call: Call) -> Iterator[MPI.Request | None]:
        """Run it: one allreduce, which divides where it may."""
        divides = self.flat.dtype != np.float16
        yield call("Allreduce", MPI.IN_PLACE, self.flat, op=AVG if divides else MPI.SUM)
        if not divides:
            scale(self.flat, 1 / self.comm.size)


class Compression(ABC):
    """A way to send less than the gradients: makes an exchange for each bucket."""

    @abstractmethod
    def exchange(self, bucket: Flat, comm: Intracomm) -> Exchange:
        """Return the exchange for a bucket; collective."""


class Delayed(Exchange):
    """Sums a bucket as it is at first, and by another exchange from then on.

    Parameters
    ----------
    exchange
        The other one, of the same bucket.
    start
        Steps before the first that it takes.
    """

    def __init__(self, bucket: Flat, comm: Intracomm, exchange: Exchange, start: int) -> None:
        super().__init__(bucket, comm)
        self.plain, self.exchange, self.start = Plain(bucket, comm), exchange, start
        self.sent = exchange.sent

    def run(self, call: Call) -> Iterator[MPI.Request | None]:
        """Run the one whose turn it is."""
        yield from (self.plain if self.step < self.start else self.exchange).run(call)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the other one's memory."""
        return self.exchange.state()


class _Half(Compression):
    """Halves what is sent: gradients travel as 2-byte floats.

    Sums are taken in float32 where several operands meet. Nothing is remembered between steps.
    """

    dtype: np.dtype[Any]

    def exchange(self, bucket: Flat, comm: Intracomm) -> Exchange:
        """Return the exchange for a bucket; one whose elements have 2 bytes already is left as it is."""
        if bucket.flat.itemsize <= 2:
            return Plain(bucket, comm)
        return _HalfExchange(bucket, comm, self.dtype)


class FP16(_Half):
    """Sends half: gradients travel as float16 (11 significant bits, from 6e-8 to 65504)."""

    dtype = np.dtype(np.float16)


class BF16(_Half):
    """Sends half: gradients travel as bfloat16 (8 significant bits, the range of float32)."""

    dtype = np.dtype(ml_dtypes.bfloat16)


class _HalfExchange(Exchange):
    def __init__(self, bucket: Flat, comm: Intracomm, dtype: np.dtype[Any]) -> None:
        super().__init__(bucket, comm)
        self.wire = comm.empty(self.flat.size, dtype)
        self._count(self.wire.nbytes)

    def run(self, call: Call) -> Iterator[MPI.Request | None]:
        narrow(self.flat, self.wire)
        yield call("Allreduce", MPI.IN_PLACE, self.wire, op=MPI.SUM)
        self.flat[...] = self.wire


def scale(array: NDArray[Any], factor: float) -> None:
    """Multiply a contiguous array by a number, in place."""
    if array.dtype != np.float16:
        np.multiply(array, array.dtype.type(factor), out=array)
        return
    for at in range(0, array.size, BLOCK):
        block = array[at : at + BLOCK]
        narrow(block.astype(np.float32) * np.float32(factor), block)


def narrow(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Round an array into one of 2-byte floats, contiguous both; infinity tells of overflows.

    NumPy takes a hundred times as long over each number that is below the normal ones of float16 and not
    among the subnormal ones, as most gradients become in time. So these are rounded beforehand: to the
    multiples of 2**-24, by float32 numbers that have just this many bits left.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if target.dtype != np.float16:
            target[...] = source
            return
        wide, thin = source.reshape(-1), target.reshape(-1)
        for at in range(0, wide.size, BLOCK):
            values = wide[at : at + BLOCK].astype(np.float32, copy=False)
            rounded = values + np.float32(0.75)
            rounded -= np.float32(0.75)
            np.copyto(rounded, values, where=~(np.abs(values) < 2.0**-14))
            thin[at : at + BLOCK] = rounded
