"""Reference models of Hugging Face, small, with random weights: one line for each thing that may differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mmlab.interop.gpt2 import export_gpt2, import_gpt2
from mmlab.interop.llama import export_llama, import_llama
from mmlab.interop.weights import ImportedDecoder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

VOCABULARY = 61
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 64}


@dataclass(frozen=True)
class Case:
    """A reference class, its configuration, and our importer and exporter."""

    name: str
    kind: str
    options: dict[str, Any]
    take: Callable[..., ImportedDecoder]
    give: Callable[[ImportedDecoder], tuple[dict[str, Any], dict[str, Tensor]]]

    def reference(self) -> Any:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(transformers, f"{self.kind}Config")(**self.options, attn_implementation="eager")
            suffix = "LMHeadModel" if self.kind == "GPT2" else "ForCausalLM"
            model = getattr(transformers, f"{self.kind}{suffix}")(config).eval()
        # Biases and norms start at 0 and 1, where a mix-up would not show.
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
        return model


def _gpt2(name: str, **options: Any) -> Case:
    return Case(name, "GPT2", GPT2 | options, import_gpt2, export_gpt2)


def _llama(name: str, kind: str = "Llama", **options: Any) -> Case:
    return Case(name, kind, LLAMA | options, import_llama, export_llama)


CASES = [
    _gpt2("gpt2"),
    _gpt2("gpt2, square MLP", n_inner=32),
    _gpt2("gpt2, eps 1e-2", layer_norm_epsilon=1e-2),
    _gpt2("gpt2, exact GELU", activation_function="gelu"),
    _gpt2("gpt2, quick GELU", activation_function="quick_gelu"),
    _gpt2("gpt2, squared ReLU", activation_function="relu2"),
    _gpt2("gpt2, untied", tie_word_embeddings=False),
    _llama("llama"),
    _llama("llama, grouped, tied", num_key_value_heads=2, tie_word_embeddings=True),
    _llama("llama, square MLP, eps 1e-2", intermediate_size=32, rms_norm_eps=1e-2, num_key_value_heads=1),
    _llama("llama, rotary base 500", rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    _llama("mistral, window 5", "Mistral", sliding_window=5, num_key_value_heads=2, head_dim=8),
    _llama("qwen3, head size 16", "Qwen3", head_dim=16, num_key_value_heads=2),
]
