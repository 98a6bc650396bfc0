"""Evaluations in training: what they publish and keep, and that training goes on as without them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from tiny_runs import losses, make_run, start, tiny

from mmlab.callbacks.config import CallbackConfig
from mmlab.callbacks.evaluation import PeriodicEvaluationConfig
from mmlab.evaluation.base import EvaluationConfig, Result
from mmlab.evaluation.minimal_pairs import MinimalPairsConfig
from mmlab.train import run
from tests.evaluation.toys import write_rows

DROPOUT = ["backbone.dropout=0.2", "schedule.steps=8", "schedule.warmup_steps=2"]
PAIRS = [
    {"UID": group, "sentence_good": good, "sentence_bad": bad}
    for group, good, bad in [("x", "abc", "cba"), ("x", "hello", "h"), ("y", "a b", "b"), ("y", "zz", "q")]
]


def periodic(root, every=3):
    """Overrides that add the callback with two evaluations."""
    path = write_rows(root / "pairs.jsonl", PAIRS)
    pairs = f"pairs: {{_target_: mmlab.evaluation.minimal_pairs.MinimalPairsConfig, path: {path}}}"
    source = "{_target_: mmlab.data.sources.synthetic.SyntheticConfig, size: 7, longest: 40, seed: 5}"
    text = (
        f"text: {{_target_: mmlab.evaluation.likelihood.LikelihoodConfig, source: {source}, max_length: 32}}"
    )
    return [
        f"+callbacks.evaluation={{_target_: mmlab.callbacks.evaluation.PeriodicEvaluationConfig, "
        f"every: {every}, cache: {root}/cache, evaluation: {{{pairs}, {text}}}}}"
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """The same run with and without evaluations."""
    root = tmp_path_factory.mktemp("periodic")
    plain = make_run(root / "plain", tiny(root, *DROPOUT))
    measured = make_run(root / "measured", tiny(root, *DROPOUT, *periodic(root)))
    run(plain)
    run(measured)
    return plain, measured


@pytest.mark.parametrize("tag", ["train/loss", "train/gradient_norm", "val/loss"])
def test_training_goes_on_as_without_them_to_the_last_bit(runs, tag):
    plain, measured = runs
    assert losses(measured, tag) == losses(plain, tag)
    assert max(losses(plain, "train/loss")) == 8


def test_metrics_are_published_at_every_third_step_and_the_last(runs):
    _, measured = runs
    accuracy, loss = losses(measured, "eval/pairs/accuracy"), losses(measured, "eval/text/loss")
    assert sorted(accuracy) == sorted(loss) == [3, 6, 8]
    assert loss[3] == pytest.approx(math.log(257), abs=1)
    assert loss[8] < loss[6] < loss[3]
    manifest = json.loads((measured / "manifest.json").read_text())
    assert manifest["metrics"]["eval/text/loss"] == loss[8]
    assert not any("accuracy/" in name for name in manifest["metrics"])


def test_items_stand_in_the_run_folder_and_give_what_was_published(runs):
    _, measured = runs
    names = sorted(path.name for path in (measured / "evaluations").iterdir())
    assert names == ["step-0000000003", "step-0000000006", "step-0000000008"]
    folder = measured / "evaluations" / names[1]
    found = json.loads((folder / "pairs" / "metrics.json").read_text())
    assert found["step"] == 6
    assert found["evaluation"]["_target_"] == "mmlab.evaluation.minimal_pairs.MinimalPairsConfig"
    assert sorted(found["metrics"]) == ["accuracy", "accuracy/x", "accuracy/y"]
    items = [json.loads(line) for line in (folder / "text" / "items.jsonl").read_text().splitlines()]
    assert [item["id"] for item in items] == list(range(7))
    published = sum(item["nats"] for item in items) / sum(item["tokens"] for item in items)
    assert losses(measured, "eval/text/loss")[6] == pytest.approx(published, rel=1e-12)


def test_the_likelihood_of_the_validation_data_is_the_validation_loss(tmp_path):
    source = "{_target_: mmlab.data.sources.synthetic.SyntheticConfig, size: 11, longest: 32, seed: 1}"
    text = (
        f"text: {{_target_: mmlab.evaluation.likelihood.LikelihoodConfig, source: {source}, max_length: 32}}"
    )
    callback = (
        f"+callbacks.evaluation={{_target_: mmlab.callbacks.evaluation.PeriodicEvaluationConfig, every: 100, "
        f"cache: {tmp_path}/cache, evaluation: {{{text}}}}}"
    )
    steps = ["schedule.steps=3", "schedule.warmup_steps=1"]
    found = run(make_run(tmp_path / "run", tiny(tmp_path, callback, *steps)))
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert found[f"eval/text/{name}"] == pytest.approx(found[f"val/{name}"], rel=1e-5)


# -- an evaluation that disturbs all that it can -------------------------------------------------------------


@dataclass(frozen=True)
class RudeConfig(EvaluationConfig):
    """Draws from every random state, changes modes, and says what it was given."""

    def label(self):
        return "rude"

    def run(self, model, cache, execution=None):
        draws = [random.random(), np.random.rand(), torch.rand(()).item()]
        modes = [module.training for module in model.network.modules()]
        model.network.train()
        return Result(
            {"modes": float(any(modes)), "grad": float(torch.is_grad_enabled())}, {}, [{"x": draws}], ""
        )


@dataclass(frozen=True)
class NoticedConfig(CallbackConfig):
    """Writes down random states and modes after every step, and the time that it is told of."""

    path: str

    def build(self):
        return Noticed(Path(self.path))


class Noticed(Callback):
    def __init__(self, path):
        self.path, self.seconds = path, []

    def leave_out(self, seconds):
        self.seconds.append(seconds)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        modes = [module.training for module in pl_module.network.modules()]
        draws = [str(random.getstate()), str(np.random.get_state()), torch.get_rng_state().tolist()]
        with self.path.open("a") as file:
            file.write(json.dumps({"modes": modes, "draws": draws, "seconds": self.seconds}) + "\n")


@pytest.mark.parametrize("state", ["modes", "draws"])
def test_random_states_and_modes_are_what_they_were(tmp_path, state):
    steps = ["schedule.steps=3", "schedule.warmup_steps=1"]
    seen = {}
    for name in ("plain", "rude"):
        random.seed(0)
        np.random.seed(0)
        rude = (
            "+callbacks.a={_target_: mmlab.callbacks.evaluation.PeriodicEvaluationConfig, every: 1, "
            f"evaluation: {{rude: {{_target_: {__name__}.RudeConfig}}}}}}"
        )
        noticed = f"+callbacks.b={{_target_: {__name__}.NoticedConfig, path: {tmp_path}/{name}}}"
        folder = make_run(
            tmp_path / f"run-{name}", tiny(tmp_path, *steps, *([rude] if name == "rude" else []), noticed)
        )
        found = run(folder)
        seen[name] = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert len(seen["rude"]) == 3
    assert [line[state] for line in seen["rude"]] == [line[state] for line in seen["plain"]]
    assert all(all(line["modes"]) for line in seen["plain"])
    assert (found["eval/rude/modes"], found["eval/rude/grad"]) == (0.0, 0.0)
    assert [len(line["seconds"]) for line in seen["rude"]] == [1, 2, 3]


def test_impossible_values_are_refused():
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        PeriodicEvaluationConfig(0, {})
    with pytest.raises(ValueError, match="'a/b' becomes a folder"):
        PeriodicEvaluationConfig(1, {"a/b": MinimalPairsConfig("p")})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_measure_and_train_as_one(tmp_path, runs, strategy):
    layout = [f"strategy={strategy}", "devices=2"]
    folders = {
        name: make_run(tmp_path / name, tiny(tmp_path, *DROPOUT, *layout, *more))
        for name, more in (("plain", []), ("measured", periodic(tmp_path)))
    }
    (tmp_path / "cells.json").write_text(json.dumps([str(folder) for folder in folders.values()]))
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "cells",
        str(tmp_path),
    ]
    done = start(*words)
    assert done.returncode == 0, done.stderr[-4000:]
    for tag in ("train/loss", "train/gradient_norm", "val/loss"):
        assert losses(folders["measured"], tag) == losses(folders["plain"], tag)
    weights = [
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in folders.values()
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert sorted(losses(folders["measured"], "eval/text/loss")) == [3, 6, 8]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_evaluations_compile_nothing_and_change_nothing_of_a_compiled_run(tmp_path):
    counters = pytest.importorskip("torch._dynamo.utils").counters
    found = {}
    for name, more in (("plain", []), ("measured", periodic(tmp_path, every=2))):
        torch._dynamo.reset()
        counters.clear()
        steps = ["schedule.steps=4", "schedule.warmup_steps=1", "trainer.compile=true"]
        folder = make_run(tmp_path / name, tiny(tmp_path, *steps, *more))
        run(folder)
        found[name] = losses(folder), counters["stats"]["unique_graphs"]
    assert found["measured"] == found["plain"]
    assert found["plain"][1] > 0
