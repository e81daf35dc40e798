"""The program's side of a job with a time limit: it stops at a step boundary, on all ranks together."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np


class Notice:
    """Word that the job is about to end.

    The batch scripts `requeue` and `chain` make a file when Slurm's signal comes, some minutes before the
    time limit; rank 0 looks for it. A file, not the signal itself, because every launcher lets it pass, and
    because a signal kills a rank that has not installed its handler yet or is past it. A SIGTERM to any rank
    (preemption, ``scancel``) counts as well.

    Parameters
    ----------
    comm : Intracomm
        All ranks of the job.

    Examples
    --------
    >>> notice = Notice(comm)                                  # doctest: +SKIP
    >>> for step in range(first, steps):                       # doctest: +SKIP
    ...     train(step)
    ...     if notice.agreed():
    ...         save(step)
    ...         notice.requeue()
    ...         break
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._file = os.environ.get("MPICOLL_NOTICE") if comm.Get_rank() == 0 else None
        self._mine, self._all = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._mine[0] = 1

    def agreed(self) -> bool:
        """Whether to stop now: the same answer on all ranks, which must all ask (a 4-byte allreduce)."""
        if self._file and os.path.exists(self._file):
            self._mine[0] = 1
        self.comm.Allreduce(self._mine, self._all)
        return bool(self._all[0])

    def requeue(self) -> None:
        """Ask the batch script to put the job back in the queue once the program has ended well.

        Call it on all ranks, when the checkpoint is safe. Without a script that listens nothing happens.
        """
        wanted = os.environ.get("MPICOLL_REQUEUE")
        if wanted and self.comm.Get_rank() == 0:
            Path(wanted).touch()

    def close(self) -> None:
        """Give SIGTERM its former meaning again."""
        signal.signal(signal.SIGTERM, self._before)
