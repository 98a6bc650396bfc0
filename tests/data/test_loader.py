"""Whole steps, in one order, whatever the ranks, micro-batches and workers, and across a resume."""

import logging
import random

import numpy as np
import pytest
import torch

from mmlab.data.loader import TrainLoader
from mmlab.data.order import Order
from mmlab.data.packing import Planner
from mmlab.data.sources.base import BadSampleError
from tests.data.fakes import Echo, Numbers, by_step, train_loader, validation_loader


def ids(batches):
    return [sample for batch in batches for sample in batch.ids.tolist()]


def take(loader, count):
    stream = iter(loader)
    batches = [next(stream) for _ in range(count)]
    state = loader.state_dict()
    stream.close()
    return batches, state


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 1), (2, 2)])
def test_a_resumed_epoch_goes_on_where_it_stopped(workers, batch_size, accumulation):
    steps = 10 // batch_size

    def loader():
        return train_loader(
            Numbers(10), steps, batch_size=batch_size, accumulation=accumulation, workers=workers
        )

    whole = ids(loader())
    stop = 4 // batch_size
    before, state = take(loader(), stop * accumulation)
    resumed = loader()
    resumed.load_state_dict(state)
    assert len(resumed) == steps * accumulation
    after = list(resumed)
    assert len(before) + len(after) == len(resumed)
    assert not set(ids(before)) & set(ids(after))
    assert sorted(ids(before) + ids(after)) == list(range(10))
    assert ids(before) + ids(after) == whole
    assert after[0].step == stop + 1


def test_an_unfinished_step_is_delivered_again():
    loader = train_loader(Numbers(10), 5, batch_size=2, accumulation=2)
    _, state = take(loader, 3)
    assert state["step"] == 1
    resumed = train_loader(Numbers(10), 5, batch_size=2, accumulation=2)
    resumed.load_state_dict(state)
    assert next(iter(resumed)).step == 2


def test_looking_at_an_iterator_delivers_nothing():
    loader = train_loader(Numbers(10), 5, batch_size=2)
    iter(loader)
    assert loader.state_dict()["step"] == 0
    assert len(ids(loader)) == 10


LAYOUTS = [(1, 1, 0), (2, 1, 0), (1, 4, 0), (2, 2, 2), (4, 1, 0)]


@pytest.mark.parametrize("batching", ["padded", "packed", "bucketed"])
def test_a_steps_samples_do_not_depend_on_the_layout(batching):
    source = Numbers(53, lengths=1 + np.arange(53) % 13)
    batch_size = 8 if batching == "padded" else 128

    def steps(ranks, accumulation, workers):
        loaders = [
            train_loader(
                source, 25, batch_size=batch_size, batching=batching, window=24,
                ranks=ranks, rank=rank, accumulation=accumulation, workers=workers,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        streams = [list(loader) for loader in loaders]
        assert {len(stream) for stream in streams} == {25 * accumulation}
        return by_step(*streams)

    reference = steps(*LAYOUTS[0])
    assert all(steps(*layout) == reference for layout in LAYOUTS[1:])
    first = [sample for (epoch, _), step in reference.items() if epoch == 0 for sample in step]
    assert sorted(first) == list(range(53))


def test_a_run_goes_on_with_another_number_of_ranks():
    source = Numbers(30, lengths=1 + np.arange(30) % 11)
    options = {"batch_size": 32, "batching": "packed", "window": 12}
    whole = by_step(list(train_loader(source, 16, **options)))
    two = [train_loader(source, 16, ranks=2, rank=rank, **options) for rank in range(2)]
    (first, state), (second, other) = (take(loader, 3) for loader in two)
    assert state == other
    one = train_loader(source, 16, accumulation=2, **options)
    one.load_state_dict(state)
    assert by_step(first, second, list(one)) == whole
    epochs = {}
    for (epoch, _), step in whole.items():
        epochs.setdefault(epoch, []).extend(step)
    last = epochs.pop(max(epochs))
    assert len(epochs) >= 1
    assert all(sorted(seen) == list(range(30)) for seen in epochs.values())
    assert len(last) == len(set(last))


def test_a_state_from_other_data_is_refused():
    state = train_loader(Numbers(10), 5).state_dict()
    with pytest.raises(ValueError, match="samples was 10 when the state was saved and is 11 now"):
        train_loader(Numbers(11), 5).load_state_dict(state)
    with pytest.raises(ValueError, match=r"batch_size was 1 .* is 2 now"):
        train_loader(Numbers(10), 5, batch_size=2).load_state_dict(state)
    assert all(type(value) is int for value in state.values())


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"shuffle": False}, {"block": 2}, {"batching": "bucketed"}, {"max_length": 32}]
)
def test_a_state_from_another_order_is_refused(change):
    def loader(seed=0, shuffle=True, block=None, batching="packed", max_length=16):
        planner = Planner(Order(10, seed, shuffle, block), batching, 32, max_length, 8, np.ones(10, np.int64))
        return TrainLoader(Numbers(10), Echo(), planner, 5)

    state = loader().state_dict()
    loader().load_state_dict(state)
    settings = "seed, shuffle, shuffle_block, batching and max_length"
    with pytest.raises(ValueError, match=f"another order of the samples; one of {settings} has changed"):
        loader(**change).load_state_dict(state)
    del state["order"]
    with pytest.raises(ValueError, match="another order"):
        loader().load_state_dict(state)


