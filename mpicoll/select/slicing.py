"""How a message is cut: segments, slices, and what fits a staging slot of the shared window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from ..plans.algorithms import OWNED, Algorithm, Nodes
from ..plans.plan import Copy, Op, Recv, Send

KIB, MIB = 1 << 10, 1 << 20
SEGMENT_NBYTES = 128 * KIB
SLICE_NBYTES = 1 * MIB  # messages within a node: scratch stays in cache
EAGER_NBYTES = 60 * KIB  # across nodes: longer messages wait for a handshake behind bulk data
MOST = 256  # segments or slices: more cost more in requests than they hide


def segments_for(algorithm: Algorithm, nbytes: int) -> int:
    """How many segments an algorithm that takes them gets."""
    if "segments" not in algorithm.takes:
        return 1
    return min(MOST, max(1, -(-nbytes // SEGMENT_NBYTES)))


def slices_for(algorithm: Algorithm, nbytes: int, size: int, nodes: Nodes) -> int:
    """How often a plan of messages runs on successive parts of the vector."""
    if "segments" in algorithm.takes or algorithm.collective == "barrier":
        return 1
    if algorithm.collective in OWNED and not scattered(algorithm, size):
        return 1  # its messages of several chunks would fall apart
    part = max(SLICE_NBYTES, 64 * KIB * size) if len(nodes) == 1 else EAGER_NBYTES * size
    return min(MOST, max(1, -(-nbytes // part)))


def slot_nbytes(size: int) -> int:
    """Bytes of one staging slot of the window: what two overlapping slices need that stay in a core's cache.

    With many ranks slices are longer, or their chunks would be too short to be worth a call.
    """
    return max(1 * MIB, 32 * KIB * size)


def window_slices_for(nbytes: int, need: float, size: int) -> int:
    """How many slices keep a round in cache and its staging within a slot."""
    slot = slot_nbytes(size)
    most = min(slot // 2, int(slot * 0.9 / max(need, 1e-9)))
    return max(1, -(-nbytes // most))


@cache
def scattered(algorithm: Algorithm, size: int) -> bool:
    """Whether every message is one chunk."""
    return all(
        len(op.chunks) == 1
        for rank in {0, size - 1}
        for ops in algorithm.plan(rank, size)
        for op in ops
        if not isinstance(op, Copy)
    )


@cache
def window_demand(algorithm: Algorithm, size: int, root: int) -> float | None:
    """Staging that a rank may need at once, in vectors; None where a plan does not suit a window.

    In a window one barrier stands between rounds: every message must be sent and received in the same
    round of its two ranks, and all ranks must have equally many rounds.
    """
    if "segments" in algorithm.takes or "nodes" in algorithm.takes or algorithm.collective == "barrier":
        return None
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    lengths, most = set(), 0
    for rank in range(size):
        plan = list(algorithm.plan(rank, size, root=root))
        lengths.add(len(plan))
        most = max(most, sum(len({c for op in ops for c in _reads(op)}) for ops in plan))
        for at, ops in enumerate(plan):
            for op in ops:
                if isinstance(op, Send):
                    sent[rank, op.peer].append(at)
                elif isinstance(op, Recv):
                    received[op.peer, rank].append(at)
    return most / algorithm.chunks(size) if sent == received and len(lengths) == 1 else None


def _reads(op: Op) -> Sequence[tuple[str, int]]:
    if isinstance(op, Recv):
        return ()
    buf, chunks = (op.buf, op.chunks) if isinstance(op, Send) else op.src
    return [(buf, c) for c in chunks]
