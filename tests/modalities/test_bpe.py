"""Byte-pair vocabularies: exact round trips, ids of the reference, no special id from text, no network."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import random
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from mmlab.modalities.base import EncodingError
from mmlab.modalities.text.bpe import (
    NAMED,
    PATTERNS,
    BPEConfig,
    BytePairVocabulary,
    NamedBPEConfig,
    read_ranks,
    write_ranks,
)
from mmlab.modalities.text.bpe_training import byte_symbols, train_bpe
from mmlab.modalities.text.chat import CHATML

TEXTS = [
    "The cat sat on the mat; the other cats sat on the other mats, didn't they?",
    "Grüße aus Köln! 世界 你好世界 🙂🙂 12345 3.14\n\n\tif x == 10:\n        return x\r\n",
    "ababababab abcabcabc  \u00a0 aaaaaaaa ",
]
SIZE = 285
TRAINED = train_bpe(TEXTS, SIZE)
BPE = BytePairVocabulary(TRAINED.ranks, "gpt2", {"<|end|>": SIZE}, "<|end|>")
BYTES_FIRST = {bytes([value]): value for value in range(256)}


def udhr(folder: Path) -> list[str]:
    with gzip.open(folder / "text" / "udhr.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


@pytest.fixture
def named_folder(shared_data: Path, tmp_path: Path) -> Path:
    """Published vocabularies under the names that are looked for."""
    for path in (shared_data / "tokenizers").iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        with pytest.raises(EncodingError, match="no UTF-8 form"):
            BPE.encode(text)
        return
    ids = BPE.encode(text)
    assert ids.dtype == np.int32
    assert BPE.decode(ids) == text
    assert BPE.byte_lengths[ids].sum() == len(text.encode())
    stream = BPE.stream()
    assert "".join([*map(stream.push, ids.tolist()), stream.finish()]) == text


def test_pairs_merge_in_the_order_of_their_ranks() -> None:
    ranks = BYTES_FIRST | {b"bc": 256, b"ab": 257, b"abc": 258}
    vocabulary = BytePairVocabulary(ranks, "gpt2", {"<|end|>": 259}, "<|end|>")
    assert vocabulary.encode("abcab").tolist() == [258, 257]
    assert vocabulary.encode("xbc ab").tolist() == [120, 256, 32, 257]
    assert vocabulary.byte_lengths[-4:].tolist() == [2, 2, 3, 0]
    assert vocabulary.ranks == ranks


def test_training_counts_what_its_texts_become() -> None:
    assert sorted(TRAINED.ranks.values()) == list(range(SIZE))
    assert TRAINED.texts == 3
    assert TRAINED.bytes == sum(len(text.encode()) for text in TEXTS)
    assert TRAINED.tokens == sum(len(BPE.encode(text)) for text in TEXTS)
    assert len(BPE.encode(" the")) == len(BPE.encode("ab")) == 1


def test_training_merges_the_most_frequent_pair_first() -> None:
    trained = train_bpe(["xy xy xy xyz xyz"], 259)
    assert {token: rank for token, rank in trained.ranks.items() if rank > 255} == {
        b"xy": 256,
        b" xy": 257,
        b" xyz": 258,
    }


def test_training_gives_the_same_ranks_in_other_processes(tmp_path: Path) -> None:
    program = (
        "import sys, hashlib\n"
        "from mmlab.modalities.text.bpe import write_ranks\n"
        "from mmlab.modalities.text.bpe_training import train_bpe\n"
        "from tests.modalities.test_bpe import TEXTS, SIZE\n"
        "print(hashlib.sha256(write_ranks(train_bpe(TEXTS, SIZE).ranks)).hexdigest())\n"
    )
    expected = hashlib.sha256(write_ranks(TRAINED.ranks)).hexdigest()
    for parallel in ("true", "false"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"TOKENIZERS_PARALLELISM": parallel, "PYTHONHASHSEED": "1", "PATH": ""},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize(
    ("texts", "size", "pattern", "complaint"),
    [
        (["ab"], 300, "gpt2", "give only 256 tokens, not 300: no other pair occurs 2 times"),
        (["ab"], 255, "gpt2", "hold the 256 bytes, got 255"),
        (["ab"], 300, "gtp2", "one of gpt2, cl100k, o200k or a regular expression, got 'gtp2'"),
        (iter(["ab"]), 256, "gpt2", "gone through twice"),
        (["ab\ud800"], 256, "gpt2", "'\\\\ud800' at position 2"),
        (["ab!"], 256, r"\w+", "matches only 2 of the text's 3 bytes"),
    ],
)
def test_training_says_what_is_wrong(texts: list[str], size: int, pattern: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        train_bpe(texts, size, pattern)


def test_encoders_that_disagree_are_noticed() -> None:
    # For one engine $ is the end of the text, for the other the end of any line.
    with pytest.raises(EncodingError, match="text 1: 5 ids from tiktoken, 3 from tokenizers"):
        train_bpe(["ab", "ab\nab\nab"], 258, r"ab$\n|ab|\n")


def write(path: Path, ranks: dict[bytes, int]) -> Path:
    content = write_ranks(ranks)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["own.tiktoken", "own.tiktoken.gz"])
def test_ranks_are_read_back(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, TRAINED.ranks)
    assert read_ranks(path) == TRAINED.ranks
    digest = hashlib.sha256(write_ranks(TRAINED.ranks)).hexdigest()
    config = BPEConfig(str(path), specials=("<|pad|>",), sha256=digest, chat=CHATML)
    vocabulary = config.build()
    names = ["<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    assert vocabulary.specials == {name: SIZE + number for number, name in enumerate(names)}
    assert (vocabulary.end, vocabulary.size) == (SIZE, SIZE + 4)
    assert vocabulary.encode(TEXTS[1]).tolist() == BPE.encode(TEXTS[1]).tolist()
    with pytest.raises(ValueError, match=f"sha256 {digest} unpacked, expected 00"):
        BPEConfig(str(path), sha256="0" * 64).build()


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.tiktoken"
    with pytest.raises(FileNotFoundError, match=r"no vocabulary at .*own\.tiktoken"):
        BPEConfig(str(path)).build()
    for content, complaint in [
        (write_ranks(BYTES_FIRST) + b"YWI= x\n", "line 257 is not `base64 rank`"),
        (write_ranks(BYTES_FIRST) + b"Y!I= 256\n", "line 257 is not `base64 rank`"),
        (write_ranks(BYTES_FIRST) + b"YWI= 255\n", "the same rank stands on two of its 257 lines"),
        (write_ranks(BYTES_FIRST) + b"YQ== 256\n", "the same token .* on two of its 257 lines"),
        (b"YWI= 0\n", "no token for 256 of the 256 bytes, the first is 0"),
        (b"", "no token for 256 of the 256 bytes"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=complaint):
            read_ranks(path)
    cut = tmp_path / "cut.tiktoken.gz"
    cut.write_bytes(gzip.compress(write_ranks(BYTES_FIRST))[:-20])
    with pytest.raises(ValueError, match=r"cut\.tiktoken\.gz is no whole gzip file"):
        read_ranks(cut)
    for options, complaint in [
        ({"path": "vocab.json"}, r"must end in \.tiktoken"),
        ({"path": "a.tiktoken", "pattern": "gpt-2"}, "pattern must be one of"),
        ({"path": "a.tiktoken", "sha256": "12"}, "64 hexadecimal digits"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            BPEConfig(**options)


def test_fingerprint_follows_ranks_pattern_and_specials() -> None:
    ranks, other = BYTES_FIRST | {b"ab": 256}, BYTES_FIRST | {b"ac": 256}
    found = {
        BytePairVocabulary(ranks, "gpt2", {"<|end|>": 257}, "<|end|>").fingerprint(),
        BytePairVocabulary(other, "gpt2", {"<|end|>": 257}, "<|end|>").fingerprint(),
        BytePairVocabulary(ranks, "cl100k", {"<|end|>": 257}, "<|end|>").fingerprint(),
        BytePairVocabulary(ranks, "gpt2", {"<|end|>": 258}, "<|end|>").fingerprint(),
        BytePairVocabulary(ranks, "gpt2", {"<|end|>": 257, "<|x|>": 258}, "<|end|>").fingerprint(),
    }
    assert len(found) == 5
    again = pickle.loads(pickle.dumps(BPE))
    assert again.fingerprint() == BPE.fingerprint()
    assert again.encode(TEXTS[0]).tolist() == BPE.encode(TEXTS[0]).tolist()


def test_a_native_panic_is_an_error_of_the_sample() -> None:
    deep = BytePairVocabulary(BYTES_FIRST, r"(?:a(?!b))+|.", {"<|end|>": 256}, "<|end|>")
    with pytest.raises(EncodingError, match="tiktoken cannot encode 2000000 characters"):
        deep.encode("a" * 2_000_000)


@pytest.mark.parametrize("name", list(NAMED))
def test_an_absent_vocabulary_is_one_error_without_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("MMLAB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError) as caught:
        NamedBPEConfig(name).build()
    for said in (str(tmp_path / "vocabularies" / f"{name}.tiktoken"), NAMED[name].sha256, f"name={name}"):
        assert said in str(caught.value)
    write(tmp_path / f"{name}.tiktoken", BYTES_FIRST)
    with pytest.raises(ValueError, match=f"expected {NAMED[name].sha256}"):
        NamedBPEConfig(name, folder=str(tmp_path)).build()


def published(name: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Pattern and special tokens that tiktoken itself gives, without ranks."""
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *_, **__: {})
    return openai_public.ENCODING_CONSTRUCTORS[name]()


