"""What a run was and what it gave: the manifest in its folder, and finding runs again. Free of torch.

`manifest.json` holds the identity (hash of what the run is), the data fingerprint, code, versions, hardware,
one segment for every start of the process, the status and the newest metrics. It names no place outside the
run folder. Every write replaces the file whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mmlab.provenance import CodeState, code_state, hardware, versions
from mmlab.typed import identity, leaves, to_plain

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
FORMAT = 1


def stamp() -> str:
    """Local time to the second and four random hex digits: a folder name that sorts by time."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"


def new_folder(root: Path) -> Path:
    """A fresh folder in `root`, named by the time."""
    while True:
        folder = root / stamp()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder


def write_manifest(
    folder: Path, config: Any, *, command: Sequence[str] = (), data_fingerprint: str | None = None
) -> dict[str, Any]:
    """Begins the manifest of a new run, and saves the code's difference from its commit as `code.diff`.

    Args:
        folder: the run folder.
        config: the run's configuration (a dataclass with `name` and `seed`).
        command: the words that started the run.
        data_fingerprint: what the run reads, by content, if that is known already.
    """
    code = code_state()
    manifest = {
        "format": FORMAT,
        "name": config.name,
        "status": "created",
        "reason": None,
        "identity": identity(config),
        "data_fingerprint": data_fingerprint,
        "config": config_hash(config),
        "seed": config.seed,
        "command": list(command),
        "created": _now(),
        "code": _save_code(folder, code, "code.diff"),
        "versions": versions(),
        "hardware": hardware(),
        "segments": [],
        "metrics": {},
    }
    _write(folder, manifest)
    return manifest


def start_segment(folder: Path, config: Any, data_fingerprint: str, *, from_step: int = 0) -> None:
    """Notes that a process starts or resumes the run in `folder`; begins its manifest if there is none.

    Args:
        folder: the run folder.
        config: the run's configuration.
        data_fingerprint: what the run reads, by content.
        from_step: the optimizer step that training starts from.

    Raises:
        ValueError: the run began on other data or with another identity.
    """
    manifest = read_manifest(folder) or write_manifest(folder, config)
    for name, now in (("identity", identity(config)), ("data_fingerprint", data_fingerprint)):
        if manifest[name] not in (None, now):
            raise ValueError(f"{folder}: the run began with {name} {manifest[name]}, which now is {now}")
    number = len(manifest["segments"]) + 1
    code = code_state()
    known = [manifest["code"], *(segment["code"] for segment in manifest["segments"])]
    described = next((old for old in reversed(known) if old["version"] == code.version), None)
    manifest["segments"].append(
        {
            "time": _now(),
            "from_step": from_step,
            "devices": config.devices,
            "strategy": type(config.strategy).__name__.removesuffix("Config").lower(),
            "micro_batch_size": getattr(config.data, "micro_batch_size", None),
            "workers": getattr(config.data, "num_workers", None),
            "code": described or _save_code(folder, code, f"code-{number}.diff"),
            "config": config_hash(config),
            "hardware": hardware(),
        }
    )
    manifest |= {"data_fingerprint": data_fingerprint, "status": "running", "reason": None}
    _write(folder, manifest)


def finish(
    folder: Path, status: str, metrics: Mapping[str, float] | None = None, *, reason: str | None = None
) -> None:
    """Notes how the run ended ("finished", "failed", ...), why, and its newest metrics.

    A value that JSON cannot hold (NaN, infinity) is written as text.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(f"{folder} has no {MANIFEST}")
    manifest |= {"status": status, "reason": reason}
    if manifest["segments"]:
        manifest["segments"][-1] |= {"ended": _now(), "status": status}
    for name, value in (metrics or {}).items():
        number = float(value)
        manifest["metrics"][name] = number if abs(number) < float("inf") else str(number)
    _write(folder, manifest)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of the run in `folder`, or None where there is none that can be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None


def find_runs(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """(folder, manifest) of every run below `root`, the newest first."""
    runs = []
    for here, folders, files in os.walk(root):
        if MANIFEST in files:
            folders.clear()
            manifest = read_manifest(Path(here))
            if manifest is not None:
                runs.append((Path(here), manifest))
    return sorted(runs, key=lambda run: (_last_start(run[1]), run[0].as_posix()), reverse=True)


def last_step(folder: Path) -> int | None:
    """Optimizer step of the newest checkpoint in a run folder, or None where it has none."""
    found = (re.fullmatch(r"step-(\d+)\.ckpt", path.name) for path in (folder / CHECKPOINTS).glob("step-*"))
    return max((int(match[1]) for match in found if match), default=None)


def differences(config: Any, other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(path, value, other's value) of the leaves that make two runs different ones; absent values are None.

    Args:
        config: a configuration dataclass.
        other: the plain configuration of another run, possibly of an older version of the code.
    """
    mine = dict(leaves(to_plain(config, how=False)))
    ignored = {path for path, _ in leaves(to_plain(config))} - set(mine)
    roots = set(to_plain(config)) - set(to_plain(config, how=False))
    theirs = {
        path: value
        for path, value in leaves(other)
        if path not in ignored and path.split(".")[0] not in roots
    }
    return [
        (path, mine.get(path), theirs.get(path))
        for path in [*mine, *(path for path in theirs if path not in mine)]
        if mine.get(path) != theirs.get(path)
    ]


@contextmanager
def claim(folder: Path) -> Iterator[bool]:
    """Holds the run folder for this process; gives False where another process holds it."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.ENOTSUP, errno.ENOLCK):
                raise
            yield error.errno != errno.EWOULDBLOCK  # a file system without locks refuses nobody
            return
        yield True


def config_hash(config: Any) -> str:
    """Hash (sha256) of the whole configuration, how it is executed included."""
    return hashlib.sha256(json.dumps(to_plain(config), sort_keys=True).encode()).hexdigest()


def remove_if_empty(folder: Path) -> None:
    """Removes a run folder in which nothing was written."""
    if folder.is_dir() and not any(path.name != ".lock" for path in folder.iterdir()):
        shutil.rmtree(folder)


def _save_code(folder: Path, code: CodeState, name: str) -> dict[str, Any]:
    if code.diff:
        _replace(folder / name, code.diff)
    saved = name if code.diff else None
    return {"version": code.version, "commit": code.commit, "dirty": code.dirty, "diff": saved}


def _last_start(manifest: Mapping[str, Any]) -> str:
    times = [segment["time"] for segment in manifest["segments"]]
    return max([manifest["created"], *times])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
    _replace(folder / MANIFEST, text + "\n")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8", errors="surrogateescape")
    partial.replace(path)
