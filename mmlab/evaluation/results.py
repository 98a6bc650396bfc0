"""Results as files: `metrics.json` and `items.jsonl` in one folder that is whole or absent."""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmlab.evaluation.base import Result

METRICS = "metrics.json"
ITEMS = "items.jsonl"


def write_results(folder: Path, result: Result, about: Mapping[str, Any]) -> None:
    """Writes `folder`, replacing an older one.

    Args:
        folder: where the results go.
        result: metrics, counts and fingerprint go to metrics.json, items to items.jsonl, one a line. A
            number that JSON cannot hold is written as text.
        about: what else stands in metrics.json, plain types: the model, the evaluation, the code.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (folder.with_name(f".{folder.name}-{uuid.uuid4().hex}") for _ in range(2))
    fresh.mkdir()
    try:
        text = _text(
            {**about, "data": result.data, "metrics": result.metrics, "counts": result.counts}, indent=2
        )
        (fresh / METRICS).write_bytes(text)
        with (fresh / ITEMS).open("wb") as file:
            file.writelines(_text(item) for item in result.items)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    finally:
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)


def read_metrics(folder: Path) -> dict[str, Any] | None:
    """What metrics.json in `folder` holds, or None where there is none."""
    path = folder / METRICS
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else None


def _plain(value: Any) -> Any:
    """`value` with numbers that JSON cannot hold as text."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any, indent: int | None = None) -> bytes:
    """One JSON value and a line break; half of a surrogate pair, which UTF-8 cannot hold, is an escape."""
    text = json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8", "backslashreplace")
