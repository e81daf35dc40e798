"""Several hosts: Slurm, 4 hosts with their own network addresses, 2 ranks on each, all on this machine.

Needs root (network namespaces); `make cluster` runs it. The lab is described in lab/README.md.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOSTS = 4
PYTHON = {"openmpi": sys.executable, "mpich": f"{os.environ['VENV_MPICH']}/bin/python"}


def run(lab, *words, nodes=HOSTS, mpi="openmpi"):
    """`mpicoll run` inside an allocation of 2 tasks on every host."""
    return mpicoll(lab, "run", *words, nodes=nodes, tasks=2, mpi=mpi)


def mpicoll(lab, *words, nodes, tasks, mpi="openmpi"):
    """A command of ours inside an allocation of so many tasks on every host."""
    call = [PYTHON[mpi], "-c", "from mpicoll.cli import main; main(prog_name='mpicoll')", *words]
    salloc = ["salloc", "--quiet", "-N", str(nodes), f"--ntasks-per-node={tasks}"]
    done = subprocess.run([*salloc, *call], env=lab, capture_output=True, text=True, timeout=300, cwd=ROOT)
    print(done.stdout, done.stderr)
    return done


def test_split_rail_on_four_hosts(lab):
    done = run(lab, HERE / "split_rail_check.py")
    assert done.returncode == 0
    assert re.search(r"split_rail: \d+ calls right on 8 ranks of 4 hosts", done.stdout)


def test_the_training_job_on_four_hosts(lab, tmp_path):
    small = ["--steps", "60", "--files", "40", "--no-plot", "--check"]
    done = run(lab, "jobs/train_text.py", *small, "--out", tmp_path / "out", "--cache", tmp_path / "cache")
    assert done.returncode == 0
    digests = re.search(r"parameters on ranks 0 to 7: (.+)", done.stdout)[1].split()
    assert len(digests) == 8 and len(set(digests)) == 1


def test_an_allocation_is_not_oversubscribed_unless_asked(lab):
    done = run(lab, "-n", "5", "-m", "mpi4py.bench", "helloworld", nodes=2)
    assert done.returncode != 0 and "has room for 4" in done.stderr
    done = run(lab, "-n", "5", "--oversubscribe", "-m", "mpi4py.bench", "helloworld", nodes=2)
    assert done.returncode == 0 and "of 5" in done.stdout


def test_a_failing_rank_ends_all_hosts(lab, tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(
        "from mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 5: raise ValueError('one rank fails')\n"
        "MPI.COMM_WORLD.Barrier()\n"
    )
    done = run(lab, script)
    assert done.returncode != 0 and done.stderr.count("rank 5 of 8: Traceback") == 1
    assert "ValueError: one rank fails" in done.stderr


@pytest.mark.parametrize("mpi", PYTHON)
def test_an_error_of_all_hosts_is_told_once(lab, tmp_path, mpi):
    script = tmp_path / "fail.py"
    script.write_text("from mpi4py import MPI\nraise ValueError('all fail')\n")
    done = run({**lab, "MPICOLL_FOLD": "2"}, script, mpi=mpi)
    assert done.returncode != 0 and done.stderr.count("ValueError: all fail") == 1
    assert "ranks 0-7 of 8: Traceback" in done.stderr


@pytest.mark.parametrize("launcher", ["mpiexec", "srun"])
def test_mpich_from_pypi_starts_with_its_own_mpiexec_unless_asked(lab, launcher):
    asked = [] if launcher == "mpiexec" else ["--launcher", launcher]
    done = run(lab, *asked, "-m", "mpi4py.bench", "helloworld", nodes=2, mpi="mpich")
    assert done.returncode == 0 and done.stdout.count("of 4 on n") == 4
    assert ("(MPICH 5" in done.stderr) is (launcher == "mpiexec")


def test_steps_between_hosts_are_measured(lab, tmp_path):
    small = ["--seconds", "0.001", "--bucket-mb", "0.25", "--iters", "2", "--launches", "1", "--threads", "1"]
    asked = ["bench-step", "overlap", "-n", "2", *small, "-w", tmp_path / "kept.json"]
    assert mpicoll(lab, *asked, nodes=2, tasks=1).returncode == 0
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["machine"]["hosts"] == kept["machine"]["ranks"] == 2
    (line,) = kept["launches"][0]["lines"]
    assert set(line["samples"]) == {"compute", "comm", "comm at once", "blocking", "overlapped"}
    assert all(len(samples) == 2 and min(samples) > 0 for samples in line["samples"].values())
    assert set(line["wrong"].values()) == {0}
