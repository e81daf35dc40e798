"""Broadcast: OUT is set on the root only; every chunk ends on every rank.

In cost lines L is log2 P rounded up, a the time to start a message, n the bytes of the vector, b the
time per byte, S the number of segments.
"""

from __future__ import annotations

from ..plan import Op, Plan, Recv, Send
from .peers import Tree, log2ceil, receive_schedule, skips
from .peers import binary as binary_tree
from .peers import chain as chain_tree


def binomial(rank: int, size: int, root: int = 0) -> Plan:
    """Double the ranks that know the vector in each round.

    Cost: L (a + nb). Source: folklore; Thakur, Rabenseifner and Gropp 2005.
    """
    me, bit = (rank - root) % size, 1
    while bit < size and not me & bit:
        bit *= 2
    if me:
        yield [Recv((rank - bit) % size, 0)]
    while bit := bit // 2:
        if me + bit < size:
            yield [Send((rank + bit) % size, 0)]


def circulant(rank: int, size: int, root: int = 0, segments: int = 1) -> Plan:
    """Pipeline segments through a circulant graph: fewest rounds for every P and S.

    Cost: (S-1+L) (a + nb/S). Source: Träff, arXiv 2312.11236.
    """
    me, skip, q = (rank - root) % size, skips(size), log2ceil(size)
    if not q:
        return
    blank = -(segments - 1) % q  # empty rounds that make phases whole
    receive = receive_schedule(me, size)
    send = [receive_schedule((me + skip[k]) % size, size)[k] for k in range(q)]
    for i in range(blank, segments - 1 + q + blank):
        k, first = i % q, i - i % q - blank
        give, take = send[k] + first, receive[k] + first
        ops: list[Op] = []
        if give >= 0 and me + skip[k] != size:  # never back to the root
            ops.append(Send((rank + skip[k]) % size, min(give, segments - 1)))
        if take >= 0 and me:
            ops.append(Recv((rank - skip[k]) % size, min(take, segments - 1)))
        yield ops


def chain(rank: int, size: int, root: int = 0, segments: int = 1) -> Plan:
    """Pipeline segments from each rank to the next.

    Cost: (P-2+S) (a + nb/S). Source: folklore, "chain" and "pipeline" in Open MPI.
    """
    return tree(rank, size, root, segments, chain_tree)


def binary(rank: int, size: int, root: int = 0, segments: int = 1) -> Plan:
    """Pipeline segments down a complete binary tree.

    Cost: about (L+S) (a + 2nb/S). Source: folklore, "binary" in Open MPI.
    """
    return tree(rank, size, root, segments, binary_tree)


def tree(rank: int, size: int, root: int, segments: int, shape: Tree) -> Plan:
    """Pipeline down any tree: a rank passes a segment on while the next one arrives."""
    parent, children, _ = shape((rank - root) % size, size)
    for s in range(segments + 1):
        ops: list[Op] = [Send((c + root) % size, s - 1) for c in children if s]
        if s < segments and parent is not None:
            ops.append(Recv((parent + root) % size, s))
        yield ops


def direct(rank: int, size: int, root: int = 0) -> Plan:
    """Send the vector from the root to every rank at once.

    Cost: a round of P-1 messages of nb at the root. Source: folklore, "linear" in Open MPI.
    """
    if rank == root:
        yield [Send(peer, 0) for peer in range(size) if peer != root]
    else:
        yield [Recv(root, 0)]
