"""The command line: what it answers, with which exit status, and what it imports to do so."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mmlab import cli, launch, records
from mmlab.config import load_config

PROBE = """
import sys
from mmlab.cli import main
status = 0
try:
    main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code or 0
heavy = sorted({"torch", "lightning", "hydra", "numpy", "yaml"} & set(sys.modules))
print("\\nIMPORTED", *heavy)
sys.exit(status)
"""


def _mmlab(*words: str, folder: Path | None = None) -> tuple[int, str, str, set[str]]:
    """(status, output, errors, which of the heavy packages were imported) of a command in a new process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HYDRA", "SLURM"))}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
    )
    output, _, imported = done.stdout.rpartition("IMPORTED")
    return done.returncode, output.rstrip(), done.stderr.strip(), set(imported.split())


@pytest.mark.parametrize("words", [["--help"], [], ["train", "--help"]])
def test_help_reads_files_only(words: list[str]) -> None:
    status, output, errors, imported = _mmlab(*words)
    assert (status, errors, imported) == (0, "", set())
    assert "text/python" in output
    assert "how well does a small decoder predict" in output


def test_version() -> None:
    status, output, _, imported = _mmlab("--version")
    assert (status, output, imported) == (0, "mmlab 0.1.0", set())


def test_config_is_printed_without_torch(tmp_path: Path) -> None:
    status, output, errors, imported = _mmlab(
        "train", "--cfg", "job", "--resolve", "backbone.qk_norm=true", "-p", "backbone", folder=tmp_path
    )
    assert (status, errors) == (0, "")
    assert "qk_norm: true" in output
    assert not imported & {"torch", "lightning"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("backbone.widht=3", "mmlab: backbone.widht: unknown key; did you mean 'width'?"),
        ("+backbone.widht=3", "mmlab: backbone.widht: unknown key; did you mean 'width'?"),
        ("seed=abc", "mmlab: seed: expected int, got 'abc' (str)"),
        ("schedule.shape=cosin", "mmlab: schedule.shape: expected one of 'constant', "),
    ],
)
def test_wrong_words_are_refused_in_one_line_without_torch(word: str, complaint: str, tmp_path: Path) -> None:
    status, output, errors, imported = _mmlab("train", word, folder=tmp_path)
    assert (status, output) == (2, "")
    assert errors.startswith(complaint)
    assert "\n" not in errors
    assert not imported & {"torch", "lightning"}
    assert not list(tmp_path.iterdir())


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["trian"])
    assert stop.value.code == 2
    assert "trian: unknown verb; did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mmlab tr", "train"),
        ("mmlab train experiment=te", "experiment=text/python"),
        ("mmlab train backbone.qk", "backbone.qk_norm="),
        ("mmlab train schedule=c", "schedule=constant schedule=cosine"),
    ],
)
def test_completion(
    line: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setattr(sys, "argv", ["mmlab"])
    cli.main(["-sc", "query=bash"])
    assert expected in capsys.readouterr().out


def test_start_up_is_a_small_part_of_importing_lightning() -> None:
    """Ratios of medians of interleaved runs; the second is measured once, it takes seconds."""
    script = [sys.executable, "-m", "mmlab.cli"]
    helps, configs = [], []
    for _ in range(3):
        helps.append(_seconds([*script, "--help"]))
        configs.append(_seconds([*script, "train", "--cfg", "job"]))
    lightning = _seconds([sys.executable, "-c", "import lightning"])
    assert statistics.median(helps) < lightning / 8
    assert statistics.median(configs) < lightning / 4  # 1/12 on an idle machine


def _seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return time.perf_counter() - start


# -- runs, without the training ------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Folders that training was started in; nothing is trained. Seed 13 fails."""
    folders: list[Path] = []

    def train(arguments: Sequence[str]) -> None:
        folder = Path(arguments[0])
        config = load_config(folder)
        if config.seed == 13:
            raise RuntimeError("the loss is not finite")
        folders.append(folder)

    monkeypatch.setattr(cli, "_train_here", train)
    monkeypatch.setattr(cli, "_data_fingerprint", lambda config: "data1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mmlab"])
    for name in ("HYDRA_FULL_ERROR", "WORLD_SIZE", "RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return folders


def test_a_run_makes_one_folder(trained: list[Path], tmp_path: Path) -> None:
    cli.main(["train", "backbone=tiny", "seed=3"])
    (folder,) = trained
    assert folder.parent == Path("runs/text-python")
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    assert [path.name for path in Path("runs").rglob("manifest.json")] == ["manifest.json"]
    config = load_config(folder)
    assert (config.seed, config.backbone.width) == (3, 32)
    manifest = records.read_manifest(folder)
    assert manifest is not None
    assert manifest["command"] == ["mmlab", "train", "backbone=tiny", "seed=3"]
    assert manifest["identity"] == records.identity(config)


def test_a_sweep_makes_one_folder_with_one_for_each_job(trained: list[Path]) -> None:
    cli.main(["train", "-m", "backbone=tiny", "seed=1,2", "name=a,b"])
    (sweep,) = Path("runs/sweeps").iterdir()
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1", "2", "3"]
    assert {path.name for path in Path("runs").iterdir()} == {"sweeps"}
    assert [folder.resolve() for folder in trained] == [
        (sweep / str(number)).resolve() for number in range(4)
    ]
    assert [(load_config(folder).seed, load_config(folder).name) for folder in trained] == [
        (1, "a"),
        (1, "b"),
        (2, "a"),
        (2, "b"),
    ]


def test_a_failing_job_is_named_and_stops_no_other(
    trained: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "-m", "seed=12,13,14"])
    assert stop.value.code == 1
    assert [load_config(folder).seed for folder in trained] == [12, 14]
    errors = capsys.readouterr().err
    assert "1 of 3 jobs failed:\n  job 1 (seed=13): RuntimeError: the loss is not finite" in errors
    assert "Traceback" in errors


