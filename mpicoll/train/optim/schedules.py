"""Learning rates that follow the steps: functions from the number of steps taken to a rate.

Pass one to an optimizer in place of a number. They compose: ``warmup(cosine(lr, 10_000), 500)``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping

__all__ = ["constant", "cosine", "inverse_sqrt", "linear", "piecewise", "polynomial", "scale_lr", "warmup"]

Schedule = Callable[[int], float]


def scale_lr(lr: float, size: int, passes: int = 1, rule: str = "linear") -> float:
    """Return the learning rate for a global batch that is `size` times `passes` that of one rank.

    Parameters
    ----------
    lr
        The rate that suits one rank.
    size
        The number of ranks, each with a batch of its own as large as that of one rank.
    passes
        Backward passes per step, where each pass counts for a batch and their gradients are averaged.
    rule
        ``"linear"`` (Goyal et al., 2017; begin with `warmup`) or ``"sqrt"``.

    Examples
    --------
    >>> scale_lr(0.1, 8)
    0.8
    >>> schedule = warmup(cosine(scale_lr(0.1, 8), 1000), 100, start=0.1)
    >>> schedule(0), schedule(100) > 0.75, schedule(1000)
    (0.1, True, 0.0)
    """
    if size < 1 or passes < 1:
        raise ValueError(f"size and passes must be at least 1, got {size} and {passes}")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule must be 'linear' or 'sqrt', got {rule!r}")
    return lr * (size * passes if rule == "linear" else math.sqrt(size * passes))


def constant(lr: float) -> Schedule:
    """Always the same rate."""
    return lambda step: lr


def polynomial(lr: float, steps: int, power: float = 1.0, final: float = 0.0) -> Schedule:
    """From `lr` down to `final` over `steps`, as a power of what is left; `final` from then on."""
    _positive("steps", steps)
    return lambda step: final + (lr - final) * (1 - min(step / steps, 1)) ** power


def linear(lr: float, steps: int, final: float = 0.0) -> Schedule:
    """From `lr` down to `final` along a line."""
    return polynomial(lr, steps, 1.0, final)


def cosine(lr: float, steps: int, final: float = 0.0) -> Schedule:
    """From `lr` down to `final` along half a cosine (Loshchilov and Hutter, 2017)."""
    _positive("steps", steps)
    return lambda step: final + (lr - final) * (1 + math.cos(math.pi * min(step / steps, 1))) / 2


def inverse_sqrt(lr: float, steps: int) -> Schedule:
    """`lr` for `steps`, then down with the root of the step (Vaswani et al., 2017)."""
    _positive("steps", steps)
    return lambda step: lr * math.sqrt(steps / max(step, steps))


def piecewise(lr: float, factors: Mapping[int, float]) -> Schedule:
    """`lr` times the factor of the latest step in `factors` that has been reached, 1 before the first.

    >>> schedule = piecewise(1.0, {30: 0.1, 60: 0.01})
    >>> [schedule(step) for step in (0, 29, 30, 59, 60)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    at = sorted(factors)
    rates = [lr, *(lr * factors[step] for step in at)]
    return lambda step: rates[bisect_right(at, step)]


def warmup(schedule: Schedule, steps: int, start: float = 0.0) -> Schedule:
    """Rise along a line from `start` to where `schedule` is after `steps`, and follow it from then on."""
    _positive("steps", steps)
    peak = schedule(steps)
    return lambda step: schedule(step) if step >= steps else start + (peak - start) * step / steps


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
