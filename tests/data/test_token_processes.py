"""Token files that several processes make: the same bytes, failures that arrive, kills that cost little."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from mmlab.data.sources import tokens
from mmlab.data.sources.base import BadSampleError, Source
from mmlab.data.sources.tokens import build_token_file
from mmlab.modalities.base import EncodingError

# Workers import this file: it stays free of torch.


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


def build(cache, texts, encode, delay=0.0, **more):
    options = {"end": 256, "vocabulary_size": 257, "key": "bytes"} | more
    return build_token_file(Documents(texts, delay), encode, cache=cache, **options)


def contents(file):
    return {path.name: path.read_bytes() for path in sorted(file.folder.iterdir())}


class Picky:
    """Encodes bytes, but not é; can be pickled."""

    def __call__(self, text):
        if "é" in text:
            raise EncodingError("no id for 'é'")
        return np.frombuffer(text.encode(), np.uint8)


def test_the_file_does_not_depend_on_the_number_of_processes(tmp_path):
    texts = [None if index == 7 else f"text {index}" * (index % 5) for index in range(300)] + ["é"]
    seen = []
    one = build(tmp_path / "one", texts, Picky(), on_bad=seen.append)
    again = []
    three = build(tmp_path / "three", texts, Picky(), num_processes=3, on_bad=again.append)
    assert contents(one) == contents(three)
    assert [bad.id for bad in one.bad] == [7, 300]
    assert seen == again == one.bad
    assert bytes(three.tokens[three.offsets[8] : three.offsets[9]].tolist()[1:]) == ("text 9" * 4).encode()
    assert [path.name for path in (tmp_path / "three" / "tokens").iterdir()] == [three.folder.name]


def test_a_failure_in_a_process_reaches_the_caller(tmp_path):
    with pytest.raises(ValueError, match=r"document 3 .* outside the vocabulary's 0\.\.98"):
        build(tmp_path, ["a", "b", "a", "c", "a"], Picky(), vocabulary_size=99, end=98, num_processes=2)
    with pytest.raises(ValueError, match="num_processes must be at least 1, got 0"):
        build(tmp_path, ["a"], Picky(), num_processes=0)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_killed_run_leaves_nothing_that_is_taken_for_whole(tmp_path, num_processes):
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path, ["abc"] * 500, Picky(), 0.01)
    process = context.Process(target=build, args=arguments, kwargs={"num_processes": num_processes})
    process.start()
    while len(finished := list(tmp_path.glob("tokens/.parts-*/0*.npz"))) < 3:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    if num_processes > 1:  # workers end with their parent: no further shard appears
        time.sleep(1)
        finished = list(tmp_path.glob("tokens/.parts-*/0*.npz"))
        time.sleep(1)
        assert len(list(tmp_path.glob("tokens/.parts-*/0*.npz"))) == len(finished) < 128
    times = {path.name: path.stat().st_mtime_ns for path in finished}
    kept = []
    read = tokens._read_shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_read_shard", lambda path: kept.append(path.stat()) or read(path))
        file = build(tmp_path, ["abc"] * 500, Picky())
    assert times.items() <= {f"{n:08d}.npz": stat.st_mtime_ns for n, stat in enumerate(kept)}.items()
    assert (file.documents, file.tokens.size) == (500, 2001)
