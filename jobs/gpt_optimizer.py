"""The optimizer of `train_gpt.py`: how gradients travel, in which precision, and how they become steps."""

from __future__ import annotations

from typing import Any

import click
from gpt import GPT
from gpt_config import Config

import mpicoll
from mpicoll.train.buckets import Flat
from mpicoll.train.optim import (
    BF16,
    FP16,
    LAMB,
    LARS,
    SGD,
    Adam,
    AdamW,
    DistributedOptimizer,
    Int8,
    PowerSGD,
    TopK,
    clip_by_global_norm,
    warmup,
)
from mpicoll.train.optim.schedules import cosine
from mpicoll.train.parallel.precision import MixedPrecision

OPTIMIZERS: dict[str, Any] = {"adam": Adam, "adamw": AdamW, "lamb": LAMB, "lars": LARS, "sgd": SGD}
COMPRESSIONS: dict[str, Any] = {"fp16": FP16, "bf16": BF16, "int8": Int8, "topk": TopK, "powersgd": PowerSGD}


def make_optimizer(config: Config, model: GPT, comm: mpicoll.Intracomm) -> DistributedOptimizer:
    """Make the optimizer of the replicas on `comm`; with 2-byte parameters, round the model's to them."""
    travel, dtype = config.communication, config.precision.dtype
    sizes = {key: value for key in ("ratio", "rank", "start") if (value := getattr(travel, key)) is not None}
    compression = None if travel.compression == "none" else COMPRESSIONS[travel.compression](**sizes)
    if dtype == "float32":
        optimizer = _optimizer(config, model.params)
    else:
        masters = _optimizer(config, Flat.of(model.params))
        scale, longest = config.precision.loss_scale, config.optimizer.clip or None
        optimizer = MixedPrecision(masters, dtype, loss_scale=scale, max_norm=longest)
        model.params.flat[...] = optimizer.params.flat
    return DistributedOptimizer(
        optimizer,
        comm,
        bucket_cap_mb=travel.bucket_mb,
        backward_passes_per_step=config.training.passes,
        compression=compression,
        metrics=["loss"],
        overlap=travel.overlap,
    )


def loss_scale(optimizer: DistributedOptimizer) -> float:
    """Return what the loss has to be multiplied by."""
    inner = optimizer.optimizer
    return inner.scale if isinstance(inner, MixedPrecision) else 1.0


def sent_share(config: Config, optimizer: DistributedOptimizer) -> float:
    """Return the share of the gradients' bytes that a whole run sends, its uncompressed start included."""
    plain = (config.communication.start or 0) / config.training.steps
    return plain + (1 - plain) * optimizer.sent_share


def update(model: GPT, optimizer: DistributedOptimizer, clip: float) -> None:
    """Make a step with the averaged gradient.

    NumPy has no fast products of 2-byte floats, so the model computes in float32 with the values that
    2-byte parameters have.
    """
    inner = optimizer.optimizer
    with optimizer.skip_synchronize():
        if not isinstance(inner, MixedPrecision):
            if clip:
                clip_by_global_norm(optimizer.gradients, clip)
            optimizer.step()
            return
        try:
            optimizer.step()
        except FloatingPointError as error:  # on every rank: all have the same gradient
            raise click.ClickException(str(error)) from error
        model.params.flat[...] = inner.params.flat


def _optimizer(config: Config, params: Flat) -> Any:
    """Make what steps, with its schedule."""
    chosen, steps = config.optimizer, config.training.steps
    schedule, rising = cosine(chosen.lr, steps, chosen.final), round(chosen.warmup * steps)
    if rising:
        schedule = warmup(schedule, rising, start=chosen.lr / rising)
    own = {
        key: getattr(chosen, key)
        for key in ("weight_decay", "betas", "eps", "momentum", "nesterov")
        if getattr(chosen, key) is not None
    }
    vectors = [name for name, array in params.items() if array.ndim < 2]
    return OPTIMIZERS[chosen.name](params, schedule, undecayed=vectors, **own)
