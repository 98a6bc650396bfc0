"""Language modelling: predict the next token of a document, or of an answer in a conversation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmlab.data.collate import Batch, Example
from mmlab.data.conversations import Conversations, build_conversations
from mmlab.data.sources.base import BadSampleError, Source
from mmlab.data.sources.tokens import TokenWindows, build_token_file
from mmlab.modalities.base import ModalityConfig
from mmlab.modalities.text.chat import ChatTemplate, Message, Rendered
from mmlab.modalities.text.vocabulary import TextModalityConfig, Vocabulary
from mmlab.models.decoder import IGNORE, Decoder
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
        text = _text_modality(modality, "language modelling")
        return LanguageModelExamples(text.build(), max_length, self.stream)

    def task_class(self) -> type[Task]:
        """LanguageModeling."""
        return LanguageModeling


def _text_modality(modality: Mapping[str, ModalityConfig], who: str) -> TextModalityConfig:
    text = modality.get("text")
    if not isinstance(text, TextModalityConfig):
        raise ValueError(f"{who} needs modality.text; the modalities are {sorted(modality)}")
    return text


def _predicted(targets: Tensor) -> NDArray[np.int64]:
    """The targets that are predicted, in one dimension."""
    flat = targets.numpy().reshape(-1)
    predicted = flat != IGNORE
    return flat if predicted.all() else flat[predicted]


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

    def stacked(self, raw: Mapping[str, Any]) -> Example:
        """Inputs and targets of windows of one length, row by row."""
        tokens = raw["tokens"]
        return {"tokens": tokens[:, :-1].astype(np.int64), "targets": tokens[:, 1:].astype(np.int64)}

    def counts(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Predicted tokens, and the bytes that they stand for."""
        predicted = _predicted(tensors["targets"])
        return {
            "nll": float(predicted.size),
            "bytes": float(self.vocabulary.byte_lengths.take(predicted).sum()),
        }

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

    def flops(self, batch: Batch) -> float | None:
        """Those of the decoder over all its tokens, padding included; None where a part is frozen."""
        network = self.network
        if not isinstance(network, Decoder) or not all(p.requires_grad for p in network.parameters()):
            return None
        B, T = batch.tensors["tokens"].shape
        size = network.stem.embedding.num_embeddings
        return float(network.config.cost(self.parts.backbone, size, B, T).training_flops)

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Loss, perplexity and bits per byte of a whole set."""
        loss = sums["nll"] / counts["nll"] if counts["nll"] else math.nan
        values = {"val/loss": loss, "val/perplexity": math.exp(loss) if loss < 700 else math.inf}
        if counts["bytes"]:
            values["val/bits_per_byte"] = sums["nll"] / math.log(2) / counts["bytes"]
        return values


@dataclass(frozen=True)
class InstructionTuningConfig(TaskConfig):
    """Next-token prediction of the assistant's turns in conversations, written down by `modality.text.chat`.

    The loss is over the trained tokens alone: the assistant's words and the token that ends its turn. An
    answer is never cut. A conversation of more than `data.max_length` targets is a bad sample; with
    `truncate: prompt` it first loses its oldest exchanges, system message aside, until the rest fits.
    """

    truncate: Literal["refuse", "prompt"] = "refuse"

    def examples(self, modality: dict[str, ModalityConfig], max_length: int) -> ConversationExamples:
        """Conversations of at most `max_length` targets.

        Raises:
            ValueError: without a chat template, or with one whose special tokens the vocabulary lacks.
        """
        text = _text_modality(modality, "instruction tuning")
        if text.chat is None:
            raise ValueError("instruction tuning needs a chat template, but modality.text.chat is null")
        vocabulary = text.build()
        every_role = [Message(role=role, content="") for role in text.chat.roles]
        text.chat.render(every_role, vocabulary)  # what the vocabulary lacks shows here, not as bad samples
        return ConversationExamples(vocabulary, text.chat, max_length, self.truncate)

    def task_class(self) -> type[Task]:
        """InstructionTuning."""
        return InstructionTuning


@dataclass(frozen=True)
class ConversationExamples:
    """Turns conversations into tokens, with targets where the assistant speaks.

    Counts of a micro-batch: `nll`, the trained targets; `bytes`, the UTF-8 bytes that these stand for;
    `tokens`, all that the network reads.
    """

    vocabulary: Vocabulary
    template: ChatTemplate
    max_length: int
    truncate: Literal["refuse", "prompt"] = "refuse"

    padding: ClassVar[Mapping[str, int]] = {"tokens": 0, "targets": IGNORE}

    def prepare(self, source: Source, cache: Path) -> Source:
        """Writes the conversations of `source` down once, into `cache`."""
        if isinstance(source, Conversations):
            return source
        return build_conversations(source, self.render, self.vocabulary.size, self.fingerprint(), cache)

    def render(self, raw: Mapping[str, Any]) -> Rendered:
        """Ids of one conversation, and which are trained; BadSampleError if it is too long or trains none."""
        if "messages" not in raw:
            raise ValueError(
                f"instruction tuning reads samples with 'messages', got the fields {list(raw)}; "
                "a source like mmlab.data.sources.chat.ChatRowsConfig gives them"
            )
        messages: Sequence[Message] = raw["messages"]
        try:
            rendered = self.template.render(messages, self.vocabulary)
            for shorter in self._shortened(messages):
                if len(rendered.ids) - 1 <= self.max_length:
                    break
                rendered = self.template.render(shorter, self.vocabulary)
        except ValueError as error:  # a role or a character that cannot be written down
            raise BadSampleError(str(error)) from error
        if len(rendered.ids) - 1 > self.max_length:
            raise BadSampleError(
                f"a conversation of {len(rendered.ids) - 1} targets, max_length is {self.max_length}"
            )
        if not rendered.trained[1:].any():
            raise BadSampleError(f"nothing to train: no message of {self.template.assistant!r}")
        return rendered

    def __call__(self, raw: Mapping[str, Any], rng: np.random.Generator) -> Example:
        """Inputs, and the trained ones among the tokens that follow them."""
        tokens, trained = raw["tokens"], raw["trained"]
        return {"tokens": tokens[:-1], "targets": np.where(trained[1:], tokens[1:], IGNORE)}

    def counts(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Trained targets and their bytes, and tokens read."""
        trained, segments = _predicted(tensors["targets"]), tensors.get("segments")
        read = tensors["tokens"].numel() if segments is None else int((segments != 0).sum())
        return {
            "nll": float(trained.size),
            "bytes": float(self.vocabulary.byte_lengths.take(trained).sum()),
            "tokens": float(read if trained.size else 0),
        }

    def empty(self) -> Example:
        """One token that predicts nothing."""
        return {"tokens": np.zeros(1, np.int64), "targets": np.full(1, IGNORE, np.int64)}

    def fingerprint(self) -> str:
        """Changes with everything that decides what an example holds."""
        parts = (self.vocabulary.fingerprint(), repr(self.template), self.max_length, self.truncate)
        return hashlib.sha256(f"conversations {parts!r}".encode()).hexdigest()

    def _shortened(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """The conversation without its oldest exchange, its two oldest, ..., as `truncate` allows."""
        if self.truncate == "refuse":
            return
        kept = 1 if messages and messages[0]["role"] == "system" else 0
        said = [at for at, message in enumerate(messages) if message["role"] == self.template.assistant]
        for at in said[:-1]:
            yield [*messages[:kept], *messages[at + 1 :]]


class InstructionTuning(LanguageModeling):
    """Trains a decoder on the negative log-likelihood of the trained tokens of conversations.

    Validation gives the metrics of LanguageModeling over these tokens alone.
    """

    rate: ClassVar[tuple[str, str]] = ("tokens", "tokens")