def test_every_micro_batch_carries_the_counts_of_its_whole_step():
    source = Numbers(8, lengths=np.array([1, 2, 3, 4, 5, 6, 7, 8]))
    calls = []

    def all_reduce(values):
        calls.append(values)
        return {name: 2 * value for name, value in values.items()}

    loader = train_loader(source, 2, batch_size=8, ranks=2, rank=1, accumulation=2, all_reduce=all_reduce)
    first, second = list(loader)[:2]
    assert first.totals == second.totals == {"tokens": 2 * (first.counts["tokens"] + second.counts["tokens"])}
    assert [(b.micro, b.ranks, b.accumulation, b.step) for b in (first, second)] == [
        (0, 2, 2, 1),
        (1, 2, 2, 1),
    ]
    assert len(calls) == 2


def test_what_a_short_step_lacks_are_empty_micro_batches():
    batches = list(train_loader(Numbers(5), 2, batch_size=4, accumulation=4))
    assert [len(batch.ids) for batch in batches] == [1, 1, 1, 1, 0, 0, 0, 1]
    empty = batches[4]
    assert empty.counts == {"tokens": 0.0}
    assert empty.tensors["tokens"].tolist() == [[0]]
    assert empty.totals == {"tokens": 1.0}
    assert (empty.step, empty.micro, empty.accumulation) == (2, 0, 4)


def test_random_transforms_depend_on_epoch_and_sample_alone():
    def draws(workers, ranks=1):
        loaders = [train_loader(Numbers(6), 6, batch_size=2, ranks=ranks, rank=rank, workers=workers)
                   for rank in range(ranks)]  # fmt: skip
        return {
            (batch.epoch, sample): draw
            for loader in loaders
            for batch in loader
            for sample, draw in zip(batch.ids.tolist(), batch.tensors["draw"].tolist(), strict=True)
        }

    reference = draws(0)
    assert len(reference) == 12
    assert len(set(reference.values())) == 12
    assert draws(2) == reference
    assert draws(0) == reference
    assert draws(0, ranks=2) == reference
    assert draws(2, ranks=2) == reference


def test_the_global_random_state_is_left_alone():
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    list(train_loader(Numbers(6), 6, workers=1))
    list(validation_loader(Numbers(6), 2))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_leaves_a_hole(workers, caplog):
    def loader(bad):
        return train_loader(Numbers(10, bad=bad), 5, batch_size=2, workers=workers, bad_samples=3)

    whole = by_step(list(loader(())))
    with caplog.at_level(logging.WARNING, logger="mmlab"):
        holed = loader((2, 7, 8))
        batches = list(holed)
    assert by_step(batches) == {key: [i for i in step if i not in (2, 7, 8)] for key, step in whole.items()}
    assert holed.bad == 3
    assert sorted(bad.id for batch in batches for bad in batch.bad) == [2, 7, 8]
    assert sum(batch.totals["tokens"] for batch in batches) == 7
    for sample in (2, 7, 8):
        assert f"bad sample {sample} (training, epoch 0): clip-{sample}.wav is cut off" in caplog.text


def test_a_packed_row_loses_only_the_bad_example():
    source = Numbers(4, lengths=np.array([4, 4, 4, 4]), bad=(1,))
    (batch,) = train_loader(source, 1, batch_size=16, batching="packed", bad_samples=1)
    assert sorted(batch.ids.tolist()) == [0, 2, 3]
    assert batch.tensors["segments"].tolist() == [[1] * 4 + [2] * 4 + [3] * 4 + [0] * 4]


