"""Random access to the lines of JSON-lines files."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.data.compressed import unpacked
from mmlab.data.files import file_sha256, fresh_file
from mmlab.data.sources.base import BadSampleError


class Lines:
    """The non-blank lines of files, by an index of their places made in one reading.

    `files` may be compressed (see `mmlab.data.compressed`): hashes and places are those of the content.
    """

    def __init__(self, files: list[Path], cache: Path | None) -> None:
        self.files, self.cache = files, cache
        self._plain = [unpacked(file, cache) for file in files]
        self.spans = [_line_spans(file, cache) for file in self._plain]
        self.first = np.concatenate([[0], np.cumsum([len(spans) for spans in self.spans])])

    def __len__(self) -> int:
        return int(self.first[-1])

    def row(self, index: int) -> dict[str, Any]:
        """The object on line `index`; BadSampleError if the line holds none."""
        number, start, stop = self.place(index)
        with self._plain[number].open("rb") as file:
            file.seek(start)
            line = file.read(stop - start)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadSampleError(f"{self.name(index)}: {error}") from error
        if not isinstance(row, dict):
            raise BadSampleError(f"{self.name(index)}: an object was expected, not {type(row).__name__}")
        return row

    def text(self, row: dict[str, Any], field: str, index: int) -> str:
        """The text in `field` of `row`, which is line `index`; BadSampleError if there is none."""
        value = row.get(field)
        if not isinstance(value, str):
            found = f"field {field!r} is {type(value).__name__}" if field in row else f"fields {list(row)}"
            raise BadSampleError(f"{self.name(index)}: no text in {field!r}: {found}")
        return value

    def place(self, index: int) -> tuple[int, int, int]:
        """File number, first byte and last byte + 1 of line `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self.first, index, side="right")) - 1
        start, stop = self.spans[number][index - int(self.first[number])].tolist()
        return number, start, stop

    def name(self, index: int) -> str:
        """File and place of line `index`, for messages."""
        number, start, _ = self.place(index)
        return f"{self.files[number]} row {index - int(self.first[number])} (at byte {start})"

    def hashes(self) -> list[str]:
        """SHA-256 of the content of each file, the same whether it is compressed or not."""
        return [file_sha256(file, self.cache) for file in self._plain]


def _line_spans(path: Path, cache: Path | None) -> NDArray[np.int64]:
    """First byte and last byte + 1 of every non-blank line, kept under `cache` by the file's content."""
    if cache is None:
        return _scan(path)
    index = cache / "lines" / f"{file_sha256(path, cache)[:32]}.npy"
    if not index.is_file():
        with fresh_file(index) as temporary:
            np.save(temporary, _scan(path))
    spans: NDArray[np.int64] = np.load(index)
    return spans


def _scan(path: Path) -> NDArray[np.int64]:
    spans, start = array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                spans.extend((start, start + len(line)))
            start += len(line)
    return np.array(spans, np.int64).reshape(-1, 2)
