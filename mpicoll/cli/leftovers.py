"""Shared memory that jobs left behind: an MPI removes its own at its end, killed ranks cannot."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
SEGMENT = re.compile(r"(sm_segment|vader_segment|osc_sm|mpich_shm)[._]")  # Open MPI's, and MPICH's
LATE = 0.1  # seconds by which a file may seem older than the clock says: the kernel's is coarse


def abandoned(since: float = 0.0) -> dict[Path, int]:
    """Segments of this user, made at this time or later, that no process uses any more; and their bytes."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            about = entry.stat()
            mine = about.st_uid == os.geteuid() and about.st_ctime >= since - LATE
            if mine and SEGMENT.match(entry.name):
                found[Path(entry.path)] = about
    if not found or not os.path.ismount(FOLDER):  # the inodes of other file systems may have several names
        return {}
    used = set(_used())
    return {path: about.st_blocks * 512 for path, about in found.items() if about.st_ino not in used}


def remove(since: float) -> None:
    """Remove what a job left that began at this time."""
    for path in abandoned(since):
        with contextlib.suppress(OSError):
            path.unlink()


def kind(path: str) -> str:
    """The pattern of all segments of this one's MPI."""
    return re.sub(rf"({SEGMENT.pattern}).*", r"\1*", path)


def _used() -> Iterator[int]:
    """Inodes in the folder's file system that a process has mapped or open, as far as we may look."""
    device = os.stat(FOLDER).st_dev
    mark = f"{os.major(device):02x}:{os.minor(device):02x}"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_bytes().splitlines():
                _, _, _, where, inode, *_ = line.split(maxsplit=5)
                if where.decode() == mark:
                    yield int(inode)
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                about = descriptor.stat()
                if about.st_dev == device:
                    yield about.st_ino
