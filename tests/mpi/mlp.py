"""A small regression that every way of training must solve alike on any number of ranks."""

import hashlib

import numpy as np

from mpicoll.io.sampler import Sampler
from mpicoll.train.buckets import Flat

SAMPLES, BATCH = 512, 64


class Problem:
    """An MLP of three layers, 16 -> 32 -> 32 -> 8, and noisy targets that another one has made."""

    def __init__(self, dtype=np.float32):
        random = np.random.default_rng(7)
        self.x = random.standard_normal((SAMPLES, 16)).astype(dtype)
        teacher = [random.standard_normal(shape) / 4 for shape in ((16, 24), (24, 8))]
        noise = 0.3 * random.standard_normal((SAMPLES, 8))
        self.y = (np.tanh(self.x @ teacher[0]) @ teacher[1] + noise).astype(dtype)
        sizes = [16, 32, 32, 8]
        shapes = {}
        for k, (rows, columns) in enumerate(zip(sizes, sizes[1:], strict=False)):
            shapes |= {f"w{k}": (rows, columns), f"b{k}": (columns,)}
        self.params = Flat(shapes, dtype)
        for k in range(3):
            weight = self.params[f"w{k}"]
            weight[...] = random.standard_normal(weight.shape) / np.sqrt(len(weight))

    def forward(self, params, x):
        layers = [x]
        for k in range(3):
            z = layers[-1] @ params[f"w{k}"] + params[f"b{k}"]
            layers.append(np.tanh(z) if k < 2 else z)
        return layers

    def loss(self, params=None):
        params = {name: np.asarray(array, np.float64) for name, array in (params or self.params).items()}
        return float(np.square(self.forward(params, self.x)[-1] - self.y).mean())

    def backward(self, params, rows, scale, gradients, ready=lambda name: None):
        """Write `scale` times the gradient of the rows' summed loss; the last layer's first."""
        layers = self.forward(params, self.x[rows].astype(params["w0"].dtype))
        delta = 2 * scale / 8 * (layers[-1] - self.y[rows].astype(layers[-1].dtype))
        for k in reversed(range(3)):
            gradients[f"w{k}"][...] = layers[k].T @ delta
            ready(f"w{k}")
            gradients[f"b{k}"][...] = delta.sum(axis=0)
            ready(f"b{k}")
            delta = (delta @ params[f"w{k}"].T) * (1 - layers[k] * layers[k])


def train(problem, optimizer, comm, steps, passes=1, clip=None):
    """Train on global batches that do not depend on the number of ranks; return the loss on all samples.

    With `passes`, each batch is cut in so many, and the sum of their gradients is taken for one step.
    """
    sampler = Sampler(SAMPLES, BATCH, seed=3, rank=comm.rank, size=comm.size)
    for step in range(steps):
        for rows in np.array_split(sampler[step], passes):
            scale = comm.size / BATCH
            problem.backward(optimizer.params, rows, scale, optimizer.gradients, optimizer.grad_ready)
        if clip:
            optimizer.synchronize()
            clip(optimizer.gradients)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return problem.loss()


def same_bits(comm, *arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8))
    return len(set(comm.allgather(digest.hexdigest()))) == 1
