"""Layers with forward and backward written out, on NumPy or CuPy arrays."""

from mpicoll.nn.attention import CausalAttention
from mpicoll.nn.dropout import Draw, Dropout
from mpicoll.nn.embedding import Embedding, Positions
from mpicoll.nn.gelu import GELU
from mpicoll.nn.layer import Layer, ignore, namespace
from mpicoll.nn.linear import Linear
from mpicoll.nn.loss import cross_entropy, cross_entropy_backward
from mpicoll.nn.norm import LayerNorm
from mpicoll.nn.stack import Residual, Stack

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
