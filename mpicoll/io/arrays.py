"""Arrays of samples in HDF5, read by slices or by index; and tokens as samples."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np

from mpicoll.io.hdf5 import pack
from mpicoll.io.text import DataError

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["ArrayData", "Column", "Windows", "pack_arrays"]

FORMAT = 1
BLOCK = 1 << 22  #: bytes read at once, where all are


class Column(Protocol):
    """One array of a file: its first axis counts the samples."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its elements."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: Any, /) -> NDArray[Any]: ...


def pack_arrays(out: Path | str, arrays: Mapping[str, NDArray[Any]], *, source: str = "") -> None:
    """Pack arrays of equally many samples into an HDF5 file.

    The file appears under its name complete or not at all.

    Parameters
    ----------
    out
        The HDF5 file to write; its folder is made if needed.
    arrays
        Name -> array whose first axis counts the samples.  One too large for memory may be a `numpy.memmap`.
    source
        Where the data come from, in words, kept in the file.
    """
    out = Path(out)
    for name, array in arrays.items():
        if array.ndim == 0 or array.dtype.kind not in "biufc":
            raise DataError(f"{name}: {array.dtype} of shape {array.shape}, expected samples made of numbers")
    _check_lengths(out, arrays)
    about = {"format": FORMAT, "source": np.bytes_(source.encode()) if source else np.bytes_(b"-")}
    datasets = {name: (array.shape, array.dtype, _blocks(array)) for name, array in arrays.items()}
    out.parent.mkdir(parents=True, exist_ok=True)

    def attributes(digests: list[str]) -> dict[str, Any]:
        # Strings of fixed length: HDF5 may loop forever over a damaged heap of variable-length ones.
        sums = dict(zip(arrays, digests, strict=True))
        return {**about, "sha256": np.bytes_(json.dumps(sums).encode())}

    pack(out, datasets, attributes)


