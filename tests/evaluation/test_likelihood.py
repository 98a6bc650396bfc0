"""Loss, perplexity and bits per byte of documents: definitions, windows, items."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from mmlab.data.sources.jsonl import JsonlConfig
from mmlab.data.sources.text_files import TextFilesConfig
from mmlab.data.sources.tokens import TokenWindows, build_token_file
from mmlab.evaluation.base import Execution
from mmlab.evaluation.likelihood import LikelihoodConfig, Windows
from mmlab.modalities.text.vocabulary import CharacterVocabulary
from tests.evaluation.toys import bigram, tiny, write_rows

TEXTS = ["", "abc", "Grüße!" * 4, "x" * 40, "The quick brown fox"]


@pytest.fixture
def source(tmp_path):
    return JsonlConfig((write_rows(tmp_path / "texts.jsonl.gz", [{"text": text} for text in TEXTS]),))


def by_definition(model, text: str, max_length: int, stride: int) -> float:
    """Nats of one document, target by target, each in the window that scores it."""
    end = model.vocabulary.end
    ids = [end, *model.vocabulary.encode(text).tolist(), end]
    nats = 0.0
    for target in range(1, len(ids)):
        window = max(-(-(target - max_length) // stride), 0)
        context = torch.tensor(ids[window * stride : target])[None]
        with torch.no_grad():
            logits_V = model.network(context).logits_BTV[0, -1].double()
        nats -= logits_V.log_softmax(-1)[ids[target]].item()
    return nats


@pytest.mark.parametrize("stride", [None, 1, 3, 8])
@pytest.mark.parametrize("batch_tokens", [1, 10_000])
def test_metrics_are_those_of_a_computation_by_definition(source, stride, batch_tokens, tmp_path):
    model = tiny()
    config = LikelihoodConfig(source, max_length=8, stride=stride)
    result = config.run(model, tmp_path, Execution(batch_tokens))
    expected = [by_definition(model, text, 8, stride or 8) for text in TEXTS]
    assert [item["nats"] for item in result.items] == pytest.approx(expected, abs=1e-4)
    size = sum(len(text.encode()) for text in TEXTS)
    tokens = size + len(TEXTS)
    assert result.counts == {"documents": 5, "tokens": tokens, "bytes": size, "bad": 0}
    assert result.metrics["loss"] == pytest.approx(sum(expected) / tokens, rel=1e-6)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(sum(expected) / tokens), rel=1e-6)
    assert result.metrics["bits_per_byte"] == pytest.approx(sum(expected) / math.log(2) / size, rel=1e-6)


def test_a_hand_computed_document(tmp_path):
    model = bigram("aü", {".": {"a": 0.5, "ü": 0.5}, "a": {"ü": 1.0}, "ü": {"a": 0.25, ".": 0.75}})
    (tmp_path / "a.txt").write_text("aü", encoding="utf-8")
    result = LikelihoodConfig(TextFilesConfig((str(tmp_path / "a.txt"),))).run(model, tmp_path)
    nats = -math.log(0.5 * 1.0 * 0.75)
    assert result.metrics["loss"] == pytest.approx(nats / 3, abs=1e-6)  # a, ü and the end
    assert result.metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / 3, abs=1e-6)  # ü has 2 bytes
    assert result.items == [
        {
            "id": 0,
            "name": str(tmp_path / "a.txt"),
            "nats": pytest.approx(nats, abs=1e-6),
            "tokens": 3,
            "bytes": 3,
            "text": "aü",
        }
    ]


def test_items_sum_to_the_metrics(source, tmp_path):
    result = LikelihoodConfig(source, max_length=8).run(tiny(), tmp_path)
    nats, tokens, size = (sum(item[name] for item in result.items) for name in ("nats", "tokens", "bytes"))
    assert result.metrics["loss"] == pytest.approx(nats / tokens, rel=1e-12)
    assert result.metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-12)
    assert [item["id"] for item in result.items] == [0, 1, 2, 3, 4]
    assert [item["text"] for item in result.items] == TEXTS


def test_windows_without_a_stride_are_those_of_training(source, tmp_path):
    model = tiny()
    tokens = build_token_file(
        source.build(tmp_path), model.vocabulary.encode, model.vocabulary.end, 257, "key", tmp_path
    )
    expected, windows = TokenWindows(tokens, 8), Windows(tokens.offsets, 8, None)
    assert len(windows.lengths) == len(expected)
    for index, length in enumerate(windows.lengths):
        low, high, first = windows.place(index)
        assert tokens.tokens[low:high].tolist() == expected[index]["tokens"].tolist()
        assert (length, first) == (high - low - 1, 1)
        assert windows.documents[index] == expected[index]["document"]


@pytest.mark.parametrize("stride", [1, 3, 5])
def test_every_target_counts_once_and_has_the_context_that_was_promised(stride):
    offsets = np.array([0, 1, 6, 11, 12, 40])
    windows = Windows(offsets, 5, stride)
    for document, (start, stop) in enumerate(itertools.pairwise(offsets)):
        seen = []
        for index in np.flatnonzero(windows.documents == document):
            low, high, first = windows.place(index)
            assert high - low - 1 <= 5
            for target in range(low + first, high):
                assert target - low >= (1 if target - start <= 5 else 5 - stride + 1)
                seen.append(target)
        assert seen == list(range(start + 1, stop + 1))


def test_the_first_documents_and_those_that_cannot_be_read(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [{"text": text} for text in ("ab", "aXb", "b", "a")])
    model = tiny(CharacterVocabulary("ab"))
    result = LikelihoodConfig(JsonlConfig((path,)), max_length=4, limit=2).run(model, tmp_path)
    assert [(item["id"], item["text"]) for item in result.items] == [(0, "ab"), (2, "b")]
    assert result.counts == {"documents": 2, "tokens": 5, "bytes": 3, "bad": 1}
    path = write_rows(tmp_path / "u.jsonl", [{"text": "X"}])
    with pytest.raises(ValueError, match=r"no document to measure: 1 cannot be used; the first: .*'X'"):
        LikelihoodConfig(JsonlConfig((path,))).run(model, tmp_path)


def test_a_window_longer_than_the_model_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="has 16 tokens, but the model takes at most 8"):
        LikelihoodConfig(source, max_length=16).run(tiny(max_positions=8), tmp_path)


@pytest.mark.parametrize("options", [{"max_length": 0}, {"stride": 0}, {"stride": 1025}, {"limit": 0}])
def test_impossible_values_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LikelihoodConfig(TextFilesConfig(("a",)), **options)
