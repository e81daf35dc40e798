"""A byte-level GPT from the layers of mpicoll.nn; it knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpicoll.train.buckets import Flat
from mpicoll.train.nn import (
    GELU,
    CausalAttention,
    Draw,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    Positions,
    Residual,
    Stack,
    cross_entropy,
    cross_entropy_backward,
    ignore,
)

BYTES = 256


class GPT:
    """Embedding -> residual blocks of attention and of a hidden layer -> odds of every next byte.

    Parameters
    ----------
    layers
        Number of blocks.
    heads
        Attention heads of a block.
    width
        Of what runs through the blocks.
    context
        The longest sequence, in bytes.
    dropout
        Share of values dropped after the embedding and at the end of each residual branch.
    seed
        Of the parameters to start from.
    dtype
        float32 to train; float64 to compare the gradient with differences.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        width: int,
        context: int,
        dropout: float = 0.0,
        seed: int = 1,
        dtype: type = np.float32,
    ) -> None:
        self.context = context
        drop, last = Dropout(dropout), (2 * layers * width) ** -0.5  # 2 * layers branches add up
        blocks: list[Residual] = []
        for k in range(layers):
            attention = CausalAttention(f"block{k}.attention", width, heads, last)
            up, down = (
                Linear(f"block{k}.up", width, 4 * width),
                Linear(f"block{k}.down", 4 * width, width, last / 2),
            )
            blocks += [
                Residual([LayerNorm(f"block{k}.norm1", width), attention, drop]),
                Residual([LayerNorm(f"block{k}.norm2", width), up, GELU(), down, drop]),
            ]
        self.stack = Stack(
            [
                Embedding("bytes", BYTES, width, 0.5),
                Positions("positions", context, width, 0.1),
                drop,
                *blocks,
                LayerNorm("norm", width),
                Linear("head", width, BYTES, 0.0),  # at the start every byte is as likely as any other
            ]
        )
        self.params = Flat(self.stack.shapes, dtype)
        for name, value in self.stack.start(np.random.default_rng(seed)):
            self.params[name][...] = value

    def forward(self, windows: np.ndarray, draw: Draw | None = None) -> tuple[float, Any]:
        """Return the loss summed over all bytes but each window's first, and what `backward` needs."""
        logits, saved = self.stack.forward(self.params, windows[:, :-1], draw)
        loss, odds = cross_entropy(logits, windows[:, 1:])
        return loss, (saved, odds)

    def backward(
        self,
        saved: Any,
        scale: float,
        gradients: Mapping[str, np.ndarray],
        ready: Callable[[str], Any] = ignore,
    ) -> None:
        """Write `scale` times the summed loss's gradient into `gradients`, the last layer's first."""
        layers, odds = saved
        self.stack.backward(self.params, layers, cross_entropy_backward(odds, scale), gradients, ready)

    def sample(self, prompt: bytes, count: int, seed: int, temperature: float = 0.7) -> bytes:
        """Continue the prompt by `count` bytes drawn from the model."""
        random, text = np.random.default_rng(seed), bytearray(prompt or b"\n")
        for _ in range(count):
            x = np.frombuffer(bytes(text[-self.context :]), np.uint8)[None]
            logits = self.stack.forward(self.params, x)[0][0, -1].astype(np.float64) / temperature
            odds = np.exp(logits - logits.max()).cumsum()
            text.append(min(int(np.searchsorted(odds, random.random() * odds[-1])), BYTES - 1))
        return bytes(text)
