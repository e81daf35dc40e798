"""Compressions that remember: what a step does not send is added to the next one's gradient.

This error feedback (Seide et al., 2014; Karimireddy et al., 2019) makes coarse compressions converge like
none. All of them keep the ranks' gradients equal to the last bit: every rank decodes the same bytes.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.train.buckets import Flat
from mpicoll.train.optim.exchange import Compression, Delayed, Exchange, Plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.comm.intracomm import Intracomm
    from mpicoll.train.optim.exchange import Call

    Array = NDArray[Any]

__all__ = ["Int8", "PowerSGD", "TopK"]


class _Remembering(Compression):
    """What has error feedback may begin late.

    Gradients turn fast at first, and what comes late then points nowhere.
    """

    start = 0

    def exchange(self, bucket: Flat, comm: Intracomm) -> Exchange:
        """Return the exchange for a bucket; an empty bucket needs none of its own."""
        exchange = self._exchange(bucket, comm) if bucket.flat.size else Plain(bucket, comm)
        return Delayed(bucket, comm, exchange, self.start) if self.start else exchange

    @abstractmethod
    def _exchange(self, bucket: Flat, comm: Intracomm) -> Exchange:
        """Return the exchange that compresses."""

    def _begin(self, start: int) -> None:
        if start < 0:
            raise ValueError(f"start must not be negative, got {start}")
        self.start = start


class Int8(_Remembering):
    """Sends a quarter: integers from -127 to 127 with one scale per block, and error feedback.

    Each rank rounds its gradient, sums its share of everybody's in float32, rounds the sum and hands it to
    all. Both roundings are made good in the next step.

    Parameters
    ----------
    block
        Elements that share a scale of 4 bytes.
    start
        Steps before the first that is compressed.
    """

    def __init__(self, block: int = 256, start: int = 0) -> None:
        if block < 4 or block % 4:
            raise ValueError(f"block must be a positive multiple of 4, got {block}")
        self.block = block
        self._begin(start)

    def _exchange(self, bucket: Flat, comm: Intracomm) -> Exchange:
        return _Int8Exchange(bucket, comm, self.block)


class _Int8Exchange(Exchange):
    """Alltoall, sum, allgather; a row of bytes is a share: its integers, then their scales."""

    def __init__(self, bucket: Flat, comm: Intracomm, block: int) -> None:
        super().__init__(bucket, comm)
        self.block = block
        blocks = -(-self.flat.size // (block * comm.size))  # of a share
        self.share = blocks * block
        row = self.share + 4 * blocks
        self.given, self.taken, self.gathered = (comm.empty((comm.size, row), np.uint8) for _ in range(3))
        self.summed = comm.empty((1, row), np.uint8)
        self.residual = np.zeros((comm.size, self.share), np.float32)
        self.sum_residual = np.zeros((1, self.share), np.float32)
        self._count(self.given.nbytes)

    def run(self, call: Call) -> Iterator[MPI.Request | None]:
        self.residual.reshape(-1)[: self.flat.size] += self.flat
        self._encode(self.residual, self.given)
        yield call("Alltoall", self.given, self.taken)
        for row in self.taken:
            self.sum_residual += self._decode(row[None])
        self._encode(self.sum_residual, self.summed)
        yield call("Allgather", self.summed, self.gathered)
        self.flat[...] = self._decode(self.gathered).reshape(-1)[: self.flat.size]

    def _encode(self, values: Array, rows: Array) -> None:
        """Write the values into bytes, and leave in `values` what got lost on the way."""
        with np.errstate(invalid="ignore", over="ignore"):
            scales = np.abs(values).reshape(len(values), -1, self.block).max(axis=2) / np.float32(127)
            broken = ~np.isfinite(scales)
            scales[broken] = np.nan  # every rank shall hear of infinities, and no integer stands for one
            rows[:, self.share :].view(np.float32)[...] = scales
            scales[broken | (scales == 0)] = 1
            steps = values.reshape(*scales.shape, self.block) / scales[:, :, None]
            np.clip(np.rint(steps, out=steps), -127, 127, out=steps)
            rows[:, : self.share].view(np.int8)[...] = steps.reshape(values.shape)
            values -= self._decode(rows)
        if broken.any():
            values[~np.isfinite(values)] = 0  # what is broken now must not break the next step

    def _decode(self, rows: Array) -> Array:
        scales = rows[:, self.share :].view(np.float32)
        steps = rows[:, : self.share].view(np.int8).reshape(*scales.shape, self.block)
        return (steps * scales[:, :, None]).reshape(len(rows), self.share)

    def state(self) -> dict[str, Array]:
        return {"residual": self.residual, "sum_residual": self.sum_residual}


class TopK(_Remembering):
    """Sends the largest elements of each bucket with their places, and error feedback.

    Parameters
    ----------
    ratio
        The share of a bucket's elements that each rank sends. An element costs 8 bytes with its place, and
        each rank hears from all others: worth it where ``ratio * size`` is well below 1.
    start
        Steps before the first that is compressed.
    """

    def __init__(self, ratio: float = 0.01, start: int = 0) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, got {ratio}")
        self.ratio = ratio
        self._begin(start)

    def _exchange(self, bucket: Flat, comm: Intracomm) -> Exchange:
        return _TopKExchange(bucket, comm, self.ratio)


class _TopKExchange(Exchange):
    """One allgather; a row of bytes is a rank's values, then their places."""

    def __init__(self, bucket: Flat, comm: Intracomm, ratio: float) -> None:
        super().__init__(bucket, comm)
        self.k = math.ceil(ratio * self.flat.size)
        self.place = np.dtype(np.int32 if self.flat.size < 1 << 31 else np.int64)
        row = self.k * (self.flat.itemsize + self.place.itemsize)
        row += -row % 8  # rows begin where any element may
        self.given, self.gathered = comm.empty((1, row), np.uint8), comm.empty((comm.size, row), np.uint8)
        self.residual = np.zeros(self.flat.size, np.float32 if self.flat.itemsize == 2 else self.flat.dtype)
        self._count(self.gathered.nbytes, rounds=1)

    def run(self, call: Call) -> Iterator[MPI.Request | None]:
        self.residual += self.flat
        size = self.residual.size
        largest = np.argpartition(np.abs(self.residual), size - self.k)[size - self.k :]  # NaN is largest
        largest.sort()
        values, places = self._parts(self.given[0])
        values[...], places[...] = self.residual[largest], largest
        self.residual[largest] -= values
        if not np.isfinite(values).all():
            self.residual[~np.isfinite(self.residual)] = 0  # what is broken must not break the next step
        yield call("Allgather", self.given, self.gathered)
        self.flat[...] = 0
        for row in self.gathered:  # in the order of ranks: the same bits everywhere
            values, places = self._parts(row)
            self.flat[places] += values

    def _parts(self, row: Array) -> tuple[Array, Array]:
        places, values = self.k * self.place.itemsize, self.k * self.flat.itemsize
        return row[places : places + values].view(self.flat.dtype), row[:places].view(self.place)

    def state(self) -> dict[str, Array]:
        return {"residual": self.residual}


