"""Vocabularies: strings to token ids and back."""

from __future__ import annotations

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmlab.modalities.base import EncodingError, ModalityConfig
from mmlab.modalities.text.chat import END, ChatTemplate

Ids = npt.NDArray[np.int32]

_GAP, _TEXT, _SPECIAL = 0, 1, 2


class Vocabulary(ABC):
    """Strings to ids and back.

    An id stands for bytes of text, or is special (put in by code only, so text that spells its name is
    ordinary text), or is a gap that stands for nothing.

    Args:
        lengths: UTF-8 bytes that each id stands for, from id 0 on; 0 for specials and gaps.
        specials: name -> id of the special tokens, anywhere.
        end: id that ends (and parts) documents.
        size: number of ids where it is more than tokens need, as with a padded output layer.

    Attributes:
        specials: name -> id of the special tokens.
        size: number of ids, specials and gaps included.
        byte_lengths: for each id the UTF-8 bytes it stands for, int64 (size,); 0 for specials and gaps.
        end: id that ends (and parts) documents.
    """

    strips_space = False
    """Whether decoding leaves out one space at the very beginning, because encoding put one there."""

    def __init__(
        self, lengths: npt.ArrayLike, specials: Mapping[str, int], end: int, size: int | None = None
    ) -> None:
        lengths = np.asarray(lengths, dtype=np.int64)
        self.specials = dict(specials)
        self.size = max(len(lengths), max(self.specials.values(), default=-1) + 1, size or 0)
        self.byte_lengths = np.zeros(self.size, dtype=np.int64)
        self.byte_lengths[: len(lengths)] = lengths
        self._names = {index: name for name, index in self.specials.items()}
        self._kinds = np.where(self.byte_lengths > 0, _TEXT, _GAP).astype(np.int8)
        for index, name in self._names.items():
            if self._kinds[index] == _TEXT:
                raise ValueError(f"id {index} is both text and the special token {name!r}")
        self._kinds[list(self._names)] = _SPECIAL
        if end not in self._names:
            raise ValueError(f"id {end} ends documents, but is not special; specials are {self.specials}")
        self.end = end

    @property
    def gaps(self) -> npt.NDArray[np.int64]:
        """Ids that stand for nothing, ascending: a model must not choose them."""
        return np.flatnonzero(self._kinds == _GAP)

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Ids of `text`, int32, never a special one; EncodingError for what has no id."""

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer], *, skip_special: bool = False) -> str:
        """Text of `ids`; specials give their name, or nothing if skipped. ValueError names a bad id.

        Bytes that are no valid UTF-8 (a cut-off character) become U+FFFD.
        """
        values = np.asarray(ids, dtype=np.int64).reshape(-1)
        self._check(values)
        special = self._kinds[values] == _SPECIAL
        if skip_special:
            values, special = values[~special], np.zeros(int((~special).sum()), dtype=np.bool_)
        parts, start = [], 0
        for stop in [*np.flatnonzero(special).tolist(), len(values)]:
            raw = self._bytes(values[start:stop])
            if self.strips_space and start == 0:
                raw = raw.removeprefix(b" ")
            parts.append(raw.decode("utf-8", errors="replace"))
            if stop < len(values):
                parts.append(self._names[int(values[stop])])
            start = stop + 1
        return "".join(parts)

    def stream(self, *, skip_special: bool = False, continues: bool = False) -> TextStream:
        """Decodes ids one after the other, to the same text as `decode` of all of them.

        Args:
            skip_special: specials give nothing instead of their name.
            continues: the ids go on after others, so no space is left out at the beginning.
        """
        return TextStream(self, skip_special, continues)

    def _check(self, values: npt.NDArray[np.int64], first: int = 0) -> None:
        outside = (values < 0) | (values >= self.size)
        bad = np.flatnonzero(outside | (self._kinds[np.where(outside, 0, values)] == _GAP))
        if bad.size:
            at = int(bad[0])
            what = "not in" if outside[at] else "a gap in"
            raise ValueError(
                f"id {values[at]} at position {first + at} is {what} the vocabulary of {self.size} ids"
            )

    @abstractmethod
    def _bytes(self, ids: npt.NDArray[np.int64]) -> bytes:
        """UTF-8 of ids that stand for text."""

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides which ids a text gets."""
        parts = [type(self).__name__, *self.specials, self._content()]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    @abstractmethod
    def _content(self) -> str:
        """What the ids follow from, besides the names of the specials."""


