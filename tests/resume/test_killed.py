"""`kill -9` between two checkpoints, from the command line: the run goes on as if nothing had happened."""

import hashlib
import shutil

import pytest
import torch
from probes import recorded
from tiny_runs import losses, start

from mmlab.data.sources.python_files import PythonFilesConfig

pytestmark = pytest.mark.slow

STEPS, EVERY, KILLED = 40, 8, 13


def words(root, *more):
    """`mmlab train` on real text: two workers, two micro-batches a step, dropout, more than one epoch."""
    return [
        "-m",
        "mmlab.cli",
        "train",
        "experiment=text/python",
        "data.train.split=tuning",
        "data.validation.split=tuning",
        "data.validation_samples=64",
        "data.max_length=64",
        "data.batch_size=4096",
        "data.micro_batch_size=2048",
        "data.validation_micro_batch_size=2048",
        "data.num_workers=2",
        "backbone=tiny",
        "backbone.dropout=0.1",
        f"schedule.steps={STEPS}",
        "schedule.warmup_steps=4",
        f"trainer.checkpoint_every={EVERY}",
        f"trainer.validate_every={STEPS}",
        "trainer.log_every=1",
        "trainer.accelerator=cpu",
        "trainer.threads=1",
        f"paths.runs={root}/runs",
        f"paths.cache={root}/cache",
        *more,
    ]


def kill(step):
    return f"+callbacks.kill={{_target_: probes.KillConfig, step: {step}}}"


def samples():
    """Windows of the training source, counted from the documents themselves."""
    source = PythonFilesConfig(split="tuning").build()
    return sum(-(-(len(source[index]["text"].encode()) + 1) // 64) for index in range(len(source)))


def only_run(root):
    (folder,) = (path.parent for path in (root / "runs").rglob("manifest.json"))
    return folder


def weights_hash(folder):
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].numpy().tobytes())
    return digest.hexdigest()


def trained(root, *more):
    done = start(*words(root, *more))
    assert done.returncode == 0, done.stderr[-4000:]
    return only_run(root)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    return trained(root, f"+callbacks.record={{_target_: probes.RecordConfig, folder: {root}/seen}}")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The runs folder of a process that was killed in the middle of a step."""
    root = tmp_path_factory.mktemp("killed")
    done = start(*words(root, kill(KILLED)))
    assert done.returncode == -9
    folder = only_run(root)
    assert (folder / "checkpoints" / "last.ckpt").resolve().name == "step-0000000008.ckpt"
    return root


@pytest.mark.parametrize("workers", [2, 0])
def test_a_killed_run_resumes_to_the_same_losses_and_weights(whole, killed, tmp_path, workers):
    root = tmp_path / "root"
    shutil.copytree(killed, root)
    folder = trained(root, "resume=auto", f"data.num_workers={workers}")
    assert losses(folder) == losses(whole)
    assert sorted(losses(folder)) == list(range(1, STEPS + 1))
    print(f"{workers} workers: {STEPS} losses equal, weights {weights_hash(folder)[:16]}")
    assert weights_hash(folder) == weights_hash(whole)


def test_two_ranks_to_the_middle_then_one_see_every_sample_of_the_epoch_once(whole, tmp_path):
    record = "+callbacks.record={_target_: probes.RecordConfig, folder: " + f"{tmp_path}/%s}}"
    two = ["devices=2", "strategy=ddp", "data.num_workers=0"]
    done = start(*words(tmp_path, *two, record % "two", kill(KILLED)))
    assert done.returncode != 0
    folder = trained(tmp_path, "resume=auto", "data.num_workers=0", record % "one")

    def seen(name, first, last):
        lines = [line for line in recorded(tmp_path / name) if line["kind"] == "train"]
        return [line for line in lines if first <= line["step"] <= last]

    lines = seen("two", 1, EVERY) + seen("one", EVERY + 1, STEPS)
    first_epoch = sorted(sample for line in lines if line["epoch"] == 0 for sample in line["ids"])
    assert first_epoch == list(range(samples()))
    assert any(line["epoch"] == 1 for line in lines)  # so the first epoch was seen to its end
    assert len({line["micro"] for line in seen("two", 1, EVERY)}) == 1
    undisturbed = [line for line in recorded(whole.parents[2] / "seen") if line["kind"] == "train"]
    for step in range(1, STEPS + 1):
        expected = sorted(s for line in undisturbed if line["step"] == step for s in line["ids"])
        assert sorted(s for line in lines if line["step"] == step for s in line["ids"]) == expected
    print(f"{len(first_epoch)} samples of the first epoch, each once")
    assert sorted(losses(folder)) == list(range(1, STEPS + 1))
