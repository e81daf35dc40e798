"""Reading the DLPack header of host arrays.

NumPy's own reader does not know every type that MPI does (long double, bfloat16), and marks arrays
read-only that are not.
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_FLOAT, _BFLOAT = 2, 4


class _Tensor(ctypes.Structure):
    """DLTensor, the first member of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def view(source: Any) -> np.ndarray | None:
    """A NumPy view of a host array that speaks DLPack; None for memory of a device.

    The view does not keep `source` alive.
    """
    if source.__dlpack_device__()[0] not in HOST_DEVICES:
        return None
    capsule = source.__dlpack__()  # not consumed: its owner cleans up when it is dropped
    tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    if tensor.code == _BFLOAT:
        dtype = np.dtype(ml_dtypes.bfloat16)
    elif tensor.code in _KINDS:
        pair = tensor.code == _FLOAT and tensor.lanes == 2  # complex, before DLPack had it
        dtype = np.dtype(f"{'c' if pair else _KINDS[tensor.code]}{tensor.bits // 8 * tensor.lanes}")
    else:
        return None
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if 0 in shape:
        return np.empty(shape, dtype)
    strides, span = None, prod(shape) * dtype.itemsize
    if tensor.strides:
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
        span = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory = MPI.memory.fromaddress(tensor.data + tensor.byte_offset, span)
    return np.ndarray(shape, dtype, memory, 0, strides)
