"""Multiple choice: three ways to divide a log-likelihood, and how rows are read."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from mmlab.evaluation import scoring
from mmlab.evaluation.multiple_choice import MultipleChoiceConfig, answer_index, choice_texts, correct
from mmlab.modalities.text.chat import ChatTemplate, Turn
from mmlab.modalities.text.vocabulary import BytesConfig, CharacterVocabulary
from tests.evaluation.toys import bigram, tiny, write_rows

# Once begun, `ü` (two bytes) repeats itself at a cost of 0.5 a token, `b` costs 0.25 and ends there.
TABLE = {"?": {"ü": 0.5, "b": 0.25, "?": 0.25}, "ü": {"ü": 0.5, "?": 0.5}, "b": {"b": 0.1, "?": 0.9}}
MODEL = bigram("?übc", TABLE)
PLAIN = {"prompt": "{question}?", "continuation": "{choice}"}


def run(tmp_path, rows, model=MODEL, **options):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return MultipleChoiceConfig(path, **{**PLAIN, **options}).run(model, tmp_path)


def test_the_three_scores_of_a_hand_computed_question(tmp_path):
    result = run(tmp_path, [{"question": "", "choices": ["üüü", "b"], "answer": 0}])
    (item,) = result.items
    expected = [3 * math.log(0.5), math.log(0.25)]
    assert item["log_likelihoods"] == pytest.approx(expected, abs=1e-6)
    assert (item["tokens"], item["bytes"]) == ([3, 1], [6, 1])
    # raw: -2.08 < -1.39; a token: -0.69 > -1.39; a byte: -0.35 > -1.39
    assert result.metrics == {"accuracy": 0.0, "accuracy_per_token": 1.0, "accuracy_per_byte": 1.0}
    assert result.counts == {"questions": 1, "choices": 2}


def test_bytes_and_tokens_can_disagree():
    item = {"log_likelihoods": [-4.0, -3.0], "tokens": [2, 1], "bytes": [2, 3], "answer": 0}
    assert correct(item) == {"accuracy": 0.0, "accuracy_per_token": 1.0, "accuracy_per_byte": 0.0}
    tied = {"log_likelihoods": [-3.0, -3.0], "tokens": [1, 1], "bytes": [1, 2], "answer": 1}
    assert correct(tied) == {"accuracy": 0.0, "accuracy_per_token": 0.0, "accuracy_per_byte": 1.0}


def test_items_give_the_metrics(tmp_path):
    rows = [
        {"question": "", "choices": ["b", "ü"], "answer": 0},
        {"question": "?", "choices": ["b", "ü"], "answer": 1},
        {"question": "", "choices": ["?", "ü", "b"], "answer": 1},
    ]
    result = run(tmp_path, rows)
    assert [item["id"] for item in result.items] == [0, 1, 2]
    assert [item["accuracy"] for item in result.items] == [0.0, 1.0, 1.0]
    assert result.metrics["accuracy"] == pytest.approx(2 / 3)
    assert result.items[1]["prompt"] == "??"
    assert result.counts["choices"] == 7
    assert len(run(tmp_path, rows, limit=2).items) == 2


def test_a_template_may_use_any_field(tmp_path):
    rows = [{"q": "b", "hint": "?", "options": ["ü", "b"], "key": "B"}]
    options = {"question": "q", "choices": "options", "answer": "key", "prompt": "{hint}{question}{q}?"}
    (item,) = run(tmp_path, rows, **options).items
    assert item["prompt"] == "?bb?"
    assert item["answer"] == 1
    with pytest.raises(
        ValueError, match=r"'\{hnit\}' needs 'hnit'; the fields are q, hint, options, key, question"
    ):
        run(tmp_path, rows, **{**options, "prompt": "{hnit}"})


class Pairs(CharacterVocabulary):
    """Has a token for `?b` too, which is what that text becomes."""

    def encode(self, text):
        ids, out = super().encode(text), []
        for index in ids.tolist():
            if out and (out[-1], index) == (0, 1):
                out[-1] = 2
            else:
                out.append(index)
        return np.array(out, np.int32)


def test_a_token_that_spans_the_boundary_is_taken_apart(tmp_path):
    model = tiny(Pairs("?b2"))
    rows = [{"question": "", "choices": ["b", "bb", "??"], "answer": 0}]
    (item,) = run(tmp_path, rows, model=model, prompt="{question}?").items
    assert item["tokens"] == [1, 2, 2]


def test_choices_and_answers_are_read_in_several_forms():
    assert choice_texts({"text": ["x", "y"], "label": [1, 2]}, "row") == (["x", "y"], ["1", "2"])
    assert choice_texts(["x", "y"], "row") == (["x", "y"], None)
    assert answer_index(1, ["x", "y"], None, "row") == 1
    assert answer_index("2", ["x", "y"], ["1", "2"], "row") == 1
    assert answer_index("x", ["y", "x"], None, "row") == 1
    assert answer_index("B", ["x", "y"], None, "row") == 1
    assert answer_index("B", ["B", "y"], None, "row") == 0
    for wrong in (2, -1, True, "C", "z", None):
        with pytest.raises(ValueError, match=f"row 7: the answer {wrong!r} names none of the 2 choices"):
            answer_index(wrong, ["x", "y"], None, "row 7")
    with pytest.raises(ValueError, match="row 7: 1 choices"):
        choice_texts(["x"], "row 7")
    with pytest.raises(ValueError, match="list of text"):
        choice_texts([1, 2], "row 7")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prompt": "{question} "}, "ends in white space"),
        ({"prompt": "{"}, "is no format string"),
        ({"prompt": "{}"}, "a field without a name"),
        ({"continuation": " choice"}, "does not hold {choice}"),
        ({"limit": 0}, "limit"),
    ],
)
def test_impossible_values_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        MultipleChoiceConfig("a.jsonl", **options)


def test_with_chat_the_prompt_is_the_users_turn_and_the_choice_the_reply(tmp_path, monkeypatch):
    chat = ChatTemplate(
        {"user": Turn("<|user|>", "\n"), "assistant": Turn("<|reply|>", "<|over|>")},
        ("<|user|>", "<|reply|>", "<|over|>"),
    )
    model = dataclasses.replace(tiny(BytesConfig(chat=chat).build()), chat=chat)
    seen = []

    def fake(model, pairs, execution):
        seen.extend(pairs)
        return np.zeros(len(pairs))

    monkeypatch.setattr(scoring, "log_likelihoods", fake)
    rows = [{"question": "Which?", "choices": ["this", "that"], "answer": 0}]
    run(tmp_path, rows, model=model, prompt="{question}", continuation=None, chat=True)
    contexts, continuations = zip(*seen, strict=True)
    expected = chat.render([{"role": "user", "content": "Which?"}], model.vocabulary, reply=True).ids
    assert all(np.array_equal(context, expected) for context in contexts)
    assert [model.vocabulary.decode(ids) for ids in continuations] == ["this", "that"]
    assert model.vocabulary.decode(contexts[0]) == "<|user|>Which?\n<|reply|>"
