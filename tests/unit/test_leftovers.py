"""Shared memory that killed ranks leave in /dev/shm, and what tells it from that of a job that runs."""

import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpicoll.cli import leftovers

pytestmark = pytest.mark.skipif(not os.path.ismount(leftovers.FOLDER), reason="no /dev/shm of its own")


@pytest.fixture
def segment(monkeypatch):
    """A file that is nobody's but ours, whatever else runs on this machine."""
    monkeypatch.setattr(leftovers, "SEGMENT", re.compile(f"test_leftovers_{os.getpid()}"))
    path = leftovers.FOLDER / f"test_leftovers_{os.getpid()}_0"
    path.write_bytes(bytes(8192))
    yield path
    path.unlink(missing_ok=True)


def test_nobodys_is_what_no_process_uses(segment):
    assert leftovers.abandoned()[segment].st_size == 8192
    with segment.open("r+b") as file:
        assert segment not in leftovers.abandoned()
        mapped = mmap.mmap(file.fileno(), 0)
    assert segment not in leftovers.abandoned()
    mapped.close()
    assert segment in leftovers.abandoned()


def test_only_what_the_job_made_is_removed(segment):
    leftovers.remove(time.time() + 60)
    assert segment.exists()
    leftovers.remove(time.time() - 60)
    assert not segment.exists()


def test_other_files_are_left_alone(segment):
    other = segment.rename(segment.with_name("a-program-of-its-own"))
    try:
        leftovers.remove(time.time() - 60)
        assert other.exists()
    finally:
        other.unlink()


def test_ranks_that_are_killed_leave_nothing(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "names = {line.split()[-1] for line in open('/proc/self/maps') if ' /dev/shm/' in line}\n"
        f"open(f'{tmp_path}/{{MPI.COMM_WORLD.rank}}', 'w').write(' '.join(names))\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nMPI.COMM_WORLD.Barrier()\n"
    )
    call = [sys.executable, "-c", "from mpicoll.cli import main; main()", "run", "-n", "2", "--quiet", script]
    env = {**os.environ, "PYTHONPATH": str(Path(leftovers.__file__).parents[2])}
    assert subprocess.run(call, env=env, capture_output=True, timeout=60).returncode != 0
    names = {name for rank in "01" for name in (tmp_path / rank).read_text().split()}
    assert names and not [name for name in names if Path(name).exists()]
