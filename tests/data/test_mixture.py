"""Mixtures: exact shares, whole passes over every source, and the same order in every layout."""

import itertools
import logging
from collections import Counter

import numpy as np
import pytest

from mmlab.config import compose
from mmlab.data.config import DataConfig
from mmlab.data.datamodule import DataModule
from mmlab.data.loader import Execution, TrainLoader
from mmlab.data.mixing import BLOCK, MixtureOrder, apportioned
from mmlab.data.packing import Planner
from mmlab.data.sources.base import BadSampleError
from mmlab.data.sources.mixture import Mixture, MixtureConfig
from mmlab.data.sources.split import SplitConfig
from mmlab.data.sources.synthetic import SyntheticConfig
from mmlab.data.sources.text_files import TextFilesConfig
from mmlab.typed import typed
from tests.data.fakes import ByteWindows, Echo, Numbers, by_step

SIZES, SHARES = (700, 50, 3), (0.6, 0.15, 0.25)


def stream(order, count, start=0):
    """The first draws of a run, over its epochs."""
    epochs = -(-(start + count) // order.size)
    draws = np.concatenate([order.indices(epoch, 0, order.size) for epoch in range(epochs)])
    return draws[start : start + count]


def owners(order, draws):
    return np.searchsorted(np.cumsum(order.sizes), draws % order.size, side="right")


@pytest.mark.parametrize("shares", [SHARES, (1 / 3, 1 / 3, 1 / 3), (0.9986, 0.001, 0.0004)])
def test_every_thousand_draws_hold_the_shares(shares):
    order = MixtureOrder(SIZES, shares, seed=3)
    drawn = owners(order, stream(order, 10 * BLOCK)).reshape(10, BLOCK)
    counts = np.stack([(drawn == source).sum(1) for source in range(3)], axis=1)
    exact = np.array(shares) * BLOCK
    assert (np.abs(counts - exact) < 1 + 1e-6).all()
    if shares == SHARES:
        assert counts.tolist() == [[600, 150, 250]] * 10
    assert (np.abs(counts.sum(0) - 10 * exact) <= 2).all()


def test_a_million_draws_hold_the_exact_shares():
    order = MixtureOrder((5, 7, 11), (0.712345, 0.287652, 0.000003), seed=0)
    assert order.quotas.tolist() == [712345, 287652, 3]
    assert order._counts.sum(0).tolist() == [712345, 287652, 3]
    assert (order._counts.sum(1) == BLOCK).all()
    assert (order._counts.max(0) - order._counts.min(0)).max() == 1
    rare = np.flatnonzero(order._counts[:, 2])
    assert np.diff(rare).min() > 200


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("block", [None, 8])
def test_every_sample_is_drawn_once_a_pass(shuffle, block):
    order = MixtureOrder(SIZES, SHARES, seed=1, shuffle=shuffle, block=block)
    draws = stream(order, 4000)
    assert len(set(draws.tolist())) == 4000
    drawn, first = owners(order, draws), np.cumsum([0, *SIZES])
    for source, size in enumerate(SIZES):
        mine = draws[drawn == source]
        passes = mine // order.size
        assert passes.tolist() == (np.arange(len(mine)) // size).tolist()
        ids = mine % order.size - first[source]
        whole = ids[: len(ids) // size * size].reshape(-1, size)
        assert (np.sort(whole, axis=1) == np.arange(size)).all()
        if not shuffle:
            assert (whole == np.arange(size)).all()
        elif size > 3:
            assert len({tuple(row) for row in whole.tolist()}) == len(whole)


@pytest.mark.parametrize("sizes", [SIZES, (1200, 900, 2)])
def test_any_part_is_found_alone(sizes):
    order = MixtureOrder(sizes, SHARES, seed=5)
    for epoch in (0, 1, 1503):
        whole = order.indices(epoch, 0, order.size)
        assert len(whole) == order.size
        for start, stop in ((0, 1), (1, 70), (order.size - 9, order.size + 50), (300, 300), (-4, 2)):
            expected = whole[max(start, 0) : max(stop, 0)]
            assert order.indices(epoch, start, stop).tolist() == expected.tolist()


def test_seeds_differ_and_sources_are_spread():
    one, other = (stream(MixtureOrder(SIZES, SHARES, seed), 2000) for seed in (0, 1))
    assert (one != other).mean() > 0.9
    drawn = owners(MixtureOrder(SIZES, SHARES, 0), one)
    runs = max(len(list(group)) for value, group in itertools.groupby(drawn.tolist()) if value == 1)
    assert runs < 8  # a share of 0.15, drawn as if at random
    assert (owners(MixtureOrder(SIZES, SHARES, 1), other) != drawn).mean() > 0.3


def test_what_cannot_be_mixed_is_refused():
    for sizes, shares, message in [
        ((1, 2), (1.0,), "2 sizes do not fit 1 shares"),
        ((1, 0), (0.5, 0.5), r"needs a sample, the sizes are \[1, 0\]"),
        ((1, 1), (0.5, 0.6), "add up to 1"),
        ((1, 1), (1 - 1e-7, 1e-7), r"a share of 1e-07 is less than one draw in 1,000,000"),
    ]:
        with pytest.raises(ValueError, match=message):
            MixtureOrder(sizes, shares, 0)
    source = SyntheticConfig(size=2)
    for sources, weights, message in [
        ({}, {}, "at least one source"),
        ({"a": source}, {"b": 1.0}, r"weights are given for \['b'\], sources are \['a'\]"),
        ({"a": source}, {"a": 0.0}, r"weights\.a must be positive, got 0"),
        ({"a": MixtureConfig({"b": source}, {"b": 1.0})}, {"a": 1.0}, r"sources\.a is a mixture itself"),
    ]:
        with pytest.raises(ValueError, match=message):
            MixtureConfig(sources, weights)
    with pytest.raises(ValueError, match="a mixture cannot be split"):
        SplitConfig(MixtureConfig({"a": source}, {"a": 1.0}), {"all": 1.0}, "all")


def test_shares_are_rounded_to_the_largest_remainders():
    assert apportioned((1, 1, 1), 100).tolist() == [34, 33, 33]
    assert apportioned((0.5, 0.25, 0.25), 1000).tolist() == [500, 250, 250]


def numbers(lengths=True):
    """250 + 30 + 4 samples of uneven lengths; the number of a sample is its place in its own source."""
    sizes = (250, 30, 4)
    return Mixture(
        {
            name: Numbers(size, 1 + np.arange(size) % 13 if lengths else None)
            for name, size in zip("abc", sizes, strict=True)
        },
        {"a": 0.6, "b": 0.3, "c": 0.1},
        "samples",
    )


def loader(steps, batching="padded", ranks=1, rank=0, accumulation=1, workers=0, source=None, **order):
    source = source or numbers()
    batch_size = 8 if batching == "padded" else 128
    mixture = MixtureOrder(source.sizes, source.shares(), **({"seed": 0} | order))
    planner = Planner(mixture, batching, batch_size, 16, 24, source.lengths)
    return TrainLoader(source, Echo(), planner, steps, Execution(ranks, rank, accumulation, workers))


@pytest.mark.parametrize("batching", ["padded", "packed", "bucketed"])
def test_the_order_does_not_depend_on_the_layout(batching):
    def steps(ranks, accumulation, workers):
        return by_step(
            *(list(loader(60, batching, ranks, rank, accumulation, workers)) for rank in range(ranks))
        )

    reference = steps(1, 1, 0)
    assert all(steps(*layout) == reference for layout in [(1, 1, 2), (2, 2, 0)])
    assert all(0 <= sample < 284 for step in reference.values() for sample in step)
    first = Counter(sample for (epoch, _), step in reference.items() if epoch == 0 for sample in step)
    assert sum(first.values()) == 284
    assert sum(first[sample] for sample in range(280, 284)) in range(20, 38)
    assert (
        max(first[sample] for sample in range(280, 284)) - min(first[sample] for sample in range(280, 284))
        <= 1
    )


@pytest.mark.parametrize("batching", ["padded", "packed", "bucketed"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(batching):
    steps = 60
    whole = by_step(list(loader(steps, batching)))
    cut = loader(steps, batching, ranks=2)
    streams = [iter(loader(steps, batching, ranks=2, rank=1)), iter(cut)]
    before = [[next(batches) for _ in range(41)] for batches in streams]
    resumed = loader(steps, batching, accumulation=2, workers=2)
    resumed.load_state_dict(cut.state_dict())
    assert by_step(*before, list(resumed)) == whole
    assert len({epoch for epoch, _ in whole}) >= 2


def test_a_state_from_other_weights_is_refused():
    state = loader(5).state_dict()
    other = numbers()
    other.weights["a"] = 0.5
    with pytest.raises(ValueError, match=r"one of seed, .* its weights, batching and max_length has changed"):
        loader(5, source=other).load_state_dict(state)
    smaller = Mixture(
        {name: Numbers(size) for name, size in (("a", 249), ("b", 31), ("c", 4))}, other.weights, "samples"
    )
    with pytest.raises(ValueError, match="another order"):
        loader(5, source=smaller).load_state_dict(state)


def test_a_repeated_sample_is_transformed_anew():
    draws = {}
    for workers in (0, 2):
        for batch in loader(80, workers=workers, accumulation=2 if workers else 1):
            for sample, draw in zip(batch.ids.tolist(), batch.tensors["draw"].tolist(), strict=True):
                draws.setdefault((workers, batch.epoch, sample), []).append(draw)
    small = [values for (workers, epoch, sample), values in draws.items() if sample >= 280 and not workers]
    assert max(map(len, small)) > 4
    every = [draw for (workers, *_), values in draws.items() if not workers for draw in values]
    assert len(set(every)) == len(every) == 80 * 8 - 2 * 4  # an epoch's last step has 4 of 8 samples
    again = {key[1:]: sorted(values) for key, values in draws.items() if key[0] == 2}
    assert again == {key[1:]: sorted(values) for key, values in draws.items() if key[0] == 0}


def test_components_are_found_by_their_samples():
    source = numbers()
    assert len(source) == 284
    assert [source[index]["value"] for index in (0, 249, 250, 280, 283)] == [0, 249, 0, 0, 3]
    assert [source.name_of(index) for index in (249, 250, 283)] == ["a", "b", "c"]
    assert source.name(251) == "b: sample 1"
    assert source.lengths[[0, 251, 283]].tolist() == [1, 2, 4]
    assert np.asarray(source.lengths).tolist() == [source[index]["length"] for index in range(284)]
    assert numbers(lengths=False).lengths is None
    with pytest.raises(IndexError):
        source[284]


def test_weights_by_tokens_draw_long_samples_less_often():
    parts = {"long": Numbers(40, np.full(40, 12)), "short": Numbers(60, np.full(60, 3))}
    by_tokens = Mixture(parts, {"short": 1.0, "long": 1.0}, "tokens")
    assert by_tokens.shares() == pytest.approx((0.2, 0.8))
    assert Mixture(parts, {"short": 1.0, "long": 1.0}, "samples").shares() == (0.5, 0.5)
    order = MixtureOrder(by_tokens.sizes, by_tokens.shares(), 0)
    lengths = by_tokens.lengths[stream(order, 10 * BLOCK) % 100]
    assert lengths[lengths == 12].sum() == lengths[lengths == 3].sum() == 24_000
    bare = Mixture({"x": Numbers(3), "y": Numbers(3, np.ones(3))}, {"x": 1, "y": 1}, "tokens")
    with pytest.raises(ValueError, match="need lengths, which the samples of 'x' do not have"):
        bare.shares()


def data(tmp_path, **changes):
    (tmp_path / "good").mkdir(exist_ok=True)
    for name in "abc":
        (tmp_path / "good" / f"{name}.txt").write_text(name * 40)
    mixture = MixtureConfig(
        {"files": TextFilesConfig((f"{tmp_path}/good/*.txt",)), "letters": SyntheticConfig(size=40)},
        {"files": 1.0, "letters": 3.0},
    )
    options = {"train": mixture, "validation": mixture, "batch_size": 8, "max_length": 16, "bad_samples": 1}
    config = DataConfig(**(options | changes))
    return DataModule(config, ByteWindows(16), seed=0, total_steps=40, cache=tmp_path / "cache")


def test_a_data_module_mixes_what_the_task_reads(tmp_path, caplog):
    module = data(tmp_path)
    assert module.train.sizes[0] == 9  # three files of three windows
    with caplog.at_level(logging.INFO, logger="mmlab"):
        batches = list(module.loader())
    assert "mixture: files gives 25 % of the samples drawn, of 9" in caplog.text
    drawn = [module.train.name_of(sample) for batch in batches for sample in batch.ids.tolist()]
    assert abs(drawn.count("files") / len(drawn) - 0.25) < 0.07
    seen = [sample for batch in module.validation_loader() for sample in batch.ids.tolist()]
    assert seen == list(range(len(module.validation)))


def test_the_fingerprint_follows_the_weights_and_the_sources(tmp_path):
    module = data(tmp_path)
    mixture = module.config.train
    changed = [
        MixtureConfig(mixture.sources, {"files": 1.0, "letters": 2.0}),
        MixtureConfig(mixture.sources, mixture.weights, "tokens"),
        MixtureConfig(mixture.sources | {"letters": SyntheticConfig(size=41)}, mixture.weights),
    ]
    prints = {data(tmp_path, train=train).fingerprint() for train in [mixture, *changed]}
    assert len(prints) == 4
    assert data(tmp_path).fingerprint() == module.fingerprint()


def test_bad_samples_are_limited_for_each_source(tmp_path, caplog):
    folder = tmp_path / "good"
    folder.mkdir()
    (folder / "x.txt").write_bytes(b"\xff")
    other = tmp_path / "other"
    other.mkdir()
    (other / "y.txt").write_bytes(b"\xff")
    (other / "z.txt").write_text("fine")
    module = data(tmp_path)
    sources = module.config.train.sources | {"other": TextFilesConfig((f"{other}/*.txt",))}
    train = MixtureConfig(sources, {"files": 1, "letters": 1, "other": 1})
    with caplog.at_level(logging.WARNING, logger="mmlab"):
        data(tmp_path, train=train).setup("fit")
    assert "bad sample 3 (train.files)" in caplog.text
    assert "bad sample 0 (train.other)" in caplog.text
    (other / "y2.txt").write_bytes(b"\xff")
    with pytest.raises(BadSampleError, match=r"2 of 3 samples \(train\.other\) .*allows 1"):
        data(tmp_path, train=train).setup("fit")


def test_the_example_in_conf(tmp_path):
    config = typed(compose(["data=mixture", "data.train.weights.long=1"])["data"], DataConfig)
    module = DataModule(config, ByteWindows(32), seed=0, total_steps=125, cache=tmp_path)
    drawn = [module.train.name_of(i) for batch in module.loader() for i in batch.ids.tolist()][:1000]
    assert drawn.count("short") in range(495, 506)
    less = ["~data.train.sources.short", "~data.train.weights.short"]
    assert list(typed(compose(["data=mixture", *less])["data"], DataConfig).train.sources) == ["long"]
