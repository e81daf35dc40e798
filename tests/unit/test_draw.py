"""Pictures of plans, from Python and from the command line."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from mpicoll.cli.draw import command
from mpicoll.plans.algorithms import Algorithm, get, registry
from mpicoll.plans.draw import ASCII, arcs_in_words, svg, text
from mpicoll.plans.plan import LEFT, RIGHT, Recv, Send
from mpicoll.plans.verify import check, trace

RING = """\
allreduce ring on 3 ranks
4 rounds, 12 messages, the busiest rank sends 1.333 × the vector
commutative operators only, the same bits on every rank

        │ rank 0         │ rank 1         │ rank 2
chunk   │  0    1    2   │  0    1    2   │  0    1    2
────────┼────────────────┼────────────────┼───────────────
start   │  0    0    0   │  1    1    1   │  2    2    2
────────┼────────────────┼────────────────┼───────────────
round 1 │ 2 ─⊕ 1         │ 0 ─⊕ 2         │ 1 ─⊕ 0
        │  0   +2-0  0   │  1    1   +0-1 │ +1-2  2    2
────────┼────────────────┼────────────────┼───────────────
round 2 │ 1 ─⊕ 1         │ 2 ─⊕ 2         │ 0 ─⊕ 0
        │ +0-2  2-0  0   │  1   +0-2  0-1 │  1-2  2   +0-2
────────┼────────────────┼────────────────┼───────────────
round 3 │ 0 ─▶ 1         │ 1 ─▶ 2         │ 2 ─▶ 0
        │  0-2  2-0 >0-2 │ >0-2  0-2  0-1 │  1-2 >0-2  0-2
────────┼────────────────┼────────────────┼───────────────
round 4 │ 2 ─▶ 1         │ 0 ─▶ 2         │ 1 ─▶ 0
        │  0-2 >0-2  0-2 │  0-2  0-2 >0-2 │ >0-2  0-2  0-2

