"""Checkpoints of a run: when they are taken, how they are named, which are kept."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from mmlab.callbacks.base import Published
from mmlab.data.collate import Batch

LAST = "last.ckpt"
BEST = "best.ckpt"


class Checkpoints(Checkpoint):
    """Saves `step-<n>.ckpt` between optimizer steps and keeps the newest and the best.

    A step that also validates is saved after its validation, so that a resumed run does not validate it
    again. `last.ckpt` and `best.ckpt` are links to the newest and to the best file, replaced in one move.

    Args:
        folder: where the files lie, all of them direct children.
        every: optimizer steps between two checkpoints; the last step always has one.
        validate_every: optimizer steps between two validations.
        keep_last: how many of the newest files stay.
        keep_best: how many of the files with the lowest `monitor` stay.
        monitor: validation metric, by tag.
        steps: the run's last optimizer step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        validate_every: int,
        keep_last: int,
        keep_best: int,
        monitor: str,
        steps: int,
    ) -> None:
        self.folder = folder
        self.every, self.validate_every, self.steps = every, validate_every, steps
        self.keep_last, self.keep_best, self.monitor = keep_last, keep_best, monitor
        self.best: dict[int, float] = {}
        self.latest: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Steps of the best checkpoints so far, by which metric, and the newest value of every tag."""
        return {"monitor": self.monitor, "best": dict(self.best), "latest": dict(self.latest)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from the best of the run before, as far as they are of the same metric."""
        self.latest = dict(state_dict["latest"])
        if state_dict["monitor"] == self.monitor and self.keep_best:
            self.best = {int(step): float(value) for step, value in state_dict["best"].items()}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mends what a killed process left: half-written files, stale links, files no longer kept.

        Not earlier: a sharded strategy restores callbacks after `on_fit_start`; the best would be unknown.
        """
        self.best = {
            step: value for step, value in self.best.items() if (self.folder / name_of(step)).exists()
        }
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            tidy(self.folder, self.best, self.keep_last)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Saves after a whole optimizer step, unless the step is going to be validated first."""
        if (
            batch.micro + 1 == batch.accumulation
            and self._is_due(batch.step)
            and not self._validates(trainer)
        ):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves a step that was due, or that is among the best so far."""
        if trainer.sanity_checking or (not trainer.training and trainer.state.fn != "fit"):
            return
        if self._is_among_best(trainer) or self._is_due(trainer.global_step):
            self._save(trainer)

    def _is_due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    def _validates(self, trainer: Trainer) -> bool:
        step = trainer.global_step
        return trainer.enable_validation and (step % self.validate_every == 0 or step == self.steps)

    def _is_among_best(self, trainer: Trainer) -> bool:
        if not self.keep_best:
            return False
        latest = cast(Published, trainer.lightning_module).latest
        value = latest.get(self.monitor)
        if value is None:
            known = ", ".join(sorted(latest))
            raise ValueError(f"trainer.monitor {self.monitor!r} is no metric of this run; there are {known}")
        if not math.isfinite(value):
            return False
        ranked = sorted({**self.best, trainer.global_step: value}.items(), key=lambda item: item[1])
        self.best = dict(ranked[: self.keep_best])
        return trainer.global_step in self.best

    def _save(self, trainer: Trainer) -> None:
        self.latest = dict(cast(Published, trainer.lightning_module).latest)
        path = self.folder / name_of(trainer.global_step)
        for logger in trainer.loggers:
            logger.save()  # what was logged up to this step must not be lost with the process
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            tidy(self.folder, self.best, self.keep_last)


def tidy(folder: Path, best: Mapping[int, float], keep_last: int) -> None:
    """Points the links at the newest and the best checkpoint, and removes what is not kept.

    Args:
        folder: where the checkpoints lie.
        best: metric of the best checkpoints by step, lower is better.
        keep_last: how many of the newest stay.
    """
    files = sorted(folder.glob("step-*.ckpt"))
    if files:
        link(folder / LAST, files[-1].name)
    if best:
        link(folder / BEST, name_of(min(best, key=lambda step: best[step])))
    kept = {path.name for path in files[-keep_last:]} | {name_of(step) for step in best}
    for path in [*files, *folder.glob(".*.partial")]:
        if path.name not in kept:
            path.unlink()


def name_of(step: int) -> str:
    """File name of the checkpoint after optimizer step `step`; names sort like steps."""
    return f"step-{step:010d}.ckpt"


def step_of(path: Path) -> int:
    """Optimizer step after which the checkpoint at `path` was taken."""
    return int(path.resolve().stem.removeprefix("step-"))


def link(path: Path, target: str) -> None:
    """Makes `path` a symbolic link to its neighbour `target`, replacing an older one in one move."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(path)
