"""Messages between any two ranks: a plan as strands of sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from ...memory.address import Workspace
from ...plans.algorithms import Algorithm
from ..execute import Patience, Program, Strand
from .bound import bind
from .lower import SCRATCH, TEMPORARY, Layout, Lowering
from .problem import WORK, Problem

WIDTH = 4  # slices in flight: enough to hide a reduction behind a message, few enough to stay in cache


def compile_messages(
    problem: Problem,
    algorithm: Algorithm,
    comm: MPI.Intracomm,
    tag: int,
    patience: Patience,
    workspace: Workspace,
    *,
    segments: int = 1,
    slices: int = 1,
    alike: bool = True,
    nodes: Sequence[Sequence[int]] | None = None,
) -> Program:
    """A program of messages for one call.  Never communicates.

    Parameters
    ----------
    problem
        The call.
    algorithm
        Not native.
    comm
        The private communicator.
    tag
        The first of `WIDTH` tags that no other call uses meanwhile.
    workspace
        Memory that the programs of the lane share.
    segments
        For algorithms that take segments.
    slices
        How often the plan runs, on successive parts of the message.
    alike
        Whether both ends of every message cut it into the same runs.
    nodes
        The ranks of every node, for hierarchical algorithms.
    """
    size = problem.size
    chunks = algorithm.chunks(size, segments=segments, nodes=nodes)
    whole = problem.layout(chunks, algorithm.weights(size, nodes=nodes), slices)
    lowerings = []
    for s in range(slices):
        plan = algorithm.plan(problem.rank, size, root=problem.root, segments=segments, nodes=nodes)
        lowering = Lowering(_slice(whole, s, chunks), alike=alike)
        lowerings.append((lowering, lowering.lower(plan)))
    width = min(WIDTH, slices)
    scratch = max(low.scratch for low, _ in lowerings)
    temporary = max(low.temporary for low, _ in lowerings)
    work = workspace.take(WORK, whole.extent(WORK))
    strands = []
    for s, (_, steps) in enumerate(lowerings):
        slot = s % width
        memory: dict[Any, Any] = {WORK: work, **problem.memory}
        memory[SCRATCH] = workspace.take((SCRATCH, slot), scratch)
        memory[TEMPORARY] = workspace.take((TEMPORARY, slot), temporary)
        strands.append(Strand(comm, [bind(step, memory, problem.reducer) for step in steps], tag + slot))
    title = f"{problem.collective} {algorithm.name}, {problem.nbytes} bytes"
    return Program(strands, width, title, patience)


def _slice(whole: Layout, s: int, chunks: int) -> Layout:
    """The chunks of one slice, numbered from 0."""
    first, last = s * chunks, (s + 1) * chunks
    return Layout(
        whole.out[first:last],
        whole.source and whole.source[first:last],
        whole.inp and whole.inp[first:last],
        [c - first for c in whole.result if first <= c < last],
    )
