"""Attention: one module for self- and cross-attention, one function that picks the implementation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        self.query = Linear(config.width, config.num_heads * self.head_size, bias, std)
        self.key = Linear(config.width, config.kv_heads * self.head_size, bias, std)
        self.value = Linear(config.width, config.kv_heads * self.head_size, bias, std)
        self.output = Linear(config.num_heads * self.head_size, config.width, bias, residual_std)
        self.query_norm = RMSNorm(self.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_size, eps=config.norm_eps) if config.qk_norm else None

    def forward(
        self, x_BTD: Tensor, mask: Mask, tables: Rotary | None = None, memory_BSD: Tensor | None = None
    ) -> Tensor:
        """Attends to `memory_BSD`, or to `x_BTD` itself; `tables` rotate queries and keys."""
        dtype = compute_dtype(x_BTD)
        x_BTD = x_BTD.to(dtype)
        source_BSD = x_BTD if memory_BSD is None else memory_BSD.to(dtype)
        q_BTHK = self.query(x_BTD).unflatten(-1, (-1, self.head_size))
        k_BSGK = self.key(source_BSD).unflatten(-1, (-1, self.head_size))
        v_BSGK = self.value(source_BSD).unflatten(-1, (-1, self.head_size))
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHK, k_BSGK = self.query_norm(q_BTHK), self.key_norm(k_BSGK)
        if tables is not None:
            q_BTHK, k_BSGK = rotate(q_BTHK, tables), rotate(k_BSGK, tables)
        return self.output(attend(q_BTHK, k_BSGK, v_BSGK, mask).flatten(2))


def attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Mask) -> Tensor:
    """softmax(q k / sqrt(K)) v under `mask`, (B, T, H, K); queries with nothing to attend to give 0.

    What stands at padded keys, values and queries (NaN included) reaches neither results nor gradients.
    """
    dtype = compute_dtype(q_BTHK)
    q_BTHK, k_BSGK, v_BSGK = q_BTHK.to(dtype), k_BSGK.to(dtype), v_BSGK.to(dtype)
    if mask.pieces is not None:
        return _by_document(q_BTHK, k_BSGK, v_BSGK, mask)
    if mask.allowed_BTS is None:
        return _one_document(q_BTHK, k_BSGK, v_BSGK, mask)
    assert mask.empty_BT is not None
    assert mask.padded_BS is not None
    empty_BT11, padded_BS11 = mask.empty_BT[:, :, None, None], mask.padded_BS[:, :, None, None]
    q_BTHK = q_BTHK.masked_fill(empty_BT11, 0)
    k_BSGK, v_BSGK = k_BSGK.masked_fill(padded_BS11, 0), v_BSGK.masked_fill(padded_BS11, 0)
    return _fused(q_BTHK, k_BSGK, v_BSGK, mask.allowed_BTS[:, None], False).masked_fill(empty_BT11, 0)


def _by_document(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Mask) -> Tensor:
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
        results.append(_one_document(q_NTHK, k_NSGK, v_NSGK, mask).flatten(0, 1))
    whole = torch.cat(results) if len(results) > 1 else results[0]
    return whole.unflatten(0, q_BTHK.shape[:2])


def _one_document(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Mask) -> Tensor:
    """Attention where only order and window hide anything."""
    T, S = q_BTHK.shape[1], k_BSGK.shape[1]
    half = q_BTHK.dtype in (torch.bfloat16, torch.float16)
    if q_BTHK.device.type == "cpu" and half and S <= WRITTEN_OUT_LENGTH:
        return _written_out(q_BTHK, k_BSGK, v_BSGK, mask.additive(T, S, torch.float32, q_BTHK.device))
    if mask.banded(T, S):
        return _fused(q_BTHK, k_BSGK, v_BSGK, visible(T, S, mask.causal, mask.window, q_BTHK.device), False)
    return _fused(q_BTHK, k_BSGK, v_BSGK, None, mask.causal)


def _fused(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, allowed: Tensor | None, causal: bool) -> Tensor:
    q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=allowed, is_causal=causal, enable_gqa=grouped
    ).transpose(1, 2)


def _written_out(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, additive_TS: Tensor | None) -> Tensor:
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
    scale = 1 / math.sqrt(K)
    with torch.autocast("cpu", enabled=False):
        q_NQK, k_NKS = q_NQK.float(), k_NKS.float()
        if additive_TS is None:
            scores_NQS = torch.bmm(q_NQK * scale, k_NKS)
        else:
            additive_QS = additive_TS if R == 1 else additive_TS.repeat(R, 1)
            scores_NQS = torch.baddbmm(additive_QS, q_NQK, k_NKS, alpha=scale)
        result_NQK = torch.bmm(torch.softmax(scores_NQS, dim=-1).to(v_NSK.dtype), v_NSK)
    return result_NQK.view(B, G, R, T, K).permute(0, 3, 1, 2, 4).flatten(2, 3)
