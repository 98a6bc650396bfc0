"""Callbacks for proofs: they write down what a run saw, and stop it where a proof wants it stopped."""

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Callback

from mmlab.callbacks.config import CallbackConfig


@dataclass(frozen=True)
class RecordConfig(CallbackConfig):
    """Appends a line per micro-batch to `<folder>/<rank>.jsonl`: step, epoch, sample ids, counts, totals."""

    folder: str

    def build(self) -> Callback:
        return Record(Path(self.folder))


class Record(Callback):
    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _write(self, trainer, kind, batch):
        line = {
            "kind": kind,
            "step": batch.step,
            "micro": batch.micro,
            "epoch": batch.epoch,
            "ids": batch.ids.tolist(),
            "counts": batch.counts,
            "totals": batch.totals,
            "folder": str(trainer.default_root_dir),
        }
        with (self.folder / f"{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._write(trainer, "train", batch)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self._write(trainer, "validation", batch)


def recorded(folder):
    """All lines that the ranks of a run wrote."""
    paths = sorted(Path(folder).glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class KillConfig(CallbackConfig):
    """Kills the process (SIGKILL) in the middle of optimizer step `step`, after its first micro-batch."""

    step: int

    def build(self) -> Callback:
        return Kill(self.step)


class Kill(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class StopHere(RuntimeError):
    """Raised by Stop."""


@dataclass(frozen=True)
class StopConfig(CallbackConfig):
    """Raises StopHere in the middle of optimizer step `step`: a crash that leaves the process alive."""

    step: int

    def build(self) -> Callback:
        return Stop(self.step)


class Stop(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch.step == self.step:
            numbers = Path(trainer.default_root_dir) / "metrics.csv"
            if (
                numbers.exists()
            ):  # as a kill would leave it: an exception lets the loggers write what they hold
                shutil.copy(numbers, numbers.with_name("at-stop.csv"))
            raise StopHere(f"step {self.step}")


@dataclass(frozen=True)
class GradientConfig(CallbackConfig):
    """Saves the gradient of optimizer step `step`, whole tensors by name, to `path`, before it is clipped."""

    step: int
    path: str

    def build(self) -> Callback:
        return Gradient(self.step, self.path)


class Gradient(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        import torch

        if trainer.global_step + 1 != self.step:
            return
        gradients = {}
        for name, parameter in pl_module.named_parameters():
            gradient = parameter.grad
            gradients[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
        if trainer.is_global_zero:
            torch.save(gradients, self.path)
