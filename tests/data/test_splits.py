"""Parts of a source: disjoint, complete, stable, and cut where they say."""

import gzip
import itertools
import json

import pytest

from mmlab.config import ConfigError, compose
from mmlab.data.config import DataConfig
from mmlab.data.sources.jsonl import JsonlConfig
from mmlab.data.sources.split import SplitConfig
from mmlab.data.sources.synthetic import SyntheticConfig
from mmlab.data.sources.text_files import TextFilesConfig
from mmlab.typed import identity, typed

PARTS = {"train": 0.8, "tuning": 0.1, "validation": 0.1}
PINNED = [10, 15, 17, 34, 41]


@pytest.fixture
def chapters(tmp_path):
    rows = [json.dumps({"text": f"chapter {number}"}) for number in range(53)]
    (tmp_path / "prose.jsonl").write_text("\n".join(rows))
    return JsonlConfig((f"{tmp_path}/prose.jsonl",))


def numbers(source):
    return [int(source[index]["text"].split()[1]) for index in range(len(source))]


@pytest.mark.parametrize("by", ["shuffled", "contiguous"])
@pytest.mark.parametrize("seed", [0, 7])
def test_parts_are_disjoint_and_complete_and_stable(chapters, by, seed):
    found = [numbers(SplitConfig(chapters, PARTS, part, by, seed).build()) for part in PARTS]
    assert [len(part) for part in found] == [42, 6, 5]
    assert sorted(itertools.chain(*found)) == list(range(53))
    assert found == [numbers(SplitConfig(chapters, PARTS, part, by, seed).build()) for part in PARTS]
    if by == "contiguous":
        assert found == [list(range(42)), list(range(42, 48)), list(range(48, 53))]


def test_a_shuffled_division_is_fixed_for_good(chapters):
    """A change here would move held-out samples into the training part of everybody's next run."""
    assert numbers(SplitConfig(chapters, PARTS, "validation").build()) == PINNED
    assert numbers(SplitConfig(chapters, PARTS, "validation", seed=1).build()) != PINNED


def test_a_part_has_the_lengths_names_and_fingerprint_of_its_samples(chapters):
    source = SyntheticConfig(size=20)
    part = SplitConfig(source, {"a": 0.5, "b": 0.5}, "b").build()
    whole = source.build()
    ids = [next(i for i in range(20) if whole[i]["text"] == part[j]["text"]) for j in range(10)]
    assert part.lengths.tolist() == whole.lengths[ids].tolist()
    assert [part.name(j) for j in range(10)] == [f"sample {i}" for i in ids]
    assert ids == sorted(ids) != list(range(10, 20))
    with pytest.raises(IndexError):
        part[10]
    prints = {
        SplitConfig(*arguments).build().fingerprint()
        for arguments in [
            (chapters, PARTS, "train"),
            (chapters, PARTS, "tuning"),
            (chapters, PARTS, "train", "contiguous"),
            (chapters, PARTS, "train", "shuffled", 1),
            (chapters, PARTS | {"train": 0.7, "tuning": 0.2}, "train"),
        ]
    }
    assert len(prints) == 5


@pytest.mark.parametrize(
    ("parts", "part", "message"),
    [
        ({"a": 0.5, "b": 0.4}, "a", r"must add up to 1, got 0\.9"),
        ({"a": 1.0, "b": 0.0}, "a", "must be positive"),
        (PARTS, "test", r"part 'test' is none of \['train', 'tuning', 'validation'\]"),
    ],
)
def test_a_division_that_is_none_is_refused(parts, part, message):
    with pytest.raises(ValueError, match=message):
        SplitConfig(SyntheticConfig(size=5), parts, part)


def test_an_empty_part_is_refused():
    with pytest.raises(ValueError, match=r"part 'validation' with a share of 0\.1 of 4 samples is empty"):
        SplitConfig(SyntheticConfig(size=4), PARTS, "validation").build()


