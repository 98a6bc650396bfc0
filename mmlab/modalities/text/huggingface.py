"""Vocabularies of Hugging Face folders: tokenizer.json, or vocab.json with merges.txt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from mmlab.modalities.base import EncodingError
from mmlab.modalities.text.bpe import PATTERNS
from mmlab.modalities.text.bpe_training import byte_symbols
from mmlab.modalities.text.chat import END
from mmlab.modalities.text.vocabulary import Ids, TextModalityConfig, Vocabulary, utf8

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", END)
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class HuggingFaceVocabulary(Vocabulary):
    """A byte-level or Metaspace tokenizer of the library `tokenizers`.

    Where a tokenizer normalizes text (Unicode forms, a space put in front), `byte_lengths` are those of the
    normalized text.

    Args:
        tokenizer: decides the ids of text; special tokens in text are not looked for.
        specials: name -> id.
        end: name of the special token that ends documents.
        size: number of ids, where an output layer has more than the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, specials: dict[str, int], end: str, size: int = 0) -> None:
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        plain = json.loads(tokenizer.to_str())
        self._tokens = _token_bytes(plain, tokenizer, set(specials.values()))
        self.strips_space = _strips_space(plain["decoder"])
        # A byte without a token of its own (a vocabulary may lack bytes its texts did not have) would vanish.
        single = {token[0] for token in self._tokens if len(token) == 1}
        self._absent = frozenset(range(256)) - single if _is_byte_level(plain) else frozenset()
        super().__init__([len(token) for token in self._tokens], specials, specials[end], size)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True  # which a pickled tokenizer forgets

    def encode(self, text: str) -> Ids:
        raw = utf8(text)
        absent = self._absent.intersection(raw) if self._absent else ()
        if absent:
            raise EncodingError(f"the byte {min(absent):#04x} in the text has no token")
        try:
            ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        except BaseException as error:
            # A panic of native code is no Exception, and would end the whole run.
            if type(error) is Exception or type(error).__name__ == "PanicException":
                raise EncodingError(f"tokenizers cannot encode {len(text)} characters: {error}") from error
            raise
        unknown = np.flatnonzero(self.byte_lengths[ids] == 0)
        if unknown.size:
            name = self._tokenizer.id_to_token(int(ids[unknown[0]]))
            raise EncodingError(f"a part of the text has no id: {name!r} stands for it at token {unknown[0]}")
        return ids

    def _bytes(self, ids: npt.NDArray[np.int64]) -> bytes:
        return b"".join([self._tokens[index] for index in ids.tolist()])

    def _content(self) -> str:
        digest = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        return f"{digest} {self.specials} {self.end} {self.size}"


@dataclass(frozen=True)
class HuggingFaceConfig(TextModalityConfig):
    """The tokenizer of a Hugging Face folder.

    `path` holds tokenizer.json, or else vocab.json and merges.txt of a byte-level vocabulary; these do not
    say how text is cut, so `pattern` does: `gpt2`, or `smollm` (each digit by itself, the rest like gpt2).
    What ends documents is the end-of-sequence token that the folder's configuration names, else
    `<|endoftext|>`, `</s>` or the like; the size is at least the `vocab_size` of config.json. With `num_ids`,
    which it must then be, a network can be described without the folder.
    """

    path: str = field(metadata={"how": True})
    pattern: Literal["gpt2", "smollm"] = "gpt2"
    num_ids: int | None = None

    def size(self) -> int:
        return self.build().size if self.num_ids is None else self.num_ids

    def build(self) -> Vocabulary:
        """The vocabulary; FileNotFoundError or ValueError names what the folder lacks."""
        folder = Path(self.path).expanduser()
        if (folder / "tokenizer.json").is_file():
            tokenizer, specials = _from_json(folder / "tokenizer.json")
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            tokenizer, specials = _from_merges(folder, self.pattern)
        else:
            raise FileNotFoundError(
                f"{folder.absolute()} holds neither tokenizer.json nor vocab.json with merges.txt"
            )
        missing = [name for name in self.chat_specials if name != END and name not in specials]
        if missing:
            raise ValueError(f"{folder} has no special token {missing[0]!r}, which the chat template needs")
        size = _read(folder / "config.json").get("vocab_size", 0)
        vocabulary = HuggingFaceVocabulary(tokenizer, specials, _end(folder, specials), size)
        if self.num_ids not in (None, vocabulary.size):
            raise ValueError(f"{folder} has {vocabulary.size} ids, num_ids is {self.num_ids}")
        return vocabulary


