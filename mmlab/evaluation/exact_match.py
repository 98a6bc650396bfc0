"""Exact match: the model writes an answer, which must equal one of those accepted."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmlab.evaluation.base import DEFAULT, EvaluationConfig, Execution, Result, file_label
from mmlab.evaluation.prompts import check_template, context_ids, fill
from mmlab.evaluation.rows import read_rows
from mmlab.inference.sampling import SamplingConfig

if TYPE_CHECKING:
    from mmlab.inference.generation import Generation
    from mmlab.inference.model import LanguageModel

Step = Literal["strip", "lower", "number", "punctuation", "articles"]

ROUNDS = 4
"""Batches that are made at once, of questions of like length."""


@dataclass(frozen=True)
class ExactMatchConfig(EvaluationConfig):
    """Share of questions whose generated answer equals an accepted one, after extraction and normalisation.

    Extraction: the last match of a pattern, of its first group if it has one; without a match there is no
    answer, which is wrong. Normalisation, in the order given: `strip` white space at both ends, `lower` case,
    `number` (the value alone: `$1,200.00` is `1200`), `punctuation` removed (ASCII), English `articles`
    removed and white space made single.

    Args:
        path: JSON lines, plain or `.gz`.
        question: field of the question; `prompt` may use any other field too.
        answer: field of the accepted answer, or of a list of them.
        prompt: format string of what the model is given.
        chat: the prompt is the user's turn in the model's chat template.
        pattern: regular expression that extracts the answer from what the model wrote; null takes all.
        answer_pattern: the same for the accepted answers.
        normalize: what is done to both before they are compared.
        sampling: how the answer is written; greedy unless said otherwise.
        batch_size: how many answers are written at once.
        limit: how many questions, from the first on; null for all.
    """

    path: str
    question: str = "question"
    answer: str = "answer"
    prompt: str = "Question: {question}\nAnswer:"
    chat: bool = False
    pattern: str | None = None
    answer_pattern: str | None = None
    normalize: tuple[Step, ...] = ("strip",)
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    batch_size: int = 16
    limit: int | None = None

    def __post_init__(self) -> None:
        check_template("prompt", self.prompt)
        for name in ("pattern", "answer_pattern"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is no regular expression: {error}"
                ) from error
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1 or null, got {self.limit}")

    def label(self) -> str:
        return file_label(self.path)

    def run(self, model: LanguageModel, cache: Path, execution: Execution = DEFAULT) -> Result:
        """One item a question: prompt, what was written, the answer in it, and whether it is accepted."""
        rows, data = read_rows(self.path, (self.question, self.answer), cache)
        rows = rows[: self.limit]
        prompts = [fill("prompt", self.prompt, {**row, "question": row[self.question]}) for row in rows]
        accepted = [self._accepted(row[self.answer], index) for index, row in enumerate(rows)]
        items: list[dict[str, Any]] = []
        for index, written in enumerate(self._written(model, prompts, execution)):
            answer = extract(self.pattern, written.text)
            answer = None if answer is None else normalized(answer, self.normalize)
            items.append(
                {
                    "id": index,
                    "correct": float(answer in accepted[index]),
                    "extracted": answer,
                    "accepted": accepted[index],
                    "tokens": len(written.ids),
                    "stopped_by": written.stopped_by,
                    "prompt": prompts[index],
                    "text": written.text,
                }
            )
        metrics = {
            "exact_match": statistics.fmean(item["correct"] for item in items),
            "extracted": statistics.fmean(item["extracted"] is not None for item in items),
        }
        counts = {"questions": len(items), "tokens": sum(item["tokens"] for item in items)}
        return Result(metrics, counts, items, data)

    def _written(self, model: LanguageModel, prompts: list[str], execution: Execution) -> list[Generation]:
        """Generations in the order of the prompts; question i draws with seed + i, whatever the batch."""
        from mmlab.evaluation.scoring import evaluating
        from mmlab.inference.generation import generate

        found: list[Generation] = []
        with evaluating(model.network, execution.autocast):
            for start in range(0, len(prompts), self.batch_size * ROUNDS):
                asked = prompts[start : start + self.batch_size * ROUNDS]
                ids = [context_ids(model, prompt, self.chat) for prompt in asked]
                sampling = replace(self.sampling, seed=self.sampling.seed + start)
                found += generate(model, ids, sampling, batch_size=self.batch_size)
                if execution.progress is not None:
                    execution.progress(len(found), len(prompts))
        return found

    def _accepted(self, answer: Any, index: int) -> list[str]:
        answers = [str(one) for one in (answer if isinstance(answer, list) else [answer])]
        extracted = [extract(self.answer_pattern, one) for one in answers]
        if not extracted or None in extracted:
            missing = f"answer_pattern {self.answer_pattern!r} matches nothing" if answers else "no answer"
            raise ValueError(f"{self.path} row {index}: {missing} in {answer!r}")
        return [normalized(one, self.normalize) for one in extracted if one is not None]


def extract(pattern: str | None, text: str) -> str | None:
    """The last match of `pattern` (its first group if it has one) or None; without one all of `text`."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return matches[-1][1 if matches[-1].re.groups else 0] or ""


def normalized(text: str, steps: tuple[Step, ...]) -> str:
    """`text` after each of `steps` in turn."""
    for step in steps:
        text = _STEPS[step](text)
    return text


def _number(text: str) -> str:
    """The number that `text` holds, in one spelling; the text itself where it is none."""
    plain = re.sub(r"[$€£%,\s]|\.$", "", text.strip())
    if not re.fullmatch(r"[-+]?(\d+(\.\d+)?|\.\d+)", plain, re.ASCII):
        return text
    value = Decimal(plain)
    return f"{value.normalize():f}" if value else "0"


_STEPS: dict[Step, Callable[[str], str]] = {
    "strip": str.strip,
    "lower": str.lower,
    "number": _number,
    "punctuation": lambda text: re.sub(r"[!-/:-@\[-`{-~]", "", text),
    "articles": lambda text: " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()),
}
