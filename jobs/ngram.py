"""A byte-level n-gram language model in NumPy, with its gradient written out; it knows nothing of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mpicoll.train.buckets import Flat

BYTES = 256


class Model:
    """Embedding of the last N bytes -> hidden layer -> odds of the next byte.

    Parameters
    ----------
    context
        N, the bytes the model looks back.
    embed
        Width of a byte's vector.
    hidden
        Width of the hidden layer.
    seed
        Of the parameters to start from.
    dtype
        float32 to train; float64 to compare the gradient with differences.
    """

    def __init__(self, context: int, embed: int, hidden: int, seed: int, dtype: type = np.float32) -> None:
        random = np.random.default_rng(seed)
        inputs = context * embed
        self.context = context
        self.params = Flat(
            {
                "embed": (BYTES, embed),
                "hidden": (inputs, hidden),
                "hidden_bias": (hidden,),
                "output": (hidden, BYTES),
                "output_bias": (BYTES,),
            },
            dtype,
        )
        for name, scale in ("embed", 1.0), ("hidden", math.sqrt(1 / inputs)), ("output", 0.0):
            self.params[name][...] = scale * random.standard_normal(self.params[name].shape)

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs and outputs of the hidden layer, and the log-probabilities of the next byte."""
        p = self.params
        inputs = p["embed"][x].reshape(len(x), len(p["hidden"]))
        hidden = inputs @ p["hidden"]
        hidden += p["hidden_bias"]
        np.tanh(hidden, out=hidden)  # smooth: with the kinks of max(0, x), rounding grows tenfold in 40 steps
        logits = hidden @ p["output"]
        logits += p["output_bias"]
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return inputs, hidden, logits

    def loss(self, windows: np.ndarray) -> float:
        """Return the summed loss of windows of N + 1 bytes each."""
        x, y = windows[:, :-1], windows[:, -1]
        return -float(self.forward(x)[2][np.arange(len(y)), y].sum(dtype=np.float64))

    def backward(self, windows: np.ndarray, scale: float, gradients: Mapping[str, np.ndarray]) -> None:
        """Write `scale` times the summed gradient, and the loss likewise, into `gradients`."""
        x, y = windows[:, :-1], windows[:, -1]
        rows = np.arange(len(y))
        inputs, hidden, logits = self.forward(x)
        gradients["loss"][0] = -scale * logits[rows, y].sum(dtype=np.float64)

        d_logits = np.exp(logits, out=logits)  # softmax minus one-hot
        d_logits[rows, y] -= 1
        d_logits *= scale
        np.matmul(hidden.T, d_logits, out=gradients["output"])
        d_logits.sum(axis=0, out=gradients["output_bias"])

        d_hidden = d_logits @ self.params["output"].T
        d_hidden *= 1 - hidden * hidden
        np.matmul(inputs.T, d_hidden, out=gradients["hidden"])
        d_hidden.sum(axis=0, out=gradients["hidden_bias"])

        d_embed = (d_hidden @ self.params["hidden"].T).reshape(x.size, gradients["embed"].shape[1])
        for column, weights in zip(gradients["embed"].T, d_embed.T, strict=True):
            column[...] = np.bincount(x.ravel(), weights, BYTES)  # bytes recur: their gradients add up

    def sample(self, prompt: bytes, count: int, seed: int, temperature: float = 0.7) -> bytes:
        """Continue the prompt by `count` bytes drawn from the model."""
        random = np.random.default_rng(seed)
        text = bytearray(prompt.rjust(self.context, b"\n"))
        for _ in range(count):
            x = np.frombuffer(bytes(text[-self.context :]), np.uint8)[None]
            odds = np.exp(self.forward(x)[2][0].astype(np.float64) / temperature).cumsum()
            text.append(min(int(np.searchsorted(odds, random.random() * odds[-1])), BYTES - 1))
        return bytes(text[-count - len(prompt) :])


def entropy(text: np.ndarray) -> float:
    """Return the unigram entropy in nats: the loss of a model that knows how often each byte comes."""
    share = np.bincount(text, minlength=BYTES) / len(text)
    return -float(np.sum(share * np.log(share, where=share > 0, out=np.zeros(BYTES))))