@pytest.mark.parametrize("text", ["abcdefghij" * 7, "añ€😀z" * 13, "x"])
def test_spans_cut_between_characters(tmp_path, text, monkeypatch):
    monkeypatch.setattr("mmlab.data.sources.text_files._CHUNK", 7)
    (tmp_path / "a.txt").write_text(text)
    cuts = [0.0, 0.81, 0.9, 1.0]
    places = [int(len(text) * cut) for cut in cuts]
    spans = list(itertools.pairwise(cuts))
    expected = [text[low:high] for low, high in itertools.pairwise(places)]
    sources = [TextFilesConfig((f"{tmp_path}/a.txt",), span=span).build() for span in spans]
    assert ["".join(source[i]["text"] for i in range(len(source))) for source in sources] == expected
    assert len({source.fingerprint() for source in sources}) == 3


def test_a_span_of_paragraphs(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree three")
    source = TextFilesConfig((f"{tmp_path}/a.txt",), "blank_lines", (0.5, 1.0)).build()
    assert [source[i]["text"] for i in range(len(source))] == ["three three"]
    with pytest.raises(ValueError, match=r"span must be two rising shares in 0\.\.1, got \[0\.9, 0\.1\]"):
        TextFilesConfig(("a",), span=(0.9, 0.1))


def test_shakespeare_is_cut_as_everybody_cuts_it(shared_data):
    text = (shared_data / "text" / "tinyshakespeare.txt").read_text()
    paths = (f"{shared_data}/text/tinyshakespeare.txt",)
    train, validation = (TextFilesConfig(paths, span=span).build() for span in [(0.0, 0.9), (0.9, 1.0)])
    assert train[0]["text"] == text[: int(len(text) * 0.9)]
    assert validation[0]["text"] == text[int(len(text) * 0.9) :]
    assert (len(train[0]["text"]), len(validation[0]["text"])) == (1_003_854, 111_540)


DATA = {
    "shakespeare": "tinyshakespeare.txt",
    "prose": "prose.jsonl.gz",
    "instructions": "instructions.jsonl.gz",
}


@pytest.mark.parametrize("name", DATA)
def test_the_data_sets_are_found_below_one_folder(name, monkeypatch, tmp_path):
    monkeypatch.delenv("MMLAB_DATA", raising=False)
    config = typed(compose([f"data={name}"])["data"], DataConfig)
    with pytest.raises(FileNotFoundError, match=rf"paths of .*: no file matches 'data/{DATA[name]}'"):
        config.train.build(tmp_path)
    monkeypatch.setenv("MMLAB_DATA", "elsewhere")
    moved = typed(compose([f"data={name}"])["data"], DataConfig)
    assert moved != config
    assert identity(moved) == identity(config)


@pytest.mark.parametrize(
    ("name", "sizes", "tuned"),
    [
        ("prose", {"train": 425, "tuning": 53, "validation": 53}, "data.validation.part=tuning"),
        ("instructions", {"train": 342, "tuning": 42, "validation": 43}, "data.validation.part=tuning"),
        ("shakespeare", {"train": 1, "validation": 1}, "data.validation.span=[0.81,0.9]"),
    ],
)
def test_the_parts_of_the_data_sets(name, sizes, tuned, shared_data, monkeypatch, tmp_path):
    monkeypatch.setenv("MMLAB_DATA", str(shared_data / "text"))
    sources = {}
    for overrides in ([], [tuned]):
        config = typed(compose([f"data={name}", *overrides])["data"], DataConfig)
        key = "tuning" if overrides else "validation"
        sources |= {"train": config.train.build(tmp_path), key: config.validation.build(tmp_path)}
    assert {key: len(sources[key]) for key in sizes} == sizes
    samples = {key: {json.dumps(source[i]) for i in range(len(source))} for key, source in sources.items()}
    assert not samples["train"] & samples["validation"]
    assert not samples["tuning"] & samples["validation"]


def test_a_key_of_the_split_is_checked_with_its_path():
    with pytest.raises(ConfigError, match=r"data\.train: part 'tset' is none of"):
        typed(compose(["data=prose", "data.train.part=tset"])["data"], DataConfig, "data")


def test_a_packed_source_splits_as_the_unpacked_one(chapters, tmp_path):
    content = (tmp_path / "prose.jsonl").read_bytes()
    (tmp_path / "prose.jsonl.gz").write_bytes(gzip.compress(content))
    packed = JsonlConfig((f"{tmp_path}/prose.jsonl.gz",))
    first, second = (SplitConfig(source, PARTS, "tuning").build(tmp_path) for source in (packed, chapters))
    assert numbers(first) == numbers(second)
    assert first.fingerprint() == second.fingerprint()
