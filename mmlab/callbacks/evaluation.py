"""Evaluations of the network in training, every so many optimizer steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from mmlab.callbacks.base import Published
from mmlab.callbacks.config import CallbackConfig
from mmlab.callbacks.interlude import interlude, language_model
from mmlab.data.collate import Batch
from mmlab.evaluation.base import EvaluationConfig, Execution, described
from mmlab.evaluation.results import write_results

if TYPE_CHECKING:
    from mmlab.inference.model import LanguageModel

FOLDER = "evaluations"


@dataclass(frozen=True)
class PeriodicEvaluationConfig(CallbackConfig):
    """Publishes `eval/<name>/<metric>` every `every` optimizer steps and at the last.

    Metrics of groups (those with a `/`) and the items stand in the run folder only, in
    `evaluations/step-<n>/<name>/`.

    Args:
        every: optimizer steps between two evaluations.
        evaluation: what is measured, by name.
        batch_tokens: tokens of a batch, padding included.
        cache: folder for what can be computed again.
    """

    every: int
    evaluation: dict[str, EvaluationConfig]
    batch_tokens: int = 16384
    cache: str = field(default=".cache/mmlab", metadata={"how": True})

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        for name in self.evaluation:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
                raise ValueError(f"evaluation: {name!r} becomes a folder: letters, digits, '_', '-' and '.'")
        Execution(self.batch_tokens)

    def build(self) -> Callback:
        """The callback."""
        return PeriodicEvaluation(self)


class PeriodicEvaluation(Callback):
    """Runs the evaluations on every rank, since a sharded network needs them all; rank 0 writes and decides.

    Training goes on as if nothing had been (see `interlude`).
    """

    def __init__(self, config: PeriodicEvaluationConfig) -> None:
        self.config = config
        self._model: LanguageModel | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses a task that nothing can be measured on, before the first step."""
        self._model = language_model(pl_module, name=Path(trainer.default_root_dir).name)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Evaluates after a whole optimizer step that is due."""
        due = batch.step % self.config.every == 0 or batch.step == trainer.max_steps
        if batch.micro + 1 < batch.accumulation or not due:
            return
        assert self._model is not None
        values: dict[str, float] = {}
        with interlude(trainer):
            for name, evaluation in self.config.evaluation.items():
                execution = Execution(self.config.batch_tokens)
                result = evaluation.run(self._model, Path(self.config.cache), execution)
                values |= {
                    f"eval/{name}/{key}": value for key, value in result.metrics.items() if "/" not in key
                }
                if trainer.is_global_zero:
                    folder = Path(trainer.default_root_dir) / FOLDER / f"step-{batch.step:010d}" / name
                    write_results(folder, result, {"step": batch.step, "evaluation": described(evaluation)})
        values = trainer.strategy.broadcast(values)  # ranks may differ in a last digit
        cast(Published, pl_module).publish(values)
