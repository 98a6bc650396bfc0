"""All implementations of attention agree with a written-down one, whatever stands in the padding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmlab.backbone import attention
from mmlab.backbone.attention import attend
from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.masks import Mask, build_mask
from mmlab.backbone.transformer import Transformer

SEGMENTS = {
    "whole rows": [[1] * 12, [1] * 12, [1] * 12],
    "padded right": [[1] * 12, [1] * 7 + [0] * 5, [1] * 1 + [0] * 11],
    "padded left": [[0] * 4 + [1] * 8, [1] * 12, [0] * 11 + [1]],
    "a row of padding": [[1] * 12, [0] * 12, [1] * 5 + [0] * 7],
    "packed": [[1] * 3 + [2] * 5 + [3] * 4, [1] * 6 + [2] * 6, [1] * 4 + [2] * 4 + [3] * 4],
    "packed and padded": [[1] * 3 + [2] * 5 + [0] * 4, [1] * 6 + [2] * 6, [0] * 2 + [1] * 5 + [2] * 5],
    "not contiguous": [[1] * 3 + [2] * 5 + [1] * 4, [1] * 12, [1] * 6 + [0] * 2 + [1] * 4],
}


def _reference(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, allowed_BTS: Tensor) -> Tensor:
    """Every query by itself, in float64."""
    B, T, H, K = q_BTHK.shape
    result = torch.zeros(B, T, H, K, dtype=torch.float64)
    shared = H // k_BSGK.shape[2]
    for b in range(B):
        for t in range(T):
            seen = allowed_BTS[b, t].nonzero()[:, 0]
            if len(seen):
                for h in range(H):
                    keys, values = (
                        k_BSGK[b, seen, h // shared].double(),
                        v_BSGK[b, seen, h // shared].double(),
                    )
                    weights = (keys @ q_BTHK[b, t, h].double() / math.sqrt(K)).softmax(dim=0)
                    result[b, t, h] = weights @ values
    return result


def _allowed(segments_BT: Tensor, keys_BS: Tensor, causal: bool, window: int | None) -> Tensor:
    B, T, S = *segments_BT.shape, keys_BS.shape[1]
    allowed = torch.zeros(B, T, S, dtype=torch.bool)
    for b in range(B):
        for t in range(T):
            for s in range(S):
                same = segments_BT[b, t] == keys_BS[b, s] and segments_BT[b, t] > 0
                order = s <= t or not causal
                allowed[b, t, s] = same and order and (window is None or abs(t - s) < window)
    return allowed


def _inputs(B: int, T: int, S: int, heads: int = 4, kv: int = 2, K: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, T, heads, K), (B, S, kv, K), (B, S, kv, K))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def _results(mask: Mask, inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor) -> list[Tensor]:
    """Output and the three gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = attend(*leaves, mask)
    (result.float() * weight).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _zeroed(results: list[Tensor], padded_BT: Tensor) -> list[Tensor]:
    return [x.masked_fill(padded_BT[:, :, None, None], 0) for x in results]


@pytest.mark.parametrize("layout", SEGMENTS)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None), (False, 3)])
@pytest.mark.parametrize("kind", ["spans", "dense", "written out"])
def test_implementations_agree_and_ignore_the_padding(
    layout: str, causal: bool, window: int | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments_BT = torch.tensor(SEGMENTS[layout])
    padded_BT = segments_BT == 0
    inputs = _inputs(3, 12, 12)
    weight = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    if kind == "written out":
        # The choice is by type; here the other implementation is made to run in float32.
        def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
            additive = mask.additive(q.shape[1], k.shape[1], q.dtype, q.device)
            return attention._written_out(q, k, v, additive, scale)

        monkeypatch.setattr(attention, "_one_document", written_out)
    mask = build_mask(segments_BT, causal=causal, window=window, spans=kind != "dense")
    assert (mask.pieces is None) == (kind == "dense" or layout == "not contiguous")
    found = _results(mask, inputs, weight)

    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = _reference(*leaves, _allowed(segments_BT, segments_BT, causal, window))
    (expected * weight).sum().backward()
    wanted = [expected.detach().float(), *(leaf.grad for leaf in leaves)]
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, atol=1e-5, rtol=0)

    poisoned = tuple(x.masked_fill(padded_BT[:, :, None, None], torch.nan) for x in inputs)
    for got, clean in zip(_results(mask, poisoned, weight), found, strict=True):
        assert torch.isfinite(got).all()
        assert torch.equal(got, clean)
    assert not found[0][padded_BT].any()


