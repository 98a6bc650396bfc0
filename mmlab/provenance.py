"""Which code ran, and on what: git commit and difference, versions, processor, memory, accelerators."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
UNTRACKED_LIMIT = 1_000_000
"""Bytes of untracked files that a diff may hold; beyond, and for binary files, only names are kept."""

PACKAGES = (
    "mmlab", "torch", "torchvision", "torchaudio", "lightning", "hydra-core", "omegaconf",
    "numpy", "tensorboard", "tiktoken", "pyarrow", "safetensors",
)  # fmt: skip


@dataclass(frozen=True)
class CodeState:
    """Version (hash of the code and conf files), commit, whether files differ from it, and how.

    The last three are None where the package does not lie in a git checkout of its own.
    """

    version: str
    commit: str | None
    dirty: bool | None
    diff: str | None


@functools.cache
def code_state() -> CodeState:
    """The state of the code when it was first asked for in this process."""
    root = PACKAGE.parent
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root:
        return CodeState(code_version(), None, None, None)
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    empty = _git(root, "hash-object", "-t", "tree", "--stdin") or ""
    base = (commit or empty).strip()
    diff = (_git(root, "diff", "--binary", base) or "") + _untracked(root)
    return CodeState(code_version(), commit.strip() if commit else None, bool(diff), diff or None)


def code_version() -> str:
    """Hash (sha256) over names and contents of `mmlab/**/*.py` and `conf/**/*.yaml`."""
    digest = hashlib.sha256()
    conf = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
    for label, folder, pattern in (("mmlab", PACKAGE, "*.py"), ("conf", conf, "*.yaml")):
        for path in sorted(folder.rglob(pattern)):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{label}/{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _git(root: Path, *words: str) -> str | None:
    """What git prints, or None where it fails or is absent."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def _untracked(root: Path) -> str:
    """Untracked files as additions, in the form that `git apply` reads."""
    names = (_git(root, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
    parts, left = [], UNTRACKED_LIMIT
    for name in filter(None, names):
        path = root / name
        size = path.lstat().st_size
        text = None
        if not path.is_symlink() and size <= left:
            content = path.read_bytes()
            text = content.decode("utf-8", "surrogateescape") if b"\0" not in content else None
        if text is None:
            parts.append(f"# untracked, not kept: {name} ({size} bytes)\n")
            continue
        left -= size
        parts.append(_addition(name, text))
    return "".join(parts)


def _addition(name: str, text: str) -> str:
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n"
    if not text:
        return head
    lines = text.split("\n")
    tail = "" if text.endswith("\n") else "\n\\ No newline at end of file\n"
    lines = lines[:-1] if text.endswith("\n") else lines
    body = "\n".join("+" + line for line in lines) + (tail or "\n")
    return f"{head}--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n{body}"


def versions() -> dict[str, str | None]:
    """Version of Python and of every package that decides numbers; None for one that is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def hardware() -> dict[str, Any]:
    """Processor, usable cores, memory (GiB), and the accelerators where torch has been imported already."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores,
        "memory_gib": _memory(),
        "accelerators": _accelerators(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _accelerators() -> list[str] | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return None
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
