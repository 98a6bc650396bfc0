"""Results as files: whole, replaced whole, and readable."""

from __future__ import annotations

import json
import math

import pytest

from mmlab.evaluation.base import Result, described
from mmlab.evaluation.minimal_pairs import MinimalPairsConfig
from mmlab.evaluation.results import read_metrics, write_results
from mmlab.typed import typed

RESULT = Result({"loss": 0.5, "perplexity": math.inf}, {"n": 2}, [{"id": 0, "x": math.nan}, {"id": 1}], "abc")


def test_files_hold_metrics_counts_and_items(tmp_path):
    write_results(tmp_path / "a" / "b", RESULT, {"step": 3})
    assert read_metrics(tmp_path / "a" / "b") == {
        "step": 3,
        "data": "abc",
        "metrics": {"loss": 0.5, "perplexity": "inf"},
        "counts": {"n": 2},
    }
    lines = (tmp_path / "a" / "b" / "items.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"id": 0, "x": "nan"}, {"id": 1}]
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["b", "items.jsonl", "metrics.json"]


def test_text_that_utf8_cannot_hold_comes_back(tmp_path):
    text = 'half a pair: \ud83d, "é" \\ud800'
    write_results(tmp_path / "a", Result({}, {}, [{"text": text}], ""), {})
    raw = (tmp_path / "a" / "items.jsonl").read_bytes()
    assert json.loads(raw.decode("utf-8"))["text"] == text
    assert "é".encode() in raw


def test_older_results_are_replaced_whole_or_stay(tmp_path):
    write_results(tmp_path / "a", RESULT, {"step": 1})
    (tmp_path / "a" / "extra").touch()
    write_results(tmp_path / "a", RESULT, {"step": 2})
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == ["items.jsonl", "metrics.json"]
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_results(tmp_path / "a", Result({}, {}, [{"id": object()}], ""), {"step": 3})
    found = read_metrics(tmp_path / "a")
    assert found is not None
    assert found["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert read_metrics(tmp_path / "b") is None


def test_a_described_evaluation_can_be_built_again():
    config = MinimalPairsConfig("a.jsonl", per_group=3)
    plain = json.loads(json.dumps(described(config)))
    assert plain["path"] == "a.jsonl"
    assert typed(plain, MinimalPairsConfig) == config
