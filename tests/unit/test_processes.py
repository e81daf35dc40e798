"""What whole jobs do: how they end on an error, at every thread level, and with requests left behind."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import mpicoll

RUN = [
    sys.executable,
    "-c",
    "from mpicoll.cli import main; main(prog_name='mpicoll')",
    "run",
    "-n",
    "2",
    "--",
]
HEAD = """
import sys
import mpi4py
{rc}
import numpy as np
from mpi4py import MPI
import mpicoll
comm = mpicoll.Intracomm(MPI.COMM_WORLD)
rank, size = comm.rank, comm.size
def large(n=30000):
    return np.full(n, rank + 1.0)
"""


def job(tmp_path, body, rc="", prefix=(), **environ):
    """Run a program on two ranks."""
    script = tmp_path / "program.py"
    script.write_text(HEAD.format(rc=rc) + textwrap.dedent(body))
    environ["PYTHONPATH"] = str(Path(mpicoll.__file__).parents[1])  # where it is not installed
    return subprocess.run(
        [*prefix, *RUN, str(script)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=90,
    )


def told(done):
    return f"code {done.returncode}\n{done.stdout}\n{done.stderr}"


COUNTS = "comm.Allreduce(MPI.IN_PLACE, large(30000 + 4 * rank){how})"


@pytest.mark.parametrize("how", ["", ", algorithm='ring'"])
def test_counts_that_differ_end_the_job(tmp_path, how):
    done = job(tmp_path, COUNTS.format(how=how), MPICOLL_TIMEOUT="20")
    assert done.returncode != 0, told(done)
    assert "mpicoll.errors.MismatchError" in done.stderr, told(done)


def test_with_checks_every_rank_says_who_differs(tmp_path):
    body = f"""
    try:
        {COUNTS.format(how="")}
    except mpicoll.errors.MismatchError as error:
        print("told", error, flush=True)
        raise
    """
    done = job(tmp_path, body, MPICOLL_CHECK="1")
    assert done.returncode != 0
    assert "ranks [1] differ from rank 0" in done.stdout, told(done)
    assert "count 30000" in done.stdout and "count 30004" in done.stdout


def test_bad_arguments_end_the_job(tmp_path):
    done = job(tmp_path, "comm.Allreduce(MPI.IN_PLACE, large(), algorithm='rign')")
    assert done.returncode != 0 and "did you mean 'ring'" in done.stderr, told(done)


def test_a_stall_is_reported_and_ends_when_asked(tmp_path):
    body = """
    import time
    if rank == 0:
        try:
            comm.Allreduce(MPI.IN_PLACE, large(), algorithm="ring")
        except mpicoll.errors.StallError as error:
            print("gave up:", error, flush=True)
            try:
                comm.Allreduce(MPI.IN_PLACE, large(), algorithm="ring")
            except mpicoll.ArgumentError as error:
                print("then:", error, flush=True)
            raise
    else:
        time.sleep(60)
    """
    done = job(tmp_path, body, MPICOLL_STALL="1", MPICOLL_TIMEOUT="3", MPICOLL_TRANSPORT="mpi")
    assert done.returncode != 0
    assert "mpicoll: waiting for 1 s: allreduce ring, 240000 bytes: rank 0, round 0" in done.stderr, told(
        done
    )
    assert "gave up: no progress for 3 s" in done.stdout, told(done)
    assert "then: this communicator cannot be used since an error in it: StallError" in done.stdout


@pytest.mark.parametrize("level", ["single", "funneled", "serialized", "multiple"])
def test_thread_levels(tmp_path, level):
    """Everything works that Python waits for; waits in C need `multiple` for what is not the MPI's own."""
    body = """
    total = size * (size + 1) / 2
    for algorithm in (None, "ring"):
        for n in (10, 30000):
            x = large(n)
            comm.Allreduce(MPI.IN_PLACE, x, algorithm=algorithm)
            assert (x == total).all()
            x = large(n)
            requests = [comm.Iallreduce(MPI.IN_PLACE, x, algorithm=algorithm)]
            requests[0].Wait()
            assert (x == total).all()
            request = comm.Allreduce_init(MPI.IN_PLACE, x, algorithm=algorithm)
            for start in (request.Start, lambda: MPI.Prequest.Startall([request])):
                x[:] = rank + 1
                start()
                request.Wait()
                assert (x == total).all()
            request.Free()
    grid = np.full((100, 2), rank + 1.0)
    comm.Iallreduce(MPI.IN_PLACE, grid[:, 0]).Wait()
    assert (grid[:, 0] == total).all()
    y, z = large(), large()
    MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, y), comm.Iallreduce(MPI.IN_PLACE, z)])
    assert (y == total).all() and (z == total).all()
    print("right at", MPI.Query_thread(), flush=True)
    """
    done = job(tmp_path, body, rc=f"mpi4py.rc.thread_level = {level!r}")
    assert done.returncode == 0 and done.stdout.count("right at") == 2, told(done)


def test_what_is_left_behind_at_exit(tmp_path):
    """Requests that are never waited for, not freed, communicators that are dropped: no hang, no words."""
    body = """
    keep = []
    for algorithm in (None, "ring", "direct"):
        x = large()
        keep.append((comm.Allreduce_init(MPI.IN_PLACE, x, algorithm=algorithm), x))
        for _ in range(3):
            keep[-1][0].Start()
            keep[-1][0].Wait()
            comm.Allreduce(MPI.IN_PLACE, x, algorithm=algorithm)
    derived = comm.Dup()
    derived.Allreduce(MPI.IN_PLACE, large())
    x = large()
    keep.append((comm.Iallreduce(MPI.IN_PLACE, x, algorithm="ring"), x))
    comm.Iallreduce(MPI.IN_PLACE, large(), algorithm="ring")  # dropped at once
    print("end", flush=True)
    """
    done = job(tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("end") == 2, told(done)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("mpicoll run:")]
    assert not [line for line in lines if "request" in line.lower()], told(done)


@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="needs a mount namespace of its own"
)
def test_little_shared_memory(tmp_path):
    """As in a container: messages serve, and this is said once."""
    body = """
    x = large(1 << 20)
    for _ in range(3):
        x[:] = rank + 1
        comm.Allreduce(MPI.IN_PLACE, x)
        assert (x == size * (size + 1) / 2).all()
    print("by", comm.explain("allreduce", nbytes=x.nbytes, algorithm="direct").transport, flush=True)
    """
    mount = 'mount -t tmpfs -o size=24m tmpfs /dev/shm && exec "$@"'
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount, "sh", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("mounting is not allowed here")
    done = job(tmp_path, body, prefix=("unshare", "-m", "sh", "-c", mount, "sh"))
    assert done.returncode == 0 and done.stdout.count("by mpi") == 2, told(done)
    assert done.stderr.count("too little room for a shared window") == 1, told(done)
