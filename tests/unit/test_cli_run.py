"""`mpicoll run`: what it composes (pure), and what comes of it (real launches of 2 and 3 ranks)."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from mpicoll.cli import launch, run
from mpicoll.cli.launch import Machine
from mpicoll.cli.launcher import Allocation, Mpi
from mpicoll.cli.supervise import supervise

OPENMPI, MPICH, SLURM = Mpi("openmpi", "5.0.11"), Mpi("mpich", "5.0.2"), Mpi("slurm", "22.05.8")
PROGRAM = ["python", "-m", "mpi4py", "a.py"]
CALL = [sys.executable, "-c", "from mpicoll.cli import main; main(prog_name='mpicoll')"]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """What whoever runs the tests has set himself would stay."""
    for name in launch.THREADS:
        monkeypatch.delenv(name, raising=False)


def prepare(starter, loaded, ranks, machine, **options):
    return launch.prepare("/bin/x", starter, loaded, ranks, PROGRAM, machine, **options)


def test_open_mpi_on_a_workstation():
    job = prepare(OPENMPI, OPENMPI, 2, Machine(cores=2))
    assert job.argv == ["/bin/x", "-n", "2", *PROGRAM]
    assert job.env["OMP_NUM_THREADS"] == job.env["MKL_NUM_THREADS"] == "1"
    assert job.env["OMPI_MCA_osc"] == "^ucx" and job.env["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in job.env
    assert "OMPI_MCA_threads_pthreads_yield_strategy" not in job.env


def test_more_cores_than_ranks_are_shared_out():
    job = prepare(OPENMPI, OPENMPI, 2, Machine(cores=8))
    assert job.env["OMP_NUM_THREADS"] == "4"
    assert job.argv[1:3] == ["--bind-to", "none"]
    assert "OMPI_MCA_mpi_yield_when_idle" not in job.env


def test_more_ranks_than_cores():
    job = prepare(OPENMPI, OPENMPI, 3, Machine(cores=2, root=True))
    assert "--oversubscribe" in job.argv and job.env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert job.env["OMPI_MCA_threads_pthreads_yield_strategy"] == "nanosleep"
    assert prepare(MPICH, MPICH, 3, Machine(cores=2)).argv == ["/bin/x", "-n", "3", *PROGRAM]


def test_what_the_user_set_stays():
    mine = {
        "OMP_NUM_THREADS": "7",
        "OMPI_MCA_osc": "rdma",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "OMPI_MCA_threads_pthreads_yield_strategy": "sched_yield",
    }
    job = prepare(OPENMPI, OPENMPI, 3, Machine(cores=2, environ=mine))
    assert not mine.keys() & job.env.keys() and job.env["OPENBLAS_NUM_THREADS"] == "7"
    told = prepare(OPENMPI, OPENMPI, 2, Machine(cores=2, environ=mine), threads=3)
    assert told.env["OMP_NUM_THREADS"] == "3"


def test_infiniband_keeps_its_windows():
    assert "OMPI_MCA_osc" not in prepare(OPENMPI, OPENMPI, 2, Machine(cores=2, infiniband=True)).env


def test_more_ranks_than_memory_holds_are_refused():
    machine = Machine(cores=4, memory=8 << 30)
    assert prepare(OPENMPI, OPENMPI, 400, machine)
    with pytest.raises(click.ClickException, match=r"999999 ranks need 19531.2 GiB.* has 8\.0 GiB"):
        prepare(OPENMPI, OPENMPI, 999_999, machine)
    machine.allocation = Allocation("Slurm", 6400, 100)
    assert prepare(OPENMPI, OPENMPI, 6400, machine)


def test_an_allocation_refuses_oversubscription_unless_asked():
    machine = Machine(cores=4, allocation=Allocation("Slurm", 8, 2), environ={"SLURM_JOB_ID": "1"})
    with pytest.raises(click.ClickException, match=r"9 ranks.*Slurm allocation has room for 8"):
        prepare(SLURM, OPENMPI, 9, machine, plugin="pmix")
    job = prepare(SLURM, OPENMPI, 9, machine, plugin="pmix", oversubscribe=True)
    assert "--overcommit" in job.argv
    job = prepare(OPENMPI, OPENMPI, 9, machine, oversubscribe=True)
    assert job.argv[1:5] == ["--map-by", ":oversubscribe", "--bind-to", "none"]


def test_srun():
    given = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "3"}
    machine = Machine(cores=4, allocation=Allocation("Slurm", 8, 2), environ=given)
    job = prepare(SLURM, MPICH, 8, machine, plugin="pmi2")
    assert job.argv[1:5] == ["-n", "8", "--kill-on-bad-exit=1", "--mpi=pmi2"]
    assert job.env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("starter", [SLURM, MPICH, OPENMPI])
def test_a_step_shares_its_cores_with_the_ranks(starter):
    machine = Machine(cores=4, allocation=Allocation("Slurm", 8, 2), environ={"SLURM_STEP_ID": "0"})
    assert prepare(starter, starter, 8, machine, plugin="pmi2").env["SLURM_OVERLAP"] == "1"
    machine.environ = {}
    assert "SLURM_OVERLAP" not in prepare(starter, starter, 8, machine, plugin="pmi2").env


def test_settings_travel_to_other_nodes():
    machine = Machine(cores=4, allocation=Allocation("PBS", 8, 2))
    argv = prepare(OPENMPI, OPENMPI, 8, machine).argv
    assert argv[argv.index("OMP_NUM_THREADS") - 1] == "-x"


def test_every_setting_is_told_with_its_reason():
    job = prepare(OPENMPI, OPENMPI, 3, Machine(cores=2, root=True, terminal=80))
    told = "\n".join(job.told)
    assert all(f"{name}={value}" in told for name, value in job.env.items())
    assert "COLUMNS=80" in told


def test_programs(tmp_path):
    script = tmp_path / "a.py"
    script.touch()
    python = [sys.executable, "-m", "mpicoll.cli.rank"]
    assert run.program([str(script), "-n", "9"], None) == [*python, str(script), "-n", "9"]
    assert run.program(["python", str(script)], None) == ["python", *python[1:], str(script)]
    assert run.program(["/other/python3", str(script)], None) == [
        "/other/python3",
        "-m",
        "mpi4py",
        str(script),
    ]
    assert run.program(["--flag"], "some.module") == [*python, "-m", "some.module", "--flag"]
    assert run.program(["./a.out", "x"], None) == ["./a.out", "x"]
    with pytest.raises(click.ClickException, match="no such script"):
        run.program([str(tmp_path / "b.py")], None)
    with pytest.raises(click.UsageError, match="nothing to run"):
        run.program([], None)


def parsed(*words):
    context = run.command.make_context("run", list(words))
    return context.params["ranks"], context.params["module"], context.params["words"]


def test_options_after_the_program_are_the_programs():
    assert parsed("-n", "2", "a.py", "-n", "9") == (2, None, ("a.py", "-n", "9"))
    assert parsed("-np", "2", "a.py") == (2, None, ("a.py",))
    assert parsed("-n", "2", "-m", "mod", "-n", "9") == (2, "mod", ("-n", "9"))
    assert parsed("-n", "2", "--", "python", "-m", "mod") == (2, None, ("python", "-m", "mod"))


# ---- real launches


def environment(**more):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    root = str(Path(run.__file__).parents[2])
    return {**inherited, "PYTHONPATH": root, **more}


def mpicoll_run(*words, **more):
    return subprocess.run(
        [*CALL, "run", *words], env=environment(**more), capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        "import os, signal, sys, time\n"
        "from mpi4py import MPI\n"
        "world, how = MPI.COMM_WORLD, sys.argv[1]\n"
        "sys.stdout.write(f'size {world.size} {os.environ[\"OMP_NUM_THREADS\"]}\\n')\n"
        "sys.stdout.flush()\n"
        "if how == 'raise' and world.rank == 1: raise ValueError('a rank fails')\n"
        "if how == 'exit' and world.rank == 1: os._exit(7)\n"
        "if how == 'stubborn':\n"
        "    for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
        "    open(f'{sys.argv[2]}/{world.rank}', 'w').write(str(os.getpid()))\n"
        "if how != 'end': time.sleep(60)\n"
    )
    return str(path)


def test_ranks_are_one_job(script):
    done = mpicoll_run("-n", "3", script, "end")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["size 3 1"] * 3
    assert "OMP_NUM_THREADS=1" in done.stderr
    assert mpicoll_run("-n", "1", "--quiet", script, "end").stderr == ""


def test_a_failing_rank_ends_the_job_with_its_code(script):
    raised = mpicoll_run("-n", "3", "--quiet", script, "raise")
    assert raised.returncode == 1
    # nothing of launchers, of mpi4py and of ours: the program's own traceback, and who raised it
    assert raised.stderr.startswith(
        f'rank 1 of 3: Traceback (most recent call last):\n  File "{script}", line 6'
    )
    assert raised.stderr.endswith("ValueError: a rank fails\n")
    assert mpicoll_run("-n", "2", script, "exit").returncode == 7


def told(tmp_path, text, **more):
    """The code and the stderr of 3 ranks of a program that ends so, once all of them are there."""
    path = tmp_path / "fail.py"
    there = "rank = MPI.COMM_WORLD.Get_rank()\nMPI.COMM_WORLD.Barrier()"
    path.write_text(f"import sys\nfrom mpi4py import MPI\n{there}\n{text}\n")
    # so long a rank waits for the others, however busy the machine is
    done = mpicoll_run("-n", "3", "--quiet", str(path), **{"MPICOLL_FOLD": "2", **more})
    return done.returncode, done.stderr


def test_an_error_of_all_ranks_is_told_once(tmp_path):
    code, err = told(tmp_path, "raise ValueError('all\\nalike')")
    assert code == 1 and err.startswith("ranks 0-2 of 3: Traceback (most recent call last):")
    assert err.count("Traceback") == err.count("ValueError: all\nalike\n") == 1 and "Abort" not in err


def test_different_errors_are_told_one_after_the_other(tmp_path):
    code, err = told(tmp_path, "if rank < 2: raise ValueError(f'on rank {rank}')\nraise KeyError('another')")
    assert code == 1 and err.count("Traceback") == 2
    assert "rank 2 of 3: Traceback" in err and "KeyError: 'another'\n" in err
    assert (
        re.search(r"ranks 0-1 of 3, here rank (\d): Traceback", err)[1]
        in re.search(r"on rank (\d)\n", err)[1]
    )


def test_an_error_before_mpi_has_started(tmp_path):
    path = tmp_path / "fail.py"
    path.write_text("import no_such_module\n")
    done = mpicoll_run("-n", "3", "--quiet", str(path), MPICOLL_FOLD="2")
    assert done.returncode == 1 and done.stderr.count("No module named 'no_such_module'") == 1
    assert done.stderr.startswith("ranks 0-2 of 3: ")


@pytest.mark.parametrize(
    ("argument", "expected", "words"),
    [
        ("3", 3, "ranks 0-2 of 3: left with exit code 3\n"),
        ("-1", 255, "ranks 0-2 of 3: left with exit code 255\n"),
        ("'no data'", 1, "ranks 0-2 of 3: no data\n"),
        ("0", 0, ""),
    ],
)
def test_exit_codes_and_messages(tmp_path, argument, expected, words):
    assert told(tmp_path, f"sys.exit({argument})") == (expected, words)


def test_one_rank_leaves_as_quietly_as_any_program(tmp_path):
    path = tmp_path / "leave.py"
    path.write_text("import sys\nfrom mpi4py import MPI\nsys.exit(3)\n")
    done = mpicoll_run("-n", "1", "--quiet", str(path))
    assert (done.returncode, done.stderr) == (3, "")


def test_errors_as_they_come_where_folding_is_off(tmp_path):
    code, err = told(tmp_path, "raise ValueError('alike')", MPICOLL_FOLD="0")
    assert code == 1 and "ValueError: alike" in err and " of 3: " not in err


def test_timeout(script):
    assert mpicoll_run("-n", "2", "--timeout", "2", script, "sleep").returncode == 124


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_no_rank_survives_a_signal(script, tmp_path, number, code):
    job = subprocess.Popen(
        [*CALL, "run", "-n", "2", "--quiet", script, "stubborn", tmp_path], env=environment()
    )
    pids = [tmp_path / "0", tmp_path / "1"]
    end = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in pids) and time.monotonic() < end:
        time.sleep(0.05)
    job.send_signal(number)
    assert job.wait(30) == code
    assert not any(alive(int(path.read_text())) for path in pids)


def test_dry_run_runs_nothing(script):
    done = mpicoll_run("-n", "2", "--dry-run", script, "raise")
    assert done.returncode == 0 and done.stdout.startswith("env OMP_NUM_THREADS=") and script in done.stdout


def test_no_launcher_inside_a_rank(script):
    done = mpicoll_run("-n", "2", script, "end", PMI_RANK="0", PMI_SIZE="2")
    assert done.returncode == 1 and "one of several ranks already" in done.stderr


def test_no_such_launcher(script):
    done = mpicoll_run("--launcher", "mpirum", script, "end")
    assert done.returncode == 1 and "no such launcher: mpirum" in done.stderr


def test_no_mpi(script):
    done = mpicoll_run("-n", "2", script, "end", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert done.returncode == 1 and "does not load an MPI" in done.stderr and "Traceback" not in done.stderr


def fake_launcher(folder, words):
    """A launcher of another MPI: it starts processes that do not find each other."""
    path = folder / "mpirun"
    path.write_text(
        f"#!/bin/sh\nif [ \"$1\" = --version ]; then printf '{words}'; exit; fi\n"
        'while [ "$1" != -n ]; do shift; done; n=$2; shift 2\n'
        'for i in $(seq "$n"); do "$@" & done; wait\n'
    )
    path.chmod(0o755)
    return str(path)


OTHERS = {"openmpi": "HYDRA build details:\\n    Version:   9.9\\n", "mpich": "mpirun (Open MPI) 9.9\\n"}


def test_another_mpis_launcher_is_refused(script, tmp_path):
    from mpicoll.cli import launcher, probe

    loaded = launcher.library(probe.loaded()["library"])
    fake = fake_launcher(tmp_path, OTHERS[loaded.family])
    done = mpicoll_run("-n", "2", "--launcher", fake, script, "end")
    assert done.returncode == 1 and "rank 0 of 1" in done.stderr and "size" not in done.stdout
    # in front of the PATH it is passed over
    done = mpicoll_run("-n", "2", script, "end", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout.splitlines() == ["size 2 1"] * 2


def test_what_was_told_is_shown_where_the_job_is_stopped(tmp_path):
    rank_waits = {"MPICOLL_FOLD": "60"}
    path = tmp_path / "fail.py"
    path.write_text(
        "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 1: raise ValueError('early')\nMPI.COMM_WORLD.recv()\n"
    )
    done = mpicoll_run("-n", "2", "--timeout", "15", str(path), **rank_waits)
    assert done.returncode == 124 and "rank 1 of 2: Traceback" in done.stderr


def test_no_number_of_seconds(script):
    done = mpicoll_run("-n", "2", script, "end", MPICOLL_FOLD="soon")
    assert done.returncode == 1 and "MPICOLL_FOLD=soon: expected a number from 0" in done.stderr
    done = mpicoll_run("-n", "2", script, "end", MPICOLL_FOLD="inf")
    assert done.returncode == 1 and "MPICOLL_FOLD=inf: expected at most 3600 seconds" in done.stderr


def test_supervise_kills_what_the_launcher_leaves_behind(tmp_path):
    mark = tmp_path / "pid"
    code = supervise(["sh", "-c", f"setsid sleep 60 & echo $! > {mark}; exit 5"], os.environ)
    assert code == 5 and not alive(int(mark.read_text()))
