"""Plans of optimizer steps: which samples go together, from their lengths and before any is decoded.

A plan is made inside one window of the shuffled order at a time, so it depends on (seed, epoch, position)
alone and a resumed run plans one window again. Ranks, micro-batches and workers only divide a finished plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmlab.data.mixing import MixtureOrder
from mmlab.data.order import Order, mixed
from mmlab.data.sources.base import Lengths

Row = list[int]
"""Draws that share a row of the batch: ids of samples, in a mixture also of later passes (see `mixing`)."""

Step = list[Row]
"""Rows of one optimizer step, over all ranks."""


@dataclass(frozen=True)
class Planner:
    """Cuts the windows of an order into optimizer steps.

    `padded`: the next `batch_size` samples, one a row; only an epoch's last step is shorter. `packed`: rows
    of at most `max_length` units, at most batch_size / max_length of them a step; the steps of a window
    differ by at most one row. `bucketed`: samples of like length, one a row, as many as take at most
    `batch_size` places when padded to the longest. Rows (packed) and steps (bucketed) of a window are
    shuffled: training is not sorted by length.
    """

    order: Order | MixtureOrder
    batching: Literal["padded", "packed", "bucketed"]
    batch_size: int
    max_length: int
    window: int
    lengths: Lengths | NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.batching == "packed" and self.batch_size % self.max_length:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of max_length {self.max_length}"
            )
        if self.batching != "padded" and self.lengths is None:
            raise ValueError(
                f"batching {self.batching!r} needs a source that knows the lengths of its samples"
            )

    @property
    def span(self) -> int:
        """Samples in a window; padded windows hold whole batches."""
        if self.batching == "padded":
            return max(self.window // self.batch_size, 1) * self.batch_size
        return self.window

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        return -(-self.order.size // self.span)

    def steps(self, epoch: int, window: int) -> list[Step]:
        """Optimizer steps of one window of an epoch, in order."""
        ids = self.order.indices(epoch, window * self.span, (window + 1) * self.span)
        if self.batching == "padded":
            rows = [[sample] for sample in ids.tolist()]
            return [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
        assert self.lengths is not None
        lengths = np.maximum(np.asarray(self.lengths[ids % self.order.size]), 1)
        self._check(ids, lengths)
        seed = mixed(self.order.seed, epoch, window, 4)
        if self.batching == "bucketed":
            groups = buckets(lengths, self.batch_size)
            steps = [[[int(ids[place])] for place in group] for group in groups]
            return _shuffled(steps, seed)
        rows = [ids[row].tolist() for row in pack(lengths, self.max_length)]
        return balanced(_shuffled(rows, seed), -(-len(rows) // (self.batch_size // self.max_length)))

    def _check(self, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        worst = int(lengths.argmax())
        if lengths[worst] > self.max_length:
            raise ValueError(
                f"sample {ids[worst] % self.order.size} has length {lengths[worst]}, "
                f"more than max_length {self.max_length}"
            )


def pack(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Places 0..n-1 in rows whose lengths add up to at most `capacity`, by best-fit decreasing.

    The longest item comes first, and each goes where it leaves the least room (Johnson 1973): at most 11/9 of
    the fewest rows possible, and within a fraction of a percent for lengths of many sizes.
    """
    sizes = lengths.tolist()
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for place in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[place]
        at = bisect_left(room, (size, -1))
        if at == len(room):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(place)
        if left > size:
            insort(room, (left - size, row))
    return [sorted(row) for row in rows]


def buckets(lengths: NDArray[np.int64], budget: int) -> list[list[int]]:
    """Places 0..n-1 in groups of neighbouring lengths, each of n * longest <= `budget`."""
    groups: list[list[int]] = []
    group: list[int] = []
    for place in np.argsort(lengths, kind="stable").tolist():
        if group and (len(group) + 1) * int(lengths[place]) > budget:
            groups.append(group)
            group = []
        group.append(place)
    return [*groups, group] if group else groups


def balanced(items: list[Any], parts: int) -> list[list[Any]]:
    """Consecutive parts whose sizes differ by at most one; with fewer items than parts some are empty."""
    count = len(items)
    return [items[count * part // parts : count * (part + 1) // parts] for part in range(parts)]


def _shuffled(items: list[Any], seed: int) -> list[Any]:
    return [items[place] for place in Order(len(items), seed).indices(0, 0, len(items)).tolist()]
