"""mpi4py's own tests with another communicator class in place of ``MPI.COMM_WORLD``; one rank of it.

    MPI4PY_TESTS=mpi4py-4.1.2/test COMM_CLASS=mpicoll:Intracomm MPICOLL_ALLREDUCE=ring \\
        mpirun -n 3 python mpi4py_suite.py [test_cco_buf test_cco_nb_buf ...]

Their messages are at most 576 bytes, so unless an algorithm is preferred everything goes native and
nothing is proven: with a class of a package that has ``stats()`` the run fails when no call was served
by a plan (``ALLOW_NATIVE=1`` switches that off). Without ``COMM_CLASS`` mpi4py's own class runs: what the
MPI itself passes. ``SUITE_SECONDS`` (300) is the time after which every rank prints its stacks.
The last line of rank 0 is one line of JSON. Exit status 0 when no test failed on any rank.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import unittest
from collections.abc import Iterator

DEFAULT = [
    "test_cco_buf", "test_cco_vec", "test_cco_nb_buf", "test_cco_nb_vec", "test_cco_pr_buf",
    "test_cco_pr_vec", "test_comm", "test_request", "test_grequest", "test_subclass",
]  # fmt: skip
PICKLE = "testPickle"  # asks for the very communicator object that was replaced


def flatten(tests: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Every test case inside nested suites."""
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from flatten(test)
        else:
            yield test


def main() -> int:
    # no exit: every rank prints, then whoever launched us ends the job
    faulthandler.dump_traceback_later(float(os.environ.get("SUITE_SECONDS", "300")))
    sys.path.insert(0, os.environ["MPI4PY_TESTS"])
    from mpi4py import MPI

    judge = MPI.COMM_WORLD.Dup()  # the verdict must not depend on the class under test
    module, _, name = os.environ.get("COMM_CLASS", "mpi4py.MPI:Intracomm").partition(":")
    package = importlib.import_module(module)
    replacement = getattr(package, name)
    MPI.COMM_WORLD = replacement(MPI.COMM_WORLD)
    MPI.COMM_SELF = replacement(MPI.COMM_SELF)

    loaded = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:] or DEFAULT)
    suite = unittest.TestSuite(test for test in flatten(loaded) if not test.id().endswith(PICKLE))
    silent = open(os.devnull, "w")  # open as long as the process
    stream = sys.stderr if judge.rank == 0 else silent
    result = unittest.TextTestRunner(verbosity=0, stream=stream).run(suite)

    bad = {test.id(): text.strip().splitlines()[-1] for test, text in result.failures + result.errors}
    everywhere = judge.allgather(bad)
    served = package.stats() if hasattr(package, "stats") else {}
    planned = sum(n for counts in served.values() for kind, n in counts.items() if kind != "native")
    needed = judge.size > 1 and hasattr(package, "stats") and not os.environ.get("ALLOW_NATIVE")
    failed = any(everywhere) or (needed and not planned)
    if judge.rank == 0:
        failures = {
            f"{id} (rank {rank})": why for rank, bad in enumerate(everywhere) for id, why in bad.items()
        }
        report = {
            "tests": result.testsRun,
            "skipped": len(result.skipped),
            "failures": failures,
            "planned": planned,
            "served": served,
            "library": " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split()),
        }
        print(json.dumps(report), flush=True)
    judge.Free()
    faulthandler.cancel_dump_traceback_later()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