@pytest.mark.parametrize("layout", SEGMENTS)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_near_float32(layout: str, autocast: bool) -> None:
    segments_BT = torch.tensor(SEGMENTS[layout])
    inputs = _inputs(3, 12, 12)
    weight = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    exact = _results(build_mask(segments_BT, causal=True), inputs, weight)
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            half = _results(build_mask(segments_BT, causal=True), inputs, weight)
    else:
        rounded = tuple(x.bfloat16() for x in inputs)
        half = _results(build_mask(segments_BT, causal=True), rounded, weight)
    assert half[0].dtype == torch.bfloat16
    for got, right in zip(half, exact, strict=True):
        torch.testing.assert_close(got.float(), right, atol=0.06, rtol=0.03)


def test_large_scores_are_not_rounded_to_half_precision():
    q, k, v = (
        torch.randn(1, 128, 2, 32, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3)
    )
    q, k = 4 * q, 4 * k
    mask = build_mask(None, causal=True)
    exact = attend(q.double(), k.double(), v.double(), mask)
    error = (attend(q, k, v, mask).double() - exact).pow(2).mean().sqrt().item()
    assert error < 3e-3  # the rounding of weights and results; rounded scores would give 1.2e-2


def test_nan_in_padded_memory_reaches_no_gradient():
    config = BackboneConfig(width=16, depth=1, num_heads=2)
    torch.manual_seed(0)
    network = Transformer(config, causal=True, cross_attention=True)
    segments_BT, memory_segments_BS = torch.ones(2, 5, dtype=torch.int32), torch.ones(2, 4, dtype=torch.int32)
    memory_segments_BS[1, 2:] = 0
    found = []
    for spans, poison in ((True, 0.0), (True, torch.nan), (False, torch.nan)):
        network.spans = spans
        network.zero_grad()
        memory_BSD = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))
        memory_BSD[1, 2:] = poison
        x_BTD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2))
        mask, memory_mask = network.mask(segments_BT), network.memory_mask(segments_BT, memory_segments_BS)
        output = network(x_BTD, mask=mask, memory_BSD=memory_BSD, memory_mask=memory_mask)
        output.hidden_BTD.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in network.parameters()])
    for gradients in found[1:]:
        for got, right in zip(gradients, found[0], strict=True):
            torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


def test_autocast_decides_which_implementation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[torch.dtype] = []
    original = attention._written_out

    def spy(q: Tensor, *rest: Tensor) -> Tensor:
        ran.append(q.dtype)
        return original(q, *rest)

    monkeypatch.setattr(attention, "_written_out", spy)
    inputs = _inputs(1, 12, 12)
    attend(*inputs, Mask(causal=True))
    assert ran == []
    with torch.autocast("cpu", torch.bfloat16):
        attend(*inputs, Mask(causal=True))
    assert ran == [torch.bfloat16]
    long = _inputs(1, 8, attention.WRITTEN_OUT_LENGTH + 1)
    with torch.autocast("cpu", torch.bfloat16):
        attend(*long, Mask(causal=False))
    assert len(ran) == 1


CROSS = {
    "padded memory": ([[1] * 5, [1] * 3 + [0] * 2], [[1] * 4 + [0] * 3, [1] * 7]),
    "packed": ([[1] * 2 + [2] * 3, [1] * 5], [[1] * 3 + [2] * 4, [1] * 6 + [0]]),
    "no memory": ([[1] * 2 + [2] * 3, [1] * 5], [[2] * 7, [0] * 7]),
    "other order": ([[2] * 2 + [1] * 3, [1] * 5], [[1] * 3 + [2] * 4, [1] * 7]),
}


@pytest.mark.parametrize("layout", CROSS)
@pytest.mark.parametrize("spans", [True, False])
def test_cross_attention_reads_the_memory_of_its_own_segment(layout: str, spans: bool) -> None:
    segments_BT, memory_BS = (torch.tensor(rows) for rows in CROSS[layout])
    inputs = _inputs(2, 5, 7)
    mask = build_mask(segments_BT, memory_BS, causal=False, spans=spans)
    allowed = _allowed(segments_BT, memory_BS, False, None)
    weight = torch.ones(inputs[0].shape)
    found = _results(mask, inputs, weight)
    torch.testing.assert_close(found[0], _reference(*inputs, allowed).float(), atol=1e-5, rtol=0)
    padded = memory_BS == 0
    poisoned = (inputs[0], *(x.masked_fill(padded[:, :, None, None], torch.nan) for x in inputs[1:]))
    for got, clean in zip(_results(mask, poisoned, weight), found, strict=True):
        assert torch.equal(got, clean)


def test_documents_cost_the_sum_of_their_squares() -> None:
    """Equally long documents in a row are one batched call, and no T x T tensor is made."""
    segments_BT = torch.tensor([[1] * 4 + [2] * 4 + [3] * 4, [1] * 12])
    pieces = build_mask(segments_BT, causal=True).pieces
    assert pieces is not None
    assert pieces.query_lengths == [12, 12]
    assert pieces.pairs == [(0, 3), (1, 1)]
