"""Attention: one module for self- and cross-attention, one function that picks the implementation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlab.backbone.cache import LayerCache
from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.layers import Linear, RMSNorm, compute_dtype
from mmlab.backbone.masks import Mask, visible
from mmlab.backbone.positions import Rotary, rotate

WRITTEN_OUT_LENGTH = 512
"""Keys up to which, on a CPU in half precision, matrix products are faster than the fused kernel."""


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values, (B, T, D) -> (B, T, D).

    Query, key and value are parameters of their own: checkpoints keep their keys whatever kernel runs.
    """

    def __init__(self, config: BackboneConfig, residual_std: float) -> None:
        super().__init__()
        self.head_size, std, bias = config.key_size, config.init_std, config.bias
        self.scale, factor = config.attention_scale, config.width_factor
        self.query = Linear(config.width, config.num_heads * self.head_size, bias, std, factor)
        self.key = Linear(config.width, config.kv_heads * self.head_size, bias, std, factor)
        self.value = Linear(config.width, config.kv_heads * self.head_size, bias, std, factor)
        self.output = Linear(config.num_heads * self.head_size, config.width, bias, residual_std, factor)
        self.query_norm = RMSNorm(self.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_size, eps=config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x_BTD: Tensor,
        mask: Mask,
        tables: Rotary | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
        cross: bool = False,
    ) -> Tensor:
        """Attends to the memory if `cross`, else to `x_BTD` and what `cache` holds.

        Args:
            x_BTD: queries, and without `cross` keys and values.
            mask: who attends to whom.
            tables: rotate queries and keys.
            memory_BSD: what cross-attention reads; None where the cache has its keys and values.
            cache: keys and values of earlier calls, which this one adds to.
            cross: whether this is cross-attention.
        """
        x_BTD = x_BTD.to(compute_dtype(x_BTD))
        q_BTHK = self.query(x_BTD).unflatten(-1, (-1, self.head_size))
        if self.query_norm is not None:
            q_BTHK = self.query_norm(q_BTHK)
        if tables is not None:
            q_BTHK = rotate(q_BTHK, tables)
        if not cross:
            k_BSGK, v_BSGK = self._keys_values(x_BTD, tables)
            if cache is not None:
                k_BSGK, v_BSGK = cache.append(k_BSGK, v_BSGK)
        elif cache is not None:
            k_BSGK, v_BSGK = cache.memory(lambda: self._keys_values(memory_BSD, None))
        else:
            k_BSGK, v_BSGK = self._keys_values(memory_BSD, None)
        return self.output(attend(q_BTHK, k_BSGK, v_BSGK, mask, self.scale).flatten(2))

    def _keys_values(self, source_BSD: Tensor | None, tables: Rotary | None) -> tuple[Tensor, Tensor]:
        assert source_BSD is not None
        source_BSD = source_BSD.to(compute_dtype(source_BSD))
        k_BSGK = self.key(source_BSD).unflatten(-1, (-1, self.head_size))
        v_BSGK = self.value(source_BSD).unflatten(-1, (-1, self.head_size))
        if self.key_norm is not None:
            k_BSGK = self.key_norm(k_BSGK)
        if tables is not None:
            k_BSGK = rotate(k_BSGK, tables)
        dtype = compute_dtype(source_BSD)
        return k_BSGK.to(dtype), v_BSGK.to(dtype)


def attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """softmax(scale q k) v under `mask`, (B, T, H, K); queries with nothing to attend to give 0.

    What stands at padded keys, values and queries (NaN included) reaches neither results nor gradients.
    `scale` is 1 / sqrt(K) unless given.
    """
    dtype = compute_dtype(q_BTHK)
    q_BTHK, k_BSGK, v_BSGK = q_BTHK.to(dtype), k_BSGK.to(dtype), v_BSGK.to(dtype)
    scale = 1 / math.sqrt(q_BTHK.shape[-1]) if scale is None else scale
    if mask.pieces is not None:
        return _by_document(q_BTHK, k_BSGK, v_BSGK, mask, scale)
    if mask.allowed_BTS is None:
        return _one_document(q_BTHK, k_BSGK, v_BSGK, mask, scale)
    if mask.empty_BT is None or mask.padded_BS is None:  # all that is stored may be read
        return _fused(q_BTHK, k_BSGK, v_BSGK, mask.allowed_BTS[:, None], False, scale)
    empty_BT11, padded_BS11 = mask.empty_BT[:, :, None, None], mask.padded_BS[:, :, None, None]
    q_BTHK = q_BTHK.masked_fill(empty_BT11, 0)
    k_BSGK, v_BSGK = k_BSGK.masked_fill(padded_BS11, 0), v_BSGK.masked_fill(padded_BS11, 0)
    result_BTHK = _fused(q_BTHK, k_BSGK, v_BSGK, mask.allowed_BTS[:, None], False, scale)
    return result_BTHK.masked_fill(empty_BT11, 0)


