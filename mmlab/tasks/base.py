"""What every task shares: the exact mean of a loss over a global batch, epoch metrics, and checkpoints."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmlab.backbone.parallel import apply_plan
from mmlab.data.collate import Batch
from mmlab.interop.checkpoint import load_weights
from mmlab.models.lora import add_lora, set_trained
from mmlab.optim.base import learning_rate_factors, set_learning_rate
from mmlab.tasks.config import TaskParts
from mmlab.typed import to_plain, typed


class NonFiniteGradientError(RuntimeError):
    """The gradient of an optimizer step holds NaN or infinity; nothing was changed by that step."""


@dataclass(frozen=True)
class Switches:
    """How the network is executed; none of them changes what it computes.

    `load_weights` reads the weights that `adapt.weights` names when the network is built; a run that goes on
    from a checkpoint has its weights there.
    """

    activation_checkpointing: bool = False
    compile: bool = False
    log_every: int = 10
    load_weights: bool = False


class Task(LightningModule, ABC):
    """A network, its loss terms and its metrics.

    A subclass names its loss terms in `weights` and gives, for one micro-batch, the **sum** of each term
    (`sums`). The matching counts come with the batch. A micro-batch then returns
    `ranks * accumulation * sum / total`, where the total is the count over the whole global batch: after the
    averages that Lightning and the strategy take, the gradient is that of the mean over the global batch,
    whatever the padding, the micro-batch size, the accumulation or the number of ranks.

    Args:
        parts: what the task is built from, typed or as the plain types of a checkpoint.
    """

    weights: ClassVar[Mapping[str, float]]
    """Loss terms and their weights in the total."""

    rate: ClassVar[tuple[str, str]]
    """Name and count of the unit of throughput, for example ("tokens", "nll")."""

    def __init__(self, parts: TaskParts | dict[str, Any]) -> None:
        super().__init__()
        self.parts = parts if isinstance(parts, TaskParts) else typed(parts, TaskParts)
        self.save_hyperparameters({"parts": to_plain(self.parts)}, logger=False)
        self.switches = Switches()
        self.network: nn.Module | None = None
        self.latest: dict[str, float] = {}
        self.gradient_norm: Tensor | None = None
        self._step_sums: dict[str, Tensor] = {}
        self._step_ids: list[Tensor] = []
        self._epoch_sums: dict[str, Tensor] = {}
        self._epoch_counts: dict[str, float] = {}

    @abstractmethod
    def sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sum of each loss term over the micro-batch (scalars, float32); an empty one gives zeros."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a whole validation set from its sums and counts, by tag (`val/loss`, ...)."""

    def flops(self, batch: Batch) -> float | None:
        """Operations of forward and backward over a micro-batch (`mmlab.backbone.flops`); None if unknown."""
        return None

    # -- network ------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Builds the network in the strategy's device context, with weights that depend on the seed alone."""
        if self.network is not None:
            return
        torch.manual_seed(_mixed(self.parts.seed, 0))
        self.network = self.parts.model.build(self.parts.backbone, self.parts.modality)
        adapt = self.parts.adapt
        if adapt.weights is not None and self.switches.load_weights:
            load_weights(self.network, Path(adapt.weights), self.parts.backbone)
        if adapt.lora is not None:
            add_lora(self.network, adapt.lora)
        set_trained(self.network, adapt)
        mesh = self.device_mesh["data_parallel"] if self.device_mesh is not None else None
        apply_plan(
            self.network,
            mesh=mesh,
            activation_checkpointing=self.switches.activation_checkpointing,
            compile=self.switches.compile,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer over all trained parameters; the learning rate is set before every step."""
        assert self.network is not None
        rates, optimizer = self.parts.adapt.rates, self.parts.optimizer
        factors = learning_rate_factors(self.network, rates, optimizer.width_exponent)
        return optimizer.build(self.network.named_parameters(), factors)

    # -- training -----------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch, scaled so that the step's gradient is that of the global mean."""
        if batch.micro == 0:
            self._step_sums, self._step_ids = {}, []
        _seed(self.device, _mixed(self.parts.seed, 1, batch.step, batch.micro, self.data_rank))
        share = batch.ranks * batch.accumulation
        terms = []
        for name, value in self.sums(batch).items():
            count = batch.totals[name]
            terms.append(value * (self.weights[name] * share / count if count else 0.0))
            self._step_sums[name] = self._step_sums.get(name, 0.0) + value.detach()
        self._step_ids.append(batch.ids)
        return torch.stack(terms).sum()

    @property
    def data_rank(self) -> int:
        """This process's rank among those that read different data."""
        described = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return int(described.get("rank", 0))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Sets the step's learning rate, measures the gradient's norm, clips it; refuses a non-finite one."""
        step = self.global_step + 1
        set_learning_rate(optimizer, self.parts.schedule.factor(step))
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not math.isfinite(norm.item()):
            ids = torch.cat([chunk.reshape(-1) for chunk in self._step_ids]).tolist()
            raise NonFiniteGradientError(
                f"optimizer step {step}: the gradient's norm is {norm.item()}; no weight was changed. "
                f"Samples of this rank's part of the batch: {ids}"
            )
        self.gradient_norm = norm
        if self.parts.optimizer.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.parts.optimizer.clip_norm, norm)

    def publish_step(self, batch: Batch) -> None:
        """Publishes the step's loss over the global batch, every `log_every` steps and at the last.

        Args:
            batch: the step's last micro-batch.
        """
        if batch.step == self.parts.schedule.steps:
            self.trainer.should_stop = True  # Lightning validates where it stops, a whole interval or not
        if not self.is_due(batch.step):
            return
        names = sorted(self._step_sums)
        stacked = self.reduce([float(self._step_sums[name]) for name in names])
        means = {
            name: total / max(batch.totals[name], 1.0) for name, total in zip(names, stacked, strict=True)
        }
        values = {"train/loss": sum(self.weights[name] * means[name] for name in names)}
        if len(names) > 1:
            values |= {f"train/loss/{name}": means[name] for name in names}
        values["train/learning_rate"] = self.parts.optimizer.learning_rate * self.parts.schedule.factor(
            batch.step
        )
        assert self.gradient_norm is not None
        values["train/gradient_norm"] = self.gradient_norm.item()
        values["train/epoch"] = float(batch.epoch)
        self.publish(values)

    def is_due(self, step: int) -> bool:
        """Whether optimizer step `step` is one whose numbers are written down."""
        return step % self.switches.log_every == 0 or step in (1, self.parts.schedule.steps)

    def publish(self, values: Mapping[str, float]) -> None:
        """Writes `values` to every logger at the present optimizer step."""
        self.latest.update(values)
        for logger in self.trainer.loggers:
            logger.log_metrics(dict(values), step=self.global_step)

    def reduce(self, values: list[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        if self.trainer.world_size == 1:
            return values
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        total = self.trainer.strategy.reduce(packed, reduce_op="sum")
        assert isinstance(total, Tensor)
        return total.tolist()

    # -- validation ---------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Forgets the sums of the validation before."""
        self._epoch_sums, self._epoch_counts = {}, {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds the micro-batch's sums and counts; an average is taken once, over the whole set."""
        exact = torch.float32 if self.device.type == "mps" else torch.float64  # what the device has
        for name, value in self.sums(batch).items():
            self._epoch_sums[name] = self._epoch_sums.get(name, 0.0) + value.to(exact)
        for name, count in batch.counts.items():
            self._epoch_counts[name] = self._epoch_counts.get(name, 0.0) + count

    def on_validation_epoch_end(self) -> None:
        """Publishes the metrics of the whole validation set, every sample of every rank counted once."""
        sums, counts = sorted(self._epoch_sums), sorted(self._epoch_counts)
        local = [float(self._epoch_sums[name]) for name in sums] + [
            self._epoch_counts[name] for name in counts
        ]
        totals = self.reduce(local)
        metrics = self.metrics(
            dict(zip(sums, totals[: len(sums)], strict=True)),
            dict(zip(counts, totals[len(sums) :], strict=True)),
        )
        self.log_dict(metrics, logger=False, sync_dist=self.trainer.world_size > 1)
        if not self.trainer.sanity_checking:
            self.publish(metrics)

    # -- checkpoints --------------------------------------------------------------------------------------

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rebuilds Lightning's batch counters from the optimizer step: the layout may have changed."""
        loops = checkpoint.get("loops")
        if self._trainer is None or not loops:
            return
        batches = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        fit = loops["fit_loop"]
        for counter in ("total", "current"):
            progress = fit["epoch_loop.batch_progress"][counter]
            progress.update(dict.fromkeys(progress, batches))
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] = checkpoint["global_step"]


def _seed(device: torch.device, seed: int) -> None:
    """Sets the generators that the step draws from; `torch.manual_seed` takes a millisecond to set all."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def _mixed(*keys: int) -> int:
    """A seed that differs in every bit when one of `keys` differs."""
    return int(np.random.SeedSequence(keys).generate_state(1, np.uint64)[0] >> np.uint64(1))
