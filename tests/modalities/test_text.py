"""Vocabularies give back what they took, refuse what they cannot take, make no special id from text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmlab.config import compose, typed
from mmlab.modalities.base import EncodingError
from mmlab.modalities.text.chat import ChatTemplate, Turn
from mmlab.modalities.text.stem import TextStem
from mmlab.modalities.text.vocabulary import (
    BytesConfig,
    CharactersConfig,
    CharacterVocabulary,
    Vocabulary,
)

BYTES = BytesConfig().build()
TEXT = "Grüße, 世界! <|end|> 🙂\n\0"
CHARACTERS = CharactersConfig.from_text(TEXT).build()


@given(st.text())
def test_bytes_take_any_text(text: str) -> None:
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        with pytest.raises(EncodingError, match="position"):
            BYTES.encode(text)
        return
    ids = BYTES.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert BYTES.decode(ids) == text
    assert BYTES.byte_lengths[ids].sum() == len(text.encode())


@given(st.text(alphabet=TEXT))
def test_characters_take_text_of_theirs(text: str) -> None:
    ids = CHARACTERS.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == [CHARACTERS.characters.index(character) for character in text]
    assert CHARACTERS.decode(ids) == text
    assert CHARACTERS.byte_lengths[ids].sum() == len(text.encode())


@pytest.mark.parametrize("vocabulary", [BYTES, CHARACTERS], ids=["bytes", "characters"])
def test_name_of_a_special_token_in_text_is_ordinary_text(vocabulary: Vocabulary) -> None:
    for name in vocabulary.specials:
        ids = vocabulary.encode(f"<{name}>")
        assert not set(ids.tolist()) & set(vocabulary.specials.values())
        assert vocabulary.decode(ids) == vocabulary.decode(ids, skip_special=True) == f"<{name}>"


@pytest.mark.parametrize("vocabulary", [BYTES, CHARACTERS], ids=["bytes", "characters"])
def test_ids_outside_the_vocabulary_are_named(vocabulary: Vocabulary) -> None:
    for bad in (vocabulary.size, vocabulary.size + 50, -100, -1):
        with pytest.raises(ValueError, match=f"id {bad} at position 1 .* {vocabulary.size} ids"):
            vocabulary.decode([0, bad], skip_special=True)


@pytest.mark.parametrize("vocabulary", [BYTES, CHARACTERS], ids=["bytes", "characters"])
def test_special_ids(vocabulary: Vocabulary) -> None:
    end = vocabulary.end
    assert vocabulary.specials == {"<|end|>": vocabulary.size - 1}
    assert end == vocabulary.size - 1 == len(vocabulary.byte_lengths) - 1
    assert vocabulary.byte_lengths[end] == 0
    ids = [*vocabulary.encode("e").tolist(), end, *vocabulary.encode("n").tolist(), end]
    assert vocabulary.decode(ids) == "e<|end|>n<|end|>"
    assert vocabulary.decode(ids, skip_special=True) == "en"
    assert vocabulary.decode(np.zeros(0, np.int64)) == ""


def test_cut_off_character_decodes_to_the_replacement() -> None:
    assert BYTES.decode(list("é".encode()[:1])) == "\ufffd"
    assert BYTES.decode([*"é".encode(), BYTES.end, 0xFF]) == "é<|end|>\ufffd"


class Scattered(Vocabulary):
    """Special ids first and in the middle, a gap, and a padded output layer."""

    def __init__(self) -> None:
        super().__init__([0, 2, 0, 1, 0], {"<s>": 0, "<stop>": 4}, end=4, size=8)

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def _bytes(self, ids: np.ndarray) -> bytes:
        return b"".join({1: "é".encode(), 3: b"!"}[index] for index in ids.tolist())

    def _content(self) -> str:
        return ""


def test_special_ids_and_gaps_lie_anywhere() -> None:
    vocabulary = Scattered()
    assert (vocabulary.size, vocabulary.end) == (8, 4)
    assert vocabulary.byte_lengths.tolist() == [0, 2, 0, 1, 0, 0, 0, 0]
    assert vocabulary.gaps.tolist() == [2, 5, 6, 7]
    assert vocabulary.decode([0, 1, 3, 4, 3]) == "<s>é!<stop>!"
    assert vocabulary.decode([0, 1, 3, 4, 3], skip_special=True) == "é!!"
    for bad in (2, 5, 7):
        with pytest.raises(ValueError, match=f"id {bad} at position 1 is a gap in the vocabulary of 8 ids"):
            vocabulary.decode([3, bad])
    stream = vocabulary.stream()
    assert stream.push(1) == "é"
    for bad in (2, 8, -100):
        with pytest.raises(ValueError, match=f"id {bad} at position 1"):
            stream.push(bad)


def test_impossible_specials_are_refused() -> None:
    class Broken(Scattered):
        def __init__(self, specials: dict[str, int], end: int) -> None:
            Vocabulary.__init__(self, [1, 1], specials, end)

    with pytest.raises(ValueError, match="id 1 is both text and the special token '<s>'"):
        Broken({"<s>": 1}, 1)
    with pytest.raises(ValueError, match="id 0 ends documents, but is not special"):
        Broken({"<s>": 2}, 0)


@given(st.lists(st.one_of(st.integers(0, 256), st.sampled_from([0xC3, 0xA9, 0xF0, 0x9F, 0x99, 0x82]))))
def test_stream_gives_the_text_of_decode_in_whole_characters(ids: list[int]) -> None:
    for skip in (False, True):
        stream = BYTES.stream(skip_special=skip)
        pieces = [stream.push(index) for index in ids]
        pieces.append(stream.finish())
        assert "".join(pieces) == BYTES.decode(ids, skip_special=skip)


def test_stream_holds_a_character_back_until_it_is_whole() -> None:
    stream = BYTES.stream()
    pieces = [stream.push(index) for index in [*"a🙂".encode(), 0xC3, BYTES.end, 0xC3]]
    assert pieces == ["a", "", "", "", "🙂", "", "\ufffd<|end|>", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_chat_template_adds_its_specials() -> None:
    chat = ChatTemplate({"assistant": Turn("", "<stop>")}, specials=("<stop>", "<|end|>"))
    for config in (BytesConfig(chat=chat), CharactersConfig("abc", chat=chat)):
        plain = BytesConfig() if isinstance(config, BytesConfig) else CharactersConfig("abc")
        vocabulary, base = config.build(), plain.build()
        assert vocabulary.specials == {"<|end|>": base.end, "<stop>": base.size}
        assert vocabulary.fingerprint() != base.fingerprint()


def test_shakespeare_takes_the_whole_text(shared_data: Path) -> None:
    text = (shared_data / "text" / "tinyshakespeare.txt").read_text()
    config = typed(compose(["modality/text=shakespeare"])["modality"]["text"], CharactersConfig)
    assert config == CharactersConfig.from_text(text)
    assert len(config.characters) == 65
    vocabulary = config.build()
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_unknown_character_is_named_with_its_position() -> None:
    with pytest.raises(EncodingError, match=r"'\\xe9' at position 2 .* 3$"):
        CharacterVocabulary("abc").encode("abé")
    with pytest.raises(EncodingError, match="'z' at position 0"):
        CharacterVocabulary("abc").encode("zab")
    with pytest.raises(EncodingError, match=r"'\\ud800' at position 1"):
        CharacterVocabulary("abc").encode("a\ud800")


def test_characters_are_given_once() -> None:
    with pytest.raises(ValueError, match="'a' twice"):
        CharactersConfig("abca")
    with pytest.raises(ValueError, match="at least one"):
        CharactersConfig("")


def test_ids_follow_the_order_given() -> None:
    assert CharacterVocabulary("cab").encode("abc").tolist() == [1, 2, 0]
    assert CharactersConfig.from_text("hello").characters == "ehlo"


def test_fingerprint_tells_vocabularies_apart() -> None:
    found = {v.fingerprint() for v in (BYTES, CharacterVocabulary("ab"), CharacterVocabulary("ba"))}
    assert len(found) == 3
    assert BytesConfig().build().fingerprint() == BYTES.fingerprint()
    assert all(len(value) == 64 for value in found)


def test_stem_adds_positions_and_refuses_long_rows() -> None:
    torch.manual_seed(0)
    stem = TextStem(10, 4, max_positions=3, dropout=0.0, std=1.0)
    assert stem.positions is not None
    tokens = torch.tensor([[7, 7, 7]])
    expected = stem.embedding.weight[7] + stem.positions.weight
    assert torch.equal(stem(tokens)[0], expected)
    assert torch.equal(stem(tokens, torch.tensor([[2, 0, 0]]))[0], expected[[2, 0, 0]])
    with pytest.raises(ValueError, match=r"4 tokens .* 3 learned positions"):
        stem(torch.zeros(1, 4, dtype=torch.long))


def test_stem_drops_in_training_only() -> None:
    torch.manual_seed(0)
    stem = TextStem(10, 1000, max_positions=None, dropout=0.5, std=1.0)
    tokens = torch.tensor([[3]])
    assert (stem(tokens) == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert not (stem.eval()(tokens) == 0).any()
