"""How a run starts from weights that exist, and which of them it changes. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank updates (arXiv:2106.09685): a matrix W acts as W + alpha / rank * B A; only A, B are trained.

    Args:
        rank: inner size of the update.
        alpha: scale of the update; at `alpha = rank` it is 1.
        targets: patterns (`fnmatch`) of module names in the network; the matrices of these get an update.
        dropout: probability on the input of the update.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*.attention.query", "*.attention.value")
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"rank must be at least 1 and alpha positive, got {self.rank} and {self.alpha}")
        if not self.targets:
            raise ValueError("targets must name at least one pattern")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")


@dataclass(frozen=True)
class AdaptConfig:
    """Where the weights come from and what is trained of them.

    Patterns are `fnmatch` patterns of parameter names in the network (`backbone.blocks.0.*`); one that
    matches nothing is an error.

    Args:
        weights: run folder, checkpoint file or Hugging Face folder that the network starts from; null draws
            weights from the seed. Steps, schedule and optimizer begin anew.
        freeze: patterns of parameters that are not trained.
        rates: factor on the peak learning rate by pattern; the last pattern that matches counts.
        lora: low-rank updates; all else is then frozen, save what `train` names.
        train: patterns of parameters that are trained although `freeze` or `lora` would leave them alone.
    """

    weights: str | None = None
    freeze: tuple[str, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    lora: LoRAConfig | None = None
    train: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern, factor in self.rates.items():
            if factor < 0:
                raise ValueError(f"rates: {pattern!r} has the negative factor {factor}")
