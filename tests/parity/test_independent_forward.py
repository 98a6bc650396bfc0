"""GPT-2 written out in numpy from its paper's formulas, on the other side's layout: no code is shared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mmlab.interop.gpt2 import export_gpt2, import_gpt2

Array = npt.NDArray[np.float64]
D, H, V, POSITIONS = 32, 4, 19, 10


def _state(inner: int) -> dict[str, Array]:
    """Random tensors in Conv1D's layout: matrices are (in, out), query, key and value stand side by side."""
    rng = np.random.default_rng(0)
    state = {"wte.weight": rng.normal(size=(V, D)), "wpe.weight": rng.normal(size=(POSITIONS, D))}
    for i in range(2):
        for norm in ("ln_1", "ln_2"):
            state |= {
                f"h.{i}.{norm}.weight": 1 + rng.normal(size=D),
                f"h.{i}.{norm}.bias": rng.normal(size=D),
            }
        shapes = {"attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D), "mlp.c_fc": (D, inner)}
        for name, (rows, columns) in (shapes | {"mlp.c_proj": (inner, D)}).items():
            state[f"h.{i}.{name}.weight"] = rng.normal(size=(rows, columns)) / math.sqrt(rows)
            state[f"h.{i}.{name}.bias"] = rng.normal(size=columns)
    return state | {"ln_f.weight": 1 + rng.normal(size=D), "ln_f.bias": rng.normal(size=D)}


def _forward(state: dict[str, Array], ids: npt.NDArray[np.int64], eps: float) -> Array:
    """Logits of one row of ids."""

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    def times(x: Array, name: str) -> Array:
        return x @ state[f"{name}.weight"] + state[f"{name}.bias"]

    x = state["wte.weight"][ids] + state["wpe.weight"][: len(ids)]
    for i in range(2):
        query, key, value = np.split(times(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        heads = []
        for q, k, v in zip(*(np.split(part, H, axis=-1) for part in (query, key, value)), strict=True):
            scores = q @ k.T / math.sqrt(D // H)
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + times(np.concatenate(heads, axis=-1), f"h.{i}.attn.c_proj")
        inner = times(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        inner = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + times(inner, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ state["wte.weight"].T


@pytest.mark.parametrize("inner", [4 * D, D], ids=["usual MLP", "every matrix square"])
def test_logits_equal_those_of_the_formulas(inner: int) -> None:
    config: dict[str, Any] = {"vocab_size": V, "n_positions": POSITIONS, "n_embd": D, "n_layer": 2}
    config |= {"n_head": H, "n_inner": inner, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    state = _state(inner)
    tensors = {f"transformer.{name}": torch.tensor(value) for name, value in state.items()}
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, POSITIONS, POSITIONS).tril()
    imported = import_gpt2(config, {name: value.float() for name, value in tensors.items()})
    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6, 18, 0])
    expected = _forward(state, ids, 1e-5)
    with torch.no_grad():
        found = imported.build().eval()(torch.tensor(ids)[None]).logits_BTV[0].numpy()
    assert np.abs(found - expected).max() <= 1e-4
    assert np.abs(expected).max() > 3

    exact = import_gpt2(config, tensors)
    _, exported = export_gpt2(exact)
    for name, value in state.items():
        assert np.array_equal(exported[f"transformer.{name}"].numpy(), value), name
    assert "transformer.h.0.attn.bias" not in exported
