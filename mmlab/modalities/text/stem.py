"""From token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TextStem(nn.Module):
    """Ids to vectors, (B, T) -> (B, T, D): an embedding, plus learned positions if `max_positions` is given.

    Initial weights are normal with standard deviation `std`; `dropout` acts on the sum.
    """

    def __init__(self, size: int, width: int, max_positions: int | None, dropout: float, std: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(size, width, _weight=_drawn(size, width, std))
        self.positions: nn.Embedding | None = None
        if max_positions is not None:
            self.positions = nn.Embedding(max_positions, width, _weight=_drawn(max_positions, width, std))

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Embedded tokens; positions count from 0 unless given. ValueError if a row is too long."""
        x_BTD = self.embedding(tokens_BT)
        if self.positions is not None:
            T, limit = tokens_BT.shape[1], self.positions.num_embeddings
            if limit < T and positions_BT is None:
                raise ValueError(f"{T} tokens in a row, but only {limit} learned positions")
            index = torch.arange(T, device=tokens_BT.device) if positions_BT is None else positions_BT
            x_BTD = x_BTD + self.positions(index)
        return F.dropout(x_BTD, self.dropout, self.training) if self.dropout else x_BTD


def _drawn(rows: int, width: int, std: float) -> Tensor:
    return torch.empty(rows, width).normal_(std=std)
