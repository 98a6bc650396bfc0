"""Filters equal those of transformers; draws depend on their seed alone; impossible logits are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmlab.inference.sampling import Draws, SamplingConfig, SamplingError, check, choose, filtered, penalize


def logits(rows: int = 4, size: int = 60, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (SamplingConfig(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
        (SamplingConfig(top_k=5), [TopKLogitsWarper(5)]),
        (SamplingConfig(top_k=200), [TopKLogitsWarper(200)]),
        (SamplingConfig(top_p=0.8), [TopPLogitsWarper(0.8)]),
        (SamplingConfig(top_p=0.01), [TopPLogitsWarper(0.01)]),
        (SamplingConfig(min_p=0.1), [MinPLogitsWarper(0.1)]),
        (
            SamplingConfig(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
            [
                TemperatureLogitsWarper(1.3),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.02),
            ],
        ),
    ],
)
def test_filters_equal_the_reference(config: SamplingConfig, reference: list[object]) -> None:
    expected = LogitsProcessorList(reference)(torch.zeros(4, 1, dtype=torch.int64), logits())
    found = filtered(logits(), config)
    assert torch.equal(found.isneginf(), expected.isneginf())
    torch.testing.assert_close(found, expected)
    assert (~found.isneginf()).any(dim=-1).all()


def test_penalty_equals_the_reference() -> None:
    ids = torch.tensor([[1, 2, 2], [5, 0, 9], [7, 7, 7], [1, 3, 5]])
    seen = torch.zeros(4, 60, dtype=torch.bool).scatter(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits())
    torch.testing.assert_close(penalize(logits(), seen, 1.7), expected)


@pytest.mark.parametrize("top_p", [None, 0.5])
def test_temperature_0_is_the_most_likely_token(top_p: float | None) -> None:
    config = SamplingConfig(temperature=0, top_p=top_p)
    assert torch.equal(choose(logits(), config, [Draws(i) for i in range(4)]), logits().argmax(-1))


def test_a_draw_depends_on_its_seed_and_not_on_its_place() -> None:
    config = SamplingConfig(temperature=2.0)
    draws = {seed: Draws(seed) for seed in (3, 4, 5)}
    together = choose(logits(3, 5000, 0.1), config, [draws[3], draws[4], draws[5]])
    alone = choose(logits(3, 5000, 0.1)[2:], config, [Draws(5)])
    assert together[2] == alone[0]
    assert len(set(together.tolist())) == 3


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws, config = Draws(0), SamplingConfig()
    taken = torch.cat([choose(probabilities.log()[None], config, [draws]) for _ in range(4000)])
    shares = torch.bincount(taken, minlength=4) / 4000
    assert shares[1] == 0
    assert (shares - probabilities).abs().max() < 3 * math.sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (math.nan, "sequence 8, new token 3: a logit is nan"),
        (math.inf, "sequence 8, new token 3: a logit is inf"),
    ],
)
def test_a_logit_that_is_no_number_is_refused(value: float, complaint: str) -> None:
    bad = logits()
    bad[1, 7] = value
    with pytest.raises(SamplingError, match=complaint):
        check(bad, [9, 8, 7, 6], 3)


def test_a_row_without_any_token_is_refused_by_name() -> None:
    bad = logits()
    bad[2] = -math.inf
    with pytest.raises(SamplingError, match="sequence 7, new token 1: every token is masked"):
        check(bad, [9, 8, 7, 6], 1)
    check(logits().masked_fill(torch.arange(60) > 0, -math.inf), [9, 8, 7, 6], 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"temperature": -1.0}, "temperature not negative, got 1.0 and -1.0"),
        ({"top_k": 0}, "top_k must be at least 1 or null, got 0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\] or be null, got 1.5"),
        ({"stop": ("",)}, "stop must not hold an empty text"),
    ],
)
def test_complaints(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SamplingConfig(**change)  # type: ignore[arg-type]
