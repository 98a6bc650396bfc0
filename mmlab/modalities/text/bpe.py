"""Byte-pair vocabularies, stored as tiktoken ranks: one token a line, base64 and its rank."""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from mmlab.modalities.base import EncodingError
from mmlab.modalities.text.chat import END
from mmlab.modalities.text.vocabulary import Ids, TextModalityConfig, Vocabulary, number_specials, utf8

# How text is cut before its pieces are merged. Each gives the pieces of the vocabulary that it is named for,
# but is written so that runs of a million spaces or line breaks need no stack of that depth, and so that the
# engines of tiktoken, of `tokenizers` and of `regex` read it alike (`$` and `{1,3}+` they do not).
_BREAKS = r"[^\S\r\n]*[\r\n]+(?:[^\S\r\n]+[\r\n]+)*"
_SPACES = r"\s(?:\s(?=\s))++|\s"
_LETTER, _UPPER, _LOWER = (
    r"[^\r\n\p{L}\p{N}]?",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS: Mapping[str, str] = {
    "gpt2": rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}++| ?\p{{N}}++| ?[^\s\p{{L}}\p{{N}}]++|\s++\z|{_SPACES}",
    "cl100k": rf"'(?i:[sdmt]|ll|ve|re)|{_LETTER}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    rf"\s++\z|{_BREAKS}|{_SPACES}",
    "o200k": rf"{_LETTER}{_UPPER}*{_LOWER}+{_ENDINGS}|{_LETTER}{_UPPER}+{_LOWER}*{_ENDINGS}|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}|\s++\z|{_SPACES}",
}

Name = Literal["gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base"]


@dataclass(frozen=True)
class _Named:
    pattern: str
    sha256: str  # of the ranks file, unpacked
    size: int
    specials: Mapping[str, int]


