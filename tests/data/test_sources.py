"""Sources give what stands in their files, name what is wrong, and are known by their content."""

import errno
import json
import os
import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mmlab.data.files import file_sha256, find_files, fresh_file, fresh_folder
from mmlab.data.sources.base import BadSampleError
from mmlab.data.sources.jsonl import JsonlConfig, ManifestConfig
from mmlab.data.sources.parquet import ParquetConfig
from mmlab.data.sources.python_files import PythonFilesConfig
from mmlab.data.sources.synthetic import SyntheticConfig
from mmlab.data.sources.text_files import TextFilesConfig
from mmlab.data.sources.tokens import build_token_file
from tests.data.fakes import encode


def texts(source):
    return [source[index]["text"] for index in range(len(source))]


def test_text_files_are_documents(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"two\r\n\r\nlines")
    (tmp_path / "a.txt").write_text("ünï\n")
    source = TextFilesConfig((f"{tmp_path}/*.txt",)).build()
    assert texts(source) == ["ünï\n", "two\r\n\r\nlines"]
    named = TextFilesConfig((f"{tmp_path}/b.txt", f"{tmp_path}/*.txt")).build()
    assert texts(named) == ["two\r\n\r\nlines", "ünï\n"]
    assert named.fingerprint() != source.fingerprint()


def test_text_files_split_on_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\none\nmore\n \t\n\ntwo\r\n\r\nthree\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    source = TextFilesConfig((f"{tmp_path}/*.txt",), split="blank_lines").build()
    assert texts(source) == ["\none\nmore", "two", "three\n"]
    assert source.name(1) == f"{tmp_path}/a.txt at byte 14"


def test_text_that_is_not_utf8_is_a_bad_sample(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok")
    (tmp_path / "b.txt").write_bytes(b"abc\xff")
    source = TextFilesConfig((f"{tmp_path}/*.txt",)).build()
    assert source[0] == {"text": "ok"}
    with pytest.raises(BadSampleError, match=r"b\.txt: not UTF-8 at byte 3"):
        source[1]


@pytest.mark.parametrize("config", [TextFilesConfig, JsonlConfig, ParquetConfig])
def test_a_missing_file_is_named_with_its_key(config):
    with pytest.raises(FileNotFoundError, match=r"paths of \w+: no file matches 'nowhere/\*\.x'"):
        config(("nowhere/*.x",)).build()


def test_fingerprints_follow_content_not_place(tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("same")
    here, there = (TextFilesConfig((f"{tmp_path}/{name}/a.txt",)).build() for name in ("here", "there"))
    assert here.fingerprint() == there.fingerprint()
    (tmp_path / "there" / "a.txt").write_text("diff")
    assert here.fingerprint() != there.fingerprint()


def test_large_files_are_hashed_once(tmp_path, monkeypatch):
    path, cache = tmp_path / "big.bin", tmp_path / "cache"
    path.write_bytes(b"x" * (1 << 20))
    first = file_sha256(path, cache)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("hashed again"))
    assert file_sha256(path, cache) == first
    monkeypatch.undo()
    path.write_bytes(b"y" * (1 << 20))
    assert file_sha256(path, cache) not in (first, "")
    assert not list(cache.rglob(".making-*"))


def test_a_large_file_that_was_rewritten_behind_its_time_is_hashed_again(tmp_path):
    path, cache = tmp_path / "big.bin", tmp_path / "cache"
    path.write_bytes(b"x" * (1 << 20))
    first, status = file_sha256(path, cache), path.stat()
    path.write_bytes(b"y" * (1 << 20))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert file_sha256(path, cache) == file_sha256(path) != first


def test_a_file_is_found_once_under_its_first_spelling(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to("a.txt")
    spelled = f"{tmp_path}/sub/../a.txt"
    assert [str(path) for path in find_files([spelled, f"{tmp_path}/*.txt"], "paths")] == [spelled]


def test_what_is_made_has_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with fresh_file(tmp_path / "file.json") as temporary:
            temporary.write_text("{}")
        with fresh_folder(tmp_path / "folder") as temporary:
            (temporary / "inside").write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "file.json").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.json", "folder"]


def test_jsonl_has_random_access(tmp_path):
    lines = [json.dumps({"text": f"döc {index}\n" * (index + 1), "id": index}) for index in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:3]) + "\n\n  \n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[3:]))
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        source = JsonlConfig((f"{tmp_path}/*.jsonl",)).build(cache)
        assert len(source) == 5
        assert source[4]["text"] == "döc 4\n" * 5
        assert texts(pickle.loads(pickle.dumps(source))) == [f"döc {i}\n" * (i + 1) for i in range(5)]
    assert len(list((tmp_path / "cache" / "lines").iterdir())) == 2
    with pytest.raises(IndexError):
        source[5]


