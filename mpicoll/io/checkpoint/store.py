"""Saving and loading the state of a job on several ranks."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicoll.io.checkpoint.folder import FORMAT, NOT_SHARED, locks_refused, make, prune
from mpicoll.io.checkpoint.layout import CheckpointError, DamagedError
from mpicoll.io.checkpoint.loading import candidates, check_files, compare, fill, open_manifest
from mpicoll.io.checkpoint.saving import Blocks, Plan, agreed, collect, planned, write_parts, writes
from mpicoll.io.checkpoint.together import Together
from mpicoll.io.files import check_folder, make_folder

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["Checkpoints", "Saved"]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was loaded.

    Attributes
    ----------
    step : int
        The step it was saved at.
    extra : object
        What was given as `extra`.
    ranks : int
        How many ranks wrote it.
    path : Path
        Its folder.
    """

    step: int
    extra: Any
    ranks: int
    path: Path


class Checkpoints:
    """The checkpoints of one job in a folder, which all ranks see.

    A state is a mapping from names to arrays, or to mappings of that kind.  A plain array is the same on
    every rank, and the ranks share the work of writing it; a `Shard` is a rank's own block of an array.
    Making the object and all its methods are collective over `comm`.

    Parameters
    ----------
    folder
        Made if needed.
    comm
        The ranks of the job.
    keep
        How many checkpoints stay; older ones are removed after a new one is complete.
    model
        What the checkpoints are of, a configuration say: anything JSON can hold.  A checkpoint with another
        `model` is refused.
    per_node
        Write one file per node, by its first rank, instead of one per rank: fewer files, and less bandwidth.

    Raises
    ------
    CheckpointError
        On every rank, from all methods, with the same words.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> folder = tempfile.mkdtemp()
    >>> state = {"params": {"weight": np.arange(6.0), "bias": np.zeros(2)}}
    >>> with Checkpoints(folder, MPI.COMM_SELF) as checkpoints:
    ...     print(checkpoints.load(state))
    ...     checkpoints.save(100, state, extra={"lr": 0.1})
    None
    >>> state["params"]["weight"][:] = 0
    >>> with Checkpoints(folder, MPI.COMM_SELF) as checkpoints:
    ...     saved = checkpoints.load(state)
    >>> saved.step, saved.extra, state["params"]["weight"].tolist()
    (100, {'lr': 0.1}, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    """

    def __init__(
        self,
        folder: Path | str,
        comm: MPI.Intracomm,
        *,
        keep: int = 3,
        model: Any = None,
        per_node: bool = False,
    ) -> None:
        if not isinstance(keep, (int, Integral)) or keep < 1:
            raise CheckpointError(f"keep must be a whole number of at least 1, got {keep!r}")
        self.folder = Path(folder)
        self.keep = keep
        self.model = _plain("model", model)
        self._ranks = Together(comm)
        writer = self._ranks.rank
        if per_node:
            node = self._ranks.comm.Split_type(MPI.COMM_TYPE_SHARED)
            writer = node.bcast(writer)
            node.Free()
        writers = self._ranks.gather(writer)
        self._files = [sorted(set(writers)).index(rank) for rank in writers]  # rank -> number of its file
        self._rooms: dict[str, NDArray[Any]] = {}
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._looked = self._lockless = self._told = False
        self._damaged: set[Path] = set()

    # -- saving --------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], extra: Any = None, *, wait: bool = True) -> None:
        """Save the state; it counts as saved once every rank's part is on disk.

        Parameters
        ----------
        step
            The step the state belongs to.
        state
            Name -> array, `Shard`, or mapping of such: the same names in the same order on every rank.
        extra
            What is no array: anything that JSON can hold.  Rank 0's is kept.
        wait
            False: take a copy of this rank's part and return; a thread writes it.  The next `save`, `load`,
            `wait` or `close` waits for it, and tells of an error.  Without `MPI_THREAD_MULTIPLE` it waits
            all the same.
        """
        self.wait()
        ranks = self._ranks
        mine = agreed(ranks, state)
        plan = planned(ranks, self._files, mine)
        path, header = ranks.on_root(self._begin, step, extra)
        self._looked = True
        background = not wait and ranks.threaded
        job = path, header, plan, collect(ranks, self._files, plan, mine, self._rooms if background else None)
        if background:
            self._thread = threading.Thread(target=self._write, args=job, name="mpicoll-checkpoint")
            self._thread.start()
            return
        if not wait and ranks.rank == 0:
            warnings.warn("no MPI_THREAD_MULTIPLE: the job waits for its checkpoints", stacklevel=2)
        self._write(*job)
        self.wait()

    def wait(self) -> None:
        """Wait until a checkpoint that is being written is complete; raise if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._lockless and not self._told:
            self._told = True
            warnings.warn(
                f"{self.folder}: this file system refuses file locks.  Checkpoints need none; for other "
                f"programs that open these HDF5 files set HDF5_USE_FILE_LOCKING=FALSE",
                stacklevel=2,
            )
        problem, self._problem = self._problem, None
        if problem:
            raise CheckpointError(problem)

    def close(self) -> None:
        """Wait, and give back the communicator."""
        try:
            self.wait()
        finally:
            self._ranks.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._thread is not None:  # other ranks may not come here: nothing that needs them
            self._thread.join()

    def _begin(self, step: Any, extra: Any) -> tuple[Path, dict[str, Any]]:
        """Return the new checkpoint's folder and what its manifest begins with."""
        if not isinstance(step, Integral) or isinstance(step, bool) or step < 0:
            raise CheckpointError(f"step must be an integer, not negative, got {step!r}")
        step = int(step)
        about = {"model": self.model, "extra": _plain("extra", extra)}
        if not self._looked:
            self._check_empty()
        header = {"format": FORMAT, "step": step, "ranks": self._ranks.size, **about}
        return make(self.folder, step), header

    def _write(self, path: Path, header: dict[str, Any], plan: Plan, blocks: Blocks) -> None:
        problem = write_parts(self._ranks, self._files, path, header, plan, blocks, partial(self._tidy, path))
        if problem:
            self._problem = (
                f"{problem}; the checkpoint of step {header['step']} is not saved, older ones are untouched"
            )

    def _tidy(self, path: Path) -> None:
        # The checkpoint is complete, and the other ranks wait for word; what stays for now goes next time.
        with contextlib.suppress(Exception):
            prune(self.folder, self.keep, self._damaged)
            self._lockless = locks_refused(path)

    def _check_empty(self) -> None:
        there = candidates(self.folder, None)
        if there:
            raise CheckpointError(
                f"{self.folder} holds checkpoints of an earlier run, {there[0].name} the newest, and they "
                f"would go in time: load one of them first, or save to another folder"
            )

    # -- loading -------------------------------------------------------------------------------------

    def afresh(self) -> None:
        """Begin a run that does not go on from an earlier one: an error now, not when it first saves.

        Without this, `save` refuses a folder that holds checkpoints of which none was loaded.
        """
        self.check_writable()
        self._ranks.on_root(self._check_empty)
        self._looked = True

    def check_writable(self) -> None:
        """Make the folder, and raise if a rank cannot write to it: an error now, not when it first saves."""
        self.wait()
        self._ranks.on_root(make_folder, self.folder)
        with self._ranks.agreeing():
            if self._ranks.rank and writes(self._ranks, self._files):
                if not self.folder.is_dir():
                    raise CheckpointError(f"{self.folder}: {NOT_SHARED}")
                check_folder(self.folder)

    def load(self, state: Mapping[str, Any], step: int | None = None) -> Saved | None:
        """Fill the arrays of a state from the newest checkpoint that is whole.

        The number of ranks and the blocks of the shards may differ from those that were saved.  One that is
        damaged is passed over with a warning.  Nothing is changed before all is known to fit.

        Parameters
        ----------
        state
            As for `save`: the same names, shapes and dtypes as were saved.
        step
            Only a checkpoint of this step will do.

        Returns
        -------
        Saved or None
            What was loaded; None where there is no checkpoint.
        """
        self.wait()
        ranks = self._ranks
        mine = agreed(ranks, state)
        found = ranks.on_root(candidates, self.folder, step)
        reasons = []
        for path in found:
            try:
                manifest = ranks.on_root(open_manifest, path)
                with ranks.agreeing():
                    compare(path, manifest, mine, self.model)
                with ranks.agreeing():
                    check_files(path, manifest, ranks)
            except DamagedError as error:
                self._damaged.add(path)
                reasons.append(str(error))
                if ranks.rank == 0:
                    warnings.warn(f"{error}: passed over", stacklevel=2)
                continue
            fill(path, manifest, mine, ranks)
            self._looked = True
            return Saved(manifest["step"], manifest["extra"], manifest["ranks"], path)
        if reasons:
            raise CheckpointError(f"{self.folder}: no checkpoint is whole: {'; '.join(reasons)}")
        self._looked = True
        return None


def _plain(name: str, value: Any) -> Any:
    """Return what JSON makes of a value."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} must be what JSON can hold: {error}") from error
