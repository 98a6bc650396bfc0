"""The bar that a person watches: optimizer steps, loss, speed and time left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mmlab.callbacks.base import Published
from mmlab.callbacks.config import CallbackConfig
from mmlab.data.collate import Batch


@dataclass(frozen=True)
class ProgressConfig(CallbackConfig):
    """A progress bar on a terminal; elsewhere one line every `seconds`."""

    seconds: float = 15.0

    def build(self) -> Callback:
        """The callback."""
        return ProgressBar(self.seconds)


class ProgressBar(Callback):
    """Shows training in optimizer steps, on rank 0 only.

    Args:
        seconds: time between two lines where the output is no terminal.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._job: Any = None
        self._start: tuple[float, int] = (0.0, 0)
        self._shown = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the bar."""
        if not trainer.is_global_zero:
            return
        self._start = (time.perf_counter(), trainer.global_step)
        self._shown = time.perf_counter()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
            self._job = self._bar.add_task(
                "train", total=trainer.max_steps, completed=trainer.global_step, numbers=""
            )
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Moves the bar at most five times a second."""
        now = time.perf_counter()
        wait = 0.2 if self._bar is not None else self.seconds
        if not trainer.is_global_zero or (now - self._shown < wait and batch.step < trainer.max_steps):
            return
        if batch.micro + 1 < batch.accumulation:
            return
        self._shown = now
        numbers = _numbers(cast(Published, pl_module))
        if self._bar is not None:
            self._bar.update(self._job, completed=batch.step, numbers=numbers)
        else:
            began, first = self._start
            left = (now - began) / max(1, batch.step - first) * (trainer.max_steps - batch.step)
            self._console.print(f"step {batch.step}/{trainer.max_steps}  {numbers}  {_clock(left)} left")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the validation metrics on a line of their own."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            latest = cast(Published, pl_module).latest
            metrics = {name: value for name, value in latest.items() if name.startswith("val/")}
            line = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self._console.print(f"step {trainer.global_step}: {line}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the bar."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Closes the bar, so that the error stands below it."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _numbers(task: Published) -> str:
    parts = []
    if "train/loss" in task.latest:
        parts.append(f"loss {task.latest['train/loss']:.3f}")
    rate = task.latest.get(f"train/{task.rate[0]}_per_second")
    if rate is not None:
        parts.append(f"{rate:,.0f} {task.rate[0]}/s")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
