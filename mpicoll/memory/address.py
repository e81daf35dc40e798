"""A process's memory by address: views, aligned blocks, and the workspace that programs share."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from mpi4py import MPI


def readable(address: int, nbytes: int) -> bool:
    """Ask the kernel: writing unreadable memory to a pipe fails with EFAULT instead of a crash."""
    if not nbytes:
        return True
    reader, writer = os.pipe()
    try:
        for at in (address, address + nbytes - 1):
            os.write(writer, MPI.memory.fromaddress(at, 1))
        return True
    except OSError:
        return False
    finally:
        os.close(reader)
        os.close(writer)


def address_of(data: np.ndarray) -> int:
    """Where an array's memory begins."""
    try:
        return MPI.memory.frombuffer(data, readonly=True).address  # the quickest way to ask
    except (ValueError, BufferError):  # a type without a buffer code, such as bfloat16
        return int(data.__array_interface__["data"][0])


def host_view(address: int, nbytes: int) -> np.ndarray:
    """Bytes at an address, without keeping whoever owns them alive."""
    return (
        np.frombuffer(MPI.memory.fromaddress(address, nbytes), np.uint8) if nbytes else np.empty(0, np.uint8)
    )


def aligned_empty(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Uninitialised bytes whose address is a multiple of a cache line."""
    raw = np.empty(nbytes + alignment, np.uint8)
    first = -raw.ctypes.data % alignment
    return raw[first : first + nbytes]


class Workspace:
    """Memory for programs that never run at the same time, grown when one needs more.

    Fresh pages cost more than a reduction, and a copy per program would cost a vector each.
    """

    def __init__(self) -> None:
        self._memory: dict[Any, np.ndarray] = {}

    def take(self, name: Any, nbytes: int) -> np.ndarray:
        """Bytes under a name.  Programs made before keep what they had: sizes double, so that is little."""
        memory = self._memory.get(name)
        if memory is None or memory.size < nbytes:
            memory = self._memory[name] = aligned_empty(1 << max(nbytes - 1, 1).bit_length())
        return memory[:nbytes]