class PowerSGD(_Remembering):
    """Sends two thin factors of each matrix (Vogels, Karimireddy and Jaggi, 2019), and error feedback.

    Parameters
    ----------
    rank
        Columns of the factors: a matrix of n times m sends ``rank * (n + m)`` elements. Arrays of one
        dimension, and matrices for which this is not less, are sent as they are; arrays of more than two
        count as matrices of their first dimension.
    seed
        Of the factors to start from.
    start
        Steps before the first that is compressed.

    Notes
    -----
    Every rank multiplies the factors by itself. The results have the same bits where BLAS computes alike: on
    equal processors with equally many threads.
    """

    def __init__(self, rank: int = 4, seed: int = 0, start: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        self.rank, self.seed = rank, seed
        self._begin(start)

    def _exchange(self, bucket: Flat, comm: Intracomm) -> Exchange:
        exchange = _PowerExchange(bucket, comm, self.rank, self.seed)
        return exchange if exchange.residual else Plain(bucket, comm)


class _PowerExchange(Exchange):
    """One allreduce of the left factors and of what is not compressed, one of the right factors."""

    def __init__(self, bucket: Flat, comm: Intracomm, rank: int, seed: int) -> None:
        super().__init__(bucket, comm)
        self.bucket = bucket
        shapes = {name: _matrix(array).shape for name, array in bucket.items()}
        thin = {name: shape for name, shape in shapes.items() if rank * sum(shape) < math.prod(shape)}
        dtype = np.float64 if self.flat.dtype == np.float64 else np.float32
        lefts = {name: (shape[0], rank) if name in thin else shape for name, shape in shapes.items()}
        self.lefts = Flat(lefts, dtype, comm.empty)
        self.rights = Flat({name: (shape[1], rank) for name, shape in thin.items()}, dtype, comm.empty)
        self.residual = Flat(thin, dtype)
        for name, right in self.rights.items():
            random = np.random.default_rng([seed, zlib.crc32(name.encode())])
            right[...] = random.standard_normal(right.shape)
        self.first = self.rights.flat.copy()
        self._count(self.lefts.flat.nbytes)
        self._count(self.rights.flat.nbytes)

    def run(self, call: Call) -> Iterator[MPI.Request | None]:
        for name, left in self.lefts.items():
            if name in self.residual:
                self.residual[name][...] += _matrix(self.bucket[name])
                np.matmul(self.residual[name], self.rights[name], out=left)
            else:
                left[...] = _matrix(self.bucket[name])
        yield call("Allreduce", MPI.IN_PLACE, self.lefts.flat, op=MPI.SUM)
        for name, right in self.rights.items():
            self.lefts[name][...] = np.linalg.qr(self.lefts[name])[0]
            np.matmul(self.residual[name].T, self.lefts[name], out=right)
        yield call("Allreduce", MPI.IN_PLACE, self.rights.flat, op=MPI.SUM)
        for name, left in self.lefts.items():
            if name in self.residual:
                whole = left @ self.rights[name].T
                self.residual[name][...] -= whole / self.comm.size
                left = whole
            self.bucket[name][...] = left.reshape(self.bucket[name].shape)
        if not np.isfinite(self.rights.flat).all():  # what is broken must not break the next step
            self.rights.flat[...] = self.first
            self.residual.flat[...] = 0

    def state(self) -> dict[str, Array]:
        return {"residual": self.residual.flat, "rights": self.rights.flat}


def _matrix(array: Array) -> Array:
    """Return the array as a matrix of its first dimension."""
    return array.reshape(len(array), -1) if array.ndim > 1 and array.size else array.reshape(array.size, 1)
