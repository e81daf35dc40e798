"""The communicator: mpi4py's calls, served by plans."""

from .intracomm import Intracomm

__all__ = ["Intracomm"]