def _from_json(path: Path) -> tuple[Tokenizer, dict[str, int]]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ValueError(f"{path} is no tokenizer that `tokenizers` reads: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    return tokenizer, {token.content: index for index, token in sorted(added.items()) if token.special}


def _from_merges(folder: Path, pattern: str) -> tuple[Tokenizer, dict[str, int]]:
    """Special are the tokens that are neither a byte nor made by a merge."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [
        (left, right)
        for left, _, right in (
            line.partition(" ") for line in lines if line and not line.startswith("#version")
        )
    ]
    made = {token for left, right in merges for token in (left, right, left + right)}
    lost = [token for token in made if token not in vocabulary]
    if lost:
        raise ValueError(f"{folder}: {len(lost)} tokens of merges.txt are not in vocab.json, as {lost[0]!r}")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:
        raise ValueError(f"{folder}: vocab.json and merges.txt do not fit: {error}") from error
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pattern == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *digits,
            pre_tokenizers.Split(Regex(PATTERNS["gpt2"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    plain = made | set(byte_symbols())
    specials = {
        token: index for token, index in sorted(vocabulary.items(), key=_second) if token not in plain
    }
    return tokenizer, specials


def _second(pair: tuple[str, int]) -> int:
    return pair[1]


def _end(folder: Path, specials: dict[str, int]) -> str:
    """Name of the token that ends a sequence."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        named = _read(folder / file).get("eos_token")
        name = named.get("content") if isinstance(named, dict) else named
        if name in specials:
            return str(name)
    index = _read(folder / "config.json").get("eos_token_id")
    ids = index if isinstance(index, list) else [index]
    known = {value: name for name, value in specials.items()}
    found = [known[value] for value in ids if value in known] or [name for name in _ENDS if name in specials]
    if not found:
        raise ValueError(
            f"{folder}: no end-of-sequence token among the special tokens {list(specials)[:20]}; "
            "tokenizer_config.json can name one as eos_token"
        )
    return found[0]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _parts(node: dict[str, Any] | None, key: str) -> Iterable[dict[str, Any]]:
    """A pipeline's steps, or the single one."""
    if node is None:
        return []
    return node[key] if node["type"] == "Sequence" else [node]


def _is_byte_level(plain: dict[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _parts(plain["decoder"], "decoders"))


def _strips_space(decoder: dict[str, Any] | None) -> bool:
    return any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] == 1)
        or (step["type"] == "Metaspace" and step["prepend_scheme"] != "never")
        for step in _parts(decoder, "decoders")
    )


def _token_bytes(plain: dict[str, Any], tokenizer: Tokenizer, specials: set[int]) -> list[bytes]:
    """UTF-8 of every id from 0 on; empty for specials and gaps."""
    kinds = {step["type"] for step in _parts(plain["decoder"], "decoders")}
    if not kinds & {"ByteLevel", "Metaspace", "ByteFallback"}:
        raise ValueError(
            "the tokenizer's decoder is neither byte-level nor Metaspace or byte fallback, but "
            f"{sorted(kinds) or 'absent'}: what a token stands for cannot be told"
        )
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    tokens = [b""] * (max(vocabulary.values()) + 1)
    symbols = byte_symbols() if "ByteLevel" in kinds else {}
    fallback = bool(plain["model"].get("byte_fallback"))
    for token, index in vocabulary.items():
        match = _FALLBACK.fullmatch(token) if fallback else None
        if index in specials:
            continue
        if index in added:
            tokens[index] = token.encode()
        elif match is not None:
            tokens[index] = bytes([int(match.group(1), 16)])
        elif symbols and all(character in symbols for character in token):
            tokens[index] = bytes(symbols[character] for character in token)
        elif symbols:
            tokens[index] = token.encode()
        else:
            tokens[index] = token.replace("▁", " ").encode()
    return tokens
