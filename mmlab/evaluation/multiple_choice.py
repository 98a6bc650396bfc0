"""Multiple choice by likelihood: which of the given answers is the most probable one after the question?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.evaluation.base import DEFAULT, EvaluationConfig, Execution, Result, file_label
from mmlab.evaluation.prompts import check_template, context_ids, fill
from mmlab.evaluation.rows import read_rows

if TYPE_CHECKING:
    from mmlab.evaluation.scoring import Ids
    from mmlab.inference.model import LanguageModel

METRICS = ("accuracy", "accuracy_per_token", "accuracy_per_byte")


@dataclass(frozen=True)
class MultipleChoiceConfig(EvaluationConfig):
    """Share of questions whose answer has a higher score than every other choice; a tie is wrong.

    The score of `accuracy` is the log-likelihood of the continuation after the prompt; `accuracy_per_token`
    divides it by the continuation's tokens and `accuracy_per_byte` by the choice's UTF-8 bytes. Prompt and
    continuation are tokenized as one text, or each for itself where a token would reach from one into the
    other.

    Args:
        path: JSON lines, plain or `.gz`.
        question: field of the question; `prompt` may use any other field too.
        choices: field of the choices: a list of text, or {text: [...], label: [...]}.
        answer: field of the answer: its number from 0, its label, its text, or a letter (A is the first).
        prompt: format string of what stands before a choice.
        continuation: format string of a scored choice, with `{choice}`; null is " {choice}", and "{choice}"
            with `chat`.
        chat: the prompt is the user's turn and the choice the assistant's, in the model's chat template.
        limit: how many questions, from the first on; null for all.
    """

    path: str
    question: str = "question"
    choices: str = "choices"
    answer: str = "answer"
    prompt: str = "Question: {question}\nAnswer:"
    continuation: str | None = None
    chat: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        check_template("prompt", self.prompt)
        if not self.chat and self.prompt != self.prompt.rstrip():
            raise ValueError(f"prompt {self.prompt!r} ends in white space, which belongs to the continuation")
        if self.continuation is not None:
            check_template("continuation", self.continuation)
            if "{choice" not in self.continuation:
                raise ValueError(f"continuation {self.continuation!r} does not hold {{choice}}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1 or null, got {self.limit}")

    def label(self) -> str:
        return file_label(self.path)

    def run(self, model: LanguageModel, cache: Path, execution: Execution = DEFAULT) -> Result:
        """One item a question: prompt, choices, answer, and the log-likelihood of every choice."""
        from mmlab.evaluation.scoring import log_likelihoods

        rows, data = read_rows(self.path, (self.question, self.choices, self.answer), cache)
        items: list[dict[str, Any]] = []
        pairs: list[tuple[Ids, Ids]] = []
        for index, row in enumerate(rows[: self.limit]):
            where = f"{self.path} row {index}"
            texts, labels = choice_texts(row[self.choices], where)
            prompt = fill("prompt", self.prompt, {**row, "question": row[self.question]})
            asked = self._pairs(model, prompt, row, texts)
            pairs += asked
            items.append(
                {
                    "id": index,
                    "answer": answer_index(row[self.answer], texts, labels, where),
                    "tokens": [len(continuation) for _, continuation in asked],
                    "bytes": [len(text.encode("utf-8", "surrogatepass")) for text in texts],
                    "prompt": prompt,
                    "choices": texts,
                }
            )
        scores = log_likelihoods(model, pairs, execution).tolist()
        for item in items:
            item["log_likelihoods"], scores = scores[: len(item["choices"])], scores[len(item["choices"]) :]
            item |= correct(item)
        metrics = {name: statistics.fmean(item[name] for item in items) for name in METRICS}
        return Result(metrics, {"questions": len(items), "choices": len(pairs)}, items, data)

    def _pairs(
        self, model: LanguageModel, prompt: str, row: Mapping[str, Any], choices: list[str]
    ) -> list[tuple[Ids, Ids]]:
        """Tokens of the prompt and of the continuation, for each choice."""
        template = self.continuation or ("{choice}" if self.chat else " {choice}")
        context = context_ids(model, prompt, self.chat)
        texts = [fill("continuation", template, {**row, "choice": choice}) for choice in choices]
        return [(context, _continued(model, "" if self.chat else prompt, text)) for text in texts]


def _continued(model: LanguageModel, prompt: str, text: str) -> Ids:
    """Tokens of `text` after `prompt`: those of both as one text, if they begin with those of the prompt."""
    head, whole = model.vocabulary.encode(prompt), model.vocabulary.encode(prompt + text)
    if len(whole) > len(head) and np.array_equal(whole[: len(head)], head):
        return whole[len(head) :]
    return model.vocabulary.encode(text)


def correct(item: Mapping[str, Any]) -> dict[str, float]:
    """1 or 0 for each metric, from the item's log-likelihoods, tokens, bytes and answer."""
    raw = np.array(item["log_likelihoods"])
    sizes = (np.ones(len(raw)), np.array(item["tokens"]), np.maximum(item["bytes"], 1))
    found = {}
    for name, size in zip(METRICS, sizes, strict=True):
        scores = raw / size
        others = np.delete(scores, item["answer"])
        found[name] = float((scores[item["answer"]] > others).all())
    return found


def choice_texts(choices: Any, where: str) -> tuple[list[str], list[str] | None]:
    """Texts of the choices, and their labels where they have any."""
    labels = None
    if isinstance(choices, Mapping) and {"text", "label"} <= set(choices):
        choices, labels = choices["text"], [str(label) for label in choices["label"]]
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise ValueError(f"{where}: choices must be a list of text or {{text: [...], label: [...]}}")
    if len(choices) < 2 or (labels is not None and len(labels) != len(choices)):
        raise ValueError(f"{where}: {len(choices)} choices, {len(labels or choices)} labels; 2 are needed")
    return choices, labels


def answer_index(answer: Any, texts: list[str], labels: list[str] | None, where: str) -> int:
    """Number of the right choice; ValueError if `answer` names none."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return answer
    if isinstance(answer, str):
        for names in (labels, texts, [chr(65 + index) for index in range(len(texts))]):
            if names is not None and answer in names:
                return names.index(answer)
    raise ValueError(f"{where}: the answer {answer!r} names none of the {len(texts)} choices")
