"""Layers with forward and backward written out, on NumPy or CuPy arrays."""

from mpicoll.train.nn.attention import CausalAttention
from mpicoll.train.nn.dropout import Draw, Dropout
from mpicoll.train.nn.embedding import Embedding, Positions
from mpicoll.train.nn.gelu import GELU
from mpicoll.train.nn.layer import Layer, ignore, namespace
from mpicoll.train.nn.linear import Linear
from mpicoll.train.nn.loss import cross_entropy, cross_entropy_backward
from mpicoll.train.nn.norm import LayerNorm
from mpicoll.train.nn.stack import Residual, Stack

__all__ = [
    "GELU",
    "CausalAttention",
    "Draw",
    "Dropout",
    "Embedding",
    "Layer",
    "LayerNorm",
    "Linear",
    "Positions",
    "Residual",
    "Stack",
    "cross_entropy",
    "cross_entropy_backward",
    "ignore",
    "namespace",
]
