"""`mmlab evaluate`: measures a checkpoint, prints what it found and keeps it, item by item."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmlab.evaluation.base import EvaluationConfig, Execution, Progress, Result, described
from mmlab.evaluation.results import METRICS, read_metrics, write_results
from mmlab.provenance import code_state, versions
from mmlab.runconfig import CONFIG_FILE, PathsConfig
from mmlab.strategies.config import PrecisionConfig
from mmlab.typed import ConfigError

EVALUATIONS = "evaluations"
CHECKPOINTS = "checkpoints"
PARTS = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja")
"""Endings of the files of a Hugging Face folder that decide numbers."""


@dataclass(frozen=True)
class EvaluateConfig:
    """What is measured on which model, and where the results go: `<output>/<name>/`.

    Args:
        checkpoint: a run folder (its best checkpoint, else its last), a checkpoint file, or a Hugging Face
            folder.
        evaluation: what is measured.
        name: folder of the results; null is what the evaluation calls itself, mostly the name of its file.
        output: folder of all results; null is `evaluations` in the run folder that the checkpoint lies in,
            else here.
        overwrite: replaces results of another checkpoint or of another evaluation under the same name.
        device: where the network runs: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        precision: number type of the weights and of matrix products.
        ema: measures the averaged weights of the checkpoint.
        batch_tokens: tokens of a batch, padding included.
        threads: of the CPU; null is torch's own choice.
        paths: `cache` is for what can be computed again.
    """

    checkpoint: str
    evaluation: EvaluationConfig
    name: str | None = None
    output: str | None = None
    overwrite: bool = False
    device: str = "auto"
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    ema: bool = False
    batch_tokens: int = 16384
    threads: int | None = None
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"name becomes a folder: letters, digits, '_', '-' and '.', got {self.name!r}")
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda, cuda:N or mps, got {self.device!r}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1 or null, got {self.threads}")
        Execution(self.batch_tokens)  # checks it


def run(config: EvaluateConfig) -> None:
    """Evaluates and writes the results.

    Raises:
        ConfigError: no such checkpoint, or results of something else are in the way.
    """
    checkpoint = Path(config.checkpoint)
    if not checkpoint.exists():
        raise ConfigError(f"checkpoint: {checkpoint} does not exist")
    about = {
        "checkpoint": identified(checkpoint, Path(config.paths.cache)),
        "ema": config.ema,
        "evaluation": described(config.evaluation),
    }
    folder = results_folder(config)
    _refuse_others(folder, about, config.overwrite)
    began = time.perf_counter()
    result, device = _measured(config)
    code = code_state()
    about |= {
        "precision": config.precision.kind,
        "device": device,
        "seconds": round(time.perf_counter() - began, 3),
        "code": {"version": code.version, "commit": code.commit, "dirty": code.dirty},
        "versions": versions(),
    }
    write_results(folder, result, about)
    _show(folder, result)


def _measured(config: EvaluateConfig) -> tuple[Result, str]:
    """The result, and the device that it was computed on."""
    import torch

    from mmlab import restore

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = config.device
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator is not None else "cpu"
    kind = config.precision.kind
    dtype = torch.bfloat16 if kind == "bf16-true" else torch.float32
    model = restore.restore(config.checkpoint, device=device, dtype=dtype, ema=config.ema)
    with _progress(config.evaluation.label()) as progress:
        execution = Execution(config.batch_tokens, kind == "bf16-mixed", progress)
        return config.evaluation.run(model, Path(config.paths.cache), execution), device


def results_folder(config: EvaluateConfig) -> Path:
    """Where the results go."""
    name = config.name or config.evaluation.label()
    if config.output is not None:
        return Path(config.output) / name
    place = Path(config.checkpoint)
    for folder in (place, place.parent.parent if place.parent.name == CHECKPOINTS else place):
        if (folder / CONFIG_FILE).is_file():
            return folder / EVALUATIONS / name
    return Path(EVALUATIONS) / name


def identified(checkpoint: Path, cache: Path) -> dict[str, str]:
    """Path, and name and SHA-256 (hex) of the file that is read; of all its files for a Hugging Face folder.

    Raises:
        ValueError: nothing usable is there.
    """
    from mmlab.data.files import combined_sha256, file_sha256
    from mmlab.interop.checkpoint import find_checkpoint, is_huggingface

    if not is_huggingface(checkpoint):
        file = find_checkpoint(checkpoint)
        return {"path": str(checkpoint), "file": file.resolve().name, "sha256": file_sha256(file, cache)}
    files = sorted(path for path in checkpoint.iterdir() if path.is_file() and path.suffix in PARTS)
    sha256 = combined_sha256(*(part for file in files for part in (file.name, file_sha256(file, cache))))
    return {"path": str(checkpoint), "file": checkpoint.name, "sha256": sha256}


def _refuse_others(folder: Path, about: dict[str, Any], overwrite: bool) -> None:
    """Before the work: results of the same may be replaced, those of another only if that was asked for."""
    before = read_metrics(folder)
    if before is None and folder.exists():
        raise ConfigError(f"{folder} exists and holds no {METRICS}; give name= or output=")
    if before is None or overwrite:
        return
    for key, what in (("checkpoint", "checkpoint"), ("ema", "weights"), ("evaluation", "evaluation")):
        mine, other = about[key], before.get(key)
        if key == "checkpoint":
            mine, other = mine["sha256"], (other or {}).get("sha256")
        if mine != other:
            raise ConfigError(
                f"{folder} holds results of another {what}; give name=, output= or overwrite=true"
            )


@contextmanager
def _progress(label: str) -> Iterator[Progress | None]:
    """A bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Bar(console=console, transient=True) as bar:
        job = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(job, completed=done, total=total)


def _show(folder: Path, result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in result.metrics.items():
        table.add_row(name, f"{value:.4f}")
    for name, count in result.counts.items():
        table.add_row(name, f"{count:,}", style="dim")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"results  {folder}")
