"""Muon for the matrices inside the blocks, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mmlab.optim.base import OptimizerConfig, check_betas, decay_groups

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024): each matrix moves by its momentum made orthogonal; the rest by AdamW.

    Matrices inside the blocks are the 2-D parameters below a module named `blocks`. Embeddings, heads, stems,
    norms and biases are AdamW's. `weight_decay` holds for both, times each one's own learning rate.

    Under muP (`BackboneConfig.parametrization`) the rate of an orthogonal update needs no correction for the
    width with `scale: original`, and 1 / sqrt(width factor) with `match_rms_adamw`, whose updates have a norm
    that grows with the square root of the width (arXiv:2310.17813).

    Args:
        learning_rate: peak of the matrices inside the blocks.
        adamw_learning_rate: peak of everything else.
        momentum: weight of the past in the average of gradients.
        nesterov: the update is the average one step ahead.
        newton_schulz_steps: iterations that make an update orthogonal.
        newton_schulz_type: what they are computed in; `auto` is bfloat16 where the processor is fast at it.
        scale: on the update of an (outputs, inputs) matrix: `original` sqrt(max(1, outputs / inputs)),
            `match_rms_adamw` 0.2 sqrt(max(outputs, inputs)), so that rates tuned for AdamW fit
            (arXiv:2502.16982).
        betas: of AdamW.
        eps: of AdamW.
    """

    adamw_learning_rate: float
    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = 5
    newton_schulz_type: Literal["auto", "bfloat16", "float32"] = "auto"
    scale: Literal["original", "match_rms_adamw"] = "original"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    exponents: ClassVar[Mapping[str, float]] = {"original": 0.0, "match_rms_adamw": 0.5}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self.betas)
        if self.adamw_learning_rate < 0:
            raise ValueError(f"adamw_learning_rate must not be negative, got {self.adamw_learning_rate}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")
        if self.newton_schulz_steps < 1:
            raise ValueError(f"newton_schulz_steps must be at least 1, got {self.newton_schulz_steps}")

    @property
    def width_exponent(self) -> float:
        """Of the matrices inside the blocks: only these have a width factor, and they are Muon's."""
        return self.exponents[self.scale]

    def build(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], factors: Mapping[str, float] | None = None
    ) -> torch.optim.Optimizer:
        from mmlab.optim.muon_adamw import MuonAdamW

        matrices: list[tuple[str, torch.nn.Parameter]] = []
        rest: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in parameters:
            (matrices if is_inner_matrix(name, parameter) else rest).append((name, parameter))
        muon = {
            "algorithm": "muon",
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "scale": self.scale,
        }
        adamw = {"algorithm": "adamw", "betas": self.betas, "eps": self.eps, "fused": True}
        groups = [
            group | extra
            for members, rate, extra in (
                (matrices, self.learning_rate, muon),
                (rest, self.adamw_learning_rate, adamw),
            )
            for group in decay_groups(members, self.weight_decay, rate, factors)
        ]
        return MuonAdamW(groups, self.newton_schulz_steps, self.newton_schulz_type)


def is_inner_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter is a matrix inside a block of a transformer."""
    return parameter.ndim == 2 and ".blocks." in f".{name}"