def test_a_step_of_nothing_but_bad_samples_is_empty():
    batches = list(train_loader(Numbers(4, bad=range(4)), 2, batch_size=2, bad_samples=None))
    assert [batch.totals for batch in batches] == [{"tokens": 0.0}] * 2
    assert [len(batch.bad) for batch in batches] == [2, 2]


def test_too_many_bad_samples_end_the_run():
    with pytest.raises(BadSampleError, match=r"1 of 10 samples .*allows 0(.|\n)*clip-3\.wav is cut off"):
        list(train_loader(Numbers(10, bad=[3]), 10))
    with pytest.raises(BadSampleError, match=r"3 of 10 samples .*allows 2"):
        list(train_loader(Numbers(10, bad=[3, 4, 5]), 10, bad_samples=2))


def test_the_limit_holds_for_each_epoch_and_across_a_resume():
    source = Numbers(10, bad=[3, 4])
    assert train_loader(source, 30, bad_samples=2, seed=1).bad == 0
    list(train_loader(source, 30, bad_samples=2))
    _, state = take(train_loader(source, 10, bad_samples=2), 10)
    resumed = train_loader(source, 30, bad_samples=2)
    resumed.load_state_dict(state)
    assert resumed.bad == 2
    assert len(list(resumed)) == 20


def test_all_ranks_stop_together_at_a_bad_sample_of_one():
    def all_reduce(values):
        return {name: value + (1.0 if "bad" in name else 0.0) for name, value in values.items()}

    with pytest.raises(BadSampleError, match="named in the log of another rank"):
        list(train_loader(Numbers(4), 4, ranks=2, batch_size=2, all_reduce=all_reduce))


def test_a_bug_is_no_bad_sample():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        list(train_loader(Broken(3), 3, bad_samples=None))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_validation_sees_every_sample_once(ranks, workers):
    loaders = [
        validation_loader(Numbers(5), rows=1, ranks=ranks, rank=rank, workers=workers)
        for rank in range(ranks)
    ]
    streams = [list(loader) for loader in loaders]
    assert {len(stream) for stream in streams} == {len(loaders[0])} == {-(-5 // ranks)}
    seen = [sample for stream in streams for sample in ids(stream)]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    count = sum(batch.counts["tokens"] for stream in streams for batch in stream)
    values = sum(float((b.tensors["tokens"] - 1).clamp(min=0).sum()) for s in streams for b in s)
    assert values / count == 2.0


def test_validation_is_the_same_each_time_and_may_be_limited():
    loader = validation_loader(Numbers(50), rows=4)
    assert ids(loader) == ids(loader) == list(range(50))
    few = validation_loader(Numbers(50), rows=4, samples=10, seed=3)
    assert len(few) == 3
    assert ids(few) == ids(few)
    assert len(set(ids(few))) == 10
    assert ids(few) != ids(validation_loader(Numbers(50), rows=4, samples=10, seed=4))


def test_validation_puts_like_lengths_together():
    source = Numbers(40, lengths=1 + np.arange(40) % 10)
    loader = validation_loader(source, rows=4, sort_within=40)
    assert sorted(ids(loader)) == list(range(40))
    assert all("segments" not in batch.tensors for batch in loader)


def test_validation_counts_bad_samples_anew_each_pass():
    loader = validation_loader(Numbers(9, bad=[1, 4]), rows=2, bad_samples=2)
    for _ in range(3):
        assert len(ids(loader)) == 7
        assert loader.bad == 2
    with pytest.raises(BadSampleError, match=r"clip-1\.wav"):
        list(validation_loader(Numbers(9, bad=[1, 4]), rows=2, bad_samples=0))


def test_what_is_empty_is_refused():
    with pytest.raises(ValueError, match="no samples to train on"):
        train_loader(Numbers(0), 1)
    with pytest.raises(ValueError, match="no samples to validate on"):
        validation_loader(Numbers(0), 1)


def test_a_hundred_million_samples_cost_nothing():
    loader = train_loader(Numbers(10**8), 10**6, batch_size=4, window=4096)
    state = loader.state_dict() | {"window": 10**8 // 4096 - 1, "step": 999_999, "step_in_window": 3}
    loader.load_state_dict(state)
    (last,) = list(loader)
    assert last.step == 10**6
    assert len(last.ids) == 4
    assert Echo().padding == {"tokens": 0}
