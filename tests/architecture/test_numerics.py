"""The numerics gate: what counts as equal, and what excuses a difference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from experiments.benchmarks import numerics
from experiments.benchmarks.numerics import Outcome, Row, compare
from mmlab.config import configure
from tests.architecture.source import ROOT

NAME = "text/python"


def losses(*values: float) -> Outcome:
    return Outcome(dict(enumerate(values, 1)))


def verdict(base: Outcome, now: Outcome, reasons: str = "") -> Row:
    return compare(NAME, base, now, reasons, steps=3)


def test_same_losses_are_equal() -> None:
    assert verdict(losses(3.0, 2.0, 1.0), losses(3.0, 2.0, 1.0)) == Row(NAME, 3, 0.0, "equal")


def test_smallest_difference_counts() -> None:
    row = verdict(losses(3.0, 2.0, 1.0), losses(3.0, math.nextafter(2.0, 3.0), 1.0))
    assert (row.verdict, row.difference, row.note) == ("DIFFERS", 2**-51, "first at step 2")
    assert numerics.status([row]) == 1


def test_reason_explains_a_difference_of_its_own_experiment() -> None:
    base, now = losses(3.0, 2.0, 1.0), losses(3.0, 2.5, 0.0)
    explained = verdict(base, now, "losses of text/python change: new initial weights")
    assert (explained.verdict, explained.difference) == ("explained", 1.0)
    assert numerics.status([explained]) == 0
    assert verdict(base, now, "losses of text/python_large change").verdict == "DIFFERS"
    assert verdict(base, now, "something else").verdict == "DIFFERS"


def test_experiment_that_base_lacks_is_new() -> None:
    row = verdict(Outcome({}, "no such experiment", missing=True), losses(3.0, 2.0, 1.0))
    assert row.verdict == "new"
    assert numerics.status([row]) == 0


@pytest.mark.parametrize(
    "now",
    [
        losses(3.0, 2.0),
        losses(3.0, 2.0, math.nan),
        Outcome({}, "crashed"),
        Outcome({}, "no such experiment", missing=True),
    ],
)
def test_working_tree_that_does_not_train_fails_whatever_the_reason(now: Outcome) -> None:
    row = verdict(losses(3.0, 2.0, 1.0), now, "text/python changed")
    assert row.verdict == "FAILED"
    assert numerics.status([row]) == 1


@pytest.mark.parametrize("base", [losses(3.0, 2.0), losses(3.0, 2.0, math.nan), Outcome({}, "crashed")])
def test_base_that_does_not_compare_needs_a_reason(base: Outcome) -> None:
    now = losses(3.0, 2.0, 1.0)
    assert verdict(base, now).verdict == "DIFFERS"
    assert verdict(base, now).difference == math.inf
    assert verdict(base, now, "text/python: keys were renamed").verdict == "explained"


def test_bullets_of_the_numerics_sections_only() -> None:
    text = """# Changelog
## Unreleased
### Added
- text/python
### Numerics
- text/python: dropout moved,
  so its draws differ
- speech/digits: mel filters
## 0.1
### Numerics
* first
"""
    assert numerics.numerics_bullets(text) == [
        "text/python: dropout moved, so its draws differ",
        "speech/digits: mel filters",
        "first",
    ]


def test_only_new_bullets_are_reasons() -> None:
    before = "## Unreleased\n### Numerics\n- text/python: old\n"
    after = "## Unreleased\n### Numerics\n- speech/digits: new\n## 1\n### Numerics\n- text/python: old\n"
    assert numerics.new_reasons(before, after) == "speech/digits: new"
    assert numerics.new_reasons("", before) == "text/python: old"
    assert numerics.new_reasons(before, before) == ""


def test_losses_keep_all_digits(tmp_path: Path) -> None:
    value = math.nextafter(2.0, 3.0)
    path = tmp_path / "metrics.csv"
    path.write_text(f"step,train/loss,val/loss\n1,{value!r},\n2,,3.5\n3,0.1,\n")
    assert numerics.read_losses(path) == {1: value, 3: 0.1}


def test_table_aligns_and_shows_each_verdict() -> None:
    rows = [Row("a", 20, 0.0, "equal"), Row("text/python", 20, 1.25e-7, "DIFFERS", "first at step 2")]
    assert numerics.table(rows).splitlines() == [
        "experiment   steps  max difference  verdict",
        "a            20     0               equal",
        "text/python  20     1.25e-07        DIFFERS  first at step 2",
    ]


def test_every_experiment_of_the_gate_exists() -> None:
    for name in numerics.EXPERIMENTS:
        assert (ROOT / "conf" / "experiment" / f"{name}.yaml").is_file(), name


def test_every_experiment_stands_in_the_gate() -> None:
    folder = ROOT / "conf" / "experiment"
    names = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")}
    assert names <= set(numerics.EXPERIMENTS), "give each a line in experiments/benchmarks/numerics.py"


@pytest.mark.parametrize("name", sorted(numerics.EXPERIMENTS))
def test_the_tiny_form_of_every_experiment_composes(name: str) -> None:
    config = configure([f"experiment={name}", *numerics.COMMON, *numerics.EXPERIMENTS[name]])
    assert config.schedule.steps == numerics.STEPS
