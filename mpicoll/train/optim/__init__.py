"""Optimizers on plain arrays, and what keeps the replicas of a model alike."""

from mpicoll.train.optim.broadcast import (
    allreduce_metrics,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from mpicoll.train.optim.clipping import clip_by_global_norm
from mpicoll.train.optim.compression import Int8, PowerSGD, TopK
from mpicoll.train.optim.distributed import DistributedOptimizer
from mpicoll.train.optim.exchange import BF16, FP16, Compression
from mpicoll.train.optim.layerwise import LAMB, LARS
from mpicoll.train.optim.optimizers import SGD, Adam, AdamW, Optimizer
from mpicoll.train.optim.schedules import scale_lr, warmup

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
