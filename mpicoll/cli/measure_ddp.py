"""The small network's step in PyTorch, with DistributedDataParallel over gloo and without it."""

from __future__ import annotations

import atexit
import copy
import socket
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed
from mpi4py import MPI
from torch.nn import Linear, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel


class TorchPair:
    """A step of a network with Adam's update, by one rank for itself and by all ranks together."""

    def __init__(self, plain: MPI.Intracomm, layers: int, width: int, batch: int) -> None:
        _meet(plain)
        torch.manual_seed(0)
        model = Sequential(*(part for _ in range(layers) for part in (Linear(width, width), Tanh())))
        self.lone, self.shared = copy.deepcopy(model), DistributedDataParallel(model)
        self.optimizers = {
            module: torch.optim.Adam(module.parameters(), 1e-3) for module in (self.lone, self.shared)
        }
        torch.manual_seed(plain.rank)
        self.batch = torch.randn(batch, width)

    def _step(self, module: Any) -> None:
        optimizer = self.optimizers[module]
        optimizer.zero_grad()
        (module(self.batch).square().sum() / (2 * len(self.batch))).backward()
        optimizer.step()

    def without(self) -> None:
        """Make a step for itself."""
        self._step(self.lone)

    def along(self) -> None:
        """Make a step with the other ranks."""
        self._step(self.shared)

    def replica(self) -> np.ndarray:
        """Parameters that are the same on every rank."""
        return torch.nn.utils.parameters_to_vector(self.shared.parameters()).detach().numpy()


def _meet(plain: MPI.Intracomm) -> None:
    """Make the process group: rank 0 takes a free port, and the MPI tells the others of it."""
    make = partial(torch.distributed.TCPStore, timeout=timedelta(seconds=60))
    near = plain.Split_type(MPI.COMM_TYPE_SHARED)
    # the name of a laptop or a container may lead nowhere
    host = "127.0.0.1" if near.size == plain.size else socket.gethostname()
    near.Free()
    if plain.rank == 0:
        store = make("0.0.0.0", 0, plain.size, is_master=True, wait_for_workers=False)
        plain.bcast((host, store.port))
    else:
        host, port = plain.bcast(None)
        store = make(host, port, plain.size, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=plain.rank, world_size=plain.size)
    atexit.register(torch.distributed.destroy_process_group)
