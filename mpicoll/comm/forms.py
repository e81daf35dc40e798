"""Collectives that are started now and finished later: non-blocking, and persistent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from .dispatch import Asked


class Forms(MPI.Intracomm):
    """The `I` and `_init` forms of the collectives: the blocking ones' arguments, and a request.

    A communicator serves them by `_begin` and `_prepare`.
    """

    def _begin(self, name: str, asked: Asked, *arguments: Any) -> MPI.Request:
        """Start a collective."""
        raise TypeError("a communicator says how its collectives begin")

    def _prepare(self, name: str, asked: Asked, info: MPI.Info, *arguments: Any) -> MPI.Prequest:
        """Make a persistent collective."""
        raise TypeError("a communicator says how its collectives are prepared")

    # -- non-blocking forms: the blocking ones, and a request ------------------------------------------

    def Iallreduce(
        self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, algorithm: Asked = None
    ) -> MPI.Request:
        """Start an `Allreduce`.  Local: it returns without hearing from other ranks."""
        return self._begin("Allreduce", algorithm, sendbuf, recvbuf, op)

    def Ireduce(
        self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0, algorithm: Asked = None
    ) -> MPI.Request:
        """Start a `Reduce`."""
        return self._begin("Reduce", algorithm, sendbuf, recvbuf, op, root)

    def Ibcast(self, buf: Any, root: int = 0, algorithm: Asked = None) -> MPI.Request:
        """Start a `Bcast`."""
        return self._begin("Bcast", algorithm, buf, root)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, algorithm: Asked = None) -> MPI.Request:
        """Start an `Allgather`."""
        return self._begin("Allgather", algorithm, sendbuf, recvbuf)

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Any = MPI.SUM,
        algorithm: Asked = None,
    ) -> MPI.Request:
        """Start a `Reduce_scatter`.  Without `recvcounts` it is not local, as in mpi4py."""
        return self._begin("Reduce_scatter", algorithm, sendbuf, recvbuf, recvcounts, op)

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, algorithm: Asked = None
    ) -> MPI.Request:
        """Start a `Reduce_scatter_block`."""
        return self._begin("Reduce_scatter_block", algorithm, sendbuf, recvbuf, op)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, algorithm: Asked = None) -> MPI.Request:
        """Start an `Alltoall`."""
        return self._begin("Alltoall", algorithm, sendbuf, recvbuf)

    def Ibarrier(self, algorithm: Asked = None) -> MPI.Request:
        """Start a `Barrier`."""
        return self._begin("Barrier", algorithm)

    # -- persistent forms: compiled once, started often -------------------------------------------------

    def Allreduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: Any = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        algorithm: Asked = None,
    ) -> MPI.Prequest:
        """Make an `Allreduce` that `Start` and `Wait` run any number of times.  Collective; `Free` it."""
        return self._prepare("Allreduce", algorithm, info, sendbuf, recvbuf, op)

    def Reduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: Any = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        algorithm: Asked = None,
    ) -> MPI.Prequest:
        """Make a persistent `Reduce`."""
        return self._prepare("Reduce", algorithm, info, sendbuf, recvbuf, op, root)

    def Bcast_init(
        self, buf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, algorithm: Asked = None
    ) -> MPI.Prequest:
        """Make a persistent `Bcast`."""
        return self._prepare("Bcast", algorithm, info, buf, root)

    def Allgather_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, algorithm: Asked = None
    ) -> MPI.Prequest:
        """Make a persistent `Allgather`."""
        return self._prepare("Allgather", algorithm, info, sendbuf, recvbuf)

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Any = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        algorithm: Asked = None,
    ) -> MPI.Prequest:
        """Make a persistent `Reduce_scatter`."""
        return self._prepare("Reduce_scatter", algorithm, info, sendbuf, recvbuf, recvcounts, op)

    def Reduce_scatter_block_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: Any = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        algorithm: Asked = None,
    ) -> MPI.Prequest:
        """Make a persistent `Reduce_scatter_block`."""
        return self._prepare("Reduce_scatter_block", algorithm, info, sendbuf, recvbuf, op)

    def Alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, algorithm: Asked = None
    ) -> MPI.Prequest:
        """Make a persistent `Alltoall`."""
        return self._prepare("Alltoall", algorithm, info, sendbuf, recvbuf)

    def Barrier_init(self, info: MPI.Info = MPI.INFO_NULL, algorithm: Asked = None) -> MPI.Prequest:
        """Make a persistent `Barrier`."""
        return self._prepare("Barrier", algorithm, info)
