"""Who may attend to whom, decided once per forward and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """Documents as consecutive pieces of the flattened (row, token) axis, known to the host.

    Attributes:
        query_lengths: tokens of each piece of the queries; they sum to B * T.
        key_lengths: tokens of each piece of the keys; they sum to B * S.
        pairs: for each query piece the key piece that it attends to and the number of equally long documents
            in both, or None where there is nothing to attend to (padding).
    """

    query_lengths: list[int]
    key_lengths: list[int]
    pairs: list[tuple[int, int] | None]


@dataclass
class Mask:
    """Result of `build_mask`; either nothing but `causal` and `window`, or `pieces`, or dense booleans.

    Attributes:
        causal: a query attends to no key after it.
        window: bound on the distance between query and key, see `BackboneConfig`.
        pieces: document spans; attention then runs document by document.
        allowed_BTS: true where a query may attend; a query without any key has all of them, see `empty_BT`.
        empty_BT: queries whose result is 0, because they are padding or have no key.
        padded_BS: keys and values that must not be read (they may hold anything, NaN included).
    """

    causal: bool
    window: int | None = None
    pieces: Pieces | None = None
    allowed_BTS: Tensor | None = None
    empty_BT: Tensor | None = None
    padded_BS: Tensor | None = None
    _additive: dict[tuple[int, int, torch.dtype], Tensor | None] = field(default_factory=dict)

    def banded(self, T: int, S: int) -> bool:
        """Whether the window hides something of `S` keys from `T` queries that see the same tokens."""
        return self.window is not None and max(T, S) > self.window

    def additive(self, T: int, S: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """(T, S) of 0 and minus infinity for one document, None if all is visible; kept for the layers."""
        key = (T, S, dtype)
        if key not in self._additive:
            self._additive[key] = None
            if self.causal or self.banded(T, S):
                hidden_TS = ~visible(T, S, self.causal, self.window, device)
                zeros_TS = torch.zeros(T, S, dtype=dtype, device=device)
                self._additive[key] = zeros_TS.masked_fill(hidden_TS, -torch.inf)
        return self._additive[key]


def visible(T: int, S: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Boolean (T, S): which keys a query sees by order and distance alone, counted from the first token."""
    distance_TS = torch.arange(T, device=device)[:, None] - torch.arange(S, device=device)[None]
    seen_TS = distance_TS >= 0 if causal else torch.ones(T, S, dtype=torch.bool, device=device)
    return seen_TS if window is None else seen_TS & (distance_TS.abs() < window)


def build_mask(
    segments_BT: Tensor | None,
    key_segments_BS: Tensor | None = None,
    *,
    causal: bool,
    window: int | None = None,
    spans: bool = True,
) -> Mask:
    """Mask of self-attention (one tensor) or cross-attention (two).

    Segments are integers: 0 is padding, 1, 2, ... number the documents of a row. A query attends only to keys
    of its own number. Order and window count tokens inside the row, not positions.

    Args:
        segments_BT: segments of the queries; None means one document of all tokens.
        key_segments_BS: segments of the keys, for cross-attention.
        causal: for self-attention only.
        window: for self-attention only.
        spans: allows host-side document spans (no T x T booleans), which cost a synchronisation and, under
            torch.compile, a compilation per layout; otherwise the mask is dense.
    """
    if segments_BT is None:
        return Mask(causal, window)
    key_segments_BS = segments_BT if key_segments_BS is None else key_segments_BS
    if spans:
        pieces = find_pieces(segments_BT, None if key_segments_BS is segments_BT else key_segments_BS)
        if pieces is not None:
            return Mask(causal, window, pieces=pieces, padded_BS=key_segments_BS == 0)
    return dense_mask(segments_BT, key_segments_BS, causal, window)


def dense_mask(segments_BT: Tensor, key_segments_BS: Tensor, causal: bool, window: int | None) -> Mask:
    """Mask of booleans, on the segments' device and without a synchronisation."""
    allowed_BTS = (segments_BT[:, :, None] == key_segments_BS[:, None]) & (segments_BT > 0)[:, :, None]
    if causal or window is not None:
        T, S = allowed_BTS.shape[1:]
        allowed_BTS = allowed_BTS & visible(T, S, causal, window, segments_BT.device)
    empty_BT = ~allowed_BTS.any(dim=-1)
    allowed_BTS = allowed_BTS | empty_BT[:, :, None]
    return Mask(causal, window, allowed_BTS=allowed_BTS, empty_BT=empty_BT, padded_BS=key_segments_BS == 0)


def find_pieces(segments_BT: Tensor, key_segments_BS: Tensor | None) -> Pieces | None:
    """Document spans, consecutive ones of equal length joined.

    None if a document is not one contiguous run, or if there is nothing to attend to at all: the dense form
    then keeps every weight in the graph, as data-parallel training needs.
    """
    queries = _runs(segments_BT)
    keys = queries if key_segments_BS is None else _runs(key_segments_BS)
    if queries is None or keys is None:
        return None
    where = {(row, number): i for i, (row, number, _) in enumerate(keys) if number}
    partner = [where.get((row, number)) if number else None for row, number, _ in queries]
    if all(j is None for j in partner):
        return None
    groups: list[list[int]] = []
    for i, j in enumerate(partner):
        if groups and _joins(queries, keys, groups[-1][-1], i, partner[groups[-1][-1]], j):
            groups[-1].append(i)
        else:
            groups.append([i])
    return _pieces(queries, keys, partner, groups)


def _joins(
    queries: list[tuple[int, int, int]],
    keys: list[tuple[int, int, int]],
    last: int,
    i: int,
    last_key: int | None,
    j: int | None,
) -> bool:
    if j is None or last_key is None:
        return j is None and last_key is None
    return j == last_key + 1 and queries[last][2] == queries[i][2] and keys[last_key][2] == keys[j][2]


def _pieces(
    queries: list[tuple[int, int, int]],
    keys: list[tuple[int, int, int]],
    partner: list[int | None],
    groups: list[list[int]],
) -> Pieces:
    query_lengths = [sum(queries[i][2] for i in group) for group in groups]
    key_lengths: list[int] = []
    done, found = 0, {}
    firsts = [partner[group[0]] for group in groups]
    joined = sorted((j, len(groups[g]), g) for g, j in enumerate(firsts) if j is not None)
    for first, count, g in joined:
        if first > done:
            key_lengths.append(sum(length for _, _, length in keys[done:first]))
        found[g] = (len(key_lengths), count)
        key_lengths.append(sum(length for _, _, length in keys[first : first + count]))
        done = first + count
    if done < len(keys):
        key_lengths.append(sum(length for _, _, length in keys[done:]))
    return Pieces(query_lengths, key_lengths, [found.get(g) for g in range(len(groups))])


def _runs(segments_BT: Tensor) -> list[tuple[int, int, int]] | None:
    """(row, segment, length) of every run in order; None if a document of a row comes in several runs."""
    base = int(segments_BT.max()) + 1
    rows_B1 = torch.arange(segments_BT.shape[0], device=segments_BT.device)[:, None]
    keys, lengths = torch.unique_consecutive(rows_B1 * base + segments_BT, return_counts=True)
    runs = [(*divmod(key, base), length) for key, length in zip(keys.tolist(), lengths.tolist(), strict=True)]
    documents = [run[:2] for run in runs if run[1]]
    return runs if len(set(documents)) == len(documents) else None
