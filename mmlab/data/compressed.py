"""Compressed files, unpacked once into the cache: they allow no random access as they are."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import zlib
from pathlib import Path
from typing import IO, Any

from mmlab.data.files import file_sha256, fresh_file

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_REFUSED = (".zst", ".zip", ".lz4", ".tar")


def plain_name(path: Path) -> str:
    """Name of a file without the ending that says how it is compressed."""
    return path.stem if path.suffix in _OPENERS else path.name


def unpacked(path: Path, cache: Path | None) -> Path:
    """A file to read in place of `path`: itself, or what a `.gz`, `.bz2` or `.xz` holds, under `cache`.

    What is unpacked lies there by the content of the packed file, whole or not at all, so it is unpacked once
    and again when the file changes.

    Raises:
        ValueError: if a compressed file has no cache to go to, is of another kind, or is damaged.
    """
    if path.suffix in _REFUSED:
        raise ValueError(f"{path} is of a kind that is not unpacked here (only {', '.join(_OPENERS)} are)")
    if path.suffix not in _OPENERS:
        return path
    if cache is None:
        raise ValueError(f"{path} is compressed and needs a cache folder to be unpacked into: build(cache)")
    target = cache / "unpacked" / file_sha256(path, cache)[:32] / plain_name(path)
    if not target.is_file():
        with fresh_file(target) as temporary, temporary.open("wb") as out:
            _unpack(path, out)
    return target


def _unpack(path: Path, out: IO[bytes]) -> None:
    try:
        with _OPENERS[path.suffix](path, "rb") as packed:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's fault, not the content's
        raise ValueError(f"{path} cannot be unpacked: {error}") from error
