"""Optimizers on plain arrays, and what keeps the replicas of a model alike."""

from mpicoll.optim.broadcast import (
    allreduce_metrics,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from mpicoll.optim.clipping import clip_by_global_norm
from mpicoll.optim.compression import Int8, PowerSGD, TopK
from mpicoll.optim.distributed import DistributedOptimizer
from mpicoll.optim.exchange import BF16, FP16, Compression
from mpicoll.optim.layerwise import LAMB, LARS
from mpicoll.optim.optimizers import SGD, Adam, AdamW, Optimizer
from mpicoll.optim.schedules import scale_lr, warmup

__all__ = [
    "BF16",
    "FP16",
    "LAMB",
    "LARS",
    "SGD",
    "Adam",
    "AdamW",
    "Compression",
    "DistributedOptimizer",
    "Int8",
    "Optimizer",
    "PowerSGD",
    "TopK",
    "allreduce_metrics",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_by_global_norm",
    "scale_lr",
    "warmup",
]
