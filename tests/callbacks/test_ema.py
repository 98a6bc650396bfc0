"""Averaged weights: their values, where they stand in a checkpoint, validation on them, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from probes import StopHere
from tiny_runs import losses, make_run, start, tiny

from mmlab.callbacks.checkpoint import name_of
from mmlab.callbacks.ema import EMA, EMAConfig
from mmlab.config import compose, configure
from mmlab.runconfig import save_config
from mmlab.train import build_data, build_task, build_trainer, run

STEPS = [
    "schedule.steps=6",
    "schedule.warmup_steps=2",
    "trainer.validate_every=2",
    "logger.tensorboard=false",
]
KEEP = ["trainer.checkpoint_every=3", "trainer.keep_last=20"]
AVERAGED = ["callbacks=ema", "callbacks.ema.decay=0.4"]


def words(root: Path, *overrides: str) -> list[str]:
    return tiny(root, *STEPS, *KEEP, *overrides)


def checkpoint(folder: Path, step: int) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / name_of(step), weights_only=True)


def raw(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("network."): value for name, value in saved["state_dict"].items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ema")


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    """Six steps, a checkpoint after each."""
    folder = make_run(root / "whole", words(root, *AVERAGED, "trainer.checkpoint_every=1"))
    run(folder)
    return folder


@pytest.fixture(scope="module")
def plain(root: Path) -> Path:
    """The same without averages."""
    folder = make_run(root / "plain", words(root))
    run(folder)
    return folder


@pytest.fixture(scope="module")
def stopped(root: Path) -> Path:
    """Three steps, a crash in the fourth, and the other three."""
    stop = "+callbacks.stop={_target_: probes.StopConfig, step: 4}"
    folder = make_run(root / "stopped", words(root, *AVERAGED, stop))
    with pytest.raises(StopHere):
        run(folder)
    save_config(configure(words(root, *AVERAGED)), folder)
    run(folder)
    return folder


def test_averages_follow_their_formula_from_the_first_weights(whole: Path, root: Path) -> None:
    task = build_task(configure(words(root)))
    task.configure_model()
    assert task.network is not None
    expected = {name: value.detach().clone() for name, value in task.network.named_parameters()}
    decays = [min(0.4, (1 + t) / (10 + t)) for t in range(6)]
    assert decays[:4] == [0.1, 2 / 11, 0.25, 4 / 13]
    assert decays[5] == 0.4
    for step, decay in enumerate(decays, 1):
        saved = checkpoint(whole, step)
        expected = {n: decay * value + (1 - decay) * raw(saved)[n] for n, value in expected.items()}
        assert saved["ema"]["updates"] == step
        assert sorted(saved["ema"]["weights"]) == sorted(expected)
        for name, value in saved["ema"]["weights"].items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, expected[name], atol=1e-7, rtol=1e-6)


def test_weights_and_averages_differ_and_stand_apart(whole: Path) -> None:
    saved = checkpoint(whole, 6)
    assert sorted(saved["ema"]) == ["decay", "updates", "weights"]
    assert (saved["ema"]["decay"], type(saved["ema"]["updates"])) == (0.4, int)
    weights, averages = raw(saved), saved["ema"]["weights"]
    assert weights.keys() == averages.keys()
    assert not any(torch.equal(weights[n], averages[n]) for n in weights if n.endswith("weight"))


def test_training_is_untouched_to_the_last_bit(whole: Path, plain: Path) -> None:
    assert losses(whole) == losses(plain)
    assert sorted(losses(whole)) == [1, 2, 3, 4, 5, 6]
    for step in (2, 3, 4, 6):  # two after their validation, on averages, has put the weights back
        assert same(raw(checkpoint(whole, step)), raw(checkpoint(plain, step)))


def test_a_resumed_run_has_the_same_weights_averages_updates_and_best(whole: Path, stopped: Path) -> None:
    for step in (3, 6):
        expected, found = checkpoint(whole, step), checkpoint(stopped, step)
        assert same(raw(found), raw(expected))
        assert same(found["ema"]["weights"], expected["ema"]["weights"])
        assert found["ema"]["updates"] == expected["ema"]["updates"] == step
    assert losses(stopped, "val/loss") == losses(whole, "val/loss")
    best = [checkpoint(path, 6)["callbacks"]["Checkpoints"]["best"] for path in (whole, stopped)]
    assert best[0] == best[1] == {6: losses(whole, "val/loss")[6]}


def test_the_first_decay_after_a_resume_is_that_of_the_uninterrupted_run(stopped: Path) -> None:
    ema = EMA(EMAConfig(decay=0.4))
    ema.on_load_checkpoint(None, None, checkpoint(stopped, 3))  # type: ignore[arg-type]
    assert ema.config.decay_of(ema.updates) == 4 / 13


def test_validation_is_of_the_averages(whole: Path, plain: Path, root: Path) -> None:
    found, of_weights = losses(whole, "val/loss"), losses(plain, "val/loss")
    assert all(abs(found[step] - of_weights[step]) > 1e-3 for step in (2, 4, 6))
    config = configure(words(root, "logger.csv=false"))
    for step in (2, 4, 6):
        saved = checkpoint(whole, step)
        task, trainer = build_task(config), build_trainer(config, root / "validated")
        task.configure_model()
        assert task.network is not None
        task.network.load_state_dict(saved["ema"]["weights"], strict=True)
        trainer.validate(task, datamodule=build_data(config), verbose=False)
        assert task.latest["val/loss"] == pytest.approx(found[step], abs=1e-6)


@pytest.mark.slow
def test_validation_of_the_weights_on_request(plain: Path, root: Path) -> None:
    folder = make_run(root / "raw", words(root, *AVERAGED, "callbacks.ema.validate=false"))
    run(folder)
    assert losses(folder, "val/loss") == losses(plain, "val/loss")
    assert checkpoint(folder, 6)["ema"]["updates"] == 6


@pytest.mark.slow
def test_averages_that_begin_with_a_resume_begin_from_its_weights(plain: Path, root: Path) -> None:
    stop = "+callbacks.stop={_target_: probes.StopConfig, step: 4}"
    folder = make_run(root / "late", words(root, stop))
    with pytest.raises(StopHere):
        run(folder)
    late = [*AVERAGED, "callbacks.ema.every=2", "callbacks.ema.warmup=false"]
    save_config(configure(words(root, *late)), folder)
    run(folder)
    weights = [raw(checkpoint(path, step)) for path, step in ((plain, 3), (plain, 4), (plain, 6))]
    averages = checkpoint(folder, 6)["ema"]
    assert averages["updates"] == 2  # after steps 4 and 6
    for name, found in averages["weights"].items():
        first, second, third = (state[name] for state in weights)
        expected = 0.4 * (0.4 * first + 0.6 * second) + 0.6 * third
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.slow
def test_half_width_weights_have_float32_averages_and_keep_their_bits(root: Path) -> None:
    folders = []
    for name, extra in (("half", AVERAGED), ("half-plain", [])):
        folders.append(make_run(root / name, words(root, "precision=bf16-true", *extra)))
        run(folders[-1])
    saved = checkpoint(folders[0], 6)
    assert {value.dtype for value in saved["ema"]["weights"].values()} == {torch.float32}
    assert same(raw(saved), raw(checkpoint(folders[1], 6)))


class Intruder(Callback):
    """Saves a checkpoint in the middle of the second validation, then breaks it off."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: Any, *arguments: Any, **named: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)
            raise StopHere("in validation")


