"""Llama, Mistral and Qwen3 weights in Hugging Face's layout, in and out, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmlab.backbone.config import BackboneConfig
from mmlab.interop.weights import (
    Entry,
    ImportedDecoder,
    InteropError,
    State,
    checked,
    export_state,
    import_state,
    needed,
    plain_backbone,
    require,
)
from mmlab.models.decoder import DecoderConfig

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
BUFFER = re.compile(r".*rotary_emb\.inv_freq$")
CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
UNSAID: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""What a configuration means where it leaves these keys out; else they follow from the query heads."""


def import_llama(
    config: Mapping[str, Any], state: Mapping[str, Tensor], *, expected: BackboneConfig | None = None
) -> ImportedDecoder:
    """A Llama, Mistral or Qwen3 checkpoint in our terms; constants are those of its configuration.

    Args:
        config: the content of `config.json`; `model_type` tells the three apart.
        state: the tensors by name; rotary buffers are ignored.
        expected: a configuration that the checkpoint must have.

    Raises:
        InteropError: an option that cannot be expressed (scaled rotary positions, biases, another activation,
            a window in some layers only), missing or unknown keys, shapes that do not fit, tied tensors that
            differ, or a field that is not as `expected`.
    """
    kind = config.get("model_type", "llama")
    if kind not in CLASSES:
        raise InteropError(f"model_type {kind!r} is not one of {sorted(CLASSES)}")
    require(
        f"{kind} configuration",
        {
            "hidden_act": (config.get("hidden_act", "silu"), "silu"),
            "attention_bias": (config.get("attention_bias", False), False),
            "mlp_bias": (config.get("mlp_bias", False), False),
            "use_sliding_window": (config.get("use_sliding_window", False), False),
            "layer_types": (set(config.get("layer_types") or []) - {"full_attention"}, set()),
        },
    )
    config = {**UNSAID[kind], **config}
    width, num_heads = needed(config, "hidden_size"), needed(config, "num_attention_heads")
    backbone = BackboneConfig(
        width=width,
        depth=needed(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_size=config.get("head_dim") or width // num_heads,
        mlp_size=needed(config, "intermediate_size"),
        activation="swiglu",
        norm="rmsnorm",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        bias=False,
        qk_norm=kind == "qwen3",
        dropout=0.0,
        position="rotary",
        rope_base=_rope_base(config),
        window=config.get("sliding_window", 4096) if kind == "mistral" else None,
        init_std=config.get("initializer_range", 0.02),
    )
    tied = config.get("tie_word_embeddings", False)
    named = {name: tensor for name, tensor in state.items() if not BUFFER.match(name)}
    ours = import_state(named, _entries(backbone), HEAD, EMBEDDING, tied)
    model, length = DecoderConfig(tie_embeddings=tied), config.get("max_position_embeddings")
    return checked(ImportedDecoder(backbone, model, needed(config, "vocab_size"), ours, length), expected)


def export_llama(imported: ImportedDecoder) -> tuple[dict[str, Any], State]:
    """Configuration and tensors for the Hugging Face class that fits: Qwen3 if queries and keys are normed,
    Mistral if there is a window, else Llama. InteropError names what none of them has."""
    backbone, model = imported.backbone, imported.model
    kind = "qwen3" if backbone.qk_norm else "llama" if backbone.window is None else "mistral"
    require(
        f"{kind} export",
        {
            "norm": (backbone.norm, "rmsnorm"),
            "activation": (backbone.activation, "swiglu"),
            "bias": (backbone.bias, False),
            "position": (backbone.position, "rotary"),
            "max_positions": (model.max_positions, None),
            "logit_soft_cap": (model.logit_soft_cap, None),
            "decoder": (model.decoder, {}),
            "window": (backbone.window, backbone.window if kind == "mistral" else None),
        },
    )
    plain_backbone(f"{kind} export", backbone)
    config = {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "vocab_size": imported.size,
        "hidden_size": backbone.width,
        "num_hidden_layers": backbone.depth,
        "num_attention_heads": backbone.num_heads,
        "num_key_value_heads": backbone.kv_heads,
        "head_dim": backbone.key_size,
        "intermediate_size": backbone.inner_size,
        "hidden_act": "silu",
        "rms_norm_eps": backbone.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": backbone.rope_base},
        "initializer_range": backbone.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if imported.trained_length is not None:
        config["max_position_embeddings"] = imported.trained_length
    if kind == "mistral":
        config["sliding_window"] = backbone.window
    return config, export_state(imported.state, _entries(backbone), HEAD, EMBEDDING, model.tie_embeddings)


def _rope_base(config: Mapping[str, Any]) -> float:
    """Rotary base of the present (`rope_parameters`) or the former (`rope_theta`, `rope_scaling`) form."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    require("rotary positions", {"rope_type": (kind, "default"), "partial_rotary_factor": (part, 1.0)})
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))


def _entries(backbone: BackboneConfig) -> list[Entry]:
    names = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.output",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }
    if backbone.qk_norm:
        names |= {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
    blocks = [
        Entry(f"model.layers.{i}.{theirs}.weight", (f"backbone.blocks.{i}.{ours}.weight",))
        for i in range(backbone.depth)
        for theirs, ours in names.items()
    ]
    embedding = Entry(EMBEDDING, ("stem.embedding.weight",))
    return [embedding, *blocks, Entry("model.norm.weight", ("backbone.norm.weight",))]
