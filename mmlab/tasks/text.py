"""Language modelling: predict the next token of a document."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mmlab.data.collate import Batch, Example
from mmlab.data.sources.base import Source
from mmlab.data.sources.tokens import TokenWindows, build_token_file
from mmlab.modalities.base import ModalityConfig
from mmlab.modalities.text.vocabulary import Vocabulary
from mmlab.models.decoder import IGNORE
from mmlab.tasks.base import Task
from mmlab.tasks.config import TaskConfig


@dataclass(frozen=True)
class LanguageModelingConfig(TaskConfig):
    """Next-token prediction over windows of documents.

    With `stream` the documents stand one after another, parted by the end token, and every window is full;
    otherwise a window never reaches into the next document.
    """

    stream: bool = False

    def examples(self, modality: dict[str, ModalityConfig], max_length: int) -> LanguageModelExamples:
        """Windows of at most `max_length` targets, in the vocabulary of the text modality."""
        if "text" not in modality:
            raise ValueError(f"language modelling needs modality.text; the modalities are {sorted(modality)}")
        return LanguageModelExamples(modality["text"].build(), max_length, self.stream)

    def task_class(self) -> type[Task]:
        """LanguageModeling."""
        return LanguageModeling


@dataclass(frozen=True)
class LanguageModelExamples:
    """Turns documents into windows of tokens, each with the targets that follow it.

    Counts of a micro-batch: `nll`, the predicted tokens (the end of a document among them), and `bytes`,
    the UTF-8 bytes that these tokens stand for.
    """

    vocabulary: Vocabulary
    max_length: int
    stream: bool = False

    padding: ClassVar[Mapping[str, int]] = {"tokens": 0, "targets": IGNORE}

    def prepare(self, source: Source, cache: Path) -> Source:
        """Tokenizes the documents of `source` once, into `cache`, and cuts them into windows."""
        if isinstance(source, TokenWindows):
            return source
        tokens = build_token_file(
            source,
            self.vocabulary.encode,
            end=self.vocabulary.end,
            vocabulary_size=self.vocabulary.size,
            key=self.vocabulary.fingerprint(),
            cache=cache,
        )
        return TokenWindows(tokens, self.max_length, stream=self.stream)

    def __call__(self, raw: Mapping[str, Any], rng: np.random.Generator) -> Example:
        """Inputs and targets of one window, shifted by one."""
        tokens = raw["tokens"]
        return {"tokens": tokens[:-1], "targets": tokens[1:]}

    def counts(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Predicted tokens, and the bytes that they stand for."""
        targets = tensors["targets"].numpy()
        predicted = targets[targets != IGNORE]
        return {"nll": float(predicted.size), "bytes": float(self.vocabulary.byte_lengths[predicted].sum())}

    def empty(self) -> Example:
        """One token that predicts nothing."""
        return {"tokens": np.zeros(1, np.int64), "targets": np.full(1, IGNORE, np.int64)}

    def fingerprint(self) -> str:
        """Changes with everything that decides what an example holds."""
        key = f"language-model {self.vocabulary.fingerprint()} {self.max_length} {self.stream}"
        return hashlib.sha256(key.encode()).hexdigest()


class LanguageModeling(Task):
    """Trains a decoder on the negative log-likelihood of the next token.

    Validation gives `val/loss` (nats a token), `val/perplexity` (its exponential) and `val/bits_per_byte`:
    all nats of the set, those of the end tokens included, over ln 2 times the bytes of its documents. The
    last one is the length of a lossless code and compares models with different vocabularies.
    """

    weights: ClassVar[Mapping[str, float]] = {"nll": 1.0}
    rate: ClassVar[tuple[str, str]] = ("tokens", "nll")

    def sums(self, batch: Batch) -> dict[str, Tensor]:
        """Summed negative log-likelihood of the predicted tokens, in nats."""
        assert self.network is not None
        tensors = batch.tensors
        output = self.network(
            tensors["tokens"],
            positions_BT=tensors.get("positions"),
            segments_BT=tensors.get("segments"),
            targets_BT=tensors["targets"],
        )
        return {"nll": output.nll_BT.sum(dtype=torch.float32)}

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Loss, perplexity and bits per byte of a whole set."""
        loss = sums["nll"] / counts["nll"] if counts["nll"] else math.nan
        values = {"val/loss": loss, "val/perplexity": math.exp(loss) if loss < 700 else math.inf}
        if counts["bytes"]:
            values["val/bits_per_byte"] = sums["nll"] / math.log(2) / counts["bytes"]
        return values
