"""Two processes against one: losses, gradients, validation and sample ids. One start trains every cell."""

import json
from pathlib import Path

import pytest
import torch
from probes import recorded
from tiny_runs import losses, make_run, start, tiny

from mmlab.train import run

LAYOUTS = {"one": (1, 1), "accumulated": (1, 4), "two": (2, 1), "both": (2, 2)}
"""(ranks, micro-batches a rank accumulates) of the same global batch."""

GLOBAL = 8
TAIL = 10
"""Optimizer step that ends the first epoch, with a single sample: the second rank has nothing."""


def cell(root, name, *overrides):
    """A run folder that records what it sees and the gradient of the ragged tail's step."""
    gradient = f"_target_: probes.GradientConfig, step: {TAIL}, path: {root}/{name}.gradient"
    probes = [
        f"+callbacks.record={{_target_: probes.RecordConfig, folder: {root}/seen/{name}}}",
        f"+callbacks.gradient={{{gradient}}}",
    ]
    return make_run(root / name, tiny(root, "logger.tensorboard=false", *probes, *overrides))


def layout(ranks, accumulation, strategy):
    return [
        "data.train.size=51",
        "data.batching=padded",
        "data.unit=samples",
        f"data.batch_size={GLOBAL}",
        f"data.micro_batch_size={GLOBAL // ranks // accumulation}",
        f"devices={ranks}",
        f"strategy={strategy if ranks > 1 else 'single'}",
    ]


@pytest.fixture(scope="session")
def cells(tmp_path_factory):
    """Every cell trained: those of one rank here, those of two in one start of two processes."""
    root = tmp_path_factory.mktemp("cells")
    folders = {}
    for name, (ranks, accumulation) in LAYOUTS.items():
        for strategy in ("ddp", "fsdp") if ranks > 1 else ("single",):
            key = name if ranks == 1 else f"{name}-{strategy}"
            folders[key] = cell(root, key, *layout(ranks, accumulation, strategy))
    two = [str(folder) for key, folder in folders.items() if key.startswith(("two", "both"))]
    (root / "cells.json").write_text(json.dumps(two))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "cells", str(root)]
    done = start(*words)
    assert done.returncode == 0, done.stderr[-4000:]
    for key in ("one", "accumulated"):
        run(folders[key])
    return root, folders


OTHERS = ["accumulated", "two-ddp", "both-ddp", "two-fsdp", "both-fsdp"]


@pytest.mark.parametrize("name", OTHERS)
def test_losses_over_twenty_steps_equal_those_of_one_process(cells, name):
    _, folders = cells
    expected, found = losses(folders["one"]), losses(folders[name])
    assert sorted(found) == list(range(1, 21))
    assert max(abs(found[step] - expected[step]) for step in expected) <= 1e-5
    norms = [losses(folders[key], "train/gradient_norm") for key in ("one", name)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_the_gradient_of_a_ragged_tail_equals_that_of_one_process(cells, name):
    root, _ = cells
    expected, found = (torch.load(root / f"{key}.gradient") for key in ("one", name))
    assert sorted(expected) == sorted(found)
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    worst = max((found[key] - expected[key]).abs().max().item() for key in expected)
    print(f"{name}: largest difference {worst:.1e} of a largest gradient of {scale:.1e}")
    assert worst <= 1e-5 * scale


@pytest.mark.parametrize("name", OTHERS)
def test_validation_sees_each_sample_once_and_gives_the_same_metric(cells, name):
    root, folders = cells
    lines = [line for line in recorded(root / "seen" / name) if line["kind"] == "validation"]
    ids = sorted(sample for line in lines for sample in line["ids"])
    rounds = 2  # after step 10 and after step 20
    expected = sorted(
        s for line in recorded(root / "seen" / "one") if line["kind"] == "validation" for s in line["ids"]
    )
    assert ids == expected
    assert all(ids.count(sample) == rounds for sample in set(ids))
    metrics = [json.loads((folders[key] / "manifest.json").read_text())["metrics"] for key in ("one", name)]
    assert metrics[1]["val/loss"] == pytest.approx(metrics[0]["val/loss"], abs=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_every_step_holds_the_same_samples_and_has_as_many_micro_batches_on_every_rank(cells, name):
    root, _ = cells
    ranks, accumulation = LAYOUTS[name.split("-")[0]]
    steps = {}
    for key in ("one", name):
        steps[key] = {}
        for line in recorded(root / "seen" / key):
            if line["kind"] == "train":
                steps[key].setdefault(line["step"], []).append(line)
    for step, lines in steps[name].items():
        assert len(lines) == ranks * accumulation
        expected = sorted(sample for line in steps["one"][step] for sample in line["ids"])
        assert sorted(sample for line in lines for sample in line["ids"]) == expected
        assert {json.dumps(line["totals"]) for line in lines} == {json.dumps(steps["one"][step][0]["totals"])}
        assert sum(line["counts"]["nll"] for line in lines) == lines[0]["totals"]["nll"]


def test_the_cells_do_exercise_a_tail_that_leaves_one_rank_empty(cells):
    root, _ = cells
    lines = [line for line in recorded(root / "seen" / "two-ddp") if line["kind"] == "train"]
    tail = [line for line in lines if line["step"] == TAIL]
    assert sorted(len(line["ids"]) for line in tail) == [0, 1]
    assert min(line["counts"]["nll"] for line in tail) == 0


def test_checkpoints_have_the_same_keys_and_shapes_whatever_strategy_wrote_them(cells):
    _, folders = cells
    states = {}
    for key, folder in folders.items():
        saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        optimizer = saved["optimizer_states"][0]
        states[key] = (
            {name: tensor.shape for name, tensor in saved["state_dict"].items()},
            {name: sorted(state) for name, state in optimizer["state"].items()},
            [sorted(group["params"]) for group in optimizer["param_groups"]],
        )
    assert all(state == states["one"] for state in states.values())


@pytest.mark.slow
def test_a_sweep_on_two_ranks_makes_one_folder_with_one_for_each_job(tmp_path):
    record = f"+callbacks.record={{_target_: probes.RecordConfig, folder: {tmp_path}/seen}}"
    words = tiny(tmp_path, "strategy=ddp", "devices=2", "schedule.steps=4", "schedule.warmup_steps=1", record)
    done = start("-m", "mmlab.cli", "train", "-m", *words, "seed=1,2")
    assert done.returncode == 0, done.stderr[-4000:]
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    jobs = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert [job.name for job in jobs] == ["0", "1"]
    assert sorted(path.parent for path in (tmp_path / "runs").rglob("events.out.tfevents*")) == jobs
    for rank in (0, 1):
        lines = [json.loads(line) for line in (tmp_path / "seen" / f"{rank}.jsonl").read_text().splitlines()]
        assert {Path(line["folder"]).resolve() for line in lines} == {job.resolve() for job in jobs}
