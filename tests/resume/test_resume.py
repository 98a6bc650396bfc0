"""A run that is stopped and resumed is the run that was not stopped: losses, weights, samples, logs."""

import json
import shutil

import pytest
import torch
from probes import StopHere, recorded
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import losses, make_run, tiny

from mmlab.callbacks.checkpoint import name_of
from mmlab.config import configure
from mmlab.runconfig import save_config
from mmlab.train import run

BASE = [
    "backbone.dropout=0.1",
    "data.train.size=41",
    "data.batching=padded",
    "data.unit=samples",
    "data.batch_size=8",
    "data.micro_batch_size=4",
    "trainer.checkpoint_every=6",
    "trainer.validate_every=6",
]


def record(root, name):
    return f"+callbacks.record={{_target_: probes.RecordConfig, folder: {root}/seen/{name}}}"


def weights(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run: twenty steps over three epochs, dropout on, two micro-batches a step."""
    root = tmp_path_factory.mktemp("whole")
    folder = make_run(root / "run", tiny(root, *BASE, record(root, "whole")))
    run(folder)
    return root, folder


@pytest.fixture(scope="module")
def stopped(whole, tmp_path_factory):
    """A run that dies in step 9, after a checkpoint at step 6, and goes on with another number of workers."""
    root = tmp_path_factory.mktemp("stopped")
    words = tiny(root, *BASE)
    stop = "+callbacks.stop={_target_: probes.StopConfig, step: 9}"
    folder = make_run(root / "run", [*words, record(root, "before"), stop])
    with pytest.raises(StopHere):
        run(folder)
    before = losses(folder)
    save_config(configure([*words, record(root, "after"), "data.num_workers=2"]), folder)
    run(folder)
    return root, folder, before


def test_losses_are_the_same_to_the_last_digit(whole, stopped):
    assert losses(stopped[1]) == losses(whole[1])
    assert sorted(losses(whole[1])) == list(range(1, 21))


def test_what_was_logged_before_a_checkpoint_survives_a_kill_right_after_it(tmp_path):
    words = tiny(tmp_path, *BASE, "trainer.log_every=6", "trainer.validate_every=20", "data.batch_size=4")
    folder = make_run(tmp_path / "run", [*words, "+callbacks.stop={_target_: probes.StopConfig, step: 7}"])
    with pytest.raises(StopHere):
        run(folder)
    text = (folder / "at-stop.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in text[1:]] == ["1", "6"]
    assert (folder / "checkpoints" / "last.ckpt").resolve().name == "step-0000000006.ckpt"


def test_final_weights_are_the_same_bits(whole, stopped):
    expected, found = weights(whole[1]), weights(stopped[1])
    assert sorted(expected) == sorted(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_resumed_process_sees_exactly_the_samples_that_were_left_in_their_order(whole, stopped):
    def seen(root, name, after=0):
        lines = [line for line in recorded(root / "seen" / name) if line["kind"] == "train"]
        return [(line["epoch"], line["step"], line["ids"]) for line in lines if line["step"] > after]

    assert seen(stopped[0], "after") == seen(whole[0], "whole", after=6)
    first_epoch = [ids for epoch, _, ids in seen(whole[0], "whole") if epoch == 0]
    flat = sorted(sample for ids in first_epoch for sample in ids)
    assert flat == list(range(len(flat)))


def test_validation_is_neither_lost_nor_repeated(whole, stopped):
    def validated(root, *names):
        lines = [line for name in names for line in recorded(root / "seen" / name)]
        return sum(len(line["ids"]) for line in lines if line["kind"] == "validation")

    assert validated(stopped[0], "before", "after") == validated(whole[0], "whole")


def test_tensorboard_shows_one_run_and_takes_repeated_steps_from_the_second_process(stopped):
    _, folder, _ = stopped
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == list(range(1, 21))
    assert not [path for path in folder.rglob("events.out.tfevents*") if path.parent != folder]


def test_the_manifest_tells_of_both_processes(stopped):
    manifest = json.loads((stopped[1] / "manifest.json").read_text())
    assert [segment["from_step"] for segment in manifest["segments"]] == [0, 6]
    assert [segment["status"] for segment in manifest["segments"]] == ["failed", "finished"]
    assert manifest["status"] == "finished"


def test_a_second_run_of_a_finished_folder_trains_nothing_and_leaves_one_last_checkpoint(stopped):
    _, folder, _ = stopped
    before = weights(folder)
    metrics = json.loads((folder / "manifest.json").read_text())["metrics"]
    assert run(folder) == metrics
    assert all(torch.equal(before[name], value) for name, value in weights(folder).items())
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert [name for name in names if "last" in name] == ["last.ckpt"]
    assert (folder / "checkpoints" / "last.ckpt").resolve().name == "step-0000000020.ckpt"


def test_checkpoints_are_direct_children_and_as_many_as_asked_for(stopped):
    folder = stopped[1] / "checkpoints"
    assert not [path for path in folder.rglob("*") if path.is_dir()]
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    best = saved["callbacks"]["Checkpoints"]["best"]
    values = losses(stopped[1], "val/loss")
    lowest = min(values, key=lambda step: values[step])
    assert best == {lowest: values[lowest]}
    assert (folder / "best.ckpt").resolve().name == name_of(lowest)
    files = {path.name for path in folder.glob("step-*.ckpt")}
    assert files == {name_of(step) for step in (18, 20, lowest)}
    assert {path.name for path in folder.iterdir()} == files | {"last.ckpt", "best.ckpt"}


def test_what_a_kill_after_the_last_checkpoint_left_undone_is_completed(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[1], folder, symlinks=True)
    finished = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**finished, "status": "running", "metrics": {}}))
    (folder / "checkpoints" / "last.ckpt").unlink()
    (folder / "checkpoints" / ".step-0000000020.ckpt.1.partial").touch()
    metrics = run(folder)
    mended = json.loads((folder / "manifest.json").read_text())
    assert (mended["status"], mended["metrics"]) == ("finished", finished["metrics"])
    assert metrics == finished["metrics"]
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {path.name for path in (whole[1] / "checkpoints").iterdir()}


def test_keeping_no_best_keeps_the_newest_alone(tmp_path):
    folder = make_run(tmp_path / "run", tiny(tmp_path, "trainer.keep_best=0", "trainer.keep_last=1"))
    run(folder)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {name_of(20), "last.ckpt"}


def test_an_unknown_monitor_names_the_metrics_there_are(tmp_path):
    folder = make_run(tmp_path / "run", tiny(tmp_path, "trainer.monitor=val/typo"))
    with pytest.raises(ValueError, match=r"'val/typo' is no metric of this run; there are train/.* val/loss"):
        run(folder)


def test_a_run_without_validation_data_still_ends_with_a_checkpoint(tmp_path):
    folder = make_run(tmp_path / "run", tiny(tmp_path, "data.validation=null"))
    assert "train/loss" in run(folder)
    assert (folder / "checkpoints" / "last.ckpt").resolve().name == name_of(20)


def test_a_checkpoint_alone_rebuilds_the_network(stopped):
    from mmlab.tasks.text import LanguageModeling

    path = stopped[1] / "checkpoints" / "last.ckpt"
    task = LanguageModeling.load_from_checkpoint(path, weights_only=True)
    expected = torch.load(path, weights_only=True)
    assert all(torch.equal(value, expected["state_dict"][name]) for name, value in task.state_dict().items())
    assert "${" not in json.dumps(expected["hyper_parameters"])
    assert plain(expected["hyper_parameters"])


def plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def test_resuming_with_another_accumulation_goes_on_at_the_same_optimizer_step(whole, tmp_path):
    words = tiny(tmp_path, *[word for word in BASE if "micro" not in word and "dropout" not in word])
    folders = {}
    for name, first, second in (("same", 8, 8), ("other", 2, 4)):
        stop = "+callbacks.stop={_target_: probes.StopConfig, step: 8}"
        folder = make_run(tmp_path / name, [*words, stop, f"data.micro_batch_size={first}"])
        with pytest.raises(StopHere):
            run(folder)
        save_config(configure([*words, f"data.micro_batch_size={second}"]), folder)
        run(folder)
        folders[name] = losses(folder)
    assert sorted(folders["other"]) == list(range(1, 21))
    assert max(abs(folders["other"][step] - folders["same"][step]) for step in range(1, 21)) <= 1e-5
