"""Reduce-scatter: OUT starts as the rank's whole vector; chunk r ends complete on rank r.

Most are allgathers run backwards. In cost lines L is log2 P rounded up, a the time to start a message, n
the bytes of the whole vector, b the time per byte.
"""

from __future__ import annotations

from ..plan import LEFT, OUT, RIGHT, TMP, Copy, Plan, Recv, Send, arc, on, reverse
from . import allgather
from .peers import power_of_two_below


def ring(rank: int, size: int) -> Plan:
    """Send every chunk once round the ring, gaining one contribution per hop.

    Cost: (P-1) a + (P-1)/P nb. Needs: a commutative op. Source: Patarasuk and Yuan 2009.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for hop in range(1, size):
        give, take = (rank - hop) % size, (left - hop) % size
        yield [Send(right, give), Recv(left, take, reduce=True)]


def circulant(rank: int, size: int) -> Plan:
    """Run the circulant allgather backwards: ever shorter arcs at circulant distances.

    Cost: L a + (P-1)/P nb, for every P. Needs: a commutative op. Source: Träff, arXiv 2410.14234.
    """
    return reverse(allgather.circulant(rank, size))


def direct(rank: int, size: int) -> Plan:
    """Send chunk q to rank q for every q at once; each rank adds up its chunk in rank order.

    Cost: a round of P-1 messages, (P-1)/P nb, any op. Source: folklore, "linear" in Open MPI.
    """
    sends = [Send(peer, peer) for peer in arc(rank + 1, size - 1, size)]
    below = [Recv(peer, rank, reduce=LEFT) for peer in reversed(range(rank))]
    above = [Recv(peer, rank, reduce=RIGHT) for peer in range(rank + 1, size)]
    yield [*sends, *below, *above]


def recursive_halving(rank: int, size: int) -> Plan:
    """Exchange halves with partners at distance P/2, P/4, ...; one run per message.

    Cost: L a + (P-1)/P nb. Needs: P a power of two, a commutative op. Source: Thakur et al. 2005.
    """
    return reverse(allgather.recursive_doubling(rank, size))


def pat(rank: int, size: int) -> Plan:
    """Run the PAT allgather backwards: near with many chunks first, far with few last.

    Cost: L a + (P-1)/P nb, for every P. Needs: a commutative op. Source: Jeaugey, arXiv 2506.20252.
    """
    return reverse(allgather.pat(rank, size))


def ordered(rank: int, size: int) -> Plan:
    """Halve with neighbours first, chunks split by the rank's low bits; neighbours fold beyond 2^k ranks.

    Cost: L a + (P-1)/P nb, any op; unless P = 2^L a round and nb more. Up to P/2 runs per message.
    Source: Träff 2005; MPICH reduce_scatter noncommutative.
    """
    half = power_of_two_below(size)
    extra = size - half
    group = [2 * v + 1 if v < extra else v + extra for v in range(half)]
    owned = [(2 * v, 2 * v + 1) if v < extra else v + extra for v in range(half)]
    if rank < 2 * extra and rank % 2 == 0:
        yield [Send(rank + 1, range(size))]
        yield [Recv(rank + 1, rank)]
        return
    if rank < 2 * extra:
        yield [Recv(rank - 1, range(size), reduce=LEFT)]
    yield from on(group, halving_neighbours(group.index(rank), half), owned)
    if rank < 2 * extra:
        yield [Send(rank - 1, rank - 1)]


def halving_neighbours(rank: int, size: int) -> Plan:
    """Run the power-of-two core of `ordered`."""
    bit = 1
    while bit < size:
        peer = rank ^ bit
        give = range(peer % (2 * bit), size, 2 * bit)
        keep = range(rank % (2 * bit), size, 2 * bit)
        yield [Send(peer, give), Recv(peer, keep, reduce=LEFT if peer < rank else RIGHT)]
        bit *= 2


def ordered_pairwise(rank: int, size: int) -> Plan:
    """Meet every other rank in turn; operands from above meet in OUT, those from below in TMP.

    Cost: (P-1) a + (P-1)/P nb, any op, one chunk per message. Source: after MPICH pairwise.
    """
    for hop in range(1, size):
        source, peer = (rank + hop) % size, (rank - hop) % size
        if source > rank:
            take = Recv(source, rank, reduce=RIGHT)
        else:
            take = Recv(source, rank, TMP, reduce=RIGHT if source else False)
        yield [Send(peer, peer), take]
    if rank:
        yield [Copy((TMP, rank), (OUT, rank), reduce=LEFT)]
