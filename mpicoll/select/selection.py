"""Which algorithm serves a call: an ordered list of rules, the first that matches wins.

What is chosen follows only from what is the same on every rank: the collective, the bytes of the full
vector, whether the operator commutes, the shape of the communicator, and the environment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plans.algorithms import COLLECTIVES, NATIVE, Algorithm, Nodes, get
from .slicing import KIB, MIB, segments_for, slices_for, window_demand, window_slices_for

TRANSPORTS = ("mpi", "window")
WINDOW_LEAST = 64 * KIB  # an algorithm asked for by name uses the window from here on


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes
    ----------
    collective, algorithm
        What it serves and with what.
    transport
        `"window"` needs all ranks on one node and a shared window.
    least, most
        Bytes of the full vector, `least <= nbytes < most`.
    one_node
        True: only where all ranks share a node; False: only where they do not; None: anywhere.
    why
        Where the rule comes from.
    """

    collective: str
    algorithm: str
    transport: str = "mpi"
    least: float = 0
    most: float = math.inf
    one_node: bool | None = None
    why: str = "default"


@dataclass(frozen=True)
class Setting:
    """What all ranks of a communicator agree on.

    Attributes
    ----------
    size
        Number of ranks.
    nodes
        The ranks of every node.
    window
        Whether there is a shared window for them.
    """

    size: int
    nodes: Nodes
    window: bool = False

    @property
    def one_node(self) -> bool:
        """Whether all ranks share a node."""
        return len(self.nodes) == 1


@dataclass(frozen=True)
class Choice:
    """What serves a call, and why.  `str()` explains it.

    Attributes
    ----------
    entry, algorithm
        The algorithm, and its name.
    transport
        `"mpi"` or `"window"`; of no meaning for the native algorithm.
    segments, slices
        How the message is cut: by the algorithm, or by running it on one part after the other.
    rule
        The rule that matched.
    nbytes
        Bytes of the full vector.
    passed
        Rules that came first and could not serve, with the reason.
    """

    entry: Algorithm
    transport: str
    segments: int
    slices: int
    rule: Rule
    nbytes: int
    passed: tuple[tuple[Rule, str], ...] = ()

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return self.entry.name

    def __str__(self) -> str:
        how = "the MPI's own" if self.algorithm == NATIVE else f"{self.algorithm} over {self.transport}"
        cuts = "".join(
            f", {n} {what}" for n, what in ((self.segments, "segments"), (self.slices, "slices")) if n > 1
        )
        lines = [
            f"{self.rule.collective} of {self.nbytes} bytes: {how}{cuts}",
            f"  rule: {_words(self.rule)}",
        ]
        return "\n".join([*lines, *(f"  passed over: {reason}" for reason in _reasons(self.passed))])

    @property
    def slight(self) -> str | None:
        """What was asked for in the environment and could not serve, with the reason."""
        asked = [(rule, why) for rule, why in self.passed if rule.why.startswith("MPICOLL_")]
        if not asked or self.rule.why.startswith("MPICOLL_"):
            return None
        rule, why = asked[-1]
        return f"{rule.why}={rule.algorithm}: {why}; {self.algorithm} serves instead"


def _reasons(passed: Sequence[tuple[Rule, str]]) -> tuple[str, ...]:
    return tuple(f"{_words(rule)}: {reason}" for rule, reason in passed)


def _words(rule: Rule) -> str:
    high = "" if math.isinf(rule.most) else f" below {rule.most:.0f} bytes"
    low = f" from {rule.least:.0f} bytes" if rule.least else ""
    where = {True: " on one node", False: " on several nodes", None: ""}[rule.one_node]
    return f"{rule.algorithm}{low}{high}{where} ({rule.why})"


# Measured on one node (see docs/benchmarks); across nodes by the algorithms' costs.
DEFAULTS: tuple[Rule, ...] = (
    Rule("allreduce", "direct", "window", 64 * KIB, one_node=True),
    Rule("reduce", "direct", "window", 128 * KIB, one_node=True),
    Rule("reduce_scatter", "direct", "window", 128 * KIB, one_node=True),
    Rule("allgather", "direct", "window", 256 * KIB, 8 * MIB, one_node=True),
    Rule("alltoall", "direct", "window", 256 * KIB, 8 * MIB, one_node=True),
    Rule("bcast", "direct", "window", 128 * KIB, one_node=True),
    Rule("allreduce", "split_rail", least=256 * KIB, one_node=False),
    Rule("allreduce", "circulant", least=256 * KIB, one_node=False),
    *(Rule(collective, NATIVE) for collective in COLLECTIVES),
    # where the MPI's own refuses the type or operator
    Rule("allreduce", "recursive_doubling", most=64 * KIB),
    Rule("allreduce", "circulant"),
    Rule("allreduce", "recursive_doubling"),
    Rule("reduce", "binomial", most=64 * KIB),
    Rule("reduce", "ordered"),
    Rule("reduce_scatter", "circulant"),
    Rule("reduce_scatter", "ordered"),
)


