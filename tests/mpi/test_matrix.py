"""Collective x algorithm x dtype x op x in-place x transport x memory x count x form.

Every case calls three times with other data in the same buffers: cold, warm, warm. Results must equal what
NumPy computes from all ranks' inputs, and what the MPI's own collective gives where it can. A pairwise sample
runs by default; all combinations with --matrix or MPICOLL_MATRIX=full, each with one of the forms, kinds of
memory and roots.
"""

import os
from itertools import product

import numpy as np
import pytest
from matrix import (
    COUNTS,
    HALVES,
    METHODS,
    RANK,
    SIZE,
    groups,
    name,
    native,
    numpy_dtype,
    operator,
    reduced,
    registered,
    unmet,
    values,
)
from mpi4py import MPI

import mpicoll

WORLD = MPI.COMM_WORLD
RUNS = 3
GUARD = 64  # bytes on either side of what a call may write


def pytest_generate_tests(metafunc):
    if "cases" in metafunc.fixturenames:
        full = metafunc.config.getoption("--matrix") or os.environ.get("MPICOLL_MATRIX") == "full"
        found = list(groups(full))
        metafunc.parametrize(
            ("collective", "cases"), [each[1:] for each in found], ids=[each[0] for each in found]
        )


ROOM = 16 * (1003 * SIZE + 100) + 2 * GUARD


@pytest.fixture(scope="module")
def comms():
    """Our communicator for each transport, with pools of each kind of memory to send from and receive in."""
    found = {}
    for transport in ("mpi", "window"):
        os.environ["MPICOLL_TRANSPORT"] = transport
        comm = mpicoll.Intracomm(WORLD.Dup())
        pools = {"ordinary": np.empty((2, ROOM), np.uint8), "window": comm.empty((2, ROOM), np.uint8)}
        found[transport] = comm, pools
    del os.environ["MPICOLL_TRANSPORT"]
    yield found
    for comm, _ in found.values():
        comm.Free()


def carve(pool, count, dtype):
    """`count` elements of a pool, with guards on both sides."""
    pool[:] = 0xA5
    return pool[GUARD : GUARD + count * dtype.itemsize].view(dtype)


def untouched(pool, array):
    return (pool[:GUARD] == 0xA5).all() and (pool[GUARD + array.nbytes :] == 0xA5).all()


class Call:
    """Arguments of one case, and what they must lead to."""

    def __init__(self, collective, case, pools):
        self.collective, self.case = collective, case
        self.dtype = numpy_dtype(case.get("dtype", "uint8"))
        self.inside = case.get("place") == "inplace"
        self.root = case.get("root", 0)
        self.counts = self.parts()
        self.sent, self.received = self.lengths()
        self.pools = pools[case.get("memory", "ordinary")]
        self.recv = carve(self.pools[1], max(self.received, self.sent if self.inside else 0), self.dtype)
        self.send = carve(self.pools[0], self.sent, self.dtype)

    def parts(self):
        count = self.case.get("count", "0")
        if count == "uneven":
            return [(rank * 7) % 11 * 20 for rank in range(SIZE)]
        return [COUNTS[count]] * SIZE

    def lengths(self):
        """Elements that this rank gives and gets."""
        mine, whole = self.counts[RANK], sum(self.counts)
        return {
            "reduce_scatter": (whole, mine),
            "reduce_scatter_block": (whole, mine),
            "allgather": (mine, whole),
            "alltoall": (whole, whole),
            "barrier": (0, 0),
        }.get(self.collective, (mine, mine))

    def arguments(self, send, recv):
        at_root = RANK == self.root
        source = MPI.IN_PLACE if self.inside else send
        if self.collective == "barrier":
            return ()
        if self.collective == "bcast":
            return (recv, self.root)
        if self.collective == "reduce":
            op = operator(self.case["op"], self.dtype)
            if not at_root:
                return (send, None, op, self.root)
            return (source, recv, op, self.root)
        if "op" not in self.case:
            return (source, recv)
        op = operator(self.case["op"], self.dtype)
        if self.collective == "reduce_scatter":
            return (source, recv, self.counts, op)
        return (source, recv, op)

    def fill(self, run, send, recv):
        """Write the inputs."""
        mine = values(RANK, self.sent, self.case, run)
        if self.collective == "bcast":
            recv[:] = mine if RANK == self.root else 0
            return
        send[:] = mine
        recv[:] = 0
        if self.inside:
            first = RANK * self.sent if self.collective == "allgather" else 0
            recv[first : first + self.sent] = mine

    def expected(self, run):
        """The result by NumPy; None on ranks that get none."""
        first = sum(self.counts[:RANK])
        if self.collective == "reduce" and RANK != self.root:
            return None
        if self.collective == "bcast":
            return values(self.root, self.sent, self.case, run)
        if self.collective == "allgather":
            return np.concatenate([values(rank, self.sent, self.case, run) for rank in range(SIZE)])
        if self.collective == "alltoall":
            each = [values(rank, self.sent, self.case, run) for rank in range(SIZE)]
            return np.concatenate([whole[first : first + self.counts[RANK]] for whole in each])
        whole = reduced(self.sent, self.case, run)
        return whole[first : first + self.received] if self.collective.startswith("reduce_scatter") else whole

    def check(self, run, recv, by):
        want = self.expected(run)
        if want is None:
            return
        got = recv[: self.received]
        if self.case.get("op") == "AVG":
            np.testing.assert_allclose(wide(got), wide(want), rtol=0.02, atol=1e-6, err_msg=by)
        else:
            assert got.tobytes() == want.tobytes(), f"{by}: {got[:20]}, expected {want[:20]}"


