"""All-to-all: chunk d of IN goes to rank d; chunk s of OUT came from rank s.

In cost lines L is log2 P rounded up, a the time to start a message, n the bytes of the vector, b the
time per byte.
"""

from __future__ import annotations

from ..plan import IN, OUT, TMP, Copy, Op, Plan, Recv, Send, arc


def pairwise(rank: int, size: int) -> Plan:
    """Meet every other rank in turn, one chunk each way.

    Cost: (P-1) a + (P-1)/P nb. Source: Thakur, Rabenseifner and Gropp 2005.
    """
    yield [Copy((IN, rank), (OUT, rank))]
    for hop in range(1, size):
        to, source = (rank + hop) % size, (rank - hop) % size
        yield [Send(to, to, IN), Recv(source, source)]


def direct(rank: int, size: int) -> Plan:
    """Send all chunks at once.

    Cost: a round of P-1 messages, (P-1)/P nb. Source: folklore, "linear" in Open MPI.
    """
    ops: list[Op] = [Copy((IN, rank), (OUT, rank))]
    ops += [Send(peer, peer, IN) for peer in arc(rank + 1, size - 1, size)]
    yield ops + [Recv(peer, peer) for peer in range(size) if peer != rank]


def bruck(rank: int, size: int) -> Plan:
    """Send a chunk that has d ranks to go by hops of the powers of two in d; for small chunks.

    Cost: L (a + nb/2), for every P; up to P/2 runs per message. Source: Bruck et al. 1997.
    """
    yield [Copy((IN, arc(rank, size, size)), (TMP, range(size)))]
    hop = 1
    while hop < size:
        moved = [d for d in range(size) if d & hop]
        yield [Send((rank + hop) % size, moved, TMP), Recv((rank - hop) % size, moved, TMP)]
        hop *= 2
    yield [Copy((TMP, range(size)), (OUT, [(rank - d) % size for d in range(size)]))]