class ArrayData(Mapping[str, Column]):
    """A file of arrays, opened for reading: ``data["x"][10:20]``, ``data["x"][[7, 3, 7]]``.

    Any HDF5 file serves whose datasets have equally many samples.  Those that lie in one stretch, as
    `pack_arrays` writes them, are mapped into memory, and only what is asked for is read; others
    (chunked, compressed) are read by HDF5 in as few slices as the indices make.

    Parameters
    ----------
    path
        The file.
    names
        Which arrays to open; all, if none are named.
    verify
        Compare the checksums that `pack_arrays` wrote.  This reads the whole file once.

    Raises
    ------
    DataError
        If the file is missing, damaged, or its arrays have different lengths.
    """

    def __init__(self, path: Path | str, *names: str, verify: bool = True) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise DataError(f"{path}: no such file; make it with mpicoll.datasets.pack_arrays")
        try:
            # Nobody writes to a file in place: locks protect nothing, and some shared file systems have none.
            self._file = h5py.File(path, "r", locking=False)
        except OSError as error:
            raise DataError(f"{path}: not a readable HDF5 file ({error})") from error
        try:
            self._open(names)
            if verify:
                self._verify()
        except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
            self.close()
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: damaged ({error})") from error

    def _open(self, names: tuple[str, ...]) -> None:
        found: dict[str, h5py.Dataset] = {}

        def see(name: str, thing: Any) -> None:
            if isinstance(thing, h5py.Dataset) and thing.ndim and thing.dtype.kind in "biufc":
                found[name] = thing

        self._file.visititems(see)
        for name in names:
            if name not in found:
                known = ", ".join(found) or "none"
                raise DataError(f"{self.path}: no array {name!r}; there are: {known}")
        self._columns = {name: self._column(found[name]) for name in names or found}
        _check_lengths(self.path, self._columns)

    def _column(self, dataset: h5py.Dataset) -> Column:
        offset = dataset.id.get_offset()
        if offset is None or dataset.chunks:
            return _Chunked(dataset)
        if offset + math.prod(dataset.shape) * dataset.dtype.itemsize > self.path.stat().st_size:
            raise DataError(f"{self.path}: cut short within {dataset.name}")
        return np.memmap(self.path, dataset.dtype, "r", offset, dataset.shape)

    def _verify(self) -> None:
        attributes = self._file.attrs
        if not {"format", "sha256"} <= set(attributes):
            return  # another program's file
        if attributes["format"] != FORMAT:
            version = attributes["format"]
            raise DataError(f"{self.path}: format {version}, this version of mpicoll reads format {FORMAT}")
        sums = json.loads(attributes["sha256"])
        for name, column in self._columns.items():
            digest = hashlib.sha256()
            for block in _blocks(column):
                digest.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
            if digest.hexdigest() != sums[name]:
                raise DataError(f"{self.path}: damaged: the checksum of {name} does not match its content")

    @property
    def count(self) -> int:
        """How many samples there are."""
        return len(next(iter(self._columns.values())))

    def rows(self, where: Any) -> dict[str, NDArray[Any]]:
        """Read samples of every array: a slice, or indices in any order.

        >>> batch = data.rows(sampler[k])    # doctest: +SKIP
        """
        return {name: np.array(column[where]) for name, column in self._columns.items()}

    def close(self) -> None:
        """Close the file; arrays that are mapped stay readable."""
        self._file.close()

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __enter__(self) -> ArrayData:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Chunked:
    """A dataset that HDF5 must read, with NumPy's indexing of the first axis."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self.dataset, self.shape, self.dtype = dataset, dataset.shape, dataset.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, where: Any, /) -> NDArray[Any]:
        if isinstance(where, slice):
            where = np.arange(len(self))[where]
        wanted = np.asarray(where, np.int64)
        if wanted.size and not -len(self) <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"{wanted.min()} to {wanted.max()} of {len(self)} samples")
        rows, places = np.unique(wanted % max(len(self), 1), return_inverse=True)
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        ends = np.flatnonzero(np.diff(rows) != 1) + 1
        for run in np.split(np.arange(len(rows)), ends):
            if len(run):
                found[run[0] : run[-1] + 1] = self.dataset[rows[run[0]] : rows[run[-1]] + 1]
        return found[places.reshape(wanted.shape)]


class Windows:
    """A text as samples: ``windows[starts]`` are the `length` tokens from each start on.

    Parameters
    ----------
    tokens
        One token after the other: an array, a column of `ArrayData`, a `mpicoll.data.TextData`.
    length
        Tokens in a window.

    Examples
    --------
    >>> windows = Windows(np.arange(10), 4)
    >>> len(windows), windows[np.array([0, 6])].tolist()
    (7, [[0, 1, 2, 3], [6, 7, 8, 9]])
    """

    def __init__(self, tokens: Any, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if len(tokens) < length:
            raise DataError(f"{len(tokens)} tokens are too few for windows of {length}")
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) - self.length + 1

    def __getitem__(self, starts: NDArray[np.int64]) -> NDArray[Any]:
        if len(starts) and not 0 <= starts.min() <= starts.max() < len(self):
            raise IndexError(f"windows {starts.min()} to {starts.max()} of {len(self)}")
        if isinstance(self.tokens, np.ndarray):
            return np.asarray(self.tokens[starts[:, None] + np.arange(self.length)])
        parts = [self.tokens[int(start) : int(start) + self.length] for start in starts]
        return np.stack(parts) if parts else np.empty((0, self.length), self.tokens[0:0].dtype)


def _blocks(column: Any) -> Iterator[NDArray[Any]]:
    rows = max(1, BLOCK // max(column.dtype.itemsize * math.prod(column.shape[1:]), 1))
    for start in range(0, len(column), rows):
        yield column[start : start + rows]


def _check_lengths(path: Path, arrays: Mapping[str, Any]) -> None:
    if not arrays:
        raise DataError(f"{path}: no arrays")
    first, *others = arrays
    for name in others:
        if len(arrays[name]) != len(arrays[first]):
            counts = f"{first} has {len(arrays[first])} samples, {name} has {len(arrays[name])}"
            raise DataError(f"{path}: {counts}; name the arrays that belong together")
