"""What `train_gpt.py` can be told, and what of it does not go together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import settings
from settings import (
    ConfigError,
    at_least_0,
    flag,
    number,
    one_of,
    pair,
    positive,
    setting,
    share,
    text,
    whole,
)


@dataclass(frozen=True)
class Model:
    """What is trained."""

    layers: int = whole(4)
    heads: int = whole(4)
    width: int = whole(128)
    context: int = whole(64)
    dropout: float = share(0.0)


@dataclass(frozen=True)
class Data:
    """On which text: a file packed by mpicoll.data.pack_text, or Python's own library."""

    file: str | None = text(None)
    cache: str | None = text(None)
    files: int | None = whole(None)
    validation: float = setting(0.05, "a number between 0 and 1", lambda v: number(v) and 0 < v < 1)


@dataclass(frozen=True)
class Training:
    """How long, and in which steps; `batch` counts sequences, those of all ranks together."""

    steps: int = whole(1000)
    batch: int = whole(32)
    passes: int = whole(1)
    seed: int = whole(1, 0)
    evaluations: int = whole(10)


@dataclass(frozen=True)
class Optimizer:
    """How gradients become steps; where None is the default, it depends on `name`."""

    name: str = one_of("adamw", "adam", "adamw", "lamb", "lars", "sgd")
    lr: float = positive(3e-3)
    warmup: float = share(0.05)
    final: float = at_least_0(1e-4)
    clip: float = at_least_0(1.0)
    weight_decay: float | None = at_least_0(None)
    betas: tuple[float, float] | None = pair(
        None, "two numbers from 0 to below 1", lambda value: number(value) and 0 <= value < 1
    )
    eps: float | None = positive(None)
    momentum: float | None = share(None)
    nesterov: bool | None = flag(None)


@dataclass(frozen=True)
class Communication:
    """How gradients travel."""

    bucket_mb: float = positive(4.0)
    overlap: bool | None = flag(None)
    compression: str = one_of("none", "none", "fp16", "bf16", "int8", "topk", "powersgd")
    ratio: float | None = setting(None, "a number above 0, up to 1", lambda v: number(v) and 0 < v <= 1)
    rank: int | None = whole(None)
    start: int | None = whole(None, 0)


@dataclass(frozen=True)
class Precision:
    """What parameters and gradients are; with 2 bytes the optimizer keeps float32 masters of them."""

    dtype: str = one_of("float32", "float32", "float16", "bfloat16")
    loss_scale: float | None = positive(None)


@dataclass(frozen=True)
class Checkpoint:
    """How often the run is saved, and where; no `every`, no checkpoints."""

    folder: str | None = text(None)
    every: int | None = whole(None)
    keep: int = whole(3)


@dataclass(frozen=True)
class Output:
    """What is left behind."""

    folder: str = text("runs/train_gpt")
    plot: bool = flag(True)
    trace: tuple[int, int] | None = pair(
        None, "first and last step", lambda value: number(value) and value == int(value) and value >= 1
    )
    prompt: str = text("def ")
    sample: int = whole(400, 0)


@dataclass(frozen=True)
class Config:
    """All settings, in their sections."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    communication: Communication = field(default_factory=Communication)
    precision: Precision = field(default_factory=Precision)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    output: Output = field(default_factory=Output)


OWN = {  # settings that only some choices have: section.key -> who chooses, and which of them
    "optimizer.betas": ("name", ("adam", "adamw", "lamb")),
    "optimizer.eps": ("name", ("adam", "adamw", "lamb")),
    "optimizer.momentum": ("name", ("lars", "sgd")),
    "optimizer.nesterov": ("name", ("lars", "sgd")),
    "communication.ratio": ("compression", ("topk",)),
    "communication.rank": ("compression", ("powersgd",)),
    "communication.start": ("compression", ("int8", "topk", "powersgd")),
    "precision.loss_scale": ("dtype", ("float16", "bfloat16")),
}


def load(path: Path | None, changes: Iterable[str] = (), ranks: int = 1) -> Config:
    """Read and check the settings.

    Parameters
    ----------
    path
        A .json or .toml file; None: all settings have their defaults.
    changes
        ``section.key=value`` each, to replace what the file says.
    ranks
        How many will share the work.

    Raises
    ------
    ConfigError
        For a file that cannot be read, an unknown or contradictory key, a value that does not fit.
    """
    config = settings.load(Config, path, changes)
    for problem in _contradictions(config, ranks):
        raise ConfigError(f"{path or 'settings'}: {problem}")
    return config


def _contradictions(config: Config, ranks: int) -> Iterator[str]:
    """Yield what does not go together, in words."""
    model, training, optimizer, trace = config.model, config.training, config.optimizer, config.output.trace
    if model.width % model.heads:
        yield f"model.width = {model.width} is no multiple of model.heads = {model.heads}"
    if training.batch < ranks:
        yield f"training.batch = {training.batch} is too small for {ranks} ranks: each needs a sequence"
        return
    if training.evaluations > training.steps:
        yield f"training.evaluations = {training.evaluations}, but training.steps = {training.steps}"
    for full, (chooser, owners) in OWN.items():
        section, key = full.split(".")
        values = getattr(config, section)
        chosen = getattr(values, chooser)
        if getattr(values, key) is not None and chosen not in owners:
            yield f"{full} is for {' and '.join(owners)}, but {section}.{chooser} = {chosen!r}"
    if optimizer.nesterov and not optimizer.momentum:
        yield "optimizer.nesterov needs an optimizer.momentum above 0"
    if optimizer.final > optimizer.lr:
        yield f"optimizer.final = {optimizer.final:g} is above optimizer.lr = {optimizer.lr:g}"
    if training.batch // ranks < training.passes:
        each = training.batch // ranks
        yield f"training.passes = {training.passes}, but a rank has only {each} sequences per step"
    if (start := config.communication.start) and start >= training.steps:
        yield f"communication.start = {start}, but training.steps = {training.steps}"
    if config.checkpoint.every and config.checkpoint.every > training.steps:
        yield f"checkpoint.every = {config.checkpoint.every}, but training.steps = {training.steps}"
    if trace and not trace[0] <= trace[1] <= training.steps:
        yield f"output.trace = {list(trace)} is no range of steps from 1 to {training.steps}"
    if config.data.file and (config.data.cache or config.data.files):
        yield "data.file names a packed text; data.cache and data.files are for packing Python's library"
