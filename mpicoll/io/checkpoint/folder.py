"""What lies in a folder of checkpoints: which are complete, which is next, which may go."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicoll.io.checkpoint.layout import DamagedError
from mpicoll.io.files import replacing, sync
from mpicoll.io.hdf5 import checksum

__all__ = [
    "FORMAT",
    "NOT_SHARED",
    "Kept",
    "check_file",
    "kept",
    "locks_refused",
    "make",
    "prune",
    "read_manifest",
    "write_manifest",
]

FORMAT = 1
MANIFEST = "manifest.json"
NOT_SHARED = "no such folder here; is it on a disk that all nodes share?"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")


@dataclass(frozen=True, order=True)
class Kept:
    """A checkpoint on disk, in the order of saving."""

    number: int
    step: int
    path: Path

    @property
    def complete(self) -> bool:
        """Whether it was saved to the end: the manifest comes last."""
        return (self.path / MANIFEST).exists()


def kept(folder: Path) -> list[Kept]:
    """Return what is there, complete or not, in the order of saving."""
    if not folder.exists():
        return []
    names = [(_NAME.fullmatch(entry.name), entry.path) for entry in os.scandir(folder)]
    return sorted(Kept(int(name[1]), int(name[2]), Path(path)) for name, path in names if name)


def make(folder: Path, step: int) -> Path:
    """Make the folder of the next checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    number = max((one.number for one in kept(folder)), default=0) + 1
    path = folder / f"{number:06d}-step-{step}"
    path.mkdir()
    sync(folder)
    return path


def prune(folder: Path, keep: int, damaged: set[Path]) -> None:
    """Remove all but the newest `keep` checkpoints, and what was never completed.

    What is `damaged` does not count as one of them, and goes when it is older than they are.  The
    manifest goes first, so nothing that is half removed passes for a checkpoint.
    """
    complete = [one for one in kept(folder) if one.complete]
    whole = [one for one in complete if one.path not in damaged]
    stay = [one for one in complete if one >= whole[-keep:][0]]
    for one in kept(folder):
        if one not in stay:
            (one.path / MANIFEST).unlink(missing_ok=True)
            sync(one.path)
            shutil.rmtree(one.path, ignore_errors=True)  # NFS keeps what is open: it goes next time


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Complete a checkpoint."""
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with replacing(path / MANIFEST) as temporary:
        temporary.write_text(f"{text}\n{digest}\n")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what the manifest says; DamagedError where it does not say it all."""
    try:
        text, _, digest = (path / MANIFEST).read_bytes().partition(b"\n")
        if digest != f"{hashlib.sha256(text).hexdigest()}\n".encode():
            raise ValueError("its checksum does not match")
        content: dict[str, Any] = json.loads(text)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path / MANIFEST}: damaged ({error})") from error
    return content


def check_file(path: Path, nbytes: int, sha256: str) -> None:
    """Compare a file with what the manifest says of it."""
    try:
        size = path.stat().st_size
        if size != nbytes:
            raise DamagedError(f"{path}: damaged: {size} bytes, not {nbytes}")
        if checksum(path) != sha256:
            raise DamagedError(f"{path}: damaged: its checksum does not match its content")
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror or error})") from error


def locks_refused(path: Path) -> bool:
    """Return whether the file system of a checkpoint has no file locks."""
    with (path / MANIFEST).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return False
