"""The optimizer of one rank made that of many: gradients are averaged before each step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.train.buckets import Buckets, Flat
from mpicoll.train.optim.adasum import adasum
from mpicoll.train.optim.checks import as_float, check_params
from mpicoll.train.optim.exchange import Compression
from mpicoll.train.optim.optimizers import Optimizer
from mpicoll.train.optim.passes import Passes
from mpicoll.train.optim.reducer import Reducer, can_hide

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.comm.intracomm import Intracomm

    Array = NDArray[Any]

__all__ = ["DistributedOptimizer"]

OPS = ("average", "sum", "adasum")


class DistributedOptimizer:
    """Wraps an optimizer: `step` first combines the gradients of all ranks. Making one is collective.

    The backward pass writes into `gradients`. Where it also says when each one is complete (`grad_ready`),
    buckets are on their way while it goes on. Where several of these share a communicator, their backward
    passes and steps come one after the other, in the same order on every rank; else give each its own
    ``comm.Dup()``.

    Parameters
    ----------
    optimizer
        What makes the steps: `SGD`, `Adam`, ..., or anything with `params`, `step(gradients)`, `lr`, `steps`.
    comm
        The ranks, each with a replica of the parameters (`broadcast_parameters`).
    op
        ``"average"``, ``"sum"``, or ``"adasum"``: every rank makes a step by itself, and the changes are
        combined by Adasum.
    bucket_cap_mb
        Gradients are fused in buckets of at most so many MiB, from the last parameter to the first.
    groups
        Parameters that go together whatever their size: lists of names, or a number of buckets.
    backward_passes_per_step
        Gradients are summed over so many passes before ranks combine them (`grad_ready` ends a pass). The
        sum is not divided: scale the loss if its mean is meant. 2-byte floats are summed in float32.
    gradient_predivide_factor
        Gradients are divided by this before the ranks' sum, and the sum by ``comm.size`` over this after it.
        Only with ``"average"``.
    compression
        Such as ``FP16()``, ``Int8()``, ``PowerSGD(4)``. With it the whole division comes before the sum,
        unless a factor is given. On one rank nothing is sent, and nothing compressed.
    metrics
        Names of numbers (float64) that are to be averaged at each step, or summed, exactly and beside the
        gradients: write them to ``optimizer.metrics[name][...]``.
    overlap
        Whether buckets travel during the backward pass. None: where there is a network, or a core to spare.
        The same on every rank.

    Attributes
    ----------
    gradients : Buckets
        Name -> array to be written by the backward pass.
    metrics : Flat
        Name -> array of no dimensions.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import mpicoll
    >>> from mpicoll.optim import SGD
    >>> params = {"w": np.ones(2)}
    >>> optimizer = DistributedOptimizer(SGD(params, lr=0.5), mpicoll.Intracomm(MPI.COMM_SELF))
    >>> optimizer.gradients["w"][...] = [1, 2]
    >>> optimizer.step()
    >>> params["w"].tolist()
    [0.5, 0.0]
    """

    def __init__(
        self,
        optimizer: Any,
        comm: Intracomm,
        *,
        op: str = "average",
        bucket_cap_mb: float = 4.0,
        groups: int | Sequence[Collection[str]] | None = None,
        backward_passes_per_step: int = 1,
        gradient_predivide_factor: float = 1.0,
        compression: Compression | None = None,
        metrics: Sequence[str] = (),
        overlap: bool | None = None,
    ) -> None:
        _check(op, bucket_cap_mb, backward_passes_per_step, gradient_predivide_factor, compression)
        if op == "adasum" and not isinstance(optimizer, Optimizer):
            raise ValueError("Adasum needs an optimizer whose state does not copy the parameters")
        self.optimizer, self.comm, self.op = optimizer, comm, op
        self.params: Mapping[str, Array] = optimizer.params
        check_params(self.params)
        self.gradients = Buckets(self.params, comm, int(float(bucket_cap_mb) * (1 << 20)), groups)
        self.metrics = Flat({name: () for name in metrics}, np.float64)
        self.overlap = (can_hide(comm) if overlap is None else overlap) and op != "adasum"
        self._reducer = Reducer(
            self.gradients,
            average=op == "average",
            predivide=gradient_predivide_factor,
            compression=compression,
            overlap=self.overlap,
            steps=lambda: int(optimizer.steps),
        )
        self._passes = Passes(self.gradients, backward_passes_per_step)
        self._private = MPI.Intracomm(comm).Dup() if op == "adasum" and comm.size > 1 else None
        self._skipping = self._synchronized = False
        self._reset()

    @np.errstate(over="ignore", invalid="ignore")  # infinities tell of it
    def grad_ready(self, name: str | None = None, gradient: Array | None = None) -> None:
        """Say that a gradient is complete in this pass; ranks may say so in any order.

        Parameters
        ----------
        name
            Of the parameter. None: all gradients not yet named in this pass are complete as they stand.
        gradient
            Its gradient, where it has not been written to `gradients`.

        Raises
        ------
        ValueError
            For a name that is no parameter, a gradient of another shape, or one pass too many.
        RuntimeError
            Between `synchronize` and `step`.
        """
        if self._synchronized:
            raise RuntimeError("a gradient is ready after synchronize() and before step()")
        if name is None:
            if gradient is not None:
                raise ValueError("a gradient needs the name of its parameter")
            for each in self._passes.late():
                self.grad_ready(each)
            return
        if gradient is not None and name in self.gradients:
            view = self.gradients[name]
            if gradient.shape != view.shape:
                shapes = f"{gradient.shape}, its parameter {view.shape}"
                raise ValueError(f"gradient of {name!r} has shape {shapes}")
            view[...] = gradient
        if self._passes.add(name):
            self._reducer.ready(name)

    def synchronize(self) -> None:
        """Combine what the ranks have, and wait for it; collective. `step` does it by itself.

        Where some gradients were named by `grad_ready`, those that were not count as zero, so that ranks may
        use different parameters. Where none was, all are taken as they stand.

        Raises
        ------
        RuntimeError
            When it was called before since the last step.
        """
        if self._synchronized:
            raise RuntimeError(
                "synchronize() was called since the last step; take the step inside "
                "`with optimizer.skip_synchronize():`"
            )
        self._passes.settle()
        self._synchronized = True
        if self.op != "adasum":
            self._reducer.finish()
        if self.metrics and self.comm.size > 1:
            self.comm.Allreduce(MPI.IN_PLACE, self.metrics.flat)
            if self.op != "sum":
                self.metrics.flat[...] /= self.comm.size

    def step(self) -> Any:
        """Combine the gradients of all ranks and update the parameters; collective.

        Returns
        -------
        Any
            What the wrapped optimizer's `step` returned.

        Raises
        ------
        RuntimeError
            After `synchronize`, outside `skip_synchronize`; or inside it without `synchronize`.
        """
        if not self._skipping:
            self.synchronize()
        elif not self._synchronized:
            raise RuntimeError("nothing was synchronized since the last step; call synchronize() first")
        try:
            return self._adasum_step() if self.op == "adasum" else self.optimizer.step(self.gradients)
        finally:  # a gradient that was refused, as one that is not finite may be, is used up too
            self._reset()

    def _adasum_step(self) -> Any:
        """Step alone, then combine the changes, in the memory of the gradients."""
        before = {name: param.copy() for name, param in self.params.items()}
        result = self.optimizer.step(self.gradients)
        if self._private is not None:
            for name, param in self.params.items():
                np.subtract(param, before[name], out=self.gradients[name])
            for bucket in self.gradients.buckets:
                adasum(bucket, self._private)
            for name, param in self.params.items():
                np.add(before[name], self.gradients[name], out=param)
        return result

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, `step` takes the gradients as `synchronize` left them, clipped for example."""
        if self.op == "adasum":
            raise RuntimeError("Adasum combines the changes that steps make: there is nothing to skip")
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def zero_grad(self) -> None:
        """Set all gradients to zero and forget what was ready; not while buckets are on their way."""
        if self._reducer.begun:
            raise RuntimeError("zero_grad() while gradients are on their way: step() or synchronize() first")
        for bucket in self.gradients.buckets:
            bucket.flat[...] = 0
        self._reset()

    def _reset(self) -> None:
        self._synchronized = False
        self._passes.reset()
        self._reducer.reset()

    @property
    def lr(self) -> float:
        """The learning rate of the wrapped optimizer."""
        return float(self.optimizer.lr)

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return int(self.optimizer.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer: the same on every rank, except with Adasum."""
        return dict(self.optimizer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the wrapped optimizer a state; gradients that were ready are forgotten."""
        self.optimizer.load_state_dict(state)
        self._reset()

    def local_state(self) -> dict[str, Array]:
        """Return this rank's memory of what compression has not sent yet, by name: another on each rank.

        With these arrays saved, and copied back in place, a compressed run goes on bit by bit.
        """
        return self._reducer.state()

    @property
    def sent_share(self) -> float:
        """Bytes that a rank sends for its gradients in a compressed step, as a share of all of them."""
        return self._reducer.sent_share

    def free(self) -> None:
        """Give back the communicator that Adasum has; collective."""
        if self._private is not None:
            self._private.Free()
            self._private = None


def _check(op: str, bucket_cap_mb: Any, passes: Any, predivide: Any, compression: Compression | None) -> None:
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if not 0 <= as_float(bucket_cap_mb) < math.inf:
        raise ValueError(f"bucket_cap_mb must be a finite number, not negative, got {bucket_cap_mb!r}")
    if not isinstance(passes, Integral) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be a whole number of at least 1, got {passes!r}")
    if not 1e-30 < as_float(predivide) < 1e30:  # which float32 holds
        raise ValueError(f"gradient_predivide_factor must be between 1e-30 and 1e30, got {predivide!r}")
    if predivide != 1 and op != "average":
        raise ValueError(f"gradient_predivide_factor is for op 'average', got {op!r}")
    if compression is not None and not isinstance(compression, Compression):
        raise ValueError(f"compression must be an object such as FP16(), got {compression!r}")
    if compression is not None and op == "adasum":
        raise ValueError("Adasum cannot be compressed")
