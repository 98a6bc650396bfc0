"""How fast a run trains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from mmlab.callbacks.base import Published
from mmlab.callbacks.config import CallbackConfig
from mmlab.data.collate import Batch


@dataclass(frozen=True)
class ThroughputConfig(CallbackConfig):
    """Publishes `train/tokens_per_second` (or the task's own unit)."""

    def build(self) -> Callback:
        """The callback."""
        return Throughput()


class Throughput(Callback):
    """Units of the global batch (all ranks) per second of wall time since it was last published.

    Time spent in validation is left out; waiting for data and writing checkpoints are part of it.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._paused = 0.0
        self._count = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._since, self._count = time.perf_counter(), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets the clock go on."""
        self._since += time.perf_counter() - self._paused

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Counts a whole optimizer step, and publishes when the step's numbers are due."""
        if batch.micro + 1 < batch.accumulation:
            return
        task = cast(Published, pl_module)
        unit, count = task.rate
        self._count += batch.totals[count]
        if task.is_due(batch.step):
            now = time.perf_counter()
            task.publish({f"train/{unit}_per_second": self._count / (now - self._since)})
            self._since, self._count = now, 0.0
