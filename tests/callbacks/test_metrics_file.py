"""metrics.csv: one row a step, all digits, and no overlap after a resume."""

import csv

from mmlab.callbacks.metrics_file import MetricsFile


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_step_is_one_row_and_new_tags_add_columns(tmp_path):
    log = MetricsFile(tmp_path / "metrics.csv")
    log.log_metrics({"train/loss": 1 / 3}, step=1)
    log.log_metrics({"train/loss": 0.25}, step=2)
    log.log_metrics({"val/loss": 0.5}, step=2)
    log.log_metrics({"train/loss": 0.125}, step=3)
    log.finalize("success")
    assert read(log.path) == [
        {"step": "1", "train/loss": repr(1 / 3), "val/loss": ""},
        {"step": "2", "train/loss": "0.25", "val/loss": "0.5"},
        {"step": "3", "train/loss": "0.125", "val/loss": ""},
    ]


def test_a_resumed_run_drops_what_it_is_going_to_repeat_and_a_torn_row(tmp_path):
    path = tmp_path / "metrics.csv"
    log = MetricsFile(path)
    for step in range(1, 10):
        log.log_metrics({"train/loss": float(step)}, step=step)
    log.finalize("success")
    with path.open("a") as file:
        file.write("1,")  # the process was killed in the middle of writing step 10
    log = MetricsFile(path, after_step=6)
    for step in range(7, 13):
        log.log_metrics({"train/loss": step + 0.5}, step=step)
    log.finalize("success")
    rows = read(path)
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert [float(row["train/loss"]) for row in rows][5:8] == [6.0, 7.5, 8.5]


def test_nothing_partial_is_left_beside_the_file(tmp_path):
    log = MetricsFile(tmp_path / "metrics.csv")
    log.log_metrics({"a": 1.0}, step=1)
    log.finalize("success")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
