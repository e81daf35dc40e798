"""A collective in its three forms, and a vector of doubles in every form that a buffer can have."""

import array
import ctypes

import numpy as np
from mpi4py import MPI

FORMS = ("blocking", "request", "persistent")


def perform(comm, form, name, *arguments, **chosen):
    """One call, to its end."""
    if form == "blocking":
        getattr(comm, name)(*arguments, **chosen)
    elif form == "request":
        getattr(comm, f"I{name.lower()}")(*arguments, **chosen).Wait()
    else:
        request = getattr(comm, f"{name}_init")(*arguments, **chosen)
        request.Start()
        request.Wait()
        request.Free()


class Foreign:
    """An array that only speaks DLPack."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **_):
        return self.values.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)


def _within(values, shape, where):
    """The values as a part of a larger array whose other elements are -1."""
    whole = np.full(shape, -1.0)
    part = whole[where]
    part[...] = values.reshape(part.shape)
    return whole, part


def _displaced(values):
    whole, part = _within(values, values.size + 5, slice(3, values.size + 3))
    return [whole, (values.size, 3), MPI.DOUBLE], part, whole


def _strided(values):
    whole, part = _within(values, (values.size, 3), (slice(None), 1))
    return part, part, whole


def _reversed(values):
    whole, part = _within(values, 2 * values.size, slice(None, None, -2))
    return part, part, whole


def _fortran(values):
    part = np.asfortranarray(values.reshape(2, -1, order="F"))
    return part, part.T.reshape(-1), None


def _with(maker):
    def make(values):
        part = values.copy()
        return maker(part), part, None

    return make


def _bytes(values):
    raw = bytearray(values.tobytes())
    return [raw, values.size, MPI.DOUBLE], np.frombuffer(raw), None


def _python_array(values):
    raw = array.array("d", values)
    return raw, np.frombuffer(raw), None


def _ctypes_array(values):
    raw = (ctypes.c_double * values.size)(*values)
    return raw, np.frombuffer(raw), None


# name -> values -> (what a collective takes, a view of the elements, the memory around them or None)
DENSE = {
    "array": _with(lambda part: part),
    "matrix": _with(lambda part: part.reshape(2, -1)),
    "count": _with(lambda part: [part, part.size, MPI.DOUBLE]),
    "four": _with(lambda part: (part, part.size, 0, "d")),
    "type": _with(lambda part: [part, MPI.DOUBLE]),
    "bare list": _with(lambda part: [part]),
    "memoryview": _with(memoryview),
    "dlpack": _with(Foreign),
    "bytearray": _bytes,
    "array.array": _python_array,
    "ctypes": _ctypes_array,
    "fortran": _fortran,
    "displaced": _displaced,
    "strided": _strided,
    "reversed": _reversed,
}


def _vector(values):
    kind = MPI.DOUBLE.Create_vector(values.size, 1, 3).Commit()
    whole, part = _within(values, 3 * values.size, slice(None, None, 3))
    return [whole, 1, kind], part, whole


def _resized(values):
    kind = MPI.DOUBLE.Create_resized(0, 16).Commit()
    whole, part = _within(values, 2 * values.size, slice(None, None, 2))
    return [whole, values.size, kind], part, whole


def _struct(values):
    half = values.size // 2
    kind = MPI.Datatype.Create_struct(
        [half, values.size - half], [8, 16 + 8 * half], [MPI.DOUBLE] * 2
    ).Commit()
    whole = np.full(values.size + 3, -1.0)
    where = [*range(1, 1 + half), *range(2 + half, 2 + values.size)]
    whole[where] = values

    class View:  # the elements are in two places
        def __array__(self, dtype=None, copy=None):
            return whole[where]

    return [whole, 1, kind], View(), whole


def _contiguous(values):
    kind = MPI.DOUBLE.Create_contiguous(values.size).Commit()
    part = values.copy()
    return [part, 1, kind], part, None


DERIVED = {"vector": _vector, "resized": _resized, "struct": _struct, "contiguous": _contiguous}


def untouched(whole, count):
    """Whether the memory around the elements still holds -1."""
    return whole is None or (whole == -1).sum() >= whole.size - count