@pytest.mark.parametrize("name", list(NAMED))
def test_patterns_and_specials_are_the_published_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = published(name, monkeypatch)
    assert theirs["special_tokens"] == NAMED[name].specials
    options = {"mergeable_ranks": BYTES_FIRST | {b"  ": 256, b"ab": 257}, "special_tokens": {}}
    options["mergeable_ranks"] |= {b"\n\n": 258, b" a": 259, b"12": 260, b"'s": 261, b" \n": 262, b"A'": 263}
    reference = tiktoken.Encoding("theirs", pat_str=theirs["pat_str"], **options)
    ours = tiktoken.Encoding("ours", pat_str=PATTERNS[NAMED[name].pattern], **options)
    generator = random.Random(0)
    alphabet = "aAbBéÉ中\u0301\u02b0 \t\n\r\u00a0\u2028\x85\x1c\u3000'sSlLvVeE12٣½!/?-…🙂ſK"
    for _ in range(5000):
        text = "".join(generator.choices(alphabet, k=generator.randint(1, 12)))
        assert ours.encode_ordinary(text) == reference.encode_ordinary(text), repr(text)


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
def test_published_vocabularies_are_exact_in_all_languages(
    name: str, named_folder: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = NamedBPEConfig(name, folder=str(named_folder), specials=("<|im_end|>",)).build()
    assert isinstance(vocabulary, BytePairVocabulary)
    theirs = published(name, monkeypatch)
    assert vocabulary.specials == theirs["special_tokens"] | {"<|im_end|>": vocabulary.size - 1}
    assert vocabulary.end == theirs["special_tokens"]["<|endoftext|>"]
    raw = tiktoken.Encoding(
        name, pat_str=theirs["pat_str"], mergeable_ranks=vocabulary.ranks, special_tokens={}
    )
    texts = udhr(shared_data)
    assert len(texts) == 382
    for text in texts:
        ids = vocabulary.encode(text)
        assert ids.tolist() == raw.encode_ordinary(text)
        assert vocabulary.decode(ids) == text
    named = " ".join(vocabulary.specials)
    assert not set(vocabulary.encode(named).tolist()) & set(vocabulary.specials.values())
    assert vocabulary.decode(vocabulary.encode(named)) == named


def test_known_ids(named_folder: Path) -> None:
    vocabulary = NamedBPEConfig("gpt2", folder=str(named_folder)).build()
    assert (vocabulary.size, vocabulary.end, vocabulary.gaps.size) == (50257, 50256, 0)
    assert vocabulary.encode("Hello world").tolist() == [15496, 995]
    large = NamedBPEConfig("cl100k_base", folder=str(named_folder)).build()
    assert large.encode("Hello world").tolist() == [9906, 1917]
    assert (large.size, large.end) == (100277, 100257)
    assert large.gaps.tolist() == [100256, *range(100261, 100276)]
    with pytest.raises(ValueError, match="id 100256 at position 0 is a gap"):
        large.decode([100256])
    with pytest.raises(ValueError, match=r"gpt2 has no token '<\|im_start\|>' .* name it in specials"):
        NamedBPEConfig("gpt2", folder=str(named_folder), chat=CHATML).build()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_a_trained_vocabulary_is_exact_in_all_languages(pattern: str, shared_data: Path) -> None:
    texts = udhr(shared_data)
    trained = train_bpe(texts, 4096, pattern)  # fails where the trainer's ids differ
    vocabulary = BytePairVocabulary(trained.ranks, pattern, {"<|end|>": 4096}, "<|end|>")
    assert all(vocabulary.decode(vocabulary.encode(text)) == text for text in texts)
    assert 2.4 < trained.bytes / trained.tokens < 3.0


def _letters(count: int) -> str:
    return "".join(random.Random(0).choices(string.ascii_letters, k=count))


LONG: dict[str, Callable[[int], str]] = {
    "a": lambda count: "a" * count,
    "spaces": lambda count: " " * count,
    "spaces and a letter": lambda count: " " * count + "a",
    "breaks and a letter": lambda count: "\n" * count + "a",
    "carets": lambda count: "^" * count,
    "letters": _letters,
}


def check_long(encode: Callable[[str], object], make: Callable[[int], str]) -> None:
    """CPU time grows with the length, or near it: four times would be 4, its square 16."""
    spent = {}
    for count in (250_000, 1_000_000):
        text, times = make(count), []
        for _ in range(3):
            start = time.process_time()
            encode(text)
            times.append(time.process_time() - start)
        spent[count] = min(times)
    assert spent[250_000] < 2
    assert spent[1_000_000] / spent[250_000] < 10


@pytest.mark.slow
@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize("kind", list(LONG))
def test_long_pieces_take_no_square_time(kind: str, pattern: str) -> None:
    vocabulary = BytePairVocabulary(TRAINED.ranks, pattern, {"<|end|>": SIZE}, "<|end|>")
    text = LONG[kind](1_000_000)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    check_long(vocabulary.encode, LONG[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(LONG))
def test_training_on_long_pieces_takes_no_square_time(kind: str) -> None:
    check_long(lambda text: train_bpe([text], 263), LONG[kind])


def test_byte_symbols_are_those_of_the_trainer() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(byte_symbols()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_symbols().values()) == list(range(256))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "é \n\x00ÿ"
    assert bytes(byte_symbols()[symbol] for symbol in level.pre_tokenize_str(text)[0][0]) == text.encode()
