"""From a checkpoint on disk to the arrays of any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.io.checkpoint.folder import FORMAT, check_file, kept, read_manifest
from mpicoll.io.checkpoint.layout import CheckpointError, Entry, Piece, dtype_name, overlap
from mpicoll.io.checkpoint.together import Together, said
from mpicoll.io.hdf5 import read

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["candidates", "check_files", "compare", "fill", "open_manifest"]


def candidates(folder: Path, step: int | None) -> list[Path]:
    """Return the complete checkpoints, the newest first; only those of a step if one is given."""
    there = [one for one in kept(folder) if one.complete]
    found = [one.path for one in reversed(there) if step in (None, one.step)]
    if step is not None and not found:
        known = ", ".join(str(one.step) for one in there) or "none"
        raise CheckpointError(f"{folder}: no checkpoint of step {step}; complete ones are of steps: {known}")
    return found


def open_manifest(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself, if it is written in a way that we know."""
    manifest = read_manifest(path)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.get('format')}, this version of mpicoll reads format {FORMAT}: "
            f"load it with the version that saved it, or a later one"
        )
    return manifest


def compare(path: Path, manifest: dict[str, Any], mine: Sequence[Entry], model: Any) -> None:
    """Raise an error that names the first difference between a checkpoint and the state it is to fill."""
    if manifest["model"] != model:
        raise CheckpointError(f"{path} is of another model: {_difference(manifest['model'], model)}")
    stored, wanted = manifest["arrays"], {entry.name: entry for entry in mine}
    for name in [*wanted, *stored]:
        if name not in wanted or name not in stored:
            where = "not in the state" if name not in wanted else "not in the checkpoint"
            raise CheckpointError(f"{path} is of another model: {name!r} is {where}")
    for name, entry in wanted.items():
        shape, dtype = tuple(stored[name]["shape"]), stored[name]["dtype"]
        if (shape, dtype) != (entry.shape, dtype_name(entry.dtype)):
            raise CheckpointError(
                f"{path} is of another model: {name!r} is {dtype} of shape {shape} in the checkpoint, "
                f"{dtype_name(entry.dtype)} of shape {entry.shape} in the state"
            )
        if isinstance(entry.array, np.ndarray) and not entry.array.flags.writeable:
            raise CheckpointError(f"{name}: the array is read-only")


def _difference(stored: Any, given: Any) -> str:
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in [*given, *stored]:
            if stored.get(key) != given.get(key):
                return f"{key} is {stored.get(key)!r} in the checkpoint, {given.get(key)!r} here"
    return f"{stored!r} in the checkpoint, {given!r} here"


def check_files(path: Path, manifest: dict[str, Any], ranks: Together) -> None:
    """Compare the files with their checksums, every rank some of them."""
    for file in manifest["files"][ranks.rank :: ranks.size]:
        check_file(path / file["name"], file["nbytes"], file["sha256"])


def fill(path: Path, manifest: dict[str, Any], mine: Sequence[Entry], ranks: Together) -> None:
    """Read the arrays; collective.  What all ranks need is read once and broadcast."""
    names = [file["name"] for file in manifest["files"]]
    problem, turn = None, 0
    for entry in mine:
        host: NDArray[Any] = entry.array if isinstance(entry.array, np.ndarray) else entry.array.get()
        stored = manifest["arrays"][entry.name]["pieces"]
        pieces = [Piece(file, 0, tuple(start), tuple(shape)) for file, _, start, shape in stored]
        for number, inside, here in overlap(pieces, entry.start, tuple(host.shape)):
            place: Any = (*here, ...)
            piece, part = pieces[number], host[place]
            block = part if part.flags.c_contiguous else np.empty(part.shape, part.dtype)
            if not entry.whole or turn % ranks.size == ranks.rank:
                try:
                    read(path / names[piece.file], stored[number][1], piece.shape, inside, block)
                except OSError as error:  # the others wait for this rank's part
                    problem = CheckpointError(said(error))
            if entry.whole:
                ranks.comm.Bcast(block.reshape(-1).view(np.uint8), turn % ranks.size)
                turn += 1
            if block is not part:
                part[...] = block
        if host is not entry.array and math.prod(host.shape):
            entry.array.set(host)
    with ranks.agreeing():
        if problem:
            raise problem
