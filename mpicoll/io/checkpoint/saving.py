"""From the arrays of the ranks to a complete checkpoint on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpicoll.io.checkpoint.folder import NOT_SHARED, write_manifest
from mpicoll.io.checkpoint.layout import CheckpointError, Entry, Index, Piece, cut, dtype_name, entries
from mpicoll.io.checkpoint.together import Together, said
from mpicoll.io.checkpoint.view import view
from mpicoll.io.hdf5 import write

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Blocks", "Plan", "agreed", "collect", "planned", "write_parts", "writes"]

Plan: TypeAlias = dict[str, tuple[Index, str, list[Piece]]]  #: name -> shape, dtype, pieces
Blocks: TypeAlias = "list[tuple[str, NDArray[Any]]]"  #: dataset in this rank's file, and its content


def agreed(ranks: Together, state: Mapping[str, Any]) -> list[Entry]:
    """Return the arrays of a state that all ranks describe alike."""
    with ranks.agreeing():
        mine = entries(state)
    described = [entry.describe() for entry in mine]
    theirs = ranks.on_root(lambda: described)
    with ranks.agreeing():
        for here, there in zip_longest(described, theirs):
            if here != there:
                raise CheckpointError(
                    f"the state differs from that of rank 0: {_words(here)} here, {_words(there)} there"
                )
    return mine


def _words(described: tuple[str, Index, str, bool] | None) -> str:
    if described is None:
        return "nothing more"
    name, shape, dtype, whole = described
    return f"{name!r}, {dtype} of shape {shape}{'' if whole else ', sharded'},"


def planned(ranks: Together, files: Sequence[int], mine: Sequence[Entry]) -> Plan:
    """Return which file every part of every array goes to; the same on every rank."""
    shards = {one.name: (one.start, tuple(one.array.shape)) for one in mine if not one.whole}
    blocks = ranks.gather(shards) if shards else []
    with ranks.agreeing():
        pieces = cut(mine, blocks, files)
    return {one.name: (one.shape, dtype_name(one.dtype), pieces[one.name]) for one in mine}


def collect(
    ranks: Together,
    files: Sequence[int],
    plan: Plan,
    mine: Sequence[Entry],
    rooms: dict[str, NDArray[Any]] | None,
) -> Blocks:
    """Return what this rank writes; ranks that do not write send their blocks to the one that does.

    Parameters
    ----------
    ranks, files, plan, mine
        The ranks, the number of each one's file, what goes where, and this rank's arrays.
    rooms
        Where copies go: kept from one time to the next, for fresh pages cost more than the copy.  None:
        the blocks are views of the arrays.
    """
    blocks: Blocks = []
    for entry in mine:
        for number, piece in enumerate(plan[entry.name][2]):
            writer, name = files.index(piece.file), f"{entry.name}/{number}"
            if ranks.rank == piece.source:
                block = entry.array[(*piece.within(entry.start), ...)]
                if not isinstance(block, np.ndarray):
                    block = block.get()
                elif rooms is not None and ranks.rank == writer:
                    room = _room(rooms, name, piece.shape, entry.dtype)
                    room[...] = block
                    block = room
                if ranks.rank != writer:
                    ranks.comm.Send(_bytes(block), writer)
            elif ranks.rank == writer:
                block = _room({} if rooms is None else rooms, name, piece.shape, entry.dtype)
                ranks.comm.Recv(_bytes(block), piece.source)
            if ranks.rank == writer:
                blocks.append((name, block))
    return blocks


def _room(rooms: dict[str, NDArray[Any]], name: str, shape: Index, dtype: np.dtype[Any]) -> NDArray[Any]:
    room = rooms.get(name)
    if room is None or (room.shape, room.dtype) != (shape, dtype):
        room = rooms[name] = np.empty(shape, dtype)
    return room


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def writes(ranks: Together, files: Sequence[int]) -> bool:
    """Return whether this rank is the first of those whose file it is, and writes it."""
    return files.index(files[ranks.rank]) == ranks.rank


def write_parts(
    ranks: Together,
    files: Sequence[int],
    path: Path,
    header: dict[str, Any],
    plan: Plan,
    blocks: Blocks,
    tidy: Callable[[], None],
) -> str | None:
    """Write every rank's file, then what makes them a checkpoint; return what went wrong, on every rank.

    Parameters
    ----------
    ranks, files, plan, blocks
        As for `collect`, and what it returned.
    path
        The checkpoint's folder, which rank 0 has made.
    header
        What the manifest begins with.
    tidy
        Called on rank 0 when the checkpoint is complete, before the others hear of it.
    """
    own = problem = record = None
    try:
        if writes(ranks, files):
            name = f"part-{files[ranks.rank]:05d}.h5"
            record = {"name": name, **write(path / name, blocks)}
    except FileNotFoundError:
        own = f"{path}: {NOT_SHARED}"
    except Exception as error:  # whatever it is, the others wait for word
        own = said(error)
    outcomes = ranks.gather((own, record))
    for rank, (theirs, _) in enumerate(outcomes):
        if theirs:
            problem = problem or f"rank {rank}: {theirs}"
    if ranks.rank == 0:
        try:
            if not problem:
                _complete(path, header, plan, [record for _, record in outcomes if record])
        except Exception as error:
            problem = f"rank 0: {said(error)}"
        if problem:
            shutil.rmtree(path, ignore_errors=True)
        else:
            tidy()
    return ranks.gather(problem)[0]


def _complete(path: Path, header: dict[str, Any], plan: Plan, records: Sequence[dict[str, Any]]) -> None:
    """Write what shows the parts as one file, and the manifest last."""
    view(path / "checkpoint.h5", plan, [record["name"] for record in records])
    arrays = {}
    for name, (shape, dtype, pieces) in plan.items():
        offsets = [records[piece.file]["offsets"][f"{name}/{number}"] for number, piece in enumerate(pieces)]
        places = [
            (piece.file, offset, piece.start, piece.shape)
            for piece, offset in zip(pieces, offsets, strict=True)
        ]
        arrays[name] = {"shape": shape, "dtype": dtype, "pieces": places}
    files = [{key: record[key] for key in ("name", "nbytes", "sha256")} for record in records]
    write_manifest(path, {**header, "files": files, "arrays": arrays})