def wide(array):
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def test_equals_numpy_and_native(comms, collective, cases):
    for case in cases:
        try:
            run_case(comms, collective, case)
        except AssertionError as exc:
            raise AssertionError(f"{name(collective, case)}: {exc}") from exc


def run_case(comms, collective, case):
    comm, pools = comms[case["transport"]]
    call = Call(collective, case, pools)
    chosen = {"algorithm": case["algorithm"]} if case["algorithm"] else {}
    before = served(collective, case["algorithm"])
    with started(
        comm, METHODS[collective], case["form"], call.arguments(call.send, call.recv), chosen
    ) as start:
        for run in range(RUNS):
            if collective == "barrier":
                start()
                continue
            call.fill(run, call.send, call.recv)
            given = call.send.tobytes()
            start()
            call.check(run, call.recv, f"run {run}")
            assert untouched(call.pools[1], call.recv), f"run {run} wrote outside recvbuf"
            assert collective == "bcast" or call.send.tobytes() == given, f"run {run} wrote to sendbuf"
    # a native persistent request is the MPI's, which does not tell us of its starts
    if case["algorithm"] and (case["algorithm"], case["form"]) != ("native", "persistent"):
        assert served(collective, case["algorithm"]) == before + RUNS, "another algorithm served"
    if collective != "barrier" and native(case.get("op"), case["dtype"]):
        send, recv = np.empty_like(call.send), np.empty_like(call.recv)
        call.fill(RUNS, send, recv)
        getattr(WORLD, METHODS[collective])(*call.arguments(send, recv))
        call.check(RUNS, recv, "the MPI's own")


class started:
    """A function that performs one call in the given form; frees what the form needs at the end."""

    def __init__(self, comm, method, form, arguments, chosen):
        self.request = None
        if form == "blocking":
            bound = getattr(comm, method)
            self.start = lambda: bound(*arguments, **chosen)
        elif form == "request":
            bound = getattr(comm, "I" + method.lower())
            self.start = lambda: bound(*arguments, **chosen).Wait()
        else:
            self.request = getattr(comm, method + "_init")(*arguments, **chosen)
            self.start = lambda: (self.request.Start(), self.request.Wait())

    def __enter__(self):
        return self.start

    def __exit__(self, *_):
        if self.request is not None:
            self.request.Free()


def served(collective, algorithm):
    return mpicoll.stats().get(collective.removesuffix("_block"), {}).get(algorithm, 0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        (collective, algorithm)
        for collective in ("allreduce", "reduce", "reduce_scatter")
        for algorithm, each in registered(collective).items()
        if not unmet(each)
    ],
)
def test_same_bits(comms, collective, algorithm, dtype):
    """Rounding differs with the order of a sum: every rank and every run must take the same order."""
    if algorithm == "native" and dtype in HALVES:
        pytest.skip("MPIs do not have this type")
    results = []
    for transport, memory, _ in product(("mpi", "window"), ("ordinary", "window"), range(RUNS)):
        comm, pools = comms[transport]
        count = 1003 if collective != "reduce_scatter" else 101 * SIZE
        send = carve(pools[memory][0], count, numpy_dtype(dtype))
        send[:] = np.random.default_rng(RANK).standard_normal(count).astype(np.float32)
        recv = carve(pools[memory][1], count, numpy_dtype(dtype))
        recv[:] = 0
        if collective == "reduce_scatter":
            comm.Reduce_scatter(send, recv[: count // SIZE], algorithm=algorithm)
        else:
            getattr(comm, METHODS[collective])(send, recv, algorithm=algorithm)
        results.append((transport, recv.tobytes()))
    for transport in ("mpi", "window"):
        assert len({bits for each, bits in results if each == transport}) == 1, "runs differ"
    if collective == "allreduce" and algorithm != "native":
        assert len(set(WORLD.allgather(tuple(results)))) == 1, "ranks differ"
