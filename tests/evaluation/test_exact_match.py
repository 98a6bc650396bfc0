"""Exact match: extraction, normalisation, several accepted answers, and what is generated."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmlab.evaluation import exact_match
from mmlab.evaluation.base import Execution
from mmlab.evaluation.exact_match import ExactMatchConfig, extract, normalized
from mmlab.inference import generation
from mmlab.inference.sampling import SamplingConfig
from tests.evaluation.toys import tiny, write_rows

HASHES = r"####\s*(-?[$\d][\d,.]*)"


@pytest.fixture
def written(monkeypatch):
    """Lets the model write given texts, by the question; gives the batches that it was asked."""
    asked: list[list[str]] = []

    def install(texts):
        def generate(model, prompts, sampling, **options):
            asked.append([model.vocabulary.decode(ids, skip_special=True) for ids in prompts])
            return [
                SimpleNamespace(ids=np.arange(len(texts[prompt])), text=texts[prompt], stopped_by="end")
                for prompt in asked[-1]
            ]

        monkeypatch.setattr(generation, "generate", generate)
        return asked

    return install


def run(tmp_path, rows, execution=None, **options):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    config = ExactMatchConfig(path, **{"prompt": "{question}", **options})
    return config.run(tiny(), tmp_path, execution or Execution())


def test_numbers_after_hashes(written, tmp_path):
    written(
        {
            "right": "6 * 7 = 42, so\n#### 42",
            "money": "#### 1 then\n#### $1,200.00.",
            "wrong": "#### 41",
            "none": "The answer is 42.",
        }
    )
    rows = [
        {"question": "right", "answer": "6*7=<<6*7=42>>42\n#### 42"},
        {"question": "money", "answer": "#### 1200"},
        {"question": "wrong", "answer": "#### 42"},
        {"question": "none", "answer": "#### 42"},
    ]
    options = {"pattern": HASHES, "answer_pattern": r"####\s*(.+)", "normalize": ("strip", "number")}
    result = run(tmp_path, rows, **options)
    assert result.metrics == {"exact_match": 0.5, "extracted": 0.75}
    assert [item["correct"] for item in result.items] == [1, 1, 0, 0]
    assert [item["extracted"] for item in result.items] == ["42", "1200", "41", None]
    assert [item["accepted"] for item in result.items] == [["42"], ["1200"], ["42"], ["42"]]
    assert result.counts == {"questions": 4, "tokens": sum(item["tokens"] for item in result.items)}


def test_one_of_several_accepted_answers_is_enough(written, tmp_path):
    written({"who": " The Bob  Russell!", "when": "in 1971"})
    rows = [
        {"question": "who", "answer": ["Bobby Scott", "Bob Russell"]},
        {"question": "when", "answer": ["1972", "December 1972"]},
    ]
    result = run(tmp_path, rows, normalize=("lower", "punctuation", "articles"))
    assert [item["correct"] for item in result.items] == [1, 0]
    assert result.metrics == {"exact_match": 0.5, "extracted": 1.0}
    assert run(tmp_path, rows).metrics["exact_match"] == 0.0  # white space at the ends is all that goes


def test_questions_are_asked_in_the_order_of_the_rows(written, tmp_path, monkeypatch):
    monkeypatch.setattr(exact_match, "ROUNDS", 2)
    asked = written({"a": "1", "ccc": "3", "bb": "2"})
    told = []
    rows = [{"question": name, "answer": str(len(name))} for name in ("a", "ccc", "bb")]
    execution = Execution(progress=lambda done, total: told.append((done, total)))
    result = run(tmp_path, rows, execution, batch_size=1)
    assert asked == [["a", "ccc"], ["bb"]]
    assert told == [(2, 3), (3, 3)]
    assert [(item["id"], item["prompt"], item["text"]) for item in result.items] == [
        (0, "a", "1"),
        (1, "ccc", "3"),
        (2, "bb", "2"),
    ]
    assert result.metrics["exact_match"] == 1.0
    assert len(run(tmp_path, rows, limit=1).items) == 1


def greedy(model, prompt: str, count: int) -> str:
    ids = [model.vocabulary.end, *model.vocabulary.encode(prompt).tolist()]
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model.network(torch.tensor([ids])).logits_BTV[0, -1].argmax()))
    assert model.vocabulary.end not in ids[1:]
    return model.vocabulary.decode(ids[-count:])


def test_what_is_generated_is_the_greedy_continuation(tmp_path):
    model, prompts = tiny(), ["ab", "Hello", "x?"]
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    rows = [{"question": prompt, "answer": text} for prompt, text in zip(prompts, expected, strict=True)]
    rows[1]["answer"] = "no"
    result = run(
        tmp_path, rows, normalize=(), sampling=SamplingConfig(temperature=0.0, max_new_tokens=6), batch_size=2
    )
    assert [item["text"] for item in result.items] == expected
    assert [item["correct"] for item in result.items] == [1, 0, 1]
    assert [item["tokens"] for item in result.items] == [6, 6, 6]


def test_what_is_drawn_does_not_depend_on_the_batch(tmp_path):
    rows = [{"question": "x" * size, "answer": "?"} for size in range(1, 12)]
    texts = [
        [
            item["text"]
            for item in run(
                tmp_path, rows, batch_size=size, sampling=SamplingConfig(max_new_tokens=8, seed=3)
            ).items
        ]
        for size in (1, 2, 16)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) == 11


def test_autocast_writes_too(tmp_path):
    rows = [{"question": "abc", "answer": "?"}]
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=4)
    (item,) = run(tmp_path, rows, Execution(autocast=True), sampling=sampling).items
    assert item["tokens"] == 4


def test_greedy_is_the_default():
    assert ExactMatchConfig("a.jsonl").sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("text", "steps", "expected"),
    [
        (" A b ", ("strip",), "A b"),
        ("Ä B", ("lower",), "ä b"),
        ("$1,234.50", ("number",), "1234.5"),
        ("18.", ("number",), "18"),
        ("-0.0", ("number",), "0"),
        ("1200", ("number",), "1200"),
        ("50%", ("number",), "50"),
        ("+7", ("number",), "7"),
        ("1e9999999", ("number",), "1e9999999"),
        ("three", ("number",), "three"),
        ("It's (a) test.", ("punctuation",), "Its a test"),
        ("The cat  and an apple", ("lower", "articles"), "cat and apple"),
    ],
)
def test_normalisation(text, steps, expected):
    assert normalized(text, steps) == expected


def test_extraction_takes_the_last_match_and_its_first_group():
    assert extract(None, "all") == "all"
    assert extract(r"\d+", "1 and 23") == "23"
    assert extract(r"=(\d)(\d)?", "=12 =3") == "3"
    assert extract(r"(x)|\d", "7") == ""
    assert extract(r"\d", "none") is None


def test_what_cannot_be_used_is_named(written, tmp_path):
    written({"q": "1"})
    with pytest.raises(ValueError, match=r"rows\.jsonl row 0: answer_pattern '#' matches nothing in 7"):
        run(tmp_path, [{"question": "q", "answer": 7}], answer_pattern="#")
    with pytest.raises(ValueError, match=r"row 0: no answer in \[\]"):
        run(tmp_path, [{"question": "q", "answer": []}])
    with pytest.raises(ValueError, match=r"pattern '\(' is no regular expression"):
        ExactMatchConfig("a.jsonl", pattern="(")
    with pytest.raises(ValueError, match="batch_size"):
        ExactMatchConfig("a.jsonl", batch_size=0)
