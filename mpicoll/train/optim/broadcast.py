"""What ranks tell each other outside the steps: where to start from, and how they are doing."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.buckets import Flat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.comm.intracomm import Intracomm

__all__ = ["allreduce_metrics", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Mapping[str, NDArray[Any]], comm: Intracomm, root: int = 0) -> None:
    """Overwrite every rank's parameters with those of `root`; collective.

    Parameters
    ----------
    params
        Name -> array, the same names, shapes and dtypes in the same order on every rank. A `Flat` goes in
        one message.
    comm
        The replicas.
    root
        The rank whose parameters all get.

    Raises
    ------
    ValueError
        On every rank, when the ranks' parameters do not look alike; then nothing has changed.
    """
    looks = comm.allgather([(name, array.shape, str(array.dtype)) for name, array in params.items()])
    for rank, look in enumerate(looks):
        if look != looks[root]:
            theirs, ours = _first_difference(look, looks[root])
            raise ValueError(f"parameters differ: rank {rank} has {theirs}, rank {root} {ours}")
    for array in [params.flat] if isinstance(params, Flat) else params.values():
        comm.Bcast(array, root=root)


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> tuple[str, str]:
    """Return in words what stands on each side where two lists first differ."""
    shorter = min(len(one), len(other))
    at = next((k for k in range(shorter) if one[k] != other[k]), shorter)
    words = []
    for look in one, other:
        name, shape, dtype = look[at] if at < len(look) else ("", (), "")
        words.append(f"{name!r} {shape} {dtype}" if at < len(look) else f"only {len(look)} of them")
    return words[0], words[1]


def broadcast_optimizer_state(optimizer: Any, comm: Intracomm, root: int = 0) -> None:
    """Give every rank the state of the optimizer on `root`: step, rate, options, arrays; collective.

    Parameters
    ----------
    optimizer
        Anything with `state_dict` and `load_state_dict`, of the same kind on every rank.
    comm
        The replicas.
    root
        The rank whose state all get.

    Raises
    ------
    ValueError
        On every rank, when the ranks' optimizers are not alike; then nothing has changed.
    """
    state = optimizer.state_dict()
    arrays = {
        f"{kind} of {name}": array for kind, slot in state["slots"].items() for name, array in slot.items()
    }
    kinds = comm.allgather(state["optimizer"])
    for rank, kind in enumerate(kinds):
        if kind != kinds[root]:
            raise ValueError(f"optimizers differ: rank {rank} has {kind}, rank {root} {kinds[root]}")
    broadcast_parameters(arrays, comm, root)
    rest = {key: value for key, value in state.items() if key != "slots"}
    optimizer.load_state_dict({**broadcast_object(rest, comm, root), "slots": state["slots"]})


def broadcast_object(obj: Any, comm: Intracomm, root: int = 0) -> Any:
    """Return the object of `root` on every rank, of any size that memory holds; collective.

    Parameters
    ----------
    obj
        Anything that can be pickled; ignored on the other ranks.
    comm
        The ranks.
    root
        The rank whose object all get.

    Raises
    ------
    ValueError
        On every rank, when the object cannot be pickled.
    """
    problem, data = "", b""
    if comm.rank == root:
        try:
            data = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            problem = f"{type(error).__name__}: {error}"
    problem, count = comm.bcast((problem, len(data)), root=root)
    if problem:
        raise ValueError(f"the object of rank {root} cannot be pickled: {problem}")
    buffer = np.frombuffer(bytearray(data), np.uint8) if comm.rank == root else np.empty(count, np.uint8)
    comm.Bcast(buffer, root=root)
    return obj if comm.rank == root else pickle.loads(buffer.data)


def allreduce_metrics(metrics: Mapping[str, float], comm: Intracomm, weight: float = 1.0) -> dict[str, float]:
    """Return the mean of each metric over the ranks, the same bits on all of them; collective.

    Parameters
    ----------
    metrics
        Name -> number; the same names on every rank.
    comm
        The ranks.
    weight
        Of this rank, such as the number of samples its metrics are taken over. A rank with weight 0 does not
        count, whatever its numbers are.

    Raises
    ------
    ValueError
        On every rank, when the names differ or all weights are 0.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import mpicoll
    >>> allreduce_metrics({"loss": 2.5}, mpicoll.Intracomm(MPI.COMM_SELF), weight=16)
    {'loss': 2.5}
    """
    mine = {name: float(value) for name, value in metrics.items()}
    everybody = comm.allgather((float(weight), mine))
    for rank, (_, theirs) in enumerate(everybody):
        if theirs.keys() != everybody[0][1].keys():
            told = f"rank {rank} has {sorted(theirs)}, rank 0 {sorted(everybody[0][1])}"
            raise ValueError(f"metrics differ: {told}")
    whole = sum(share for share, _ in everybody)
    if not whole > 0 or any(share < 0 for share, _ in everybody):
        raise ValueError(f"weights must be positive, got {[share for share, _ in everybody]}")
    return {
        name: sum(share * theirs[name] for share, theirs in everybody if share) / whole
        for name in everybody[0][1]
    }
