"""How a job is started: the launcher's flags, the settings, and the reason of each. Nothing is run here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from mpicoll.cli import fabric, launcher, probe
from mpicoll.cli.launcher import Allocation, Mpi

RANK_NBYTES = 20 << 20  # of memory that a rank does not share, once Python, NumPy and the MPI are there
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class Machine:
    """What the choice of settings depends on."""

    cores: int
    memory: int = 0  # bytes; 0 where nobody knows
    root: bool = False
    infiniband: bool = False
    terminal: int = 0  # its width, 0 where the output goes to a file
    allocation: Allocation | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """Look at the machine we run on."""
        terminal = shutil.get_terminal_size().columns if os.isatty(1) and os.isatty(2) else 0
        return cls(
            cores=min(probe.cores(), max(1, int(probe.quota() or probe.cores()))),
            memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            root=os.geteuid() == 0,
            infiniband=bool(fabric.names(Path("/", fabric.DEVICES))),
            terminal=terminal,
            allocation=launcher.allocation(os.environ),
            environ=os.environ,
        )


@dataclass
class Launch:
    """A command line, what is added to its environment, and why."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def tell(self, why: str, settings: Mapping[str, str] | None = None) -> None:
        """Add settings and one line that names them and their reason."""
        self.env.update(settings or {})
        words = " ".join(f"{name}={value}" for name, value in (settings or {}).items())
        self.told.append(f"{words}  ({why})" if words else why)


def prepare(
    path: str,
    starter: Mpi,
    loaded: Mpi,
    ranks: int,
    command: Sequence[str],
    machine: Machine,
    *,
    oversubscribe: bool = False,
    threads: int | None = None,
    plugin: str | None = None,
) -> Launch:
    """Compose the launch of `command` on `ranks` ranks, without running anything.

    `plugin` is the ``--mpi=`` value where the starter is Slurm's srun.
    """
    launch = Launch([path])
    launch.tell(f"{ranks} rank{'s' * (ranks > 1)} by {path} ({starter}); mpi4py loads {loaded}")
    given, allocated = machine.environ, machine.allocation
    slots = allocated.tasks if allocated else machine.cores
    nodes = allocated.nodes if allocated else 1
    crowded = ranks > slots
    if crowded and allocated and not oversubscribe:
        raise click.ClickException(
            f"{ranks} ranks, but the {allocated.scheduler} allocation has room for {slots}: "
            "ask the scheduler for more tasks, or pass --oversubscribe to share cores"
        )
    local = -(-ranks // nodes)  # ranks of the fullest node
    if not allocated and machine.memory and ranks * RANK_NBYTES > machine.memory:
        need, have = (f"{nbytes / (1 << 30):.1f} GiB" for nbytes in (ranks * RANK_NBYTES, machine.memory))
        raise click.ClickException(
            f"{ranks} ranks need {need} or more to start, and this machine has {have}: start fewer"
        )
    share = int(given.get("SLURM_CPUS_PER_TASK", 0)) or max(1, machine.cores // local)
    why = f"{machine.cores} cores / {local} ranks" + (" of a node" if nodes > 1 else "")
    if threads is None:
        wanted = next((name for name in THREADS if name in given), None)  # one library must not undo it
        each = given[wanted].split(",")[0] if wanted else str(share)  # OpenMP's may go level by level
        unset = {name: each for name in THREADS if name not in given}
        if unset:
            launch.tell(f"BLAS threads: {f'as in your {wanted}' if wanted else why}", unset)
    else:
        launch.tell("--threads", dict.fromkeys(THREADS, str(threads)))
    if machine.terminal:
        # Ranks write to a pipe of the launcher's; Rich and others draw progress bars when told so.
        settings = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": str(machine.terminal)}
        launch.tell("the ranks' output goes to this terminal", settings)
    if loaded.name == "openmpi":
        _open_mpi_library(launch, machine, machine.cores / local)
    if "SLURM_STEP_ID" in given:  # MPIs' own launchers start their daemons by srun
        launch.tell("inside a step of the job: share its cores, or wait for ever", {"SLURM_OVERLAP": "1"})
    if starter.name == "openmpi":
        _mpirun(launch, machine, crowded, one_core=machine.cores <= local)
        launch.argv += ["-n", str(ranks)]
        if nodes > 1:
            carried = [name for name in given if name.startswith("MPICOLL_") or name == "PYTHONPATH"]
            for name in [*launch.env, *carried]:  # it takes no environment to other nodes by itself
                launch.argv += ["-x", name]
    elif starter.name == "slurm":
        launch.argv += ["-n", str(ranks), "--kill-on-bad-exit=1", f"--mpi={plugin}"]
        launch.argv += ["--overcommit"] * crowded
    else:
        launch.argv += ["-n", str(ranks)]
    launch.argv += command
    return launch


def _open_mpi_library(launch: Launch, machine: Machine, cores_per_rank: float) -> None:
    """Settings that Open MPI's library reads, whoever starts the ranks."""
    wanted: dict[str, tuple[str, str]] = {}  # name -> value, why
    if cores_per_rank < 2:
        why = "fewer than 2 cores per rank: a waiting rank must not starve a working one"
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1", why
    if cores_per_rank < 1:
        # Seen on Linux 6.18: ranks that only yield kept the cores from the kernel's own threads for minutes,
        # and so from a rank that waited for one of them.
        why = "more ranks than cores: a waiting rank naps, since yielding may starve all else"
        wanted["OMPI_MCA_threads_pthreads_yield_strategy"] = "nanosleep", why
    if not machine.infiniband and machine.allocation is None:
        wanted["OMPI_MCA_osc"] = "^ucx", "no InfiniBand here: UCX windows would only print errors"
    for name, (value, why) in wanted.items():
        if name not in machine.environ:
            launch.tell(why, {name: value})


def _mpirun(launch: Launch, machine: Machine, crowded: bool, one_core: bool) -> None:
    """Flags of Open MPI's launcher."""
    if machine.root:
        settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        launch.tell("you are root", settings)
    if crowded and machine.allocation:
        # --oversubscribe alone would put all ranks on the first node
        launch.argv += ["--map-by", ":oversubscribe", "--bind-to", "none"]
        launch.tell(
            "--map-by :oversubscribe --bind-to none  (more ranks than the allocation's tasks, as asked)"
        )
    elif crowded:
        launch.argv += ["--oversubscribe"]
        launch.tell("--oversubscribe  (more ranks than cores)")
    elif not one_core and machine.allocation is None:
        launch.argv += ["--bind-to", "none"]
        launch.tell(
            "--bind-to none  (a rank's BLAS and progress threads need more than the one core of the default)"
        )
