"""Collectives over nodes of any shape, composed of plans for one level."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

from ..plan import Plan, on, together
from . import allgather, allreduce, reduce_scatter

Nodes: TypeAlias = Sequence[Sequence[int]]


def rails(nodes: Nodes) -> list[tuple[Fraction, list[int]]]:
    """Cut the vector where any node's equal shares end: [(weight, the rail's rank in each node)]."""
    cuts = sorted({Fraction(i, len(node)) for node in nodes for i in range(len(node) + 1)})
    return [(end - at, [node[int(at * len(node))] for node in nodes]) for at, end in pairwise(cuts)]


def rail_weights(size: int, nodes: Nodes) -> list[Fraction]:
    """Return the sizes of the chunks of `split_rail`: each rail is cut in one equal chunk per node."""
    return [weight / len(nodes) for weight, _ in rails(nodes) for _ in nodes]


def split_rail(rank: int, size: int, nodes: Nodes) -> Plan:
    """Reduce-scatter in the node, allreduce each rail across nodes, allgather in the node.

    Every rank of a node with p ranks owns 1/p of the vector, whatever the other nodes look like.
    Cost: 2(log2 p + log2 N) rounds, across N nodes 2(N-1)/N n/p bytes per rank, the least possible.
    Needs: a commutative op, the ranks of every node. Source: after Mikami et al., arXiv 1811.05233.
    """
    local = next(node for node in nodes if rank in node)
    me, here, n = local.index(rank), nodes.index(local), len(nodes)
    owners = [owner for _, owner in rails(nodes)]
    chunks = [range(i * n, i * n + n) for i in range(len(owners))]
    share = [[c for i, o in enumerate(owners) if o[here] == r for c in chunks[i]] for r in local]
    yield from on(local, reduce_scatter.circulant(me, len(local)), share)
    yield from together(
        *(on(o, allreduce.circulant(here, n), chunks[i]) for i, o in enumerate(owners) if o[here] == rank)
    )
    yield from on(local, allgather.circulant(me, len(local)), share)
