"""Mixed precision: 2-byte floats to compute and send, float32 to remember."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from mpicoll.train.buckets import Flat, zeros_like
from mpicoll.train.optim.clipping import global_norm
from mpicoll.train.optim.exchange import narrow

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray

    from mpicoll.train.optim.optimizers import Optimizer

    Arrays = Mapping[str, NDArray[Any]]

__all__ = ["LossScale", "MixedPrecision"]

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class LossScale:
    """What the loss is multiplied by, so that small gradients do not vanish in float16.

    Halved when a gradient overflows, doubled after so many steps without.

    Parameters
    ----------
    start
        To begin with.
    growth_steps
        Steps without an overflow after which it grows; None: it never changes, and an overflow is an error.
    factor
        By which it grows and shrinks.
    least
        An overflow at this scale is an error: scaling cannot be the cause.

    Attributes
    ----------
    arrays : dict of str to array
        ``"scale"`` and ``"good"``, the steps since it last changed: all there is to save.
    """

    def __init__(
        self,
        start: float = 2.0**16,
        growth_steps: int | None = 2000,
        factor: float = 2.0,
        least: float = 1.0,
    ) -> None:
        if not (0 < least <= start < math.inf and factor > 1):
            raise ValueError(
                f"a loss scale needs 0 < least <= start and factor > 1, got {least}, {start} and {factor}"
            )
        if growth_steps is not None and growth_steps < 1:
            raise ValueError(f"growth_steps must be at least 1 or None, got {growth_steps}")
        self.growth_steps, self.factor, self.least = growth_steps, factor, least
        self.arrays = {"scale": np.array(float(start)), "good": np.array(0)}

    @property
    def value(self) -> float:
        """The scale of the next step."""
        return float(self.arrays["scale"])

    def update(self, finite: bool, step: int) -> None:
        """Follow a step whose gradient was finite, or not.

        Raises
        ------
        FloatingPointError
            When it was not, and a smaller scale would not help.
        """
        scale, good = self.arrays["scale"], self.arrays["good"]
        if finite:
            good += 1
            if self.growth_steps is not None and good >= self.growth_steps:
                scale *= self.factor
                good[...] = 0
        elif self.growth_steps is None or scale <= self.least:
            raise FloatingPointError(
                f"the gradient of step {step + 1} is not finite at loss scale {self.value:g}: "
                f"the loss itself may be infinite or NaN; try a smaller learning rate, or max_norm"
            )
        else:
            scale[...] = max(self.value / self.factor, self.least)
            good[...] = 0


class MixedPrecision:
    """Makes an optimizer of float32 parameters one of 2-byte parameters, with the float32 ones as masters.

    Compute with `params`, multiply the loss by `scale`, and let `DistributedOptimizer` wrap this one:
    gradients then have 2 bytes, in memory and under way. A step takes the scale out of them, clips them,
    updates the masters and rounds these into `params`. When a gradient has overflowed it changes nothing but
    the scale. Averaged gradients have the same bits on every rank, so all ranks decide alike.

    Parameters
    ----------
    optimizer
        On the masters: parameters of 4 or 8 bytes.
    dtype
        ``"float16"`` or ``"bfloat16"``.
    loss_scale
        None: for float16 a `LossScale` that adapts, for bfloat16, which has the range of float32, none. A
        number is a scale that does not change.
    max_norm
        The longest that the gradient may be, all arrays as one vector; None: any length.
    comm
        Ranks that hold different parts of the gradient (tensor parallel, ZeRO): they need a common norm, and
        a common decision. None where every rank holds all of it.

    Attributes
    ----------
    params
        Name -> array of `dtype`: what the model computes with.
    norm : float
        Of the last gradient, without the scale and before it was clipped.
    skipped : int
        Steps that were not made because of an overflow.

    Examples
    --------
    >>> from mpicoll.optim import SGD
    >>> masters = {"w": np.ones(2, np.float32)}
    >>> optimizer = MixedPrecision(SGD(masters, lr=0.001), "bfloat16")
    >>> optimizer.step({"w": np.ones(2, optimizer.params["w"].dtype)})
    True
    >>> masters["w"].round(6).tolist(), optimizer.params["w"].tolist()
    ([0.9990000128746033, 0.9990000128746033], [1.0, 1.0])
    """

    def __init__(
        self,
        optimizer: Optimizer,
        dtype: str = "bfloat16",
        *,
        loss_scale: LossScale | float | None = None,
        max_norm: float | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be 'float16' or 'bfloat16', got {dtype!r}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be positive or None, got {max_norm}")
        for name, master in optimizer.params.items():
            if master.dtype.kind != "f" or master.itemsize < 4:
                raise ValueError(f"master parameter {name!r} is {master.dtype}, expected float32 or float64")
        if loss_scale is None:
            loss_scale = LossScale() if dtype == "float16" else 1.0
        if not isinstance(loss_scale, LossScale):
            loss_scale = LossScale(loss_scale, growth_steps=None, least=loss_scale)
        self.optimizer, self.loss_scale = optimizer, loss_scale
        self.max_norm, self.comm = max_norm, comm
        self.masters: Arrays = optimizer.params
        self.params = zeros_like(self.masters, DTYPES[dtype])
        self._wide = zeros_like(self.masters)
        self.norm, self.skipped = 0.0, 0
        self.round()

    def round(self) -> None:
        """Round the masters into `params`: after they were changed from outside, as by a broadcast."""
        if isinstance(self.params, Flat) and isinstance(self.masters, Flat):
            narrow(self.masters.flat, self.params.flat)
            return
        for name, param in self.params.items():
            narrow(np.ascontiguousarray(self.masters[name]), param)

    @property
    def scale(self) -> float:
        """What the loss, and so every gradient, is to be multiplied by in the next backward pass."""
        return self.loss_scale.value

    def step(self, gradients: Arrays) -> bool:
        """Update masters and parameters from gradients of the scaled loss.

        Returns
        -------
        bool
            False where a gradient had overflowed: nothing has changed but the scale.

        Raises
        ------
        FloatingPointError
            When a smaller scale would not help.
        """
        scale = self.scale
        for name in self.masters:
            if name not in gradients:
                raise ValueError(f"no gradient for parameter {name!r}")
        if len(gradients) > len(self.masters):
            gradients = {name: gradients[name] for name in self.masters}
        self.norm = global_norm(gradients, self.comm) / scale
        finite = math.isfinite(self.norm)
        self.loss_scale.update(finite, self.optimizer.steps)
        if not finite:
            self.skipped += 1
            return False
        clipped = self.max_norm is not None and self.norm > self.max_norm
        factor = (self.max_norm / self.norm if self.max_norm and clipped else 1.0) / scale
        for name, wide in self._wide.items():
            wide[...] = gradients[name]
            wide *= factor
        self.optimizer.step(self._wide)
        self.round()
        return True

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer of the masters."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    @property
    def steps(self) -> int:
        """Steps made, without those that were skipped."""
        return self.optimizer.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with the masters and the loss scale as further slots."""
        state = self.optimizer.state_dict()
        slots = {**state["slots"], "master": dict(self.masters), "loss_scale": self.loss_scale.arrays}
        return {**state, "optimizer": f"MixedPrecision {state['optimizer']}", "slots": slots}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; `params` are rounded from the masters in it."""
        kind = state["optimizer"].removeprefix("MixedPrecision ")
        slots = dict(state["slots"])
        for slot, arrays in ("master", self.masters), ("loss_scale", self.loss_scale.arrays):
            for name, array in arrays.items():
                theirs = slots.get(slot, {}).get(name)
                if theirs is None or theirs.shape != array.shape:
                    raise ValueError(f"the state has no {slot} {name!r} of shape {array.shape}")
        self.optimizer.load_state_dict({**state, "optimizer": kind})
        for name, master in self.masters.items():
            master[...] = slots["master"][name]
        for name, array in self.loss_scale.arrays.items():
            array[...] = slots["loss_scale"][name]
        self.round()
