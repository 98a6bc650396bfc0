"""Samples in training: what stands on the page, and that training goes on as without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import losses, make_run, start, tiny

from mmlab.callbacks.samples import Samples, SamplesConfig, as_markdown
from mmlab.train import run

STEPS = ["backbone.dropout=0.2", "schedule.steps=8", "schedule.warmup_steps=2", "trainer.validate_every=2"]
SAMPLES = (
    "+callbacks.samples={_target_: mmlab.callbacks.samples.SamplesConfig, every: 2, prompts: ['', 'abc'], "
    "sampling: {max_new_tokens: 5}}"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """The same run with and without samples."""
    root = tmp_path_factory.mktemp("samples")
    plain = make_run(root / "plain", tiny(root, *STEPS))
    shown = make_run(root / "shown", tiny(root, *STEPS, SAMPLES))
    run(plain)
    run(shown)
    return plain, shown


@pytest.mark.parametrize("tag", ["train/loss", "train/gradient_norm", "val/loss"])
def test_training_goes_on_as_without_them_to_the_last_bit(runs, tag):
    plain, shown = runs
    assert losses(shown, tag) == losses(plain, tag)
    assert max(losses(plain, "train/loss")) == 8


def test_text_stands_on_the_page_at_every_second_validation(runs):
    found = EventAccumulator(str(runs[1]), size_guidance={"tensors": 0}).Reload()
    shown = found.Tensors("samples/text/text_summary")
    assert [event.step for event in shown] == [4, 8]
    texts = [event.tensor_proto.string_val[0].decode() for event in shown]
    assert all(text.count("the model writes") == 2 for text in texts)
    assert all("after\n\n    abc\n\nthe model writes" in text for text in texts)


def test_a_prompt_and_its_continuation_stand_as_they_are():
    assert as_markdown(["", "a\n*b*"], ["x", " y\nz"]) == (
        "the model writes\n\n    x\n\nafter\n\n    a\n    *b*\n\nthe model writes\n\n     y\n    z"
    )


def test_the_count_of_validations_is_kept_over_a_resume():
    first, second = Samples(SamplesConfig(every=3)), Samples(SamplesConfig(every=3))
    first.validations = 2
    second.load_state_dict(first.state_dict())
    assert second.validations == 2


def test_impossible_values_are_refused():
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        SamplesConfig(every=0)
    with pytest.raises(ValueError, match="prompts must hold at least one"):
        SamplesConfig(prompts=())


@pytest.mark.slow
def test_a_sharded_network_writes_and_trains_on(tmp_path):
    layout = ["strategy=fsdp", "devices=2"]
    folders = [
        make_run(tmp_path / name, tiny(tmp_path, *STEPS, *layout, *more))
        for name, more in (("plain", []), ("shown", [SAMPLES]))
    ]
    (tmp_path / "cells.json").write_text(json.dumps([str(folder) for folder in folders]))
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
    assert losses(folders[1]) == losses(folders[0])
    found = EventAccumulator(str(folders[1]), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in found.Tensors("samples/text/text_summary")] == [4, 8]
