"""Every field of the backbone's configuration is checked, and each one changes the network."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.transformer import Transformer

BASE = BackboneConfig(width=16, depth=2, num_heads=4, init_std=0.3)
ROTARY = dataclasses.replace(BASE, position="rotary")


def _result(config: BackboneConfig) -> torch.Tensor:
    """Output in training mode, from fixed seeds."""
    torch.manual_seed(0)
    network = Transformer(config, causal=True)
    x_BTD = torch.randn(2, 9, config.width, generator=torch.Generator().manual_seed(1))
    return network(x_BTD).hidden_BTD


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (BASE, {"width": 20}),
        (BASE, {"depth": 3}),
        (BASE, {"num_heads": 2}),
        (BASE, {"num_kv_heads": 2}),
        (BASE, {"head_size": 6}),
        (BASE, {"mlp_size": 24}),
        (BASE, {"activation": "gelu"}),
        (BASE, {"activation": "quick_gelu"}),
        (BASE, {"activation": "relu2"}),
        (BASE, {"activation": "swiglu"}),
        (BASE, {"norm": "rmsnorm"}),
        (BASE, {"norm_eps": 0.1}),
        (BASE, {"qk_norm": True}),
        (BASE, {"dropout": 0.5}),
        (BASE, {"position": "rotary"}),
        (ROTARY, {"rope_base": 100.0}),
        (BASE, {"window": 2}),
        (BASE, {"init_std": 0.5}),
        (BASE, {"residual_init": "zero"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and value else None,
)
def test_every_field_changes_the_result(base: BackboneConfig, change: dict[str, object]) -> None:
    before, after = _result(base), _result(dataclasses.replace(base, **change))
    assert before.shape != after.shape or not torch.allclose(before, after, atol=1e-6)


def test_bias_is_in_every_matrix_and_layernorm_or_in_none() -> None:
    with_bias = {name for name, _ in Transformer(BASE, causal=True).named_parameters()}
    without = {
        name for name, _ in Transformer(dataclasses.replace(BASE, bias=False), causal=True).named_parameters()
    }
    assert without == {name for name in with_bias if name.endswith("weight")}
    assert with_bias - without == {name.replace("weight", "bias") for name in without}


def test_residual_matrices_start_scaled_or_at_zero() -> None:
    torch.manual_seed(0)
    scaled = Transformer(BackboneConfig(width=128, depth=8, num_heads=4), causal=True).blocks[0]
    assert scaled.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert scaled.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert scaled.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not scaled.mlp.up.bias.any()
    zero = Transformer(dataclasses.replace(BASE, residual_init="zero"), causal=True)
    x_BTD = torch.randn(1, 5, 16)
    assert torch.equal(zero(x_BTD).hidden_BTD, zero.norm(x_BTD))


def test_weights_depend_on_the_global_seed_alone() -> None:
    def draw() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return Transformer(BASE, causal=True).state_dict()

    first, second = draw(), draw()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 18}, ["width 18", "num_heads 4"]),
        ({"num_kv_heads": 3}, ["num_heads 4", "num_kv_heads 3"]),
        ({"position": "rotary", "head_size": 5}, ["even head size", "5"]),
        ({"depth": 0}, ["depth", "0"]),
        ({"window": 0}, ["window", "0"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"norm_eps": 0.0}, ["norm_eps", "0.0"]),
    ],
)
def test_impossible_values_are_refused_with_their_numbers(
    change: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        dataclasses.replace(BASE, **change)
    assert all(word in str(error.value) for word in words)


def test_derived_sizes() -> None:
    assert (BASE.kv_heads, BASE.key_size, BASE.inner_size) == (4, 4, 64)
    assert dataclasses.replace(BASE, width=384, activation="swiglu").inner_size == 1024
    assert dataclasses.replace(BASE, width=100, num_heads=4, activation="swiglu").inner_size == 272


def test_configs_are_free_of_torch() -> None:
    names = "mmlab.backbone.config, mmlab.modalities.base, mmlab.models.base"
    code = f"import sys, {names}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