2 ─▶ 3: chunk 2 goes to rank 3, which stores it (>); ─⊕: reduces it (+).
Cells: the ranks whose contributions a chunk holds; 3-1 is 3, ..., 0, 1.
"""

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted([*(DOCS / "algorithms").glob("*.md"), DOCS / "adding-an-algorithm.md"])

DRAWN = [
    (entry, size)
    for entries in registry.values()
    for entry in entries.values()
    for size in (1, 2, 4, 7, 8)
    if entry.function and not entry.unmet(size, nodes=[list(range(size))])
]


def draw(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_a_ring_looks_like_this():
    assert text(trace(get("allreduce", "ring"), 3)) == RING


def test_a_ring_of_four_fits_a_terminal():
    lines = text(trace(get("allreduce", "ring"), 4)).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("round") for line in lines) == 6


@pytest.mark.parametrize(("algorithm", "size"), DRAWN, ids=str)
def test_everything_can_be_drawn(algorithm, size):
    picture = trace(algorithm, size, segments=2, root=size - 1, nodes=[list(range(size))])
    drawing = text(picture)
    assert f"round {picture.report.rounds}" in drawing or picture.report.rounds == 0
    assert f"round {picture.report.rounds + 1}" not in drawing
    assert ElementTree.fromstring(svg(picture)).tag.endswith("svg")
    assert drawing.translate(ASCII).isascii()


def test_too_many_columns_become_lines():
    drawing = text(trace(get("allreduce", "ring"), 12))
    assert "\n  rank 11 │ 10 ─⊕ 0  │" in drawing
    assert text(trace(get("allreduce", "ring"), 3), width=40).count("\n  rank 2") == 5


def test_scratch_and_send_buffer_are_shown():
    drawing = text(trace(get("alltoall", "bruck"), 4))
    assert "TMP 2-3 ─▶ 0" in drawing and "\nTMP     │  0→0" in drawing
    assert "IN 1 ─▶ 1" in text(trace(get("alltoall", "pairwise"), 3))


def test_several_messages_in_a_round():
    drawing = text(trace(get("allreduce", "direct"), 3))
    assert "round 1 │ 1 ─⊕ 1" in drawing and "        │ 2 ─⊕ 2" in drawing
    assert "0 ─▶ 1-2" in drawing


@pytest.mark.parametrize(
    ("ranks", "size", "words"),
    [
        ([3, 0], 4, "3-0"),
        ([0, 1, 2, 3], 4, "0-3"),
        ([0, 2], 4, "0,2"),
        ([2], 4, "2"),
        ([0, 1, 3, 5], 6, "3,5-1"),
    ],
)
def test_sets_of_ranks(ranks, size, words):
    assert arcs_in_words(sum(1 << rank for rank in ranks), size) == words


def twice_round(rank, size):
    left, right = (rank - 1) % size, (rank + 1) % size
    for hop in range(size):
        yield [Send(right, (rank - hop) % size), Recv(left, (left - hop) % size, reduce=True)]


def test_a_broken_plan_is_drawn_up_to_its_fault():
    picture = trace(Algorithm("allreduce", "broken", twice_round, True), 4)
    lines = text(picture).splitlines()
    assert lines[-1] == "✗ rank 1, round 4, chunk 1: counts the contribution of rank 1 twice"
    assert "round 4" in lines[-7] and "!1 " in lines[-6].split("│")[2]
    assert 'class="cell broken"' in svg(picture) and "twice" in svg(picture)


def test_a_plan_that_fails_at_once_is_drawn_too():
    def nothing(rank, size):
        raise KeyError("lost")
        yield

    assert "✗ rank 0, round 1: the plan raises KeyError: 'lost'" in text(
        trace(Algorithm("bcast", "nothing", nothing), 3)
    )


def test_bits_that_differ_are_pointed_out():
    def careless(rank, size):
        others = [(rank - hop) % size for hop in range(1, size)]
        yield [Send(peer, 0) for peer in others] + [Recv(peer, 0, reduce=True) for peer in others]

    assert "DIFFERENT bits" in text(trace(Algorithm("allreduce", "x", careless, True, cut=1), 3))


def test_command():
    result = draw("allreduce", "ring", "-P", 3)
    assert (result.exit_code, result.output) == (0, RING)


def test_command_passes_options_on():
    assert "2 ─▶ 0" in draw("bcast", "chain", "-P", 3, "--root", 2, "--segments", 3).output
    assert "split_rail on 6 ranks" in draw("allreduce", "split_rail", "--nodes", "2,3,1").output


def test_command_lists_algorithms():
    result = draw("reduce_scatter")
    assert result.exit_code == 0
    assert "recursive_halving" in result.output and "Needs a power of two" in result.output


def test_command_writes_a_file(tmp_path):
    file = tmp_path / "ring.svg"
    result = draw("allreduce", "ring", "--format", "svg", "-o", file)
    assert (result.exit_code, result.output) == (0, "")
    assert ElementTree.parse(file).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["allredcue", "ring"], 1, "no collective 'allredcue' (did you mean 'allreduce'?)"),
        (["allreduce", "rign"], 1, "no allreduce algorithm 'rign' (did you mean 'ring'?)"),
        (["allgather", "recursive_doubling", "-P", "6"], 1, "needs a power of two, not 6"),
        (["allreduce", "split_rail"], 1, "needs to know the ranks of every node"),
        (["allreduce", "split_rail", "--nodes", "2,x"], 2, "'2,x' is not a list"),
        (["allreduce", "split_rail", "--nodes", "2,2", "-P", "5"], 1, "each of 5 ranks once"),
        (["allreduce", "native"], 1, "there is no plan to look at"),
        (["bcast", "binomial", "--root", "4"], 1, "root 4"),
        (["allreduce", "nowhere.py:f"], 1, "no file nowhere.py"),
        (["allreduce", "ring", "-P", "0"], 2, "0 is not in the range"),
    ],
)
def test_command_says_what_is_wrong(arguments, code, words):
    result = draw(*arguments)
    assert result.exit_code == code and words in result.output
    assert "Traceback" not in result.output


def test_command_says_what_is_wrong_in_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("def f(rank, size):\n    yield []\n    [].pop()\n1 / 0\n")
    output = draw("bcast", f"{tmp_path}/mine.py:f").output
    assert output.endswith(
        "mine.py cannot be imported: ZeroDivisionError: division by zero (mine.py, line 4)\n"
    )
    (tmp_path / "late.py").write_text("def f(rank, size):\n    yield []\n    [].pop()\n")
    output = draw("bcast", f"{tmp_path}/late.py:f").output
    assert output.endswith("raises IndexError: pop from empty list (late.py, line 3)\n")


def test_command_draws_what_its_file_is_called(tmp_path):
    assert draw("bcast", "direct", "-o", tmp_path / "direct.svg").exit_code == 0
    assert (tmp_path / "direct.svg").read_text().startswith("<svg")
    assert draw("bcast", "direct", "-o", tmp_path / "direct.txt").exit_code == 0
    assert (tmp_path / "direct.txt").read_text().startswith("bcast direct")
    result = draw("bcast", "direct", "-o", tmp_path / "nowhere" / "direct.svg")
    assert result.exit_code == 1 and "cannot write" in result.output


def test_a_plan_that_does_not_end_is_drawn_in_part(monkeypatch):
    monkeypatch.setattr("mpicoll.plans.interpret.ENDLESS_TRACED", 50)

    def plan(rank, size):
        while True:
            yield [Send(1 - rank, rank), Recv(1 - rank, 1 - rank)]

    drawing = text(trace(get("allgather", plan), 2))
    assert "does not end: it has more than 50 rounds" in drawing
    assert "round 10 " in drawing and "round 11" not in drawing


def test_command_draws_an_algorithm_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from mpicoll.plan import Recv, Send\n"
        "def swap(rank, size):\n"
        "    yield [Send(1 - rank, range(size)), Recv(1 - rank, range(size), reduce=True)]\n"
        "def half(rank, size):\n"
        "    if rank:\n"
        "        yield [Send(0, 0)]\n"
        "print = None.x\n"
    )
    result = draw("allreduce", f"{file}:swap", "-P", 2)
    assert result.exit_code == 1 and "AttributeError" in result.output
    file = file.rename(tmp_path / "other.py")
    file.write_text(file.read_text().replace("print = None.x\n", ""))
    result = draw("allreduce", f"{file}:swap", "-P", 2)
    assert result.exit_code == 0 and "allreduce swap on 2 ranks" in result.output
    result = draw("allreduce", f"{file}:half", "-P", 2)
    assert result.exit_code == 1
    assert "✗ rank 1, round 1, chunk 0: unmatched message" in result.output and "!1" in result.output


def test_nothing_here_needs_an_mpi():
    program = (
        "import sys; sys.modules['mpi4py'] = None; sys.modules['numpy'] = None\n"
        "from mpicoll.cli.draw import command; command(['allreduce', 'ring'])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "allreduce ring on 4 ranks" in result.stdout


def test_ordered_reductions_are_told_from_others():
    def swap(rank, size):
        peer = 1 - rank
        yield [Send(peer, 0), Recv(peer, 0, reduce=LEFT if peer < rank else RIGHT)]

    assert "keeps operand order" in text(trace(Algorithm("allreduce", "swap", swap, cut=1), 2))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_show_what_is_drawn(page, tmp_path, monkeypatch):
    """Refresh a page by running its commands again."""
    words = page.read_text()
    monkeypatch.chdir(tmp_path)
    program = re.search(r"```python\n(.*?)```", words, re.DOTALL)
    if program:
        Path("mine.py").write_text(program[1])
    for arguments, shown in re.findall(r"\$ mpicoll draw ([^\n]*)\n(.*?)```", words, re.DOTALL):
        assert draw(*arguments.split()).output == shown, f"mpicoll draw {arguments}"


def test_more_ranks_than_anybody_reads_are_refused():
    done = draw("allreduce", "ring", "-P", 65)
    assert done.exit_code != 0 and "64" in done.output


def test_help_is_laid_out_line_by_line():
    text = draw("--help").output
    assert "\b" not in text and "\n  mpicoll draw allreduce ring -P 4\n" in text


def test_the_picture_of_a_ring_is_up_to_date():
    """Refresh it with `mpicoll draw allreduce ring --format svg -o docs/algorithms/allreduce_ring.svg`."""
    assert (DOCS / "algorithms" / "allreduce_ring.svg").read_text() == svg(trace(get("allreduce", "ring"), 4))


def test_pages_list_every_algorithm():
    for collective, entries in registry.items():
        page = (DOCS / "algorithms" / f"{collective}.md").read_text()
        listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
        assert listed == [name for name in entries if name != "native"]


def test_the_page_on_adding_an_algorithm_holds(tmp_path, monkeypatch):
    words = (DOCS / "adding-an-algorithm.md").read_text()
    mine, verify, use, parts, named = re.findall(r"```python\n(.*?)```", words, re.DOTALL)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(mine)
    monkeypatch.setitem(registry, "allreduce", dict(registry["allreduce"]))
    exec(verify, {})
    (tmp_path / "parts.py").write_text(parts)
    for size in range(1, 25):
        assert check(get("allreduce", f"{tmp_path}/parts.py:grid"), size).sent == 2 * (size - 1)
    exec(named, {})
    assert trace(get("allreduce", "doubling"), 8).error is None
    broken = tmp_path / "broken.py"
    broken.write_text(mine.replace("if 2 * hop + 2 < size:", "if True:"))
    fault = re.search(r"^✗ .*\n", words, re.MULTILINE)[0]
    assert draw("allreduce", f"{broken}:both_ways", "-P", 4).output.endswith(fault)
    compile(use, "use.py", "exec")
