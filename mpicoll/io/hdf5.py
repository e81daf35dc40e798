"""HDF5 files made in memory and written by us: HDF5 itself never touches the disk.

HDF5 crashes the process where a disk is full, may loop forever over a damaged file, and wants locks that some
shared file systems refuse.  So it only lays out a file whose data it does not write; the data and what lies
around it go out through an ordinary Python file.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from mpicoll.io.files import replacing

__all__ = ["checksum", "pack", "read", "stored", "write"]

BLOCK = 1 << 22  #: bytes per read and write
PAGE = 1 << 12

Block: TypeAlias = np.ndarray[Any, Any]
Kind: TypeAlias = tuple[str, tuple[int, ...], np.dtype[Any]]  #: name, shape and dtype of a dataset


def write(path: Path, blocks: Sequence[tuple[str, Block]]) -> dict[str, Any]:
    """Write blocks as the datasets of an HDF5 file, in one pass, under a temporary name until it is on disk.

    Returns
    -------
    dict
        ``nbytes`` and ``sha256`` of the file, and ``offsets``: for every name, where its bytes begin.
    """
    content, offsets, size = _lay_out([(name, block.shape, block.dtype) for name, block in blocks])
    digest = hashlib.sha256()
    with replacing(path) as temporary, temporary.open("wb", buffering=0) as file:
        position = 0
        for offset, (_, block) in sorted(zip(offsets, blocks, strict=True), key=lambda pair: pair[0]):
            _put(file, digest, content.part(position, offset))
            _put(file, digest, _bytes(block))
            position = offset + block.nbytes
        _put(file, digest, content.part(position, size))
    places = {name: offset for (name, _), offset in zip(blocks, offsets, strict=True)}
    return {"nbytes": size, "sha256": digest.hexdigest(), "offsets": places}


def pack(
    path: Path,
    datasets: Mapping[str, tuple[tuple[int, ...], np.dtype[Any], Iterable[Block]]],
    attributes: Callable[[list[str]], Mapping[str, Any]],
) -> None:
    """Write datasets whose blocks are made one after the other, and attributes that are known at the end.

    Parameters
    ----------
    path
        The file.
    datasets
        Name -> shape, dtype, and blocks that hold the data in order.
    attributes
        Given the SHA-256 of each dataset, returns the attributes of the file; their types and lengths must
        not depend on it.

    Raises
    ------
    ValueError
        If the blocks hold more or less than the shape tells.
    """
    kinds = [(name, shape, dtype) for name, (shape, dtype, _) in datasets.items()]
    _, offsets, _ = _lay_out(kinds, attributes(["0" * 64] * len(kinds)))
    digests, ends = [], []
    with replacing(path) as temporary, temporary.open("wb", buffering=0) as file:
        for (name, (shape, dtype, blocks)), offset in zip(datasets.items(), offsets, strict=True):
            digest = hashlib.sha256()
            ends.append(offset + math.prod(shape) * dtype.itemsize)
            file.seek(offset)
            for block in blocks:
                _put(file, digest, _bytes(block))
            if file.tell() != ends[-1]:
                held = (file.tell() - offset) // dtype.itemsize
                raise ValueError(f"{name}: shape {shape} announced, {held} elements found")
            digests.append(digest.hexdigest())
        content, again, size = _lay_out(kinds, attributes(digests))
        if again != offsets:
            raise ValueError("the attributes' lengths depend on the checksums")
        for start, stop in zip([0, *sorted(ends)], [*sorted(offsets), size], strict=True):
            file.seek(start)
            _put(file, hashlib.sha256(), content.part(start, stop))


def _bytes(block: Block) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


def _put(file: IO[bytes], digest: Any, content: memoryview) -> None:
    for start in range(0, len(content), BLOCK):
        block = content[start : start + BLOCK]
        digest.update(block)
        while block:
            block = block[file.write(block) :]


def _lay_out(
    datasets: Sequence[Kind], attributes: Mapping[str, Any] | None = None
) -> tuple[_Sparse, list[int], int]:
    """Return an HDF5 file without its data: its content, where the data of each dataset go, and its size."""
    content, offsets = _Sparse(), []
    with h5py.File(content, "w") as file:
        created, linked = h5p.create(h5p.DATASET_CREATE), h5p.create(h5p.LINK_CREATE)
        created.set_alloc_time(h5d.ALLOC_TIME_EARLY)  # the offset is known at once ...
        created.set_fill_time(h5d.FILL_TIME_NEVER)  # ... and nothing is written there
        linked.set_create_intermediate_group(True)
        linked.set_char_encoding(h5t.CSET_UTF8)
        for name, shape, dtype in datasets:
            kept, space = h5t.py_create(stored(dtype), logical=True), h5s.create_simple(shape)
            space = space if shape else h5s.create(h5s.SCALAR)
            dataset = h5d.create(file.id, name.encode(), kept, space, created, linked)
            offsets.append(dataset.get_offset() or 0)  # None for a dataset without elements
        file.attrs.update(attributes or {})
    return content, offsets, content.size


def stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return what HDF5 is told: it does not know bfloat16 and its like, and sees the bits of those."""
    return dtype if dtype.kind in "biufc" else np.dtype(f"u{dtype.itemsize}")


class _Sparse(io.RawIOBase):
    """A file in memory that keeps only the pages written to."""

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}
        self.size = self.position = 0

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield page, place in it, and place in the bytes from `start` to `stop`."""
        for page in range(start // PAGE, -(-stop // PAGE)):
            low, high = max(start, page * PAGE), min(stop, (page + 1) * PAGE)
            yield page, slice(low - page * PAGE, high - page * PAGE), slice(low - start, high - start)

    def part(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop`; zeros where nothing was written."""
        content = bytearray(stop - start)
        for page, there, here in self._spans(start, stop):
            if page in self.pages:
                content[here] = self.pages[page][there]
        return memoryview(content)

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        for page, there, here in self._spans(self.position, self.position + len(data)):
            self.pages.setdefault(page, bytearray(PAGE))[there] = data[here]
        self.position += len(data)
        self.size = max(self.size, self.position)
        return len(data)

    def readinto(self, buffer: Any) -> int:
        buffer = memoryview(buffer).cast("B")
        count = max(min(len(buffer), self.size - self.position), 0)
        buffer[:count] = self.part(self.position, self.position + count)
        self.position += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}
        self.position = base[whence] + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def truncate(self, size: int | None = None) -> int:
        self.size = self.position if size is None else size
        return self.size

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def read(path: Path, offset: int, shape: tuple[int, ...], inside: tuple[slice, ...], out: Block) -> None:
    """Read part of a block that begins at a byte of a file.

    Parameters
    ----------
    path, offset
        Where the block lies.
    shape
        The shape of the block.
    inside
        Which part of it is read.
    out
        Where to: an array of that part's shape, and of the block's type.
    """
    rows = inside[:1] or (slice(0, 1),)
    count = rows[0].stop - rows[0].start
    row = math.prod(shape[1:]) * out.itemsize
    direct = out.flags.c_contiguous and out.nbytes == count * row
    block = out if direct else np.empty((count, *shape[1:]), out.dtype)
    target = block.reshape(-1).view(np.uint8).data
    with path.open("rb", buffering=0) as file:
        file.seek(offset + rows[0].start * row)
        while target:
            got = file.readinto(target)
            if not got:
                raise OSError(f"{path} ends {len(target)} bytes early")
            target = target[got:]
    if not direct:
        out[...] = block[(slice(None), *inside[1:])]
