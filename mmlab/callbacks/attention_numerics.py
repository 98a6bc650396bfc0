"""How attention weighs what it reads: entropy and largest logit of a sample of queries."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmlab.backbone.attention import Attention
from mmlab.backbone.masks import Mask, Pieces, visible
from mmlab.backbone.positions import rotate

NOTHING = -1
"""Document number of queries that attend to nothing."""


class AttentionNumbers(NamedTuple):
    """Sum of entropies (nats) over `pairs` of query and head, and the largest logit."""

    entropy: float
    pairs: int
    largest: float


def called_with(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call of `module`, by the names of its `forward`."""
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)


def queries_and_keys(
    attention: Attention, query_BTD: Tensor, key_BSD: Tensor, call: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Queries (B, T, H, K) and keys (B, S, G, K) as they are multiplied: normed and rotated.

    Args:
        attention: the module.
        query_BTD: what its `query` gave.
        key_BSD: what its `key` gave.
        call: the arguments of its call.
    """
    q_BTHK, k_BSGK = (x.unflatten(-1, (-1, attention.head_size)) for x in (query_BTD, key_BSD))
    if attention.query_norm is not None and attention.key_norm is not None:
        q_BTHK, k_BSGK = attention.query_norm(q_BTHK), attention.key_norm(k_BSGK)
    tables = call.get("tables")
    if tables is not None:
        q_BTHK, k_BSGK = rotate(q_BTHK, tables), rotate(k_BSGK, tables)
    return q_BTHK, k_BSGK


def attention_numbers(
    q_BTHK: Tensor, k_BSGK: Tensor, mask: Mask, scale: float, queries: int
) -> AttentionNumbers:
    """Numbers of at most `queries` of those that attend to something, evenly spread over rows and tokens.

    Entropy is that of softmax(scale q k) over the keys that a query sees; the largest logit is the largest
    scale q k among them. Both are computed in float32.
    """
    B, T, H, _ = q_BTHK.shape
    seeing_N = _seeing(mask, B, T, q_BTHK.device).nonzero()[:, 0]
    if len(seeing_N) == 0:
        return AttentionNumbers(0.0, 0, -torch.inf)
    places = torch.linspace(0, len(seeing_N) - 1, min(queries, len(seeing_N)), device=seeing_N.device)
    chosen_N = seeing_N[places.round().long()]
    entropy, largest = 0.0, -torch.inf
    for row in (chosen_N // T).unique().tolist():
        tokens_N = chosen_N[chosen_N // T == row] % T
        q_NHK = q_BTHK[row, tokens_N].float()
        k_SHK = k_BSGK[row].float().repeat_interleave(H // k_BSGK.shape[2], dim=1)
        hidden_NS = ~_visible(mask, row, tokens_N, T, k_BSGK)
        logits_HNS = torch.einsum("nhk,shk->hns", q_NHK, k_SHK).mul(scale).masked_fill(hidden_NS, -torch.inf)
        log_p_HNS = logits_HNS.log_softmax(dim=-1)
        entropy -= (log_p_HNS.exp() * log_p_HNS.masked_fill(hidden_NS, 0)).sum().item()
        largest = max(largest, logits_HNS.max().item())
    return AttentionNumbers(entropy, H * len(chosen_N), largest)


def _seeing(mask: Mask, B: int, T: int, device: torch.device) -> Tensor:
    """Boolean (B * T): queries that attend to something."""
    if mask.pieces is not None:
        return documents(mask.pieces)[0].documents_N.to(device) != NOTHING
    if mask.empty_BT is not None:
        return ~mask.empty_BT.flatten()
    return torch.ones(B * T, dtype=torch.bool, device=device)


def _visible(mask: Mask, row: int, tokens_N: Tensor, T: int, k_BSGK: Tensor) -> Tensor:
    """Boolean (N, S): which keys of its row each of the queries sees."""
    B, S = k_BSGK.shape[:2]
    if mask.pieces is not None:
        queries, keys = documents(mask.pieces)
        query, key = (
            Spans(*(x.view(B, -1)[row].to(tokens_N.device) for x in spans)) for spans in (queries, keys)
        )
        same_NS = query.documents_N[tokens_N, None] == key.documents_N
        distance_NS = query.places_N[tokens_N, None] - key.places_N
        if mask.causal:
            same_NS = same_NS & (distance_NS >= 0)
        return same_NS if mask.window is None else same_NS & (distance_NS.abs() < mask.window)
    if mask.allowed_BTS is not None:
        return mask.allowed_BTS[row, tokens_N]
    return visible(T, S, mask.causal, mask.window, tokens_N.device)[tokens_N]


class Spans(NamedTuple):
    """The number of the document that each token belongs to, and the token's place in it."""

    documents_N: Tensor
    places_N: Tensor


def documents(pieces: Pieces) -> tuple[Spans, Spans]:
    """Documents of queries and keys on the flattened (row, token) axis; equal numbers attend."""
    counts = dict(pair for pair in pieces.pairs if pair is not None)
    first, total = {}, 0
    for index in range(len(pieces.key_lengths)):
        first[index], total = total, total + counts.get(index, 1)
    keys = [
        _numbered(length, first[index], counts.get(index, 1))
        for index, length in enumerate(pieces.key_lengths)
    ]
    queries = [
        _numbered(length, NOTHING, 1) if pair is None else _numbered(length, first[pair[0]], pair[1])
        for length, pair in zip(pieces.query_lengths, pieces.pairs, strict=True)
    ]
    return _joined(queries), _joined(keys)


def _numbered(length: int, first: int, count: int) -> Spans:
    index = torch.arange(length)
    return Spans(first + index // (length // count), index % (length // count))


def _joined(spans: list[Spans]) -> Spans:
    return Spans(
        torch.cat([span.documents_N for span in spans]), torch.cat([span.places_N for span in spans])
    )
