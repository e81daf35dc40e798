"""Operators on bytes."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.errors import ArgumentError
from mpicoll.memory.buffer import parse
from mpicoll.memory.op import AVG, Reducer

OPS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def buffer(values):
    return parse(values, "buf", writable=True)


def combine(op, left, right, spec=lambda x: x):
    """left op right, into the left, the right, and a third place."""
    results = []
    for where in range(3):
        a, b, c = left.copy(), right.copy(), np.zeros_like(left)
        bufs = [buffer(spec(x)) for x in (a, b, c)]
        function, arguments = Reducer(op, bufs[0]).combine(bufs[0].data, bufs[1].data, bufs[where].data)
        function(*arguments)
        if bufs[where].restore:
            bufs[where].restore()
        results.append((a, b, c)[where])
    assert all((each == results[0]).all() for each in results)
    return results[0]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["i1", "u4", "i8", "?"])
def test_predefined(name, dtype):
    a, b = np.array([0, 1, 5, 0]).astype(dtype), np.array([0, 0, 3, 7]).astype(dtype)
    assert (combine(getattr(MPI, name), a, b) == OPS[name](a, b).astype(dtype)).all()


@pytest.mark.parametrize("dtype", ["f2", "f4", "c8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_low_precision_and_complex(dtype):
    a, b = np.array([1, 2]).astype(dtype), np.array([3, 0.5]).astype(dtype)
    assert combine(MPI.SUM, a, b).tolist() == (a + b).tolist()


def test_user_operators_keep_their_sides():
    def left_minus_twice_right(left, right, _):
        a, b = (np.frombuffer(x, "i4") for x in (left, right))
        b[:] = a - 2 * b

    op = MPI.Op.Create(left_minus_twice_right, commute=False)
    assert combine(op, np.array([10, 1], "i4"), np.array([3, 4], "i4")).tolist() == [4, -7]
    assert not Reducer(op, buffer(np.zeros(2, "i4"))).commutative
    with pytest.raises(ArgumentError, match="do not know bfloat16"):
        Reducer(op, buffer(np.zeros(2, ml_dtypes.bfloat16)))
    op.Free()


def test_types_with_holes():
    pair = np.dtype([("value", "f8"), ("where", "i4")], align=True)
    a, b = np.array([(3, 0), (1, 0)], pair), np.array([(2, 1), (4, 1)], pair)
    got = combine(MPI.MINLOC, a, b, spec=lambda x: [x, MPI.DOUBLE_INT])
    assert got.tolist() == [(2.0, 1), (1.0, 0)]


def test_several_operands_round_once():
    ones, small = np.ones(3, "f2"), np.full(3, 2.0**-11, "f2")
    reducer = Reducer(MPI.SUM, buffer(ones))
    assert reducer.wide and not Reducer(MPI.MAX, buffer(ones)).wide
    out = np.zeros(3, "f2")
    function, arguments = reducer.accumulate([x.view("u1") for x in (ones, small, small)], out.view("u1"))
    function(*arguments)
    assert (out == np.float16(1 + 2.0**-10)).all()


def test_average():
    x = np.array([3.0, 6.0], "f4")
    reducer = Reducer(AVG, buffer(x))
    reducer.finish(x.view("u1"), 3)
    assert x.tolist() == [1.0, 2.0] and reducer.commutative and repr(AVG) == "mpicoll.op.AVG"


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (AVG, "i4"),
        (AVG, "?"),
        (MPI.MAX, "c8"),
        (MPI.BAND, "f4"),
        (MPI.SUM, "V8"),
        (MPI.SUM, "i4,f4"),
        (MPI.SUM, "M8[s]"),
    ],
)
def test_undefined(op, dtype):
    with pytest.raises(ArgumentError, match="is not defined for"):
        Reducer(op, buffer(np.zeros(3, dtype)))


def test_reducers_are_told_apart():
    keys = {
        Reducer(op, buffer(np.zeros(2, dtype))).key
        for op in (MPI.SUM, MPI.PROD, AVG)
        for dtype in ("f4", "f8", "c8", ml_dtypes.bfloat16)
    }
    assert len(keys) == 12
