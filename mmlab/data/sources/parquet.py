"""Text in one column of Parquet files, read row group by row group."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.data.files import combined_sha256, file_sha256, find_files
from mmlab.data.sources.base import BadSampleError, Source, SourceConfig

if TYPE_CHECKING:
    import pyarrow

_GROUPS_KEPT = 2


@dataclass(frozen=True)
class ParquetConfig(SourceConfig):
    """Documents from one `column` of Parquet files. `paths` (files or globs) are no part of what a run is.

    A read decodes the whole row group of a row: give `data.shuffle_block` about the size of one, unless the
    text is tokenized once.
    """

    paths: tuple[str, ...] = field(metadata={"how": True})
    column: str = "text"

    def build(self, cache: Path | None = None) -> Parquet:
        """The documents of all files."""
        return Parquet(find_files(self.paths, "paths of parquet"), self.column, cache)


class Parquet(Source):
    """{"text": str} for each row; the row groups read last are kept, never a whole file."""

    def __init__(self, files: list[Path], column: str, cache: Path | None = None) -> None:
        self._files, self._column, self._cache = files, column, cache
        groups = [
            (number, group, rows) for number, file in enumerate(files) for group, rows in self._sizes(file)
        ]
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._groups[:, 2])])
        self._kept: dict[int, pyarrow.ChunkedArray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = self._place(index)
        text = self._read(place)[index - int(self._first[place])].as_py()
        if not isinstance(text, str):
            raise BadSampleError(f"{self.name(index)}: column {self._column!r} holds {text!r}")
        return {"text": text}

    def name(self, index: int) -> str:
        """File and row group, with the row inside the group."""
        place = self._place(index)
        number, group, _ = self._groups[place].tolist()
        return f"{self._files[number]} row group {group} row {index - int(self._first[place])}"

    def fingerprint(self) -> str:
        """Changes with the files' content and order and with the column."""
        return combined_sha256(
            "parquet", self._column, *(file_sha256(file, self._cache) for file in self._files)
        )

    def _place(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return int(np.searchsorted(self._first, index, side="right")) - 1

    def _sizes(self, path: Path) -> list[tuple[int, int]]:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        try:
            with parquet.ParquetFile(path) as file:
                names, meta = file.schema_arrow.names, file.metadata
        except arrow.ArrowException as error:
            raise ValueError(f"{path} is no readable Parquet file: {error}") from error
        if self._column not in names:
            raise ValueError(f"{path} has no column {self._column!r}; it has {names}")
        return [(group, meta.row_group(group).num_rows) for group in range(meta.num_row_groups)]

    def _read(self, place: int) -> pyarrow.ChunkedArray:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        if place not in self._kept:
            number, group, _ = self._groups[place].tolist()
            try:
                # Arrow's own threads do not survive a fork, and workers are forked.
                with parquet.ParquetFile(self._files[number]) as file:
                    table = file.read_row_group(group, columns=[self._column], use_threads=False)
            except (arrow.ArrowException, OSError) as error:
                if not _is_content_fault(error):
                    raise
                raise BadSampleError(f"{self._files[number]} row group {group}: {error}") from error
            while len(self._kept) >= _GROUPS_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[place] = table.column(0)
        return self._kept[place]


def _is_content_fault(error: Exception) -> bool:
    """Whether the bytes are at fault, so that reading again cannot help.

    Arrow raises a page that cannot be decoded as an OSError too, but only one of the system has an errno.
    """
    if isinstance(error, OSError):
        return error.errno is None
    return not isinstance(error, MemoryError)
