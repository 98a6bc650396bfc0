"""From logits to the next token: filters of the distribution, and a draw that depends on its seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class SamplingError(ValueError):
    """Logits from which no token can be drawn; the message names the sequence and the step."""


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen, and when a sequence ends.

    Filters act in the order in which they stand here; each leaves at least one token.

    Args:
        repetition_penalty: logits of tokens that stand in the prompt or were generated are divided by it if
            positive and multiplied if negative (arXiv:1909.05858); 1 changes nothing.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keeps the k most likely tokens; null keeps all.
        top_p: keeps the fewest most likely tokens whose probabilities reach it (arXiv:1904.09751).
        min_p: keeps tokens at least `min_p` times as likely as the likeliest (arXiv:2407.01082).
        seed: sequence i of a call draws with seed + i, whatever batch it is in.
        max_new_tokens: most tokens that are generated, the one that ends the sequence included.
        stop: texts at which a sequence ends; they are not part of it.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.repetition_penalty <= 0 or self.temperature < 0:
            raise ValueError(
                "repetition_penalty must be positive and temperature not negative, got "
                f"{self.repetition_penalty} and {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 or null, got {self.top_k}")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must lie in (0, 1] or be null, got {value}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if "" in self.stop:
            raise ValueError("stop must not hold an empty text")


def check(logits_BV: Tensor, sequences: Sequence[int], step: int) -> None:
    """Refuses logits that hold a NaN, or none above minus infinity.

    Raises:
        SamplingError: names the first such sequence and the step.
    """
    import torch

    largest_B = logits_BV.amax(dim=-1)  # NaN if there is one
    bad = (~torch.isfinite(largest_B)).nonzero().flatten().tolist()
    if bad:
        value = largest_B[bad[0]].item()
        kind = "every token is masked" if value == -np.inf else f"a logit is {value}"
        raise SamplingError(f"sequence {sequences[bad[0]]}, new token {step}: {kind}")


def penalize(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Logits with those of `seen_BV` (boolean) made less likely."""
    import torch

    changed_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, changed_BV, logits_BV)


def filtered(logits_BV: Tensor, config: SamplingConfig) -> Tensor:
    """Logits over the temperature (above 0), minus infinity for every token that a filter removes."""
    import torch

    logits_BV = logits_BV / config.temperature
    if config.top_k is not None and config.top_k < logits_BV.shape[-1]:
        smallest_B1 = logits_BV.topk(config.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    if config.top_p is not None and config.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        p_BV = sorted_BV.softmax(dim=-1)
        before_BV = p_BV.cumsum(dim=-1) - p_BV  # of the tokens that are more likely
        removed_BV = torch.zeros_like(before_BV, dtype=torch.bool)
        removed_BV.scatter_(-1, order_BV, before_BV >= config.top_p)
        logits_BV = logits_BV.masked_fill(removed_BV, -torch.inf)
    if config.min_p is not None:
        floor_B1 = logits_BV.amax(dim=-1, keepdim=True) + float(np.log(config.min_p))
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -torch.inf)
    return logits_BV


class Draws:
    """Uniform numbers of one sequence: the n-th one depends on (seed, n) alone."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))

    def next(self) -> float:
        """The next number in [0, 1)."""
        return float(self._generator.random())


def choose(logits_BV: Tensor, config: SamplingConfig, draws: Sequence[Draws]) -> Tensor:
    """Next token of every row, int64 (B,).

    The token is where the cumulative probability passes the row's own draw, so that it depends on nothing but
    the row's logits and seed.
    """
    import torch

    if config.temperature == 0:
        return logits_BV.argmax(dim=-1)
    p_BV = filtered(logits_BV, config).double().softmax(dim=-1)
    cumulative_BV = p_BV.cumsum(dim=-1)
    drawn_B1 = torch.tensor([[draw.next()] for draw in draws], dtype=torch.float64, device=p_BV.device)
    target_B1 = drawn_B1 * cumulative_BV[:, -1:]
    # The first token whose cumulative probability exceeds the target; one of probability 0 never is.
    return torch.searchsorted(cumulative_BV, target_B1, right=True).flatten().clamp(max=p_BV.shape[-1] - 1)
