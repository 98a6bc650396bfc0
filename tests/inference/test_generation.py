"""Cache, batch and place in the batch change no token; sequences end where they should."""

from __future__ import annotations

import pytest
import torch

from mmlab.backbone.config import BackboneConfig
from mmlab.inference.generation import encode_prompt, generate
from mmlab.inference.model import LanguageModel
from mmlab.inference.sampling import SamplingConfig, SamplingError
from mmlab.modalities.text.chat import PLAIN
from mmlab.modalities.text.vocabulary import ByteVocabulary, CharacterVocabulary
from mmlab.models.decoder import Decoder, DecoderConfig

LENGTHS = (1, 2, 3, 5, 8, 13, 20, 20)


def model(
    positions: int | None = None, window: int | None = None, extra: int = 0, tied: bool = True
) -> LanguageModel:
    torch.manual_seed(0)
    backbone = BackboneConfig(
        width=32,
        depth=2,
        num_heads=4,
        position="rotary" if positions is None else "none",
        window=window,
        init_std=0.3,
    )
    vocabulary = CharacterVocabulary("abcdefghijklmnopqrstuvwxyz .\n")
    config = DecoderConfig(max_positions=positions, tie_embeddings=tied)
    network = Decoder(backbone, config, vocabulary.size + extra).eval()
    return LanguageModel(network, vocabulary)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(29, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["learned", "rotary", "window"])
def test_ragged_batch_with_cache_equals_one_by_one_without(kind: str, temperature: float) -> None:
    subject = model(300 if kind == "learned" else None, 8 if kind == "window" else None)
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=64, repetition_penalty=1.2, seed=7)
    together = generate(subject, prompts(), sampling, batch_size=8)
    plain = generate(subject, prompts(), sampling, batch_size=1, use_cache=False)
    assert [one.ids for one in together] == [one.ids for one in plain]
    assert [one.text for one in together] == [one.text for one in plain]
    for one, other in zip(together, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert len({tuple(one.ids) for one in together}) > 1


def test_256_tokens_with_cache_equal_those_without() -> None:
    subject, sampling = model(), SamplingConfig(temperature=1.0, max_new_tokens=256)
    with_cache, without = (
        generate(subject, prompts()[-1:], sampling, use_cache=use_cache)[0] for use_cache in (True, False)
    )
    assert with_cache.ids == without.ids


def test_log_probabilities_are_those_of_scoring() -> None:
    subject = model()
    sampling = SamplingConfig(temperature=0.7, top_k=10, max_new_tokens=20)
    for prompt, one in zip(prompts(), generate(subject, prompts(), sampling), strict=True):
        whole = torch.tensor([prompt + one.ids])
        nll = subject.network(whole[:, :-1], targets_BT=whole[:, 1:]).nll_BT[0]
        assert one.logprobs == pytest.approx((-nll[len(prompt) - 1 :]).tolist(), abs=1e-4)


def test_the_same_seed_gives_the_same_tokens_in_any_batch() -> None:
    subject = model()
    results = [
        generate(subject, prompts(), SamplingConfig(max_new_tokens=16, seed=3), batch_size=size)
        for size in (1, 3, 8)
    ]
    assert results[0] == [
        type(one)(one.ids, one.text, one.stopped_by, pytest.approx(one.logprobs, abs=1e-4), one.seed)  # type: ignore[arg-type]
        for one in results[1]
    ]
    assert [one.ids for one in results[0]] == [one.ids for one in results[2]]
    other = generate(subject, prompts(), SamplingConfig(max_new_tokens=16, seed=99))
    assert [one.ids for one in other] != [one.ids for one in results[0]]


def rigged(text: str) -> LanguageModel:
    """A model whose next token is the next byte of `text`, then the end: by position, whatever it reads."""
    vocabulary = ByteVocabulary()
    backbone = BackboneConfig(width=vocabulary.size, depth=1, num_heads=1, residual_init="zero", bias=False)
    config = DecoderConfig(max_positions=64, tie_embeddings=False)
    network = Decoder(backbone, config, vocabulary.size).eval()
    ids = [*vocabulary.encode(text).tolist(), vocabulary.end]
    with torch.no_grad():
        network.stem.embedding.weight.zero_()
        assert network.stem.positions is not None
        assert network.head is not None
        network.stem.positions.weight.zero_()
        for position in range(64):
            network.stem.positions.weight[position, ids[min(position, len(ids) - 1)]] = 1.0
        network.head.weight.copy_(torch.eye(vocabulary.size))
    return LanguageModel(network, vocabulary)


def test_the_end_token_ends_and_is_no_text() -> None:
    subject = rigged("grün.")
    told: list[str] = []
    [one] = generate(subject, [[0]], SamplingConfig(temperature=0), on_text=lambda _, text: told.append(text))
    assert (one.text, one.stopped_by) == ("grün.", "end")
    assert one.ids[-1] == subject.vocabulary.end
    assert told == ["g", "r", "ü", "n", "."]  # the two bytes of a letter come together


@pytest.mark.parametrize(
    ("stop", "text", "told"),
    [
        (("b\n\nc",), "a", ["a"]),
        (("b\n\nx", "nothing"), "ab\n\ncd", ["a", "b\n\nc", "d"]),
        (("\n\nc", "b"), "a", ["a"]),
    ],
)
def test_stop_texts_end_across_tokens_and_are_not_told(
    stop: tuple[str, ...], text: str, told: list[str]
) -> None:
    heard: list[str] = []
    sampling = SamplingConfig(temperature=0, stop=stop)
    [one] = generate(rigged("ab\n\ncd"), [[0]], sampling, on_text=lambda _, news: heard.append(news))
    assert one.text == text
    assert one.stopped_by == ("end" if text.endswith("d") else "stop")
    assert heard == told


def test_context_and_length_end() -> None:
    subject = model(positions=24)
    sampling = SamplingConfig(temperature=0, max_new_tokens=10)
    results = generate(subject, [[1] * 4, [1] * 20, [1] * 24], sampling)
    assert [(one.stopped_by, len(one.ids)) for one in results] == [
        ("length", 10),
        ("context", 5),
        ("context", 1),
    ]
    with pytest.raises(ValueError, match="prompt 0 has 25 tokens, the model takes 24"):
        generate(subject, [[1] * 25], sampling)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(subject, [[1], []], sampling)


def test_ids_beyond_the_vocabulary_are_never_taken() -> None:
    subject = model(extra=7)
    with torch.no_grad():  # the padded rows of the output layer are by far the likeliest
        subject.network.stem.embedding.weight[-7:] *= 100
    ids = generate(subject, prompts(), SamplingConfig(temperature=3.0, max_new_tokens=40))
    assert max(max(one.ids) for one in ids) < subject.vocabulary.size


def test_a_broken_network_is_named_with_its_sequence() -> None:
    subject = model(tied=False)
    with torch.no_grad():
        subject.network.stem.embedding.weight[3] = torch.nan
    with pytest.raises(SamplingError, match="sequence 1, new token 1: a logit is nan"):
        generate(subject, [[1], [3]], SamplingConfig(), batch_size=1)


def test_prompts_begin_like_documents_or_as_a_conversation() -> None:
    subject = rigged("x")
    end = subject.vocabulary.end
    assert encode_prompt(subject, "hi").tolist() == [end, 104, 105]
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(subject, [{"role": "user", "content": "hi"}])
    chat = LanguageModel(subject.network, subject.vocabulary, PLAIN)
    said = chat.vocabulary.decode(encode_prompt(chat, [{"role": "user", "content": "hi"}]))
    assert said == "User: hi\nAssistant: "
