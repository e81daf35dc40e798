"""Allreduce: OUT starts as the rank's vector; every chunk ends complete on every rank.

In cost lines L is log2 P rounded up, a the time to start a message, n the bytes of the vector, b the
time per byte, S the number of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod

from ..plan import LEFT, OUT, RIGHT, TMP, Chunks, Copy, Op, Plan, Recv, Send, on
from . import allgather, reduce_scatter
from .peers import Node, Partner, factors, inorder, log2ceil, postorder, power_of_two_below, swing, xor


def ring(rank: int, size: int) -> Plan:
    """Reduce-scatter round the ring, then allgather round the ring.

    Cost: 2(P-1) a + 2(P-1)/P nb. Needs: a commutative op. Source: Patarasuk and Yuan 2009.
    """
    yield from reduce_scatter.ring(rank, size)
    yield from allgather.ring(rank, size)


def circulant(rank: int, size: int) -> Plan:
    """Reduce-scatter, then allgather, at circulant distances: fewest rounds and bytes for every P.

    Cost: 2L a + 2(P-1)/P nb. Needs: a commutative op. Source: Träff, arXiv 2410.14234.
    """
    yield from reduce_scatter.circulant(rank, size)
    yield from allgather.circulant(rank, size)


def direct(rank: int, size: int) -> Plan:
    """Send chunk q to rank q, add up in rank order, send the sum to all: two rounds.

    Cost: 2 rounds of P-1 messages, 2(P-1)/P nb, any op. Source: folklore; the shared-memory scheme.
    """
    yield from reduce_scatter.direct(rank, size)
    yield from allgather.direct(rank, size)


def recursive_doubling(rank: int, size: int) -> Plan:
    """Exchange the whole vector with partners at distance 1, 2, 4, ...

    Cost: L (a + nb), any op; unless P = 2^L two rounds of nb to fold neighbours.
    Source: Thakur, Rabenseifner and Gropp 2005.
    """
    return folded(butterfly, rank, size, 0)


def halving_doubling(rank: int, size: int) -> Plan:
    """Exchange halves, quarters, ... with partners at distance 1, 2, ...; then all the way back.

    Cost: 2L a + 2(P-1)/P nb; unless P = 2^L two rounds of nb to fold neighbours.
    Needs: a commutative op. Source: Rabenseifner 2004.
    """
    return folded(partial(halves, partner=xor), rank, size, range(power_of_two_below(size)))


def halving_swing(rank: int, size: int) -> Plan:
    """Exchange halves, quarters, ... with partners at distance 1, -1, 3, -5, ...: short hops on a torus.

    Cost: as `halving_doubling`. Needs: a commutative op. Source: De Sensi et al., arXiv 2401.09356.
    """
    return folded(partial(halves, partner=swing), rank, size, range(power_of_two_below(size)))


def folded(core: Callable[[int, int], Plan], rank: int, size: int, chunks: Chunks) -> Plan:
    """Run a 2^k `core` on any P: neighbours fold into one and unfold. Keeps operand order.

    A rank that sits out the core has empty rounds meanwhile, so that slices of the plan stay in step.
    """
    half = power_of_two_below(size)
    extra = size - half
    group = [2 * v + 1 if v < extra else v + extra for v in range(half)]
    if rank < 2 * extra and rank % 2 == 0:
        yield [Send(rank + 1, chunks)]
        yield from ([] for _ in core(0, half))
        yield [Recv(rank + 1, chunks)]
        return
    if rank < 2 * extra:
        yield [Recv(rank - 1, chunks, reduce=LEFT)]
    yield from on(group, core(group.index(rank), half))
    if rank < 2 * extra:
        yield [Send(rank - 1, chunks)]


def butterfly(rank: int, size: int) -> Plan:
    """Run the power-of-two core of `recursive_doubling`."""
    for step in range(log2ceil(size)):
        peer = xor(rank, step, size)
        yield [Send(peer, 0), Recv(peer, 0, reduce=LEFT if peer < rank else RIGHT)]


def halves(rank: int, size: int, partner: Partner) -> Plan:
    """Run the power-of-two core of `halving_doubling`.

    Chunks are numbered so that every half is one run: which rank ends with which chunk is free here.
    """
    order = [0]  # depth first: a rank and its partner, then theirs of the next step
    for step in range(log2ceil(size)):
        order = [w for v in order for w in (v, partner(v, step, size))]
    place, start, stop, trail = order.index(rank), 0, size, []
    for step in range(log2ceil(size)):
        middle = (start + stop) // 2
        keep, give = range(start, middle), range(middle, stop)
        if place >= middle:
            keep, give = give, keep
        peer, start, stop = partner(rank, step, size), keep.start, keep.stop
        trail.append((peer, keep, give))
        yield [Send(peer, give), Recv(peer, keep, reduce=True)]
    for peer, keep, give in reversed(trail):
        yield [Send(peer, keep), Recv(peer, give)]


def recursive_multiplying(rank: int, size: int) -> Plan:
    """Meet in groups of f ranks for each factor f of P; operands meet in TMP, added in rank order.

    Cost: a round of f-1 messages of nb per factor, any op. Needs: P a product of factors up to 8.
    Reducing on arrival would give different ranks different bits. Source: Wilkins et al. 2023; MPICH.
    """
    fs = factors(size) or []
    for i, f in enumerate(fs):
        stride = prod(fs[:i])
        me = rank // stride % f
        peers = [rank + (j - me) * stride for j in range(f)]
        ops: list[Op] = [Send(peer, 0) for peer in peers if peer != rank]
        ops += [Recv(peer, j, TMP) for j, peer in enumerate(peers) if j != me]
        yield [*ops, Copy((OUT, 0), (TMP, me))]
        yield [Copy((TMP, 0), (OUT, 0)), *(Copy((TMP, j), (OUT, 0), reduce=RIGHT) for j in range(1, f))]


def double_binary_tree(rank: int, size: int, segments: int = 2) -> Plan:
    """Reduce up and broadcast down two trees at once; inner ranks of one are leaves of the other.

    Cost: about (2L + S/2) a + 2nb, for every P. Needs: a commutative op.
    Source: Sanders, Speck and Träff 2009; NCCL.
    """
    turn = 1 if size % 2 else 0  # the second tree: mirrored for even P, turned by one for odd P

    def there(v: int) -> int:
        return (v - 1) % size if turn else size - 1 - v

    def back(v: int) -> int:
        return (v + 1) % size if turn else size - 1 - v

    parent, children, depth = inorder(there(rank), size)
    mirrored = (None if parent is None else back(parent), [back(c) for c in children], depth)
    return trees(rank, [inorder(rank, size), mirrored], segments)


def dual_root(rank: int, size: int, segments: int = 1) -> Plan:
    """Reduce up two post-order trees whose roots exchange, and broadcast down: keeps operand order.

    Cost: (S + 2L) rounds, about 3nb, any op, for every P. Source: Träff, arXiv 2109.12626.
    """
    half = size // 2
    if not half:
        return iter(())
    shape = postorder(rank, *((0, half) if rank < half else (half, size)))
    return trees(rank, [shape], segments, twins=(half - 1, size - 1))


def trees(rank: int, shapes: Sequence[Node], segments: int, twins: Sequence[int] = ()) -> Plan:
    """Run up and down several trees at once; tree i carries every len(shapes)-th segment from the i-th.

    `shapes` is this rank's place in each tree; `twins` are two roots that exchange at the top.
    """
    late, deepest = (1 if twins else 0), max(depth for _, _, depth in shapes)
    for clock in range(-deepest - 1, segments + deepest + late + 1):
        ops: list[Op] = []
        for i, (parent, children, depth) in enumerate(shapes):
            at = partial(due, range(i, segments, len(shapes)), clock)
            ops += [Recv(c, s, reduce=LEFT) for s in at(-depth - 1) for c in reversed(children)]
            ops += [Send(c, s) for s in at(depth + late) for c in children]
            if parent is not None:
                ops += [Send(parent, s) for s in at(-depth)]
                ops += [Recv(parent, s) for s in at(depth - 1 + late)]
            elif twins:
                twin = twins[rank == twins[0]]
                ops += [Send(twin, s) for s in at(0)]
                ops += [Recv(twin, s, reduce=LEFT if twin < rank else RIGHT) for s in at(0)]
        yield ops


def due(segments: Sequence[int], clock: int, delay: int) -> Iterable[int]:
    """Return the segment that a tree handles `delay` after its first, as a list of one or none."""
    at = clock - delay
    return segments[at : at + 1] if at >= 0 else ()
