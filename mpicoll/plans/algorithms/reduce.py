"""Reduce: OUT starts as the rank's vector; every chunk ends complete on the root.

Most are broadcasts run backwards. In cost lines L is log2 P rounded up, a the time to start a message, n
the bytes of the vector, b the time per byte, S the number of segments.
"""

from __future__ import annotations

from ..plan import LEFT, RIGHT, Plan, Recv, Send, reverse
from . import bcast


def binomial(rank: int, size: int, root: int = 0) -> Plan:
    """Halve the ranks that hold a part in each round.

    Cost: L (a + nb). Needs: a commutative op. Source: Thakur, Rabenseifner and Gropp 2005.
    """
    return reverse(bcast.binomial(rank, size, root))


def circulant(rank: int, size: int, root: int = 0, segments: int = 1) -> Plan:
    """Run the circulant broadcast backwards: fewest rounds for every P and S.

    Cost: (S-1+L) (a + nb/S). Needs: a commutative op. Source: Träff, arXiv 2407.18004.
    """
    return reverse(bcast.circulant(rank, size, root, segments))


def chain(rank: int, size: int, root: int = 0, segments: int = 1) -> Plan:
    """Pipeline segments from the last rank to the root, gaining one contribution per hop.

    Cost: (P-2+S) (a + nb/S). Needs: a commutative op. Source: folklore, "pipeline" in Open MPI.
    """
    return reverse(bcast.chain(rank, size, root, segments))


def binary(rank: int, size: int, root: int = 0, segments: int = 1) -> Plan:
    """Pipeline segments up a complete binary tree.

    Cost: about (L+S) (a + 2nb/S). Needs: a commutative op. Source: folklore, "binary" in Open MPI.
    """
    return reverse(bcast.binary(rank, size, root, segments))


def direct(rank: int, size: int, root: int = 0) -> Plan:
    """Send every vector to the root at once, which adds up in rank order.

    Cost: a round of P-1 messages of nb at the root, any op. Source: folklore, "linear" in Open MPI.
    """
    if rank != root:
        yield [Send(root, 0)]
        return
    below = [Recv(peer, 0, reduce=LEFT) for peer in reversed(range(root))]
    above = [Recv(peer, 0, reduce=RIGHT) for peer in range(root + 1, size)]
    yield below + above


def ordered(rank: int, size: int, root: int = 0) -> Plan:
    """Halve the ranks in rank order to rank 0, which hands the result to the root.

    Cost: L (a + nb), any op; one round more unless the root is 0.
    Source: Thakur, Rabenseifner and Gropp 2005; MPICH reduce binomial.
    """
    bit = 1
    while bit < size and not rank & bit:
        if rank + bit < size:
            yield [Recv(rank + bit, 0, reduce=RIGHT)]
        bit *= 2
    if rank:
        yield [Send(rank - bit, 0)]
    if root and rank in (0, root):
        yield [Send(root, 0) if rank == 0 else Recv(0, 0)]
