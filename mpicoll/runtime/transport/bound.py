"""Lowered rounds on real memory: messages with addresses, and calls ready to be made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ...memory.op import Call, Reducer
from .lower import Move, Place, Step

Memory = Mapping[Any, np.ndarray]


class Gate(Protocol):
    """What a round may wait for besides messages."""

    def __call__(self) -> bool:
        """Whether it is open."""

    def missing(self) -> list[int]:
        """The ranks that keep it closed."""


@dataclass(slots=True)
class Bound:
    """A round on real memory: `before` its messages are posted, `after` they have arrived.

    Where a `gate` stands in place of messages, the round has arrived when that is open.
    """

    before: list[Call] = field(default_factory=list)
    sends: list[tuple[int, np.ndarray]] = field(default_factory=list)
    recvs: list[tuple[int, np.ndarray]] = field(default_factory=list)
    after: list[Call] = field(default_factory=list)
    gate: Gate | None = None


def bind(step: Step, memory: Memory, reducer: Reducer | None) -> Bound:
    """Put a lowered round on real memory."""
    return Bound(
        calls(step.before, memory, reducer),
        [(peer, view(place, memory)) for peer, place in step.sends],
        [(peer, view(place, memory)) for peer, place in step.recvs],
        calls(step.after, memory, reducer),
    )


def view(place: Place, memory: Memory) -> np.ndarray:
    """The bytes of a place."""
    return memory[place.base][place.start : place.stop]


def calls(moves: Iterable[Move], memory: Memory, reducer: Reducer | None) -> list[Call]:
    """Moves as calls, without those that move nothing.

    Chains of reductions into one place are taken in float32 where the reducer says so.
    """
    made: list[Call] = []
    moves = [m for m in moves if m.target.nbytes]
    while moves:
        chain = _chain(moves) if reducer is not None and reducer.wide else 1
        head, moves = moves[:chain], moves[chain:]
        first = head[0]
        target = view(first.target, memory)
        if first.right is None:
            made.append((np.copyto, (target, view(first.left, memory))))
        elif chain == 1:
            assert reducer is not None
            made.append(reducer.combine(view(first.left, memory), view(first.right, memory), target))
        else:
            assert reducer is not None
            operands = [view(first.left, memory), view(first.right, memory)]
            for move in head[1:]:
                if move.left == move.target:
                    operands.append(view(move.right, memory))  # type: ignore[arg-type]
                else:
                    operands.insert(0, view(move.left, memory))
            made.append(reducer.accumulate(operands, target))
    return made


def _chain(moves: list[Move]) -> int:
    """How many moves from the first on reduce into the same place."""
    target, length = moves[0].target, 0
    for move in moves:
        if move.target != target or move.right is None:
            break
        length += 1
    return max(length, 1)
