"""What `mpicoll doctor` finds: a line of its report, made from facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEVELS = ("ok", "note", "warning", "error")
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One line of the report; `cause` and `remedy` where something is not well."""

    level: str
    topic: str
    text: str
    cause: str = ""
    remedy: str = ""
