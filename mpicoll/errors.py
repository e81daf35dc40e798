"""Errors of the running part (the pure rooms raise `verify.PlanError`)."""

from __future__ import annotations

from mpi4py import MPI


class _Told(MPI.Exception):
    """An MPI exception with words of its own."""

    _code = MPI.ERR_OTHER

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(self._code if code is None else code)
        self.message = message

    def __str__(self) -> str:
        return self.message


class ArgumentError(_Told, ValueError):
    """An argument that cannot be served, found before anything is sent.

    It is an `MPI.Exception` and a `ValueError`, so code written for mpi4py catches it.  The message
    names the argument, what it got and what it expected.
    """

    _code = MPI.ERR_ARG


class MismatchError(ArgumentError):
    """Ranks called one collective with arguments that do not fit together.

    With `MPICOLL_CHECK=1` it is found before anything is sent, on every rank; otherwise by the ranks whose
    messages turn out to have the wrong length, and their communicator cannot be used any more.
    """


class StallError(_Told):
    """Nothing moved for longer than `MPICOLL_TIMEOUT` seconds: says which ranks a collective waits for."""


class LaunchError(RuntimeError):
    """The launcher that started this process does not belong to its MPI."""
