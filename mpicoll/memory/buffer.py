"""What users pass as buffers, seen as contiguous host bytes.

NumPy arrays and everything that exports memory are viewed in place; strided arrays, derived MPI
datatypes and device arrays are packed into a contiguous copy and unpacked afterwards.  How a rank
packs is its own affair: what runs never depends on it.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import ArgumentError
from . import dlpack
from .address import host_view, readable

_NAMES = {
    **{f"INT{8 * n}_T": f"i{n}" for n in (1, 2, 4, 8)},
    **{f"UINT{8 * n}_T": f"u{n}" for n in (1, 2, 4, 8)},
    **{"BYTE": "B", "CHAR": "b", "SIGNED_CHAR": "b", "UNSIGNED_CHAR": "B", "SHORT": "h", "INT": "i"},
    **{"UNSIGNED_SHORT": "H", "UNSIGNED": "I", "LONG": "l", "UNSIGNED_LONG": "L", "LONG_LONG": "q"},
    **{"UNSIGNED_LONG_LONG": "Q", "FLOAT": "f", "DOUBLE": "d", "LONG_DOUBLE": "g", "C_BOOL": "?"},
    **{"C_FLOAT_COMPLEX": "F", "C_DOUBLE_COMPLEX": "D", "C_LONG_DOUBLE_COMPLEX": "G", "AINT": "p"},
    **{"INTEGER": "i", "REAL": "f", "DOUBLE_PRECISION": "d", "COMPLEX": "F", "DOUBLE_COMPLEX": "D"},
    **{"CXX_BOOL": "?", "CXX_FLOAT_COMPLEX": "F", "CXX_DOUBLE_COMPLEX": "D"},
}
_dtypes: dict[int, np.dtype[Any]] = {}  # handle of a predefined MPI datatype -> what NumPy calls it
for _name, _code in _NAMES.items():
    _type = getattr(MPI, _name, MPI.DATATYPE_NULL)
    if _type != MPI.DATATYPE_NULL:
        _dtypes[MPI._handleof(_type)] = np.dtype(_code)

# What the MPI's own collectives take: dtype.char -> MPI datatype.  float16 and bfloat16 are not in it.
NATIVE: dict[str, MPI.Datatype] = {
    code: mpitype for code, mpitype in MPI._typedict.items() if mpitype != MPI.DATATYPE_NULL
}


@dataclass(slots=True)
class Buffer:
    """A message buffer as contiguous host bytes.

    Attributes
    ----------
    data
        One-dimensional uint8 array of `count * itemsize` bytes: the user's memory, or a packed copy.
    count
        Number of elements.
    itemsize
        Bytes of an element on the wire.
    dtype
        The elements as NumPy knows them; None for derived and pair types.
    mpitype
        The MPI datatype that was given, if one was.
    renew, restore
        Fill a packed copy again from where it came from, and write it back there; None where `data` is
        the user's memory.
    """

    data: np.ndarray
    count: int
    itemsize: int
    dtype: np.dtype[Any] | None
    mpitype: MPI.Datatype | None = None
    renew: Callable[[], None] | None = None
    restore: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.count * self.itemsize

    def unlike(self, native: bool) -> bool:
        """Whether a run works on a copy: the MPI's own takes derived datatypes as they are."""
        return self.restore is not None and not (native and self.dtype is None)


def parse(spec: Any, name: str, *, writable: bool, blocks: int = 1) -> Buffer:
    """Read a buffer argument in any form that mpi4py takes, and strided arrays besides.

    Parameters
    ----------
    spec
        An array, or `[data]`, `[data, type]`, `[data, count]`, `[data, count, type]`,
        `[data, (count, displ), type]`, `[data, count, displ, type]`.
    name
        The argument's name, for error messages.
    writable
        Whether the collective writes to it.
    blocks
        How many blocks of the given count it holds: a count that the caller writes is that of one.

    Raises
    ------
    ArgumentError
        When it is no buffer, cannot be written, or its parts contradict each other.
    """
    if isinstance(spec, (list, tuple)):
        return _from_list(spec, name, writable, blocks)
    return _from_object(spec, name, writable)


def _from_object(source: Any, name: str, writable: bool) -> Buffer:
    """Anything that exports memory: NumPy, buffers, DLPack, the CUDA array interface."""
    if isinstance(source, np.ndarray):
        return _from_array(source, name, writable)
    try:
        return _from_array(np.asarray(memoryview(source)), name, writable)
    except (TypeError, BufferError):
        pass
    if hasattr(source, "__cuda_array_interface__"):
        return _from_cuda(source, name, writable)
    if hasattr(source, "__dlpack__"):
        array = dlpack.view(source)
        if array is not None:
            return _from_array(array, name, writable)
    expected = "an array, an object with a buffer, or [data, count, type]"
    raise ArgumentError(f"{name}: got {type(source).__name__}, expected {expected}", MPI.ERR_BUFFER)


def _from_cuda(source: Any, name: str, writable: bool) -> Buffer:
    """Memory that the host can read is used in place; a CuPy array travels through a host copy."""
    face = source.__cuda_array_interface__
    (address, readonly), dtype = face["data"], np.dtype(face["typestr"])
    if writable and readonly:
        raise ArgumentError(f"{name}: the array is read-only, expected a writable one", MPI.ERR_BUFFER)
    nbytes = int(np.prod(face["shape"], dtype=np.int64)) * dtype.itemsize
    if face.get("strides") is None and readable(address, nbytes):
        return _from_array(host_view(address, nbytes).view(dtype), name, writable)
    if not (hasattr(source, "get") and hasattr(source, "set")):
        raise ArgumentError(f"{name}: device memory of a {type(source).__name__}, expected a CuPy array")
    host = np.ascontiguousarray(source.get())
    copy = _from_array(host, name, writable)
    copy.renew, copy.restore = partial(source.get, out=host), partial(source.set, host)
    return copy


