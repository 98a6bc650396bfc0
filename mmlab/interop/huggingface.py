"""Decoders in the folders of Hugging Face's transformers, in and out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mmlab.backbone.config import BackboneConfig
from mmlab.data.files import fresh_folder
from mmlab.interop.chat_template import FILE as TEMPLATE
from mmlab.interop.chat_template import find_template, jinja, recognise
from mmlab.interop.gpt2 import export_gpt2, import_gpt2
from mmlab.interop.llama import CLASSES, export_llama, import_llama
from mmlab.interop.tensors import WHOLE, read_json, read_tensors
from mmlab.interop.tokenizer_files import TOKENIZER_FILES, has_tokenizer, write_tokenizer
from mmlab.interop.weights import ImportedDecoder, InteropError, State
from mmlab.modalities.text.huggingface import HuggingFaceConfig
from mmlab.modalities.text.vocabulary import TextModalityConfig, Vocabulary

CONFIG, GENERATION = "config.json", "generation_config.json"
IMPORTERS: dict[str, Callable[..., ImportedDecoder]] = {
    "gpt2": import_gpt2,
    **dict.fromkeys(CLASSES, import_llama),
}
"""By `model_type`."""


@dataclass(frozen=True)
class ImportedFolder:
    """A decoder and what it reads and writes.

    Args:
        decoder: the network.
        modality: its vocabulary and chat template; None if the folder has no tokenizer.
        warnings: what of the folder was left out, and why.
    """

    decoder: ImportedDecoder
    modality: TextModalityConfig | None
    warnings: tuple[str, ...] = ()


def import_folder(path: str | Path, *, expected: BackboneConfig | None = None) -> ImportedFolder:
    """The GPT-2, Llama, Mistral or Qwen3 model in the folder `path`.

    A chat template that our form cannot express is left out, with a warning.

    Args:
        path: has config.json and weights, and may have a tokenizer and a chat template.
        expected: a configuration that the checkpoint must have.

    Raises:
        InteropError: names the file and what is missing, cut off or cannot be expressed.
    """
    folder = Path(path)
    decoder = import_decoder(folder, expected=expected)
    if not has_tokenizer(folder):
        return ImportedFolder(decoder, None)
    modality = HuggingFaceConfig(str(folder), pattern="smollm" if _digits_stand_alone(folder) else "gpt2")
    vocabulary = modality.build()
    if vocabulary.size > decoder.size:
        raise InteropError(
            f"{folder}: the tokenizer has {vocabulary.size} ids, the weights have {decoder.size}"
        )
    text = find_template(folder)
    if text is None:
        return ImportedFolder(decoder, modality)
    chat, reason = recognise(text, folder, vocabulary)
    if chat is None:
        return ImportedFolder(decoder, modality, (f"{folder}: {reason}",))
    return ImportedFolder(decoder, replace(modality, chat=chat))


def _digits_stand_alone(folder: Path) -> bool:
    """Whether vocab.json, which does not say how text is cut, must come of text with every digit by itself:
    no token has a digit and anything else."""
    if (folder / "tokenizer.json").is_file():
        return False
    digits = [token for token in read_json(folder / "vocab.json") if re.search("[0-9]", token)]
    return len(digits) == 10


def import_decoder(folder: Path, *, expected: BackboneConfig | None = None) -> ImportedDecoder:
    """The network of `import_folder` alone."""
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if kind not in IMPORTERS:
        raise InteropError(f"{folder / CONFIG}: model_type {kind!r} is not one of {sorted(IMPORTERS)}")
    if config.get("quantization_config"):
        raise InteropError(f"{folder / CONFIG}: quantized weights cannot be read")
    try:
        return IMPORTERS[kind](config, read_tensors(folder), expected=expected)
    except InteropError as error:
        raise InteropError(f"{folder}: {error}") from error


def export_folder(
    decoder: ImportedDecoder, folder: str | Path, *, modality: TextModalityConfig | None = None
) -> Path:
    """Writes `decoder` so that transformers' AutoModelForCausalLM computes the same; whole or not at all.

    Args:
        decoder: the network; its number type is kept.
        folder: where to; must not exist, or be empty.
        modality: its vocabulary, for AutoTokenizer. transformers takes the name of a special token in a text
            for that token, which ours does not.

    Raises:
        InteropError: what transformers' classes or `tokenizers` cannot express; or a folder that has content.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InteropError(f"{target} exists already")
    vocabulary = modality.build() if modality is not None else None
    if vocabulary is not None and vocabulary.size > decoder.size:
        raise InteropError(f"the vocabulary has {vocabulary.size} ids, the network {decoder.size}")
    config, state = _parts(decoder)
    stops = _stops(modality, vocabulary)
    config |= {"bos_token_id": None, "eos_token_id": stops[0] if stops else None}
    with fresh_folder(target) as temporary:
        _write_json(temporary / CONFIG, config)
        save_file(state, temporary / WHOLE, metadata={"format": "pt"})
        shutil.copymode(temporary / CONFIG, temporary / WHOLE)  # safetensors closes it to all but the owner
        if stops:
            _write_json(temporary / GENERATION, {"eos_token_id": list(stops)})
        if modality is not None and vocabulary is not None:
            _write_vocabulary(modality, vocabulary, temporary)
    return target


def _parts(decoder: ImportedDecoder) -> tuple[dict[str, Any], State]:
    """Configuration and tensors as `save_pretrained` writes them: a tied output layer is not repeated."""
    export = export_gpt2 if decoder.backbone.position == "none" else export_llama
    config, state = export(decoder)
    kinds = {tensor.dtype for tensor in state.values()}
    if len(kinds) != 1:
        raise InteropError(f"the weights must have one number type, not {sorted(map(str, kinds))}")
    config["dtype"] = str(kinds.pop()).removeprefix("torch.")
    if decoder.model.tie_embeddings:
        del state["lm_head.weight"]
    return config, {name: tensor.contiguous() for name, tensor in state.items()}


def _stops(modality: TextModalityConfig | None, vocabulary: Vocabulary | None) -> tuple[int, ...]:
    if modality is None or vocabulary is None:
        return ()
    return modality.chat.stops(vocabulary) if modality.chat is not None else (vocabulary.end,)


def _write_vocabulary(modality: TextModalityConfig, vocabulary: Vocabulary, folder: Path) -> None:
    source = Path(modality.path) if isinstance(modality, HuggingFaceConfig) else None
    if source is not None and (source / TOKENIZER_FILES[0]).is_file():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    else:
        write_tokenizer(vocabulary, folder)
    if modality.chat is not None:
        (folder / TEMPLATE).write_text(jinja(modality.chat, vocabulary), encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
