"""What the interpretation of plans leaves behind: values, messages, landings, and faults in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from .plan import OUT, Buffer, Recv, Send, pieces


class PlanError(ValueError):
    """A plan is wrong.

    Attributes
    ----------
    what
        The fault.
    rank, round, chunk
        Where it shows, rounds counted from 1 in that rank's plan; None: at none in particular.
    """

    def __init__(
        self, what: str, rank: int | None = None, round: int | None = None, chunk: int | None = None
    ) -> None:
        self.what, self.rank, self.round, self.chunk = what, rank, round, chunk
        where = (("rank", rank), ("round", round), ("chunk", chunk))
        at = ", ".join(f"{word} {number}" for word, number in where if number is not None)
        super().__init__(f"{at}: {what}" if at else what)


class Value(NamedTuple):
    """What a chunk holds.

    `key` is the chunk that it is a version of (in an all-to-all: source * size + destination). For
    reductions, `ranks` has a bit for every contribution in it, `span` is the interval of ranks that it
    combines in order (None: out of order), and `expr` numbers the expression by which it was added up:
    equal numbers mean equal bits, a + b and b + a taken as one.
    """

    key: int
    ranks: int = 0
    span: tuple[int, int] | None = None
    expr: int = 0


State: TypeAlias = dict[Buffer, dict[int, Value]]


def snapshot(state: State) -> State:
    """Return a copy that later rounds leave alone."""
    return {buf: dict(chunks) for buf, chunks in state.items()}


class Message(NamedTuple):
    """A message that has met its counterpart, `time` rounds after the start."""

    time: int
    source: int
    target: int
    send: Send
    recv: Recv


class Landing(NamedTuple):
    """A round that has ended `time` rounds after the start: what the rank then holds and has heard of."""

    time: int
    rank: int
    state: State
    heard: int


@dataclass(frozen=True)
class Report:
    """What a verified plan costs and promises.

    Attributes
    ----------
    rounds
        Rounds one after the other, counted along the longest chain of messages.
    sent
        The most chunks that a rank sends.
    volumes
        What each rank sends, as a part of the whole vector.
    messages
        Messages of all ranks together.
    pieces
        The most contiguous runs in a message.
    fanout
        The most messages that a rank sends in one round.
    staged
        Chunks stored while the same round sends them, which need a scratch copy.
    ordered
        Whether operands are combined in rank order; True where nothing is combined.
    same_bits
        Whether every rank gets the same bits although floating-point sums depend on their order.
    alike
        Whether sender and receiver cut every message in the same runs, so that no packing is needed.
    """

    rounds: int
    sent: int
    volumes: tuple[Fraction, ...] = field(repr=False)
    messages: int
    pieces: int
    fanout: int
    staged: int
    ordered: bool
    same_bits: bool
    alike: bool


@dataclass
class Trace:
    """A collective from start to end, or to its first fault.

    With a fault there is an `error` in place of a `report`; it happened `time` rounds after the start, and
    `end` is what the ranks then held.
    """

    collective: str
    name: str
    size: int
    chunks: int = 0
    start: list[State] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)
    end: list[State] = field(default_factory=list)
    time: int = 0
    report: Report | None = None
    error: PlanError | None = None


def words(op: Send | Recv) -> str:
    """Say what a message does, after its rank."""
    what = f"chunk{'s' if len(op.chunks) > 1 else ''} {runs_in_words(op.chunks)}" if op.chunks else "a signal"
    return f"sends {what} to rank {op.peer}" if isinstance(op, Send) else f"awaits {what} from rank {op.peer}"


def place(buf: Buffer, chunk: int) -> str:
    """Name a chunk of a buffer."""
    return f"chunk {chunk}" if buf == OUT else f"{buf.upper()} chunk {chunk}"


def runs_in_words(numbers: Iterable[int]) -> str:
    """Write numbers compactly, in their order.

    >>> runs_in_words([0, 1, 2, 3, 5])
    '0-3,5'
    """
    return ",".join(str(r.start) if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in pieces(numbers))


def ranks_of(mask: int) -> list[int]:
    """Return a set of ranks that is given as bits."""
    return [r for r in range(mask.bit_length()) if mask >> r & 1]


def ranks_in_words(mask: int) -> str:
    """Write a set of ranks that is given as bits.

    >>> ranks_in_words(0b1011)
    'ranks 0-1,3'
    """
    ranks = ranks_of(mask)
    return f"rank{'s' if len(ranks) > 1 else ''} {runs_in_words(ranks)}"
