"""AdamW, fused where the weights are float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmlab.optim.base import OptimizerConfig, check_betas, decay_groups

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), the fused kernel where torch has it."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self.betas)

    def build(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], factors: Mapping[str, float] | None = None
    ) -> torch.optim.Optimizer:
        import torch

        groups = decay_groups(parameters, self.weight_decay, self.learning_rate, factors)
        every = [p for group in groups for p in group["params"]]
        if all(p.dtype == torch.float32 for p in every):
            return torch.optim.AdamW(
                groups, lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=True
            )
        from mmlab.optim.half import HalfAdamW

        return HalfAdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps)
