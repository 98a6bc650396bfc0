"""The Python files of the standard library that runs this process: text that is on every machine."""

from __future__ import annotations

import hashlib
import io
import sysconfig
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmlab.data.files import combined_sha256, file_sha256
from mmlab.data.sources.base import BadSampleError, Source, SourceConfig

_LEFT_OUT = frozenset(
    {"encodings", "pydoc_data", "test", "tests", "idle_test", "site-packages", "__pycache__"}
)
_LEAST_BYTES = 1_000_000
_PARTS = 16
_SPLITS = {
    "train": frozenset(range(_PARTS)) - {0},
    "validation": frozenset({0}),
    "tuning_train": frozenset(range(_PARTS)) - {0, 1},
    "tuning": frozenset({1}),
}


@dataclass(frozen=True)
class PythonFilesConfig(SourceConfig):
    """The `*.py` files of the installed Python's standard library, one document a file.

    One in sixteen top-level modules, chosen by a hash of its name, is held out for `validation`; the
    files of a package go together. Recipes are tuned without it: `tuning` is another sixteenth, cut from
    the training modules, and `tuning_train` the rest of them. Tables (encodings, pydoc_data) and tests are
    left out. `folder` reads another library of the same layout.
    """

    split: Literal["train", "validation", "tuning_train", "tuning"] = "train"
    folder: str | None = None

    def build(self, cache: Path | None = None) -> PythonFiles:
        """The files of this split."""
        return PythonFiles(Path(self.folder or sysconfig.get_path("stdlib")), self.split)


class PythonFiles(Source):
    """{"text": str, "path": str} for each file, in the order of their paths.

    Raises:
        FileNotFoundError: if all splits together hold less than a megabyte.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        files = [
            path
            for path in sorted(folder.rglob("*.py"))
            if not _LEFT_OUT & set(path.relative_to(folder).parts)
        ]
        size = sum(path.stat().st_size for path in files)
        if size < _LEAST_BYTES:
            raise FileNotFoundError(
                f"{folder} holds {len(files)} Python files with {size} bytes, fewer than {_LEAST_BYTES}: "
                "is this Python installed without the sources of its standard library?"
            )
        names = [path.relative_to(folder) for path in files]
        self._files = [name for name in names if _part(name) in _SPLITS[split]]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.folder / self._files[index]
        content = path.read_bytes()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except (SyntaxError, UnicodeDecodeError, LookupError) as error:
            raise BadSampleError(f"{path}: {error}") from error
        return {"text": text, "path": self._files[index].as_posix()}

    def name(self, index: int) -> str:
        """Path of the file."""
        return str(self.folder / self._files[index])

    def fingerprint(self) -> str:
        """Changes with the relative paths and the content of the files."""
        return combined_sha256(
            "python-files",
            *(part for file in self._files for part in (file.as_posix(), file_sha256(self.folder / file))),
        )


def _part(name: Path) -> int:
    module = name.parts[0].removesuffix(".py")
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % _PARTS
