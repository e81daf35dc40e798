"""Options every suite knows. What MPI needs is in tests/mpi/conftest.py."""


def pytest_addoption(parser):
    parser.addoption("--matrix", action="store_true", help="all combinations instead of a pairwise sample")
