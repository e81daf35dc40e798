"""Word that the job is about to end reaches one rank, and all agree on it at the same step."""

import os
import signal

import pytest

from mpicoll.slurm import Notice


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of each rank's own: only rank 0 is to look for its file, and to leave one."""
    monkeypatch.setenv("MPICOLL_NOTICE", str(tmp_path / "notice"))
    monkeypatch.setenv("MPICOLL_REQUEUE", str(tmp_path / "requeue"))
    return tmp_path


@pytest.fixture
def notice(comm, folder):
    notice = Notice(comm)
    yield notice
    notice.close()


def test_a_signal_to_the_last_rank(comm, notice):
    assert [notice.agreed() for _ in range(3)] == [False] * 3
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert notice.agreed()


def test_a_file_for_the_first_rank(comm, notice, folder):
    if comm.rank > 0:
        (folder / "notice").touch()
    assert not notice.agreed()
    if comm.rank == 0:
        (folder / "notice").touch()
    assert notice.agreed()
    notice.requeue()
    assert (folder / "requeue").exists() == (comm.rank == 0)
