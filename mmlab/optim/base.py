"""What every optimizer shares: configuration, parameter groups, and setting the learning rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(ABC):
    """What every optimizer has: a peak learning rate, weight decay of matrices, and clipping by global norm.

    `clip_norm` bounds the norm of the whole gradient of one optimizer step; null leaves it alone.
    """

    learning_rate: float
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.learning_rate < 0 or self.weight_decay < 0:
            raise ValueError(
                f"learning_rate and weight_decay must not be negative, got {self.learning_rate} "
                f"and {self.weight_decay}"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be positive or null, got {self.clip_norm}")

    @abstractmethod
    def build(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], factors: Mapping[str, float] | None = None
    ) -> torch.optim.Optimizer:
        """Optimizer over the named parameters that are trained, each group carrying its peak rate as `peak_lr`.

        Args:
            parameters: names and parameters of the network; frozen ones are left out.
            factors: factor on the peak rate of single parameters, by name; others have 1.
        """


def decay_groups(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], weight_decay: float, learning_rate: float
) -> list[dict[str, Any]]:
    """Two parameter groups: matrices decay; norms, biases, scales and temperatures (under 2-D) do not."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for _, parameter in parameters:
        if parameter.requires_grad:
            (matrices if parameter.ndim >= 2 else rest).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "peak_lr": learning_rate},
        {"params": rest, "weight_decay": 0.0, "peak_lr": learning_rate},
    ]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group's rate to `factor` of its own peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
