"""From the arguments of a collective to a problem for the executor, with mpi4py's rules and defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import ArgumentError
from ..memory.address import address_of, aligned_empty, host_view
from ..memory.buffer import NATIVE, Buffer, integer, parse
from ..memory.op import Reducer, native_takes, own
from ..runtime.transport.problem import INPUT, OUTPUT, Problem


@dataclass(slots=True)
class Call:
    """One call of a collective.

    Attributes
    ----------
    problem
        What to do.
    arguments
        For the MPI's own collective.
    native
        Whether the MPI's own takes the type and the operator.
    buffers
        Kept alive while it runs; the last one is received into.
    """

    problem: Problem
    arguments: tuple[Any, ...]
    native: bool
    buffers: tuple[Buffer | None, ...]

    def prelude(self, *, native: bool, again: bool) -> list[Callable[[], Any]]:
        """Calls before the start; `again` for runs whose buffers were not just parsed."""
        renew = [b.renew for b in self.buffers if b is not None and b.renew is not None and b.unlike(native)]
        return [*(renew if again else ()), *(() if native else self.problem.prelude)]

    def packed(self) -> bool:
        """Whether the MPI's own works on copies of ours, or leaves something to do: we must stay with it."""
        return bool(self.prelude(native=True, again=True) or self.finale(native=True))

    def finale(self, *, native: bool) -> list[Callable[[], Any]]:
        """Calls after the end: what the plan left to do, the division of `AVG`, unpacking."""
        problem, todo = self.problem, [] if native else list(self.problem.finale)
        recv = self.buffers[-1] if self.buffers else None
        if recv is None:
            return todo
        if problem.reducer is not None and problem.reducer.average and not problem.reducer.early:
            mine = problem.counts[problem.rank if problem.collective == "reduce_scatter" else 0]
            data = host_view(address_of(recv.data), mine * recv.itemsize)
            todo.append(partial(problem.reducer.finish, data, problem.size))
        if recv.restore is not None and recv.unlike(native) and not self._reads_only():
            todo.append(recv.restore)
        return todo

    def _reads_only(self) -> bool:
        return self.problem.collective == "bcast" and self.problem.rank == self.problem.root


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a call is made: this rank of a communicator."""

    comm: MPI.Intracomm
    rank: int
    size: int


def in_place(spec: Any) -> bool:
    """Whether an argument is `MPI.IN_PLACE`, or None, which mpi4py takes for it."""
    return spec is None or spec is MPI.IN_PLACE


def allreduce(at: Caller, sendbuf: Any, recvbuf: Any, op: Any) -> Call:
    """Arguments of Allreduce."""
    recv = parse(recvbuf, "recvbuf", writable=True)
    send = None if in_place(sendbuf) else _parse_send(sendbuf)
    if send is not None:
        _same(send, recv, recv.count, "recvbuf")
    return _reduction("allreduce", at, send, recv, op, (recv.count,), (sendbuf, recvbuf))


def reduce(at: Caller, sendbuf: Any, recvbuf: Any, op: Any, root: int) -> Call:
    """Arguments of Reduce."""
    _check_root(at, root)
    recv = parse(recvbuf, "recvbuf", writable=True) if at.rank == root else None
    if in_place(sendbuf) and recv is None:
        raise ArgumentError(
            f"sendbuf: IN_PLACE on rank {at.rank}, expected on the root ({root}) only", MPI.ERR_BUFFER
        )
    send = None if in_place(sendbuf) else _parse_send(sendbuf)
    if send is not None and recv is not None:
        _same(send, recv, recv.count, "recvbuf")
    count = recv.count if recv is not None else send.count  # type: ignore[union-attr]
    return _reduction("reduce", at, send, recv, op, (count,), (sendbuf, recvbuf), root)


def reduce_scatter(at: Caller, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None, op: Any) -> Call:
    """Arguments of Reduce_scatter.  Without `recvcounts` the ranks tell each other, as in mpi4py."""
    recv = parse(recvbuf, "recvbuf", writable=True)
    send = None if in_place(sendbuf) else _parse_send(sendbuf)
    if recvcounts is None:
        if send is None:
            raise ArgumentError(
                "recvcounts: None with IN_PLACE, expected a count for every rank", MPI.ERR_COUNT
            )
        recvcounts = at.comm.allgather(recv.count)
    try:
        counts = tuple(integer("recvcounts", n) for n in recvcounts)
    except TypeError:
        raise ArgumentError(
            f"recvcounts: got {recvcounts!r}, expected a count for every rank", MPI.ERR_COUNT
        ) from None
    if len(counts) != at.size or min(counts) < 0:
        raise ArgumentError(
            f"recvcounts: {list(counts)}, expected {at.size} counts of at least 0", MPI.ERR_COUNT
        )
    if send is None:
        _expect(recv.count, sum(counts), "recvbuf", "elements with IN_PLACE (the sum of recvcounts)")
    else:
        _same(send, recv, sum(counts), "the sum of recvcounts")
        _expect(recv.count, counts[at.rank], "recvbuf", f"elements (recvcounts[{at.rank}])")
    return _scattered(at, send, recv, counts, op, (sendbuf, recvbuf, counts))


def reduce_scatter_block(at: Caller, sendbuf: Any, recvbuf: Any, op: Any) -> Call:
    """Arguments of Reduce_scatter_block."""
    if in_place(sendbuf):
        send, recv = None, parse(recvbuf, "recvbuf", writable=True, blocks=at.size)
        block = _block(at, recv, "recvbuf") // max(recv.itemsize, 1)
    else:
        send, recv = _parse_send(sendbuf, blocks=at.size), parse(recvbuf, "recvbuf", writable=True)
        block = recv.count
        _same(send, recv, block * at.size, f"{at.size} times recvbuf")
    return _scattered(at, send, recv, (block,) * at.size, op, (sendbuf, recvbuf))


def bcast(at: Caller, buf: Any, root: int) -> Call:
    """Arguments of Bcast."""
    _check_root(at, root)
    buffer = parse(buf, "buf", writable=at.rank != root)
    problem = Problem("bcast", at.rank, at.size, root, (buffer.nbytes,), 1, _memory(None, buffer))
    return _moved(problem, (buffer,), (buf,), (root,))


def allgather(at: Caller, sendbuf: Any, recvbuf: Any) -> Call:
    """Arguments of Allgather."""
    recv = parse(recvbuf, "recvbuf", writable=True, blocks=at.size)
    send = None if in_place(sendbuf) else _parse_send(sendbuf)
    block = _block(at, recv, "recvbuf")
    if send is not None:
        _expect(send.nbytes, block, "sendbuf", "bytes (recvbuf's part of one rank)")
    problem = Problem("allgather", at.rank, at.size, 0, (block,), 1, _memory(send, recv))
    return _moved(problem, (send, recv), (sendbuf, recvbuf))


def alltoall(at: Caller, sendbuf: Any, recvbuf: Any) -> Call:
    """Arguments of Alltoall."""
    recv = parse(recvbuf, "recvbuf", writable=True, blocks=at.size)
    block = _block(at, recv, "recvbuf")
    if in_place(sendbuf):
        send, memory = None, _memory(None, recv)
        aside = _aside("in", address_of(recv.data), recv.nbytes)
        memory[INPUT] = host_view(address_of(aside), aside.size)
        prelude = [partial(np.copyto, aside, memory[OUTPUT])]
    else:
        send, prelude = _parse_send(sendbuf, blocks=at.size), []
        _expect(_block(at, send, "sendbuf"), block, "sendbuf", "bytes for every rank (as in recvbuf)")
        memory = _memory(send, recv)
    problem = Problem("alltoall", at.rank, at.size, 0, (block,), 1, memory, prelude=prelude)
    return _moved(problem, (send, recv), (sendbuf, recvbuf))


def barrier(at: Caller) -> Call:
    """Arguments of Barrier: none."""
    problem = Problem("barrier", at.rank, at.size, 0, (0,), 1, {OUTPUT: np.empty(0, np.uint8)})
    return Call(problem, (), True, ())


def _parse_send(sendbuf: Any, blocks: int = 1) -> Buffer:
    return parse(sendbuf, "sendbuf", writable=False, blocks=blocks)


def _reduction(
    collective: str,
    at: Caller,
    send: Buffer | None,
    recv: Buffer | None,
    op: Any,
    counts: tuple[int, ...],
    specs: tuple[Any, ...],
    root: int = 0,
) -> Call:
    model = recv if recv is not None else send
    assert model is not None
    reducer = Reducer(op, model)
    memory = _memory(send, recv)
    problem = Problem(collective, at.rank, at.size, root, counts, model.itemsize, memory, reducer)
    if reducer.early and at.size > 1:
        source = memory.get(INPUT, memory.get(OUTPUT))
        assert source is not None
        # calls in flight may share a buffer that they only read: what they make of it must not be shared
        part = _aside(("divided", at.size, model.dtype), address_of(source), source.size)
        memory[INPUT] = host_view(address_of(part), part.size)
        problem.prelude.append(partial(reducer.divide, source, at.size, part))
    send_spec = MPI.IN_PLACE if send is None else _native_spec(send, specs[0])
    recv_spec = None if recv is None else _native_spec(recv, specs[1])
    rest = (own(op), root) if collective == "reduce" else (own(op),)
    return Call(
        problem, (send_spec, recv_spec, *specs[2:], *rest), native_takes(op, model.dtype), (send, recv)
    )


def _scattered(
    at: Caller, send: Buffer | None, recv: Buffer, counts: tuple[int, ...], op: Any, specs: tuple[Any, ...]
) -> Call:
    """In place the result must not be written over what is still read: it is moved there at the end."""
    call = _reduction("reduce_scatter", at, send, recv, op, counts, specs)
    if send is None:
        problem, whole = call.problem, call.problem.memory[OUTPUT]
        nbytes = counts[at.rank] * recv.itemsize
        result = _aside("out", address_of(whole), nbytes)
        source = problem.memory.get(INPUT, whole)
        problem.memory = {INPUT: source, OUTPUT: host_view(address_of(result), nbytes)}
        problem.finale.append(partial(np.copyto, whole[:nbytes], result))
    return call


@lru_cache(maxsize=16)
def _aside(what: Any, address: int, nbytes: int) -> np.ndarray:
    """Memory beside a buffer: the same in every call, so that its program is found again."""
    return aligned_empty(nbytes)


def _moved(
    problem: Problem, buffers: tuple[Buffer | None, ...], specs: tuple[Any, ...], rest: tuple[Any, ...] = ()
) -> Call:
    arguments = [
        MPI.IN_PLACE if buffer is None else _native_spec(buffer, spec)
        for buffer, spec in zip(buffers, specs, strict=True)
    ]
    return Call(problem, (*arguments, *rest), True, buffers)


def _memory(send: Buffer | None, recv: Buffer | None) -> dict[Any, np.ndarray]:
    """Views that keep nobody's array alive: programs outlive calls."""
    pairs = ((INPUT, send), (OUTPUT, recv))
    return {base: host_view(address_of(b.data), b.nbytes) for base, b in pairs if b is not None}