def _from_array(array: np.ndarray, name: str, writable: bool) -> Buffer:
    dtype = array.dtype
    if dtype.hasobject:
        raise ArgumentError(f"{name}: dtype {dtype} holds Python objects, expected numbers", MPI.ERR_TYPE)
    if writable and not array.flags.writeable:
        raise ArgumentError(f"{name}: the array is read-only, expected a writable one", MPI.ERR_BUFFER)
    flags, renew, restore = array.flags, None, None
    if not flags.forc:
        source, array = array, np.ascontiguousarray(array)
        renew, restore = partial(np.copyto, array, source), partial(np.copyto, source, array)
    elif not flags.c_contiguous:
        array = array.T
    data = array.reshape(-1).view(np.uint8) if dtype.itemsize else np.empty(0, np.uint8)
    return Buffer(data, array.size, dtype.itemsize, dtype, None, renew, restore)


def _from_list(spec: Any, name: str, writable: bool, blocks: int) -> Buffer:
    items = list(spec)
    if not 1 <= len(items) <= 4:
        raise ArgumentError(f"{name}: a list of {len(items)} items, expected 1 to 4: [data, count, type]")
    data, rest = items[0], items[1:]
    mpitype = rest.pop() if rest and isinstance(rest[-1], (MPI.Datatype, str)) else None
    if rest and isinstance(rest[0], (list, tuple)):
        rest = list(rest[0])
    if len(rest) > 2:
        raise ArgumentError(f"{name}: {rest!r} between data and type, expected a count and a displacement")
    count, displ = (part if part is None else integer(name, part) for part in (*rest, None, None)[:2])
    count = count if count is None else count * blocks
    if isinstance(mpitype, str):
        if mpitype not in MPI._typedict:
            raise ArgumentError(f"{name}: unknown type code {mpitype!r}", MPI.ERR_TYPE)
        mpitype = MPI._typedict[mpitype]
    if data is None or (isinstance(data, type(MPI.BOTTOM)) and data == MPI.BOTTOM):
        if count:
            raise ArgumentError(f"{name}: no data but count {count}", MPI.ERR_BUFFER)
        data = np.empty(0, np.uint8)
    whole = _from_object(data, name, writable)
    if mpitype is None:
        return _part(whole, name, count, displ, whole.itemsize, whole.dtype, None)
    if mpitype == MPI.DATATYPE_NULL:
        raise ArgumentError(f"{name}: the datatype is null", MPI.ERR_TYPE)
    dtype = _dtypes.get(MPI._handleof(mpitype))
    if dtype is not None:
        return _part(whole, name, count, displ, dtype.itemsize, dtype, mpitype)
    extent, size = mpitype.extent, mpitype.Get_size()
    if count is None:
        if extent <= 0 or whole.nbytes % extent:
            raise ArgumentError(f"{name}: {whole.nbytes} bytes are no multiple of the type's extent {extent}")
        count = whole.nbytes // extent - (displ or 0)
    if dense(mpitype):
        return _part(whole, name, count, displ, size, None, mpitype)
    return _packed([data, count, displ or 0, mpitype], count, size, mpitype)


def integer(name: str, value: Any) -> int:
    """A count or displacement that a caller wrote."""
    try:
        return operator.index(value)
    except TypeError:
        what = "an integer for a count or displacement"
        raise ArgumentError(f"{name}: got {value!r}, expected {what}", MPI.ERR_COUNT) from None


def _part(
    whole: Buffer,
    name: str,
    count: Any,
    displ: Any,
    itemsize: int,
    dtype: np.dtype[Any] | None,
    mpitype: MPI.Datatype | None,
) -> Buffer:
    """`count` elements from element `displ` of a contiguous buffer."""
    first = (displ or 0) * itemsize
    if count is None:
        if (whole.nbytes - first) % max(itemsize, 1):
            raise ArgumentError(
                f"{name}: {whole.nbytes} bytes are no multiple of {itemsize}, the type's size"
            )
        count = (whole.nbytes - first) // max(itemsize, 1)
    last = first + count * itemsize
    if count < 0 or first < 0 or last > whole.data.size:
        raise ArgumentError(
            f"{name}: {count} elements of {itemsize} bytes from element {displ or 0} do not fit into "
            f"{whole.data.size} bytes",
            MPI.ERR_COUNT,
        )
    return Buffer(whole.data[first:last], count, itemsize, dtype, mpitype, whole.renew, whole.restore)


def _packed(items: list[Any], count: int, size: int, mpitype: MPI.Datatype) -> Buffer:
    """A copy without the holes of a derived type.  The MPI packs, by a message to itself."""
    packed = np.empty(count * size, np.uint8)
    renew, restore = partial(to_itself, items, packed), partial(to_itself, packed, items)
    renew()
    return Buffer(packed, count, size, None, mpitype, renew, restore)


def dense(mpitype: MPI.Datatype) -> bool:
    """Whether elements of this type lie one after the other without holes."""
    whole = 0, mpitype.Get_size()
    return mpitype.Get_extent() == whole and mpitype.Get_true_extent() == whole


_packer: list[MPI.Intracomm] = []  # one, made when it is first needed
_packing = threading.Lock()


def to_itself(source: Any, target: Any) -> None:
    """Copy between two buffers of which one has a derived type, as a message of this process to itself."""
    with _packing:
        if not _packer:
            _packer.append(MPI.COMM_SELF.Dup())  # a receive from anybody on COMM_SELF must not find it
        _packer[0].Sendrecv(source, 0, 0, target, 0, 0)
