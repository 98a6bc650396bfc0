"""Minimal pairs on a model whose preferences are known."""

from __future__ import annotations

import math

import pytest

from mmlab.evaluation.minimal_pairs import MinimalPairsConfig
from tests.evaluation.toys import bigram, tiny, write_rows

# After the end: a 0.6, b 0.4. Then a goes on with b for sure, and b with a or the end.
LIKES_A = {".": {"a": 0.6, "b": 0.4}, "a": {"b": 1.0}, "b": {"a": 0.5, ".": 0.5}}
PAIRS = [
    ("x", "a", "b"),  # right
    ("x", "b", "a"),  # wrong
    ("y", "ab", "ba"),  # 0.6 against 0.4 * 0.5: right
    ("y", "ab", "ab"),  # tied
    ("x", "aba", "ab"),  # 0.3 against 0.6: wrong, totals are not divided by the length
    ("y", "aba", "ba"),  # 0.3 against 0.2: right
]


@pytest.fixture
def path(tmp_path):
    rows = [{"UID": group, "sentence_good": good, "sentence_bad": bad} for group, good, bad in PAIRS]
    return write_rows(tmp_path / "pairs.v2.jsonl.gz", rows)


@pytest.mark.parametrize(("ties", "y"), [("wrong", 2 / 3), ("half", 2.5 / 3)])
def test_accuracy_of_each_group_and_their_mean(path, tmp_path, ties, y):
    result = MinimalPairsConfig(path, ties=ties).run(bigram("ab", LIKES_A), tmp_path)
    assert result.metrics == {
        "accuracy": pytest.approx((1 / 3 + y) / 2),
        "accuracy/x": pytest.approx(1 / 3),
        "accuracy/y": pytest.approx(y),
    }
    assert result.counts == {"pairs": 6, "groups": 2, "ties": 1, "tokens": 22}


def test_items_hold_what_was_measured_and_give_the_metrics(path, tmp_path):
    result = MinimalPairsConfig(path).run(bigram("ab", LIKES_A), tmp_path)
    assert [item["id"] for item in result.items] == list(range(6))
    assert [(item["group"], item["good"], item["bad"]) for item in result.items] == PAIRS
    assert [item["correct"] for item in result.items] == [1, 0, 1, 0, 0, 1]
    for group in "xy":
        found = [item["correct"] for item in result.items if item["group"] == group]
        assert result.metrics[f"accuracy/{group}"] == pytest.approx(sum(found) / 3)
    fifth = result.items[4]
    assert fifth["log_likelihood_good"] == pytest.approx(math.log(0.6 * 1.0 * 0.5), abs=1e-6)
    assert fifth["log_likelihood_bad"] == pytest.approx(math.log(0.6), abs=1e-6)
    assert (fifth["tokens_good"], fifth["tokens_bad"]) == (3, 2)


def test_the_first_pairs_of_each_group(path, tmp_path):
    result = MinimalPairsConfig(path, per_group=2).run(bigram("ab", LIKES_A), tmp_path)
    assert [item["id"] for item in result.items] == [0, 1, 2, 3]
    assert result.metrics == {"accuracy": 0.5, "accuracy/x": 0.5, "accuracy/y": 0.5}


def test_rows_that_cannot_be_used_are_named(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"UID": "x", "sentence_good": "a", "sentence_bad": 3}])
    with pytest.raises(ValueError, match=r"a\.jsonl row 0 .*'sentence_bad' must be text, got int"):
        MinimalPairsConfig(path).run(tiny(), tmp_path)
    with pytest.raises(ValueError, match="has no 'kind'; its fields are UID, sentence_good, sentence_bad"):
        MinimalPairsConfig(path, group="kind").run(tiny(), tmp_path)
    with pytest.raises(ValueError, match="holds no row"):
        MinimalPairsConfig(write_rows(tmp_path / "b.jsonl", [])).run(tiny(), tmp_path)


def test_its_results_are_called_like_its_file(path):
    assert MinimalPairsConfig(path).label() == "pairs"
    with pytest.raises(ValueError, match="per_group"):
        MinimalPairsConfig(path, per_group=0)


def test_the_real_pairs_are_read(shared_data, tmp_path):
    config = MinimalPairsConfig(str(shared_data / "text" / "blimp.jsonl.gz"), per_group=2)
    result = config.run(tiny(), tmp_path)
    assert result.counts["groups"] == 67
    assert result.counts["pairs"] == 134
    assert [item["id"] for item in result.items[:4]] == [0, 1, 1000, 1001]
