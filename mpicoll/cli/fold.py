"""An error that many ranks raise alike is told once: what a rank writes, and what becomes of that. Pure.

A rank that ends with an error writes its traceback to stderr as *records*: lines of a mark, a checksum, and
rank, size, part, parts and text as JSON. Every launcher brings stderr from every node, so nothing else is
needed, and a record that nobody folds can still be read.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence

MARK = b"\x1empicoll "
RECORD = re.compile(rb"\x1empicoll ([0-9a-f]{8}) (\[[^\n\x1e]*\])\n")
PART = (
    320  # characters: however they are escaped, a line is one atomic write to a pipe, of 4096 bytes at most
)
LOST = "\n[a part of this was lost]\n"
Parts = dict[tuple[int, int], tuple[int, int, str]]  # (rank, part): size, parts, text
# What launchers and libraries say of an abort; dropped where a record of that rank has said why.
ABORTS = re.compile(
    rb"-{74}\nMPI_ABORT was invoked on rank (\d+) in communicator .*\n(?:[^\n-].*\n|\n){1,8}-{74}\n"
    rb"|-{74}\n\w+ has exited due to process rank (\d+) with PID \d+ on\s+node \S+\s+calling\s+\"abort\""
    rb"(?:.*\n){1,4}?-{74}\n\0?"
    rb"|-{74}\n\w+ detected that one or more processes exited with non-zero status,\n"
    rb"thus causing the job .*\n\n +Process name: \[.*,(\d+)\]\n +Exit code: +\d+\n-{74}\n\0?"
    rb"|Abort\(-?\d+\) on node \d+ \(rank (\d+) in comm 0\): "
    rb"application called MPI_Abort\(.*\) - process \d+\n"
)


def records(rank: int, size: int, text: str) -> list[bytes]:
    """The lines with which a rank tells of its end; of no text it is one line too."""
    parts = [text[at : at + PART] for at in range(0, max(len(text), 1), PART)]
    bodies = [json.dumps([rank, size, number, len(parts), part]) for number, part in enumerate(parts)]
    return [b"%s%08x %s\n" % (MARK, zlib.crc32(body.encode()), body.encode()) for body in bodies]


class Fold:
    """The stderr of a job: passed on as it comes, but held back from a record on until it is time to fold."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.held = b""
        self.due = float("inf")
        self.told: set[int] = set()  # ranks whose records were shown

    def feed(self, data: bytes, now: float) -> bytes:
        """Take what came; return what can be shown at once."""
        if MARK in self.held[-len(MARK) :] + data or not self.held:
            self.due = now + self.patience
        text = self.held + data
        at = _marked(text)
        self.held = text[at:]
        return text[:at]

    def flush(self) -> bytes:
        """Return what was held back: errors first, each once, then the rest."""
        rest, self.held = self.held, b""
        parts: Parts = {}
        count = -1
        while len(parts) > count:  # records that came between the pieces of another one kept them apart
            count = len(parts)
            rest = RECORD.sub(lambda match: _taken(match, parts), rest)
        texts, size = _joined(parts)
        self.told |= set(texts)
        rest = ABORTS.sub(self._explained, rest)
        return "".join(folded(texts, size)).encode(errors="backslashreplace") + rest

    def _explained(self, match: re.Match[bytes]) -> bytes:
        return b"" if int(match[match.lastindex or 0]) in self.told else match[0]


def _marked(text: bytes) -> int:
    """Where a mark starts, or may start once more has come."""
    at = text.find(MARK)
    if at >= 0:
        return at
    ends = (len(text) - length for length in range(len(MARK) - 1, 0, -1) if text.endswith(MARK[:length]))
    return next(ends, len(text))


def _taken(match: re.Match[bytes], parts: Parts) -> bytes:
    """Take a record that is whole out of the text; leave another."""
    if int(match[1], 16) != zlib.crc32(match[2]):
        return match[0]
    rank, size, part, count, text = json.loads(match[2])
    parts[rank, part] = size, count, text
    return b""


def _joined(parts: Parts) -> tuple[dict[int, str], int]:
    """The text of each rank, in the order in which they came, and the number of ranks."""
    texts, size = {}, 1
    for rank in dict.fromkeys(rank for rank, _ in parts):
        mine = {part: found for (other, part), found in parts.items() if other == rank}
        size, count, _ = next(iter(mine.values()))
        pieces = (mine[part][2] if part in mine else LOST for part in range(count))
        texts[rank] = "".join(pieces)
    return texts, size


def folded(texts: Mapping[int, str], size: int) -> list[str]:
    """Each error once, the first one first, with the ranks that raised it.

    Errors are alike if their texts are equal, or differ only in that each names the rank it comes from.
    """
    alike: dict[str, list[int]] = {}
    for rank, text in texts.items():
        alike.setdefault(text, []).append(rank)
    groups: dict[str, list[int]] = {}
    for text, ranks in alike.items():
        groups.setdefault(text if len(ranks) > 1 else _anonymous(text, ranks[0]), []).extend(ranks)
    return [_heading(ranks, size, texts) + texts[ranks[0]] for ranks in groups.values()]


def _anonymous(text: str, rank: int) -> str:
    """The text without its own rank's number; a traceback's indented lines keep theirs."""
    own = re.compile(rf"(?<![\w.]){rank}(?!\w|\.\d)")
    lines = text.splitlines(keepends=True)
    return "".join(line if line.startswith("  ") else own.sub("\0", line) for line in lines)


def _heading(ranks: Sequence[int], size: int, texts: Mapping[int, str]) -> str:
    if size == 1:
        return ""
    here = f", here rank {ranks[0]}" if len({texts[rank] for rank in ranks}) > 1 else ""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} of {size}{here}: "


def ranges(ranks: Sequence[int]) -> str:
    """Ranks as people write them: ``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
