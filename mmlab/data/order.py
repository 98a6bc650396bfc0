"""The order in which samples are read: a pure function of (seed, epoch, position).

Nothing is stored: a position is sent through a keyed permutation, so any part of any epoch of a set of any
size is found in the time of its own length, and a resumed run needs no more than its position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_U64 = NDArray[np.uint64]


@dataclass(frozen=True)
class Order:
    """Permutation of `size` samples, another one in each epoch.

    With `block` the blocks of that many neighbouring samples are permuted, and the samples inside each block:
    reads stay inside one block at a time, which keeps remote shards and row groups cheap. Without `shuffle`
    every epoch runs from the first sample to the last.

    The permutation is a Feistel network over the next power of four, walked until it falls inside
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """

    size: int
    seed: int
    shuffle: bool = True
    block: int | None = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, got {self.size}")
        if self.block is not None and self.block < 1:
            raise ValueError(f"block must be at least 1, got {self.block}")

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the order, by the names of the configuration; a resumed run must have the same."""
        return {"seed": self.seed, "shuffle": self.shuffle, "shuffle_block": self.block}

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Sample ids at positions start..stop-1 of `epoch`; positions past the end are left out."""
        positions = np.arange(max(start, 0), min(max(stop, start, 0), self.size), dtype=np.int64)
        if not self.shuffle or not positions.size:
            return positions
        if self.block is None:
            key = _word(mixed(self.seed, epoch))
            return _permute(positions.astype(np.uint64), self.size, key).astype(np.int64)
        return self._blockwise(epoch, positions, self.block)

    def across(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epochs and sample ids at places begin..end-1 of all epochs laid end to end."""
        places = np.arange(begin, end, dtype=np.int64)
        if not places.size:
            return places, places
        epochs, positions = np.divmod(places, self.size)
        if not self.shuffle:
            return epochs, positions
        numbers = range(int(epochs[0]), int(epochs[-1]) + 1)
        if self.block is None:
            keys = np.array([mixed(self.seed, epoch) for epoch in numbers], np.uint64)
            keys = keys if len(keys) == 1 else keys[epochs - epochs[0]]
            return epochs, _permute(positions.astype(np.uint64), self.size, keys).astype(np.int64)
        starts = [epoch * self.size for epoch in numbers]
        parts = [self.indices(epoch, begin - at, end - at) for epoch, at in zip(numbers, starts, strict=True)]
        return epochs, np.concatenate(parts)

    def _blockwise(self, epoch: int, positions: NDArray[np.int64], block: int) -> NDArray[np.int64]:
        whole, rest = divmod(self.size, block)
        blocks = whole + bool(rest)
        between = _word(mixed(self.seed, epoch, 1))
        slots, inside = np.divmod(positions, block)
        if rest:
            # The short block is the last of the set; all that is read after it moves up by what it lacks.
            short = int(_unpermute(_word(blocks - 1), blocks, between)[0])
            later = positions >= short * block + rest
            moved = np.divmod(positions[later] + (block - rest), block)
            slots[later], inside[later] = moved
        ids = _permute(slots.astype(np.uint64), blocks, between)
        keys = _mix(ids + _word(mixed(self.seed, epoch, 2)))
        inner = inside.astype(np.uint64)
        for chosen, size in ((ids < whole, block), (ids >= whole, rest)):
            if chosen.any():
                inner[chosen] = _permute(inner[chosen], size, keys[chosen])
        return (ids * np.uint64(block) + inner).astype(np.int64)


def sample_generator(seed: int, epoch: int, sample_id: int) -> np.random.Generator:
    """Random numbers for one sample in one epoch: the same in any process, worker and order of reading."""
    return np.random.Generator(np.random.Philox(key=(sample_id & _WORD) << 64 | mixed(seed, epoch, 3)))


class SampleGenerators:
    """`sample_generator` for many samples of one epoch, without the cost of making each.

    A generator is valid until the next one is asked for.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._bits = np.random.Philox(key=mixed(seed, epoch, 3))
        self._fresh = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def __call__(self, sample_id: int) -> np.random.Generator:
        """The generator of sample `sample_id`, at its beginning."""
        self._fresh["state"]["key"][1] = sample_id & _WORD
        self._bits.state = self._fresh
        return self._generator


def mixed(*values: int) -> int:
    """One 64-bit word in which every bit depends on every bit of every value (SplitMix64's finalizer)."""
    word = 0
    for value in values:
        word = (word ^ (value & _WORD)) + _GOLDEN & _WORD
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
        word ^= word >> 31
    return word


def random_words(count: int, *keys: int) -> NDArray[np.uint64]:
    """`count` 64-bit words, as if drawn at random, that depend on `keys` alone."""
    return _mix(np.arange(count, dtype=np.uint64) + _word(mixed(*keys)))


def _word(value: int) -> _U64:
    return np.array([value], dtype=np.uint64)


def _mix(words: _U64) -> _U64:
    words = words + np.uint64(_GOLDEN)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _half_bits(size: int) -> int:
    return (max(size - 1, 0).bit_length() + 1) // 2


def _permute(values: _U64, size: int, key: _U64) -> _U64:
    """Sends 0..size-1 to 0..size-1; `key` is one word for all values or one for each."""
    return _walk(_forward, values, size, key)


def _unpermute(values: _U64, size: int, key: _U64) -> _U64:
    return _walk(_backward, values, size, key)


def _walk(step: Callable[[_U64, int, _U64], _U64], values: _U64, size: int, key: _U64) -> _U64:
    half = _half_bits(size)
    out = step(values, half, key)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = step(out[outside], half, key if key.size == 1 else key[outside])
        outside = outside[out[outside] >= size]
    return out


def _forward(values: _U64, half: int, key: _U64) -> _U64:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mix(right + _turn_key(key, turn)) & mask)
    return left << shift | right


def _backward(values: _U64, half: int, key: _U64) -> _U64:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for turn in reversed(range(_ROUNDS)):
        left, right = right ^ (_mix(left + _turn_key(key, turn)) & mask), left
    return left << shift | right


def _turn_key(key: _U64, turn: int) -> _U64:
    return _mix(key ^ np.uint64(mixed(turn)))
