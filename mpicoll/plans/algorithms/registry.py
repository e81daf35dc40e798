"""The open registry of algorithms: what each is called, what it takes and what it needs."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias, TypeVar

from ..plan import Plan
from .hierarchical import Nodes

Function: TypeAlias = Callable[..., Plan]
F = TypeVar("F", bound=Function)

COLLECTIVES: Final = ("allreduce", "reduce", "bcast", "allgather", "reduce_scatter", "alltoall", "barrier")
REDUCTIONS: Final = ("allreduce", "reduce", "reduce_scatter")
ROOTED: Final = ("reduce", "bcast")
OWNED: Final = ("allgather", "reduce_scatter", "alltoall")  # the caller says who owns which chunk
OPTIONS: Final = ("root", "segments", "nodes")
NATIVE: Final = "native"


@dataclass(frozen=True)
class Sizes:
    """The numbers of ranks that an algorithm serves, with the words for it."""

    words: str
    allows: Callable[[int], object]


ANY: Final = Sizes("any number of ranks", lambda size: True)
EVEN: Final = Sizes("an even number of ranks", lambda size: size % 2 == 0)
POWER_OF_TWO: Final = Sizes("a power of two", lambda size: size & (size - 1) == 0)


@dataclass(frozen=True)
class Algorithm:
    """One way to perform a collective.

    Attributes
    ----------
    collective
        One of `COLLECTIVES`.
    name
        What users call it. `"native"` is the MPI library's own.
    function
        Yields one rank's rounds, given `(rank, size)` and the options in `takes`; None for `"native"`.
    commutative
        True: serves commutative operators only. False: keeps operand order, or has no operands.
    sizes
        The numbers of ranks that it serves.
    takes
        Which of `root`, `segments` and `nodes` the function takes.
    cut
        The number of chunks: an int, or a function of `size`, `segments` and `nodes`, as it names them.
        None: one per segment where the function takes segments, otherwise one per rank.
    weigh
        A function of `size` and `nodes` that returns the chunks' lengths as parts of the vector; None:
        chunks are equal.
    """

    collective: str
    name: str
    function: Function | None
    commutative: bool = False
    sizes: Sizes = ANY
    takes: tuple[str, ...] = ()
    cut: int | Callable[..., int] | None = None
    weigh: Callable[..., Sequence[Fraction]] | None = None

    def __str__(self) -> str:
        return f"{self.collective} {self.name}"

    def plan(
        self, rank: int, size: int, *, root: int = 0, segments: int = 1, nodes: Nodes | None = None
    ) -> Plan:
        """Return the rounds of one rank; options that the algorithm does not take are dropped."""
        if self.function is None:
            raise ValueError(f"{self} is the MPI library's own and has no plan")
        options = {"root": root, "segments": segments, "nodes": nodes}
        return self.function(rank, size, **{name: options[name] for name in self.takes})

    def chunks(self, size: int, *, segments: int = 1, nodes: Nodes | None = None) -> int:
        """Return the number of chunks that OUT is cut into."""
        if isinstance(self.cut, int):
            return self.cut
        if self.cut is not None:
            return int(_call(self.cut, size=size, segments=segments, nodes=nodes))
        if self.weigh is not None:
            return len(_call(self.weigh, size=size, segments=segments, nodes=nodes))
        return segments if "segments" in self.takes else size

    def weights(self, size: int, *, nodes: Nodes | None = None) -> list[Fraction] | None:
        """Return the lengths of the chunks as parts of the vector; None: they are equal."""
        return None if self.weigh is None else list(_call(self.weigh, size=size, nodes=nodes))

    def unmet(self, size: int, *, commutative: bool = True, nodes: Nodes | None = None) -> str | None:
        """Return why the algorithm cannot serve here, in words; None: it can."""
        if not self.sizes.allows(size):
            return f"{self} needs {self.sizes.words}, not {size}"
        if self.commutative and not commutative:
            return f"{self} reorders its operands and needs a commutative operator"
        if "nodes" in self.takes and nodes is None:
            return f"{self} needs to know the ranks of every node"
        return None


def _call(function: Callable[..., Any], **values: object) -> Any:
    """Call a function with those of `values` that it names."""
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in names})


registry: dict[str, dict[str, Algorithm]] = {
    collective: {NATIVE: Algorithm(collective, NATIVE, None)} for collective in COLLECTIVES
}


def register(
    collective: str,
    name: str | None = None,
    *,
    sizes: Sizes = ANY,
    commutative: bool = False,
    chunks: int | Callable[..., int] | None = None,
    weights: Callable[..., Sequence[Fraction]] | None = None,
) -> Callable[[F], F]:
    """Register an algorithm under a name: a decorator, which returns the function as it is.

    A function that is defined anew, as by a notebook's cell that is run again, takes the place of the old
    one on communicators that have not used that yet.

    Parameters
    ----------
    collective
        One of `COLLECTIVES`.
    name
        What users will call it; by default the function's name.
    sizes, commutative, chunks, weights
        As in `Algorithm` (`chunks` and `weights` are its `cut` and `weigh`). Without `chunks`, an
        attribute `chunks` of the function counts.

    Examples
    --------
    >>> from mpicoll.plan import Recv, Send
    >>> @register("bcast", "example_flat", chunks=1)
    ... def flat(rank, size, root=0):
    ...     peers = [peer for peer in range(size) if peer != root]
    ...     yield [Send(peer, 0) for peer in peers] if rank == root else [Recv(root, 0)]
    >>> get("bcast", "example_flat").chunks(4)
    1
    >>> del registry["bcast"]["example_flat"]
    """
    known = _known(collective)

    def enter(function: F) -> F:
        entry = wrap(collective, function, name, sizes, commutative, chunks, weights)
        if entry.name in known and not _again(known[entry.name].function, function):
            raise ValueError(f"there is already an algorithm {entry}")
        known[entry.name] = entry
        return function

    return enter


def _again(old: Function | None, new: Function) -> bool:
    """Whether a function is another one's definition run again."""
    names = [(getattr(f, "__module__", f), getattr(f, "__qualname__", f)) for f in (old, new)]
    return names[0] == names[1]


