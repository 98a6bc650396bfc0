"""Learning a byte-pair vocabulary from texts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmlab.modalities.base import EncodingError
from mmlab.modalities.text.bpe import PATTERNS, BytePairVocabulary, check_pattern
from mmlab.modalities.text.chat import END
from mmlab.modalities.text.vocabulary import utf8

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH = 64
_LONGEST = 256


class TrainedBPE(NamedTuple):
    """Ranks, and what they make of the texts that they were learnt from."""

    ranks: dict[bytes, int]
    texts: int
    bytes: int
    tokens: int


def train_bpe(texts: Iterable[str], size: int, pattern: str = "gpt2", min_frequency: int = 2) -> TrainedBPE:
    """Learns `size` tokens, the 256 bytes included (special tokens come on top), with `tokenizers`.

    The same texts in the same order give the same ranks, with any number of threads. A piece of more than
    256 characters counts in parts. All texts are then encoded with the trainer's own merges and with
    tiktoken's: their ids are equal, or this fails.

    Args:
        texts: gone through twice.
        size: number of tokens, at least 256.
        pattern: a name of PATTERNS or a regular expression.
        min_frequency: a pair is merged only if it occurs this often.

    Raises:
        ValueError: the texts do not give that many tokens.
        EncodingError: a text cannot be encoded, or the two encoders disagree on it.
    """
    check_pattern(pattern)
    if size < 256:
        raise ValueError(f"size must hold the 256 bytes, got {size}")
    if iter(texts) is iter(texts):
        raise ValueError("texts are gone through twice: give a sequence, not an iterator")
    trainer = _train(texts, size, PATTERNS.get(pattern, pattern), min_frequency)
    ranks = _ranks(trainer, size, min_frequency)
    vocabulary = BytePairVocabulary(ranks, pattern, {END: len(ranks)}, END)
    counts = np.zeros(3, dtype=np.int64)
    numbered = iter(enumerate(texts))
    while batch := list(itertools.islice(numbered, _BATCH)):
        encodings = trainer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
        for (number, text), theirs in zip(batch, encodings, strict=True):
            ids = vocabulary.encode(text)
            if ids.tolist() != theirs.ids:
                raise EncodingError(
                    f"text {number}: {len(ids)} ids from tiktoken, {len(theirs.ids)} from tokenizers, not "
                    f"the same; do both read the pattern {pattern!r} alike?"
                )
            counts += (1, vocabulary.byte_lengths[ids].sum(), len(ids))
    return TrainedBPE(ranks, *counts.tolist())


def _train(texts: Iterable[str], size: int, pattern: str, min_frequency: int) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(pattern), "isolated")
    # Learning takes time with the square of the longest piece.
    short = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{_LONGEST}}}"), "isolated")
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, short, symbols])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_checked(texts), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, symbols])
    return tokenizer


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        utf8(text)
        yield text


def _ranks(tokenizer: Tokenizer, size: int, min_frequency: int) -> dict[bytes, int]:
    model = json.loads(tokenizer.to_str())["model"]
    symbols = byte_symbols()
    if len(model["vocab"]) != size:
        raise ValueError(
            f"the texts give only {len(model['vocab'])} tokens, not {size}: no other pair occurs "
            f"{min_frequency} times or more"
        )
    ranks = {
        bytes(symbols[symbol] for symbol in token): int(index) for token, index in model["vocab"].items()
    }
    made = [ranks[bytes(symbols[symbol] for symbol in "".join(pair))] for pair in model["merges"]]
    # tiktoken merges whatever joins to a token, in the order of the ids: one merge a token, or it differs.
    if made != list(range(256, size)):
        raise ValueError(f"{len(made)} merges do not give the {size - 256} tokens above the bytes, each once")
    return ranks


def byte_symbols() -> dict[str, int]:
    """The printable characters that byte-level vocabularies write for bytes: character -> byte.

    Bytes that are printable in Latin-1 stand for themselves; the others, in order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(256 + number): value for number, value in enumerate(others)
    }
