"""Rows of a JSON-lines file, plain or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmlab.data.sources.jsonl import ManifestConfig


class Rows(NamedTuple):
    """Rows in the order of the file, so that a row's place is its id, and the file's fingerprint."""

    rows: list[dict[str, Any]]
    fingerprint: str


def read_rows(path: str, fields: Sequence[str], cache: Path, *, texts: Sequence[str] = ()) -> Rows:
    """All rows of the file.

    Args:
        path: the file.
        fields: what every row must have.
        cache: folder for what can be computed again.
        texts: what every row must have as text.

    Raises:
        ValueError: a row that cannot be read or lacks a field, or no row at all.
    """
    source = ManifestConfig(path, path_fields=()).build(cache)
    rows = []
    for index in range(len(source)):
        row = source[index]
        for field in (*fields, *texts):
            if field not in row:
                raise ValueError(f"{source.name(index)} has no {field!r}; its fields are {', '.join(row)}")
        for field in texts:
            if not isinstance(row[field], str):
                kind = type(row[field]).__name__
                raise ValueError(f"{source.name(index)}: {field!r} must be text, got {kind}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no row")
    return Rows(rows, source.fingerprint())
