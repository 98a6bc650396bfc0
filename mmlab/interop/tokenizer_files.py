"""Vocabularies as `tokenizer.json`, the form of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmlab.interop.weights import InteropError
from mmlab.modalities.base import EncodingError
from mmlab.modalities.text.bpe import PATTERNS, BytePairVocabulary
from mmlab.modalities.text.bpe_training import byte_symbols
from mmlab.modalities.text.huggingface import HuggingFaceVocabulary
from mmlab.modalities.text.vocabulary import ByteVocabulary, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)

_PROBES = (
    "It's 12345 o'clock; they'LL see.\n\n\n  def f(x):\n\treturn x**2   \n",
    " Grüße, мир! 你好，世界 🙂🏽 e\u0301 \u00a0\u3000 \r\n\r\n \r x",
    "a" * 40 + " " * 40 + "\n" * 7 + "ǅ ſ İ ßẞ … — \x00\x7f \ufeff",
    "",
    " ",
)


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` has a tokenizer that `HuggingFaceConfig` reads."""
    return (folder / "tokenizer.json").is_file() or (
        (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    )


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, so that AutoTokenizer gives the ids of `vocabulary`.

    Raises:
        InteropError: a vocabulary that has no such form, or one that comes out different.
    """
    tokenizer = _tokenizer(vocabulary)
    for text in _PROBES:
        found, wanted = tokenizer.encode(text, add_special_tokens=False).ids, _encoded(vocabulary, text)
        if wanted is not None and found != wanted:
            raise InteropError(f"tokenizer.json would give other ids for {text!r}: {found}, not {wanted}")
    end = next(name for name, index in vocabulary.specials.items() if index == vocabulary.end)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "additional_special_tokens": [name for name in vocabulary.specials if name != end],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _encoded(vocabulary: Vocabulary, text: str) -> list[int] | None:
    """Ids of `text`; None where the vocabulary has none for a part of it."""
    try:
        return vocabulary.encode(text).tolist()
    except EncodingError:
        return None


def _tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer

    if isinstance(vocabulary, HuggingFaceVocabulary):
        tokenizer = Tokenizer.from_str(vocabulary._tokenizer.to_str())
    elif isinstance(vocabulary, BytePairVocabulary):
        pattern = PATTERNS.get(vocabulary.pattern, vocabulary.pattern)
        tokenizer = _byte_pairs(vocabulary.ranks, vocabulary.specials, pattern)
    elif isinstance(vocabulary, ByteVocabulary):
        tokenizer = _byte_pairs({bytes([value]): value for value in range(256)}, vocabulary.specials, None)
    else:
        raise InteropError(f"{type(vocabulary).__name__} has no form in tokenizer.json")
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in vocabulary.specials]
    )
    moved = {name for name, index in vocabulary.specials.items() if tokenizer.token_to_id(name) != index}
    if moved:
        raise InteropError(f"tokenizer.json would give other ids to {sorted(moved)}")
    return tokenizer


def _byte_pairs(ranks: Mapping[bytes, int], specials: Mapping[str, int], pattern: str | None) -> Tokenizer:
    """A byte-pair tokenizer; without `pattern` text is one piece."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = {value: symbol for symbol, value in byte_symbols().items()}
    spelled = {token: "".join(letters[value] for value in token) for token in ranks}
    clash = sorted(specials.keys() & set(spelled.values()))
    if clash:
        raise InteropError(f"{clash} are special and tokens of text, which tokenizer.json cannot tell apart")
    pairs = [(spelled[left], spelled[right]) for left, right in merges(ranks)]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()} | dict(specials)
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if pattern else []),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two tokens that each longer token is merged from, in the order of the ranks.

    Raises:
        InteropError: a token that the tokens before it do not merge to.
    """
    found = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [bytes([value]) for value in token]
        while len(parts) > 2:
            joined = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            best = min(range(len(joined)), key=joined.__getitem__)
            if joined[best] >= rank:
                raise InteropError(f"token {rank} {token!r} does not come of merges of the tokens before it")
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        found.append((parts[0], parts[1]))
    return found