class TextStream:
    """Text of ids that come one by one, in whole characters; made by `Vocabulary.stream`."""

    def __init__(self, vocabulary: Vocabulary, skip_special: bool, continues: bool) -> None:
        self._vocabulary, self._skip = vocabulary, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = vocabulary.strips_space and not continues
        self._count = 0

    def push(self, id: int) -> str:
        """Text that `id` completes; empty while a character is incomplete. ValueError names a bad id."""
        values = np.array([id], dtype=np.int64)
        self._vocabulary._check(values, self._count)
        self._count += 1
        name = self._vocabulary._names.get(int(id))
        if name is None:
            raw = self._vocabulary._bytes(values)
            if self._strip:
                raw = raw.removeprefix(b" ")
            self._strip = False
            return self._decoder.decode(raw)
        if self._skip:
            return ""
        self._strip = False
        return self.finish() + name

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was cut off, else nothing."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class ByteVocabulary(Vocabulary):
    """One id for each byte of UTF-8."""

    def __init__(self, specials: Sequence[str] = ()) -> None:
        numbered = number_specials([END, *specials], 256)
        super().__init__([1] * 256, numbered, numbered[END])

    def encode(self, text: str) -> Ids:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.int32)

    def _bytes(self, ids: npt.NDArray[np.int64]) -> bytes:
        return ids.astype(np.uint8).tobytes()

    def _content(self) -> str:
        return "utf-8"


class CharacterVocabulary(Vocabulary):
    """One id for each of the given characters, in their order."""

    def __init__(self, characters: str, specials: Sequence[str] = ()) -> None:
        codes = _codes(characters)
        order = np.argsort(codes, kind="stable")
        self._sorted, self._rank = codes[order], order.astype(np.int32)
        repeated = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        if repeated.size:
            raise ValueError(f"character {chr(self._sorted[repeated[0]])!a} is given twice")
        self.characters = characters
        self._codes = codes
        numbered = number_specials([END, *specials], len(characters))
        super().__init__([len(character.encode()) for character in characters], numbered, numbered[END])

    def encode(self, text: str) -> Ids:
        codes, count = _codes(text), len(self.characters)
        if not count and len(codes):
            raise EncodingError(f"character {text[0]!a} at position 0 is not in an empty vocabulary")
        index = np.searchsorted(self._sorted, codes).clip(max=max(count - 1, 0))
        unknown = np.flatnonzero(self._sorted[index] != codes) if len(codes) else index
        if unknown.size:
            at = int(unknown[0])
            raise EncodingError(
                f"character {text[at]!a} at position {at} is not among the vocabulary's {count}"
            )
        return self._rank[index]

    def _bytes(self, ids: npt.NDArray[np.int64]) -> bytes:
        return self._codes[ids].astype("<u4").tobytes().decode("utf-32-le").encode()

    def _content(self) -> str:
        return self.characters


def utf8(text: str) -> bytes:
    """UTF-8 of `text`; EncodingError names a lone surrogate, which has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise EncodingError(
            f"character {text[error.start]!a} at position {error.start} has no UTF-8 form"
        ) from None


def number_specials(names: Iterable[str], first: int) -> dict[str, int]:
    """name -> id from `first` on, in the order given; a name that comes again is left out."""
    return {name: first + index for index, name in enumerate(dict.fromkeys(names))}


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
    """A vocabulary, and how conversations are written in it.

    `chat` adds its special tokens to vocabularies of our own; any other must have them.
    """

    chat: ChatTemplate | None = field(default=None, kw_only=True)

    @property
    def chat_specials(self) -> tuple[str, ...]:
        """Names of the special tokens that the chat template needs."""
        return self.chat.specials if self.chat is not None else ()

    @abstractmethod
    def build(self) -> Vocabulary: ...

    def size(self) -> int:
        """Number of ids, known without the vocabulary's file where that is possible."""
        return self.build().size


@dataclass(frozen=True)
class BytesConfig(TextModalityConfig):
    """The 256 bytes of UTF-8; takes any text."""

    def build(self) -> Vocabulary:
        return ByteVocabulary(self.chat_specials)


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
        return CharacterVocabulary(self.characters, self.chat_specials)
