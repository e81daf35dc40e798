"""Optimizers on plain arrays, and what keeps the replicas of a model alike."""

from mpicoll.optim.broadcast import broadcast_parameters
from mpicoll.optim.optimizers import SGD, Adam, Optimizer

__all__ = ["SGD", "Adam", "Optimizer", "broadcast_parameters"]
