"""From a configuration to batches: splitting the global batch, bad documents, the place of a rank."""

import logging
from dataclasses import replace

import pytest

from mmlab.data.config import DataConfig
from mmlab.data.datamodule import DataModule, accumulation
from mmlab.data.sources.base import BadSampleError
from mmlab.data.sources.synthetic import SyntheticConfig
from mmlab.data.sources.text_files import TextFilesConfig
from tests.data.fakes import ByteWindows, by_step

SYNTHETIC = SyntheticConfig(size=40, longest=50)


def config(**changes):
    options = {
        "train": SYNTHETIC,
        "validation": SyntheticConfig(size=7, seed=1),
        "batch_size": 8,
        "max_length": 16,
    }
    return DataConfig(**(options | changes))


def module(tmp_path, config, steps=12, seed=0):
    return DataModule(config, ByteWindows(config.max_length), seed=seed, total_steps=steps, cache=tmp_path)


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({}, 1, 1),
        ({}, 8, 1),
        ({"micro_batch_size": 2}, 2, 2),
        ({"micro_batch_size": 8}, 1, 1),
        ({"batching": "packed", "unit": "tokens", "batch_size": 128, "micro_batch_size": 32}, 2, 2),
        ({"batching": "bucketed", "unit": "tokens", "batch_size": 100, "micro_batch_size": 25}, 2, 2),
    ],
)
def test_accumulation_follows_from_the_global_batch(changes, ranks, expected):
    assert accumulation(config(**changes), ranks) == expected


def test_what_cannot_be_split_names_the_numbers():
    with pytest.raises(ValueError, match=r"data\.batch_size 8 cannot be split evenly over 3 ranks"):
        accumulation(config(), 3)
    with pytest.raises(
        ValueError, match=r"batch_size 8 is not a multiple of 12 = 3 ranks x .*micro_batch_size 4"
    ):
        accumulation(config(micro_batch_size=4), 3)
    packed = config(batching="packed", unit="tokens", batch_size=48)
    with pytest.raises(ValueError, match="48 cannot be split evenly over 2 ranks rows of max_length 16"):
        accumulation(packed, 2)
    bucketed = config(batching="bucketed", unit="tokens", batch_size=48)
    assert accumulation(bucketed, 3) == 1
    with pytest.raises(ValueError, match=r"48 over 4 ranks leaves 12, no room .* data\.max_length 16"):
        accumulation(bucketed, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"bad_samples": -1}, "bad_samples must be at least 0, got -1"),
        ({"batching": "packed"}, r"'packed' counts batch_size \(8\) in tokens, but unit is 'samples'"),
        ({"unit": "tokens"}, r"'padded' counts batch_size \(8\) in samples, but unit is 'tokens'"),
        ({"batching": "packed", "unit": "tokens", "batch_size": 40}, "40 is not a multiple of max_length 16"),
        ({"batching": "bucketed", "unit": "tokens"}, "batch_size 8 has no room .* max_length 16"),
        (
            {"batching": "bucketed", "unit": "tokens", "batch_size": 96, "micro_batch_size": 12},
            "micro_batch_size 12 has no room .* max_length 16",
        ),
        ({"micro_batch_size": 3}, "batch_size 8 is not a multiple of micro_batch_size 3"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_batches_come_without_a_trainer(tmp_path):
    data = module(tmp_path, config())
    batches = list(data.loader())
    assert len(batches) == 12
    assert batches[0].tensors["tokens"].shape[0] == 8
    assert batches[0].totals == batches[0].counts
    expected = int(SYNTHETIC.build().lengths.sum()) + 2 * 40  # each text has one letter more, and an end
    assert sum(batch.counts["nll"] for batch in batches if batch.epoch == 0) == expected
    ids = sorted(i for batch in data.validation_loader() for i in batch.ids.tolist())
    assert ids == list(range(len(data.validation)))


@pytest.mark.parametrize("batching", ["padded", "packed", "bucketed"])
def test_ranks_share_what_one_process_reads(tmp_path, batching):
    unit = (
        {"unit": "samples", "batch_size": 8}
        if batching == "padded"
        else {"unit": "tokens", "batch_size": 128}
    )
    data = module(tmp_path, config(batching=batching, **unit))
    whole = by_step(list(data.loader()))
    micro = 2 if batching == "padded" else 32
    split = module(tmp_path, replace(data.config, micro_batch_size=micro))
    loaders = [split.loader(ranks=2, rank=rank) for rank in range(2)]
    assert len(loaders[0]) == 12 * 2
    assert by_step(*map(list, loaders)) == whole


@pytest.mark.parametrize("micro", [16, 24, 32])
def test_a_bucketed_micro_batch_exceeds_its_size_by_less_than_one_sample(tmp_path, micro):
    options = {"batching": "bucketed", "unit": "tokens", "batch_size": 96, "micro_batch_size": micro}
    steps = {}
    for batch in module(tmp_path, config(**options)).loader():
        steps.setdefault(batch.step, []).append(batch.tensors["tokens"])
    assert len(steps) == 12
    for parts in steps.values():
        longest = max(part.shape[1] for part in parts)
        assert max(part.numel() for part in parts) < micro + longest


def test_documents_that_cannot_be_read_count_against_the_limit(tmp_path, caplog):
    for name, content in (("a", b"good"), ("b", b"\xff"), ("c", b"fine"), ("d", b"\xfe")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    source = TextFilesConfig((f"{tmp_path}/*.txt",))
    for _ in range(2):
        with pytest.raises(
            BadSampleError, match=r"2 of 4 samples \(train\) .*allows 1(.|\n)*b\.txt: not UTF-8"
        ):
            module(tmp_path / "cache", config(train=source, validation=None, bad_samples=1)).setup("fit")
    with caplog.at_level(logging.WARNING, logger="mmlab"):
        data = module(tmp_path / "cache", config(train=source, validation=None, bad_samples=2))
        data.prepare_data()
    assert len(data.train) == 2
    assert "bad sample 3 (train): " in caplog.text
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match=r"data\.validation is null"):
        data.validation_loader()


def test_the_fingerprint_follows_what_is_read_and_not_how(tmp_path):
    reference = module(tmp_path, config()).fingerprint()
    assert module(tmp_path, config(micro_batch_size=4, num_workers=2)).fingerprint() == reference
    changed = [
        config(train=replace(SYNTHETIC, seed=5)),
        config(validation=None),
        config(validation=replace(SYNTHETIC, seed=5)),
        config(max_length=8),
    ]
    prints = {module(tmp_path, other).fingerprint() for other in changed}
    assert len(prints | {reference}) == 5
    assert not list(tmp_path.rglob("tokens.bin"))


def test_a_rank_takes_its_place_from_the_strategy(tmp_path):
    class Strategy:
        distributed_sampler_kwargs = {"num_replicas": 1, "rank": 0}  # noqa: RUF012
        root_device = __import__("torch").device("cpu")

    class Trainer:
        strategy, world_size, global_rank = Strategy(), 2, 1

    data = module(tmp_path, config())
    data.trainer = Trainer()
    assert data.train_dataloader().execution.ranks == 1
    Strategy.distributed_sampler_kwargs = None
    execution = data.val_dataloader().execution
    assert (execution.ranks, execution.rank, execution.pin_memory) == (2, 1, False)
    Strategy.distributed_sampler_kwargs = {"num_replicas": 4, "rank": 3}
    execution = data.train_dataloader().execution
    assert (execution.ranks, execution.rank, execution.accumulation) == (4, 3, 1)
