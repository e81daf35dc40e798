"""Reduction operators on arrays: the MPI's predefined ones, user-made ones, and `AVG`.

Bytes travel, and ranks reduce with NumPy: so float16, bfloat16 and bool work like every other type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import ArgumentError
from .buffer import NATIVE, Buffer, dense, to_itself


class Average:
    """The mean over all ranks: the sum, divided by the number of ranks.

    It is divided at the end, but for 2-byte floats before, since their sums soon overflow.  For
    floating-point and complex types.  Pass `mpicoll.op.AVG` wherever an `MPI.Op` is expected.
    """

    def __repr__(self) -> str:
        return "mpicoll.op.AVG"

    def Is_commutative(self) -> bool:
        """Whether operands may be exchanged: yes."""
        return True


AVG = Average()

_NUMBERS, _INTEGERS, _REALS = "iufcV", "iu", "iufV"  # dtype.kind; bfloat16 and its kin are "V"
_ufuncs: dict[int, tuple[str, np.ufunc, str]] = {
    MPI._handleof(op): (name, ufunc, kinds)
    for name, op, ufunc, kinds in (
        ("SUM", MPI.SUM, np.add, _NUMBERS + "b"),
        ("PROD", MPI.PROD, np.multiply, _NUMBERS + "b"),
        ("MAX", MPI.MAX, np.maximum, _REALS + "b"),
        ("MIN", MPI.MIN, np.minimum, _REALS + "b"),
        ("LAND", MPI.LAND, np.logical_and, _INTEGERS + "b"),
        ("LOR", MPI.LOR, np.logical_or, _INTEGERS + "b"),
        ("LXOR", MPI.LXOR, np.logical_xor, _INTEGERS + "b"),
        ("BAND", MPI.BAND, np.bitwise_and, _INTEGERS + "b"),
        ("BOR", MPI.BOR, np.bitwise_or, _INTEGERS + "b"),
        ("BXOR", MPI.BXOR, np.bitwise_xor, _INTEGERS + "b"),
    )
}
PREDEFINED = frozenset(_ufuncs)  # handles of the operators that NumPy knows
# bool is native for the logical operators only
_NATIVE_BOOL = {MPI._handleof(op) for op in (MPI.LAND, MPI.LOR, MPI.LXOR)}

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Reducer:
    """One operator on one type of element: what a rank does with the bytes it receives.

    Attributes
    ----------
    commutative
        Whether operands may be exchanged.
    name
        The operator's name, the same on every rank.
    key
        Tells reducers apart within a process.
    itemsize
        Bytes of an element; memory is only cut at its multiples.
    """

    def __init__(self, op: Any, buffer: Buffer) -> None:
        self.itemsize = buffer.itemsize
        self.dtype = buffer.dtype
        self.average = op is AVG
        known = _ufuncs.get(MPI._handleof(own(op)))
        self.commutative = self.average or op.Is_commutative()
        self.name = "AVG" if self.average else known[0] if known else _op_name(op)
        self.key = (self.name if known else id(op), str(self.dtype), self.itemsize)
        self.ufunc = None
        if known and self.dtype is not None:
            _, self.ufunc, kinds = known
            opaque = self.dtype.kind == "V" and self.dtype.isbuiltin != 2  # 2: a number, such as bfloat16
            if self.dtype.kind not in (kinds if not self.average else "fcV") or opaque:
                raise ArgumentError(f"op: {self.name} is not defined for {self.dtype}", MPI.ERR_OP)
        elif known and not (buffer.mpitype and buffer.mpitype.is_predefined):
            raise ArgumentError(f"op: {self.name} is not defined for derived datatypes", MPI.ERR_OP)
        else:
            self.op, self.mpitype = own(op), buffer.mpitype or _mpitype(self.dtype)
            self._spread = not dense(self.mpitype)  # the MPI expects the holes that packing took out
        self.early = self.average and self.itemsize == 2  # divide before
        # sums of 2-byte floats are taken in float32 wherever several operands meet
        self.wide = (
            self.ufunc in (np.add, np.multiply) and self.dtype.itemsize == 2 and self.dtype.kind in "fV"
        )

    def combine(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> Call:
        """`out = left op right` on byte arrays, as a call to make later; `out` may be an operand."""
        if self.ufunc is not None:
            a, b, c = left.view(self.dtype), right.view(self.dtype), out.view(self.dtype)
            return partial(self.ufunc, a, b, out=c), ()  # by name: NumPy wants it so for some
        return self._by_mpi, (left, right, out)

    def _by_mpi(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        """The MPI applies `inout = in op inout`; the left operand is `in`."""
        count = left.size // self.itemsize
        inout = right if self._spread else out if out is right else right.copy()
        spread = [self._spaced(x, count) for x in (left, inout)]
        self.op.Reduce_local(*([x, count, self.mpitype] for x in spread))
        if self._spread:
            to_itself([spread[1], count, self.mpitype], out)
        elif inout is not out:
            out[:] = inout

    def _spaced(self, packed: np.ndarray, count: int) -> np.ndarray:
        """Elements with the holes that their type has in memory."""
        if not self._spread:
            return packed
        lower, extent = self.mpitype.Get_true_extent()
        room = np.empty(max(count - 1, 0) * self.mpitype.extent + lower + extent, np.uint8)
        to_itself(packed, [room, count, self.mpitype])
        return room

    def accumulate(self, operands: list[np.ndarray], out: np.ndarray) -> Call:
        """`out` = the operands in this order, combined in float32 and rounded once."""
        return _accumulate, (self.ufunc, [x.view(self.dtype) for x in operands], out.view(self.dtype))

    def finish(self, out: np.ndarray, size: int) -> None:
        """What is left to do on the whole result: the division of `AVG`."""
        if self.average and not self.early and size > 1:
            self.divide(out, size, out)

    def divide(self, source: np.ndarray, size: int, out: np.ndarray) -> None:
        """`out = source / size`, on byte arrays."""
        assert self.dtype is not None
        np.multiply(source.view(self.dtype), self.dtype.type(1 / size), out=out.view(self.dtype))


def own(op: Any) -> MPI.Op:
    """The MPI's own operator for one that users pass: the sum for `AVG`.

    Raises
    ------
    ArgumentError
        When it is no operator.
    """
    if op is AVG:
        return MPI.SUM
    if not isinstance(op, MPI.Op) or op == MPI.OP_NULL:
        raise ArgumentError(f"op: got {op!r}, expected an MPI.Op or mpicoll.op.AVG", MPI.ERR_OP)
    return op


def _accumulate(ufunc: np.ufunc, operands: list[np.ndarray], out: np.ndarray) -> None:
    total = operands[0].astype(np.float32)
    for operand in operands[1:]:
        ufunc(total, operand.astype(np.float32), out=total)
    out[...] = total


def _op_name(op: MPI.Op) -> str:
    return getattr(op, "name", "") or type(op).__name__


def _mpitype(dtype: np.dtype[Any] | None) -> MPI.Datatype:
    if dtype is None or dtype.char not in NATIVE:
        raise ArgumentError(f"op: this MPI's own and user-made operators do not know {dtype}", MPI.ERR_TYPE)
    return NATIVE[dtype.char]


def native_takes(op: Any, dtype: np.dtype[Any] | None) -> bool:
    """Whether the MPI's own reduction takes an operator on this type (None: one that it knows best)."""
    if dtype is None:
        return True
    return native_serves(MPI._handleof(own(op)), dtype.char) and not (op is AVG and dtype.itemsize == 2)


@lru_cache(maxsize=512)
def native_serves(op_handle: int, char: str) -> bool:
    """Whether the MPI's own reduction takes this operator on elements with this `dtype.char`."""
    if char not in NATIVE:
        return False
    return char != "?" or op_handle in _NATIVE_BOOL or op_handle not in _ufuncs