def test_what_breaks_a_validation_off_leaves_and_saves_the_weights(plain: Path, root: Path) -> None:
    config = configure(words(root, *AVERAGED, "logger.csv=false"))
    task, trainer = build_task(config), build_trainer(config, root / "broken")
    trainer.callbacks.insert(0, Intruder(root / "broken.ckpt"))  # type: ignore[attr-defined]
    with pytest.raises(StopHere):
        trainer.fit(task, datamodule=build_data(config))
    expected = raw(checkpoint(plain, 4))
    assert task.network is not None
    assert same(dict(task.network.state_dict()), expected)
    saved = torch.load(root / "broken.ckpt", weights_only=True)
    assert same(raw(saved), expected)
    assert saved["ema"]["updates"] == 4


def test_averages_of_another_network_are_refused(whole: Path, root: Path) -> None:
    folder = make_run(root / "frozen", words(root, *AVERAGED, "adapt.freeze=[stem.*]"))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / name_of(3)).symlink_to(whole / "checkpoints" / name_of(3))
    with pytest.raises(ValueError, match=r"averages \d+ parameters, but \d+ are .*stem.embedding.weight"):
        run(folder)


def test_the_option_is_the_default_callbacks_and_the_averages() -> None:
    callbacks = compose(["callbacks=ema"])["callbacks"]
    averaging = callbacks.pop("ema")
    assert callbacks == compose()["callbacks"]
    assert averaging == {
        "_target_": "mmlab.callbacks.ema.EMAConfig",
        "decay": 0.999,
        "every": 1,
        "warmup": True,
        "validate": True,
    }
    assert configure(["callbacks=ema"]).callbacks["ema"] == EMAConfig()


@pytest.mark.parametrize("fields", [{"decay": 1.0}, {"decay": -0.1}, {"every": 0}])
def test_values_that_cannot_be_meant_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must"):
        EMAConfig(**fields)


@pytest.mark.slow
def test_sharded_weights_have_the_averages_and_the_validation_of_one_process(root: Path) -> None:
    folders = {}
    # No checkpoint after a validation: taking one would free the weights that FSDP2 keeps gathered.
    rare = ["trainer.checkpoint_every=6", "trainer.keep_best=0"]
    for name, devices, strategy in (("one", 1, "single"), ("ddp", 2, "ddp"), ("fsdp", 2, "fsdp")):
        layout = ["data.micro_batch_size=64", f"devices={devices}", f"strategy={strategy}"]
        folders[name] = make_run(root / name, words(root, *AVERAGED, *rare, *layout))
    run(folders["one"])
    (root / "cells.json").write_text(json.dumps([str(folders["ddp"]), str(folders["fsdp"])]))
    done = start(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "cells", str(root)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    expected = checkpoint(folders["one"], 6)
    for name in ("ddp", "fsdp"):
        found = checkpoint(folders[name], 6)
        assert found["ema"]["updates"] == 6
        for pair in ((raw(found), raw(expected)), (found["ema"]["weights"], expected["ema"]["weights"])):
            assert pair[0].keys() == pair[1].keys()
            for key, value in pair[0].items():
                torch.testing.assert_close(value, pair[1][key], atol=1e-5, rtol=0)
        for tag in ("train/loss", "val/loss"):
            difference = [losses(folders[name], tag)[s] - v for s, v in losses(folders["one"], tag).items()]
            assert max(map(abs, difference)) <= 1e-5
