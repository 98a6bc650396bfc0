"""An average of the weights over the optimizer steps (EMA), kept beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from mmlab.callbacks.config import CallbackConfig
from mmlab.callbacks.shards import local, part, reshard, whole
from mmlab.data.collate import Batch

KEY = "ema"
NETWORK = "network."


@dataclass(frozen=True)
class EMAConfig(CallbackConfig):
    """Averages the trained weights: average <- decay * average + (1 - decay) * weight, in float32.

    A checkpoint has the weights themselves in `state_dict` and the averages under its own key `ema`:
    `weights` (whole tensors by their name in the network), `updates` and `decay`.

    Args:
        decay: of one update.
        every: optimizer steps between two updates.
        warmup: update t (from 0) decays by min(decay, (1 + t) / (10 + t)): weights of the first steps are
            soon forgotten.
        validate: validation runs on the averages, so that its metrics and the best checkpoint are theirs.
    """

    decay: float = 0.999
    every: int = 1
    warmup: bool = True
    validate: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {self.decay}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")

    def decay_of(self, update: int) -> float:
        """Decay of the update before which there were `update` others."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay

    def build(self) -> Callback:
        """The callback."""
        return EMA(self)


class EMA(Callback):
    """Keeps the averages; each rank those of its own part of sharded weights.

    A run that is resumed from a checkpoint without averages begins them from its weights. While averages
    stand in the network's place, callbacks that come before this one in the list see them in
    `on_validation_end`, later ones see the weights; what is saved as `state_dict` is always the weights.
    """

    def __init__(self, config: EMAConfig) -> None:
        self.config = config
        self.updates = 0
        self.averages: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._saved: Mapping[str, Tensor] | None = None
        self._held: list[Tensor] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins, where no sanity check has."""
        self._begin(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Takes the weights after a whole optimizer step into the averages."""
        if batch.micro + 1 < batch.accumulation or batch.step % self.config.every:
            return
        weights = [local(parameter.detach()).float() for parameter in self._parameters.values()]
        decay = self.config.decay_of(self.updates)
        torch._foreach_lerp_(list(self.averages.values()), weights, 1 - decay)
        self.updates += 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the averages into the network, if validation is theirs."""
        if not self.config.validate:
            return
        self._begin(pl_module)
        reshard(pl_module)
        weights = self._weights()
        self._held = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, list(self.averages.values()))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the weights back, before a checkpoint is taken."""
        self._put_back(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Puts the weights back where a validation broke off."""
        self._put_back(pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the averages as whole tensors; mends `state_dict` where it was taken during a validation."""
        if not self.averages:
            return
        weights = self._whole(list(self.averages.values()))
        checkpoint[KEY] = {"weights": weights, "updates": self.updates, "decay": self.config.decay}
        if self._held is not None:
            for name, weight in self._whole(self._held).items():
                if NETWORK + name in checkpoint["state_dict"]:  # rank 0 alone has them in a sharded run
                    checkpoint["state_dict"][NETWORK + name] = weight

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Goes on with the averages of the run before."""
        if KEY in checkpoint:
            self._saved = checkpoint[KEY]["weights"]
            self.updates = checkpoint[KEY]["updates"]

    def _begin(self, module: LightningModule) -> None:
        """Averages of what is trained: those of a checkpoint, else copies of the weights."""
        if self._parameters:
            return
        reshard(module)
        self._parameters = {
            name.removeprefix(NETWORK): parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        if self._saved is not None and self._saved.keys() != self._parameters.keys():
            differing = sorted(self._saved.keys() ^ self._parameters.keys())
            raise ValueError(
                f"the checkpoint averages {len(self._saved)} parameters, but {len(self._parameters)} are "
                f"trained: they differ in {differing[:5]}"
            )
        for name, parameter in self._parameters.items():
            own = parameter.detach() if self._saved is None else self._saved[name]
            mine = local(own) if self._saved is None else part(own, parameter)
            device = local(parameter).device
            self.averages[name] = mine.to(device, torch.float32, copy=True)
        self._saved = None

    def _put_back(self, module: LightningModule) -> None:
        if self._held is None:
            return
        reshard(module)
        torch._foreach_copy_(self._weights(), self._held)
        self._held = None

    def _weights(self) -> list[Tensor]:
        """This rank's part of every averaged parameter, to be changed in place."""
        return [local(parameter.detach()) for parameter in self._parameters.values()]

    def _whole(self, parts: list[Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the CPU, by name; every rank must call it."""
        return {
            name: whole(tensor, parameter).cpu()
            for (name, parameter), tensor in zip(self._parameters.items(), parts, strict=True)
        }
