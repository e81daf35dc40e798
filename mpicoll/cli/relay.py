"""Pass a job's stderr on as it comes, with errors that many ranks raise alike told once."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import IO

from mpicoll.cli.fold import Fold

MUCH = 1 << 20  # bytes held back at most


class Relay(threading.Thread):
    """Reads the launcher's stderr until it ends, or until nothing comes after `finish`."""

    def __init__(self, source: IO[bytes], patience: float) -> None:
        super().__init__(daemon=True)
        self.source = source
        self.fold = Fold(patience)
        self.over = threading.Event()

    def run(self) -> None:
        """Show what comes; where our own stderr is closed, close the launcher's."""
        with self.source, contextlib.suppress(OSError):
            self._pass()
            show(self.fold.flush())

    def _pass(self) -> None:
        poll = select.poll()
        poll.register(self.source, select.POLLIN)
        while True:
            ready = poll.poll(100)
            if not ready and self.over.is_set():
                return
            if ready:
                data = os.read(self.source.fileno(), 1 << 16)
                if not data:
                    return
                show(self.fold.feed(data, time.monotonic()))
            if self.fold.held and (time.monotonic() >= self.fold.due or len(self.fold.held) > MUCH):
                show(self.fold.flush())

    def finish(self) -> None:
        """Wait until all is shown; the job has ended."""
        self.over.set()
        self.join()


def show(text: bytes) -> None:
    """Write to our stderr, which a launcher may have made non-blocking."""
    while text:
        try:
            text = text[os.write(2, text) :]
        except BlockingIOError:
            select.select([], [2], [])
