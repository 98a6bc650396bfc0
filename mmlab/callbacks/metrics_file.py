"""A run's numbers as one CSV file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class MetricsFile(Logger):
    """Writes `metrics.csv`: a row per optimizer step that published something, a column per tag.

    Values are written with all their digits, by rank 0 alone. A new tag adds a column (the file is then
    written anew and renamed). A resumed run first drops the rows after the step that it starts from: that
    part is repeated.

    Args:
        path: the file.
        after_step: the optimizer step that the run starts from; 0 for a new run.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] = ["step"]
        self._row: dict[str, Any] = {}
        if path.exists() and getattr(rank_zero_only, "rank", 0) == 0:
            whole = path.read_text()
            whole = whole[: whole.rfind("\n") + 1]  # a killed process may have left half a row
            reader = csv.DictReader(io.StringIO(whole, newline=""))
            self._columns = list(reader.fieldnames or ["step"])
            self._rewrite([row for row in reader if int(row["step"]) <= after_step])

    @property
    def name(self) -> str:
        """Name of the kind of log."""
        return "csv"

    @property
    def version(self) -> str:
        """There is one file a run."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds `metrics` to the row of `step`; a row is written when the next one begins or at `save`."""
        if self._row and self._row["step"] != step:
            self.save()
        self._row = {
            "step": step,
            **self._row,
            **{name: repr(float(value)) for name, value in metrics.items()},
        }

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Hyper-parameters stand in the run folder's config.yaml, not here."""

    @rank_zero_only
    def save(self) -> None:
        """Writes the row that was being collected."""
        if not self._row:
            return
        row, self._row = self._row, {}
        fresh = [name for name in row if name not in self._columns]
        if fresh or not self.path.exists():
            rows: list[dict[str, Any]] = []
            if self.path.exists():
                with self.path.open(newline="") as file:
                    rows = list(csv.DictReader(file))
            self._columns += fresh
            self._rewrite([*rows, row])
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes what is left."""
        self.save()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self.path)
