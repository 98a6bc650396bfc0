"""Log-likelihoods of many sequences: equal to those of one at a time, whatever shares a batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmlab.backbone.config import BackboneConfig
from mmlab.evaluation.base import Execution
from mmlab.evaluation.scoring import batches, evaluating, log_likelihoods
from tests.evaluation.toys import bigram, tiny

LEARNED = BackboneConfig(width=16, depth=2, num_heads=2, init_std=0.3)
HALVES = {"a": {"a": 0.25, "b": 0.5, ".": 0.25}, "b": {"a": 1.0}, ".": {"a": 0.5, "b": 0.5}}


def pairs(count: int = 23) -> list[tuple[np.ndarray, np.ndarray]]:
    """Contexts and continuations of every length from 1 to 9."""
    draws = np.random.default_rng(0)
    sizes = draws.integers(1, 10, (count, 2))
    return [(draws.integers(0, 256, a), draws.integers(0, 256, b)) for a, b in sizes]


def alone(model, context, continuation) -> float:
    """The definition: log-softmax of the logits at each place before a token of the continuation."""
    ids = torch.tensor(np.concatenate([context, continuation]))[None]
    with torch.no_grad():
        logits_TV = model.network(ids[:, :-1]).logits_BTV[0].double()
    chosen = logits_TV.log_softmax(-1)[torch.arange(len(logits_TV)), ids[0, 1:]]
    return chosen[len(context) - 1 :].sum().item()


def test_a_hand_computed_log_likelihood():
    model = bigram("ab", HALVES)
    end, a, b = model.vocabulary.end, 0, 1
    found = log_likelihoods(
        model,
        [(np.array([end]), np.array([a, b, a])), (np.array([end, b, b, a]), np.array([b])), ([a], [end])],
    )
    expected = [math.log(0.5 * 0.5 * 1.0), math.log(0.5), math.log(0.25)]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("batch_tokens", [1, 40, 100_000])
@pytest.mark.parametrize("kind", ["window", "learned positions", "chunked head"])
def test_a_batch_gives_what_each_pair_gives_alone(kind, batch_tokens, monkeypatch):
    if kind == "chunked head":
        monkeypatch.setattr("mmlab.models.decoder.CHUNK", 257 * 8)
    model = tiny(backbone=LEARNED, max_positions=17) if kind == "learned positions" else tiny()
    found = log_likelihoods(model, pairs(), Execution(batch_tokens))
    expected = [alone(model, *pair) for pair in pairs()]
    assert np.abs(found - expected).max() < 1e-5
    assert np.ptp(expected) > 10  # they do differ


def test_bfloat16_is_near():
    exact = log_likelihoods(tiny(), pairs())
    half = log_likelihoods(tiny(), pairs(), Execution(autocast=True))
    assert 0 < np.abs(half / exact - 1).max() < 0.02


def test_batches_hold_each_row_once_and_no_more_tokens_than_asked():
    lengths = np.array([3, 9, 1, 9, 4, 30, 2])
    found = list(batches(lengths, 20))
    assert sorted(np.concatenate(found)) == list(range(7))
    assert [batch.tolist() for batch in found] == [[5], [1, 3], [4, 0, 6, 2]]
    assert all(len(batch) == 1 or len(batch) * lengths[batch].max() <= 20 for batch in found)


def test_the_network_sees_the_planned_batches_and_progress_is_told():
    model, told = bigram("ab", HALVES), []
    rows = [([2], [0] * size) for size in (1, 5, 2)]
    log_likelihoods(model, rows, Execution(6, progress=lambda done, total: told.append((done, total))))
    assert model.network.shapes == [(1, 5), (2, 2)]
    assert told == [(1, 3), (3, 3)]


def test_modes_gradients_and_random_state_are_left_as_they_were():
    model = tiny(backbone=BackboneConfig(width=16, depth=1, num_heads=2, dropout=0.5))
    model.network.train()
    model.network.backbone.blocks[0].attention.eval()
    before, state = [module.training for module in model.network.modules()], torch.get_rng_state()
    first, second = log_likelihoods(model, pairs()), log_likelihoods(model, pairs())
    assert first.tolist() == second.tolist()  # no dropout
    assert [module.training for module in model.network.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    with evaluating(model.network) as device:
        assert device == torch.device("cpu")
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in model.network.modules())
    with pytest.raises(ZeroDivisionError), evaluating(model.network):
        _ = 1 / 0
    assert [module.training for module in model.network.modules()] == before


def test_what_cannot_be_scored_is_refused():
    model = tiny(backbone=LEARNED, max_positions=8)
    with pytest.raises(ValueError, match="pair 1 has 3 tokens of context and 0 to score"):
        log_likelihoods(model, [([1], [2]), ([1, 2, 3], [])])
    with pytest.raises(ValueError, match="row 0 has 9 tokens, but the model takes at most 8"):
        log_likelihoods(model, [([1] * 5, [2] * 5)])
    with torch.no_grad():
        model.network.stem.embedding.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="row 0: the model's likelihood is not a number"):
        log_likelihoods(model, [([1], [2])])


def test_nothing_to_score_gives_nothing():
    assert log_likelihoods(bigram("ab", HALVES), []).shape == (0,)
