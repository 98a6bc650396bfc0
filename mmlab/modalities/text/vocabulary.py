"""Vocabularies: strings to token ids and back."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmlab.modalities.base import EncodingError, ModalityConfig

Ids = npt.NDArray[np.int32]


class Vocabulary(ABC):
    """Strings to ids and back.

    Ids below `ordinary` are what text gives; special ids lie above them and are put in by code only, so text
    that spells the name of a special token is ordinary text.

    Attributes:
        ordinary: number of ids that text can give.
        specials: names of the special tokens, in the order of their ids.
        byte_lengths: for each id the UTF-8 bytes it stands for, int64 (size,); 0 for specials.
    """

    specials: tuple[str, ...] = ("<|end|>",)
    ordinary: int
    byte_lengths: npt.NDArray[np.int64]

    @property
    def size(self) -> int:
        """Number of ids, specials included."""
        return self.ordinary + len(self.specials)

    @property
    def end(self) -> int:
        """Id that ends a document."""
        return self.ordinary + self.specials.index("<|end|>")

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Ids of `text`, int32, never a special one; EncodingError for what has no id."""

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer], *, skip_special: bool = False) -> str:
        """Text of `ids`; specials give their name, or nothing if skipped. ValueError names a bad id."""
        values = np.asarray(ids, dtype=np.int64).reshape(-1)
        bad = np.flatnonzero((values < 0) | (values >= self.size))
        if bad.size:
            raise ValueError(
                f"id {values[bad[0]]} at position {bad[0]} is not in the vocabulary of {self.size} ids"
            )
        if skip_special:
            values = values[values < self.ordinary]
        parts, start = [], 0
        for stop in [*np.flatnonzero(values >= self.ordinary).tolist(), len(values)]:
            parts.append(self._decode_ordinary(values[start:stop]))
            if stop < len(values):
                parts.append(self.specials[int(values[stop]) - self.ordinary])
            start = stop + 1
        return "".join(parts)

    @abstractmethod
    def _decode_ordinary(self, ids: npt.NDArray[np.int64]) -> str: ...

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides which ids a text gets."""
        parts = [type(self).__name__, *self.specials, self._content()]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    @abstractmethod
    def _content(self) -> str: ...


class ByteVocabulary(Vocabulary):
    """One id for each byte of UTF-8."""

    def __init__(self) -> None:
        self.ordinary = 256
        self.byte_lengths = np.array([1] * 256 + [0] * len(self.specials), dtype=np.int64)

    def encode(self, text: str) -> Ids:
        try:
            return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)
        except UnicodeEncodeError as error:
            raise EncodingError(
                f"character {text[error.start]!a} at position {error.start} has no UTF-8 form"
            ) from None

    def _decode_ordinary(self, ids: npt.NDArray[np.int64]) -> str:
        """Bytes that are no valid UTF-8 (a cut-off character) become U+FFFD."""
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def _content(self) -> str:
        return "utf-8"


class CharacterVocabulary(Vocabulary):
    """One id for each of the given characters, in their order."""

    def __init__(self, characters: str) -> None:
        codes = _codes(characters)
        order = np.argsort(codes, kind="stable")
        self._sorted, self._rank = codes[order], order.astype(np.int32)
        repeated = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        if repeated.size:
            raise ValueError(f"character {chr(self._sorted[repeated[0]])!a} is given twice")
        self.characters = characters
        self.ordinary = len(characters)
        self._codes = codes
        widths = [len(character.encode("utf-8")) for character in characters]
        self.byte_lengths = np.array(widths + [0] * len(self.specials), dtype=np.int64)

    def encode(self, text: str) -> Ids:
        codes = _codes(text)
        if not self.ordinary and len(codes):
            raise EncodingError(f"character {text[0]!a} at position 0 is not in an empty vocabulary")
        index = np.searchsorted(self._sorted, codes).clip(max=max(self.ordinary - 1, 0))
        unknown = np.flatnonzero(self._sorted[index] != codes) if len(codes) else index
        if unknown.size:
            at = int(unknown[0])
            raise EncodingError(
                f"character {text[at]!a} at position {at} is not among the vocabulary's {self.ordinary}"
            )
        return self._rank[index]

    def _decode_ordinary(self, ids: npt.NDArray[np.int64]) -> str:
        return self._codes[ids].astype("<u4").tobytes().decode("utf-32-le")

    def _content(self) -> str:
        return self.characters


def _codes(text: str) -> npt.NDArray[np.uint32]:
    """Code points of `text`."""
    try:
        return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    except UnicodeEncodeError as error:
        raise EncodingError(
            f"character {text[error.start]!a} at position {error.start} has no UTF-8 form"
        ) from None


@dataclass(frozen=True)
class TextModalityConfig(ModalityConfig):
    """A vocabulary."""

    @abstractmethod
    def build(self) -> Vocabulary: ...


@dataclass(frozen=True)
class BytesConfig(TextModalityConfig):
    """The 256 bytes of UTF-8; takes any text."""

    def build(self) -> Vocabulary:
        return ByteVocabulary()


@dataclass(frozen=True)
class CharactersConfig(TextModalityConfig):
    """The given characters, each once; `from_text` collects them."""

    characters: str

    def __post_init__(self) -> None:
        if not self.characters:
            raise ValueError("characters must name at least one character")
        if len(set(self.characters)) != len(self.characters):
            twice = next(c for i, c in enumerate(self.characters) if c in self.characters[:i])
            raise ValueError(f"characters names {twice!a} twice")

    @classmethod
    def from_text(cls, text: str) -> CharactersConfig:
        """The characters that occur in `text`, in code point order."""
        return cls("".join(map(chr, np.unique(_codes(text)).tolist())))

    def build(self) -> Vocabulary:
        return CharacterVocabulary(self.characters)
