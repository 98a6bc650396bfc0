"""Hyper-parameters beside the final metrics, for TensorBoard's HPARAMS page."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from mmlab.tasks.base import Task


class HyperParameters(Callback):
    """Declares the run's hyper-parameters at its first validation, when the metrics' tags are known.

    The page reads a metric's value from the run's own scalars, so it shows the newest one, and the final one
    when the run has ended; nothing is written that was not measured.

    Args:
        values: the configuration, flattened to scalars and strings.
    """

    def __init__(self, values: Mapping[str, float | int | bool | str]) -> None:
        self.values = dict(values)
        self._written = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes names and values once."""
        assert isinstance(pl_module, Task)
        if trainer.sanity_checking or self._written:
            return
        self._written = True
        tags = {name: value for name, value in pl_module.latest.items() if name.startswith("val/")}
        self._write(trainer, tags, (0, 1))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says that the run has ended."""
        if self._written:
            self._write(trainer, {}, (2,))

    def _write(self, trainer: Trainer, tags: Mapping[str, float], parts: tuple[int, ...]) -> None:
        summaries = hparams(self.values, dict(tags))  # experiment, session start, session end
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                writer = logger.experiment._get_file_writer()
                for part in parts:
                    writer.add_summary(summaries[part])
