"""Packed files read as what they hold, from one unpacked copy in the cache."""

import bz2
import gzip
import json
import lzma

import pytest

from mmlab.data.compressed import unpacked
from mmlab.data.sources.jsonl import JsonlConfig, ManifestConfig
from mmlab.data.sources.text_files import TextFilesConfig

PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
ROWS = "\n".join(json.dumps({"text": f"döc {index}\n" * index}) for index in range(5)).encode()


@pytest.mark.parametrize("ending", PACKERS)
def test_packed_lines_are_those_of_the_unpacked_file(tmp_path, ending):
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    (tmp_path / f"a.jsonl{ending}").write_bytes(PACKERS[ending](ROWS))
    cache = tmp_path / "cache"
    plain = JsonlConfig((f"{tmp_path}/a.jsonl",)).build(cache)
    packed = JsonlConfig((f"{tmp_path}/a.jsonl{ending}",)).build(cache)
    assert [packed[index] for index in range(5)] == [plain[index] for index in range(5)]
    assert packed.fingerprint() == plain.fingerprint()
    assert packed.name(1) == f"{tmp_path}/a.jsonl{ending} row 1 (at byte 13)"
    assert [path.name for path in (cache / "unpacked").rglob("*.*")] == ["a.jsonl"]


def test_packed_text_is_that_of_the_unpacked_file(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo"))
    for options in ({"split": "blank_lines"}, {"span": (0.5, 1.0)}):
        plain = TextFilesConfig((f"{tmp_path}/a.txt",), **options).build()
        packed = TextFilesConfig((f"{tmp_path}/a.txt.gz",), **options).build(tmp_path / "cache")
        assert [packed[index] for index in range(len(packed))] == [plain[i] for i in range(len(plain))]
        assert packed.fingerprint() == plain.fingerprint()


def test_a_packed_manifest_names_paths_beside_itself(tmp_path):
    (tmp_path / "1.wav").write_bytes(b"1234")
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(b'{"audio": "1.wav"}'))
    source = ManifestConfig(f"{tmp_path}/m.jsonl.gz").build(tmp_path / "cache")
    assert source[0] == {"audio": f"{tmp_path}/1.wav"}


def test_a_file_is_unpacked_once_and_again_when_it_changes(tmp_path, monkeypatch):
    path, cache = tmp_path / "a.txt.gz", tmp_path / "cache"
    path.write_bytes(gzip.compress(b"first"))
    first = unpacked(path, cache)
    with monkeypatch.context() as patch:
        patch.setattr("mmlab.data.compressed._unpack", lambda *_: pytest.fail("unpacked again"))
        assert unpacked(path, cache) == first
    path.write_bytes(gzip.compress(b"second"))
    assert (first.read_text(), unpacked(path, cache).read_text()) == ("first", "second")


def test_a_damaged_file_is_named_and_leaves_nothing(tmp_path):
    cache = tmp_path / "cache"
    for name, content in (
        ("cut.gz", gzip.compress(ROWS)[:-20]),
        ("other.gz", ROWS),
        ("cut.xz", lzma.compress(ROWS)[:-20]),
        ("other.xz", ROWS),
        ("cut.bz2", bz2.compress(ROWS)[:-20]),
        ("other.bz2", ROWS),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} cannot be unpacked: \w"):
            unpacked(tmp_path / name, cache)
    assert not [path for path in (cache / "unpacked").rglob("*") if path.is_file()]


def test_a_packed_file_needs_a_cache(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(ROWS))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is compressed and needs a cache folder"):
        JsonlConfig((f"{tmp_path}/a.jsonl.gz",)).build()
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst is of a kind that is not unpacked here"):
        JsonlConfig((f"{tmp_path}/a.jsonl.zst",)).build(tmp_path / "cache")
