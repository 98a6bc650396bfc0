"""How well a model predicts documents: loss, perplexity, bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mmlab.data.sources.base import Source, SourceConfig
from mmlab.data.sources.tokens import TokenFile, build_token_file
from mmlab.evaluation.base import DEFAULT, EvaluationConfig, Execution, Result

if TYPE_CHECKING:
    from mmlab.inference.model import LanguageModel

EXCERPT = 200
"""Characters of a document that its item shows."""


@dataclass(frozen=True)
class LikelihoodConfig(EvaluationConfig):
    """Negative log-likelihood of documents, their ends included, each read from the end token on.

    Without `stride` a document is cut into windows of `max_length` targets that do not see each other, as in
    training's validation. With it a window begins every `stride` targets and only its last `stride` targets
    count, so that each target but the document's first `max_length` has at least `max_length - stride` tokens
    of context.

    `loss` is in nats a token, `perplexity` its exponential. `bits_per_byte` is all nats over ln 2 and the
    UTF-8 bytes of the documents: it compares models with different vocabularies.

    Args:
        source: documents with a `text`.
        max_length: targets of a window.
        stride: at most `max_length`; null for windows apart.
        limit: how many documents, from the first on; null for all.
    """

    source: SourceConfig
    max_length: int = 1024
    stride: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {self.max_length}")
        if self.stride is not None and not 1 <= self.stride <= self.max_length:
            raise ValueError(f"stride must lie in 1..max_length ({self.max_length}), got {self.stride}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1 or null, got {self.limit}")

    def label(self) -> str:
        return "likelihood"

    def run(self, model: LanguageModel, cache: Path, execution: Execution = DEFAULT) -> Result:
        """One item a document: nats, tokens, bytes and how it begins."""
        from mmlab.evaluation.scoring import negative_log_likelihoods

        source = self.source.build(cache)
        tokens = _tokenized(source, model, cache)
        windows = Windows(
            tokens.offsets[: (self.limit or tokens.documents) + 1], self.max_length, self.stride
        )

        def row(index: int) -> tuple[NDArray[Any], int]:
            low, high, first = windows.place(index)
            return tokens.tokens[low:high].astype(np.int64), first

        nats = negative_log_likelihoods(model, windows.lengths, row, execution)
        totals = np.bincount(windows.documents, nats, minlength=len(windows.sizes))
        bad = {sample.id for sample in tokens.bad}
        ids = [index for index in range(len(source)) if index not in bad][: len(totals)]
        items = [
            _item(source, index, float(total), int(size))
            for index, total, size in zip(ids, totals, windows.sizes, strict=True)
        ]
        return _summary(items, len(bad), source.fingerprint())


def _tokenized(source: Source, model: LanguageModel, cache: Path) -> TokenFile:
    vocabulary = model.vocabulary
    tokens = build_token_file(
        source,
        vocabulary.encode,
        end=vocabulary.end,
        vocabulary_size=vocabulary.size,
        key=vocabulary.fingerprint(),
        cache=cache,
    )
    if not tokens.documents:
        reasons = f"; the first: {tokens.bad[0].reason}" if tokens.bad else ""
        raise ValueError(f"there is no document to measure: {len(tokens.bad)} cannot be used{reasons}")
    return tokens


def _item(source: Source, index: int, nats: float, tokens: int) -> dict[str, Any]:
    text: str = source[index]["text"]
    return {
        "id": index,
        "name": source.name(index),
        "nats": nats,
        "tokens": tokens,
        "bytes": len(text.encode("utf-8", "surrogatepass")),
        "text": text[:EXCERPT],
    }


def _summary(items: list[dict[str, Any]], bad: int, data: str) -> Result:
    nats = math.fsum(item["nats"] for item in items)
    tokens, size = (sum(item[name] for item in items) for name in ("tokens", "bytes"))
    loss = nats / tokens
    metrics = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
    if size:
        metrics["bits_per_byte"] = nats / math.log(2) / size
    counts = {"documents": len(items), "tokens": tokens, "bytes": size, "bad": bad}
    return Result(metrics, counts, items, data)


class Windows:
    """Where the windows of documents lie in a token file.

    Args:
        offsets: int64 (documents + 1,), place of the end token before each document, and after the last.
        max_length: targets of a window.
        stride: see `LikelihoodConfig`.

    Attributes:
        sizes: targets of each document.
        documents: document of each window.
        lengths: inputs of each window.
    """

    def __init__(self, offsets: NDArray[np.int64], max_length: int, stride: int | None) -> None:
        step = max_length if stride is None else stride
        self.sizes = np.diff(offsets)
        counts = 1 + -(-np.maximum(self.sizes - max_length, 0) // step)
        self.documents = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(self.documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = number * step
        self.lengths = np.minimum(self.sizes[self.documents] - begins, max_length)
        self._low = offsets[:-1][self.documents] + begins
        self._first = np.where(number, max_length - step, 0) + 1

    def place(self, index: int) -> tuple[int, int, int]:
        """First token and last token + 1 in the file, and the place of the first token that is scored."""
        low = int(self._low[index])
        return low, low + int(self.lengths[index]) + 1, int(self._first[index])
