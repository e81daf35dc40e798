"""What the matrix test goes through: combinations of factors, operators, and the data of every rank."""

from functools import cache, reduce
from itertools import groupby, product
from zlib import crc32

import ml_dtypes
import numpy as np
from mpi4py import MPI
from pairwise import pairwise

import mpicoll
from mpicoll.plans import algorithms

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
COUNTS = {"0": 0, "1": 1, "P-1": SIZE - 1, "P": SIZE, "P+1": SIZE + 1, "1000": 1000, "1003": 1003}

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float32", "float64", "float16", "bfloat16"]
DTYPES = [*INTEGERS, *FLOATS, "complex64", "complex128", "bool"]
HALVES = ("float16", "bfloat16")  # types that MPIs do not have
BOOLEAN = {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}
BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
UFUNCS = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum, **BOOLEAN, **BITWISE}
OPS = [*UFUNCS, "AVG", "user", "ordered"]
DEALT = ("form", "memory", "root")  # the full matrix deals these out instead of multiplying with them

METHODS = {
    "allreduce": "Allreduce",
    "reduce": "Reduce",
    "reduce_scatter": "Reduce_scatter",
    "reduce_scatter_block": "Reduce_scatter_block",
    "bcast": "Bcast",
    "allgather": "Allgather",
    "alltoall": "Alltoall",
    "barrier": "Barrier",
}


def registered(collective):
    return algorithms.registry[collective.removesuffix("_block")]


def factors(collective):
    """The values of every factor that the collective has."""
    names = [None, *(name for name, each in registered(collective).items() if not unmet(each))]
    found = {"algorithm": names}
    if collective != "barrier":
        found |= {"dtype": DTYPES, "count": list(COUNTS), "memory": ["ordinary", "window"]}
    if collective == "reduce_scatter":
        found["count"] = [*COUNTS, "uneven"]
    if collective.startswith(("allreduce", "reduce")):
        found["op"] = OPS
    if collective in ("reduce", "bcast"):
        found["root"] = sorted({0, SIZE - 1})
    if collective not in ("barrier", "bcast"):
        found["place"] = ["apart", "inplace"]
    return found | {"form": ["blocking", "request", "persistent"], "transport": ["mpi", "window"]}


def unmet(algorithm, commutative=True):
    return algorithm.unmet(SIZE, commutative=commutative, nodes=[list(range(SIZE))])


def allowed(collective, case):
    """Whether what is chosen of a case, perhaps not all, can be together."""
    dtype, op, algorithm = case.get("dtype"), case.get("op"), case.get("algorithm")
    if op and dtype and not defined(op, dtype):
        return False
    if algorithm == "native":
        return not dtype or native(op, dtype)
    if op == "ordered" and algorithm:
        return not unmet(registered(collective)[algorithm], commutative=False)
    return True


def defined(op, dtype):
    if op in ("user", "ordered"):
        return dtype in INTEGERS or dtype in ("float32", "float64")
    if op in BOOLEAN or op in BITWISE:
        return dtype in INTEGERS or dtype == "bool"
    if op == "AVG":
        return dtype in FLOATS or dtype.startswith("complex")
    return op in ("SUM", "PROD") or not dtype.startswith("complex")


def native(op, dtype):
    """Whether the MPI's own collective can do it."""
    if dtype in HALVES or op == "AVG":
        return False
    return dtype != "bool" or op is None or op in BOOLEAN


def name(collective, case):
    return "-".join([collective, *(str(value if value is not None else "auto") for value in case.values())])


def deal(case, values):
    """Give a case one value of each factor that is not multiplied out, the same on every rank."""
    digits = crc32(name("", case).encode())
    for factor in DEALT:
        if factor in values:
            digits, index = divmod(digits, len(values[factor]))
            case[factor] = values[factor][index]
    return case


def groups(full):
    """Lists of cases with an id each: one list is one test."""
    for collective in METHODS:
        values = factors(collective)
        if not full:
            for case in pairwise(values, lambda case, c=collective: allowed(c, case)):
                yield name(collective, case), collective, [case]
            continue
        varied = {factor: choices for factor, choices in values.items() if factor not in DEALT}
        cases = (dict(zip(varied, each, strict=True)) for each in product(*varied.values()))
        chosen = (deal(case, values) for case in cases if allowed(collective, case))
        # algorithm and dtype vary slowest
        for (algorithm, dtype), same in groupby(chosen, lambda case: (case["algorithm"], case.get("dtype"))):
            yield f"{collective}-{algorithm or 'auto'}-{dtype}", collective, list(same)


def numpy_dtype(dtype):
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def compose(left, right):
    """Maps x -> m x + c modulo 8, kept as 8 m + c, one after the other: associative, not commutative."""
    m, c, n, d = *np.divmod(left.astype(int), 8), *np.divmod(right.astype(int), 8)
    return (m * n % 8 * 8 + (n * c + d) % 8).astype(left.dtype)


@cache
def operator(op, dtype):
    """What is passed to a call."""
    if op == "AVG":
        return mpicoll.op.AVG
    if op in UFUNCS:
        return getattr(MPI, op)
    function = FUNCTIONS[op]

    def apply(left, right, datatype):
        out = np.frombuffer(right, dtype)
        out[:] = function(np.frombuffer(left, dtype), out)

    return MPI.Op.Create(apply, commute=op == "user")


FUNCTIONS = {**UFUNCS, "AVG": np.add, "user": np.add, "ordered": compose}


def values(rank, count, case, run):
    """A rank's input: small integers that differ between ranks, places and runs."""
    index = np.arange(count) * 3 + rank * 5 + run * 2
    op, dtype = case.get("op"), numpy_dtype(case["dtype"])
    if dtype.kind == "b":
        found = index % 3 == 0
    elif op == "PROD":
        found = 1 + (index % 5 == 0)
    elif op == "ordered":
        found = index * 7 % 61
    elif dtype.kind == "u":
        found = index % 6
    else:
        found = index % 7 - 2
    if dtype.kind == "c":
        found = found + 1j * (index % 2)
    return found.astype(dtype)


def reduced(count, case, run):
    """All ranks' inputs combined in rank order."""
    inputs = [values(rank, count, case, run) for rank in range(SIZE)]
    function, dtype = FUNCTIONS[case["op"]], inputs[0].dtype
    total = reduce(lambda left, right: function(left, right).astype(dtype), inputs)
    return total * total.dtype.type(1 / SIZE) if case["op"] == "AVG" else total
