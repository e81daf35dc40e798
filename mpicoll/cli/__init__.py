"""The ``mpicoll`` command: each sub-command is a module of this package, loaded when it is asked for.

Nothing here imports mpi4py: ``draw``, ``run`` and ``doctor`` work where no MPI is installed, or a broken one.
"""

from __future__ import annotations

import importlib

import click

from mpicoll import __version__

COMMANDS = ("run", "doctor", "bench", "bench-step", "draw", "slurm")


class LazyGroup(click.Group):
    """A group whose sub-commands live in modules of their own name, as ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Sub-commands in the order a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the sub-command's module."""
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"mpicoll.cli.{name.replace('-', '_')}").command
        return command


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpicoll")
def main() -> None:
    """MPI collectives made for training: run, look, measure."""
