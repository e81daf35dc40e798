"""Files that are complete or absent, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["check_folder", "make_folder", "replacing", "sync"]


def make_folder(folder: Path) -> None:
    """Make a folder where there is none, and find out now whether files can be written in it.

    Raises
    ------
    OSError
        Naming the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Find out whether files can be written in a folder; OSError, naming it, where they cannot."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 12))  # which a full disk has no room for
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # which names a file that nobody knows
        raise type(error)(error.errno, f"no file can be made here ({error.strerror})", str(folder)) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    r"""Give a temporary path in the same folder, which takes the place of `path` once it is complete.

    At any instant, and after a crash, `path` is the old file or the new one, never half of one. Links are
    followed; a device or a pipe stays what it is, and is written to. An `OSError` of this file names `path`.

    Examples
    --------
    >>> with replacing(Path("report.csv")) as temporary:    # doctest: +SKIP
    ...     temporary.write_text("step,loss\n")
    """
    real = path.resolve()
    if real.exists() and not real.is_file():
        yield real
        return
    # Several nodes may write one file on a shared disk: each needs a temporary of its own.
    temporary = real.with_name(f".{real.stem[:100]}.{socket.gethostname()}.{os.getpid()}{real.suffix}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, real)
    except OSError as error:
        if error.filename is None or str(error.filename) == str(temporary):  # none where a disk is full
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync(real.parent)


def sync(path: Path) -> None:
    """Make sure that a file, or a folder's list of files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
