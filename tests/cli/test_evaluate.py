"""`mmlab evaluate`: every option composes, and results land where they belong, whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmlab import restore
from mmlab.config import ConfigError, compose, conf_folder, typed
from mmlab.data.sources.synthetic import SyntheticConfig
from mmlab.evaluate import EvaluateConfig, identified, results_folder, run
from tests.evaluation.toys import tiny, write_rows

OPTIONS = sorted(path.stem for path in (conf_folder() / "evaluation").glob("*.yaml"))
PAIRS = [
    {"UID": "x", "sentence_good": "ab", "sentence_bad": "ba"},
    {"UID": "x", "sentence_good": "c", "sentence_bad": "dd"},
]


def configured(*overrides: str) -> EvaluateConfig:
    return typed(compose(list(overrides), config_name="evaluate"), EvaluateConfig)


@pytest.fixture
def restored(monkeypatch) -> list[dict[str, Any]]:
    """Every checkpoint is a tiny random model; gives how each was asked for."""
    asked: list[dict[str, Any]] = []

    def fake(path, **options):
        asked.append({"path": path, **options})
        return tiny()

    monkeypatch.setattr(restore, "restore", fake)
    return asked


@pytest.fixture
def pairs(tmp_path) -> str:
    return write_rows(tmp_path / "pairs.jsonl", PAIRS)


@pytest.fixture
def run_folder(tmp_path) -> Path:
    folder = tmp_path / "runs" / "one"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").touch()
    (folder / "checkpoints" / "step-0000000002.ckpt").write_bytes(b"two")
    (folder / "checkpoints" / "step-0000000004.ckpt").write_bytes(b"four")
    (folder / "checkpoints" / "last.ckpt").symlink_to("step-0000000004.ckpt")
    (folder / "checkpoints" / "best.ckpt").symlink_to("step-0000000002.ckpt")
    return folder


def words(checkpoint: Path, pairs: str, *more: str) -> list[str]:
    cache = Path(pairs).parent / "cache"
    return [
        f"checkpoint={checkpoint}", "evaluation=blimp", f"evaluation.path={pairs}", "device=cpu",
        f"paths.cache={cache}", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option):
    key = "evaluation.source.paths=[a]" if option.startswith("likelihood") else "evaluation.path=a"
    config = configured("checkpoint=c", f"evaluation={option}", key)
    assert config.evaluation.label() in ("likelihood", "a")
    assert config.batch_tokens == 16384
    with pytest.raises(ConfigError, match="missing"):
        configured("checkpoint=c", f"evaluation={option}")


def test_what_must_be_given():
    with pytest.raises(ConfigError, match="evaluation: missing; choose one of blimp, exact_match, gsm8k"):
        configured("checkpoint=c")
    with pytest.raises(ConfigError, match="checkpoint: missing; it must be given"):
        configured("evaluation=blimp", "evaluation.path=a")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("device=gpu", "device must be auto, cpu, cuda, cuda:N or mps, got 'gpu'"),
        ("precision=fp16", "precision=fp16: unknown option"),
        ("batch_tokens=0", "batch_tokens must be at least 1, got 0"),
        ("threads=0", "threads must be at least 1"),
        ("name=a/b", "name becomes a folder"),
    ],
)
def test_impossible_values_are_refused(override, complaint):
    with pytest.raises(ConfigError, match=complaint):
        configured("checkpoint=c", "evaluation=blimp", "evaluation.path=a", override)


def test_results_go_to_the_run_folder_with_all_that_they_are_of(restored, run_folder, pairs, capsys):
    run(configured(*words(run_folder, pairs, "ema=true")))
    (asked,) = restored
    assert asked == {"path": str(run_folder), "device": "cpu", "dtype": torch.float32, "ema": True}
    folder = run_folder / "evaluations" / "pairs"
    found = json.loads((folder / "metrics.json").read_text())
    best = hashlib.sha256(b"two").hexdigest()
    file = "step-0000000002.ckpt"
    assert found["checkpoint"] == {"path": str(run_folder), "file": file, "sha256": best}
    assert found["evaluation"]["_target_"] == "mmlab.evaluation.minimal_pairs.MinimalPairsConfig"
    assert found["evaluation"]["path"] == pairs
    assert (found["ema"], found["device"], found["precision"]) == (True, "cpu", "fp32")
    assert found["counts"] == {"pairs": 2, "groups": 1, "ties": 0, "tokens": 7}
    assert len(found["code"]["version"]) == 64
    assert found["versions"]["torch"] == torch.__version__.split("+")[0]
    assert 0 <= found["seconds"] < 60
    items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    assert [item["id"] for item in items] == [0, 1]
    assert found["metrics"]["accuracy"] == sum(item["correct"] for item in items) / 2
    shown = capsys.readouterr().out
    assert f"accuracy/x {found['metrics']['accuracy']:.4f}" in " ".join(shown.split())
    assert str(folder) in shown


def test_the_same_again_replaces_results_and_another_thing_does_not(restored, run_folder, pairs):
    run(configured(*words(run_folder, pairs)))
    run(configured(*words(run_folder, pairs)))
    with pytest.raises(
        ConfigError, match="holds results of another evaluation; give name=, output= or overwrite=true"
    ):
        run(configured(*words(run_folder, pairs, "evaluation.ties=half")))
    last = run_folder / "checkpoints" / "last.ckpt"
    with pytest.raises(ConfigError, match="holds results of another checkpoint"):
        run(configured(*words(last, pairs)))
    assert len(restored) == 2  # refused before the work
    run(configured(*words(last, pairs, "name=last")))
    assert sorted(path.name for path in (run_folder / "evaluations").iterdir()) == ["last", "pairs"]
    run(configured(*words(last, pairs, "overwrite=true")))
    found = json.loads((run_folder / "evaluations" / "pairs" / "metrics.json").read_text())
    assert found["checkpoint"]["sha256"] == hashlib.sha256(b"four").hexdigest()
    (run_folder / "evaluations" / "mine").mkdir()
    with pytest.raises(ConfigError, match=r"mine exists and holds no metrics\.json"):
        run(configured(*words(last, pairs, "name=mine")))


def test_where_results_go(run_folder, tmp_path, pairs):
    folder = tmp_path / "model"
    folder.mkdir()
    for checkpoint, more, expected in [
        (run_folder, [], run_folder / "evaluations" / "pairs"),
        (run_folder / "checkpoints" / "last.ckpt", [], run_folder / "evaluations" / "pairs"),
        (folder, [], Path("evaluations/pairs")),
        (run_folder, ["output=out", "name=n"], Path("out/n")),
    ]:
        assert results_folder(configured(*words(checkpoint, pairs, *more))) == expected


def test_a_hugging_face_folder_is_known_by_the_content_of_its_files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ValueError, match="neither a run folder"):
        identified(folder, tmp_path)
    seen = set()
    for name, content in [
        ("config.json", "{}"),
        ("model.safetensors", "x"),
        ("model.safetensors", "y"),
        ("vocab.json", ""),
    ]:
        (folder / name).write_text(content)
        seen.add(identified(folder, tmp_path)["sha256"])
    assert len(seen) == 4
    (folder / "README.md").write_text("words")
    assert identified(folder, tmp_path)["sha256"] in seen
    assert identified(folder, tmp_path)["file"] == "model"


def test_a_failed_evaluation_leaves_nothing(restored, run_folder, tmp_path):
    path = write_rows(tmp_path / "bad.jsonl", [{"UID": "x"}])
    with pytest.raises(ValueError, match="has no 'sentence_good'"):
        run(configured(*words(run_folder, path)))
    assert not (run_folder / "evaluations").exists()
    with pytest.raises(ConfigError, match="checkpoint: nowhere does not exist"):
        run(configured(*words(Path("nowhere"), path)))


@pytest.mark.parametrize(("kind", "dtype"), [("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)])
def test_precision_decides_the_weights_and_autocast(restored, run_folder, pairs, kind, dtype):
    run(configured(*words(run_folder, pairs)))
    run(configured(*words(run_folder, pairs, f"precision={kind}", "name=half")))
    assert restored[1]["dtype"] == dtype
    found = [
        json.loads((run_folder / "evaluations" / name / "items.jsonl").read_text().splitlines()[0])
        for name in ("pairs", "half")
    ]
    difference = abs(found[1]["log_likelihood_good"] - found[0]["log_likelihood_good"])
    assert (difference > 0) == (kind == "bf16-mixed")  # the model here is float32 whatever was asked for
    assert difference < 0.1


def test_a_source_of_another_kind():
    source = "{_target_: mmlab.data.sources.synthetic.SyntheticConfig, size: 3}"
    words = ["checkpoint=c", "evaluation=likelihood", "~evaluation.source", f"+evaluation.source={source}"]
    assert configured(*words).evaluation.source == SyntheticConfig(3)
