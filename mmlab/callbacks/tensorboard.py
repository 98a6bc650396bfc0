"""TensorBoard: a run's events in its own folder, and hyper-parameters beside the final metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from mmlab.callbacks.base import Published


class TensorBoard(TensorBoardLogger):
    """Writes events into the run folder itself: the run's name on the page is its path below the runs folder.

    Args:
        folder: the run folder.
        after_step: the optimizer step that the run starts from. What an earlier process wrote after it is
            hidden, because it is repeated.
    """

    def __init__(self, folder: Path, after_step: int = 0) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False, purge_step=after_step + 1)

    @rank_zero_only
    def save(self) -> None:
        """Flushes the events; hyper-parameters stand in config.yaml and on the HPARAMS page."""
        self.experiment.flush()


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
        if trainer.sanity_checking or self._written:
            return
        self._written = True
        latest = cast(Published, pl_module).latest
        tags = {name: value for name, value in latest.items() if name.startswith("val/")}
        self._write(trainer, tags, (0, 1))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says that the run has ended."""
        if self._written:
            self._write(trainer, {}, (2,))

    def _write(self, trainer: Trainer, tags: Mapping[str, float], parts: tuple[int, ...]) -> None:
        summaries = hparams(self.values, dict(tags))  # experiment, session start, session end
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoard) and trainer.is_global_zero:
                writer = logger.experiment._get_file_writer()
                for part in parts:
                    writer.add_summary(summaries[part])
