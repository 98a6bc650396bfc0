"""GPT-2 weights in the layout of Hugging Face's GPT2LMHeadModel, in and out, bit for bit.

That layout stores matrices transposed (Conv1D) and query, key and value as one.
"""

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

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
BUFFER = re.compile(r".*\.attn\.(bias|masked_bias)$")
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
}
"""Hugging Face's names of what `BackboneConfig.activation` can be; the first of several is written."""


def import_gpt2(
    config: Mapping[str, Any], state: Mapping[str, Tensor], *, expected: BackboneConfig | None = None
) -> ImportedDecoder:
    """A GPT-2 checkpoint in our terms; activation and epsilon are those of its configuration.

    Dropout is taken from `resid_pdrop` (attention weights are not dropped here). Causal-mask buffers are
    ignored; keys may lack the prefix `transformer.`.

    Args:
        config: the content of `config.json`.
        state: the tensors by name.
        expected: a configuration that the checkpoint must have.

    Raises:
        InteropError: unknown activation or option, missing or unknown keys, shapes that do not fit, tied
            tensors that differ, or a field that is not as `expected`.
    """
    require(
        "GPT-2 configuration",
        {
            "scale_attn_weights": (config.get("scale_attn_weights", True), True),
            "scale_attn_by_inverse_layer_idx": (config.get("scale_attn_by_inverse_layer_idx", False), False),
            "add_cross_attention": (config.get("add_cross_attention", False), False),
        },
    )
    activation = config.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise InteropError(f"activation_function {activation!r} is not one of {sorted(ACTIVATIONS)}")
    width, positions = needed(config, "n_embd"), needed(config, "n_positions")
    backbone = BackboneConfig(
        width=width,
        depth=needed(config, "n_layer"),
        num_heads=needed(config, "n_head"),
        mlp_size=config.get("n_inner") or 4 * width,
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        dropout=config.get("resid_pdrop", 0.1),
        init_std=config.get("initializer_range", 0.02),
    )
    tied = config.get("tie_word_embeddings", True)
    model = DecoderConfig(tie_embeddings=tied, max_positions=positions)
    named = {_prefixed(name): tensor for name, tensor in state.items() if not BUFFER.match(name)}
    ours = import_state(named, _entries(backbone.depth), HEAD, EMBEDDING, tied)
    return checked(ImportedDecoder(backbone, model, needed(config, "vocab_size"), ours), expected)


def export_gpt2(imported: ImportedDecoder) -> tuple[dict[str, Any], State]:
    """Configuration and tensors for GPT2LMHeadModel; InteropError names what GPT-2 does not have."""
    backbone, model = imported.backbone, imported.model
    require(
        "GPT-2 export",
        {
            "norm": (backbone.norm, "layernorm"),
            "bias": (backbone.bias, True),
            "qk_norm": (backbone.qk_norm, False),
            "position": (backbone.position, "none"),
            "window": (backbone.window, None),
            "num_kv_heads": (backbone.kv_heads, backbone.num_heads),
            "num_heads * head_size": (backbone.num_heads * backbone.key_size, backbone.width),
            "logit_soft_cap": (model.logit_soft_cap, None),
            "decoder": (model.decoder, {}),
        },
    )
    plain_backbone("GPT-2 export", backbone)
    names = [theirs for theirs, ours in ACTIVATIONS.items() if ours == backbone.activation]
    if not names or model.max_positions is None:
        raise InteropError(
            f"GPT-2 export: needs max_positions (is {model.max_positions}) and an activation of "
            f"{sorted(set(ACTIVATIONS.values()))} (is {backbone.activation})"
        )
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": imported.size,
        "n_positions": model.max_positions,
        "n_embd": backbone.width,
        "n_layer": backbone.depth,
        "n_head": backbone.num_heads,
        "n_inner": backbone.inner_size,
        "activation_function": names[0],
        "layer_norm_epsilon": backbone.norm_eps,
        "resid_pdrop": backbone.dropout,
        "embd_pdrop": backbone.dropout,
        "attn_pdrop": 0.0,
        "initializer_range": backbone.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }
    entries = _entries(backbone.depth)
    return config, export_state(imported.state, entries, HEAD, EMBEDDING, model.tie_embeddings)


def _prefixed(name: str) -> str:
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _entries(depth: int) -> list[Entry]:
    entries = [
        Entry(EMBEDDING, ("stem.embedding.weight",)),
        Entry("transformer.wpe.weight", ("stem.positions.weight",)),
    ]
    for i in range(depth):
        theirs, ours = f"transformer.h.{i}", f"backbone.blocks.{i}"
        projections = {
            "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
            "attn.c_proj": ("attention.output",),
            "mlp.c_fc": ("mlp.up",),
            "mlp.c_proj": ("mlp.down",),
        }
        for kind in ("weight", "bias"):
            for norm, our_norm in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
                entries.append(Entry(f"{theirs}.{norm}.{kind}", (f"{ours}.{our_norm}.{kind}",)))
            for name, parts in projections.items():
                joined = tuple(f"{ours}.{part}.{kind}" for part in parts)
                entries.append(Entry(f"{theirs}.{name}.{kind}", joined, transposed=kind == "weight"))
    last = [Entry(f"transformer.ln_f.{kind}", (f"backbone.norm.{kind}",)) for kind in ("weight", "bias")]
    return entries + last
