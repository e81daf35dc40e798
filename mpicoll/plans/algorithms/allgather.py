"""Allgather: chunk r of OUT starts on rank r; every chunk ends on every rank.

Each algorithm sends the least possible, P-1 chunks per rank; they differ in rounds, distance and
contiguity. In cost lines L is log2 P rounded up, a the time to start a message, n the bytes of the whole
vector, b the time per byte.
"""

from __future__ import annotations

from itertools import pairwise

from ..plan import Plan, Recv, Send, arc
from .peers import log2ceil, skips


def ring(rank: int, size: int) -> Plan:
    """Pass on to the right neighbour what came from the left one.

    Cost: (P-1) a + (P-1)/P nb. Source: Thakur, Rabenseifner and Gropp 2005.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for hop in range(size - 1):
        yield [Send(right, (rank - hop) % size), Recv(left, (left - hop) % size)]


def circulant(rank: int, size: int) -> Plan:
    """Exchange ever longer arcs of chunks at circulant distances; at most two runs per message.

    Cost: L a + (P-1)/P nb, for every P. Source: Träff, arXiv 2410.14234.
    """
    for near, far in pairwise(skips(size)):
        yield [
            Send((rank - near) % size, arc(rank, far - near, size)),
            Recv((rank + near) % size, arc(rank + near, far - near, size)),
        ]


def bruck(rank: int, size: int) -> Plan:
    """Double the arc of known chunks in each round; at most two runs per message, no rotation.

    Cost: L a + (P-1)/P nb, for every P. Source: Bruck et al. 1997.
    """
    have = 1
    while have < size:
        count = min(have, size - have)
        yield [
            Send((rank - have) % size, arc(rank, count, size)),
            Recv((rank + have) % size, arc(rank + have, count, size)),
        ]
        have *= 2


def direct(rank: int, size: int) -> Plan:
    """Send the own chunk to every other rank at once.

    Cost: a round of P-1 messages, (P-1)/P nb. Source: folklore, "linear" in Open MPI.
    """
    sends = [Send(peer, rank) for peer in arc(rank + 1, size - 1, size)]
    yield [*sends, *(Recv(peer, peer) for peer in range(size) if peer != rank)]


def recursive_doubling(rank: int, size: int) -> Plan:
    """Exchange all known chunks with partners at distance 1, 2, 4, ...; one run per message.

    Cost: L a + (P-1)/P nb. Needs: P a power of two. Source: Thakur, Rabenseifner and Gropp 2005.
    """
    bit = 1
    while bit < size:
        peer = rank ^ bit
        mine, theirs = rank & -bit, peer & -bit
        yield [Send(peer, range(mine, mine + bit)), Recv(peer, range(theirs, theirs + bit))]
        bit *= 2


def neighbor_exchange(rank: int, size: int) -> Plan:
    """Exchange pairs of chunks with the two neighbours in turn; one run per message.

    Cost: P/2 a + (P-1)/P nb. Needs: P even. Source: Chen et al. 2005.
    """
    side, pair = (1 if rank % 2 == 0 else -1), rank // 2
    last = pair
    yield [Send((rank + side) % size, rank), Recv((rank + side) % size, (rank + side) % size)]
    for step in range(1, size // 2):
        side = -side
        peer, news = (rank + side) % size, (pair + side * ((step + 1) // 2)) % (size // 2)
        yield [Send(peer, (2 * last, 2 * last + 1)), Recv(peer, (2 * news, 2 * news + 1))]
        last = news


def pat(rank: int, size: int) -> Plan:
    """Go far with few chunks first, near with many last; up to P/2 runs per message.

    Cost: L a + (P-1)/P nb, for every P. Source: Jeaugey, arXiv 2506.20252.
    """
    for step in reversed(range(log2ceil(size))):
        hop = 1 << step
        travelled = range(0, size - hop, 2 * hop)
        yield [
            Send((rank + hop) % size, [(rank - d) % size for d in travelled]),
            Recv((rank - hop) % size, [(rank - hop - d) % size for d in travelled]),
        ]