def wrap(
    collective: str,
    function: Function,
    name: str | None = None,
    sizes: Sizes = ANY,
    commutative: bool = True,
    chunks: int | Callable[..., int] | None = None,
    weights: Callable[..., Sequence[Fraction]] | None = None,
) -> Algorithm:
    """Describe a function as an algorithm, without registering it; `takes` is read from its signature."""
    _known(collective)
    if not callable(function):
        raise TypeError(f"an algorithm is a function of (rank, size), not {function!r}")
    name = name or str(getattr(function, "__name__", type(function).__name__))
    parameters = list(inspect.signature(function).parameters.values())
    takes = tuple(p.name for p in parameters if p.name in OPTIONS)
    strange = [p.name for p in parameters[2:] if p.name not in OPTIONS and p.default is p.empty]
    if len(parameters) < 2 or strange:
        raise ValueError(
            f"algorithm {name} takes ({', '.join(p.name for p in parameters)}); it must take (rank, size) "
            f"and may take {', '.join(OPTIONS)}"
        )
    if chunks is None:
        chunks = getattr(function, "chunks", None)
    return Algorithm(collective, name, function, commutative, sizes, takes, chunks, weights)


def get(collective: str, algorithm: str | Function | Algorithm) -> Algorithm:
    """Look up an algorithm by name, or describe a function as one.

    Parameters
    ----------
    collective
        One of `COLLECTIVES`.
    algorithm
        A registered name, `"path/file.py:function"`, or a function of `(rank, size)`. A function that is
        not registered is cut into one chunk per segment or rank, unless it has an attribute `chunks`, and
        counts as reordering operands until it is verified (`mpicoll.verify.admit`).

    Raises
    ------
    ValueError
        If there is no such collective or algorithm: names the known ones and the nearest.
    """
    known = _known(collective)
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, str):
        if algorithm not in known and ".py:" in algorithm:
            return get(collective, load(algorithm))
        lost = load_entry_points() if algorithm not in known else ()
        if algorithm not in known and (":" in algorithm or algorithm.endswith(".py")):
            raise ValueError(f"no algorithm {algorithm!r}: a function in a file is path/file.py:function")
        if algorithm not in known:
            raise ValueError("; ".join([_unknown(f"{collective} algorithm", algorithm, known), *lost]))
        return known[algorithm]
    for entry in known.values():
        if entry.function is algorithm:
            return entry
    return wrap(collective, algorithm)


@cache
def load(where: str) -> Function:
    """Load a function from `"path/file.py:function"`; the file is run once per process.

    A file that the program has imported is not run again. Others beside it can be imported from it.
    """
    path, _, name = where.rpartition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"no file {path} to load algorithm {name} from")
    module = _imported(file) or _run(file)
    if not callable(getattr(module, name, None)):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
        functions = [n for n in own if inspect.isfunction(vars(module)[n])]
        raise ValueError(_unknown(f"function in {path}:", name, functions))
    function: Function = getattr(module, name)
    return function


def _imported(file: Path) -> ModuleType | None:
    """Return the module that a file has become, if it is imported."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__file__")  # some modules import more for an attribute
        if isinstance(path, str) and Path(path).name == file.name and Path(path).resolve() == file:
            return module
    return None


def _run(file: Path) -> ModuleType:
    """Import a file, under its own name if that is how it would be found."""
    found = None if file.stem in sys.modules else importlib.util.find_spec(file.stem)
    known = found is not None and found.origin is not None and Path(found.origin).resolve() == file
    name = file.stem if known else f"mpicoll_loaded_{file.stem}"
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{file.name} cannot be imported: {in_words(error)}") from error
    return module


def in_words(error: Exception) -> str:
    """Say what was raised and in which line, of those outside mpicoll the innermost."""
    ours = str(Path(__file__).parents[2])
    lines = [
        f" ({Path(frame.filename).name}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, "<frozen"))
    ]
    at = lines[-1] if lines and not isinstance(error, SyntaxError) else ""  # that one says it by itself
    return f"{type(error).__name__}: {error}{at}"


@cache
def load_entry_points() -> tuple[str, ...]:
    """Import what installed packages list under `mpicoll.algorithms`; importing it registers.

    Returns, in words, what could not be imported.
    """
    lost = []
    for point in entry_points(group="mpicoll.algorithms"):
        try:
            point.load()
        except Exception as error:
            what = f"entry point {point.name} = {point.value} under mpicoll.algorithms"
            lost.append(f"{what} cannot be imported: {in_words(error)}")
    return tuple(lost)


def _known(collective: str) -> dict[str, Algorithm]:
    if collective not in registry:
        raise ValueError(_unknown("collective", collective, registry))
    return registry[collective]


def _unknown(kind: str, name: str, known: Sequence[str] | dict[str, Any]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"no {kind} {name!r}{hint}; known: {', '.join(known) or 'none'}"
