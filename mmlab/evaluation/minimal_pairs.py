"""Minimal pairs: does the model prefer the sentence that is right (BLiMP, arXiv:1912.00582)?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mmlab.evaluation.base import DEFAULT, EvaluationConfig, Execution, Result, file_label
from mmlab.evaluation.rows import read_rows

if TYPE_CHECKING:
    from mmlab.inference.model import LanguageModel

TIES = {"wrong": 0.0, "half": 0.5}


@dataclass(frozen=True)
class MinimalPairsConfig(EvaluationConfig):
    """Share of pairs whose good sentence has the higher total log-likelihood after the end token.

    `accuracy` is the mean over the groups, `accuracy/GROUP` that of one group; chance is 0.5. No end token is
    scored after a sentence. Two sentences are tied if their log-likelihoods are equal or they have the same
    tokens.

    Args:
        path: JSON lines, plain or `.gz`.
        good: field of the sentence that is right.
        bad: field of the other one.
        group: field that names a pair's group.
        per_group: how many pairs of each group, from the first on; null for all.
        ties: what a tie counts.
    """

    path: str
    good: str = "sentence_good"
    bad: str = "sentence_bad"
    group: str = "UID"
    per_group: int | None = None
    ties: Literal["wrong", "half"] = "wrong"

    def __post_init__(self) -> None:
        if self.per_group is not None and self.per_group < 1:
            raise ValueError(f"per_group must be at least 1 or null, got {self.per_group}")

    def label(self) -> str:
        return file_label(self.path)

    def run(self, model: LanguageModel, cache: Path, execution: Execution = DEFAULT) -> Result:
        """One item a pair: both sentences, their log-likelihoods (nats), and whether the choice is right."""
        from mmlab.evaluation.scoring import log_likelihoods

        found = read_rows(self.path, (self.group,), cache, texts=(self.good, self.bad))
        rows = self._chosen(found.rows)
        start = np.array([model.vocabulary.end], np.int64)
        sentences = [model.vocabulary.encode(row[name]) for _, row in rows for name in (self.good, self.bad)]
        scores = log_likelihoods(model, [(start, ids) for ids in sentences], execution).reshape(-1, 2)
        items = []
        for (index, row), pair, score in zip(
            rows, zip(sentences[::2], sentences[1::2], strict=True), scores.tolist(), strict=True
        ):
            tied = score[0] == score[1] or np.array_equal(*pair)
            items.append(
                {
                    "id": index,
                    "group": str(row[self.group]),
                    "correct": TIES[self.ties] if tied else float(score[0] > score[1]),
                    "tied": tied,
                    "log_likelihood_good": score[0],
                    "log_likelihood_bad": score[1],
                    "tokens_good": len(pair[0]),
                    "tokens_bad": len(pair[1]),
                    "good": row[self.good],
                    "bad": row[self.bad],
                }
            )
        return _summary(items, found.fingerprint)

    def _chosen(self, rows: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        seen: dict[str, int] = {}
        chosen = []
        for index, row in enumerate(rows):
            group = str(row[self.group])
            seen[group] = seen.get(group, 0) + 1
            if self.per_group is None or seen[group] <= self.per_group:
                chosen.append((index, row))
        return chosen


def _summary(items: list[dict[str, Any]], data: str) -> Result:
    groups: dict[str, list[float]] = {}
    for item in items:
        groups.setdefault(item["group"], []).append(item["correct"])
    means = {name: statistics.fmean(values) for name, values in sorted(groups.items())}
    metrics = {"accuracy": statistics.fmean(means.values())}
    metrics |= {f"accuracy/{name}": value for name, value in means.items()}
    counts = {"pairs": len(items), "groups": len(groups), "ties": sum(item["tied"] for item in items)}
    counts["tokens"] = sum(item["tokens_good"] + item["tokens_bad"] for item in items)
    return Result(metrics, counts, items, data)
