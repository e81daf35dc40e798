"""Draw plans: who sends which chunk to whom in every round, and what every rank holds after it.

Pictures are made of a `Trace` (see `mpicoll.verify.trace`), as text or as SVG. A broken plan is drawn up to
its fault, which is marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from textwrap import wrap
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from .algorithms import REDUCTIONS
from .plan import OUT, TMP, Buffer, pieces
from .trace import Message, Trace, Value, ranks_of, runs_in_words

__all__ = ["ASCII", "svg", "text"]

# For terminals without Unicode: `text(trace).translate(ASCII)`.
ASCII: Final = str.maketrans(dict(zip("─│┼▶⊕·→✗×", "-|+>+.>xx", strict=True)))


RULE: Final = "─"


class Cell(NamedTuple):
    """What a chunk of a rank holds, in words and as a part of the result, and what has become of it.

    The mark is "+" (reduced in this round), ">" (stored), "!" (here is the fault) or " " (as it was).
    """

    words: str
    full: float
    mark: str


class Frame(NamedTuple):
    """A moment: the messages that end in it, and each rank's cells after it, by buffer."""

    time: int
    messages: list[Message]
    cells: dict[Buffer, list[list[Cell]]]


def text(trace: Trace, width: int = 100) -> str:
    """Draw a trace as a table with a column for each rank; with a line for each where that is too wide.

    Parameters
    ----------
    trace
        From `mpicoll.verify.trace`.
    width
        The characters in a line.
    """
    frames = list(_frames(trace))
    lines = list(_columns(trace, frames))
    if max(map(len, lines)) > width:
        lines = list(_rows(trace, frames))
    drawing = [*_heading(trace), "", *lines, "", *_footing(trace)]
    return "\n".join(line.rstrip() for line in drawing) + "\n"


def _frames(trace: Trace) -> Iterator[Frame]:
    """Yield the start and then every round, up to the end or the fault."""
    states, heard = list(trace.start), [1 << rank for rank in range(trace.size)]
    scratch = 1 + max((c for landing in trace.landings for c in landing.state[TMP]), default=-1)
    for time in range(trace.time + 1):
        before = list(states)
        for landing in trace.landings:
            if landing.time == time:
                states[landing.rank], heard[landing.rank] = landing.state, landing.heard
        fault = trace.error if time == trace.time else None
        if fault is not None and fault.rank is not None:
            states[fault.rank] = trace.end[fault.rank]
        messages = [message for message in trace.messages if message.time == time]
        cells: dict[Buffer, list[list[Cell]]] = {OUT: [], TMP: []}
        for rank, (old, new) in enumerate(zip(before if time else states, states, strict=True)):
            cells[OUT].append([_cell(trace, old[OUT].get(c), new[OUT].get(c)) for c in range(trace.chunks)])
            cells[TMP].append([_cell(trace, old[TMP].get(c), new[TMP].get(c)) for c in range(scratch)])
            if trace.collective == "barrier":
                full = heard[rank].bit_count() / trace.size
                cells[OUT][rank] = [Cell(arcs_in_words(heard[rank], trace.size), full, " ")]
        for buf, rank, c in [
            (m.recv.buf, m.target, c) for m in messages if not m.recv.reduce for c in m.recv.chunks
        ]:
            _mark(cells[buf], rank, c, ">")
        if fault is not None:
            _mark(cells[OUT], fault.rank, fault.chunk, "!")
        yield Frame(time, messages, cells)


def _mark(cells: list[list[Cell]], rank: int | None, chunk: int | None, mark: str) -> None:
    if rank is not None and chunk is not None and chunk < len(cells[rank]):
        cells[rank][chunk] = cells[rank][chunk]._replace(mark=mark)


def _cell(trace: Trace, old: Value | None, new: Value | None) -> Cell:
    if new is None:
        return Cell("·", 0.0, " ")
    words, full = str(new.key), 1.0
    if trace.collective in REDUCTIONS:
        words, full = arcs_in_words(new.ranks, trace.size), new.ranks.bit_count() / trace.size
    elif trace.collective == "alltoall":
        words = f"{new.key // trace.size}→{new.key % trace.size}"
    grown = old is not None and old.ranks != new.ranks == new.ranks | old.ranks
    return Cell(words, full, " " if new == old else "+" if grown else ">")


