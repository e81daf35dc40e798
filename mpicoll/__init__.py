"""mpicoll: MPI made good at training.

Collective algorithms written over MPI point-to-point calls, on NumPy and CuPy arrays, and the
training layers that stand on them.  Importing this package does not initialise MPI: names are
looked up when they are first used, so that plans can be drawn where no MPI is installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_homes = {
    "Intracomm": "comm.intracomm",
    "ArgumentError": "errors",
    "LaunchError": "errors",
    "MismatchError": "errors",
    "StallError": "errors",
    "stats": "runtime.record",
    "PlanError": "plans.verify",
    "Send": "plans.plan",
    "Recv": "plans.plan",
    "Copy": "plans.plan",
}
# Public modules, by the name that users import: `import mpicoll.optim` finds `mpicoll/train/optim`.
_aliases = {
    "algorithms": "plans.algorithms",
    "arrays": "memory.buffer",
    "buckets": "train.buckets",
    "checkpoint": "io.checkpoint",
    "data": "io.text",
    "datasets": "io.arrays",
    "draw": "plans.draw",
    "nn": "train.nn",
    "op": "memory.op",
    "optim": "train.optim",
    "parallel": "train.parallel",
    "plan": "plans.plan",
    "prefetch": "io.prefetch",
    "record": "runtime.record",
    "sampler": "io.sampler",
    "timeline": "train.timeline",
    "verify": "plans.verify",
}
_packages = ("select", "slurm")

__all__ = ["__version__", *_homes, *_aliases, *_packages]


class _Aliases:
    """Imports a public module from where it lives: one module object under both names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        first, _, below = rest.partition(".")
        if package != __name__ or first not in _aliases:
            return None
        home = ".".join(filter(None, (__name__, _aliases[first], below)))
        return ModuleSpec(name, self, origin=home)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__  # the import system is about to replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state  # type: ignore[union-attr]


sys.meta_path.insert(0, _Aliases())  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    if name in _homes:
        value = getattr(import_module(f"{__name__}.{_homes[name]}"), name)
    elif name in _aliases or name in _packages:
        value = import_module(f"{__name__}.{_aliases.get(name, name)}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
