"""Buffer arguments: every form that mpi4py takes, strided arrays besides, and what is refused."""

import array

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.errors import ArgumentError
from mpicoll.memory import address as memory
from mpicoll.memory import dlpack
from mpicoll.memory.buffer import dense, parse, to_itself

X = np.arange(12.0)


def read(spec, **options):
    return parse(spec, "buf", **{"writable": False} | options)


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (X, X),
        ([X], X),
        ((X, MPI.DOUBLE), X),
        ([X, "d"], X),
        ([X, 5], X[:5]),
        ([X, 5, MPI.DOUBLE], X[:5]),
        ([X, (5, 2), MPI.DOUBLE], X[2:7]),
        ([X, 5, 2, MPI.DOUBLE], X[2:7]),
        ([X, (None, 2), MPI.DOUBLE], X[2:]),
        ([X, np.int64(3), MPI.DOUBLE], X[:3]),
        (X.reshape(3, 4), X),
        (X.reshape(3, 4).T, X),
        (X[::2], X[::2]),
        (X[::-1], X[::-1]),
        (X.tobytes(), X),
        (array.array("d", X), X),
        (memoryview(X), X),
        (np.float64(3), np.array([3.0])),
        ([None, 0, MPI.DOUBLE], X[:0]),
        ([MPI.BOTTOM, 0, MPI.DOUBLE], X[:0]),
    ],
)
def test_forms(spec, want):
    buffer = read(spec)
    assert buffer.data.ndim == 1 and buffer.data.dtype == np.uint8
    assert buffer.data.tobytes() == np.ascontiguousarray(want).tobytes()
    assert buffer.nbytes == want.nbytes == buffer.count * buffer.itemsize


def test_contiguous_memory_is_not_copied():
    for spec in (X, X[3:], X.reshape(3, 4).T, [X, 3, MPI.DOUBLE]):
        assert np.shares_memory(read(spec).data, X) and read(spec).restore is None


def test_packed_copies_are_renewed_and_written_back():
    grid = np.zeros((4, 2))
    buffer = read(grid[:, 1], writable=True)
    grid[:, 1] = 5
    buffer.renew()
    assert (buffer.data.view(float) == 5).all()
    buffer.data.view(float)[:] = 7
    buffer.restore()
    assert (grid == [0, 7]).all()


def test_counts_of_blocks():
    assert read([X, 3, MPI.DOUBLE], blocks=4).count == 12
    assert read(X, blocks=4).count == 12


def test_derived_types():
    vector = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    y = X.copy()
    buffer = read([y, 1, vector], writable=True)
    assert not dense(vector) and buffer.dtype is None and buffer.nbytes == 24
    assert (buffer.data.view(float) == [0, 2, 4]).all()
    buffer.data.view(float)[:] = -1
    buffer.restore()
    assert (y[:6] == [-1, 1, -1, 3, -1, 5]).all() and (y[6:] == X[6:]).all()
    pair = MPI.DOUBLE.Create_contiguous(2).Commit()
    assert dense(pair) and np.shares_memory(read([X, pair]).data, X) and read([X, pair]).count == 6
    assert not dense(MPI.DOUBLE_INT) and read([np.zeros(32, "u1"), MPI.DOUBLE_INT]).count == 2
    for each in (vector, pair):
        each.Free()


def test_packing_does_not_meet_receives_from_anybody():
    caught = bytearray(64)
    wildcard = MPI.COMM_SELF.Irecv(caught, MPI.ANY_SOURCE, MPI.ANY_TAG)
    y = np.zeros(3)
    to_itself([X, 3, MPI.DOUBLE], y)
    assert (y == X[:3]).all() and not wildcard.Test()
    MPI.COMM_SELF.Send(b"over", 0)
    wildcard.Wait()


@pytest.mark.parametrize(
    ("spec", "writable", "words"),
    [
        (3, False, "buf: got int, expected an array"),
        (None, False, "buf: got NoneType"),
        ([], False, "buf: a list of 0 items"),
        ([X, 1, 2, 3, 4], False, "buf: a list of 5 items"),
        ([X, 13, MPI.DOUBLE], False, "13 elements of 8 bytes from element 0 do not fit into 96 bytes"),
        ([X, (12, 1), MPI.DOUBLE], False, "12 elements of 8 bytes from element 1 do not fit"),
        ([X, (1, -1), MPI.DOUBLE], False, "from element -1 do not fit"),
        ([X, -1], False, "-1 elements"),
        ([X, 2.5, MPI.DOUBLE], False, "got 2.5, expected an integer for a count or displacement"),
        ([X, (1, 2.5), MPI.DOUBLE], False, "got 2.5, expected an integer"),
        ([X, (1, 2, 3), MPI.DOUBLE], False, "expected a count and a displacement"),
        ([X[:11].view("u1")[:20], MPI.DOUBLE], False, "20 bytes are no multiple of 8, the type's size"),
        ([np.zeros(20, "u1"), MPI.DOUBLE_INT], False, "20 bytes are no multiple of the type's extent 16"),
        ([X, MPI.DATATYPE_NULL], False, "the datatype is null"),
        ([X, "nonsense"], False, "unknown type code 'nonsense'"),
        ([None, 3, MPI.INT], False, "no data but count 3"),
        (np.array([object()]), False, "holds Python objects"),
        (b"readonly", True, "the array is read-only"),
        (np.broadcast_to(X, (2, 12)), True, "the array is read-only"),
    ],
)
def test_refused(spec, writable, words):
    with pytest.raises(ArgumentError, match=words):
        read(spec, writable=writable)


def test_null_types_without_a_count_are_refused_like_others():
    with pytest.raises(ArgumentError) as caught:
        read([X, MPI.DATATYPE_NULL])
    assert caught.value.Get_error_class() == MPI.ERR_TYPE


class Capsule:
    def __init__(self, values, device=1):
        self.values, self.device = values, device

    def __dlpack__(self, **_):
        return self.values.__dlpack__()

    def __dlpack_device__(self):
        return (self.device, 0)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "i1", "u8", "?"])
def test_dlpack(dtype):
    values = np.arange(6).astype(dtype).reshape(2, 3)
    for part in (values, values.T, values[:, 1:], values[:0]):
        view = dlpack.view(Capsule(part))
        assert view.dtype == part.dtype and view.shape == part.shape and (view == part).all()
    assert dlpack.view(Capsule(values, device=2)) is None


def test_cuda_array_interface_on_host_memory():
    class Face:
        __cuda_array_interface__ = {"data": (memory.address_of(X), False), "typestr": "<f8", "shape": (12,)}

    assert np.shares_memory(read(Face(), writable=True).data, X)


def test_addresses():
    for values in (X, X[5:], np.zeros(3, ml_dtypes.bfloat16), np.zeros(0)):
        assert memory.address_of(values) == values.__array_interface__["data"][0]
    view = memory.host_view(memory.address_of(X), X.nbytes)
    assert np.shares_memory(view, X) and view.nbytes == X.nbytes
    assert memory.host_view(0, 0).size == 0
    assert memory.address_of(memory.aligned_empty(100)) % 64 == 0