def _columns(trace: Trace, frames: list[Frame]) -> Iterator[str]:
    """Yield the lines of a table with a column for each rank."""
    wide, ranks = _widest(frames), range(trace.size)
    table: list[tuple[str, list[str]]] = [("", [f"rank {rank}" for rank in ranks])]
    if trace.chunks:
        numbers = _line([Cell(str(c), 0, " ") for c in range(trace.chunks)], wide)
        table.append(("chunk", [numbers for _ in ranks]))
    for frame in frames:
        sends = [_sends(frame, rank) for rank in ranks]
        lines = [("", list(line)) for line in zip_longest(*sends, fillvalue="")]
        for buf, cells in frame.cells.items():
            if any(cells):
                lines.append(("TMP" if buf == TMP else "", [_line(cell, wide) for cell in cells]))
        table += [(RULE, []), (_name(frame), lines[0][1]), *lines[1:]]
    labels = max(len(label) for label, _ in table)
    widths = [max(len(columns[rank]) for _, columns in table if columns) for rank in ranks]
    for label, columns in table:
        if label == RULE:
            yield "─┼─".join([RULE * labels, *(RULE * width for width in widths)])
        else:
            parts = [cell.ljust(width) for cell, width in zip(columns, widths, strict=True)]
            yield " │ ".join([label.ljust(labels), *parts])


def _rows(trace: Trace, frames: list[Frame]) -> Iterator[str]:
    """Yield the lines of a list of rounds with a line for each rank."""
    wide = _widest(frames)
    names = [f"rank {rank}" for rank in range(trace.size)]
    sends = [[", ".join(_sends(frame, rank)) for rank in range(trace.size)] for frame in frames]
    room = max(len(words) for frame in sends for words in frame)
    for frame, words in zip(frames, sends, strict=True):
        yield _name(frame)
        for rank, name in enumerate(names):
            held = [_line(cells[rank], wide) for cells in frame.cells.values() if cells[rank]]
            yield " │ ".join([f"  {name.ljust(len(names[-1]))}", words[rank].ljust(room), *held])


def _name(frame: Frame) -> str:
    return f"round {frame.time}" if frame.time else "start"


def _widest(frames: list[Frame]) -> int:
    return max(len(c.words) for f in frames for cells in f.cells.values() for row in cells for c in row)


def _line(cells: list[Cell], width: int) -> str:
    return " ".join(cell.mark + cell.words.ljust(width) for cell in cells).rstrip()


def _sends(frame: Frame, rank: int) -> list[str]:
    """Return what a rank sends, a line for all messages with the same chunks."""
    targets: dict[str, list[int]] = {}
    for message in frame.messages:
        if message.source == rank:
            buf = "" if message.send.buf == OUT else f"{message.send.buf.upper()} "
            chunks = runs_in_words(message.send.chunks) or "·"
            arrow = "─⊕" if message.recv.reduce else "─▶"
            targets.setdefault(f"{buf}{chunks} {arrow}", []).append(message.target)
    return [f"{what} {runs_in_words(sorted(ranks))}" for what, ranks in targets.items()]


def arcs_in_words(mask: int, size: int) -> str:
    """Write a set of ranks compactly; ranks that are next to each other on the circle are one run.

    >>> arcs_in_words(0b1001, 4), arcs_in_words(0b1111, 4), arcs_in_words(0b0101, 4)
    ('3-0', '0-3', '0,2')
    """
    runs = [(run.start, run.stop - 1) for run in pieces(ranks_of(mask))]
    if len(runs) > 1 and runs[0][0] == 0 and runs[-1][1] == size - 1:
        runs = [*runs[1:-1], (runs[-1][0], runs[0][1])]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _heading(trace: Trace) -> list[str]:
    lines = [f"{trace.collective} {trace.name} on {_plural(trace.size, 'rank')}"]
    report = trace.report
    if report is not None:
        most = float(max(report.volumes))
        volume = f", the busiest rank sends {most:.4g} × the vector" if most else ""
        lines.append(f"{_plural(report.rounds, 'round')}, {_plural(report.messages, 'message')}{volume}")
        if trace.collective in REDUCTIONS:
            order = "keeps operand order" if report.ordered else "commutative operators only"
            lines.append(f"{order}, {'the same' if report.same_bits else 'DIFFERENT'} bits on every rank")
    return lines


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _footing(trace: Trace) -> list[str]:
    arrows = "2 ─▶ 3: chunk 2 goes to rank 3, which stores it (>)"
    if trace.collective == "barrier":
        lines = ["· ─▶ 3: a signal goes to rank 3. Cells: the ranks that are known to have begun."]
    elif trace.collective in REDUCTIONS:
        cells = "Cells: the ranks whose contributions a chunk holds; 3-1 is 3, ..., 0, 1."
        lines = [f"{arrows}; ─⊕: reduces it (+).", cells]
    elif trace.collective == "alltoall":
        lines = [f"{arrows}.", "Cells: a→b is the chunk from rank a to rank b."]
    else:
        lines = [f"{arrows}. Cells: the chunk that is there, or none."]
    return lines if trace.error is None else [*lines, "", f"✗ {trace.error}"]


