"""Vocabularies of our own as `tokenizer.json`: the same ids for any text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mmlab.interop.tokenizer_files import merges, write_tokenizer
from mmlab.interop.weights import InteropError
from mmlab.modalities.text.bpe import BytePairVocabulary, read_ranks
from mmlab.modalities.text.vocabulary import ByteVocabulary, Vocabulary

ALPHABET = "abehlnoTHE'sLL 0123\n\r\t  .,!?éÉİſǅ🙂\u0301\u00a0\u3000/<|>_-中文"


def written(vocabulary: Vocabulary, folder: Path) -> Tokenizer:
    write_tokenizer(vocabulary, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def differing(vocabulary: Vocabulary, tokenizer: Tokenizer, count: int) -> list[str]:
    draw = random.Random(0)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randint(0, 30))) for _ in range(count)]
    return [
        text
        for text in texts
        if tokenizer.encode(text, add_special_tokens=False).ids != vocabulary.encode(text).tolist()
    ]


def small(pattern: str = "gpt2") -> BytePairVocabulary:
    ranks = {bytes([value]): 255 - value for value in range(256)}
    for number, token in enumerate(
        (b"he", b"ll", b"hell", b"hello", b" t", b" the", b"o\n", b"\xc3\xa9", b"lo")
    ):
        ranks[token] = 256 + number
    return BytePairVocabulary(ranks, pattern, {"<|end|>": 280, "<|im_start|>": 270}, "<|end|>")


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", "o200k", r"\w+|\s+|[^\w\s]+"])
def test_byte_pairs_come_out_the_same(tmp_path: Path, pattern: str) -> None:
    vocabulary = small(pattern)
    tokenizer = written(vocabulary, tmp_path)
    assert vocabulary.encode("hello the lo\n").tolist()[0] == 259
    assert differing(vocabulary, tokenizer, 500) == []
    assert tokenizer.token_to_id("<|im_start|>") == 270
    assert tokenizer.encode("<|end|>hello").ids == [280, 259]
    assert tokenizer.decode(vocabulary.encode("é hello\n").tolist()) == "é hello\n"


def test_bytes_come_out_the_same(tmp_path: Path) -> None:
    vocabulary = ByteVocabulary(["<|im_start|>"])
    tokenizer = written(vocabulary, tmp_path)
    assert differing(vocabulary, tokenizer, 300) == []
    assert tokenizer.encode("é<|im_start|>").ids == [0xC3, 0xA9, 257]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern"),
    [("gpt2.tiktoken", "gpt2"), ("cl100k_base.tiktoken.gz", "cl100k"), ("o200k_base.tiktoken.gz", "o200k")],
)
def test_published_vocabularies_come_out_the_same(
    tmp_path: Path, shared_data: Path, name: str, pattern: str
) -> None:
    ranks = read_ranks(shared_data / "tokenizers" / name)
    first = max(ranks.values()) + 1
    vocabulary = BytePairVocabulary(ranks, pattern, {"<|end|>": first}, "<|end|>")
    tokenizer = written(vocabulary, tmp_path)
    assert differing(vocabulary, tokenizer, 3000) == []
    text = (shared_data / "text" / "wikitext2_valid.txt").read_text()[:100_000]
    assert tokenizer.encode(text, add_special_tokens=False).ids == vocabulary.encode(text).tolist()


def test_merges_follow_the_ranks() -> None:
    assert merges({b"a": 0, b"b": 1, b"ab": 2, b"abab": 4, b"aba": 3}) == [
        (b"a", b"b"),
        (b"ab", b"a"),
        (b"ab", b"ab"),
    ]
    with pytest.raises(InteropError, match=r"token 2 b'abc' does not come of merges"):
        merges({b"a": 0, b"b": 1, b"c": 3, b"abc": 2})


def test_a_pattern_that_is_read_otherwise_is_refused(tmp_path: Path) -> None:
    # `{1,3}+` is possessive for one engine and a repetition of the group for the other.
    ranks = {bytes([value]): value for value in range(256)} | {b"12": 256, b"123": 257, b"1234": 258}
    vocabulary = BytePairVocabulary(ranks, r"\p{N}{1,3}+|[^\p{N}]+", {"<|end|>": 300}, "<|end|>")
    with pytest.raises(InteropError, match=r"tokenizer\.json would give other ids"):
        write_tokenizer(vocabulary, tmp_path)
    assert list(tmp_path.iterdir()) == []
