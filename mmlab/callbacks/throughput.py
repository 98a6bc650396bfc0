"""How fast a run trains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from mmlab.backbone.layers import compute_dtype
from mmlab.callbacks.base import Published
from mmlab.callbacks.config import CallbackConfig
from mmlab.callbacks.peak import data_sheet_peak, measured_peak
from mmlab.data.collate import Batch


@runtime_checkable
class Costed(Protocol):
    """A task that knows what its steps cost."""

    def flops(self, batch: Batch) -> float | None:
        """Operations of forward and backward over the micro-batch, as in `mmlab.backbone.flops`, if known."""


@dataclass(frozen=True)
class ThroughputConfig(CallbackConfig):
    """Publishes `train/tokens_per_second` (or the task's own unit) and how well the processor is used."""

    def build(self) -> Callback:
        """The callback."""
        return Throughput()


class Throughput(Callback):
    """Units of the global batch (all ranks) per second of wall time since it was last published.

    Where the task knows its cost, also these, of one device (rank 0's) and its own micro-batches:

    - `train/tflops_per_second`, 10^12 operations a second. They are the model's, by the convention of
      `mmlab.backbone.flops`: matrix products, all T x T pairs, backward twice the forward; padding counts,
      what is recomputed does not.
    - `train/mfu_of_measured_peak`, their share of what a product of large square matrices reaches on this
      device, in the run's compute type and with its threads; measured before the first step.
    - `train/mfu`, their share of the data sheet's dense bfloat16 peak, for devices whose peak is known.

    Time spent in validation is left out; waiting for data and writing checkpoints are part of it.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._paused: float | None = None
        self._count = 0.0
        self._operations: float | None = 0.0
        self._peaks: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._peaks = {}
        self._restart(time.perf_counter())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets the clock go on."""
        if self._paused is not None:
            paused, self._paused = self._paused, None
            self.leave_out(time.perf_counter() - paused)

    def leave_out(self, seconds: float) -> None:
        """Does not count the `seconds` that have just passed."""
        if self._paused is None:  # a clock that stands has not counted them
            self._since += seconds

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Adds up the cost; measures the peak before the first step, off the clock."""
        operations = pl_module.flops(batch) if isinstance(pl_module, Costed) else None
        known = operations is not None and self._operations is not None
        self._operations = self._operations + operations if known else None  # type: ignore[operator]
        if operations is not None and not self._peaks and trainer.is_global_zero:
            began = time.perf_counter()
            self._peaks = peaks(trainer, pl_module)
            self.leave_out(time.perf_counter() - began)

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
            seconds = now - self._since
            values = {f"train/{unit}_per_second": self._count / seconds}
            if self._operations is not None:
                rate = self._operations / seconds
                values["train/tflops_per_second"] = rate / 1e12
                values |= {name: rate / peak for name, peak in self._peaks.items()}
            task.publish(values)
            self._restart(now)

    def _restart(self, now: float) -> None:
        self._since, self._count, self._operations = now, 0.0, 0.0


def peaks(trainer: Trainer, module: LightningModule) -> dict[str, float]:
    """Operations a second that a share is taken of, by the share's tag."""
    device = module.device
    with trainer.precision_plugin.train_step_context():
        dtype = compute_dtype(next(module.parameters()))
    found = {"train/mfu_of_measured_peak": measured_peak(device, dtype)}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    data_sheet = data_sheet_peak(name)
    return found if data_sheet is None else {**found, "train/mfu": data_sheet}
