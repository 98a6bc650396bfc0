"""Documents as tokens: every token a target once, and a cache that is whole or absent."""

import multiprocessing
import pickle
import time

import numpy as np
import pytest

from mmlab.data.sources import tokens
from mmlab.data.sources.base import BadSampleError, Source
from mmlab.data.sources.text_files import TextFilesConfig
from mmlab.data.sources.tokens import TokenFile, TokenWindows, build_token_file
from mmlab.modalities.base import EncodingError
from tests.data.fakes import encode

DOCUMENTS = ["", "a", "naïve", "x" * 7, "y" * 8, "z" * 25, "ends\n"]
END = 256


class Documents(Source):
    def __init__(self, texts, delay=0.0):
        self.texts, self.delay = texts, delay

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        time.sleep(self.delay)
        if self.texts[index] is None:
            raise BadSampleError(f"page-{index}.txt is not UTF-8")
        return {"text": self.texts[index]}

    def fingerprint(self):
        return repr(self.texts)


def build(cache, texts=DOCUMENTS, encode=encode, delay=0.0, **more):
    options = {"end": END, "vocabulary_size": 257, "key": "bytes"} | more
    return build_token_file(Documents(texts, delay), encode, cache=cache, **options)


@pytest.mark.parametrize("length", [1, 3, 8, 100])
def test_every_token_is_a_target_exactly_once(tmp_path, length):
    windows = TokenWindows(build(tmp_path), length)
    targets = {}
    for index in range(len(windows)):
        sample = windows[index]
        tokens = sample["tokens"]
        assert tokens.dtype == np.int64
        assert len(tokens) - 1 == windows.lengths[index] <= length
        assert sample["start"] % length == 0
        document = targets.setdefault(sample["document"], [END])
        assert document[-1] == tokens[0]
        assert len(document) - 1 == sample["start"]
        document.extend(tokens[1:].tolist())
    assert [bytes(targets[d][1:-1]).decode() for d in range(len(DOCUMENTS))] == DOCUMENTS
    assert all(ids[0] == ids[-1] == END for ids in targets.values())
    total = sum(len(text.encode()) + 1 for text in DOCUMENTS)
    assert int(np.asarray(windows.lengths).sum()) == total
    assert windows.lengths[np.arange(3)].tolist() == [windows.lengths[index] for index in range(3)]


def test_streamed_windows_are_full_and_lose_nothing(tmp_path):
    windows = TokenWindows(build(tmp_path), 10, stream=True)
    samples = [windows[index] for index in range(len(windows))]
    assert [len(s["tokens"]) - 1 for s in samples] == windows.lengths[:].tolist()
    assert all(len(s["tokens"]) == 11 for s in samples[:-1])
    joined = [END, *(token for s in samples for token in s["tokens"][1:].tolist())]
    expected = [END]
    for text in DOCUMENTS:
        expected += [*text.encode(), END]
    assert joined == expected
    assert [s["document"] for s in samples] == sorted(s["document"] for s in samples)
    with pytest.raises(IndexError):
        windows[len(windows)]


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_integers_are_as_narrow_as_the_vocabulary_allows(tmp_path, size, dtype):
    file = build(tmp_path, ["ab"], vocabulary_size=size, end=size - 1)
    assert file.tokens.dtype == dtype
    assert file.tokens.tolist() == [size - 1, 97, 98, size - 1]


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"document 0 was encoded to ids 97\.\.98, outside .* 0\.\.97"):
        build(tmp_path, ["ab"], vocabulary_size=98, end=97)


def test_a_file_is_built_once_for_each_content(tmp_path):
    calls = []

    def counting(text):
        calls.append(text)
        return encode(text)

    first = build(tmp_path, ["a", "b"], counting)
    assert build(tmp_path, ["a", "b"], counting).folder == first.folder
    assert calls == ["a", "b"]
    assert build(tmp_path, ["a", "c"], counting).fingerprint() != first.fingerprint()
    assert build(tmp_path, ["a", "b"], counting, key="other").fingerprint() != first.fingerprint()


def test_documents_that_cannot_be_used_are_listed(tmp_path):
    def picky(text):
        if "é" in text:
            raise EncodingError("no id for 'é' at 1")
        return encode(text)

    texts = ["ab", None, "né", "cd"]
    for _ in range(2):
        file = build(tmp_path, texts, picky)
        assert [tuple(bad) for bad in file.bad] == [
            (1, "page-1.txt is not UTF-8"),
            (2, "sample 2: no id for 'é' at 1"),
        ]
        assert file.documents == 2
        assert TokenWindows(file, 8).bad == file.bad
    with pytest.raises(ValueError, match=r"holds no document \(1 could not be used\)"):
        TokenWindows(build(tmp_path, [None]), 8)

    def stop(bad):
        raise RuntimeError(bad.reason)

    with pytest.raises(RuntimeError, match=r"page-0\.txt"):
        build(tmp_path, [None, "x"], on_bad=stop)


