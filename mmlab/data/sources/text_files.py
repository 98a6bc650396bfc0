"""Plain text files: one document a file, or one a paragraph."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmlab.data.compressed import unpacked
from mmlab.data.files import combined_sha256, file_sha256, find_files
from mmlab.data.sources.base import BadSampleError, Source, SourceConfig

_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")
_CHUNK = 1 << 24


@dataclass(frozen=True)
class TextFilesConfig(SourceConfig):
    """UTF-8 text files. `split` says what a document is.

    `paths` are files or globs (`**` descends); `.gz`, `.bz2` and `.xz` are unpacked into the cache. Where
    files lie is no part of what a run is; the fingerprint covers their names and what they hold.

    `span` is the part of each file that is read, as shares of its n characters: from character
    int(n * span[0]) to before int(n * span[1]). Spans that meet share no character and lose none.
    """

    paths: tuple[str, ...] = field(metadata={"how": True})
    split: Literal["file", "blank_lines"] = "file"
    span: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not 0 <= self.span[0] < self.span[1] <= 1:
            raise ValueError(f"span must be two rising shares in 0..1, got {list(self.span)}")

    def build(self, cache: Path | None = None) -> TextFiles:
        """The documents of all files."""
        return TextFiles(find_files(self.paths, "paths of text_files"), self.split, cache, self.span)


class TextFiles(Source):
    """{"text": str} for each document, exactly as it stands in its file."""

    def __init__(
        self, files: list[Path], split: str, cache: Path | None = None, span: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        self._files, self._split, self._cache, self._span = files, split, cache, span
        self._plain = [unpacked(file, cache) for file in files]
        spans = [
            (number, *document)
            for number, file in enumerate(self._plain)
            for document in _documents(file, split, span)
        ]
        self._spans = np.array(spans, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, start, stop = self._spans[index].tolist()
        with self._plain[number].open("rb") as file:
            file.seek(start)
            content = file.read(stop - start if stop >= 0 else -1)
        try:
            return {"text": content.decode("utf-8")}
        except UnicodeDecodeError as error:
            raise BadSampleError(f"{self._files[number]}: not UTF-8 at byte {start + error.start}") from error

    def name(self, index: int) -> str:
        """The file, with the byte that the document begins at."""
        number, start, _ = self._spans[index].tolist()
        return f"{self._files[number]} at byte {start}" if start else str(self._files[number])

    def fingerprint(self) -> str:
        """Changes with the names, order and content of the files and with how they are cut and split."""
        whole = self._span == (0.0, 1.0)
        return combined_sha256(
            "text-files",
            self._split,
            *([] if whole else [repr(self._span)]),
            *(part for file in self._plain for part in (file.name, file_sha256(file, self._cache))),
        )


def _documents(path: Path, split: str, span: tuple[float, float]) -> list[tuple[int, int]]:
    """First byte and last byte + 1 of each document; -1 stands for the end of the file."""
    whole = span == (0.0, 1.0)
    if split == "file" and whole:
        return [(0, -1)]
    start, stop = (0, path.stat().st_size) if whole else _bytes_of(path, span)
    if split == "file":
        return [(start, stop)] if start < stop else []
    return _paragraphs(path, start, stop)


def _bytes_of(path: Path, span: tuple[float, float]) -> tuple[int, int]:
    """The bytes between two shares of a file's characters."""
    count = sum(len(starts) for starts, _ in _characters(path))
    wanted = [int(count * share) for share in span]
    places = [path.stat().st_size, path.stat().st_size]
    seen = 0
    for starts, offset in _characters(path):
        for which, character in enumerate(wanted):
            if seen <= character < seen + len(starts):
                places[which] = offset + int(starts[character - seen])
        seen += len(starts)
    return places[0], places[1]


def _characters(path: Path) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Where in a chunk of the file characters begin, and where the chunk does."""
    offset = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            # The bytes that go on with a character are those of the form 10xxxxxx.
            yield np.flatnonzero((np.frombuffer(chunk, np.uint8) & 0xC0) != 0x80), offset
            offset += len(chunk)


def _paragraphs(path: Path, start: int, stop: int) -> list[tuple[int, int]]:
    """Byte ranges between blank lines in `start`..`stop`, those of nothing but white space left out."""
    if start >= stop:
        return []
    spans = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for match in _BLANK_LINES.finditer(content, start, stop):
            spans.append((start, match.start()))
            start = match.end()
        spans.append((start, stop))
        return [(low, high) for low, high in spans if content[low:high].strip()]
