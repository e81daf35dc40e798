"""mpicoll: MPI made good at training.

Collective algorithms written over MPI point-to-point calls, on NumPy and CuPy arrays, and the
training layers that stand on them.  Importing this package does not initialise MPI: names are
looked up when they are first used, so that plans can be drawn where no MPI is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_homes = {
    "Intracomm": "comm",
    "ArgumentError": "errors",
    "LaunchError": "errors",
    "MismatchError": "errors",
    "StallError": "errors",
    "stats": "record",
    "PlanError": "verify",
    "Send": "plan",
    "Recv": "plan",
    "Copy": "plan",
}
_rooms = (
    "algorithms",
    "arrays",
    "buckets",
    "checkpoint",
    "data",
    "datasets",
    "draw",
    "nn",
    "op",
    "optim",
    "parallel",
    "plan",
    "prefetch",
    "record",
    "sampler",
    "select",
    "slurm",
    "timeline",
    "verify",
)

__all__ = ["__version__", *_homes, *_rooms]


def __getattr__(name: str) -> Any:
    if name in _homes:
        value = getattr(import_module(f"{__name__}.{_homes[name]}"), name)
    elif name in _rooms:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