def test_a_failing_run_raises_what_failed(trained: list[Path]) -> None:
    with pytest.raises(RuntimeError, match="the loss is not finite"):
        cli.main(["train", "seed=13"])


def test_a_sweep_with_a_wrong_value_starts_no_job(
    trained: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "-m", "backbone.widht=1,2"])
    assert stop.value.code == 2
    assert "backbone.widht: unknown key; did you mean 'width'?" in capsys.readouterr().err
    assert trained == []


def test_resume_auto_goes_on_in_the_folder_and_ends_when_finished(
    trained: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "backbone=tiny", "resume=auto"]
    cli.main(words)
    assert "resume=auto starts a new run: there is no run of this identity in runs" in capsys.readouterr().out
    (folder,) = trained
    records.start_segment(folder, load_config(folder), "data1")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-0000000500.ckpt").touch()
    cli.main([*words, "data.num_workers=1"])
    assert trained == [folder, folder]
    assert load_config(folder).data.num_workers == 1
    steps = load_config(folder).schedule.steps
    assert f"resuming {folder} after step 500 of {steps}" in capsys.readouterr().out
    (folder / "checkpoints" / f"step-{steps:010d}.ckpt").touch()
    records.finish(folder, "finished", {"val/bits_per_byte": 2.25})
    cli.main(words)
    assert (
        f"{folder} is finished: step {steps} of {steps}, val/bits_per_byte 2.2500" in capsys.readouterr().out
    )
    assert len(trained) == 2


def test_a_sweep_resumes_its_runs_and_leaves_no_empty_folder(trained: list[Path]) -> None:
    cli.main(["train", "-m", "seed=1,2"])
    for folder in list(trained):
        records.start_segment(folder, load_config(folder), "data1")
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "step-0000000005.ckpt").touch()
    cli.main(["train", "-m", "seed=1,2", "resume=auto"])
    first, second = trained[:2], trained[2:]
    assert [folder.resolve() for folder in first] == [folder.resolve() for folder in second]
    assert len([path for path in Path("runs/sweeps").glob("*/*") if path.is_dir()]) == 2


RANK = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
folder = sys.argv[1]
with open(os.path.join(folder, "rank-" + os.environ["RANK"] + ".json"), "w") as file:
    json.dump({name: os.environ[name] for name in names} | {"folder": folder, "argv": sys.argv[1:]}, file)
sys.exit(3 if os.path.exists("fail") and os.environ["RANK"] == "1" else 0)
"""


def test_two_ranks_share_the_folder_of_their_job(
    trained: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "one_rank.py").write_text(RANK)
    monkeypatch.setattr(launch, "RANK_MODULE", "one_rank")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cli.main(["train", "-m", "strategy=ddp", "devices=2", "seed=1,2"])
    (sweep,) = Path("runs/sweeps").iterdir()
    jobs = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert [job.name for job in jobs] == ["0", "1"]
    for number, job in enumerate(jobs):
        ranks = [json.loads((job / f"rank-{rank}.json").read_text()) for rank in range(2)]
        assert [rank["RANK"] for rank in ranks] == ["0", "1"]
        assert {rank["WORLD_SIZE"] for rank in ranks} == {"2"}
        assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
        assert {Path(rank["folder"]).resolve() for rank in ranks} == {job.resolve()}
        assert load_config(job).seed == number + 1
    assert trained == []
    (tmp_path / "fail").touch()
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "strategy=ddp", "devices=2"])
    assert stop.value.code == 3
    (folder,) = Path("runs/text-python").iterdir()
    manifest = records.read_manifest(folder)
    assert manifest is not None
    assert (manifest["status"], manifest["reason"]) == ("failed", "rank 1 ended with exit status 3")


def test_ranks_that_something_else_started_follow_the_first(
    trained: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(Path.cwd()))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    cli.main(["train", "strategy=ddp", "paths.runs=elsewhere"])
    monkeypatch.setenv("RANK", "1")
    cli.main(["train", "strategy=ddp", "paths.runs=elsewhere"])
    assert trained[0].resolve() == trained[1]
    assert len(list(Path("elsewhere").rglob("config.yaml"))) == 1
    assert load_config(trained[1]).devices == 2
    with pytest.raises(SystemExit):
        cli.main(["train", "-m", "seed=1,2"])
