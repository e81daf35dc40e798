"""Which MPI is this, and which launcher belongs to it: what strings and paths say, nothing executed.

A launcher of another MPI than the one mpi4py loads does not fail: it starts N processes that are each rank 0
of 1. So both are named and compared before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TITLES = {
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intel": "Intel MPI",
    "mvapich": "MVAPICH",
    "cray": "Cray MPICH",
    "slurm": "Slurm",
    "unknown": "an unknown MPI",
}

# First match wins: MPICH's descendants name MPICH too.
LIBRARIES = (
    ("openmpi", r"Open MPI v?([\d.]+\w*)"),
    ("intel", r"Intel\(R\) MPI Library v?([\d.]+)"),
    ("mvapich", r"MVAPICH2?\S* Version\s*:?\s*([\d.]+\w*)"),
    ("cray", r"CRAY MPICH version ([\d.]+)"),
    ("mpich", r"MPICH Version:\s*([\d.]+\w*)"),
)
LAUNCHERS = (
    ("openmpi", r"\(Open ?(?:MPI|RTE)\) ([\d.]+\w*)"),
    ("openmpi", r"\(PRRTE\) ([\d.]+\w*)"),
    ("intel", r"Intel\(R\) MPI Library.*?Version ([\d.]+)"),
    ("mvapich", r"MVAPICH2?\S* Version\s*:?\s*([\d.]+\w*)"),
    ("cray", r"(?:PALS|aprun|ALPS)\D*([\d.]+)"),
    ("slurm", r"slurm(?:-\w+)? ([\d.]+)"),
    ("mpich", r"HYDRA build details:\s*Version:\s*([\d.]+\w*)"),
)
# Hydra speaks PMI-1 to all of MPICH's family.
FAMILY = {"mpich": "mpich", "intel": "mpich", "mvapich": "mpich", "cray": "mpich"}
NAMES = (
    "mpirun",
    "mpiexec",
    "mpirun.openmpi",
    "mpiexec.openmpi",
    "mpiexec.hydra",
    "mpirun.mpich",
    "mpiexec.mpich",
)


@dataclass(frozen=True)
class Mpi:
    """An MPI implementation, as its library or its launcher names itself."""

    name: str
    version: str = ""

    def __str__(self) -> str:
        return f"{TITLES[self.name]} {self.version}".rstrip()

    @property
    def family(self) -> str:
        """MPIs of one family can be started by each other's launchers."""
        return FAMILY.get(self.name, self.name)


def _first(patterns: Sequence[tuple[str, str]], text: str) -> Mpi:
    for name, pattern in patterns:
        found = re.search(pattern, text, re.DOTALL)
        if found:
            return Mpi(name, found.group(1))
    return Mpi("unknown")


def library(text: str) -> Mpi:
    """The MPI that wrote this library version string."""
    return _first(LIBRARIES, text)


def launcher(text: str) -> Mpi:
    """The MPI whose launcher printed this for ``--version``."""
    return _first(LAUNCHERS, text)


def serves(starter: Mpi, loaded: Mpi) -> bool:
    """Whether ranks started so and linked to `loaded` will find each other."""
    return starter.name == "slurm" or starter.family == loaded.family != "unknown"


def candidates(libmpi: str | None, python: str, path: str) -> Iterator[Path]:
    """Launchers to consider: beside the library that is loaded, beside the Python, then on the PATH."""
    folders = []
    if libmpi:
        # .../lib/libmpi.so, .../lib64/openmpi/lib/libmpi.so, /usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so
        folders += [parent / "bin" for parent in Path(libmpi).parents[1:-1]]
        folders += [Path("/usr/bin")] if libmpi.startswith("/usr/lib") else []
    folders += [Path(python).parent, *map(Path, filter(None, path.split(":")))]
    for folder in dict.fromkeys(folders):
        for name in NAMES:
            if (folder / name).is_file():
                yield folder / name


@dataclass(frozen=True)
class Allocation:
    """What a batch scheduler gave to this job."""

    scheduler: str
    tasks: int
    nodes: int = 1


def per_node(text: str) -> list[int]:
    """Slurm's compressed counts: ``"4(x2),2"`` is 4, 4, 2."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The scheduler's allocation this process runs in, from the environment."""
    if "SLURM_JOB_ID" in environ:
        cpus = per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))
        tasks = int(environ.get("SLURM_NTASKS") or sum(cpus))
        return Allocation("Slurm", tasks, int(environ.get("SLURM_JOB_NUM_NODES", len(cpus))))
    if "LSB_JOBID" in environ:
        return Allocation("LSF", int(environ.get("LSB_DJOB_NUMPROC", "1")))
    if "PBS_NODEFILE" in environ:
        lines = Path(environ["PBS_NODEFILE"]).read_text().split()
        return Allocation("PBS", len(lines), len(set(lines)))
    return None


def launched(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several ranks; a shell by ``srun --pty`` is one, but alone."""
    sizes = [environ.get("OMPI_COMM_WORLD_SIZE"), environ.get("PMI_SIZE")]
    if "PMIX_RANK" in environ:
        sizes.append(environ.get("SLURM_STEP_NUM_TASKS"))
    return any(size not in (None, "1") for size in sizes)


def slurm_plugin(loaded: Mpi, listing: str) -> str | None:
    """The ``--mpi=`` value with which srun starts ranks of this MPI, from ``srun --mpi=list``."""
    offered = set(re.findall(r"\w+", listing.lower()))
    # Intel MPI would need I_MPI_PMI_LIBRARY as well: its own mpiexec starts through Slurm without
    wanted = {"openmpi": "pmix", "mpich": "pmi2", "mvapich": "pmi2", "cray": "cray_shasta"}.get(loaded.name)
    return wanted if wanted in offered else None