def preferred(environ: Mapping[str, str] = os.environ) -> tuple[Rule, ...]:
    """The rules that `MPICOLL_ALLREDUCE=ring` and its like put first.

    Raises
    ------
    ValueError
        For an unknown algorithm or transport.
    """
    transport = environ.get("MPICOLL_TRANSPORT", "")
    if transport and transport not in TRANSPORTS:
        raise ValueError(f"MPICOLL_TRANSPORT={transport}: expected one of {', '.join(TRANSPORTS)}")
    rules = []
    for collective in COLLECTIVES:
        variable = f"MPICOLL_{collective.upper()}"
        name = environ.get(variable)
        if name:
            try:
                get(collective, name)
            except ValueError as error:
                raise ValueError(f"{variable}={name}: {error}") from error
            least = 0 if transport == "window" else WINDOW_LEAST
            rules += [
                Rule(collective, name, "window", least, why=variable),
                Rule(collective, name, why=variable),
            ]
    return tuple(rules)


class Selection:
    """The rules of a communicator.

    Parameters
    ----------
    setting
        The communicator's shape.
    environ
        Where preferences are read.
    """

    def __init__(self, setting: Setting, environ: Mapping[str, str] = os.environ) -> None:
        self.setting = setting
        self.forced = environ.get("MPICOLL_TRANSPORT") or None
        self.preferences = preferred(environ)
        self.rules = (*self.preferences, *DEFAULTS)
        self._known: dict[tuple[object, ...], Choice] = {}

    def quick(self, collective: str) -> int:
        """Bytes below which every call of a collective goes to the MPI's own, operators permitting."""
        if any(rule.collective == collective for rule in self.preferences):
            return 0
        if self.setting.size == 1:
            return 1 << 62
        least = [
            r.least for r in self.rules if r.collective == collective and r.algorithm != NATIVE and r.least
        ]
        return int(min(least, default=1 << 62))

    def choose(
        self,
        collective: str,
        nbytes: int,
        *,
        commutative: bool = True,
        native: bool = True,
        algorithm: Algorithm | None = None,
        root: int = 0,
    ) -> Choice:
        """The first rule that can serve.

        Parameters
        ----------
        collective, nbytes
            The call; bytes of the full vector.
        commutative
            Whether operands may be exchanged.
        native
            Whether the MPI's own takes the type and operator.
        algorithm
            Asked for in the call: it serves, or the call is refused.
        root
            Of the call; 0 where there is none.

        Raises
        ------
        ValueError
            Where the algorithm that was asked for cannot serve, saying why.
        """
        key = collective, nbytes, commutative, native, algorithm, root
        if key not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[key] = self._choose(*key)
        return self._known[key]

    def _choose(
        self,
        collective: str,
        nbytes: int,
        commutative: bool,
        native: bool,
        algorithm: Algorithm | None,
        root: int,
    ) -> Choice:
        rules: Sequence[Rule] = self.rules
        if algorithm is not None:
            least = 0 if self.forced == "window" else WINDOW_LEAST
            rules = [
                Rule(collective, algorithm.name, t, least if t == "window" else 0, why="algorithm=")
                for t in ("window", "mpi")
            ]
        passed: list[tuple[Rule, str]] = []
        for rule in rules:
            if rule.collective != collective or not rule.least <= nbytes < rule.most:
                continue
            if rule.one_node is not None and rule.one_node != self.setting.one_node:
                continue
            entry = algorithm or get(collective, rule.algorithm)
            reason = self._unmet(entry, rule, commutative, native, root)
            if reason is None:
                cuts = self._cut(entry, rule, nbytes, root)
                return Choice(entry, rule.transport, *cuts, rule, nbytes, tuple(passed))
            passed.append((rule, reason))
        if algorithm is not None:
            raise ValueError(passed[-1][1])
        raise ValueError(f"nothing serves {collective} of {nbytes} bytes: {'; '.join(_reasons(passed))}")

    def _unmet(self, entry: Algorithm, rule: Rule, commutative: bool, native: bool, root: int) -> str | None:
        """Why an algorithm cannot serve here, None if it can."""
        setting = self.setting
        if entry.name == NATIVE:
            return None if native else "the MPI's own does not take this type and operator"
        if rule.transport == "window":
            if self.forced == "mpi":
                return "MPICOLL_TRANSPORT=mpi"
            if not setting.window:
                return "the ranks have no shared window"
        reason = entry.unmet(setting.size, commutative=commutative, nodes=setting.nodes)
        if reason is None and rule.transport == "window" and window_demand(entry, setting.size, root) is None:
            return f"{entry} does not suit a window: its messages cross rounds"
        return reason

    def _cut(self, entry: Algorithm, rule: Rule, nbytes: int, root: int) -> tuple[int, int]:
        """Segments and slices."""
        size = self.setting.size
        if entry.name == NATIVE:
            return 1, 1
        if rule.transport == "window":
            return 1, window_slices_for(nbytes, window_demand(entry, size, root) or 0, size)
        return segments_for(entry, nbytes), slices_for(entry, nbytes, size, self.setting.nodes)
