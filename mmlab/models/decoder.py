"""A causal transformer over text tokens that predicts the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmlab.backbone.cache import Cache
from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.flops import Cost, linear_cost, transformer_cost
from mmlab.backbone.layers import Linear
from mmlab.backbone.positions import document_positions
from mmlab.backbone.transformer import Auxiliary, Transformer
from mmlab.modalities.base import ModalityConfig
from mmlab.modalities.text.stem import TextStem
from mmlab.modalities.text.vocabulary import TextModalityConfig
from mmlab.models.base import ModelConfig, tower

IGNORE = -100
"""Target of a position that is not predicted."""

CHUNK = 1 << 24
"""Logits (numbers) that the loss holds at once, 64 MiB in float32."""


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Text stem, causal backbone, head.

    Args:
        decoder: fields in which this tower departs from the common backbone.
        tie_embeddings: the head uses the embedding's weights and has none of its own.
        max_positions: number of learned absolute positions; null for none.
        logit_soft_cap: logits become cap * tanh(logits / cap) (arXiv:2408.00118); null for none.
    """

    decoder: dict[str, Any] = field(default_factory=dict)
    tie_embeddings: bool = True
    max_positions: int | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.max_positions is not None and self.max_positions < 1:
            raise ValueError(f"max_positions must be at least 1 or null, got {self.max_positions}")
        if self.logit_soft_cap is not None and self.logit_soft_cap <= 0:
            raise ValueError(f"logit_soft_cap must be positive or null, got {self.logit_soft_cap}")

    def longest(self) -> int | None:
        return self.max_positions

    def build(self, backbone: BackboneConfig, modality: dict[str, ModalityConfig]) -> Decoder:
        text = modality.get("text")
        if not isinstance(text, TextModalityConfig):
            raise ValueError(f"a decoder needs a modality named text, got {sorted(modality)}")
        return Decoder(tower(backbone, "model.decoder", self.decoder), self, text.size())

    def cost(self, backbone: BackboneConfig, size: int, B: int, T: int) -> Cost:
        """Parameters and operations (see `mmlab.backbone.flops`) of B rows of T tokens out of `size` ids."""
        config = tower(backbone, "model.decoder", self.decoder)
        table = Cost(size * config.width, 0)
        head = linear_cost(config.width, size, bias=False, tokens=B * T)
        if self.tie_embeddings:
            head = Cost(0, head.forward_flops)
        positions = Cost((self.max_positions or 0) * config.width, 0)
        return table + positions + transformer_cost(config, B, T) + head


class DecoderOutput(NamedTuple):
    """What a decoder gives: `logits_BTV` (float32) without targets, else `nll_BT` (nats, float32)."""

    logits_BTV: Tensor | None
    nll_BT: Tensor | None
    auxiliary: Auxiliary


class Decoder(nn.Module):
    """Next-token network over a vocabulary of `size` ids.

    Args:
        backbone: of this tower, overrides applied.
        config: what is not the backbone's.
        size: number V of ids.
    """

    def __init__(self, backbone: BackboneConfig, config: DecoderConfig, size: int) -> None:
        super().__init__()
        self.config = config
        self.stem = TextStem(size, backbone.width, config.max_positions, backbone.dropout, backbone.init_std)
        self.backbone = Transformer(backbone, causal=True)
        tied = config.tie_embeddings
        self.head = None if tied else Linear(backbone.width, size, bias=False, std=backbone.init_std)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        segments_BT: Tensor | None = None,
        targets_BT: Tensor | None = None,
        cache: Cache | None = None,
        counts: Sequence[int] | None = None,
    ) -> DecoderOutput:
        """Logits, or the negative log-likelihood of `targets_BT`.

        Args:
            tokens_BT: ids.
            positions_BT: positions; None counts from 0 in every document.
            segments_BT: 0 for padding, 1, 2, ... for the documents of a row; None means one document a row.
            targets_BT: ids to predict, `IGNORE` where nothing is; the loss is 0 there.
            cache: what was seen before, see `Transformer.forward`; logits are then those of each row's last
                real token, (B, 1, V).
            counts: with a cache, how many tokens of each row are real, from the left; None for all.
        """
        if cache is not None:
            return self._continue(tokens_BT, cache, counts)
        if positions_BT is None and segments_BT is not None:
            positions_BT = document_positions(segments_BT)
        x_BTD = self.stem(tokens_BT, positions_BT)
        mask = self.backbone.mask(segments_BT)
        hidden_BTD, auxiliary = self.backbone(x_BTD, mask=mask, positions_BT=positions_BT)
        if targets_BT is None:
            return DecoderOutput(self.logits(hidden_BTD), None, auxiliary)
        return DecoderOutput(None, self._nll(hidden_BTD, targets_BT), auxiliary)

    def _continue(self, tokens_BT: Tensor, cache: Cache, counts: Sequence[int] | None) -> DecoderOutput:
        """The next tokens of every row."""
        positions_BT = cache.positions(tokens_BT.shape[1], tokens_BT.device)
        limit = self.config.max_positions
        if limit is not None:
            most = (
                max(cache.lengths) + tokens_BT.shape[1]
                if counts is None
                else max(map(sum, zip(cache.lengths, counts, strict=True)))
            )
            if most > limit:
                raise ValueError(f"{most} tokens in a row, but only {limit} learned positions")
            positions_BT = positions_BT.clamp(max=limit - 1)  # of the padding at the end of a row
        x_BTD = self.stem(tokens_BT, positions_BT)
        hidden_BTD, auxiliary = self.backbone(x_BTD, positions_BT=positions_BT, cache=cache, counts=counts)
        if counts is None:
            hidden_BTD = hidden_BTD[:, -1:]
        else:
            last_B = torch.tensor([max(count, 1) - 1 for count in counts], device=hidden_BTD.device)
            hidden_BTD = hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B][:, None]
        return DecoderOutput(self.logits(hidden_BTD), None, auxiliary)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of every id from hidden states, float32, before any loss."""
        scale = self.backbone.config.logit_scale
        hidden = hidden if scale == 1 else hidden * scale
        if self.head is None:
            logits = F.linear(hidden, self.stem.embedding.weight).float()
        else:
            logits = self.head(hidden).float()
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _nll(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Loss of every token; many logits are taken in chunks that are recomputed in backward."""
        hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        rows = max(CHUNK // self.stem.embedding.num_embeddings, 1)
        if len(targets_N) <= rows:
            nll_N = self._nll_of(hidden_ND, targets_N)
        else:
            losses = [
                checkpoint(self._nll_of, hidden, targets, use_reentrant=False, preserve_rng_state=False)
                for hidden, targets in zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
            ]
            nll_N = torch.cat(losses)
        # A view must not leave a sharded module: its hooks would be lost by a change in place.
        return nll_N.view_as(targets_BT).clone()

    def _nll_of(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(hidden_ND), targets_N, reduction="none", ignore_index=IGNORE)
