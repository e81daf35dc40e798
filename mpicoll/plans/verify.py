"""Verify plans: interpret all ranks in one process, on symbolic values.

Every chunk holds a *value* that remembers whose contributions it has, in which order, and by which
expression it was added up. Sends are rendezvous sends, so a plan that relies on buffering is found to
deadlock. What comes out is either a `PlanError`, which names rank, round and chunk, or a `Report` of what
the plan costs and promises.

"Verified" means: for this number of ranks, root, segments and nodes. It is a check, not a proof for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from .algorithms import REDUCTIONS, Algorithm, Nodes, get
from .algorithms.registry import Function
from .interpret import Machine
from .plan import OUT
from .trace import PlanError, Report, Trace, ranks_in_words, snapshot

__all__ = ["PlanError", "Report", "admit", "check", "trace"]

SHOWN = 10  # rounds of a plan that does not end


def check(
    algorithm: Algorithm, size: int, *, root: int = 0, segments: int = 1, nodes: Nodes | None = None
) -> Report:
    """Verify an algorithm for one number of ranks.

    Parameters
    ----------
    algorithm
        From `mpicoll.algorithms.get`.
    size
        The number of ranks.
    root, segments, nodes
        Passed on to the algorithm if it takes them.

    Returns
    -------
    Report

    Raises
    ------
    PlanError
        If a rank ends with a wrong result, counts a contribution twice, reads what is not there, waits
        for ever, or combines out of order although the algorithm is declared to keep it.
    ValueError
        If the algorithm does not serve this number of ranks.

    Examples
    --------
    >>> report = check(get("allreduce", "ring"), 5)
    >>> report.rounds, report.sent, report.ordered, report.same_bits
    (8, 8, False, True)
    """
    run = _machine(algorithm, size, root, segments, nodes)
    run.run()
    return _judge(run, algorithm)


def admit(
    collective: str, function: Function, size: int, *, root: int = 0, nodes: Nodes | None = None
) -> Algorithm:
    """Verify a function and describe it as an algorithm, `commutative` set by what was found.

    Raises
    ------
    PlanError
        If the function is not a correct algorithm for this number of ranks.
    """
    algorithm = get(collective, function)
    report = check(algorithm, size, root=root, nodes=nodes)
    return replace(algorithm, commutative=not report.ordered)


def trace(
    algorithm: Algorithm, size: int, *, root: int = 0, segments: int = 1, nodes: Nodes | None = None
) -> Trace:
    """Run an algorithm as `check` does and keep every step, for drawing.

    A wrong plan raises nothing here: it is traced up to its fault, which is the trace's `error`.
    """
    steps = Trace(algorithm.collective, algorithm.name, size)
    run = _machine(algorithm, size, root, segments, nodes, steps)
    steps.chunks, steps.start = run.chunks, [snapshot(state) for state in run.state]
    try:
        run.run()
        steps.report = _judge(run, algorithm)
    except PlanError as error:
        steps.error = error
        steps.time = _when(error, run, steps)
    else:
        steps.time = steps.report.rounds
    steps.end = [snapshot(state) for state in run.state]
    return steps


def _when(error: PlanError, run: Machine, steps: Trace) -> int:
    """Return the time of a fault: while a round lands, after the last one, or in the one about to begin."""
    if error.rank is None or error.round is None:
        return min(max(run.clock), SHOWN)  # of a plan that does not end
    landed = [landing.time for landing in steps.landings if landing.rank == error.rank]
    now = run.clock[error.rank]
    over = len(landed) >= error.round or now > max(landed, default=0)
    return now if over else now + 1


def _machine(
    algorithm: Algorithm, size: int, root: int, segments: int, nodes: Nodes | None, steps: Trace | None = None
) -> Machine:
    if algorithm.function is None:
        raise ValueError(f"{algorithm} is the MPI library's own: there is no plan to look at")
    if size < 1 or segments < 1:
        raise ValueError(f"there is nothing to look at with {size} ranks and {segments} segments")
    if not 0 <= root < size:
        raise ValueError(f"there is no root {root} among {size} ranks")
    if nodes is not None and sorted(rank for node in nodes for rank in node) != list(range(size)):
        raise ValueError(f"the nodes {nodes} do not hold each of {size} ranks once")
    reason = algorithm.unmet(size, nodes=nodes)
    if reason:
        raise ValueError(reason)
    chunks = algorithm.chunks(size, segments=segments, nodes=nodes)
    equal = [Fraction(1, chunks)] * chunks if chunks else []
    return Machine(
        algorithm.collective,
        size,
        root,
        lambda rank: algorithm.plan(rank, size, root=root, segments=segments, nodes=nodes),
        algorithm.weights(size, nodes=nodes) or equal,
        steps,
    )


def _judge(run: Machine, algorithm: Algorithm) -> Report:
    """Check that every rank ended with what its collective promises, and report."""
    for rank, chunk, key in _promised(run):
        value, at = run.state[rank][OUT].get(chunk), (rank, run.rounds[rank], chunk)
        if value is None:
            raise PlanError("the plan ends without a result", *at)
        if value.key != key:
            raise PlanError(f"the plan ends with {run.words(value)} instead", *at)
        if run.collective in REDUCTIONS and value.ranks != run.everyone:
            lost = ranks_in_words(run.everyone & ~value.ranks)
            raise PlanError(f"the plan ends without the contribution of {lost}", *at)
    for rank, heard in enumerate(run.heard if run.collective == "barrier" else ()):
        if heard != run.everyone:
            lost = ranks_in_words(run.everyone & ~heard)
            raise PlanError(f"the plan ends without having heard of {lost}", rank, run.rounds[rank])
    values = [run.state[rank][OUT][chunk] for rank, chunk, _ in _promised(run)]
    ordered = run.collective not in REDUCTIONS or all(v.span == (0, run.size) for v in values)
    if not ordered and not algorithm.commutative:
        assert run.disorder is not None
        what = "combines operands out of rank order, but is declared to keep it: not with commutative=True"
        raise PlanError(what, *run.disorder)
    return Report(
        rounds=max(run.clock),
        sent=max(run.sent),
        volumes=tuple(Fraction(v, run.unit) for v in run.volumes),
        messages=run.messages,
        pieces=run.pieces,
        fanout=run.fanout,
        staged=run.staged,
        ordered=ordered,
        same_bits=len({(v.key, v.expr) for v in values}) == len({v.key for v in values}),
        alike=run.alike,
    )


def _promised(run: Machine) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, chunk, key of its value) for every result that the collective promises."""
    if run.collective != "barrier":
        for rank in [run.root] if run.collective == "reduce" else range(run.size):
            for c in run.owned(rank) if run.collective == "reduce_scatter" else range(run.chunks):
                yield rank, c, c * run.size + rank if run.collective == "alltoall" else c
