"""The communicator: mpi4py's, with collectives that run plans where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import ArgumentError
from ..memory.buffer import NATIVE as NATIVE_TYPES
from ..memory.op import native_takes
from ..plans.algorithms import NATIVE
from ..plans.algorithms.registry import COLLECTIVES, REDUCTIONS
from ..runtime import launched, record
from ..runtime.transport.arena import empty
from ..select.selection import Choice
from . import dispatch as serve
from .arguments import BUILDERS
from .context import State, attach, attached, detach
from .dispatch import Asked
from .forms import Forms

_ndarray = np.ndarray
_allreduce = MPI.Intracomm.Allreduce
_NUMBERS = frozenset(NATIVE_TYPES) - {"?"}  # bool has few native operators: the careful way knows them
_REFUSALS = (TypeError, ValueError, BufferError, KeyError)  # what mpi4py raises before it calls the MPI
_FULL = {  # which argument holds the full vector
    "Allreduce": 1,
    "Reduce": 0,
    "Bcast": 0,
    "Allgather": 1,
    "Reduce_scatter": 0,
    "Reduce_scatter_block": 0,
    "Alltoall": 1,
}


class Intracomm(Forms):
    """An `MPI.Intracomm` whose collectives are plans over point-to-point messages and shared memory.

    Everything mpi4py has works here too: point-to-point messages, object forms, `Split`.  Collectives take
    the same arguments, and one more: `algorithm`, a registered name or a function, which serves
    the call or raises.  Without it the rules choose (`explain` tells how); small messages go to the MPI.

    Parameters
    ----------
    comm
        The communicator to improve.  Making the object is collective over it, the first time.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import mpicoll
    >>> comm = mpicoll.Intracomm(MPI.COMM_SELF)
    >>> comm.allreduce(3)
    3
    """

    _state: State | None = None
    _quick: dict[str, int] = {}
    _small = 0

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._setup(None)

    def _setup(self, parent: State | None) -> None:
        if self == MPI.COMM_NULL or self.Is_inter():
            raise ArgumentError("comm: expected an intracommunicator that is not null", MPI.ERR_COMM)
        state = attached(self)
        if state is None:
            launched.check(MPI.COMM_WORLD.size, MPI.Get_library_version().split(",")[0].splitlines()[0])
            state = State(self, parent)
            attach(self, state)
        self._adopt(state)

    def _adopt(self, state: State) -> None:
        self._state = state
        selection = state.selection
        quick = {name: selection.quick(_collective(name)) for name in BUILDERS}
        self._quick = dict.fromkeys(quick, 0) if state.checks else quick
        self._small = self._quick["Allreduce"]
        self._natives = record.total("allreduce", NATIVE)

    # -- collectives -----------------------------------------------------------------------------

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, algorithm: Asked = None) -> None:
        """Reduce over all ranks; the result on all of them.

        Parameters
        ----------
        sendbuf
            This rank's vector, or `MPI.IN_PLACE` where it is in `recvbuf`.
        recvbuf
            The result: as many elements of the same type.  Any shape; strided arrays are packed.
        op
            An `MPI.Op` or `mpicoll.op.AVG`.
        algorithm
            A name (`mpicoll draw allreduce` lists them) or a function of (rank, size).

        Raises
        ------
        ArgumentError
            For arguments that do not fit, before anything is sent.
        MismatchError
            When ranks turn out to have passed different counts.

        Notes
        -----
        Costs are those of the algorithm.  The result has the same bits on every rank.
        """
        # small arrays: nothing but these tests stands before the MPI's own
        if algorithm is None and type(recvbuf) is _ndarray:
            nbytes = recvbuf.nbytes
            if nbytes < self._small and recvbuf.dtype.char in _NUMBERS and not record.timed:
                try:
                    _allreduce(self, sendbuf, recvbuf, op)
                except _REFUSALS:
                    pass  # strided, or wrong: the careful way packs it, or says what is wrong
                else:
                    self._natives.calls += 1
                    self._natives.nbytes += nbytes
                    record.recent.append(("allreduce", NATIVE, nbytes))
                    return
        self._run("Allreduce", algorithm, sendbuf, recvbuf, op)

    def Reduce(
        self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0, algorithm: Asked = None
    ) -> None:
        """Reduce over all ranks; the result on the root.  Arguments as in `Allreduce`.

        `recvbuf` matters on the root only.
        """
        self._run("Reduce", algorithm, sendbuf, recvbuf, op, root)

    def Bcast(self, buf: Any, root: int = 0, algorithm: Asked = None) -> None:
        """Copy the root's buffer to all ranks: equally many bytes everywhere."""
        self._run("Bcast", algorithm, buf, root)

    def Allgather(self, sendbuf: Any, recvbuf: Any, algorithm: Asked = None) -> None:
        """Collect every rank's part on all of them: `recvbuf` holds size times `sendbuf`, in rank order."""
        self._run("Allgather", algorithm, sendbuf, recvbuf)

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Any = MPI.SUM,
        algorithm: Asked = None,
    ) -> None:
        """Reduce over all ranks; rank r gets the r-th part, of `recvcounts[r]` elements."""
        self._run("Reduce_scatter", algorithm, sendbuf, recvbuf, recvcounts, op)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, algorithm: Asked = None
    ) -> None:
        """Reduce over all ranks; rank r gets the r-th of equal parts."""
        self._run("Reduce_scatter_block", algorithm, sendbuf, recvbuf, op)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, algorithm: Asked = None) -> None:
        """Send the r-th part of `sendbuf` to rank r; the part from rank r becomes the r-th of `recvbuf`."""
        self._run("Alltoall", algorithm, sendbuf, recvbuf)

    def Barrier(self, algorithm: Asked = None) -> None:
        """Return when every rank has called it."""
        self._run("Barrier", algorithm)

    # -- more than MPI has -------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = np.float64) -> np.ndarray:
        """An uninitialised array in memory that the ranks of the node share: collectives read it in place.

        Parameters
        ----------
        shape, dtype
            As in `numpy.empty`.

        Returns
        -------
        numpy.ndarray
            An ordinary array where there is no shared window, or no more room in it.  Local: ranks need
            not ask for the same.
        """
        state = self._state or self._find_state()
        return empty(state.near.arena if state and state.near else None, shape, dtype)

    def explain(
        self,
        collective: str,
        nbytes: int,
        op: Any = MPI.SUM,
        dtype: Any = np.float64,
        algorithm: Asked = None,
        root: int = 0,
    ) -> Choice:
        """Which rule serves a call, with what, and which rules were passed over.

        Parameters
        ----------
        collective
            Such as `"allreduce"`.
        nbytes
            Bytes of the full vector.
        op, dtype
            For reductions.
        algorithm, root
            As in the call.

        Returns
        -------
        Choice
            Readable as `str()`; with `algorithm`, `transport`, `segments`, `slices`, `rule`.
        """
        state = self._state or self._find_state()
        if state is None:
            raise ArgumentError("explain: this communicator was not made by mpicoll", MPI.ERR_COMM)
        if collective not in COLLECTIVES:
            raise ArgumentError(f"collective: got {collective!r}, expected one of {', '.join(COLLECTIVES)}")
        reduction = collective in REDUCTIONS
        native = not reduction or native_takes(op, np.dtype(dtype))
        commutative = not reduction or op.Is_commutative()
        return state.explain(collective, int(nbytes), commutative, native, algorithm, root)

    # -- derived communicators are of this class -----------------------------------------------------------

    def Dup(self, info: MPI.Info | None = None) -> Intracomm:
        """Duplicate.  Collective."""
        return self._derive(super().Dup(info) if info is not None else super().Dup())

    def Dup_with_info(self, info: MPI.Info) -> Intracomm:
        """Duplicate with hints.  Collective."""
        return self._derive(super().Dup_with_info(info))

    def Clone(self) -> Intracomm:
        """Duplicate without attributes.  Collective."""
        return self._derive(super().Clone())

    def Split(self, color: int = 0, key: int = 0) -> Intracomm:
        """Split by color, ordered by key.  Collective."""
        return self._derive(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Intracomm:
        """Split by what ranks share.  Collective."""
        return self._derive(super().Split_type(split_type, key, info))

    def Create(self, group: MPI.Group) -> Intracomm:
        """Make a communicator of some ranks.  Collective."""
        return self._derive(super().Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Intracomm:
        """Make a communicator of some ranks.  Collective over those."""
        return self._derive(super().Create_group(group, tag))

    def Free(self) -> None:
        """Free the communicator and what it carries.  Collective."""
        self._close()
        super().Free()

    def Disconnect(self) -> None:
        """Free after all communication on it has ended.  Collective."""
        self._close()
        super().Disconnect()

    def _close(self) -> None:
        """End what hangs on the handle; on the MPI's own handles, which nobody can free, nothing ends."""
        state = self._state or self._find_state()
        if state is None or self == MPI.COMM_WORLD or self == MPI.COMM_SELF:
            return
        self._state = None
        state.drain()
        if state.broken is None:
            state.private.Barrier()  # nobody reads this rank's part of the window any more
        state.free()
        detach(self)
        state.private.Free()

    def _derive(self, comm: MPI.Intracomm) -> Intracomm:
        if comm == MPI.COMM_NULL:
            return comm
        derived = type(self).__new__(type(self), comm)
        derived._setup(self._state or self._find_state())
        return derived

    # -- serving ----------------------------------------------------------------------

    def _find_state(self) -> State | None:
        """The state, for objects that the MPI made without the constructor; None where there is none."""
        state = attached(self)
        if state is not None:
            self._adopt(state)
        return state

    def _need_state(self) -> State:
        """The state, for calls that all ranks make: `Idup` could not make it, being local."""
        if self._find_state() is None:
            self._setup(None)
        assert self._state is not None
        return self._state

    def _run(self, name: str, asked: Asked, *arguments: Any) -> None:
        # where ranks tell each other their counts all must do it here: mpi4py cannot for a strided array
        telling = name == "Reduce_scatter" and arguments[2] is None
        if asked is None and not record.timed and not telling:
            full = arguments[_FULL[name]] if name in _FULL else None
            small = full.nbytes < self._quick.get(name, 0) if type(full) is _ndarray else False
            if small and full.dtype.char in _NUMBERS or name == "Barrier" and self._quick.get(name, 0):
                try:
                    getattr(MPI.Intracomm, name)(self, *arguments)
                except _REFUSALS:
                    pass
                else:
                    record.note(_collective(name), NATIVE, 0 if full is None else full.nbytes)
                    return
        serve.run(self, self._state or self._need_state(), name, asked, arguments)

    def _begin(self, name: str, asked: Asked, *arguments: Any) -> MPI.Request:
        state = self._state or self._find_state()
        if state is None and asked is None:
            return getattr(MPI.Intracomm, f"I{name.lower()}")(self, *arguments)
        if state is None:
            raise ArgumentError("algorithm: a blocking collective must come first on this communicator")
        return serve.begin(self, state, name, asked, arguments)

    def _prepare(self, name: str, asked: Asked, info: MPI.Info, *arguments: Any) -> MPI.Prequest:
        return serve.prepare(self, self._state or self._need_state(), name, asked, info, arguments)


def _collective(name: str) -> str:
    """The collective that a method performs."""
    return name.lower().removesuffix("_block")
