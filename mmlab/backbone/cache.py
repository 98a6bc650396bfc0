"""Keys and values of tokens that were seen, so that generating one more costs one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.masks import Mask

Pair = tuple[Tensor, Tensor]


class Cache:
    """Preallocated keys and values of every layer, (depth, B, S, G, K); each row has a length of its own.

    A token is kept in slot `position modulo S`. Without a window S is `length`; with one, slots are used
    again and S is at most window + chunk - 1. Who sees what follows from the positions in the slots, so
    neither an unused slot nor one of padding can be seen. The number type is that of the keys that are first
    written. For use without gradients.

    Args:
        config: of the transformer.
        rows: number B of sequences.
        length: tokens that a row can hold.
        chunk: with a window, most tokens that can be appended at once.
    """

    def __init__(self, config: BackboneConfig, rows: int, length: int, chunk: int = 128) -> None:
        if rows < 1 or length < 1 or chunk < 1:
            raise ValueError(f"rows, length and chunk must be at least 1, got {rows}, {length} and {chunk}")
        self.config, self.length = config, length
        self.slots = length if config.window is None else min(length, config.window + chunk - 1)
        self.chunk = length if config.window is None else chunk
        self.lengths = [0] * rows
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._memory: list[Pair | None] = [None] * config.depth

    @property
    def rows(self) -> int:
        """Number B of sequences."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, those of a memory included."""
        tensors = [self.keys, self.values, *(x for pair in self._memory if pair for x in pair)]
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    @property
    def has_memory(self) -> bool:
        """Whether keys and values of a cross-attention memory are here."""
        return self._memory[0] is not None

    def positions(self, T: int, device: torch.device) -> Tensor:
        """Positions of the next T tokens, int64, (1, T) if all rows are equally long, else (B, T)."""
        steps_T = torch.arange(T, device=device)
        if self._uniform:
            return (steps_T + self.lengths[0])[None]
        return torch.tensor(self.lengths, device=device)[:, None] + steps_T

    def step(self, positions_BT: Tensor, counts: Sequence[int] | None = None) -> CacheStep:
        """Begins the next tokens of every row.

        Args:
            positions_BT: from `positions`.
            counts: how many of them are real in each row, from the left; None for all. The others are
                padding: they see what they like and nobody sees them.

        Raises:
            ValueError: a row has no room for them, or more come at once than a window allows.
        """
        T = positions_BT.shape[1]
        counts = [T] * self.rows if counts is None else list(counts)
        if len(counts) != self.rows or not all(0 <= count <= T for count in counts):
            raise ValueError(f"counts must be {self.rows} numbers in 0..{T}, got {counts}")
        ends = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if max(ends) > self.length:
            raise ValueError(f"the cache holds {self.length} tokens a row, {max(ends)} were to be stored")
        if self.chunk < T:
            raise ValueError(f"{T} tokens at once; with a window the cache takes {self.chunk}")
        return CacheStep(self, positions_BT, counts, ends)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in this order; a row may be named more than once."""
        self.lengths = [self.lengths[row] for row in rows]
        if self.keys is not None and self.values is not None:
            index = torch.tensor(rows, device=self.keys.device)
            self.keys, self.values = self.keys[:, index], self.values[:, index]
            self._memory = [pair and (pair[0][index], pair[1][index]) for pair in self._memory]

    @property
    def _uniform(self) -> bool:
        return len(set(self.lengths)) == 1

    def _allocate(self, keys_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors, made at the first write. Zeros: what was never written must not hold a NaN."""
        if self.keys is None or self.values is None:
            shape = (self.config.depth, self.rows, self.slots, *keys_BTGK.shape[2:])
            self.keys, self.values = keys_BTGK.new_zeros(shape), keys_BTGK.new_zeros(shape)
        return self.keys, self.values


