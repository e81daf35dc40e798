"""Make the next batches while the current one is worked on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Prefetch"]

T = TypeVar("T")


class Prefetch(Iterator[T], Generic[T]):
    """Iterates over `source` in a thread that is up to `depth` items ahead.

    What is raised while an item is made is raised when its turn comes.  Reading files and NumPy's work on
    arrays let the thread run beside the others; Python code does not.

    Parameters
    ----------
    source
        What makes the items: a generator, usually.  It runs in the thread, from now on.
    depth
        How many items are ready at most; each takes its memory.

    Examples
    --------
    >>> with Prefetch((k * k for k in range(4)), depth=2) as squares:
    ...     list(squares)
    [0, 1, 4, 9]
    """

    def __init__(self, source: Iterable[T], depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.depth = depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, args=(source,), name="mpicoll-prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, source: Iterable[T]) -> None:
        error = None
        try:
            for item in source:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self.depth)
                    if self._closed:
                        break
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as raised:  # also what is no Exception: the consumer must not wait in vain
            error = raised
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            if self._ready and not self._closed:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None and not self._closed:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread after the item it is making, and forget what is ready."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
