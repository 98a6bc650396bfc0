"""Folders against transformers itself: what it loads of ours computes the same, what it saves comes back."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmlab.backbone.config import BackboneConfig
from mmlab.interop.huggingface import export_folder, import_folder
from mmlab.interop.weights import ImportedDecoder
from mmlab.modalities.text.bpe import BPEConfig, write_ranks
from mmlab.modalities.text.bpe_training import byte_symbols
from mmlab.modalities.text.chat import CHATML, SMOLLM2, ChatTemplate
from mmlab.modalities.text.huggingface import HuggingFaceConfig
from mmlab.modalities.text.vocabulary import BytesConfig, TextModalityConfig
from mmlab.models.decoder import Decoder, DecoderConfig
from tests.parity.families import CASES, VOCABULARY, Case, transformers

by_name = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def loaded(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(folder, attn_implementation="eager").eval()


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))


@by_name
def test_transformers_computes_the_same_from_our_folder(case: Case, tmp_path: Path) -> None:
    reference = case.reference()
    imported = case.take(reference.config.to_dict(), reference.state_dict())
    theirs = loaded(export_folder(imported, tmp_path / "out"))
    assert type(theirs) is type(reference)
    with torch.no_grad():
        logits = theirs(tokens()).logits
        assert torch.equal(logits, reference(tokens()).logits)
        difference = float((imported.build().eval()(tokens()).logits_BTV - logits).abs().max())
    print(f"{case.name:40s} {difference:.1e}")
    assert difference <= 1e-5


@by_name
def test_what_transformers_saves_comes_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    reference = case.reference()
    reference.save_pretrained(tmp_path / "theirs")
    imported = import_folder(tmp_path / "theirs").decoder
    export_folder(imported, tmp_path / "ours")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before, after = (transformers.AutoConfig.from_pretrained(tmp_path / name) for name in ("theirs", "ours"))
    given = before.to_dict()
    for name in ("architectures", "attn_pdrop", "n_inner", "bos_token_id", "eos_token_id", "_name_or_path"):
        given.pop(name, None)
    assert {name: after.to_dict()[name] for name in given} == given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_number_type_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES[0]
    reference = case.reference()
    half = {name: value.to(dtype) for name, value in reference.state_dict().items()}
    theirs = loaded(export_folder(case.take(reference.config.to_dict(), half), tmp_path / "out"))
    assert {parameter.dtype for parameter in theirs.parameters()} == {dtype}
    assert torch.equal(theirs.transformer.wte.weight, half["transformer.wte.weight"])


def byte_pairs(folder: Path, chat: ChatTemplate) -> BPEConfig:
    ranks = {bytes([value]): value for value in range(256)} | {
        b"he": 256,
        b"ll": 257,
        b"hell": 258,
        b" t": 259,
    }
    (folder / "own.tiktoken").write_bytes(write_ranks(ranks))
    return BPEConfig(str(folder / "own.tiktoken"), pattern="cl100k", chat=chat)


@pytest.mark.parametrize("kind", ["bytes", "byte pairs"])
@pytest.mark.parametrize("chat", [CHATML, SMOLLM2])
@pytest.mark.parametrize("position", ["none", "rotary"])
def test_its_tokenizer_gives_the_same_ids(
    kind: str, chat: ChatTemplate, position: str, tmp_path: Path
) -> None:
    modality: TextModalityConfig = BytesConfig(chat=chat) if kind == "bytes" else byte_pairs(tmp_path, chat)
    vocabulary = modality.build()
    backbone = BackboneConfig(8, 1, 1)
    config = DecoderConfig(max_positions=8)
    if position == "rotary":
        backbone = replace(backbone, position="rotary", norm="rmsnorm", activation="swiglu", bias=False)
        config = DecoderConfig()
    state = Decoder(backbone, config, vocabulary.size).state_dict()
    imported = ImportedDecoder(backbone, config, vocabulary.size, state)
    folder = export_folder(imported, tmp_path / "out", modality=modality)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("hello there's 12345\n\n  x", "Grüße 🙂 中文\t", " hell", ""):
        assert tokenizer.encode(text) == vocabulary.encode(text).tolist()
        assert tokenizer.decode(vocabulary.encode(text).tolist()) == text
    assert tokenizer.eos_token_id == vocabulary.end
    messages = [
        {"role": "user", "content": "hello\n"},
        {"role": "assistant", "content": " hell"},
        {"role": "user", "content": "12345"},
    ]
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert given == chat.render(messages, vocabulary, reply=True).ids.tolist()
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == list(chat.stops(vocabulary))


@pytest.mark.parametrize(("tokens_of_two_digits", "pattern"), [(0, "smollm"), (1, "gpt2")])
def test_a_folder_of_vocabulary_and_merges_goes_out_as_one_file(
    tokens_of_two_digits: int, pattern: str, tmp_path: Path
) -> None:
    symbols = {value: symbol for symbol, value in byte_symbols().items()}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), (symbols[32], symbols[32]), ("1", "2")]
    merges = merges[: 4 + tokens_of_two_digits]
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *symbols.values(), *map("".join, merges)]
    source = tmp_path / "source"
    backbone = replace(
        BackboneConfig(8, 1, 1), position="rotary", norm="rmsnorm", activation="swiglu", bias=False
    )
    state = Decoder(backbone, DecoderConfig(), len(names)).state_dict()
    export_folder(ImportedDecoder(backbone, DecoderConfig(), len(names), state), source)
    (source / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    (source / "merges.txt").write_text("\n".join(map(" ".join, merges)))
    (source / "chat_template.jinja").write_text(
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
        "'<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    found = import_folder(source)
    assert isinstance(found.modality, HuggingFaceConfig)
    assert found.modality.pattern == pattern
    assert found.modality.chat is not None
    vocabulary = found.modality.build()
    folder = export_folder(found.decoder, tmp_path / "out", modality=found.modality)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("hello  12  12\n\n", "é hell  1", ""):
        assert tokenizer.encode(text) == vocabulary.encode(text).tolist()
    messages = [{"role": "user", "content": "hell"}]
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert given == found.modality.chat.render(messages, vocabulary, reply=True).ids.tolist()
    again = import_folder(folder).modality
    assert again is not None
    assert again.chat == found.modality.chat
    assert again.build().encode("hell  12").tolist() == vocabulary.encode("hell  12").tolist()
