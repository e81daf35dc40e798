"""Shared memory that jobs left behind: an MPI removes its own at its end, killed ranks cannot."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
SEGMENT = re.compile(r"(sm_segment|vader_segment|osc_sm|mpich_shm)[._]")  # Open MPI's, and MPICH's
LONGEST = 5.0  # seconds for a look at all processes
PAUSE = 0.3  # seconds between two looks
LATE = 0.1  # seconds by which a file may seem older than the clock says: the kernel's is coarse


def abandoned(since: float = 0.0) -> dict[Path, os.stat_result]:
    """Segments of this user, made at this time or later, that no process uses, and what is known of each.

    Processes of another PID namespace that shares this memory cannot be seen.
    """
    found = {}
    # Elsewhere than in a file system of its own, an inode may have several numbers.
    for path in FOLDER.glob("*") if os.path.ismount(FOLDER) else ():
        with contextlib.suppress(OSError):
            about = path.lstat()
            mine = about.st_uid == os.geteuid() and about.st_ctime >= since - LATE
            if mine and SEGMENT.match(path.name):
                found[path] = about
    if not found:
        return {}
    used: set[int] = set()
    # A process that hangs in the kernel may let whoever looks at it hang as well: then nobody can tell.
    looking = threading.Thread(target=lambda: used.update(_used()), daemon=True)
    looking.start()
    looking.join(LONGEST)
    if looking.is_alive():
        return {}
    return {path: about for path, about in found.items() if about.st_ino not in used}


def remove(since: float) -> None:
    """Remove what nobody uses of the segments that were made since this time."""
    # Another job may make and remove segments of one name again and again, and just be between two:
    # it is the same one, and nobody's, also a while later, or it stays.
    first = abandoned(since)
    if not first:
        return
    time.sleep(PAUSE)
    for path, about in abandoned(since).items():
        with contextlib.suppress(OSError):
            if path in first and first[path].st_ino == about.st_ino == path.lstat().st_ino:
                path.unlink()


def kind(path: str) -> str:
    """The pattern of all segments of this one's MPI."""
    return re.sub(rf"({SEGMENT.pattern}).*", r"\1*", path)


def _used() -> Iterator[int]:
    """Inodes in the folder's file system that a process of this user has mapped or open."""
    device = os.stat(FOLDER).st_dev
    mark = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        # Who makes a segment opens it, maps it and closes it: in this order it is seen whenever we look.
        # A process that hides its memory is no rank: those read each other's.
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # it was closed
                    if os.readlink(descriptor).startswith(f"{FOLDER}/"):  # no look at disks, which may hang
                        yield descriptor.stat().st_ino
            for line in (process / "maps").read_bytes().splitlines():
                _, _, _, where, inode, *_ = line.split(maxsplit=5)
                if where == mark:
                    yield int(inode)
