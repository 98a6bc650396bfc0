"""The order in which a mixture of sources is read: a pure function of (seed, epoch, position) too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.data.order import Order, mixed, random_words

BLOCK = 1000
"""Draws in which every source has its share, rounded down or up."""

_BLOCKS = 1000
_STEP = 703  # prime to _BLOCKS, and the fraction worst approximated by others: what is rounded up lies apart


@dataclass(frozen=True)
class MixtureOrder:
    """Draws from several sources that stand one after another, each in its own shuffled order.

    The run is one stream of draws, cut into epochs of as many draws as there are samples. Each block of 1,000
    draws holds share * 1000 draws of every source, rounded down or up, spread by a permutation of its own; a
    million draws hold the exact shares (to one in a million). The k-th draw from a source of n samples is
    position k mod n of pass k // n over it: each of its samples is drawn once before one comes again, and a
    pass goes on where the epoch before left it. A resumed run needs no more than its position.

    A draw is `id + size * pass`, where id counts the samples of all sources through and pass is the number of
    times that the sample was drawn before: the remainder by `size` is the sample, and no draw comes twice.

    Args:
        sizes: samples of each source.
        shares: part of the draws that each source gets; they add up to 1.
        seed: seed of the run.
        shuffle: whether samples of a source are permuted, anew in each pass.
        block: see `Order`, inside each source.
    """

    sizes: tuple[int, ...]
    shares: tuple[float, ...]
    seed: int
    shuffle: bool = True
    block: int | None = None

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.shares) or not self.sizes:
            raise ValueError(f"{len(self.sizes)} sizes do not fit {len(self.shares)} shares")
        if min(self.sizes) < 1:
            raise ValueError(f"every source of a mixture needs a sample, the sizes are {list(self.sizes)}")
        if min(self.shares) <= 0 or abs(sum(self.shares) - 1) > 1e-9:
            raise ValueError(f"shares must be positive and add up to 1, got {list(self.shares)}")
        if not self.quotas.min():
            raise ValueError(
                f"a share of {min(self.shares):.3g} is less than one draw in {BLOCK * _BLOCKS:,}: "
                "leave the source out"
            )

    @property
    def size(self) -> int:
        """Draws in an epoch: the samples of all sources."""
        return sum(self.sizes)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the order; a resumed run must have the same."""
        own = {"seed": self.seed, "shuffle": self.shuffle, "shuffle_block": self.block}
        return own | {"the sizes of the mixture": self.sizes, "its weights": tuple(self.quotas.tolist())}

    @cached_property
    def quotas(self) -> NDArray[np.int64]:
        """Draws from each source in a million."""
        return apportioned(self.shares, BLOCK * _BLOCKS)

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Draws at positions start..stop-1 of `epoch`; positions past the end are left out."""
        start = max(start, 0)
        low, high = epoch * self.size + start, epoch * self.size + min(max(stop, start), self.size)
        if low >= high:
            return np.zeros(0, np.int64)
        first, last = low // BLOCK, (high - 1) // BLOCK
        owners = np.concatenate([self._owners(block) for block in range(first, last + 1)])
        owners = owners[low - first * BLOCK : high - first * BLOCK]
        skipped = self._owners(first)[: low - first * BLOCK]
        draws = np.empty(len(owners), np.int64)
        offset = 0
        for source, size in enumerate(self.sizes):
            mine = np.flatnonzero(owners == source)
            if mine.size:
                begin = self._before(first, source) + int(np.count_nonzero(skipped == source))
                draws[mine] = offset + self._drawn(source, begin, begin + mine.size)
            offset += size
        return draws

    def _owners(self, block: int) -> NDArray[np.int64]:
        """The source of each draw of a block."""
        sources = np.repeat(np.arange(len(self.sizes)), self._counts[block % _BLOCKS])
        return sources[np.argsort(random_words(BLOCK, self.seed, block, 5), kind="stable")]

    def _before(self, block: int, source: int) -> int:
        """Draws from `source` before a block."""
        whole, rest = divmod(block, _BLOCKS)
        return whole * int(self.quotas[source]) + int(self._sums[rest, source])

    def _drawn(self, source: int, begin: int, end: int) -> NDArray[np.int64]:
        """Draws begin..end-1 from a source, counted from its own first sample."""
        order = Order(self.sizes[source], mixed(self.seed, source, 6), self.shuffle, self.block)
        passes, ids = order.across(begin, end)
        return ids + self.size * passes

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Draws from each source in each of the blocks of a million draws, (blocks, sources).

        What is left of the quotas after whole draws a block is laid along a line, and each block takes every
        thousandth place of it: a source then has at most one more draw in a block than in another.
        """
        whole, rest = np.divmod(self.quotas, _BLOCKS)
        owners = np.repeat(np.arange(len(self.sizes)), rest).reshape(-1, _BLOCKS)
        extra = np.stack([(owners == source).sum(0) for source in range(len(self.sizes))], axis=1)
        counts: NDArray[np.int64] = whole + extra[np.arange(_BLOCKS) * _STEP % _BLOCKS]
        return counts

    @cached_property
    def _sums(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros((1, len(self.sizes)), np.int64), np.cumsum(self._counts, axis=0)])


def apportioned(shares: Sequence[float], total: int) -> NDArray[np.int64]:
    """Whole numbers that add up to `total` and lie nearest to shares of it, by the largest remainders."""
    exact = np.asarray(shares, np.float64) / sum(shares) * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts
