"""What every optimizer shares: configuration, parameter groups, and setting the learning rate."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(ABC):
    """What every optimizer has: a peak learning rate, weight decay of matrices, and clipping by global norm.

    Weight decay is decoupled: a step shrinks a weight by its learning rate times `weight_decay`. `clip_norm`
    bounds the norm of the whole gradient of one optimizer step; null leaves it alone.
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

    @property
    def width_exponent(self) -> float:
        """Power of a matrix's width factor that divides its learning rate; see `learning_rate_factors`."""
        return 1.0

    @abstractmethod
    def build(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], factors: Mapping[str, float] | None = None
    ) -> torch.optim.Optimizer:
        """Optimizer over the named parameters that are trained; each group has its peak rate as `peak_lr`.

        Args:
            parameters: names and parameters of the network; frozen ones are left out.
            factors: factor on the peak rate of single parameters, by name; others have 1.
        """


def check_betas(betas: tuple[float, float]) -> None:
    """ValueError unless both of Adam's averages forget."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must lie in [0, 1), got {betas}")


def learning_rate_factors(
    network: torch.nn.Module, patterns: Mapping[str, float], width_exponent: float = 1.0
) -> dict[str, float]:
    """Factor on the peak learning rate by parameter name, for those where it is not 1.

    It is the product of two: `width_factor ** -width_exponent` for the weight of a module that has the
    attribute (muP: matrices inside the blocks of a network wider than the one that the rate was tuned for),
    and the factor of the last of `patterns` that matches the name.

    Args:
        network: its `width_factor`s are read from modules, because sharding replaces parameters.
        patterns: `fnmatch` patterns of parameter names, and their factors.
        width_exponent: the optimizer's.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    factors = {name: 1.0 for name, _ in network.named_parameters()}
    for prefix, module in network.named_modules():
        name = f"{prefix}.weight" if prefix else "weight"
        if name in factors:
            factors[name] = getattr(module, "width_factor", 1.0) ** -width_exponent
    chosen: dict[str, float] = {}
    for pattern, factor in patterns.items():
        matched = [name for name in factors if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"the pattern {pattern!r} matches no parameter{_suggestion(pattern, factors)}")
        chosen |= dict.fromkeys(matched, factor)
    factors = {name: factor * chosen.get(name, 1.0) for name, factor in factors.items()}
    return {name: factor for name, factor in factors.items() if factor != 1.0}


def _suggestion(pattern: str, names: Iterable[str]) -> str:
    known = list(names)
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
    return f"; close names: {', '.join(close)}" if close else f"; the first of {len(known)}: {known[:3]}"


def decay_groups(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    weight_decay: float,
    learning_rate: float,
    factors: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups, one for each pair of decay and factor on the learning rate; frozen ones are left out.

    Matrices decay; norms, biases, scales and temperatures (under 2-D) do not. Groups that decay come first.
    """
    factors = factors or {}
    groups: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            key = (parameter.ndim >= 2, factors.get(name, 1.0))
            groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": members,
            "weight_decay": weight_decay if decays else 0.0,
            "lr": learning_rate * factor,
            "peak_lr": learning_rate * factor,
        }
        for (decays, factor), members in sorted(groups.items(), key=lambda item: not item[0][0])
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group's rate to `factor` of its own peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
