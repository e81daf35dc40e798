"""``mpicoll bench-step``: what the other ranks cost a training step, and how much of it is hidden."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mpicoll.cli import results, results_step
from mpicoll.cli.launches import Program, keep_option, kept, launches_option, measured, save, show_option
from mpicoll.cli.values import Finite

SHOWN = {"table": results_step.as_table, "json": results.as_json, "markdown": results_step.as_markdown}
ITERS = {"overlap": 7, "overhead": 350}
OVERLAP_ONLY = ("compute", "seconds", "buckets", "bucket_mb")


class Seconds(click.ParamType):
    """Seconds, or ``comm``."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """A positive number, or the word as it is."""
        if value == "comm":
            return "comm"
        try:
            return Finite(0, 60, min_open=True).convert(value, param, ctx)
        except click.BadParameter as exc:
            self.fail(f"{exc.message.rstrip('.')}, nor comm", param, ctx)


def specification(ctx: click.Context, what: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the ranks are to measure; options of the other measurement are refused."""
    own = OVERLAP_ONLY if what == "overlap" else ("against",)
    for name in options:
        if name not in own and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name.replace('_', '-')} is no option of {what}")
    if options["against"] and importlib.util.find_spec("torch") is None:
        raise click.ClickException(
            "--against ddp compares with PyTorch, which is not installed: pip install torch"
        )
    return {"what": what, **{name: options[name] for name in own}}


# fmt: off
@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("what", type=click.Choice(list(ITERS)), required=False, metavar="[overlap|overhead]")
@click.option("-n", "--ranks", type=click.IntRange(2, 1_000_000), default=2, show_default=True,
              help="Ranks of a launch.")
@click.option("--threads", type=click.IntRange(1), help="BLAS threads per rank [default: cores / ranks].")
@click.option("--compute", type=click.Choice(["matmul", "sleep"]), default="matmul", show_default=True,
              help="Matrix products, or none, as where a device computes.")
@click.option("--seconds", type=Seconds(), default="0.02", show_default=True, metavar="SECONDS|comm",
              help="Compute of each bucket, to 60; comm: as long as its communication takes.")
@click.option("--buckets", type=click.IntRange(1, 1000), default=8, show_default=True,
              help="Buckets of a step.")
@click.option("--bucket-mb", type=Finite(0.001, 1 << 16), default=1, show_default=True,
              help="MiB of a bucket.")
@click.option("--against", type=click.Choice(["ddp"]),
              help="And the same network in PyTorch, with DistributedDataParallel over gloo.")
@click.option("--iters", type=click.IntRange(1, 1_000_000), help="Steps of each kind and launch "
              f"[default: {ITERS['overlap']}; pairs of overhead: {ITERS['overhead']}].")
@launches_option
@show_option
@click.option("--format", type=click.Choice(list(SHOWN)), default="table", show_default=True,
              help="What is printed.")
@keep_option
# fmt: on
@click.pass_context
def command(
    ctx: click.Context,
    what: str | None,
    ranks: int,
    threads: int | None,
    iters: int | None,
    launches: int,
    show: Path | None,
    format: str,
    keep: Path | None,
    **options: Any,
) -> None:
    """Measure training steps: blocking and overlapped ones, or steps with the other ranks and without.

    \b
    mpicoll bench-step overlap                     the share of the communication that is hidden
    mpicoll bench-step overlap --compute sleep     the same where a device computes
    mpicoll bench-step overhead                    what DistributedOptimizer adds to a short step
    mpicoll bench-step overhead --against ddp      and what PyTorch's DistributedDataParallel adds
    mpicoll bench-step --show kept.json            a kept result again
    """  # noqa: D301  click reads the \\b
    if show:
        result = kept(show, results.STEP_FORMAT)
    else:
        if what is None:
            raise click.UsageError("measure what? overlap or overhead")
        spec = {**specification(ctx, what, options), "iters": iters or ITERS[what]}
        packages = ("mpi4py", "numpy", *(["torch"] if options["against"] else []))
        program = Program(
            "mpicoll.cli.measure_step", results.STEP_FORMAT, 1, lambda line: "measured", packages
        )
        asked = ["-n", str(ranks), *(["--threads", str(threads)] if threads else [])]
        result = measured(program, spec, asked, launches)
    click.echo(SHOWN[format](result))
    if keep:
        save(result, keep)
    if results_step.wrong(result):
        raise click.ClickException("wrong values: averaged gradients or replicas are not what they should be")
