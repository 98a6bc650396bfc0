"""Where a run goes: a new folder, or the one that `resume` names or finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmlab import launch, records
from mmlab.config import ConfigError, RunConfig, configure
from mmlab.runconfig import PathsConfig
from mmlab.strategies.config import DDPConfig


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return configure(["backbone=tiny", "data=synthetic"])


@pytest.fixture
def config(base: RunConfig, tmp_path: Path) -> RunConfig:
    return replace(base, paths=PathsConfig(str(tmp_path / "runs")), resume="auto")


def _started(config: RunConfig, *, data: str = "data1", step: int | None = 10) -> Path:
    folder = launch.create_run(config)
    records.start_segment(folder, config, data)
    (folder / "checkpoints").mkdir()
    if step is not None:
        (folder / "checkpoints" / f"step-{step:010d}.ckpt").touch()
    return folder


def _decide(config: RunConfig, data: str = "data1") -> tuple[launch.Place, str]:
    said: list[str] = []
    place = launch.decide(config, lambda _: data, say=said.append)
    return place, "\n".join(said)


def test_auto_takes_the_newest_of_the_same_identity(config: RunConfig) -> None:
    _started(config)
    newest = _started(config, step=20)
    _started(replace(config, seed=1))
    place, said = _decide(replace(config, devices=1))
    assert place == launch.Place(newest, resumed=True)
    assert said == f"resuming {newest} after step 20 of {config.schedule.steps}"


def test_auto_says_why_it_starts_anew(config: RunConfig) -> None:
    place, said = _decide(config)
    assert said == f"resume=auto starts a new run: there is no run of this identity in {config.paths.runs}"
    assert not place.resumed
    _, said = _decide(config)
    assert said == f"resume=auto starts a new run: {place.folder} is the same run, but has no checkpoint"


def test_auto_names_the_first_differences_of_a_near_miss(config: RunConfig) -> None:
    other = replace(config, seed=5, backbone=replace(config.backbone, depth=3, dropout=0.1, qk_norm=True))
    folder = _started(other)
    _, said = _decide(config)
    assert said == (
        f"resume=auto starts a new run: the newest run named text-python, {folder}, differs in "
        "seed (5 there, 0 now), backbone.depth (3 there, 2 now), backbone.qk_norm (True there, False now) "
        "and 1 more"
    )


def test_auto_does_not_go_on_with_other_data(config: RunConfig) -> None:
    folder = _started(config)
    place, said = _decide(config, "data2")
    assert place.folder != folder
    assert said.endswith(f"{folder} has the same configuration, but its data was another (fingerprint data1)")


def test_auto_leaves_a_run_that_is_being_trained_alone(config: RunConfig) -> None:
    folder = _started(config)
    with records.claim(folder):
        place, said = _decide(config)
    assert place.folder != folder
    assert said.endswith(f"{folder} is the same run, but another process is training it")


def test_auto_falls_back_to_an_older_run_with_a_checkpoint(config: RunConfig) -> None:
    folder = _started(config)
    _started(config, step=None)
    assert _decide(config)[0].folder == folder


def test_a_named_run_must_be_the_same_run(config: RunConfig, tmp_path: Path) -> None:
    folder = _started(config)
    named = replace(config, resume=str(folder))
    assert _decide(named)[0] == launch.Place(folder, resumed=True)
    with pytest.raises(ConfigError, match=r"is another run: seed \(0 there, 4 now\)$"):
        _decide(replace(named, seed=4))
    with pytest.raises(ConfigError, match=r"read other data \(fingerprint data1\)"):
        _decide(named, "data2")
    with pytest.raises(ConfigError, match="is not a run folder"):
        _decide(replace(config, resume=str(tmp_path)))
    with records.claim(folder), pytest.raises(ConfigError, match="another process is training"):
        _decide(named)


def test_a_finished_run_is_said_to_be_finished(config: RunConfig) -> None:
    folder = _started(config, step=config.schedule.steps)
    records.finish(folder, "finished", {"val/loss": 1.25, "train/loss": 1.0})
    place, said = _decide(config)
    assert place == launch.Place(folder, resumed=True, finished=True)
    assert (
        said
        == f"{folder} is finished: step {config.schedule.steps} of {config.schedule.steps}, val/loss 1.2500"
    )


def test_none_always_starts_anew(config: RunConfig) -> None:
    _started(config)
    place, said = _decide(replace(config, resume="none"))
    assert (place.resumed, said) == (False, "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, (2, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),  # an interactive allocation
    ],
)
def test_outer_launchers_are_recognised(
    environment: dict[str, str], expected: tuple[int, int] | None
) -> None:
    here = launch.outer(environment)
    assert (here and (here.rank, here.size)) == expected


def test_devices_must_fit_the_processes(config: RunConfig) -> None:
    here = launch.Outer(0, 2, "key")
    with pytest.raises(ConfigError, match="needs strategy=ddp"):
        launch.with_outer_devices(config, here)
    with pytest.raises(ConfigError, match="devices=4, but 2 processes were started"):
        launch.with_outer_devices(replace(config, devices=4, strategy=DDPConfig()), here)
    assert launch.with_outer_devices(replace(config, strategy=DDPConfig()), here).devices == 2
