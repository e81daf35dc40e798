"""``mpicoll draw``: show an algorithm round by round, as textbooks do."""

from __future__ import annotations

import re
import shutil
import sys

import click

from ..plans import draw
from ..plans.algorithms import Algorithm, Nodes, get, registry
from ..plans.algorithms.registry import load_entry_points
from ..plans.verify import trace

MOST_RANKS = 64  # rounds x ranks x chunks of a ring: 500,000 cells, which nobody reads
COLOURS = {"+": "yellow", ">": "cyan", "!": "red"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("collective", metavar="COLLECTIVE")
@click.argument("algorithm", metavar="[ALGORITHM | FILE.py:FUNCTION]", required=False)
@click.option("-P", "--ranks", "size", type=click.IntRange(1), help="Number of ranks.  [default: 4]")
@click.option(
    "--root", type=click.IntRange(0), default=0, show_default=True, help="Root of bcast and reduce."
)
@click.option("--segments", type=click.IntRange(1), help="Segments of pipelined algorithms.  [default: 2]")
@click.option("--nodes", "shape", metavar="N,N,...", help="Ranks on each node, for hierarchical algorithms.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "svg"]),
    help="[default: svg for a file.svg, otherwise text]",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, writable=True), help="File to write.")
def command(
    collective: str,
    algorithm: str | None,
    size: int | None,
    root: int,
    segments: int | None,
    shape: str | None,
    form: str | None,
    output: str | None,
) -> None:
    """Draw an algorithm round by round: who sends which chunk to whom, and what every rank then holds.

    The algorithm is verified while it is drawn. A broken one is drawn up to its fault, and the exit code is
    1. Without an algorithm, those of the collective are listed. No MPI is needed.

    \b
    mpicoll draw allreduce
    mpicoll draw allreduce ring -P 4
    mpicoll draw bcast circulant -P 5 --segments 3 --root 1
    mpicoll draw allreduce split_rail --nodes 2,3,1
    mpicoll draw allreduce mine.py:my_ring -o my_ring.svg
    """  # noqa: D301  click reads the \\b
    try:
        if algorithm is None:
            click.echo(_listing(collective))
            return
        chosen = get(collective, algorithm)
        nodes = _nodes(shape) if shape else None
        if "nodes" in chosen.takes and nodes is None:
            raise click.ClickException(f"{chosen} needs to know the ranks of every node: try --nodes 2,2")
        size = size or (sum(map(len, nodes)) if nodes else 4)
        if size > MOST_RANKS:
            raise click.ClickException(f"{size} ranks are more than a drawing holds; at most {MOST_RANKS}")
        picture = trace(chosen, size, root=root, segments=segments or 2, nodes=nodes)
    except click.ClickException:
        raise
    except Exception as error:  # a file with an algorithm may raise anything
        words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise click.ClickException(words) from error
    if form is None:
        form = "svg" if output is not None and output.endswith(".svg") else "text"
    width = max(100, shutil.get_terminal_size().columns) if output is None else 100
    drawing = draw.svg(picture) if form == "svg" else draw.text(picture, width)
    if output is not None:
        try:
            with open(output, "w", encoding="utf-8") as file:
                file.write(drawing)
        except OSError as error:
            raise click.ClickException(f"cannot write the drawing: {error}") from error
    else:
        click.echo(drawing if form == "svg" else _dressed(drawing), nl=False)
    if picture.error is not None:
        sys.exit(1)


def _nodes(shape: str) -> Nodes:
    """Read `2,3,1` as the ranks of three nodes."""
    try:
        counts = [int(count) for count in shape.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise click.BadParameter(f"{shape!r} is not a list of ranks per node such as 2,3,1")
    return [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]


def _listing(collective: str) -> str:
    """List the algorithms of a collective with the first line of what is said about them."""
    get(collective, "native")
    for lost in load_entry_points():
        click.echo(f"mpicoll draw: {lost}", err=True)
    lines = []
    for name, entry in registry[collective].items():
        what = (entry.function.__doc__ or "").strip() if entry.function else "The MPI library's own."
        lines.append(f"{name:<22} {(what or 'No description.').splitlines()[0]}{_needs(entry)}")
    return "\n".join(lines)


def _needs(entry: Algorithm) -> str:
    needs = [entry.sizes.words] if entry.sizes.words != "any number of ranks" else []
    needs += ["a commutative op"] if entry.commutative else []
    needs += ["--nodes"] if "nodes" in entry.takes else []
    return f" Needs {', '.join(needs)}." if needs else ""


def _dressed(drawing: str) -> str:
    """Colour what changed in a round (only a terminal shows it), and spare old ones what they cannot show."""
    try:
        drawing.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        drawing = drawing.translate(draw.ASCII)
    drawing = re.sub(
        r"(?<=[ │|])([+>!])([\d→>,-]+|[·.])",
        lambda cell: click.style(cell[0], fg=COLOURS[cell[1]], bold=True),
        drawing,
    )
    return re.sub(
        r"^(?:round \d+|start|✗.*)", lambda word: click.style(word[0], bold=True), drawing, flags=re.M
    )
