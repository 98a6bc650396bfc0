"""Our decoder against Hugging Face's on small random weights: logits and the gradient of every parameter."""

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
by_name = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@by_name
def test_logits_and_gradients_equal_the_reference(case: Case) -> None:
    reference = case.reference()
    imported = case.take(reference.config.to_dict(), reference.state_dict())
    ours = imported.build().eval()
    tokens_BT = torch.randint(0, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
    theirs_BTV = reference(tokens_BT).logits
    logits_BTV = ours(tokens_BT).logits_BTV
    weight_BTV = torch.randn(theirs_BTV.shape, generator=torch.Generator().manual_seed(2)) / 60
    (theirs_BTV * weight_BTV).sum().backward()
    (logits_BTV * weight_BTV).sum().backward()

    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    expected = case.take(reference.config.to_dict(), gradients).state
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert found.keys() == expected.keys()
    worst = max((float((found[name] - expected[name]).abs().max()), name) for name in found)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    logits = float((logits_BTV - theirs_BTV).detach().abs().max())
    print(f"{case.name:30s} logits {logits:.1e}   gradients {worst[0]:.1e} of {scale:.1e} ({worst[1]})")
    assert logits <= 1e-4
    assert worst[0] <= 1e-4
    assert scale > 0.1


@by_name
def test_export_of_an_import_is_the_same_bits(case: Case) -> None:
    reference = case.reference()
    state = reference.state_dict()
    config, exported = case.give(case.take(reference.config.to_dict(), state))
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], state[name]) for name in state)
    for name, value in reference.config.to_dict().items():
        if name in config and name not in ("architectures", "attn_pdrop", "n_inner"):
            assert config[name] == value, name
    again = case.take(config, exported)
    assert case.give(again)[0] == config


@by_name
def test_reference_loads_an_export(case: Case) -> None:
    reference = case.reference()
    config, exported = case.give(case.take(reference.config.to_dict(), reference.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = type(reference)(type(reference.config)(**config, attn_implementation="eager")).eval()
    again.load_state_dict(exported)
    tokens_BT = torch.arange(20)[None]
    assert torch.equal(again(tokens_BT).logits, reference(tokens_BT).logits)
