"""Finding and hashing the files that samples are read from; writing caches that are whole or absent."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

_MEMOISED_BYTES = 1 << 20


def find_files(patterns: Sequence[str], key: str) -> list[Path]:
    """Files that `patterns` name (paths, or globs with `**`), each file once; within a glob in sorted order.

    A file that is reached by several spellings or links keeps the first.

    Raises:
        FileNotFoundError: if a pattern matches nothing; names it and the configuration key it stands under.
    """
    if not patterns:
        raise ValueError(f"{key} names no file")
    found: dict[Path, Path] = {}
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        names = [expanded] if os.path.isfile(expanded) else sorted(glob.glob(expanded, recursive=True))
        paths = [Path(name) for name in names if os.path.isfile(name)]
        if not paths:
            raise FileNotFoundError(f"{key}: no file matches {pattern!r} (searched from {Path.cwd()})")
        for path in paths:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def file_sha256(path: Path, cache: Path | None = None) -> str:
    """SHA-256 (hex) of a file's content.

    That of a file above 1 MiB is remembered under `cache` for as long as its size, its times of change
    and its place on the disk stay.
    """
    status = path.stat()
    # Sizes and the time of writing can be set back; the time of the inode's last change cannot.
    state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
    memo = None
    if cache is not None and status.st_size >= _MEMOISED_BYTES:
        memo = cache / "hashes" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = json.loads(memo.read_text())
            if entry["status"] == state:
                return str(entry["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if memo is not None:
        with fresh_file(memo) as temporary:
            temporary.write_text(json.dumps({"status": state, "sha256": digest}))
    return digest


def combined_sha256(*parts: str) -> str:
    """SHA-256 (hex) of a list of strings; where one ends and the next begins counts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextlib.contextmanager
def fresh_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` in one step when the block ends, and vanishes if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` in one step when the block ends, and vanishes if it fails.

    If another process made `path` meanwhile, that one stays and this one is discarded.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        try:
            os.rename(temporary, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(path: Path) -> Path:
    """A free name beside `path`. Unlike what `tempfile` makes, it is created with the mode of the umask."""
    return path.with_name(f".making-{uuid.uuid4().hex}{path.suffix}")