def svg(trace: Trace) -> str:
    """Draw a trace as an SVG picture: time runs downwards, arrows lead from chunk to chunk."""
    frames = list(_frames(trace))
    count = len(frames[0].cells[OUT][0])
    wide, high, step, left = max(28, 12 + 7 * _widest(frames)), 26, 78, 84
    column = count * wide + 30
    width = left + trace.size * column
    title, *notes = _heading(trace)
    style = "note" if trace.error is None else "fault"
    if trace.error is not None:
        notes = wrap(f"✗ {trace.error}", max(60, width // 7 - 5))
    top = 114 + 18 * max(0, len(notes) - 2)

    def middle(rank: int, run: range) -> float:
        """Return the x of a run of chunks; scratch chunks are drawn where theirs of the vector are."""
        return left + rank * column + (run.start % count + len(run) / 2) * wide

    parts = [
        _label(16, 28, title, "title"),
        *(_label(16, 50 + 18 * i, n, style) for i, n in enumerate(notes)),
    ]
    parts += [_label(left + rank * column, top - 12, f"rank {rank}", "name") for rank in range(trace.size)]
    for frame in frames:
        y = top + frame.time * step
        parts.append(_label(16, y + 17, _name(frame), "name"))
        for rank, cells in enumerate(frame.cells[OUT]):
            for i, cell in enumerate(cells):
                parts.append(_box(left + rank * column + i * wide, y, wide, high, cell))
        for m in frame.messages:
            kind = "reduce" if m.recv.reduce else "store"
            # A signal of a barrier has no chunks: it is drawn as one.
            for a, b in zip(pieces(m.send.chunks or (0,)), pieces(m.recv.chunks or (0,)), strict=False):
                x1, x2, y1, y2 = middle(m.source, a), middle(m.target, b), y - step + high + 1, y - 2
                parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>')
    height = top + (len(frames) - 1) * step + high + 16
    width = max(width, 32 + 7 * max(map(len, notes)))
    return SVG.format(width=width, height=height, body="\n".join(parts))


def _label(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(words)}</text>'


def _box(x: float, y: float, wide: float, high: float, cell: Cell) -> str:
    """Draw a chunk: green when it holds the whole result, a deeper blue the more it holds before."""
    part = [round(255 - (255 - full) * 0.6 * cell.full) for full in (90, 160, 250)]
    fill = "#b7e4c7" if cell.full == 1 else "#" + "".join(f"{tone:02x}" for tone in part)
    style = {"!": "cell broken", " ": "cell"}.get(cell.mark, "cell new")
    box = f'x="{x:g}" y="{y:g}" width="{wide - 2:g}" height="{high:g}" rx="3" fill="{fill}"'
    return f'<rect {box} class="{style}"/>' + _label(x + wide / 2 - 1, y + 17, cell.words, "held")


SVG: Final = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" font-family="sans-serif" font-size="13">
<style>
.title {{ font-size: 18px; font-weight: bold }}
.name {{ font-weight: bold; fill: #333 }}
.note {{ fill: #555 }}
.fault {{ fill: #c1121f; font-weight: bold }}
.held {{ text-anchor: middle; font-size: 12px }}
.cell {{ stroke: #adb5bd }}
.new {{ stroke: #333; stroke-width: 2 }}
.broken {{ stroke: #c1121f; stroke-width: 3 }}
line {{ stroke-width: 1.6 }}
.reduce {{ stroke: #1d6fb8; marker-end: url(#reduced) }}
.store {{ stroke: #2d8a55; marker-end: url(#stored) }}
</style>
<marker id="reduced" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">\
<path d="M0 0 L8 4 L0 8 z" fill="#1d6fb8"/></marker>
<marker id="stored" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">\
<path d="M0 0 L8 4 L0 8 z" fill="#2d8a55"/></marker>
<rect width="100%" height="100%" fill="#fff"/>
{body}
</svg>
"""
