"""Importers refuse what they cannot represent, and say what it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mmlab.interop.gpt2 import export_gpt2, import_gpt2
from mmlab.interop.llama import export_llama, import_llama
from mmlab.interop.weights import ImportedDecoder, InteropError

D = 8
GPT2: dict[str, Any] = {"vocab_size": 11, "n_positions": 6, "n_embd": D, "n_layer": 1, "n_head": 2}
GPT2 |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 11, "hidden_size": D, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12, "hidden_act": "silu"}
LLAMA |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}


def _gpt2_state() -> dict[str, Tensor]:
    shapes = {"wte.weight": (11, D), "wpe.weight": (6, D)}
    for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        shapes |= {f"{norm}.weight": (D,), f"{norm}.bias": (D,)}
    for name, rows, columns in [("attn.c_attn", D, 3 * D), ("attn.c_proj", D, D), ("mlp.c_fc", D, 4 * D)]:
        shapes |= {f"h.0.{name}.weight": (rows, columns), f"h.0.{name}.bias": (columns,)}
    shapes |= {"h.0.mlp.c_proj.weight": (4 * D, D), "h.0.mlp.c_proj.bias": (D,)}
    generator = torch.Generator().manual_seed(0)
    state = {f"transformer.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return state | {"lm_head.weight": state["transformer.wte.weight"].clone()}


def _llama_state() -> dict[str, Tensor]:
    return export_llama(_llama())[1]


def _llama() -> ImportedDecoder:
    state = {"model.embed_tokens.weight": (11, D), "model.norm.weight": (D,), "lm_head.weight": (11, D)}
    for name, shape in {
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
        "self_attn.q_proj": (D, D),
        "self_attn.k_proj": (4, D),
        "self_attn.v_proj": (4, D),
        "self_attn.o_proj": (D, D),
        "mlp.gate_proj": (12, D),
        "mlp.up_proj": (12, D),
        "mlp.down_proj": (D, 12),
    }.items():
        state[f"model.layers.0.{name}.weight"] = shape
    generator = torch.Generator().manual_seed(0)
    return import_llama(
        LLAMA, {name: torch.randn(shape, generator=generator) for name, shape in state.items()}
    )


def test_fused_and_transposed_matrices_land_where_they_belong() -> None:
    state = _gpt2_state()
    ours = import_gpt2(GPT2, state).state
    fused = state["transformer.h.0.attn.c_attn.weight"]
    for i, name in enumerate(("query", "key", "value")):
        assert torch.equal(
            ours[f"backbone.blocks.0.attention.{name}.weight"], fused[:, i * D : (i + 1) * D].T
        )
    square = state["transformer.h.0.attn.c_proj.weight"]
    assert torch.equal(ours["backbone.blocks.0.attention.output.weight"], square.T)


def test_causal_buffers_and_the_missing_prefix_are_accepted() -> None:
    state = _gpt2_state()
    bare = {name.removeprefix("transformer."): x for name, x in state.items() if name != "lm_head.weight"}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 6, 6).tril()
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    _, exported = export_gpt2(import_gpt2(GPT2, bare))
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], state[name]) for name in state)


def test_rotary_buffers_are_accepted() -> None:
    state = _llama_state() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert import_llama(LLAMA, state).state.keys() == _llama().state.keys()


def test_missing_and_unknown_keys_are_listed() -> None:
    state = _gpt2_state()
    del state["transformer.ln_f.bias"]
    state["transformer.h.1.ln_1.bias"] = torch.zeros(D)
    with pytest.raises(InteropError, match=r"lacks .*ln_f\.bias.* unknown keys .*h\.1\.ln_1\.bias"):
        import_gpt2(GPT2, state)
    untied = {name: x for name, x in _llama_state().items() if name != "lm_head.weight"}
    with pytest.raises(InteropError, match=r"lacks \['lm_head\.weight'\]"):
        import_llama(LLAMA, untied)


def test_tied_tensors_must_agree() -> None:
    state = _gpt2_state()
    state["lm_head.weight"][3, 2] += 1
    with pytest.raises(InteropError, match=r"lm_head\.weight and transformer\.wte\.weight differ"):
        import_gpt2(GPT2, state)
    untied = import_gpt2(GPT2 | {"tie_word_embeddings": False}, state)
    assert torch.equal(untied.state["head.weight"], state["lm_head.weight"])


def test_shapes_must_fit_the_configuration() -> None:
    with pytest.raises(InteropError, match=r"stem\.positions\.weight: .*\(6, 8\).*\(7, 8\)"):
        import_gpt2(GPT2 | {"n_positions": 7}, _gpt2_state())
    with pytest.raises(InteropError, match=r"attention\.key\.weight: .*\(4, 8\).*\(8, 8\)"):
        import_llama(LLAMA | {"num_key_value_heads": 2}, _llama_state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "swish"}, "activation_function 'swish'"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ],
)
def test_gpt2_options_that_cannot_be_expressed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InteropError, match=message):
        import_gpt2(GPT2 | change, _gpt2_state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_type is 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"model_type": "gemma"}, "model_type 'gemma'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
    ],
)
def test_llama_options_that_cannot_be_expressed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InteropError, match=message):
        import_llama(LLAMA | change, _llama_state())


def test_former_rotary_keys_are_read() -> None:
    former = import_llama(LLAMA | {"rope_theta": 5000.0, "rope_scaling": None}, _llama_state())
    assert former.backbone.rope_base == 5000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, "activation: the checkpoint has 'gelu_tanh', 'gelu' was asked for"),
        ({"norm_eps": 1e-6}, "norm_eps: the checkpoint has 1e-05, 1e-06 was asked for"),
        ({"mlp_size": 16}, "inner_size: the checkpoint has 32, 16 was asked for"),
        ({"qk_norm": True}, "qk_norm: the checkpoint has False, True was asked for"),
    ],
)
def test_a_configuration_that_was_asked_for_must_be_the_checkpoints(
    change: dict[str, Any], message: str
) -> None:
    found = import_gpt2(GPT2, _gpt2_state())
    again = import_gpt2(GPT2, _gpt2_state(), expected=dataclasses.replace(found.backbone, dropout=0.3))
    assert again.backbone == found.backbone
    with pytest.raises(InteropError, match=message):
        import_gpt2(GPT2, _gpt2_state(), expected=dataclasses.replace(found.backbone, **change))


def test_constants_survive_a_round_trip() -> None:
    config = GPT2 | {"layer_norm_epsilon": 3e-4, "activation_function": "gelu"}
    exported, state = export_gpt2(import_gpt2(config, _gpt2_state()))
    again = import_gpt2(exported, state).backbone
    assert (again.activation, again.norm_eps) == ("gelu", 3e-4)


def test_export_refuses_another_architecture() -> None:
    with pytest.raises(InteropError, match="norm is 'rmsnorm', only 'layernorm'"):
        export_gpt2(_llama())
    with pytest.raises(InteropError, match="norm is 'layernorm', only 'rmsnorm'"):
        export_llama(import_gpt2(GPT2, _gpt2_state()))
    capped = dataclasses.replace(_llama(), model=dataclasses.replace(_llama().model, logit_soft_cap=3.0))
    with pytest.raises(InteropError, match=r"logit_soft_cap is 3\.0"):
        export_llama(capped)


def test_type_of_the_weights_is_kept() -> None:
    half = {name: x.to(torch.bfloat16) for name, x in _gpt2_state().items()}
    network = import_gpt2(GPT2, half).build()
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("give", [export_gpt2, export_llama])
def test_export_refuses_what_no_field_of_theirs_says(give: Any) -> None:
    found = import_gpt2(GPT2, _gpt2_state()) if give is export_gpt2 else _llama()
    scaled = dataclasses.replace(found.backbone, parametrization="mup", base_width=D // 2)
    with pytest.raises(InteropError, match="parametrization is 'mup', only 'standard' can be expressed"):
        give(dataclasses.replace(found, backbone=scaled))
    assert give(found)[0]["vocab_size"] == 11


def test_what_a_configuration_leaves_out_means_what_its_class_says() -> None:
    qwen3 = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    qwen3 |= {"model_type": "qwen3", "num_attention_heads": 32}
    state = _llama_state() | {
        f"model.layers.0.self_attn.{kind}_norm.weight": torch.ones(128) for kind in "qk"
    }
    with pytest.raises(InteropError, match=r"query\.weight: the checkpoint gives \(8, 8\).*\(4096, 8\)"):
        import_llama(qwen3, state)
    with pytest.raises(InteropError, match="the configuration lacks 'intermediate_size'"):
        import_llama({key: value for key, value in LLAMA.items() if key != "intermediate_size"}, state)
