"""Who talks to whom: butterfly partners, circulant skips, trees. Pure arithmetic.

A *tree* here is a function `(vertex, size) -> (parent or None, children, depth)` with root 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Node: TypeAlias = tuple[int | None, list[int], int]
Tree: TypeAlias = Callable[[int, int], Node]
Partner: TypeAlias = Callable[[int, int, int], int]


def log2ceil(size: int) -> int:
    """Return the smallest L with 2^L >= size."""
    return (size - 1).bit_length()


def power_of_two_below(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def factors(size: int, largest: int = 8) -> list[int] | None:
    """Return `size` as a product of factors up to `largest`, small ones first; None if it is not one."""
    found = []
    for f in range(2, largest + 1):
        while size % f == 0:
            found.append(f)
            size //= f
    return found if size == 1 else None


def xor(rank: int, step: int, size: int) -> int:
    """Return the butterfly partner at distance 1, 2, 4, ..."""
    return rank ^ (1 << step)


def swing(rank: int, step: int, size: int) -> int:
    """Return the Swing partner at distance 1, -1, 3, -5, 11, ... (mirrored for odd ranks); even sizes.

    Source: De Sensi et al., arXiv 2401.09356.
    """
    distance: int = (1 - (-2) ** (step + 1)) // 3
    return (rank + (distance if rank % 2 == 0 else -distance)) % size


def skips(size: int) -> list[int]:
    """Return 1 = s_0 < ... < s_q = size, each half of the next, rounded up.

    Source: Träff, arXiv 2410.14234.
    """
    found = [size]
    while found[-1] > 1:
        found.append((found[-1] + 1) // 2)
    return found[::-1]


def receive_schedule(rank: int, size: int) -> list[int]:
    """Return the block received in each round of a phase, relative to it (negative: an earlier phase's).

    A depth-first search over sums of skips, largest first, for a vertex ever farther behind `rank`;
    each skip ends one sum only. O(log P). Source: Träff, arXiv 2312.11236 and 2407.18004.
    """
    skip = skips(size)
    q = base = len(skip) - 1
    rest = rank
    for k in reversed(range(q)):  # base: the last skip of rank's greedy sum
        if rest >= skip[k]:
            base, rest = k, rest - skip[k]
    unused = [k for k in reversed(range(q + 1)) if k != base]
    found: list[int] = []
    last = 2 * size

    def behind(k: int) -> int:
        return rank + size - skip[k]

    def search(at: int, largest: int) -> None:
        nonlocal last
        for e in [e for e in unused if e <= largest]:
            far = at + skip[e]
            if len(found) < q and e in unused and far <= behind(len(found)) and far < last:
                if far <= behind(len(found) + 1):
                    search(far, e)
                if len(found) == q or at > behind(len(found) + 1):
                    return
                found.append(e)
                unused.remove(e)
                last = far

    search(0, q)
    return [base if e == q else e - q for e in found]


def chain(v: int, size: int) -> Node:
    """One after the other."""
    return v - 1 if v else None, [v + 1] if v + 1 < size else [], v


def binary(v: int, size: int) -> Node:
    """Complete binary tree."""
    children = [c for c in (2 * v + 1, 2 * v + 2) if c < size]
    return (v - 1) // 2 if v else None, children, (v + 1).bit_length() - 1


def inorder(v: int, size: int) -> Node:
    """Binary tree whose leaves are the odd ranks: half of a double binary tree.

    Source: Sanders, Speck and Träff 2009; NCCL.
    """

    def up(v: int) -> int:
        bit = v & -v
        wide = (v ^ bit) | 2 * bit
        return wide if wide < size else v ^ bit

    depth, above = 0, v
    while above:
        depth, above = depth + 1, up(above)
    # The children of v are v +- 2^k for some k below its lowest bit; of 0, the powers of two.
    reach = (v & -v) or 2 * size
    near = {w for k in range(reach.bit_length()) for w in (v - (1 << k), v + (1 << k)) if 0 < w < size}
    return up(v) if v else None, sorted(c for c in near if up(c) == v), depth


def postorder(v: int, start: int, stop: int) -> Node:
    """Binary tree on ranks start..stop-1 in which every root comes last: keeps operand order."""
    parent, depth = None, 0
    while True:
        root = stop - 1
        middle = (start + root + 1) // 2
        if v == root:
            return parent, [b - 1 for a, b in ((start, middle), (middle, root)) if a < b], depth
        start, stop = (start, middle) if v < middle else (middle, root)
        parent, depth = root, depth + 1
