"""Barrier: no rank ends before every rank has begun. Messages carry no chunks."""

from __future__ import annotations

from ..plan import Plan, Recv, Send


def dissemination(rank: int, size: int) -> Plan:
    """Signal the rank 1, 2, 4, ... further on, and wait for the one as far behind.

    Cost: L a, L = log2 P rounded up, for every P. Source: Hensgen, Finkel and Manber 1988.
    """
    hop = 1
    while hop < size:
        yield [Send((rank + hop) % size, ()), Recv((rank - hop) % size, ())]
        hop *= 2
