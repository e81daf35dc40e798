"""``mpicoll slurm``: batch scripts from a site's profile, submitted and watched."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mpicoll import slurm
from mpicoll.cli.values import Finite
from mpicoll.slurm.profile import override

FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def command() -> None:
    """Render batch scripts for Slurm, submit and watch them."""


def _listed() -> str:
    """The templates, for the help."""
    return "\n".join(f"  {name:<11} {template.title}" for name, template in slurm.TEMPLATES.items())


@command.command(epilog=f"\b\nTemplates:\n{_listed()}")
@click.argument("template", type=click.Choice(list(slurm.TEMPLATES)), metavar="TEMPLATE")
@click.option("--profile", type=FILE, required=True, help="The site and the job: a TOML or JSON file.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a value of the profile.")
@click.option("-o", "--output", type=FILE, help="Write it there instead of printing it.")
def render(template: str, profile: Path, changes: tuple[str, ...], output: Path | None) -> None:
    """Print the batch script of a template.

    Every line of it says what it is for. Values of the profile are checked and quoted: none can become a
    command.
    """
    try:
        text = slurm.render(template, slurm.load(profile, dict(map(override, changes))))
        if output:
            output.write_text(text, encoding="utf-8")
    except (slurm.ProfileError, OSError) as error:
        raise click.ClickException(str(error)) from None
    if not output:
        click.echo(text, nl=False)


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=FILE)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[SBATCH OPTIONS]...")
@click.option("--links", type=click.IntRange(1), default=1, help="Submit so many jobs, one after the other.")
@click.option("--after-any", is_flag=True, help="Go on with the next link after one that failed, too.")
@click.option("--watch", "watched", is_flag=True, help="Watch it; of several the last.")
def submit(script: Path, options: tuple[str, ...], links: int, after_any: bool, watched: bool) -> None:
    """Submit a batch script, once it has been checked.

    Refused are, beside what `sbatch --test-only` refuses: #SBATCH lines after the first command, which sbatch
    ignores, and dependencies on jobs that Slurm does not know, which it takes for done.
    """
    try:
        after = "afterany" if after_any else "afterok"
        ids = slurm.submit(script, options, links=links, after=after)
    except slurm.ScriptError as error:
        raise click.ClickException(str(error)) from None
    for job in ids:
        click.echo(job)
    if watched:
        _watch(ids[-1], quiet=False, pause=2.0)


@command.command()
@click.argument("job", type=click.IntRange(1))
@click.option("--quiet", is_flag=True, help="Do not show the job's output.")
@click.option("--every", type=Finite(0.1), default=2.0, show_default=True, metavar="SECONDS",
              help="How often to ask Slurm.")  # fmt: skip
def watch(job: int, quiet: bool, every: float) -> None:
    """Follow a job, through requeues, until it has ended; the exit code is the job's."""
    _watch(job, quiet, every)


def _watch(job: int, quiet: bool, pause: float) -> None:
    def say(line: str) -> None:
        click.echo(f"mpicoll slurm: {line}", err=True)

    try:
        code = slurm.watch(job, say, None if quiet else click.echo, pause)
    except slurm.ScriptError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        say(f"{job} goes on; look again with: mpicoll slurm watch {job}")
        code = 130
    sys.exit(code)
