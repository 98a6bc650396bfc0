"""Tiny runs for proofs: composed like any other, trained in this process or in fresh ones."""

import csv
import os
import subprocess
import sys
from pathlib import Path

from mmlab.config import configure
from mmlab.launch import create_run

SUPPORT = Path(__file__).resolve().parent


def tiny(root, *overrides):
    """Overrides of a tiny language model on ragged random text; runs and caches go below `root`."""
    return [
        "data=synthetic",
        "data.train.size=100",
        "data.train.longest=60",
        "data.validation.size=11",
        "data.batching=packed",
        "data.unit=tokens",
        "data.max_length=32",
        "data.batch_size=128",
        "backbone=tiny",
        "schedule.steps=20",
        "schedule.warmup_steps=4",
        "precision=fp32",
        "trainer.validate_every=10",
        "trainer.checkpoint_every=5",
        "trainer.log_every=1",
        "trainer.accelerator=cpu",
        "trainer.threads=1",
        f"paths.runs={root}/runs",
        f"paths.cache={root}/cache",
        *overrides,
    ]


def make_run(folder, overrides):
    """A run folder with its config.yaml, not trained yet."""
    return create_run(configure(overrides), folder=Path(folder))


def losses(folder, tag="train/loss"):
    """Values of a tag by optimizer step, with all digits."""
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row[tag]) for row in csv.DictReader(file) if row[tag]}


def environment():
    """Environment of a fresh process that can import the probes, on one thread."""
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(*words):
    """Runs `python WORDS` to its end."""
    return subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, check=False
    )
