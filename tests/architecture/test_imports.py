"""What reads, checks and prints a configuration starts without torch and Lightning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, read_package

TORCH_FREE = [
    "mmlab",
    "mmlab.typed",
    "mmlab.config",
    "mmlab.help",
    "mmlab.cli",
    "mmlab.records",
    "mmlab.backbone.config",
    "mmlab.modalities.base",
    "mmlab.models.base",
    "mmlab.optim.base",
    "mmlab.optim.adamw",
    "mmlab.optim.schedule",
    "mmlab.data.config",
    "mmlab.data.order",
    "mmlab.data.packing",
    "mmlab.data.sources",
    "mmlab.tasks.config",
    "mmlab.strategies.config",
    "mmlab.callbacks.config",
]

# Runs in a process of its own. A module that imports torch taints all after it, so only the first is named.
PROBE = """
import importlib, json, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
    heavy = sorted({"torch", "lightning", "transformers"} & set(sys.modules))
    if heavy:
        print(json.dumps([name, heavy]), file=open(sys.argv[1], "w"))
        break
else:
    print("null", file=open(sys.argv[1], "w"))
"""


def first_heavy(modules: list[str], tmp_path: Path) -> list | None:
    """The first of `modules` whose import brings a heavy package, with those packages, or None."""
    answer = tmp_path / "answer.json"
    command = [sys.executable, "-c", PROBE, str(answer), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(answer.read_text())


def torch_free_modules() -> list[str]:
    sources = [name for name in read_package() if name.startswith("mmlab.data.sources.")]
    return [*TORCH_FREE, *sources]


def test_configuration_imports_no_torch(tmp_path: Path) -> None:
    missing = set(TORCH_FREE) - set(read_package())
    assert not missing, f"listed here but not in the package: {sorted(missing)}"
    assert first_heavy(torch_free_modules(), tmp_path) is None


@pytest.mark.parametrize("module", ["torch", "mmlab.tasks.base"])
def test_probe_finds_a_heavy_module(module: str, tmp_path: Path) -> None:
    found = first_heavy(["mmlab", module], tmp_path)
    assert found is not None
    assert found[0] == module
    assert "torch" in found[1]
