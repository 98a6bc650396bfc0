"""Plain text files: one document a file, or one a paragraph."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmlab.data.files import combined_sha256, file_sha256, find_files
from mmlab.data.sources.base import BadSampleError, Source, SourceConfig

_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")


@dataclass(frozen=True)
class TextFilesConfig(SourceConfig):
    """UTF-8 text files. `paths` are files or globs (`**` descends); `split` says what a document is."""

    paths: tuple[str, ...]
    split: Literal["file", "blank_lines"] = "file"

    def build(self, cache: Path | None = None) -> TextFiles:
        """The documents of all files."""
        return TextFiles(find_files(self.paths, "paths of text_files"), self.split, cache)


class TextFiles(Source):
    """{"text": str} for each document, exactly as it stands in its file."""

    def __init__(self, files: list[Path], split: str, cache: Path | None = None) -> None:
        self._files, self._split, self._cache = files, split, cache
        spans = [
            (number, start, stop)
            for number, file in enumerate(files)
            for start, stop in ([(0, -1)] if split == "file" else _paragraphs(file))
        ]
        self._spans = np.array(spans, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, start, stop = self._spans[index].tolist()
        with self._files[number].open("rb") as file:
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
        """Changes with the names, order and content of the files and with how they are split."""
        return combined_sha256(
            "text-files",
            self._split,
            *(part for file in self._files for part in (file.name, file_sha256(file, self._cache))),
        )


def _paragraphs(path: Path) -> list[tuple[int, int]]:
    """Byte ranges between blank lines, those of nothing but white space left out."""
    if not path.stat().st_size:
        return []
    spans = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = 0
        for match in _BLANK_LINES.finditer(content):
            spans.append((start, match.start()))
            start = match.end()
        spans.append((start, len(content)))
        return [(low, high) for low, high in spans if content[low:high].strip()]
