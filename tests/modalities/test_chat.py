"""Conversations as ids: which token is trained, what ends a turn, and text that spells a special token."""

from __future__ import annotations

import pytest
import yaml

from mmlab.config import compose, conf_folder
from mmlab.modalities.text.bpe import BytePairVocabulary
from mmlab.modalities.text.chat import CHATML, PLAIN, SMOLLM2, ChatTemplate, Message, Turn
from mmlab.modalities.text.vocabulary import BytesConfig, CharactersConfig, TextModalityConfig, Vocabulary
from mmlab.typed import to_plain, typed

CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|im_end|>"},
    {"role": "assistant", "content": "Yo."},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "🙂"},
]
BYTES = BytesConfig(chat=CHATML).build()
START, STOP = BYTES.specials["<|im_start|>"], BYTES.specials["<|im_end|>"]
PAIRS = {b"\n\n": 256, b"r\n": 257, b"Yo": 258, b"\nY": 259, b"\nH": 260}
BPE = BytePairVocabulary(
    {bytes([value]): value for value in range(256)} | PAIRS,
    r"[\s\S]+",  # one piece: whatever stands together may merge
    {"<|end|>": 261, "<|im_start|>": 262, "<|im_end|>": 263},
    "<|end|>",
)


def marked(template: ChatTemplate, messages: list[Message], vocabulary: Vocabulary, **options: bool) -> str:
    """The rendered text with every trained token in brackets."""
    ids, trained = template.render(messages, vocabulary, **options)
    assert ids.dtype == "int32"
    assert trained.dtype == bool
    assert ids.shape == trained.shape
    shown, open_ = "", False
    stream = vocabulary.stream()
    for index, flag in zip(ids.tolist(), trained.tolist(), strict=True):
        shown += ("[" if flag else "]") if flag != open_ else ""
        open_ = flag
        shown += stream.push(index)
    return shown + stream.finish() + ("]" if open_ else "")


@pytest.mark.parametrize("vocabulary", [BYTES, BPE], ids=["bytes", "bpe"])
def test_only_the_words_of_the_assistant_and_their_end_are_trained(vocabulary: Vocabulary) -> None:
    assert marked(CHATML, CHAT, vocabulary) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n[Yo.<|im_end|>]\n"
        "<|im_start|>user\né?<|im_end|>\n"
        "<|im_start|>assistant\n[🙂<|im_end|>]\n"
    )


def test_mask_token_by_token() -> None:
    ids, trained = CHATML.render(CHAT[1:3], BYTES)
    user = [START, *b"user\nHi <|im_end|>", STOP, *b"\n"]
    header = [START, *b"assistant\n"]
    assert ids.tolist() == [*user, *header, *b"Yo.", STOP, *b"\n"]
    assert trained.tolist() == [False] * (len(user) + len(header)) + [True] * 4 + [False]


def test_text_that_spells_a_special_token_stays_text() -> None:
    ids, trained = CHATML.render([{"role": "user", "content": "<|im_end|><|im_start|><|end|>"}], BYTES)
    assert ids.tolist().count(STOP) == ids.tolist().count(START) == 1
    assert BYTES.end not in ids
    assert not trained.any()
    assert bytes(ids[6:-2].tolist()) == b"<|im_end|><|im_start|><|end|>"


def test_a_reply_is_cut_like_one_that_a_model_writes() -> None:
    user, reply = CHATML.render(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}], BPE
    )
    prompt = CHATML.render([{"role": "user", "content": "Hi"}], BPE, reply=True)
    assert user[: len(prompt.ids)].tolist() == prompt.ids.tolist()
    assert user[len(prompt.ids) :].tolist() == [258, 263, ord("\n")]  # not "\nY" across the header
    assert not prompt.trained.any()
    assert 260 not in user[len(prompt.ids) :]
    # what a user says is one text with the header before it
    assert prompt.ids.tolist()[:5] == [262, *b"use", 257]
    assert CHATML.render([{"role": "tool", "content": "Hi"}], BPE).ids.tolist() == [
        *[262, *b"tool", 260, ord("i"), 263, ord("\n")]
    ]
    assert reply.tolist() == [False] * len(prompt.ids) + [True, True, False]


def test_system_message_is_put_in_where_there_is_none() -> None:
    user: list[Message] = [{"role": "user", "content": "Hi"}]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert marked(SMOLLM2, user, BYTES, reply=True) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert marked(SMOLLM2, CHAT, BYTES) == marked(CHATML, CHAT, BYTES)


def test_plain_needs_no_special_token_of_its_own() -> None:
    characters = "".join(sorted({*"System: User: Assistant: \n", *"Hi Yo."}))
    for config in (BytesConfig(chat=PLAIN), CharactersConfig(characters, chat=PLAIN)):
        vocabulary = config.build()
        assert list(vocabulary.specials) == ["<|end|>"]
        shown = marked(PLAIN, [{"role": "user", "content": "Hi"}, CHAT[2]], vocabulary, reply=True)
        assert shown == "User: Hi\nAssistant: [Yo.<|end|>]\nAssistant: "
        assert PLAIN.stops(vocabulary) == (vocabulary.end,)


def test_stops_are_the_end_of_a_turn_and_of_a_document() -> None:
    assert CHATML.stops(BYTES) == (STOP, BYTES.end)
    foreign = BytePairVocabulary(
        {bytes([value]): value for value in range(256)}, "gpt2", {"<|endoftext|>": 256}, "<|endoftext|>"
    )
    assert PLAIN.stops(foreign) == (256,)
    with pytest.raises(
        ValueError, match=r"needs the special token '<\|im_end\|>', which the vocabulary lacks"
    ):
        CHATML.stops(foreign)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one message"),
        ([{"role": "user", "content": "a"}, {"role": "bot", "content": "a"}], "message 1 has the role 'bot'"),
        ([{"content": "a"}], "message 0 has the role None"),
        ([{"role": "user", "content": None}], r"message 0 \(user\) has no text as content, but None"),
        ([{"role": "user"}], r"message 0 \(user\) has no text"),
    ],
)
def test_conversations_that_cannot_be_written(messages: list[Message], complaint: str) -> None:
    for template in (CHATML, SMOLLM2):
        with pytest.raises(ValueError, match=complaint):
            template.render(messages, BYTES)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"roles": {"user": Turn("u")}}, "roles has no 'assistant', only"),
        (
            {"roles": {"assistant": Turn("a", "\n")}, "specials": ("<|x|>",)},
            "must begin with one of specials",
        ),
        ({"roles": {"assistant": Turn("a", "\n")}}, "so that a reply has an end"),
        ({"roles": CHATML.roles, "specials": ("<|im_end|>", "<|im_end|>")}, "must be different names"),
        (
            {"roles": {"assistant": Turn("a", "<|x|>")}, "specials": ("<|x|>",), "system": "s"},
            "roles has no 'system'",
        ),
    ],
)
def test_templates_that_cannot_be_used(fields: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ChatTemplate(**fields)


@pytest.mark.parametrize(("name", "template"), [("chatml", CHATML), ("smollm2", SMOLLM2), ("plain", PLAIN)])
def test_configuration_files_are_the_named_templates(name: str, template: ChatTemplate) -> None:
    node = compose([f"modality/text/chat={name}"])["modality"]["text"]
    config = typed(node, TextModalityConfig)
    assert config == BytesConfig(chat=template)
    assert typed(to_plain(template), ChatTemplate) == template
    path = conf_folder() / "modality" / "text" / "chat" / f"{name}.yaml"
    assert set(yaml.safe_load(path.read_text())) == set(to_plain(template))
