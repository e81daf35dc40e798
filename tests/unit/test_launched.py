"""A launcher of another MPI starts N ranks of which each is alone."""

import pytest

from mpicoll.errors import LaunchError
from mpicoll.runtime import launched


@pytest.fixture
def started(monkeypatch):
    """Set what the launcher told this process and its parent."""

    def start(variable, value, parent=()):
        for name in launched.SIZES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, value)
        monkeypatch.setattr(launched, "_environment", lambda pid: dict(parent))

    return start


@pytest.mark.parametrize("variable", launched.SIZES)
def test_singletons_are_refused(started, variable):
    started(variable, "4")
    with pytest.raises(LaunchError, match=f"{variable}=4.* started 4 ranks, but this one is alone in MPICH"):
        launched.check(1, "MPICH Version")


@pytest.mark.parametrize("variable", launched.SIZES)
def test_ranks_that_see_each_other_are_fine(started, variable):
    started(variable, "4")
    launched.check(4, "MPICH Version")


def test_one_rank_is_fine(started):
    started("PMI_SIZE", "1")
    launched.check(1, "MPICH Version")


def test_a_program_that_a_rank_starts_is_fine(started):
    started("PMI_SIZE", "4", parent={"PMI_SIZE": "4"})
    launched.check(1, "MPICH Version")


def test_environment_of_a_process_that_is_gone():
    assert launched._environment(2**22 + 1) == {}