def _by_document(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Mask, scale: float) -> Tensor:
    """Attention inside each document: the cost is the sum of the squared lengths, not the square of the sum.

    Pieces are taken by one `split` and put together by one `cat`, so that neither direction costs a full-size
    tensor per document.
    """
    pieces = mask.pieces
    assert pieces is not None
    queries = q_BTHK.flatten(0, 1).split(pieces.query_lengths)
    keys = k_BSGK.flatten(0, 1).split(pieces.key_lengths)
    values = v_BSGK.flatten(0, 1).split(pieces.key_lengths)
    results = []
    for query, pair in zip(queries, pieces.pairs, strict=True):
        if pair is None:
            results.append(torch.zeros_like(query))
            continue
        index, count = pair
        q_NTHK, k_NSGK, v_NSGK = (x.unflatten(0, (count, -1)) for x in (query, keys[index], values[index]))
        results.append(_one_document(q_NTHK, k_NSGK, v_NSGK, mask, scale).flatten(0, 1))
    whole = torch.cat(results) if len(results) > 1 else results[0]
    return whole.unflatten(0, q_BTHK.shape[:2])


def _one_document(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Mask, scale: float) -> Tensor:
    """Attention where only order and window hide anything."""
    T, S = q_BTHK.shape[1], k_BSGK.shape[1]
    half = q_BTHK.dtype in (torch.bfloat16, torch.float16)
    if q_BTHK.device.type == "cpu" and half and S <= WRITTEN_OUT_LENGTH:
        return _written_out(q_BTHK, k_BSGK, v_BSGK, mask.additive(T, S, torch.float32, q_BTHK.device), scale)
    if mask.banded(T, S):
        seen_TS = visible(T, S, mask.causal, mask.window, q_BTHK.device)
        return _fused(q_BTHK, k_BSGK, v_BSGK, seen_TS, False, scale)
    return _fused(q_BTHK, k_BSGK, v_BSGK, None, mask.causal, scale)


def _fused(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, allowed: Tensor | None, causal: bool, scale: float
) -> Tensor:
    q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=allowed, is_causal=causal, scale=scale, enable_gqa=grouped
    ).transpose(1, 2)


def _written_out(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, additive_TS: Tensor | None, scale: float
) -> Tensor:
    """The same by two batched matrix products and a softmax between them.

    Query heads that share keys are stacked along the query axis, so that keys are not copied. Scores and
    softmax are float32: scores that were rounded to half precision would cost accuracy where they are large.
    """
    B, T, H, K = q_BTHK.shape
    S, G = k_BSGK.shape[1:3]
    R = H // G
    q_NQK = q_BTHK.unflatten(2, (G, R)).permute(0, 2, 3, 1, 4).reshape(B * G, R * T, K)
    k_NSK, v_NSK = (x.transpose(1, 2).reshape(B * G, S, K) for x in (k_BSGK, v_BSGK))
    k_NKS = k_NSK.transpose(1, 2)
    with torch.autocast("cpu", enabled=False):
        q_NQK, k_NKS = q_NQK.float(), k_NKS.float()
        if additive_TS is None:
            scores_NQS = torch.bmm(q_NQK * scale, k_NKS)
        else:
            additive_QS = additive_TS if R == 1 else additive_TS.repeat(R, 1)
            scores_NQS = torch.baddbmm(additive_QS, q_NQK, k_NKS, alpha=scale)
        result_NQK = torch.bmm(torch.softmax(scores_NQS, dim=-1).to(v_NSK.dtype), v_NSK)
    return result_NQK.view(B, G, R, T, K).permute(0, 3, 1, 2, 4).flatten(2, 3)
