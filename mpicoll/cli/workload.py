"""A collective as the benchmark calls it: what is written before, what is read and expected after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpicoll.plans.algorithms import OWNED, REDUCTIONS

OPS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "avg": np.add}
PERIOD = 61  # a prime: chunks that end up in a wrong place do not look right by chance
TILE = 1024 * PERIOD  # elements written or compared at once: what fits into a core's cache


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name, bfloat16 among them."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class Workload:
    """Buffers and call of one collective on one communicator.

    Sizes are bytes of the full vector: what allreduce, reduce and bcast move, the sum over all ranks for
    allgather and reduce_scatter, what one rank sends for alltoall.
    """

    def __init__(
        self, comm: MPI.Intracomm, spec: dict[str, Any], dtype: np.dtype[Any], *, native: bool
    ) -> None:
        self.comm = comm
        self.native = native
        self.collective: str = spec["collective"]
        self.op_name: str = spec["op"]
        self.root: int = spec["root"]
        self.in_place: bool = spec["in_place"]
        self.dtype = dtype
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.calls: dict[int, Callable[..., Any]] = {}
        self.reads: dict[int, np.ndarray] = {}
        self.writes: dict[int, np.ndarray] = {}
        self.tiles = [self._tile(self.rank, turn) for turn in (0, 1)]
        self.send = self.recv = np.empty(0, dtype)

    # -- shapes ------------------------------------------------------------------------------------

    def elements(self, size: int) -> tuple[int, int]:
        """Elements of the full vector and of one rank's part of it."""
        if self.collective == "barrier":
            return 0, 0
        part = max(1, size // self.dtype.itemsize // self.size)
        if self.collective in OWNED:
            return part * self.size, part
        return max(1, size // self.dtype.itemsize), part

    def reported(self, size: int) -> tuple[int, int]:
        """Bytes and count as nccl-tests print them: the count is one rank's where ranks have parts."""
        whole, part = self.elements(size)
        partial = self.collective in OWNED
        return whole * self.dtype.itemsize, part if partial else whole

    def allocate(self, largest: int, empty: Callable[..., np.ndarray]) -> None:
        """Take buffers for the largest size, with every page touched."""
        whole, _ = self.elements(largest)
        self.send = self.recv = empty(max(whole, 1), self.dtype)
        self.recv[:] = 0
        if not self.in_place and self.collective != "bcast":
            self.send = empty(max(whole, 1), self.dtype)
            self.send[:] = 0

    def _prepare(self, size: int) -> None:
        """Slices and arguments of one size, made once: the timed region holds nothing but the call."""
        whole, part = self.elements(size)
        send, recv = self.send[:whole], self.recv[:whole]
        mine = slice(self.rank * part, (self.rank + 1) * part)
        inside, at_root = self.in_place, self.rank == self.root
        op = self._op()
        arguments: tuple[Any, ...]
        method, write, read = self.collective.capitalize(), send, recv
        if self.collective == "allreduce":
            arguments = (MPI.IN_PLACE if inside else send, recv, op)
        elif self.collective == "reduce":
            source = MPI.IN_PLACE if inside and at_root else send
            arguments = (source, recv if at_root else None, op, self.root)
            read = recv if at_root else recv[:0]
        elif self.collective == "bcast":
            arguments = (recv, self.root)
            write = recv if at_root else recv[:0]
        elif self.collective == "allgather":
            write = recv[mine] if inside else send[:part]
            arguments = (MPI.IN_PLACE if inside else write, recv)
        elif self.collective == "reduce_scatter":
            method, read = "Reduce_scatter_block", recv[:part]
            arguments = (MPI.IN_PLACE, recv, op) if inside else (send, read, op)
        elif self.collective == "alltoall":
            arguments = (MPI.IN_PLACE if inside else send, recv)
        else:
            arguments, write, read = (), recv[:0], recv[:0]
        bound = getattr(self.comm, method)
        self.calls[size] = lambda **chosen: bound(*arguments, **chosen)
        self.writes[size], self.reads[size] = write, read

    def _op(self) -> MPI.Op:
        if self.op_name == "avg":
            if self.native:
                return MPI.SUM  # and a multiplication afterwards, as a user of the plain MPI writes it
            from mpicoll.memory import op

            return op.AVG
        return getattr(MPI, self.op_name.upper())

    def transport(self, size: int, algorithm: Any) -> str:
        """What carries the messages of our communicator's call."""
        nbytes, op = self.reported(size)[0], self._op()
        return self.comm.explain(self.collective, nbytes, op, self.dtype, algorithm).transport

    # -- the timed region --------------------------------------------------------------------------

    def produce(self, size: int, turn: int) -> None:
        """Write this rank's contribution, by arithmetic as gradients are written.

        A plain copy may use stores that never fetch the line they replace; that would hide what it costs
        to write memory again which a neighbour has read.
        """
        if size not in self.calls:
            self._prepare(size)
        target, tile = self.writes[size], self.tiles[turn % 2]
        for first in range(0, target.size, TILE):
            block = target[first : first + TILE]
            np.multiply(tile[: block.size], self.dtype.type(1), out=block)

    def call(self, size: int, algorithm: Any) -> None:
        """The collective."""
        if self.native or algorithm is None:
            self.calls[size]()
        else:
            self.calls[size](algorithm=algorithm)
        if self.native and self.op_name == "avg" and self.collective in REDUCTIONS:
            read = self.reads[size]
            np.multiply(read, 1 / self.size, out=read, casting="unsafe")

    def consume(self, size: int) -> None:
        """Read the result as fast as the memory gives it, whatever its dtype."""
        read = self.reads[size]
        word = next(n for n in (8, 4, 2, 1) if read.nbytes % n == 0)
        np.bitwise_xor.reduce(read.view(np.uint8).view(f"u{word}"))

    # -- what is right -----------------------------------------------------------------------------

    def _tile(self, rank: int, turn: int, phase: int = 0) -> np.ndarray:
        """Small integers, no zero among them: sums and products of them are exact in every dtype."""
        highest = 2 if self.op_name == "prod" else 3
        index = np.arange(phase, phase + PERIOD) % PERIOD
        values = (index * 7 + rank * 5 + turn * 3) % PERIOD % highest + 1
        return np.tile(values.astype(self.dtype), TILE // PERIOD)

    def _reduced(self, turn: int, phase: int) -> np.ndarray:
        total = self._tile(0, turn, phase)
        for rank in range(1, self.size):
            total = OPS[self.op_name](total, self._tile(rank, turn, phase)).astype(self.dtype)
        return (total / self.size).astype(self.dtype) if self.op_name == "avg" else total

    def _expected(self, size: int, turn: int) -> list[tuple[int, np.ndarray]]:
        """(elements, tile that repeats over them) of each piece of what is read."""
        part = self.elements(size)[1]
        read = self.reads[size].size
        if self.collective in ("allreduce", "reduce"):
            return [(read, self._reduced(turn, 0))]
        if self.collective == "reduce_scatter":
            return [(read, self._reduced(turn, self.rank * part))]
        if self.collective == "bcast":
            return [(read, self._tile(self.root, turn))]
        if self.collective == "allgather":
            return [(part, self._tile(rank, turn)) for rank in range(self.size)]
        if self.collective == "alltoall":
            return [(part, self._tile(rank, turn, self.rank * part)) for rank in range(self.size)]
        return []

    def wrong(self, size: int, turn: int) -> int:
        """Number of elements of the result that are not what they should be."""
        wrong = first = 0
        for count, tile in self._expected(size, turn % 2):
            for start in range(first, first + count, TILE):
                block = self.reads[size][start : min(start + TILE, first + count)]
                wrong += _differing(block, tile[: block.size], self.size)
            first += count
        return wrong


def _differing(got: np.ndarray, expected: np.ndarray, size: int) -> int:
    """Exact for integers; within the rounding of `size` terms otherwise."""
    if np.array_equal(got, expected) or got.dtype.kind in "biu":
        return int(np.count_nonzero(got != expected))
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    finest = got.real.dtype if got.dtype.kind == "c" else got.dtype
    allowed = float(ml_dtypes.finfo(finest).eps) * size * np.abs(expected.astype(wide))
    return int(np.count_nonzero(~(np.abs(got.astype(wide) - expected.astype(wide)) <= allowed)))
