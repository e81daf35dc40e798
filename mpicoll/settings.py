"""Numbers in the environment."""

from __future__ import annotations

import os
from typing import TypeVar

N = TypeVar("N", int, float)


def number(name: str, default: N) -> N:
    """Return an environment variable as a number of the default's type; the default where it is not set.

    Raises
    ------
    ValueError
        If it is no number of that type, or negative.
    """
    text = os.environ.get(name) or str(default)
    try:
        value = type(default)(text)
    except ValueError:
        value = type(default)(-1)
    if not value >= 0:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ValueError(f"{name}={text}: expected {kind} from 0")
    return value
