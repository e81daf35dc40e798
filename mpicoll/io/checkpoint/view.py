"""One HDF5 file that shows the parts of a checkpoint as whole arrays, for other tools."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from mpicoll.io.checkpoint.layout import Index, Piece, dtype_of
from mpicoll.io.files import replacing
from mpicoll.io.hdf5 import stored

__all__ = ["view"]


def view(path: Path, arrays: Mapping[str, tuple[Index, str, Sequence[Piece]]], files: Sequence[str]) -> None:
    """Write an HDF5 file that shows the pieces in `files` beside it as whole arrays.

    Parameters
    ----------
    path
        The file.
    arrays
        Name -> shape, name of the dtype, pieces.
    files
        The names of the files that hold the pieces, by number.
    """
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        for name, (shape, dtype, pieces) in arrays.items():
            kind = stored(dtype_of(dtype))
            if not shape:  # a scalar has no virtual form
                file[name] = h5py.ExternalLink(files[pieces[0].file], f"{name}/0")
                continue
            if not pieces:
                shown = file.create_dataset(name, shape, kind)
            else:
                layout = h5py.VirtualLayout(shape, kind)
                for number, piece in enumerate(pieces):
                    source = h5py.VirtualSource(files[piece.file], f"{name}/{number}", piece.shape, kind)
                    layout[piece.within((0,) * len(shape))] = source
                shown = file.create_virtual_dataset(name, layout)
            # Of fixed length: HDF5 may loop forever over a damaged heap of variable-length strings.
            shown.attrs["dtype"] = np.bytes_(dtype)
    with replacing(path) as temporary:
        temporary.write_bytes(content.getbuffer())
