"""The split-rail allreduce on several hosts, against NumPy: run by tests/cluster/test_lab.py on every rank.

Split rail: a reduce-scatter inside each host, an allreduce between hosts by every local rank on its share, an
allgather inside each host. Operands are small integers, so that every order of adding gives the same bits.
"""

import hashlib
import sys

import numpy as np
from mpi4py import MPI

import mpicoll

COUNTS = (1, 7, 8, 9, 1000, 4097, 1 << 18)
DTYPES = ("float32", "float64", "int32", "float16", "complex64")


def operand(rank, count, dtype):
    """What a rank contributes; any rank can compute any other's."""
    values = np.random.default_rng((rank, count)).integers(1, 9, count)
    return (values * (1 - 2j) if dtype == "complex64" else values).astype(dtype)


def main():
    comm = mpicoll.Intracomm(MPI.COMM_WORLD)
    hosts = sorted(set(comm.allgather(MPI.Get_processor_name())))
    calls = 0
    for dtype in DTYPES:
        for count in COUNTS:
            operands = [operand(rank, count, dtype) for rank in range(comm.size)]
            for op, expected in ((MPI.SUM, sum(operands)), (MPI.MAX, np.max(operands, axis=0))):
                if dtype == "complex64" and op == MPI.MAX:
                    continue  # complex numbers have no order
                found = np.empty(count, dtype)
                comm.Allreduce(operands[comm.rank], found, op=op, algorithm="split_rail")
                where = f"rank {comm.rank}: {count} {dtype}"
                np.testing.assert_array_equal(found, expected.astype(dtype), err_msg=where)
                digests = comm.allgather(hashlib.sha256(found.tobytes()).hexdigest())
                assert len(set(digests)) == 1, f"{where}: the ranks' bits differ"
                calls += 1
    served = mpicoll.stats()["allreduce"]["split_rail"]
    assert served == calls, f"split_rail served {served} of {calls} calls"
    if comm.rank == 0:
        sys.stdout.write(f"split_rail: {calls} calls right on {comm.size} ranks of {len(hosts)} hosts\n")


main()
