"""Text as HDF5: pack it once, open it anywhere, read slices of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from mpicoll.io.files import check_folder, make_folder, replacing
from mpicoll.io.hdf5 import pack

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray
    from rich.progress import Progress

__all__ = ["DataError", "TextData", "check_folder", "make_folder", "pack_text", "replacing", "stdlib_sources"]

FORMAT = 1
BLOCK = 1 << 20  #: bytes per read and write


class DataError(ValueError):
    """A data file that cannot be used: says which file, why, and what to do."""


def stdlib_sources() -> list[Path]:
    """Return the Python sources of the running Python's standard library, without its tests.

    The order depends on the names only, and mixes them: neighbours in the alphabet (``encodings/cp037.py``
    and its sixty relatives) are spread out, so that the tail is a fair sample to validate on.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    names = []
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - skipped
        names += [Path(folder, file).relative_to(root) for file in files if file.endswith(".py")]
    if not names:
        raise DataError(f"{root}: no Python sources of the standard library here; pack other text instead")
    return [root / name for name in sorted(names, key=_digest)]


def pack_text(
    paths: Iterable[Path], out: Path | str, *, source: str | None = None, progress: Progress | None = None
) -> None:
    """Pack the bytes of files, one after another, into an HDF5 file.

    The file appears under its name complete or not at all.

    Parameters
    ----------
    paths
        The files, in order.
    out
        The HDF5 file to write; its folder is made if needed.
    source
        Where the text comes from, in words, kept in the file.
    progress
        A rich progress display to show the packing in.
    """
    paths, out = list(paths), Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    if source is None:
        source = f"{len(paths)} files, {platform.python_implementation()} {platform.python_version()}"
    try:
        count = sum(path.stat().st_size for path in paths)
        blocks = (np.frombuffer(block, np.uint8) for block in _blocks(_watched(paths, out.name, progress)))
        # Strings of fixed length: HDF5 may loop forever over a damaged heap of variable-length ones.
        about = {"format": FORMAT, "count": count, "source": np.bytes_(source.encode())}
        pack(
            out,
            {"tokens": ((count,), np.dtype(np.uint8), blocks)},
            lambda sums: {**about, "sha256": np.bytes_(sums[0])},
        )
    except ValueError as error:
        raise DataError(
            f"{out}: the files changed while they were packed ({error}); pack them again"
        ) from error


class TextData:
    """A packed text, opened for reading: ``data[start:stop]`` reads that slice from the file.

    Parameters
    ----------
    path
        A file written by `pack_text`.

    Raises
    ------
    DataError
        If the file is missing, damaged, cut short, or not one of ours.

    Attributes
    ----------
    source : str
        Where the text comes from.
    sha256 : str
        Checksum of the text, compared on opening.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            what = "a directory, expected a file" if self.path.is_dir() else "no such file"
            raise DataError(f"{path}: {what}; make it with mpicoll.data.pack_text")
        # Nobody writes to a file in place, so locks protect nothing, and some shared file systems have none.
        with self._explaining("not a readable HDF5 file"):
            self._file = h5py.File(path, "r", locking=False)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        with self._explaining("not a text packed by mpicoll"):
            self._tokens = self._file["tokens"]
            attributes = dict(self._file.attrs)
            version, count = int(attributes["format"]), int(attributes["count"])
            self.source, self.sha256 = attributes["source"].decode(), attributes["sha256"].decode()
            shape, dtype = self._tokens.shape, self._tokens.dtype
        if version != FORMAT:
            raise self._error(f"format {version}, this version of mpicoll reads format {FORMAT}")
        if shape != (count,) or dtype != np.uint8:
            raise self._error(f"{count} bytes announced, {dtype} of shape {shape} found")
        checksum = hashlib.sha256()
        with self._explaining("damaged"):
            for start in range(0, count, BLOCK):
                checksum.update(self[start : start + BLOCK].data)
        if checksum.hexdigest() != self.sha256:
            raise self._error("damaged: its checksum does not match its content")

    @contextlib.contextmanager
    def _explaining(self, reason: str) -> Iterator[None]:
        """Turn whatever HDF5 raises inside into our error."""
        try:
            yield
        except (OSError, KeyError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise self._error(f"{reason} ({error})") from error

    def _error(self, reason: str) -> DataError:
        return DataError(f"{self.path}: {reason}; delete the file and pack it again")

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, where: slice) -> NDArray[np.uint8]:
        tokens: NDArray[np.uint8] = self._tokens[where]
        return tokens

    def split(self, validation: float = 0.05) -> tuple[slice, slice]:
        """Return where the training text and the validation text lie: ``data[train]``, ``data[rest]``.

        The validation text is the tail, whole files but the first, so none of it has been trained on.
        """
        if not 0 < validation < 1:
            raise ValueError(f"validation must be between 0 and 1, got {validation}")
        cut = len(self) - round(len(self) * validation)
        return slice(0, cut), slice(cut, len(self))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TextData:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _blocks(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Regroup texts into blocks of about `BLOCK` bytes."""
    held = bytearray()
    for text in texts:
        held += text
        if len(held) >= BLOCK:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def _watched(paths: list[Path], name: str, progress: Progress | None) -> Iterator[bytes]:
    """Read files, showing how many have been read."""
    task: Any = progress.add_task(f"packing {name}", total=len(paths)) if progress else None
    for path in paths:
        yield path.read_bytes()
        if progress:
            progress.advance(task)


def _digest(name: Path) -> bytes:
    return hashlib.sha256(name.as_posix().encode()).digest()
