"""Do two revisions compute the same losses? `make numerics BASE=rev`, or

    python -m experiments.benchmarks.numerics REV

Trains every tiny experiment below for 20 steps in float32, on one thread, with dropout, once with the source
of REV (a git worktree in a temporary folder) and once with the working tree, by the same Python on the same
machine, and compares the loss of every step for exact equality. A difference passes only with a reason: a
bullet under a `### Numerics` heading of CHANGELOG.md that REV does not have and that names the experiment.
Exit status 1 if a difference has no reason or the working tree does not train.
"""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20

COMMON = (
    f"schedule.steps={STEPS}",
    "schedule.warmup_steps=5",
    "precision=fp32",
    "seed=1",
    "trainer.accelerator=cpu",
    "trainer.threads=1",
    "trainer.log_every=1",
    "~callbacks.progress",
    "trainer.sanity_batches=0",
    "logger.tensorboard=false",
    "resume=none",
)

EMBEDDED = (
    "data=python",
    "modality/text=bytes",
    "data.max_length=64",
    "data.num_workers=0",
    "task.stream=false",
)
"""Text that every machine has, in place of an experiment's own."""

TINY = ("backbone.width=32", "backbone.depth=2", "backbone.num_heads=2", "backbone.dropout=0.1")

ONE_CPU = ("devices=1", "strategy=single", "trainer.compile=false", "trainer.activation_checkpointing=false")

EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "text/python": (
        "backbone.width=32",
        "backbone.depth=2",
        "backbone.num_heads=2",
        "backbone.dropout=0.1",
        "data.max_length=64",
        "data.batch_size=512",
        "data.micro_batch_size=256",
        "data.num_workers=0",
    ),
    "text/shakespeare": (*EMBEDDED, *TINY, "backbone.mlp_size=48", "data.batch_size=512"),
    "text/prose": (*EMBEDDED, *TINY, "backbone.mlp_size=48", "data.batch_size=512"),
    "text/smollm2_sft": (
        *EMBEDDED,
        *TINY,
        "backbone.num_kv_heads=1",
        "backbone.mlp_size=48",
        "task=language_modeling",
        "~modality/text/chat",
        "~modality.text.path",
        "~modality.text.pattern",
        "~modality.text.num_ids",
        "adapt.weights=null",
        "data.batch_size=512",
        "data.micro_batch_size=null",
    ),
    "text/gpt2_124m": (
        *EMBEDDED,
        *TINY,
        *ONE_CPU,
        "~data.train.paths",
        "~data.validation.paths",
        "model.max_positions=64",
        "data.batch_size=512",
        "data.micro_batch_size=null",
    ),
    "text/llama_1b": (
        *EMBEDDED,
        *TINY,
        *ONE_CPU,
        "~data.train.paths",
        "~data.validation.paths",
        "backbone.num_kv_heads=1",
        "backbone.mlp_size=48",
        "data.batch_size=512",
        "data.micro_batch_size=null",
    ),
}
"""Experiments by name, with the overrides that make each one tiny. A new experiment gets a line here."""

Verdict = Literal["equal", "explained", "new", "DIFFERS", "FAILED"]
Losses = dict[int, float]


@dataclass(frozen=True)
class Outcome:
    """One run: the loss of each optimizer step, or why there is none."""

    losses: Losses
    problem: str = ""
    missing: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table. `difference` is the largest over the steps, None where nothing was compared."""

    experiment: str
    steps: int
    difference: float | None
    verdict: Verdict
    note: str = ""


def compare(experiment: str, base: Outcome, now: Outcome, reasons: str, steps: int = STEPS) -> Row:
    """Verdict on one experiment; `reasons` is what CHANGELOG.md says now and did not say then."""
    if now.problem or set(now.losses) != set(range(1, steps + 1)):
        return Row(
            experiment, len(now.losses), None, "FAILED", now.problem or f"{steps} steps were asked for"
        )
    if not all(math.isfinite(loss) for loss in now.losses.values()):
        return Row(experiment, len(now.losses), None, "FAILED", "a loss is not finite")
    if base.missing:
        return Row(experiment, steps, None, "new", "not in the base revision")
    difference, note = largest_difference(base, now)
    if difference == 0:
        return Row(experiment, steps, 0.0, "equal")
    return Row(
        experiment, steps, difference, "explained" if mentions(reasons, experiment) else "DIFFERS", note
    )


def largest_difference(base: Outcome, now: Outcome) -> tuple[float, str]:
    """Largest difference of a step's loss and where the first one is; infinity where steps do not match."""
    if base.problem or set(base.losses) != set(now.losses):
        return math.inf, base.problem or f"the base revision made {len(base.losses)} steps"
    differing = [step for step, loss in sorted(now.losses.items()) if loss != base.losses[step]]
    if not differing:
        return 0.0, ""
    gaps = [abs(now.losses[step] - base.losses[step]) for step in differing]
    worst = math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps)
    return worst, f"first at step {differing[0]}"


