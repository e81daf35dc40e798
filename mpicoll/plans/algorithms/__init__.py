"""Algorithms for collectives, as plans, and the open registry of them.

Each collective has a module with one short function per algorithm; the table below says under which
name each is known and what it needs. `commutative=True` means that operands are reordered.
"""

from __future__ import annotations

from . import allgather, allreduce, alltoall, barrier, bcast, hierarchical, reduce, reduce_scatter
from .hierarchical import Nodes
from .peers import factors, power_of_two_below
from .registry import (
    ANY,
    COLLECTIVES,
    EVEN,
    NATIVE,
    OWNED,
    POWER_OF_TWO,
    REDUCTIONS,
    ROOTED,
    Algorithm,
    Sizes,
    get,
    load,
    register,
    registry,
)

__all__ = [
    "ANY",
    "COLLECTIVES",
    "EVEN",
    "NATIVE",
    "OWNED",
    "POWER_OF_TWO",
    "REDUCTIONS",
    "ROOTED",
    "SHIPPED",
    "Algorithm",
    "Nodes",
    "Sizes",
    "get",
    "load",
    "register",
    "registry",
]

SMALL_FACTORS = Sizes("a product of factors up to 8", lambda size: factors(size) is not None)

register("allreduce", commutative=True)(allreduce.ring)
register("allreduce", commutative=True)(allreduce.circulant)
register("allreduce")(allreduce.direct)
register("allreduce", chunks=1)(allreduce.recursive_doubling)
register("allreduce", commutative=True, chunks=power_of_two_below)(allreduce.halving_doubling)
register("allreduce", commutative=True, chunks=power_of_two_below)(allreduce.halving_swing)
register("allreduce", chunks=1, sizes=SMALL_FACTORS)(allreduce.recursive_multiplying)
register("allreduce", commutative=True)(allreduce.double_binary_tree)
register("allreduce")(allreduce.dual_root)
register("allreduce", commutative=True, weights=hierarchical.rail_weights)(hierarchical.split_rail)

register("reduce_scatter", commutative=True)(reduce_scatter.ring)
register("reduce_scatter", commutative=True)(reduce_scatter.circulant)
register("reduce_scatter")(reduce_scatter.direct)
register("reduce_scatter", commutative=True, sizes=POWER_OF_TWO)(reduce_scatter.recursive_halving)
register("reduce_scatter", commutative=True)(reduce_scatter.pat)
register("reduce_scatter")(reduce_scatter.ordered)
register("reduce_scatter")(reduce_scatter.ordered_pairwise)

register("allgather")(allgather.ring)
register("allgather")(allgather.circulant)
register("allgather")(allgather.bruck)
register("allgather")(allgather.direct)
register("allgather", sizes=POWER_OF_TWO)(allgather.recursive_doubling)
register("allgather", sizes=EVEN)(allgather.neighbor_exchange)
register("allgather")(allgather.pat)

register("bcast", chunks=1)(bcast.binomial)
register("bcast")(bcast.circulant)
register("bcast")(bcast.chain)
register("bcast")(bcast.binary)
register("bcast", chunks=1)(bcast.direct)

register("reduce", commutative=True, chunks=1)(reduce.binomial)
register("reduce", commutative=True)(reduce.circulant)
register("reduce", commutative=True)(reduce.chain)
register("reduce", commutative=True)(reduce.binary)
register("reduce", chunks=1)(reduce.direct)
register("reduce", chunks=1)(reduce.ordered)

register("alltoall")(alltoall.pairwise)
register("alltoall")(alltoall.direct)
register("alltoall")(alltoall.bruck)

register("barrier", chunks=0)(barrier.dissemination)

# Ours: the tests verify them. Whatever is registered later is verified where it is first used.
SHIPPED = {
    (entry.collective, entry.name): entry for entries in registry.values() for entry in entries.values()
}