def _native_spec(buffer: Buffer, spec: Any) -> Any:
    """The argument as the MPI's own collective takes it: as it came where it can."""
    if buffer.dtype is None:
        return spec
    known = buffer.mpitype or NATIVE.get(buffer.dtype.char)
    if buffer.restore is None and known and isinstance(spec, np.ndarray) and not buffer.dtype.names:
        return spec
    return [buffer.data, known or MPI.BYTE]  # without a count, which for some is that of one rank


def _block(at: Caller, buffer: Buffer, name: str) -> int:
    """Bytes per rank."""
    if buffer.count % at.size:
        raise ArgumentError(
            f"{name}: {buffer.count} elements, expected a multiple of {at.size}", MPI.ERR_COUNT
        )
    return buffer.nbytes // at.size


def _same(send: Buffer, recv: Buffer, count: int, whose: str) -> None:
    if send.dtype != recv.dtype or (send.dtype is None and send.mpitype != recv.mpitype):
        raise ArgumentError(f"sendbuf: type {send.dtype}, expected {recv.dtype} as in recvbuf", MPI.ERR_TYPE)
    _expect(send.count, count, "sendbuf", f"elements ({whose})")


def _expect(got: int, expected: int, name: str, what: str) -> None:
    if got != expected:
        raise ArgumentError(f"{name}: got {got}, expected {expected} {what}", MPI.ERR_COUNT)


def _check_root(at: Caller, root: Any) -> None:
    if not isinstance(root, (int, np.integer)) or not 0 <= root < at.size:
        raise ArgumentError(f"root: got {root!r}, expected a rank from 0 to {at.size - 1}", MPI.ERR_ROOT)


BUILDERS: dict[str, Callable[..., Call]] = {
    "Allreduce": allreduce,
    "Reduce": reduce,
    "Reduce_scatter": reduce_scatter,
    "Reduce_scatter_block": reduce_scatter_block,
    "Bcast": bcast,
    "Allgather": allgather,
    "Alltoall": alltoall,
    "Barrier": barrier,
}
