"""JSON lines: text in one field, or rows that describe a sample and point to its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmlab.data.files import combined_sha256, file_sha256, find_files
from mmlab.data.lines import Lines
from mmlab.data.sources.base import BadSampleError, Source, SourceConfig

_HOW = {"how": True}


@dataclass(frozen=True)
class JsonlConfig(SourceConfig):
    """Documents from one `field` of JSON-lines files.

    `paths` are files or globs; `.gz`, `.bz2` and `.xz` are unpacked into the cache. Where files lie is no
    part of what a run is; the fingerprint covers what they hold, packed or not.
    """

    paths: tuple[str, ...] = field(metadata=_HOW)
    field: str = "text"

    def build(self, cache: Path | None = None) -> JsonLines:
        """The documents of all files."""
        return JsonLines(find_files(self.paths, "paths of jsonl"), self.field, cache)


@dataclass(frozen=True)
class ManifestConfig(SourceConfig):
    """Rows of a JSON-lines file; the values of `path_fields` are paths relative to the manifest's folder.

    The manifest may be compressed (`.gz`, `.bz2`, `.xz`). The fingerprint covers its content and that of the
    files that it names.
    """

    path: str = field(metadata=_HOW)
    path_fields: tuple[str, ...] = ("audio", "image")

    def build(self, cache: Path | None = None) -> Manifest:
        """The rows."""
        return Manifest(find_files([self.path], "path of manifest")[0], self.path_fields, cache)


class JsonLines(Source):
    """{"text": str} for each line."""

    def __init__(self, files: list[Path], field: str, cache: Path | None = None) -> None:
        self._lines, self._field = Lines(files, cache), field

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": self._lines.text(self._lines.row(index), self._field, index)}

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
        for name in self._fields:
            if name in row:
                if not isinstance(row[name], str):
                    raise BadSampleError(f"{self.name(index)}: {name!r} is no path: {row[name]!r}")
                row[name] = str(self._folder / row[name])
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
            for name in self._fields:
                path = Path(row[name]) if name in row else None
                known = path is not None and path.is_file()
                contents.append(file_sha256(path, self._lines.cache) if path and known else "")
        return combined_sha256("manifest", *self._fields, *self._lines.hashes(), *contents)