def mentions(reasons: str, experiment: str) -> bool:
    """Whether `reasons` names the experiment as a whole word: `text/python` is not in `text/python_large`."""
    return re.search(rf"(?<![\w/-]){re.escape(experiment)}(?![\w/-])", reasons) is not None


def numerics_bullets(changelog: str) -> list[str]:
    """The bullets under every `### Numerics` heading, each as one line."""
    bullets: list[str] = []
    inside = False
    for line in changelog.splitlines():
        if line.startswith("#"):
            inside = re.match(r"###\s+numerics\s*$", line, re.IGNORECASE) is not None
        elif inside and re.match(r"[-*] ", line):
            bullets.append(line[2:].strip())
        elif inside and bullets and line.strip():
            bullets[-1] += " " + line.strip()
    return bullets


def new_reasons(before: str, after: str) -> str:
    """What the Numerics sections of changelog `after` say that those of `before` do not."""
    known = set(numerics_bullets(before))
    return "\n".join(bullet for bullet in numerics_bullets(after) if bullet not in known)


def read_losses(path: Path) -> Losses:
    """Column `train/loss` of a run's metrics.csv by step; rows without a value are left out."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): float(row["train/loss"]) for row in rows if row.get("train/loss")}


def train(tree: Path, experiment: str, overrides: Sequence[str], work: Path) -> Outcome:
    """Runs one experiment with the source of `tree`; everything that it writes goes below `work`."""
    if not (tree / "conf" / "experiment" / f"{experiment}.yaml").exists():
        return Outcome({}, problem="no such experiment", missing=True)
    work.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mmlab.cli", "train", f"experiment={experiment}", *COMMON, *overrides]
    command += [f"paths.runs={work / 'runs'}", f"paths.cache={work / 'cache'}"]
    log = work / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=False,
        )
    if done.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        print(f"\n{experiment} in {tree} ended with status {done.returncode}:", *lines[-15:], sep="\n  ")
        return Outcome({}, problem=lines[-1].strip())
    files = list((work / "runs").rglob("metrics.csv"))
    if len(files) != 1:
        return Outcome({}, problem=f"expected one metrics.csv, found {len(files)}")
    return Outcome(read_losses(files[0]))


def measure(base_tree: Path, work: Path, reasons: str) -> list[Row]:
    """The table: every experiment on both trees, the two of a pair side by side."""
    rows = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for experiment, overrides in EXPERIMENTS.items():
            slug = experiment.replace("/", "-")
            base = pool.submit(train, base_tree, experiment, overrides, work / f"{slug}-base")
            now = pool.submit(train, ROOT, experiment, overrides, work / f"{slug}-now")
            rows.append(compare(experiment, base.result(), now.result(), reasons))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    head = ("experiment", "steps", "max difference", "verdict", "")
    cells = [head, *((r.experiment, str(r.steps), _number(r.difference), r.verdict, r.note) for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _number(difference: float | None) -> str:
    return "-" if difference is None else "0" if difference == 0 else f"{difference:.3g}"


def git(*arguments: str) -> str:
    """Output of a git command in this checkout; its message and status 2 if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr.strip(), file=sys.stderr)
        raise SystemExit(2)
    return done.stdout


def changelog_of(tree: Path) -> str:
    """CHANGELOG.md of a tree, empty where there is none."""
    path = tree / "CHANGELOG.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def status(rows: Sequence[Row]) -> int:
    """Exit status of the gate."""
    return int(any(row.verdict in ("DIFFERS", "FAILED") for row in rows))


def main(arguments: Sequence[str]) -> int:
    """Compares the working tree with the revision that is named."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    commit = git("rev-parse", "--verify", "--end-of-options", f"{arguments[0]}^{{commit}}").strip()
    with tempfile.TemporaryDirectory(prefix="mmlab-numerics-") as folder:
        base_tree = Path(folder, "base").resolve()
        git("worktree", "add", "--detach", "--quiet", str(base_tree), commit)
        try:
            reasons = new_reasons(changelog_of(base_tree), changelog_of(ROOT))
            rows = measure(base_tree, Path(folder, "work").resolve(), reasons)
        finally:
            git("worktree", "remove", "--force", str(base_tree))
    print(f"losses of the working tree against {arguments[0]} ({commit[:12]})\n\n{table(rows)}")
    if any(row.verdict == "DIFFERS" for row in rows):
        print("\nGive the reason as a bullet under ### Numerics in CHANGELOG.md that names the experiment.")
    return status(rows)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