def test_bad_lines_are_bad_samples_with_a_place(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"text": \n{"body": "x"}\n{"text": null}\n[1]\n')
    source = JsonlConfig((f"{tmp_path}/a.jsonl",)).build()
    assert source[0] == {"text": "ok"}
    for index, message in [
        (1, r"a\.jsonl row 1 \(at byte 15\): Expecting value"),
        (2, r"no text in 'text': fields \['body'\]"),
        (3, r"field 'text' is NoneType"),
        (4, r"an object was expected, not list"),
    ]:
        with pytest.raises(BadSampleError, match=message):
            source[index]


def test_a_line_that_is_nested_too_deep_is_a_bad_sample(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 200_000 + "]" * 200_000 + "\n")
    with pytest.raises(BadSampleError, match=r"a\.jsonl row 0 \(at byte 0\): .*recursion"):
        JsonlConfig((f"{tmp_path}/a.jsonl",)).build()[0]


def test_manifest_paths_are_relative_to_the_manifest(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "1.wav").write_bytes(b"1234")
    rows = [{"audio": "clips/1.wav", "text": "one"}, {"audio": "/data/2.wav", "text": "two"}, {"audio": 3}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = ManifestConfig(f"{tmp_path}/m.jsonl").build()
    assert source[0] == {"audio": f"{tmp_path}/clips/1.wav", "text": "one"}
    assert source[1]["audio"] == "/data/2.wav"
    with pytest.raises(BadSampleError, match="'audio' is no path: 3"):
        source[2]
    prints = {source.fingerprint()}
    for content in (b"12345", b"54321", None):
        clip = tmp_path / "clips" / "1.wav"
        clip.unlink() if content is None else clip.write_bytes(content)
        prints.add(source.fingerprint())
    assert len(prints) == 4


def test_parquet_is_read_by_row_group(tmp_path):
    table = pyarrow.table({"body": [f"row {index}" for index in range(10)], "other": list(range(10))})
    for name in ("a", "b"):
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=4)
    source = ParquetConfig((f"{tmp_path}/*.parquet",), column="body").build()
    assert len(source) == 20
    assert [source[index]["text"] for index in (13, 0, 9, 19)] == ["row 3", "row 0", "row 9", "row 9"]
    assert len(source._kept) == 2
    assert texts(pickle.loads(pickle.dumps(source))) == [f"row {index % 10}" for index in range(20)]
    assert source.name(13) == f"{tmp_path}/b.parquet row group 0 row 3"


def test_parquet_faults_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None] * 500}), path, compression="none")
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'body'; it has \['text'\]"):
        ParquetConfig((str(path),), column="body").build()
    source = ParquetConfig((str(path),)).build()
    with pytest.raises(BadSampleError, match=r"row group 0 row 1: column 'text' holds None"):
        source[1]
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    with pytest.raises(BadSampleError, match=r"a\.parquet row group 0"):
        ParquetConfig((str(path),)).build()[0]
    path.write_bytes(bytes(content[: len(content) // 2]))
    with pytest.raises(ValueError, match=r"a\.parquet is no readable Parquet file"):
        ParquetConfig((str(path),)).build()


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), pyarrow.ArrowMemoryError("full")]
)
def test_a_passing_fault_is_no_bad_sample_and_is_not_cached(tmp_path, monkeypatch, error):
    path, cache = tmp_path / "a.parquet", tmp_path / "cache"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path)
    source = ParquetConfig((str(path),)).build()

    def tokens():
        return build_token_file(source, encode, end=256, vocabulary_size=257, key="bytes", cache=cache)

    def failing(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", failing)
        with pytest.raises(type(error)) as raised:
            tokens()
    assert raised.value is error
    assert not list((cache / "tokens").glob("[!.]*"))
    assert (tokens().documents, tokens().bad) == (2, [])


def test_a_parquet_file_that_vanished_is_no_bad_sample(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path)
    source = ParquetConfig((str(path),)).build()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        source[0]


def test_python_files_are_split_by_module(tmp_path):
    train, validation = (PythonFilesConfig(split=split).build() for split in ("train", "validation"))
    paths = [{source[index]["path"] for index in range(len(source))} for source in (train, validation)]
    assert not paths[0] & paths[1]
    modules = [{path.split("/")[0].removesuffix(".py") for path in half} for half in paths]
    assert not modules[0] & modules[1]
    assert len(paths[0]) > 10 * len(paths[1]) > 0
    every = paths[0] | paths[1]
    assert "json/decoder.py" in every
    assert not any(
        path.startswith(("encodings/", "test/", "site-packages/")) or "/tests/" in path for path in every
    )
    assert train.fingerprint() != validation.fingerprint()


def test_the_tuning_split_is_cut_from_the_training_modules():
    names = {
        split: {sample["path"] for sample in PythonFilesConfig(split=split).build()}
        for split in ("train", "validation", "tuning_train", "tuning")
    }
    assert names["tuning"]
    assert names["tuning"] | names["tuning_train"] == names["train"]
    assert not names["tuning"] & (names["tuning_train"] | names["validation"])


def test_python_files_decode_as_python_does(tmp_path):
    (tmp_path / "big.py").write_text("#" * 1_000_000)
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\r\nx = 'é'".encode("latin-1"))
    (tmp_path / "broken.py").write_bytes(b"x = '\xff'")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("")
    halves = [
        PythonFilesConfig(split=split, folder=str(tmp_path)).build() for split in ("train", "validation")
    ]
    found, bad = {}, []
    for source in halves:
        for index in range(len(source)):
            try:
                found[source[index]["path"]] = source[index]["text"]
            except BadSampleError as error:
                bad.append(str(error))
    assert found["latin.py"] == "# coding: latin-1\r\nx = 'é'"
    assert sorted(found) == ["big.py", "latin.py"]
    assert len(bad) == 1
    assert bad[0].startswith(f"{tmp_path}/broken.py: ")


def test_a_library_without_sources_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(FileNotFoundError, match=r"holds 1 Python files with 6 bytes, fewer than 1000000"):
        PythonFilesConfig(folder=str(tmp_path)).build()


def test_synthetic_samples_are_fixed_by_their_configuration():
    source = SyntheticConfig(size=50, shortest=2, longest=9, vocabulary=11, bad=(7,)).build()
    again = SyntheticConfig(size=50, shortest=2, longest=9, vocabulary=11, bad=(7,)).build()
    for index in set(range(50)) - {7}:
        tokens = source[index]["tokens"]
        assert tokens.tolist() == again[index]["tokens"].tolist()
        assert len(tokens) == source.lengths[index] + 1 == len(source[index]["text"])
        assert 0 <= tokens.min() <= tokens.max() < 11
    assert (source.lengths.min(), source.lengths.max()) == (2, 9)
    with pytest.raises(BadSampleError, match="synthetic sample 7"):
        source[7]
    assert source.fingerprint() == again.fingerprint() != SyntheticConfig(size=50).build().fingerprint()
    assert not np.array_equal(source.lengths, SyntheticConfig(size=50, seed=1).build().lengths)
