"""Deal the same global batches to any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Sampler", "part"]


class Sampler:
    """Deals samples in a seeded random order: ``sampler[k]`` is this rank's part of global batch k.

    Global batch k is the same for any number of ranks, and known without the batches before it, so a run
    may stop and go on with more or fewer ranks. Each sample comes once per epoch.

    Parameters
    ----------
    count
        Number of samples.
    batch
        Samples in a global batch, all ranks together. It need not divide: some ranks take one more.
    seed
        Another seed, another order.
    rank, size
        Which part is dealt.
    ends
        What happens where an epoch does not divide into batches. ``"carry"``: the batch goes on with samples
        of the next epoch. ``"short"``: the epoch's last batch is shorter, and some ranks may get nothing of
        it. ``"drop"``: what is left is dropped, other samples in every epoch.

    Attributes
    ----------
    part : slice
        Which samples of a full batch are this rank's.
    per_epoch : int or None
        Batches in an epoch; None where batches carry over.

    Examples
    --------
    >>> whole = Sampler(100, batch=5, seed=1)
    >>> parts = [Sampler(100, batch=5, seed=1, rank=rank, size=3) for rank in range(3)]
    >>> [len(part[7]) for part in parts]
    [2, 2, 1]
    >>> bool((np.concatenate([part[7] for part in parts]) == whole[7]).all())
    True
    """

    def __init__(
        self,
        count: int,
        batch: int,
        *,
        seed: int = 0,
        rank: int = 0,
        size: int = 1,
        ends: Literal["carry", "short", "drop"] = "carry",
    ) -> None:
        if count < 1 or batch < 1:
            raise ValueError(f"count and batch must be at least 1, got {count} and {batch}")
        if ends not in ("carry", "short", "drop"):
            raise ValueError(f"ends must be 'carry', 'short' or 'drop', got {ends!r}")
        if ends != "carry" and count < batch:
            raise ValueError(f"{count} samples are too few for a batch of {batch}")
        self.count = count
        self.batch = batch
        self.seed = seed
        self.rank, self.size = rank, size
        self.part = part(batch, rank, size)
        self.per_epoch = {"carry": None, "short": -(-count // batch), "drop": count // batch}[ends]

    def length(self, k: int) -> int:
        """Return how many samples global batch k has, all ranks together."""
        if self.per_epoch is None:
            return self.batch
        return min(self.batch, self.count - k % self.per_epoch * self.batch)

    def __getitem__(self, k: int) -> NDArray[np.int64]:
        start = k * self.batch
        if self.per_epoch is not None:
            start = k // self.per_epoch * self.count + k % self.per_epoch * self.batch
        mine = part(self.length(k), self.rank, self.size)
        epoch, position = np.divmod(np.arange(start + mine.start, start + mine.stop), self.count)
        return _shuffled(position, epoch, self.count, self.seed)


def part(count: int, rank: int, size: int) -> slice:
    """Return which of `count` items are this rank's; sizes differ by one at most, larger ones first."""
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def _shuffled(
    position: NDArray[np.int64], epoch: NDArray[np.int64], count: int, seed: int
) -> NDArray[np.int64]:
    """Permute positions below `count`, another permutation for every epoch, without storing any.

    A Feistel network permutes the numbers of 2 * half bits whatever its rounds mix in. A number that lands
    at `count` or above walks on until it lands below, which keeps it a permutation (cycle walking).
    """
    half = np.uint64((max(count - 1, 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    key = mix(epoch.astype(np.uint64) ^ mix(np.array([seed], np.uint64)))
    value = position.astype(np.uint64)
    walking = np.ones(len(value), bool)
    while walking.any():
        left, right = value[walking] >> half, value[walking] & mask
        for turn in range(4):
            left, right = right, left ^ (mix(right ^ key[walking] ^ np.uint64(turn << 60)) & mask)
        value[walking] = (left << half) | right
        walking = value >= np.uint64(count)
    return value.astype(np.int64)


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every input bit over the word (the finisher of splitmix64)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