def test_windows_are_read_from_the_file_after_pickling(tmp_path):
    windows = TokenWindows(build(tmp_path, ["x" * 100_000]), 64)
    stored = pickle.dumps(windows)
    assert len(stored) < 20_000
    assert pickle.loads(stored)[5]["tokens"].tolist() == windows[5]["tokens"].tolist()
    assert pickle.loads(stored).fingerprint() == windows.fingerprint()


def test_a_failure_leaves_nothing_behind(tmp_path):
    def failing(text):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build(tmp_path, ["a"], failing)
    assert not (tmp_path / "tokens").exists()


def _build_slowly(cache, queue):
    file = build(cache, ["abc"] * 20, delay=0.01)
    queue.put((file.tokens.tolist(), file.documents))


def test_processes_that_build_at_once_get_the_same_file(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_build_slowly, args=(tmp_path, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert results == [([END, *([97, 98, 99, END] * 20)], 20)] * 3
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def contents(file):
    return {path.name: path.read_bytes() for path in sorted(file.folder.iterdir())}


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    calls = []

    def until(limit):
        def encode_some(text):
            calls.append(text)
            if len(calls) > limit:
                raise RuntimeError("stopped")
            return encode(text)

        return encode_some

    texts = [f"{index}" for index in range(400)]  # shards of 4
    with pytest.raises(RuntimeError, match="stopped"):
        build(tmp_path, texts, until(102))
    assert len(list(tmp_path.glob("tokens/.parts-*/*.npz"))) == 25
    calls.clear()
    file = build(tmp_path, texts, until(1000))
    assert calls == texts[100:]
    assert contents(file) == contents(build(tmp_path / "fresh", texts))
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [file.folder.name]


def test_shards_are_bounded_in_number_and_size(tmp_path):
    def job(count):
        return tokens._Job(range(count), encode, END, 257, tmp_path)

    sizes = {count: (job(count).num_shards, job(count).shard_size) for count in (0, 1, 128, 129, 10**8)}
    assert sizes == {0: (0, 1), 1: (1, 1), 128: (128, 1), 129: (65, 2), 10**8: (12208, 8192)}
    assert build(tmp_path, []).documents == 0


def test_progress_comes_in_lines_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokens, "_SECONDS_A_LINE", 0.0)
    build(tmp_path, ["a"] * 256)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tokenizing: 2 of 256 documents"
    assert lines[-1] == "tokenizing: 256 of 256 documents"
    assert len(lines) == 128
    monkeypatch.setattr(tokens, "_SECONDS_A_LINE", 60.0)
    build(tmp_path, ["b"] * 256)
    assert capsys.readouterr().err == ""


def test_a_caller_whose_shards_another_put_away_uses_the_result(tmp_path, monkeypatch):
    merge = tokens._merge

    def late(job, folder, fingerprint):
        monkeypatch.setattr(tokens, "_merge", merge)
        build(tmp_path)  # the other caller
        merge(job, folder, fingerprint)

    monkeypatch.setattr(tokens, "_merge", late)
    assert build(tmp_path).documents == len(DOCUMENTS)
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def test_a_cut_file_is_noticed(tmp_path):
    folder = build(tmp_path).folder
    content = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(content[:-4])
    with pytest.raises(ValueError, match=r"tokens\.bin holds \d+ tokens where \d+ were written"):
        TokenFile(folder)


@pytest.mark.parametrize("stream", [False, True])
def test_full_windows_at_once_are_the_windows(tmp_path, stream):
    (tmp_path / "t").mkdir()
    for name, size in (("a", 25), ("b", 3), ("c", 40)):
        (tmp_path / "t" / f"{name}.txt").write_bytes(bytes(97 + place % 26 for place in range(size)))
    documents = TextFilesConfig((f"{tmp_path}/t/*.txt",)).build()
    file = build_token_file(documents, encode, end=256, vocabulary_size=257, key="b", cache=tmp_path)
    windows = TokenWindows(file, 8, stream=stream)
    full = np.flatnonzero(np.asarray(windows.lengths) == 8)
    assert 0 < len(full) < len(windows)
    found = windows.batch(full[::-1])["tokens"]
    assert found.tolist() == [windows[index]["tokens"].tolist() for index in full[::-1].tolist()]
    assert windows.batch(np.array([full[0], len(windows) - 1])) is None
    assert windows.batch(np.array([len(windows)])) is None
    assert windows.batch(np.array([-1])) is None
