"""What this process has done: calls per collective and algorithm, and the last operations.

Always on, since it costs about 0.1 us a call; only the time of every call is taken on request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

LENGTH = 1024  # operations kept


@dataclass(slots=True)
class Total:
    """Calls of one collective that one algorithm served.

    Attributes
    ----------
    calls
        How many.
    nbytes
        Bytes of their full vectors, added up.
    seconds
        Time in blocking calls, where `timing` is on.
    """

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0


timed = False
recent: deque[tuple[str, str, int]] = deque(maxlen=LENGTH)  # collective, algorithm, bytes
_totals: dict[tuple[str, str], Total] = {}


def total(collective: str, algorithm: str) -> Total:
    """The running total of one pair, made when it is first asked for."""
    key = collective, algorithm
    if key not in _totals:
        _totals[key] = Total()
    return _totals[key]


def note(collective: str, algorithm: str, nbytes: int, seconds: float = 0.0) -> None:
    """Count one call."""
    entry = total(collective, algorithm)
    entry.calls += 1
    entry.nbytes += nbytes
    entry.seconds += seconds
    recent.append((collective, algorithm, nbytes))


def latest(count: int = 3) -> str:
    """The last calls in words, for reports."""
    calls = list(recent)[-count:]
    return ", ".join(f"{collective} {algorithm} of {nbytes} bytes" for collective, algorithm, nbytes in calls)


def totals() -> dict[tuple[str, str], Total]:
    """Totals by collective and algorithm, of what was called at least once."""
    return {key: entry for key, entry in _totals.items() if entry.calls}


def stats() -> dict[str, dict[str, int]]:
    """Calls served in this process, by collective and algorithm.

    Non-blocking and persistent forms count under the blocking name.

    Returns
    -------
    dict
        Such as `{"allreduce": {"ring": 3, "native": 5}}`.
    """
    counts: dict[str, dict[str, int]] = {}
    for (collective, algorithm), entry in totals().items():
        counts.setdefault(collective, {})[algorithm] = entry.calls
    return counts


def timing(on: bool) -> None:
    """Take the time of every blocking call from now on, or stop doing so."""
    global timed
    timed = on


def clear() -> None:
    """Forget everything."""
    recent.clear()
    for entry in _totals.values():  # communicators hold on to their totals
        entry.calls = entry.nbytes = 0
        entry.seconds = 0.0
