"""Checkpoints of `train_gpt.py`: what is saved of a run, and how it goes on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpt import GPT
from gpt_config import Config
from report import Curve, counted
from rich.console import Console

import mpicoll
from mpicoll.io.checkpoint import CheckpointError, Checkpoints, Shard
from mpicoll.slurm import Notice
from mpicoll.train.optim import DistributedOptimizer


class Saver:
    """Saves the run every so many steps and when the job is about to end; goes on where a saved one ended."""

    def __init__(
        self, comm: mpicoll.Intracomm, config: Config, text: str, resume: bool, console: Console
    ) -> None:
        # What a saved run is of. Steps may be added to it, and it may go on with other ranks and buckets.
        sections = "model", "optimizer", "precision", "training"
        kind: dict[str, Any] = {name: asdict(getattr(config, name)) for name in sections}
        for name in "steps", "passes", "evaluations":
            kind["training"].pop(name)
        kind.update(text=text, validation=config.data.validation)
        folder = config.checkpoint.folder or Path(config.output.folder) / "checkpoints"
        self.comm, self.notice, self.resume, self.console = comm, Notice(comm), resume, console
        self.steps = config.training.steps
        self.every = config.checkpoint.every or self.steps
        self.checkpoints = Checkpoints(folder, comm, keep=config.checkpoint.keep, model=kind)

    def restore(self, model: GPT, optimizer: DistributedOptimizer, curve: Curve) -> int:
        """Fill in what was saved last, if this run is to go on; return the steps that were done."""
        if not self.resume:
            self.checkpoints.afresh()
            return 0
        saved = self.checkpoints.load(self._state(model, optimizer))
        self.checkpoints.check_writable()
        if saved is None:
            self.console.print(f"no checkpoint in {self.checkpoints.folder}: beginning with step 1")
            return 0
        if saved.step > self.steps:
            raise CheckpointError(f"{saved.path} is of step {saved.step}, but training.steps = {self.steps}")
        optimizer.load_state_dict({**optimizer.state_dict(), "steps": saved.extra["updates"]})
        curve.loss[:] = saved.extra["loss"]
        curve.validation.update({int(step): loss for step, loss in saved.extra["validation"].items()})
        curve.seconds, curve.communicating = saved.extra["seconds"], saved.extra["communicating"]
        by = counted(saved.ranks)
        self.console.print(f"going on after step {saved.step}, which {by} saved in {saved.path}")
        return saved.step

    def save(self, step: int, model: GPT, optimizer: DistributedOptimizer, curve: Curve) -> bool:
        """Save the run if it is time; return whether it has to end, which is agreed by all ranks.

        Training goes on while a copy is written, but not past the last step.
        """
        end = self.notice.agreed()
        if end or step % self.every == 0 or step == self.steps:
            state, last = self._state(model, optimizer), end or step == self.steps
            extra = {**asdict(curve), "updates": optimizer.steps}  # less than steps where some overflowed
            self.checkpoints.save(step, state, extra=extra, wait=last)
        if end and step < self.steps:
            self.notice.requeue()
        return end

    def close(self) -> None:
        """Wait for what is being written, and let go of signals; collective."""
        self.checkpoints.close()
        self.notice.close()

    def _state(self, model: GPT, optimizer: DistributedOptimizer) -> dict[str, Any]:
        """Return all arrays that the next step depends on."""
        unsent = {
            name: Shard(array.reshape(1, -1), (self.comm.size, array.size), (self.comm.rank, 0))
            for name, array in optimizer.local_state().items()
        }
        return {"params": model.params, "optimizer": optimizer.state_dict()["slots"], "unsent": unsent}
