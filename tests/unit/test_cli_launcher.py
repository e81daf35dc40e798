"""What version strings, paths and environments say about an MPI."""

import pytest

from mpicoll.cli import launcher
from mpicoll.cli.launcher import Mpi

LIBRARIES = {
    "Open MPI v5.0.11, package: Open MPI user@localhost, ident: 5.0.11": "Open MPI 5.0.11",
    "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4": "Open MPI 4.1.4",
    "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n": "MPICH 5.0.2",
    "Intel(R) MPI Library 2021.18 for Linux* OS\n": "Intel MPI 2021.18",
    "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date : Wed Mar 02\n": "MVAPICH 2.3.7",
    "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)\n": "Cray MPICH 8.1.28.29",
    "Our own MPI, 1.0": "an unknown MPI",
}
LAUNCHERS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to\n": "Open MPI 5.0.11",
    "mpirun.real (OpenRTE) 4.0.3\n": "Open MPI 4.0.3",
    "prterun (PRRTE) 3.0.13\n": "Open MPI 3.0.13",
    "HYDRA build details:\n    Version:                                 5.0.2\n    Release": "MPICH 5.0.2",
    "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260410\n": "Intel MPI 2021.18",
    "slurm-wlm 22.05.8\n": "Slurm 22.05.8",
    "slurm 24.11.5\n": "Slurm 24.11.5",
    "no such option: --version": "an unknown MPI",
}


@pytest.mark.parametrize(("text", "expected"), LIBRARIES.items())
def test_library_names_itself(text, expected):
    assert str(launcher.library(text)) == expected


@pytest.mark.parametrize(("text", "expected"), LAUNCHERS.items())
def test_launcher_names_itself(text, expected):
    assert str(launcher.launcher(text)) == expected


@pytest.mark.parametrize(
    ("starter", "loaded", "expected"),
    [
        ("openmpi", "openmpi", True),
        ("openmpi", "mpich", False),
        ("mpich", "openmpi", False),
        ("mpich", "intel", True),
        ("slurm", "openmpi", True),
        ("unknown", "openmpi", False),
        ("unknown", "unknown", False),
    ],
)
def test_launchers_serve_their_family(starter, loaded, expected):
    assert launcher.serves(Mpi(starter), Mpi(loaded)) is expected


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_the_launcher_beside_the_library_comes_first(tmp_path):
    site, venv = tmp_path / "opt/mpi", tmp_path / "venv"
    touch(site / "bin/mpirun", venv / "bin/mpiexec", tmp_path / "usr/mpirun")
    found = launcher.candidates(
        str(site / "lib/libmpi.so.40"), str(venv / "bin/python"), str(tmp_path / "usr")
    )
    assert list(found) == [site / "bin/mpirun", venv / "bin/mpiexec", tmp_path / "usr/mpirun"]


def test_no_launcher_anywhere(tmp_path):
    assert list(launcher.candidates(None, str(tmp_path / "python"), "")) == []


def test_slurm_counts():
    assert launcher.per_node("4(x2),2") == [4, 4, 2]
    assert launcher.per_node("16") == [16]


def test_allocations(tmp_path):
    assert launcher.allocation({}) is None
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "SLURM_JOB_NUM_NODES": "2"}
    assert launcher.allocation(slurm) == launcher.Allocation("Slurm", 8, 2)
    assert launcher.allocation({**slurm, "SLURM_NTASKS": "4"}) == launcher.Allocation("Slurm", 4, 2)
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nb\n")
    assert launcher.allocation({"PBS_NODEFILE": str(nodes)}) == launcher.Allocation("PBS", 4, 2)
    assert launcher.allocation({"LSB_JOBID": "1", "LSB_DJOB_NUMPROC": "3"}) == launcher.Allocation("LSF", 3)


@pytest.mark.parametrize(
    ("name", "listing", "plugin"),
    [
        ("openmpi", "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\n", "pmix"),
        ("mpich", "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\n", "pmi2"),
        ("openmpi", "MPI plugin types are...\n\tnone\n\tpmi2\n", None),
        ("cray", "MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n", "cray_shasta"),
        ("mpich", "MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n", "pmi2"),
        ("intel", "MPI plugin types are...\n\tnone\n\tpmi2\n", None),
    ],
)
def test_the_plugin_srun_needs(name, listing, plugin):
    assert launcher.slurm_plugin(Mpi(name), listing) == plugin


def test_a_rank_knows_that_it_is_one():
    assert launcher.launched({"PMI_RANK": "0", "PMI_SIZE": "2"})
    assert launcher.launched({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"})
    assert launcher.launched({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "4"})
    assert not launcher.launched({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert not launcher.launched({"PATH": "/bin"})
