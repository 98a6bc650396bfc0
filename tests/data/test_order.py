"""The order is a permutation, the same however it is asked for, and without a memory."""

import pickle
import time
import tracemalloc

import numpy as np
import pytest

from mmlab.data.order import Order, SampleGenerators, mixed, sample_generator


@pytest.mark.parametrize("block", [None, 1, 3, 7, 64, 200])
def test_every_size_is_permuted_exactly(block):
    for size in range(131):
        order = Order(size, seed=5, block=block)
        assert sorted(order.indices(2, 0, size).tolist()) == list(range(size))


@pytest.mark.parametrize("block", [None, 7])
def test_parts_are_the_whole(block):
    order = Order(100, seed=1, block=block)
    whole = order.indices(3, 0, 100)
    for width in (1, 9, 64):
        parts = [order.indices(3, at, at + width) for at in range(0, 100, width)]
        assert np.concatenate(parts).tolist() == whole.tolist()
    assert order.indices(3, 100, 200).size == 0


def test_epochs_and_seeds_differ():
    first = Order(1000, seed=0).indices(0, 0, 1000)
    assert (Order(1000, seed=0).indices(1, 0, 1000) == first).sum() < 20
    assert (Order(1000, seed=1).indices(0, 0, 1000) == first).sum() < 20


def test_the_order_never_changes_between_versions():
    assert Order(10, seed=0).indices(0, 0, 10).tolist() == [2, 1, 4, 5, 3, 8, 9, 7, 0, 6]
    assert mixed(1, 2, 3) == 15020427595393229491


def test_without_shuffle_every_epoch_is_in_order():
    assert Order(5, 0, shuffle=False).indices(7, 1, 4).tolist() == [1, 2, 3]


def test_blocks_stay_together():
    ids = Order(103, seed=0, block=10).indices(0, 0, 103)
    changes = np.flatnonzero(np.diff(ids // 10))
    assert len(changes) == 10
    assert not np.array_equal(ids, np.arange(103))


@pytest.mark.parametrize("size", [5, 16, 33])
def test_every_sample_is_as_likely_at_every_position(size):
    """Chi-square over (size - 1)^2 degrees of freedom stays within 4 standard deviations of its mean."""
    epochs, seen = 3000, np.zeros((size, size))
    for epoch in range(epochs):
        seen[np.arange(size), Order(size, seed=11).indices(epoch, 0, size)] += 1
    expected, freedom = epochs / size, (size - 1) ** 2
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) / np.sqrt(2 * freedom) < 4


def test_any_position_costs_the_same_and_no_memory():
    order = Order(10**8, seed=0)
    order.indices(0, 0, 4096)
    seconds = {}
    for start in (10**3, 10**8 - 10**4):
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            order.indices(0, start, start + 4096)
            times.append(time.perf_counter() - begin)
        seconds[start] = min(times)
    assert max(seconds.values()) < 0.02
    tracemalloc.start()
    order.indices(0, 10**7, 10**7 + 4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert len(pickle.dumps(order)) < 300


def test_a_samples_draws_depend_on_seed_epoch_and_sample_alone():
    def draw(*key):
        return sample_generator(*key).integers(1 << 40, size=3).tolist()

    assert draw(0, 1, 2) == draw(0, 1, 2)
    assert len({tuple(draw(*key)) for key in [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 2, 1)]}) == 5


def test_reused_generators_draw_the_same():
    generators = SampleGenerators(seed=3, epoch=4)
    for sample in (9, 2, 9, 10**12):
        generator = generators(sample)
        reference = sample_generator(3, 4, sample)
        assert generator.random() == reference.random()
        assert generator.integers(7) == reference.integers(7)


@pytest.mark.parametrize(("shuffle", "block"), [(True, None), (True, 4), (False, None)])
def test_epochs_end_to_end_are_the_epochs(shuffle, block):
    order = Order(11, 3, shuffle, block)
    whole = np.concatenate([order.indices(epoch, 0, 11) for epoch in range(6)])
    for begin, end in ((0, 66), (5, 6), (10, 12), (25, 61), (7, 7)):
        epochs, ids = order.across(begin, end)
        assert ids.tolist() == whole[begin:end].tolist()
        assert epochs.tolist() == [place // 11 for place in range(begin, end)]
