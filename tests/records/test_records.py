"""The manifest of a run, what it says about the code, and finding runs again."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mmlab import provenance, records
from mmlab.config import RunConfig, configure, identity, to_plain
from mmlab.strategies.config import DDPConfig


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return configure(["backbone=tiny", "data=synthetic", "seed=7"])


def test_manifest_says_what_the_run_was(config: RunConfig, tmp_path: Path) -> None:
    records.write_manifest(tmp_path, config, command=["mmlab", "train", "seed=7"])
    records.start_segment(tmp_path, config, "data1")
    records.start_segment(tmp_path, replace(config, devices=2, strategy=DDPConfig()), "data1", from_step=5)
    records.finish(tmp_path, "finished", {"val/loss": 1.5, "val/perplexity": float("nan")})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["identity"] == identity(config)
    assert manifest["data_fingerprint"] == "data1"
    assert manifest["seed"] == 7
    assert manifest["command"] == ["mmlab", "train", "seed=7"]
    assert manifest["status"] == "finished"
    assert manifest["metrics"] == {"val/loss": 1.5, "val/perplexity": "nan"}
    assert [(part["from_step"], part["devices"], part["strategy"]) for part in manifest["segments"]] == [
        (0, 1, "single"),
        (5, 2, "ddp"),
    ]
    assert manifest["segments"][1]["status"] == "finished"
    assert manifest["code"]["version"] == provenance.code_state().version
    assert manifest["versions"].keys() >= {"python", "torch", "lightning", "hydra-core", "numpy"}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", manifest["versions"]["torch"])
    assert manifest["hardware"]["cores"] >= 1
    assert manifest["hardware"]["memory_gib"] > 0
    assert str(tmp_path) not in (tmp_path / "manifest.json").read_text()
    assert str(Path.home()) + "/" not in (tmp_path / "manifest.json").read_text()
    assert not list(tmp_path.glob("*.partial"))


def test_a_failure_keeps_its_reason(config: RunConfig, tmp_path: Path) -> None:
    records.start_segment(tmp_path, config, "data1")  # begins the manifest where there is none
    records.finish(tmp_path, "failed", {"train/loss": 2.0}, reason="RuntimeError: out of memory")
    manifest = records.read_manifest(tmp_path)
    assert manifest is not None
    assert (manifest["status"], manifest["reason"]) == ("failed", "RuntimeError: out of memory")


def test_a_run_is_not_continued_on_other_data_or_as_another_run(config: RunConfig, tmp_path: Path) -> None:
    records.start_segment(tmp_path, config, "data1")
    with pytest.raises(ValueError, match="the run began with data_fingerprint data1, which now is data2"):
        records.start_segment(tmp_path, config, "data2")
    with pytest.raises(ValueError, match="the run began with identity"):
        records.start_segment(tmp_path, replace(config, seed=8), "data1")


def test_runs_are_found_newest_start_first(config: RunConfig, tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "1", tmp_path / "sweeps" / "t" / "0", tmp_path / "a" / "2"]
    for folder in folders:
        folder.mkdir(parents=True)
        records.write_manifest(folder, config)
        time.sleep(0.002)
    records.start_segment(folders[0], config, "data1")
    (tmp_path / "a" / "3").mkdir()
    (tmp_path / "a" / "3" / "manifest.json").write_text('{"half": ')
    assert [folder for folder, _ in records.find_runs(tmp_path)] == [folders[0], folders[2], folders[1]]
    assert records.find_runs(tmp_path / "none") == []


def test_newest_checkpoint_is_read_from_its_name(tmp_path: Path) -> None:
    assert records.last_step(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-0000000007.ckpt", "step-0000000012.ckpt", "step-0000000099.ckpt.part", "last.ckpt"):
        (tmp_path / "checkpoints" / name).touch()
    assert records.last_step(tmp_path) == 12


def test_differences_name_both_values_and_leave_out_how(config: RunConfig) -> None:
    other = to_plain(replace(config, seed=8, name="b", strategy=DDPConfig(), devices=2))
    other["data"]["num_workers"] = 3
    other["backbone"]["extra"] = 1
    del other["backbone"]["window"]
    other["backbone"]["qk_norm"] = True
    assert records.differences(config, other) == [
        ("seed", 7, 8),
        ("backbone.qk_norm", False, True),
        ("backbone.extra", None, 1),
    ]


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    with records.claim(tmp_path) as first, records.claim(tmp_path) as second:
        assert (first, second) == (True, False)
    with records.claim(tmp_path) as again:
        assert again


def test_new_folders_differ_and_sort_by_time(tmp_path: Path) -> None:
    names = [records.new_folder(tmp_path / "x").name for _ in range(20)]
    assert len(set(names)) == 20
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{4}", name) for name in names)


# -- the code -----------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mmlab").mkdir()
    (tmp_path / "conf").mkdir()
    (tmp_path / "mmlab" / "a.py").write_text("one = 1\n")
    (tmp_path / "conf" / "a.yaml").write_text("one: 1\n")
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "mmlab")
    provenance.code_state.cache_clear()
    yield tmp_path
    provenance.code_state.cache_clear()


def _git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_without_git_there_is_a_version_and_nothing_else(checkout: Path) -> None:
    state = provenance.code_state()
    assert re.fullmatch("[0-9a-f]{64}", state.version)
    assert (state.commit, state.dirty, state.diff) == (None, None, None)


def test_an_outer_repository_is_not_taken_for_the_labs_own(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _git(checkout, "init", "-q")
    (checkout / "site" / "mmlab").mkdir(parents=True)
    monkeypatch.setattr(provenance, "PACKAGE", checkout / "site" / "mmlab")
    assert provenance.code_state().commit is None


def test_version_follows_code_and_conf_only(checkout: Path) -> None:
    before = provenance.code_version()
    (checkout / "README.md").write_text("x")
    assert provenance.code_version() == before
    (checkout / "conf" / "a.yaml").write_text("one: 2\n")
    assert provenance.code_version() != before


def test_diff_rebuilds_the_working_tree(
    checkout: Path, config: RunConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _git(checkout, "init", "-q")
    _git(checkout, "add", ".")
    _git(checkout, "commit", "-q", "-m", "first")
    provenance.code_state.cache_clear()
    assert provenance.code_state().dirty is False
    (checkout / "mmlab" / "a.py").write_text("one = 2\n")
    (checkout / "mmlab" / "new.py").write_text("two = 2\nno newline")
    (checkout / "empty").touch()
    (checkout / "binary").write_bytes(b"\0\1")
    provenance.code_state.cache_clear()
    run = tmp_path_factory.mktemp("run")
    manifest = records.write_manifest(run, config)
    assert manifest["code"]["dirty"] is True
    assert manifest["code"]["commit"] == _git(checkout, "rev-parse", "HEAD").strip()
    assert manifest["code"]["diff"] == "code.diff"
    assert "# untracked, not kept: binary (2 bytes)" in (run / "code.diff").read_text()
    clone = tmp_path_factory.mktemp("clone")
    _git(clone, "clone", "-q", str(checkout), ".")
    _git(clone, "apply", str(run / "code.diff"))
    for name in ("mmlab/a.py", "mmlab/new.py", "empty"):
        assert (clone / name).read_bytes() == (checkout / name).read_bytes()


def test_a_repository_without_a_commit(checkout: Path) -> None:
    _git(checkout, "init", "-q")
    state = provenance.code_state()
    assert state.commit is None
    assert state.dirty is True
    assert "+one = 1" in str(state.diff)
