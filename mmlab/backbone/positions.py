"""Positions of tokens, and the rotation of queries and keys by them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosine and sine of every position and frequency, float32, (B or 1, T, K / 2)."""

    cos_BTK: Tensor
    sin_BTK: Tensor


def document_positions(segments_BT: Tensor) -> Tensor:
    """Positions that restart at 0 with every document (run of equal segments), int64 (B, T); 0 in padding."""
    B, T = segments_BT.shape
    index_BT = torch.arange(T, device=segments_BT.device).expand(B, T)
    starts_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    positions_BT = index_BT - torch.where(starts_BT, index_BT, 0).cummax(dim=1).values
    return positions_BT.masked_fill(segments_BT == 0, 0)


def rotary(positions_BT: Tensor, head_size: int, base: float) -> Rotary:
    """Tables for `rotate` (arXiv:2104.09864), from the positions themselves and always in float32.

    Args:
        positions_BT: integers, (B, T) or (1, T).
        head_size: size K of a head, even.
        base: frequency i is `base ** (-2 i / K)` radians a position.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions_BT.device) / head_size
    with torch.autocast(positions_BT.device.type, enabled=False):
        angles_BTK = positions_BT.to(torch.float32)[..., None] * (1.0 / base**exponents)
        return Rotary(angles_BTK.cos(), angles_BTK.sin())


def rotate(x_BTHK: Tensor, tables: Rotary) -> Tensor:
    """Rotates the pairs (i, i + K/2) of every head in float32; the result has the input's type."""
    cos, sin = tables.cos_BTK[:, :, None], tables.sin_BTK[:, :, None]
    first, second = x_BTHK.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BTHK.dtype)
