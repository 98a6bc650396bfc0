"""Rotary phases, norm statistics and the loss stay float32 in every precision mode, at 2048 positions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

from mmlab.backbone import transformer as module
from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.layers import LayerNorm, RMSNorm
from mmlab.backbone.positions import Rotary, document_positions, rotary, rotate
from mmlab.modalities.text.vocabulary import BytesConfig
from mmlab.models.decoder import Decoder, DecoderConfig

LENGTH = 2048
CONFIG = BackboneConfig(width=16, depth=1, num_heads=2, position="rotary", norm="rmsnorm", bias=False)


@contextlib.contextmanager
def _precision(kind: str, network: torch.nn.Module) -> Iterator[None]:
    if kind == "bf16-true":
        network.to(torch.bfloat16)
        yield
    else:
        with torch.autocast("cpu", torch.bfloat16):
            yield


def _exact(positions: torch.Tensor, head_size: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles = positions.double()[..., None] * base**-exponents
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("kind", ["bf16-true", "autocast"])
def test_rotary_tables_inside_a_model_are_exact_and_distinct(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Rotary] = []

    def spy(*arguments: object) -> Rotary:
        seen.append(rotary(*arguments))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(module, "rotary", spy)
    network = Decoder(CONFIG, DecoderConfig(), BytesConfig().build().size)
    tokens_BT = torch.zeros(1, LENGTH, dtype=torch.long)
    with _precision(kind, network), torch.no_grad():
        result = network(tokens_BT, targets_BT=tokens_BT)
    assert len(seen) == 1
    cos, sin = seen[0]
    assert cos.dtype == sin.dtype == torch.float32
    right_cos, right_sin = _exact(torch.arange(LENGTH)[None], CONFIG.key_size, CONFIG.rope_base)
    assert (cos - right_cos).abs().max() <= 1e-3
    assert (sin - right_sin).abs().max() <= 1e-3
    assert len(torch.unique(torch.cat((cos, sin), dim=-1)[0], dim=0)) == LENGTH
    assert result.nll_BT is not None
    assert result.nll_BT.dtype == torch.float32


@pytest.mark.parametrize("kind", ["bf16-true", "autocast"])
def test_logits_and_loss_are_float32(kind: str) -> None:
    torch.manual_seed(0)
    network = Decoder(CONFIG, DecoderConfig(), 257)
    tokens_BT = torch.randint(0, 256, (2, 64))
    exact = network(tokens_BT, targets_BT=tokens_BT).nll_BT
    with _precision(kind, network):
        half = network(tokens_BT, targets_BT=tokens_BT).nll_BT
        logits = network(tokens_BT).logits_BTV
    assert half is not None
    assert exact is not None
    assert logits is not None
    assert (half.dtype, logits.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(half, exact, atol=0.02, rtol=0)


def test_rotation_depends_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def product(i: int, j: int) -> float:
        at = [rotate(x, rotary(torch.tensor([[p]]), 8, 10000.0)) for x, p in ((q, i), (k, j))]
        return float((at[0] * at[1]).sum())

    assert product(7, 3) == pytest.approx(product(2004, 2000), abs=1e-3)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-3)


def test_positions_restart_with_every_document() -> None:
    segments = torch.tensor([[1, 1, 2, 2, 2, 0, 0], [0, 1, 1, 1, 1, 1, 1]])
    assert document_positions(segments).tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_norm_statistics_are_float32(norm: type[torch.nn.Module]) -> None:
    """Values whose mean square is lost in bfloat16: 4096 ones and a large one."""
    x = torch.ones(1, 4097)
    x[0, 0] = 64.0
    layer = norm(4097, eps=1e-6).to(torch.bfloat16)
    result = layer(x.bfloat16())
    assert result.dtype == torch.bfloat16
    mean = (4096 + 64) / 4097 if norm is LayerNorm else 0.0
    deviation = math.sqrt(((x.double() - mean) ** 2).mean())
    assert result[0, 0].item() == pytest.approx((64 - mean) / deviation, rel=5e-3)
    assert result[0, 1].item() == pytest.approx((1 - mean) / deviation, rel=5e-3, abs=1e-4)
