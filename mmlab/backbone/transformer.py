"""The transformer: (B, T, width) -> (B, T, width)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmlab.backbone.attention import Attention
from mmlab.backbone.cache import Cache, LayerCache
from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.layers import MLP, norm
from mmlab.backbone.masks import Mask, build_mask
from mmlab.backbone.positions import Rotary, rotary

Auxiliary = dict[str, tuple[Tensor, Tensor]]


class TransformerOutput(NamedTuple):
    """Hidden states after the last norm, and named (sum, count) pairs of further losses and statistics.

    A tuple, because sharding has to find the tensors in it.
    """

    hidden_BTD: Tensor
    auxiliary: Auxiliary


class Block(nn.Module):
    """Attention, cross-attention if asked for, MLP; each reads a norm of the residual stream and adds to it.

    With `activation_checkpointing` the block recomputes itself in backward; what wraps the block (sharding
    hooks, compilation) stays outside, and parameter names do not change.
    """

    def __init__(self, config: BackboneConfig, cross_attention: bool = False) -> None:
        super().__init__()
        writers = config.depth * (3 if cross_attention else 2)
        residual_std = config.init_std / math.sqrt(writers) if config.residual_init == "scaled" else 0.0
        self.dropout = config.dropout
        self.activation_checkpointing = False
        self.attention_norm = norm(config)
        self.attention = Attention(config, residual_std)
        self.cross_attention_norm = norm(config) if cross_attention else None
        self.cross_attention = Attention(config, residual_std) if cross_attention else None
        self.mlp_norm = norm(config)
        self.mlp = MLP(config, residual_std)

    def forward(
        self,
        x_BTD: Tensor,
        mask: Mask,
        tables: Rotary | None = None,
        memory_BSD: Tensor | None = None,
        memory_mask: Mask | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(self._layers, x_BTD, mask, tables, memory_BSD, memory_mask, use_reentrant=False)
        return self._layers(x_BTD, mask, tables, memory_BSD, memory_mask, cache)

    def _layers(
        self,
        x_BTD: Tensor,
        mask: Mask,
        tables: Rotary | None,
        memory_BSD: Tensor | None,
        memory_mask: Mask | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        attended_BTD = self.attention(self.attention_norm(x_BTD), mask, tables, cache=cache)
        x_BTD = x_BTD + self._drop(attended_BTD)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            assert memory_mask is not None
            query_BTD = self.cross_attention_norm(x_BTD)
            read_BTD = self.cross_attention(query_BTD, memory_mask, None, memory_BSD, cache, cross=True)
            x_BTD = x_BTD + self._drop(read_BTD)
        return x_BTD + self._drop(self.mlp(self.mlp_norm(x_BTD)))

    def _drop(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(x_BTD, self.dropout, self.training) if self.dropout else x_BTD


class Transformer(nn.Module):
    """Blocks and a last norm; weights are drawn in the constructor from torch's global generator.

    Args:
        config: shape and parts.
        causal: a token attends to no later token.
        cross_attention: every block also attends to a memory given at the call.
    """

    def __init__(self, config: BackboneConfig, causal: bool, cross_attention: bool = False) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        self.cross_attention = cross_attention
        self.spans = True
        self.blocks = nn.ModuleList(Block(config, cross_attention) for _ in range(config.depth))
        self.norm = norm(config)

    def mask(self, segments_BT: Tensor | None) -> Mask:
        """Mask of the self-attention, from segments (see `build_mask`); document by document on a CPU."""
        return build_mask(
            segments_BT, causal=self.causal, window=self.config.window, spans=self._spans(segments_BT)
        )

    def memory_mask(self, segments_BT: Tensor | None, memory_segments_BS: Tensor | None) -> Mask:
        """Mask of the cross-attention; give both segments or neither."""
        if (segments_BT is None) != (memory_segments_BS is None):
            raise ValueError("cross-attention needs the segments of queries and memory, or neither")
        spans = self._spans(segments_BT)
        return build_mask(segments_BT, memory_segments_BS, causal=False, spans=spans)

    def _spans(self, segments: Tensor | None) -> bool:
        on_host = segments is not None and segments.device.type == "cpu"
        return self.spans and on_host and not torch.compiler.is_compiling()

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mask: Mask | None = None,
        positions_BT: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        memory_mask: Mask | None = None,
        cache: Cache | None = None,
        counts: Sequence[int] | None = None,
    ) -> TransformerOutput:
        """Hidden states of the last layer.

        Args:
            x_BTD: embedded tokens.
            mask: from `self.mask(segments)`; None means one document a row.
            positions_BT: integers for the rotation; None counts from 0 in every row. With packed documents
                give `document_positions(segments)`.
            memory_BSD: what cross-attention reads.
            memory_mask: from `self.memory_mask(...)`; None means that all of the memory is visible.
            cache: what was seen before; the tokens go on from there and are added to it. Mask and positions
                are then the cache's, and the memory is needed in the first call only.
            counts: with a cache, how many tokens of each row are real, from the left; None for all.
        """
        if self.cross_attention != (memory_BSD is not None or (cache is not None and cache.has_memory)):
            given = memory_BSD is not None
            raise ValueError(f"cross_attention is {self.cross_attention}, but memory_BSD is given: {given}")
        step = None
        if cache is not None:
            self._check_cache(x_BTD, mask)
            positions_BT = (
                cache.positions(x_BTD.shape[1], x_BTD.device) if positions_BT is None else positions_BT
            )
            step = cache.step(positions_BT, counts)
            mask = step.mask
        mask = self.mask(None) if mask is None else mask
        if self.cross_attention and memory_mask is None:
            memory_mask = self.memory_mask(None, None)
        if memory_BSD is not None and memory_mask is not None and memory_mask.padded_BS is not None:
            # before the projections: 0 times NaN would reach the gradients of their weights
            memory_BSD = memory_BSD.masked_fill(memory_mask.padded_BS[:, :, None], 0)
        tables = None
        if self.config.position == "rotary":
            if positions_BT is None:
                positions_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
            tables = rotary(positions_BT, self.config.key_size, self.config.rope_base)
        for number, block in enumerate(self.blocks):
            layer = step.layer(number) if step is not None else None
            x_BTD = block(x_BTD, mask, tables, memory_BSD, memory_mask, layer)
        if step is not None:
            step.finish()
        return TransformerOutput(self.norm(x_BTD), {})

    def _check_cache(self, x_BTD: Tensor, mask: Mask | None) -> None:
        if not self.causal:
            raise ValueError("only a causal transformer can use a cache")
        if mask is not None:
            raise ValueError("with a cache the mask follows from what it holds: give counts, not a mask")
        if torch.is_grad_enabled() and x_BTD.requires_grad:
            raise ValueError("a cache is for use without gradients: call under torch.no_grad()")
