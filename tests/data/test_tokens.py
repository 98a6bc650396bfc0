"""Documents as tokens: every token a target once, and a cache that is whole or absent."""

import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest

from mmlab.data.sources.base import BadSampleError, Source
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
    assert list((tmp_path / "tokens").iterdir()) == []


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


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(tmp_path):
    context = multiprocessing.get_context("fork")
    process = context.Process(target=build, args=(tmp_path, ["abc"] * 500, encode, 0.01))
    process.start()
    while not list(tmp_path.glob("tokens/*/tokens.bin")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert build(tmp_path, ["abc"] * 500).documents == 500


def test_a_cut_file_is_noticed(tmp_path):
    folder = build(tmp_path).folder
    content = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(content[:-4])
    with pytest.raises(ValueError, match=r"tokens\.bin holds \d+ tokens where \d+ were written"):
        TokenFile(folder)
