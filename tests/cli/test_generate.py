"""`mmlab generate`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmlab import generate as verb
from mmlab import restore
from mmlab.backbone.config import BackboneConfig
from mmlab.config import ConfigError, compose, typed
from mmlab.generate import GenerateConfig
from mmlab.inference.generation import encode_prompt, generate
from mmlab.inference.model import LanguageModel
from mmlab.modalities.text.chat import PLAIN
from mmlab.modalities.text.vocabulary import ByteVocabulary
from mmlab.models.decoder import Decoder, DecoderConfig


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    torch.manual_seed(0)
    vocabulary = ByteVocabulary()
    backbone = BackboneConfig(width=32, depth=1, num_heads=2, position="rotary", init_std=0.3)
    network = Decoder(backbone, DecoderConfig(), vocabulary.size).eval()
    loaded = LanguageModel(network, vocabulary, PLAIN)
    monkeypatch.setattr(restore, "restore", lambda *args, **options: loaded)
    return loaded


def config(*overrides: str) -> GenerateConfig:
    words = ["checkpoint=somewhere", "device=cpu", "sampling.max_new_tokens=12", *overrides]
    return typed(compose(words, config_name="generate"), GenerateConfig)


def expected(model: LanguageModel, prompts: list[Any], settings: GenerateConfig) -> list[str]:
    ids = [encode_prompt(model, prompt) for prompt in prompts]
    return [one.text for one in generate(model, ids, settings.sampling)]


def test_one_prompt_is_printed_as_it_comes(model: LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config("prompt=hello")
    verb.run(settings)
    assert capsys.readouterr().out == expected(model, ["hello"], settings)[0] + "\n"


def test_chat_wraps_the_prompt(model: LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config("prompt=hello", "chat=true")
    verb.run(settings)
    asked = [{"role": "user", "content": "hello"}]
    assert capsys.readouterr().out == expected(model, [asked], settings)[0] + "\n"


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_file_of_prompts_gives_a_row_each(model: LanguageModel, kind: str, tmp_path: Path) -> None:
    asked: list[Any] = ["one", "two words", "three of them"]
    if kind == "jsonl":
        asked[1] = [{"role": "user", "content": "two words"}]
    lines = (
        asked
        if kind == "txt"
        else [json.dumps({"prompt" if isinstance(one, str) else "messages": one}) for one in asked]
    )
    source, output = tmp_path / f"prompts.{kind}", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n\n")
    settings = config(f"prompts={source}", f"output={output}", "sampling.seed=5", "batch_size=2")
    verb.run(settings)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row.get("prompt", row.get("messages")) for row in rows] == asked
    assert [row["text"] for row in rows] == expected(model, asked, settings)
    assert [row["seed"] for row in rows] == [5, 6, 7]
    with pytest.raises(ConfigError, match="is there already; overwrite=true replaces it"):
        verb.run(settings)
    verb.run(config(f"prompts={source}", f"output={output}", "overwrite=true"))


def test_a_row_without_a_prompt_is_named_and_nothing_is_written(model: LanguageModel, tmp_path: Path) -> None:
    source, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: a row needs"):
        verb.run(config(f"prompts={source}", f"output={output}"))
    assert not output.exists()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ((), "give prompt=TEXT or prompts=FILE, one of the two"),
        (("prompt=a", "prompts=b"), "give prompt=TEXT or prompts=FILE, one of the two"),
        (("prompt=a", "batch_size=0"), "batch_size must be at least 1, got 0"),
        (("prompt=a", "sampling.top_p=0.0"), r"sampling: top_p must lie in \(0, 1\]"),
    ],
)
def test_complaints(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config(*overrides)


def test_a_missing_checkpoint_and_a_wrong_device_are_named() -> None:
    with pytest.raises(ValueError, match="somewhere does not exist"):
        verb.run(config("prompt=a"))
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda, cuda:N or mps, got 'tpu'"):
        verb.run(config("prompt=a", "device=tpu"))
