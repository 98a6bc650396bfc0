"""What runs in the loader's workers: one micro-batch from its plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmlab.data.collate import Batch, Example, Examples, collate
from mmlab.data.order import SampleGenerators
from mmlab.data.packing import Row
from mmlab.data.sources.base import BadSample, BadSampleError, Source
from mmlab.modalities.base import EncodingError


@dataclass(frozen=True)
class MicroPlan:
    """Rows of one rank's micro-batch, and the step that it belongs to."""

    rows: list[Row]
    epoch: int
    step: int
    micro: int


@dataclass(frozen=True)
class MicroBatches(Dataset[Batch]):
    """Reads, transforms and collates the samples of a plan. The same plan gives the same batch anywhere.

    A bad sample leaves a hole; a micro-batch of nothing else, or of nothing at all, is one empty example.

    Args:
        source: what is read.
        examples: how it becomes arrays.
        seed: seed of the run; random transforms depend on it, the epoch and the draw alone.
        width: length of the padded rows; None pads to the longest.
    """

    source: Source
    examples: Examples
    seed: int
    width: int | None = None

    def __getitem__(self, plan: MicroPlan) -> Batch:
        return self._at_once(plan) or self._one_by_one(plan)

    def _at_once(self, plan: MicroPlan) -> Batch | None:
        """The batch from one read, where rows are single samples of one length; None where they are not."""
        stacked = getattr(self.examples, "stacked", None)
        if stacked is None or not plan.rows or max(map(len, plan.rows)) > 1:
            return None
        ids = np.array([row[0] for row in plan.rows], np.int64) % len(self.source)
        raw = self.source.batch(ids)
        arrays: Mapping[str, np.ndarray] | None = None if raw is None else stacked(raw)
        if arrays is None:
            return None
        lengths = {arrays[name].shape[1] for name in self.examples.padding if name in arrays}
        if self.width is not None and lengths != {self.width}:
            return None
        return self._batch(plan, {name: torch.from_numpy(value) for name, value in arrays.items()}, ids)

    def _one_by_one(self, plan: MicroPlan) -> Batch:
        ids: list[int] = []
        bad: list[BadSample] = []
        rows: list[list[Example]] = []
        generator, size = SampleGenerators(self.seed, plan.epoch), len(self.source)
        for planned in plan.rows:
            row = []
            for draw in planned:
                sample = draw % size  # a mixture draws a sample again as id + size, and with other numbers
                try:
                    row.append(self.examples(self.source[sample], generator(draw)))
                except BadSampleError as error:
                    bad.append(BadSample(sample, str(error)))
                except EncodingError as error:
                    bad.append(BadSample(sample, f"{self.source.name(sample)}: {error}"))
                else:
                    ids.append(sample)
            if row:
                rows.append(row)
        tensors = (
            collate(rows, self.width, self.examples.padding)
            if rows
            else collate([[self.examples.empty()]], None, self.examples.padding)
        )
        batch = self._batch(plan, tensors, np.array(ids, np.int64))
        batch.bad += bad
        return batch

    def _batch(self, plan: MicroPlan, tensors: dict[str, Tensor], ids: NDArray[np.int64]) -> Batch:
        return Batch(
            tensors,
            ids=torch.from_numpy(ids),
            counts=self.examples.counts(tensors),
            epoch=plan.epoch,
            step=plan.step,
            micro=plan.micro,
        )


def read(
    batches: MicroBatches, plans: Iterable[MicroPlan], num_workers: int, prefetch: int, pin_memory: bool
) -> Iterator[Batch]:
    """Micro-batches in the order of their plans, made by `num_workers` processes (0: by this one).

    Neither reads nor changes the global random state.
    """
    loader: DataLoader[Batch] = DataLoader(
        batches,
        batch_size=None,
        sampler=plans,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=pin_memory,
        collate_fn=_same,
        generator=torch.Generator(),
    )
    return iter(loader)


def _same(batch: Any) -> Any:
    return batch
