"""Folders of Hugging Face: read whole and with a reason for what is refused, written whole or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmlab.backbone.config import BackboneConfig
from mmlab.interop import huggingface
from mmlab.interop.huggingface import export_folder, import_folder
from mmlab.interop.weights import ImportedDecoder, InteropError
from mmlab.modalities.text.chat import CHATML, SMOLLM2
from mmlab.modalities.text.vocabulary import BytesConfig, CharactersConfig
from mmlab.models.decoder import Decoder, DecoderConfig

LLAMA = BackboneConfig(
    16, 2, 2, num_kv_heads=1, activation="swiglu", norm="rmsnorm", bias=False, position="rotary"
)
GPT2 = BackboneConfig(16, 2, 2, activation="gelu_tanh", norm="layernorm", bias=True)


def decoder(
    backbone: BackboneConfig = LLAMA, *, size: int = 300, dtype: torch.dtype = torch.float32, **model: Any
) -> ImportedDecoder:
    torch.manual_seed(0)
    if backbone.position == "none":
        model.setdefault("max_positions", 12)
    config = DecoderConfig(**model)
    state = Decoder(backbone, config, size).to(dtype).state_dict()
    return ImportedDecoder(backbone, config, size, state)


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype
        for name in found
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backbone", [LLAMA, GPT2, replace(LLAMA, window=5), replace(LLAMA, qk_norm=True)])
def test_a_folder_gives_back_what_was_written(
    tmp_path: Path, backbone: BackboneConfig, tied: bool, dtype: torch.dtype
) -> None:
    given = decoder(backbone, dtype=dtype, tie_embeddings=tied)
    found = import_folder(export_folder(given, tmp_path / "out"), expected=backbone)
    assert equal(found.decoder.state, given.state)
    assert (found.decoder.model, found.decoder.size) == (given.model, given.size)
    assert (found.modality, found.warnings) == (None, ())
    names = safe_open(tmp_path / "out" / "model.safetensors", framework="pt")
    assert names.metadata() == {"format": "pt"}
    assert ("lm_head.weight" in names.keys()) is not tied  # noqa: SIM118  no mapping
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_files_have_the_mode_of_any_other(tmp_path: Path) -> None:
    folder = export_folder(decoder(), tmp_path / "out")
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in [*folder.iterdir(), tmp_path / "other"]}
    assert len(modes) == 1


def test_an_export_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(huggingface, "save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        export_folder(decoder(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_export_leaves_what_is_there_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_folder(decoder(), tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(InteropError, match="out exists already"):
        export_folder(decoder(GPT2), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def shards(folder: Path) -> dict[str, Any]:
    """Splits the weights of `folder` into two files with an index, as big models have them."""
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    files = {name: f"model-0000{1 + (i >= 4)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_shards_are_put_together(tmp_path: Path) -> None:
    given = decoder()
    index = shards(export_folder(given, tmp_path / "out"))
    assert equal(import_folder(tmp_path / "out").decoder.state, given.state)

    place = tmp_path / "out" / "model.safetensors.index.json"
    moved = index["weight_map"] | {"model.norm.weight": "model-00001-of-00002.safetensors"}
    place.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(InteropError, match=r"00001-of-00002.* lacks \['model\.norm\.weight'\] of its index"):
        import_folder(tmp_path / "out")
    place.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(InteropError, match=r"names \.\./elsewhere\.safetensors, which is no file in"):
        import_folder(tmp_path / "out")
    place.write_text(json.dumps(index))
    (tmp_path / "out" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InteropError, match=r"names model-00002-of-00002\.safetensors, which is no file"):
        import_folder(tmp_path / "out")
    place.write_text("[]")
    with pytest.raises(InteropError, match=r"index\.json holds a list, expected an object"):
        import_folder(tmp_path / "out")


def test_the_older_kind_of_file_is_read_without_running_anything(tmp_path: Path) -> None:
    given = decoder(GPT2)
    folder = export_folder(given, tmp_path / "out")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert equal(import_folder(folder).decoder.state, given.state)
    torch.save({"x": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(InteropError, match=r"pytorch_model\.bin cannot be read"):
        import_folder(folder)
    torch.save({"x": 1}, folder / "pytorch_model.bin")
    with pytest.raises(InteropError, match=r"pytorch_model\.bin holds more than tensors: \['x'\]"):
        import_folder(folder)


def test_what_is_missing_or_cut_off_is_named(tmp_path: Path) -> None:
    folder = export_folder(decoder(), tmp_path / "out")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(InteropError, match=r"model\.safetensors cannot be read, it may be cut off"):
            import_folder(folder)
    weights.unlink()
    with pytest.raises(InteropError, match=r"out has no weights: neither model\.safetensors"):
        import_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(InteropError, match=r"config\.json is not JSON"):
        import_folder(folder)
    os.remove(folder / "config.json")
    with pytest.raises(InteropError, match=r"config\.json does not exist"):
        import_folder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, r"config\.json: model_type 'bert' is not one of \['gpt2', 'llama'"),
        ({"model_type": None}, "model_type None"),
        ({"quantization_config": {"bits": 4}}, "quantized weights cannot be read"),
        ({"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": None}, "rope_type is 'llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is {'sliding_attention'}"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_options_that_cannot_be_expressed(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = export_folder(decoder(), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    merged = {**config, **change}
    if change == {"hidden_size": None}:
        del merged["hidden_size"]
    (folder / "config.json").write_text(json.dumps(merged))
    with pytest.raises(InteropError, match=message):
        import_folder(folder)


def test_weights_of_one_number_type_only(tmp_path: Path) -> None:
    given = decoder()
    mixed = replace(given, state=given.state | {"backbone.norm.weight": torch.ones(16).double()})
    with pytest.raises(InteropError, match=r"one number type, not \['torch\.float32', 'torch\.float64'\]"):
        export_folder(mixed, tmp_path / "out")


def test_a_vocabulary_of_our_own_goes_along(tmp_path: Path) -> None:
    modality = BytesConfig(chat=SMOLLM2)
    folder = export_folder(decoder(size=260), tmp_path / "out", modality=modality)
    found = import_folder(folder)
    assert found.warnings == ()
    assert found.modality is not None
    assert found.modality.chat is not None
    ours, theirs = modality.build(), found.modality.build()
    text = "Grüße 🙂\n\n  x"
    assert theirs.encode(text).tolist() == ours.encode(text).tolist()
    assert (theirs.end, dict(theirs.specials)) == (ours.end, dict(ours.specials))
    for messages in ([{"role": "user", "content": text}], [{"role": "system", "content": "s"}]):
        expected = SMOLLM2.render(messages, ours, reply=True)
        rendered = found.modality.chat.render(messages, theirs, reply=True)
        assert rendered.ids.tolist() == expected.ids.tolist()
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert stops == list(SMOLLM2.stops(ours))
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == stops[0]


def test_a_vocabulary_that_was_imported_is_copied(tmp_path: Path) -> None:
    first = export_folder(decoder(size=260), tmp_path / "a", modality=BytesConfig(chat=CHATML))
    found = import_folder(first)
    second = export_folder(found.decoder, tmp_path / "b", modality=found.modality)
    names = {path.name for path in first.iterdir()}
    assert {path.name for path in second.iterdir()} == names
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    for name in names - {"chat_template.jinja", "config.json"}:
        assert (second / name).read_bytes() == (first / name).read_bytes(), name


def test_a_vocabulary_that_has_no_such_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InteropError, match=r"CharacterVocabulary has no form in tokenizer\.json"):
        export_folder(decoder(), tmp_path / "out", modality=CharactersConfig("abc"))
    with pytest.raises(InteropError, match="the vocabulary has 257 ids, the network 256"):
        export_folder(decoder(size=256), tmp_path / "out", modality=BytesConfig())
    assert list(tmp_path.iterdir()) == []


def test_a_chat_template_that_has_no_form_here_is_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = export_folder(decoder(size=260), tmp_path / "out", modality=BytesConfig(chat=CHATML))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] | upper }}")
    found = import_folder(folder)
    assert found.modality is not None
    assert found.modality.chat is None
    assert len(found.warnings) == 1
    assert "the chat template has no form here and is left out: " in found.warnings[0]
