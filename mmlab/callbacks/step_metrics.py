"""The numbers of an optimizer step, written down before anything else reacts to the step."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from mmlab.callbacks.base import Published
from mmlab.data.collate import Batch


class StepMetrics(Callback):
    """Lets the task publish each whole optimizer step.

    A callback, because Lightning calls the module's own hook after all callbacks: a checkpoint would be taken
    before the numbers of its step are written, and a process killed in between would lose them.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Hands the last micro-batch of a step to the task."""
        if batch.micro + 1 == batch.accumulation:
            cast(Published, pl_module).publish_step(batch)
