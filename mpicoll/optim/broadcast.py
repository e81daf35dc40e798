"""Start every replica from one rank's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpicoll.buckets import Flat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.comm import Intracomm

__all__ = ["broadcast_parameters"]


def broadcast_parameters(params: Mapping[str, NDArray[Any]], comm: Intracomm, root: int = 0) -> None:
    """Overwrite every rank's parameters with those of `root`; collective.

    Parameters
    ----------
    params
        Name -> contiguous array, the same names, shapes and dtypes in the same order on every rank.
        A `Flat` goes in one message.
    comm
        The replicas.
    root
        The rank whose parameters all get.
    """
    for array in [params.flat] if isinstance(params, Flat) else params.values():
        comm.Bcast(array, root=root)
