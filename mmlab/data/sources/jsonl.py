"""JSON lines: text in one field, or rows that describe a sample and point to its files."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.data.files import combined_sha256, file_sha256, find_files, fresh_file
from mmlab.data.sources.base import BadSampleError, Source, SourceConfig


@dataclass(frozen=True)
class JsonlConfig(SourceConfig):
    """Documents from one `field` of JSON-lines files. `paths` are files or globs; they are not compressed."""

    paths: tuple[str, ...]
    field: str = "text"

    def build(self, cache: Path | None = None) -> JsonLines:
        """The documents of all files."""
        return JsonLines(find_files(self.paths, "paths of jsonl"), self.field, cache)


@dataclass(frozen=True)
class ManifestConfig(SourceConfig):
    """Rows of a JSON-lines file; the values of `path_fields` are paths relative to the manifest's folder.

    The fingerprint covers the manifest and the content of the files that it names.
    """

    path: str
    path_fields: tuple[str, ...] = ("audio", "image")

    def build(self, cache: Path | None = None) -> Manifest:
        """The rows."""
        return Manifest(find_files([self.path], "path of manifest")[0], self.path_fields, cache)


class Lines:
    """Random access to the non-blank lines of files, by an index of their places made in one reading."""

    def __init__(self, files: list[Path], cache: Path | None) -> None:
        for file in files:
            if file.suffix in (".gz", ".bz2", ".xz", ".zst", ".zip"):
                raise ValueError(f"{file} is compressed, which allows no random access: unpack it first")
        self.files, self.cache = files, cache
        self.spans = [_line_spans(file, cache) for file in files]
        self.first = np.concatenate([[0], np.cumsum([len(spans) for spans in self.spans])])

    def __len__(self) -> int:
        return int(self.first[-1])

    def row(self, index: int) -> dict[str, Any]:
        """The object on line `index`; BadSampleError if the line holds none."""
        number, start, stop = self.place(index)
        with self.files[number].open("rb") as file:
            file.seek(start)
            line = file.read(stop - start)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadSampleError(f"{self.name(index)}: {error}") from error
        if not isinstance(row, dict):
            raise BadSampleError(f"{self.name(index)}: an object was expected, not {type(row).__name__}")
        return row

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
        """SHA-256 of each file."""
        return [file_sha256(file, self.cache) for file in self.files]


class JsonLines(Source):
    """{"text": str} for each line."""

    def __init__(self, files: list[Path], field: str, cache: Path | None = None) -> None:
        self._lines, self._field = Lines(files, cache), field

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._lines.row(index)
        text = row.get(self._field)
        if not isinstance(text, str):
            found = (
                f"field {self._field!r} is {type(text).__name__}"
                if self._field in row
                else f"fields {list(row)}"
            )
            raise BadSampleError(f"{self.name(index)}: no text in {self._field!r}: {found}")
        return {"text": text}

    def name(self, index: int) -> str:
        """File, row and byte."""
        return self._lines.name(index)

    def fingerprint(self) -> str:
        """Changes with the files' content and order and with the field."""
        return combined_sha256("jsonl", self._field, *self._lines.hashes())


class Manifest(Source):
    """Each row as a dict, its paths made absolute."""

    def __init__(self, path: Path, path_fields: tuple[str, ...], cache: Path | None = None) -> None:
        self._lines, self._fields, self._folder = Lines([path], cache), path_fields, path.parent.absolute()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._lines.row(index)
        for field in self._fields:
            if field in row:
                if not isinstance(row[field], str):
                    raise BadSampleError(f"{self.name(index)}: {field!r} is no path: {row[field]!r}")
                row[field] = str(self._folder / row[field])
        return row

    def name(self, index: int) -> str:
        """File, row and byte."""
        return self._lines.name(index)

    def fingerprint(self) -> str:
        """Changes with the manifest and with the content of any file that it names."""
        contents = []
        for index in range(len(self)):
            try:
                row = self[index]
            except BadSampleError:
                continue
            for field in self._fields:
                path = Path(row[field]) if field in row else None
                known = path is not None and path.is_file()
                contents.append(file_sha256(path, self._lines.cache) if path and known else "")
        return combined_sha256("manifest", *self._fields, *self._lines.hashes(), *contents)


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
