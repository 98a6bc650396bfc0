"""Plans hold every sample once, waste little, and keep to the batch that was asked for."""

import time

import numpy as np
import pytest

from mmlab.data.order import Order
from mmlab.data.packing import Planner, balanced, buckets, pack

MAX = 1024


def lognormal(count, spread=0.6, seed=0):
    """Lengths with a mean of 0.35 of the maximum."""
    mean = np.log(0.35 * MAX) - spread**2 / 2
    draws = np.exp(np.random.default_rng(seed).normal(mean, spread, count))
    return np.clip(draws.round(), 1, MAX).astype(np.int64)


def planner(lengths, batching, batch_size, window=4096, seed=0, max_length=MAX):
    return Planner(Order(len(lengths), seed), batching, batch_size, max_length, window, lengths)


def epoch_of(plans, epoch=0):
    return [step for window in range(plans.windows) for step in plans.steps(epoch, window)]


def samples(steps):
    return [sample for step in steps for row in step for sample in row]


@pytest.mark.parametrize("batching", ["padded", "packed", "bucketed"])
def test_every_sample_is_planned_once_an_epoch(batching):
    lengths = lognormal(1000)
    plans = planner(lengths, batching, 64 if batching == "padded" else 16 * MAX, window=300)
    for epoch in (0, 3):
        assert sorted(samples(epoch_of(plans, epoch))) == list(range(1000))
    assert samples(epoch_of(plans, 0)) != samples(epoch_of(plans, 1))


def test_padded_steps_are_the_order_cut_into_batches():
    plans = planner(lognormal(100), "padded", 16, window=40)
    steps = epoch_of(plans)
    assert [len(step) for step in steps] == [16] * 6 + [4]
    assert samples(steps) == Order(100, 0).indices(0, 0, 100).tolist()


def test_packed_rows_fit_and_waste_less_than_one_percent():
    lengths = lognormal(4096)
    steps = epoch_of(planner(lengths, "packed", 32 * MAX))
    rows = [row for step in steps for row in step]
    assert max(int(lengths[row].sum()) for row in rows) <= MAX
    assert 1 - lengths.sum() / (len(rows) * MAX) < 0.01
    sizes = [len(step) for step in steps]
    assert max(sizes) <= 32
    assert max(sizes) - min(sizes) <= 1


def test_a_packed_window_is_planned_in_milliseconds():
    lengths, seconds = lognormal(4096), []
    for _ in range(5):
        begin = time.perf_counter()
        planner(lengths, "packed", 32 * MAX).steps(0, 0)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.05


def test_packing_does_not_sort_training_by_length():
    lengths = lognormal(4096)
    longest = [max(lengths[row]) for step in epoch_of(planner(lengths, "packed", 8 * MAX)) for row in step]
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.1


def test_pack_by_hand():
    assert sorted(pack(np.array([6, 5, 4, 5]), 10)) == [[0, 2], [1, 3]]
    assert pack(np.array([], np.int64), 10) == []


def test_bucketed_steps_keep_to_the_budget_and_share_lengths():
    lengths, budget = lognormal(2000), 16 * MAX
    steps = epoch_of(planner(lengths, "bucketed", budget))
    places = 0
    for step in steps:
        assert all(len(row) == 1 for row in step)
        taken = lengths[samples([step])]
        assert len(taken) * taken.max() <= budget
        places += len(taken) * taken.max()
    assert lengths.sum() / places > 0.9
    means = [lengths[samples([step])].mean() for step in steps]
    assert means != sorted(means)
    assert buckets(np.array([3, 9, 3, 8]), 9) == [[0, 2], [3], [1]]


def test_a_sample_that_fits_no_row_is_named():
    lengths = np.array([3, 5, 17, 2])
    for batching in ("packed", "bucketed"):
        with pytest.raises(ValueError, match=r"sample 2 has length 17, more than max_length 16"):
            planner(lengths, batching, 32, max_length=16).steps(0, 0)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="batch_size 40 is not a multiple of max_length 16"):
        planner(np.ones(4, np.int64), "packed", 40, max_length=16)
    with pytest.raises(ValueError, match="'packed' needs a source that knows the lengths"):
        Planner(Order(4, 0), "packed", 32, 16, 8)


def test_parts_are_balanced_and_lose_nothing():
    assert [len(part) for part in balanced(list(range(10)), 4)] == [2, 3, 2, 3]
    assert balanced([7], 3) == [[], [], [7]]
    for count in range(20):
        parts = balanced(list(range(count)), 6)
        assert [item for part in parts for item in part] == list(range(count))
