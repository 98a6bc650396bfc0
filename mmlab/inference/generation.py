"""Continuing prompts with a cache: many at once, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mmlab.backbone.cache import Cache
from mmlab.inference.model import LanguageModel
from mmlab.inference.sampling import Draws, SamplingConfig, check, choose, penalize
from mmlab.modalities.text.chat import Message

Ids = Sequence[int] | np.ndarray
OnText = Callable[[int, str], None]
"""Called with the number of a prompt and the text that has become certain."""

CHUNK = 512
"""Tokens of a prompt that are read at once."""


@dataclass(frozen=True)
class Generation:
    """What one prompt was continued with.

    Attributes:
        ids: the new tokens, the one that ended the sequence included.
        text: their text, without the end and without a stop text.
        stopped_by: `end` (a token that ends), `stop` (a stop text), `length` (enough tokens), or `context`
            (no position is left).
        logprobs: log-probability of each new token under the model, nats, before any filter.
        seed: what its draws came from.
    """

    ids: list[int]
    text: str
    stopped_by: Literal["end", "stop", "length", "context"]
    logprobs: list[float]
    seed: int


def encode_prompt(model: LanguageModel, prompt: str | Sequence[Message]) -> np.ndarray:
    """Ids of a text, after the token that parts documents, or of a conversation that the model is to answer.

    Raises:
        ValueError: a conversation, but the model has no chat template.
    """
    if isinstance(prompt, str):
        start = np.array([model.vocabulary.end], np.int32)
        return np.concatenate([start, model.vocabulary.encode(prompt)])
    if model.chat is None:
        raise ValueError(f"{model.name or 'the model'} has no chat template: give a text, not messages")
    return model.chat.render(prompt, model.vocabulary, reply=True).ids


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Ids],
    sampling: SamplingConfig,
    *,
    on_text: OnText | None = None,
    batch_size: int = 16,
    use_cache: bool = True,
) -> list[Generation]:
    """Continues every prompt; what one is continued with depends neither on the others nor on the batch.

    Args:
        model: the model.
        prompts: ids, at least one each.
        sampling: how tokens are chosen.
        on_text: told of new text of a prompt as soon as no later token can change it.
        batch_size: prompts at once; they are taken by length.
        use_cache: False computes every token from the whole sequence, which is slow.

    Raises:
        ValueError: an empty prompt, or one that leaves no position for a new token.
        SamplingError: logits from which no token can be drawn.
    """
    limit = model.max_length
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} is empty")
        if limit is not None and len(prompt) > limit:
            raise ValueError(f"prompt {number} has {len(prompt)} tokens, the model takes {limit}")
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    results: dict[int, Generation] = {}
    for start in range(0, len(order), batch_size):
        rows = [
            _Row(number, list(map(int, prompts[number])), model, sampling)
            for number in order[start : start + batch_size]
        ]
        for row in _Batch(model, rows, sampling, use_cache).run(on_text):
            results[row.number] = row.result()
    return [results[number] for number in range(len(prompts))]


@dataclass
class _Row:
    """One sequence while it grows."""

    number: int
    prompt: list[int]
    model: LanguageModel
    sampling: SamplingConfig
    new: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped_by: Literal["end", "stop", "length", "context"] | None = None

    def __post_init__(self) -> None:
        vocabulary, chat = self.model.vocabulary, self.model.chat
        self.ends = set(chat.stops(vocabulary)) if chat is not None else {vocabulary.end}
        self.seed = self.sampling.seed + self.number
        self.draws = Draws(self.seed)
        self.stream = vocabulary.stream()
        self.text = ""
        self.told = 0

    def add(self, token: int, logprob: float) -> None:
        """Takes the next token, and decides whether it was the last."""
        self.new.append(token)
        self.logprobs.append(logprob)
        limit = self.model.max_length
        if token in self.ends:
            self.text += self.stream.finish()
            self.stopped_by = "end"
        else:
            before = len(self.text)
            self.text += self.stream.push(token)
            self._find_stop(before)
        if self.stopped_by is None and len(self.new) >= self.sampling.max_new_tokens:
            self._finish("length")
        elif self.stopped_by is None and limit is not None and len(self.prompt) + len(self.new) > limit:
            self._finish("context")

    def _finish(self, reason: Literal["length", "context"]) -> None:
        before = len(self.text)
        self.text += self.stream.finish()
        self.stopped_by = reason
        self._find_stop(before)

    def _find_stop(self, before: int) -> None:
        """Cuts the text before the first stop text that ends after `before`."""
        found = []
        for stop in self.sampling.stop:
            at = self.text.find(stop, max(before - len(stop) + 1, 0))
            if at >= 0:
                found.append(at)
        if found:
            self.text, self.stopped_by = self.text[: min(found)], "stop"

    def news(self) -> str:
        """Text that is certain and was not told yet: the beginning of a stop text is held back."""
        end = len(self.text)
        if self.stopped_by is None:
            end -= max((_overlap(self.text, stop) for stop in self.sampling.stop), default=0)
        fresh, self.told = self.text[self.told : end], max(end, self.told)
        return fresh

    def result(self) -> Generation:
        assert self.stopped_by is not None
        return Generation(self.new, self.text, self.stopped_by, self.logprobs, self.seed)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class _Batch:
    """Sequences that grow together; one that has ended leaves."""

    def __init__(
        self, model: LanguageModel, rows: list[_Row], sampling: SamplingConfig, use_cache: bool
    ) -> None:
        self.model, self.rows, self.sampling, self.use_cache = model, rows, sampling, use_cache
        self.device = next(model.network.parameters()).device
        gaps = model.vocabulary.gaps
        self.gaps = torch.from_numpy(gaps).to(self.device) if len(gaps) else None
        self.seen_BV: Tensor | None = None
        self.cache: Cache | None = None

    def run(self, on_text: OnText | None) -> Iterator[_Row]:
        """The rows, each when it has ended."""
        logits_BV = self._read_prompts()
        step = 0
        while self.rows:
            step += 1
            tokens, logprobs = self._choose(logits_BV, step)
            for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
                row.add(token, logprob)
                fresh = row.news() if on_text is not None else ""
                if on_text is not None and fresh:
                    on_text(row.number, fresh)
            kept = [i for i, row in enumerate(self.rows) if row.stopped_by is None]
            yield from (row for row in self.rows if row.stopped_by is not None)
            if len(kept) < len(self.rows):
                self._keep(kept)
            if self.rows:
                logits_BV = self._next()

    def _read_prompts(self) -> Tensor:
        """Logits after every prompt, (B, V)."""
        if not self.use_cache:
            return self._whole()
        prompts = [row.prompt for row in self.rows]
        longest = max(map(len, prompts))
        room = longest + self.sampling.max_new_tokens
        limit = self.model.max_length
        config = self.model.network.backbone.config
        self.cache = Cache(config, len(prompts), room if limit is None else min(room, limit), CHUNK)
        logits_BV = torch.empty(0)
        for start in range(0, longest, CHUNK):
            parts = [prompt[start : start + CHUNK] for prompt in prompts]
            fresh_BV = self._forward(parts)
            # a row that ended in an earlier part keeps what it had then
            ended = torch.tensor([[not part] for part in parts], device=self.device)
            logits_BV = fresh_BV if start == 0 else torch.where(ended, logits_BV, fresh_BV)
        return logits_BV

    def _forward(self, parts: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the last token of every row; a row without a token has logits that mean nothing."""
        counts = [len(part) for part in parts]
        width = max(counts)
        padded = [[*part, *([0] * (width - len(part)))] for part in parts]
        tokens_BT = torch.tensor(padded, device=self.device)
        even = min(counts) == width
        output = self.model.network(tokens_BT, cache=self.cache, counts=None if even else counts)
        return output.logits_BTV[:, 0]

    def _next(self) -> Tensor:
        return self._forward([row.new[-1:] for row in self.rows]) if self.use_cache else self._whole()

    def _whole(self) -> Tensor:
        """Logits after every sequence, each computed from all of it."""
        results = []
        for row in self.rows:
            tokens_BT = torch.tensor([row.prompt + row.new], device=self.device)
            results.append(self.model.network(tokens_BT).logits_BTV[0, -1])
        return torch.stack(results)

    def _keep(self, kept: list[int]) -> None:
        self.rows = [self.rows[i] for i in kept]
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[kept]
        if self.cache is not None and kept:
            self.cache.select(kept)

    def _choose(self, logits_BV: Tensor, step: int) -> tuple[list[int], list[float]]:
        """Next tokens, and their log-probabilities under the model."""
        logits_BV = logits_BV[:, : self.model.vocabulary.size].float()
        if self.gaps is not None:
            logits_BV = logits_BV.index_fill(1, self.gaps, -torch.inf)
        check(logits_BV, [row.number for row in self.rows], step)
        chosen_BV = logits_BV
        if self.sampling.repetition_penalty != 1:
            chosen_BV = penalize(logits_BV, self._seen(logits_BV), self.sampling.repetition_penalty)
        tokens_B = choose(chosen_BV, self.sampling, [row.draws for row in self.rows])
        logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - logits_BV.logsumexp(dim=-1)
        return tokens_B.tolist(), logprobs_B.tolist()

    def _seen(self, logits_BV: Tensor) -> Tensor:
        """Tokens of prompt and continuation, boolean (B, V)."""
        if self.seen_BV is None:
            self.seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
            for i, row in enumerate(self.rows):
                ids = torch.tensor(row.prompt, device=self.device)
                self.seen_BV[i, ids[ids < logits_BV.shape[1]]] = True
        for i, row in enumerate(self.rows):
            if row.new:
                self.seen_BV[i, row.new[-1]] = True
        return self.seen_BV