_R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
_FIRST_FIM, _END_OF_TEXT = 100258, "<|endoftext|>"
NAMED: Mapping[str, _Named] = {
    "gpt2": _Named("gpt2", _R50K_SHA256, 50257, {_END_OF_TEXT: 50256}),
    "r50k_base": _Named("gpt2", _R50K_SHA256, 50257, {_END_OF_TEXT: 50256}),
    "p50k_base": _Named(
        "gpt2",
        "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
        50281,
        {_END_OF_TEXT: 50256},
    ),
    "cl100k_base": _Named(
        "cl100k",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        100277,
        {
            _END_OF_TEXT: 100257,
            **number_specials(["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"], _FIRST_FIM),
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": _Named(
        "o200k",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        200019,
        {_END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
    ),
}


class BytePairVocabulary(Vocabulary):
    """Pieces of text that `pattern` cuts, each merged from its bytes in the order of the ranks.

    Args:
        ranks: token -> id; merges happen in the order of the ids, and all 256 bytes are among them.
        pattern: a name of PATTERNS, or a regular expression whose matches make up the whole text.
        specials: name -> id.
        end: name of the special token that ends documents.
    """

    def __init__(
        self, ranks: Mapping[bytes, int], pattern: str, specials: Mapping[str, int], end: str
    ) -> None:
        import tiktoken

        lengths = np.zeros(max(ranks.values(), default=-1) + 1, dtype=np.int64)
        self._tokens = [b""] * len(lengths)
        for token, rank in ranks.items():
            lengths[rank] = len(token)
            self._tokens[rank] = token
        super().__init__(lengths, specials, specials[end])
        self.pattern = pattern
        # Without special tokens of its own the library cannot make one from text.
        self._encoding = tiktoken.Encoding(
            "mmlab",
            pat_str=PATTERNS.get(pattern, pattern),
            mergeable_ranks=dict(ranks),
            special_tokens={},
        )

    @property
    def ranks(self) -> dict[bytes, int]:
        """token -> id, without the specials."""
        return {token: rank for rank, token in enumerate(self._tokens) if token}

    def encode(self, text: str) -> Ids:
        raw = utf8(text)
        try:
            ids = np.array(self._encoding.encode_ordinary(text), dtype=np.int32)
        except BaseException as error:
            # A panic of native code is no Exception, and would end the whole run.
            if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
                raise EncodingError(f"tiktoken cannot encode {len(text)} characters: {error}") from error
            raise
        covered = int(self.byte_lengths[ids].sum())
        if covered != len(raw):
            raise EncodingError(
                f"pattern {self.pattern!r} matches only {covered} of the text's {len(raw)} bytes"
            )
        return ids

    def _bytes(self, ids: npt.NDArray[np.int64]) -> bytes:
        return b"".join([self._tokens[index] for index in ids.tolist()])

    def _content(self) -> str:
        digest = hashlib.sha256(write_ranks(self.ranks)).hexdigest()
        return f"{digest} {self.specials} {self.end} {PATTERNS.get(self.pattern, self.pattern)}"


@dataclass(frozen=True)
class BPEConfig(TextModalityConfig):
    """A byte-pair vocabulary from a ranks file, as `mmlab prepare preparation=vocabulary` writes it.

    `path` ends in `.tiktoken` or `.tiktoken.gz`; `pattern` is what it was trained with: gpt2, cl100k, o200k
    or a regular expression. `<|end|>` and `specials` get the ids above the ranks. `sha256`, if given, is
    that of the unpacked file. Where the file lies is no part of what a run is; the fingerprint covers it.
    With `num_ids`, which the file must then have, specials included, a network can be described without it.
    """

    path: str = field(metadata={"how": True})
    pattern: str = "gpt2"
    specials: tuple[str, ...] = ()
    sha256: str | None = None
    num_ids: int | None = None

    def __post_init__(self) -> None:
        if not self.path.endswith((".tiktoken", ".tiktoken.gz")):
            raise ValueError(f"path must end in .tiktoken or .tiktoken.gz, got {self.path!r}")
        check_pattern(self.pattern)
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 must be 64 hexadecimal digits, got {self.sha256!r}")

    def build(self) -> Vocabulary:
        """The vocabulary; FileNotFoundError or ValueError names the file that is absent or broken."""
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"no vocabulary at {path} (from {Path.cwd()})")
        ranks = read_ranks(path, self.sha256)
        names = [END, *self.chat_specials, *self.specials]
        specials = number_specials(names, max(ranks.values()) + 1)
        vocabulary = BytePairVocabulary(ranks, self.pattern, specials, END)
        if self.num_ids not in (None, vocabulary.size):
            raise ValueError(f"{path} and specials make {vocabulary.size} ids, num_ids is {self.num_ids}")
        return vocabulary

    def size(self) -> int:
        return self.build().size if self.num_ids is None else self.num_ids


@dataclass(frozen=True)
class NamedBPEConfig(TextModalityConfig):
    """A published byte-pair vocabulary, from the file `NAME.tiktoken` or `NAME.tiktoken.gz` in `folder`.

    `folder` is `vocabularies` in $MMLAB_CACHE (else .cache/mmlab) unless given. `<|endoftext|>` ends
    documents; `specials` are further names, above all ids that the vocabulary has.
    """

    name: Name
    folder: str | None = field(default=None, metadata={"how": True})
    specials: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Where the unpacked file is expected."""
        folder = Path(self.folder).expanduser() if self.folder is not None else vocabulary_folder()
        return folder / f"{self.name}.tiktoken"

    def size(self) -> int:
        """Number of ids; does not need the file."""
        known = NAMED[self.name]
        return known.size + len(set(self.specials) - known.specials.keys())

    def build(self) -> Vocabulary:
        """The vocabulary; never asks the network.

        Raises:
            FileNotFoundError: names the file, its hash and the command that fetches it.
            ValueError: the file is not the published one.
        """
        known, path = NAMED[self.name], self.path
        packed = path.with_name(f"{path.name}.gz")
        if not path.is_file() and not packed.is_file():
            raise FileNotFoundError(
                f"vocabulary {self.name!r} is not on this machine: expected {path.absolute()} (or .gz), "
                f"with sha256 {known.sha256} unpacked; where there is a network, `mmlab prepare "
                f"preparation=named name={self.name}` fetches it"
            )
        ranks = read_ranks(path if path.is_file() else packed, known.sha256)
        extra = number_specials([name for name in self.specials if name not in known.specials], known.size)
        specials = {**known.specials, **extra}
        missing = [name for name in self.chat_specials if name != END and name not in specials]
        if missing:
            raise ValueError(
                f"{self.name} has no token {missing[0]!r} for its chat template: name it in specials"
            )
        return BytePairVocabulary(ranks, known.pattern, specials, _END_OF_TEXT)


def vocabulary_folder() -> Path:
    """Folder of the named vocabularies: `vocabularies` in $MMLAB_CACHE, else in .cache/mmlab."""
    return Path(os.environ.get("MMLAB_CACHE") or ".cache/mmlab") / "vocabularies"


def check_pattern(pattern: str) -> None:
    """ValueError for a word that is no name of a pattern; any other text is a regular expression."""
    if re.fullmatch(r"[\w-]*", pattern) and pattern not in PATTERNS:
        raise ValueError(
            f"pattern must be one of {', '.join(PATTERNS)} or a regular expression, got {pattern!r}"
        )


def read_ranks(path: Path, sha256: str | None = None) -> dict[bytes, int]:
    """token -> rank of a ranks file; ValueError for another hash than `sha256`, or other content."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is no whole gzip file: {error}") from error
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise ValueError(f"{path} has sha256 {found} unpacked, expected {sha256}")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if line:
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise ValueError(f"{path} line {number} is not `base64 rank`: {line[:60]!r}") from error
    lines = sum(bool(line) for line in content.splitlines())
    if len(ranks) != lines or len(set(ranks.values())) != lines or min(ranks.values(), default=0) < 0:
        raise ValueError(f"{path}: the same token or the same rank stands on two of its {lines} lines")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ValueError(
            f"{path} has no token for {len(missing)} of the 256 bytes, the first is {missing[0]}"
        )
    return ranks


def write_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """Content of a ranks file, in the order of the ranks."""
    rows = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in rows)