class CacheStep:
    """One call of the transformer with a cache: where its tokens go and what they see."""

    def __init__(self, cache: Cache, positions_BT: Tensor, counts: list[int], ends: list[int]) -> None:
        self.cache, self.positions_BT, self.counts, self.ends = cache, positions_BT, counts, ends
        self.used = min(cache.slots, max(ends))
        T, start = positions_BT.shape[1], cache.lengths[0]
        even = cache._uniform and len(set(counts)) == 1 and counts[0] == T
        first = start % cache.slots
        self.span = (first, first + T) if even and first + T <= cache.slots else None
        whole = start + T <= cache.slots  # slot = position: nothing was overwritten
        if even and whole and start == 0:
            self.mask = Mask(causal=True, window=cache.config.window)
        elif even and whole and T == 1 and (cache.config.window is None or start + T <= cache.config.window):
            self.mask = Mask(causal=False)
        else:
            self.mask = Mask(causal=False, allowed_BTS=self._visible(even))

    def layer(self, number: int) -> LayerCache:
        """The part of layer `number`."""
        return LayerCache(self, number)

    def finish(self) -> None:
        """Makes the tokens count, after all layers have written theirs."""
        self.cache.lengths = self.ends

    def write(self, number: int, keys_BTGK: Tensor, values_BTGK: Tensor) -> Pair:
        """Stores keys and values of layer `number` and gives all that are there, (B, used, G, K)."""
        keys, values = self.cache._allocate(keys_BTGK)
        for store_BSGK, new_BTGK in ((keys[number], keys_BTGK), (values[number], values_BTGK)):
            if self.span is not None:
                store_BSGK[:, self.span[0] : self.span[1]] = new_BTGK
            else:
                rows_N, tokens_N, slots_N = self._index
                store_BSGK[rows_N, slots_N] = new_BTGK[rows_N, tokens_N]
        return keys[number, :, : self.used], values[number, :, : self.used]

    @property
    def _index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, place in the call and slot of every real token."""
        if not hasattr(self, "_places"):
            device = self.positions_BT.device
            T = self.positions_BT.shape[1]
            real_BT = torch.arange(T, device=device) < torch.tensor(self.counts, device=device)[:, None]
            rows_N, tokens_N = real_BT.nonzero(as_tuple=True)
            slots_BT = (self.positions_BT % self.cache.slots).expand(len(self.counts), T)
            self._places = rows_N, tokens_N, slots_BT[rows_N, tokens_N]
        return self._places

    def _visible(self, even: bool) -> Tensor:
        """Boolean (1 or B, T, used): slots whose token is not after the query, nor out of its window."""
        device, S = self.positions_BT.device, self.cache.slots
        slots_S = torch.arange(self.used, device=device)
        ends = self.ends[:1] if even else self.ends
        last_B1 = torch.tensor(ends, device=device)[:, None] - 1
        # The newest token of each row that falls into a slot: the largest position up to the last one that is
        # equal to the slot modulo S; negative where the slot was never used.
        stored_BS = last_B1 - (last_B1 - slots_S) % S
        distance_BTS = self.positions_BT[:, :, None] - stored_BS[:, None]
        allowed_BTS = (distance_BTS >= 0) & (stored_BS >= 0)[:, None]
        window = self.cache.config.window
        return allowed_BTS if window is None else allowed_BTS & (distance_BTS < window)


class LayerCache:
    """What one layer's attention needs of a step."""

    def __init__(self, step: CacheStep, number: int) -> None:
        self.step, self.number = step, number

    def append(self, keys_BTGK: Tensor, values_BTGK: Tensor) -> Pair:
        """Stores the new tokens and gives all that are there, (B, S, G, K)."""
        return self.step.write(self.number, keys_BTGK, values_BTGK)

    def memory(self, project: Callable[[], Pair]) -> Pair:
        """Keys and values of the cross-attention memory, projected once."""
        stored = self.step.cache._memory
        pair = stored[self.number]
        if pair is None:
            pair = stored[self.number] = project()
        return pair
