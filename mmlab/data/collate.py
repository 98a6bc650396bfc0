"""From examples to tensors: rows, padding, and the batch that a task receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mmlab.data.sources.base import BadSample, Source

__all__ = ["BadSample", "Batch", "Example", "Examples", "collate"]

Example = dict[str, np.ndarray]


class Examples(Protocol):
    """How raw samples become arrays; implemented by the task, picklable, called in loader workers.

    Examples that draw nothing at random may also have `stacked(raw)`: what calling them for each sample and
    stacking gives, from samples that a source read at once (`Source.batch`); or None if they cannot.
    """

    @property
    def padding(self) -> Mapping[str, int | float]:
        """Fields that have a sequence axis (their first), and what fills the end of a row."""

    def prepare(self, source: Source, cache: Path) -> Source:
        """The source that is read in training, for example windows of documents tokenized into `cache`."""

    def __call__(self, raw: dict[str, Any], rng: np.random.Generator) -> Example:
        """One example; BadSampleError if the sample cannot be used.

        All randomness comes from `rng`, which is the sample's own in this epoch, and valid during the call.
        """

    def counts(self, tensors: dict[str, Tensor]) -> dict[str, float]:
        """What each loss term and metric divides by, for one micro-batch; always the same names."""

    def empty(self) -> Example:
        """A dummy example with nothing to count."""

    def fingerprint(self) -> str:
        """Changes with everything that decides what an example holds."""


@dataclass
class Batch:
    """One micro-batch. `totals` are the counts of the whole optimizer step, over all ranks and micro-batches.

    `step` is the optimizer step (from 1), `micro` the place inside it on this rank (from 0 to
    accumulation - 1). `ids` are the samples that are in it, row by row; `bad` those that should have been.
    """

    tensors: dict[str, Tensor]
    ids: Tensor
    counts: dict[str, float]
    bad: list[BadSample] = field(default_factory=list)
    epoch: int = 0
    step: int = 0
    micro: int = 0
    ranks: int = 1
    accumulation: int = 1
    totals: dict[str, float] = field(default_factory=dict)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        """The batch with its tensors on `device`; ids and counts stay on the host."""
        return replace(
            self,
            tensors={
                name: value.to(device, non_blocking=non_blocking) for name, value in self.tensors.items()
            },
        )

    def pin_memory(self) -> Batch:
        """The batch with its tensors in page-locked memory."""
        return replace(self, tensors={name: value.pin_memory() for name, value in self.tensors.items()})


def collate(
    rows: Sequence[Sequence[Example]], width: int | None, padding: Mapping[str, int | float]
) -> dict[str, Tensor]:
    """Tensors of a micro-batch from rows of one or more examples.

    Fields named in `padding` are joined along their first axis inside a row and padded to `width` (the
    longest row if None). When a row holds several examples or padding, `segments` (B, T) int32 numbers the
    examples of a row from 1 (0 is padding) and `positions` (B, T) int64 restarts at 0 with each; when every
    row is one full example both are absent. Other fields are stacked, one entry an example.

    Raises:
        ValueError: if sequence fields of one example differ in length, or a row is longer than `width`.
    """
    first = rows[0][0]
    sequences = [name for name in padding if name in first]
    tensors: dict[str, Tensor] = {}
    if sequences:
        lengths = [[_length(example, sequences) for example in row] for row in rows]
        longest = max(map(sum, lengths))
        if width is not None and longest > width:
            raise ValueError(f"a row of {longest} does not fit the width {width}")
        width = max(longest, 1) if width is None else width
        full = all(len(row) == 1 and row[0] == width for row in lengths)
        for name in sequences:
            parts = [[example[name] for example in row] for row in rows]
            if full:
                tensors[name] = torch.from_numpy(np.stack([row[0] for row in parts]))
            else:
                tensors[name] = torch.from_numpy(_padded(parts, width, padding[name]))
        if not full:
            tensors |= _structure(lengths, width)
    for name in first:
        if name not in padding:
            tensors[name] = torch.from_numpy(np.stack([example[name] for row in rows for example in row]))
    return tensors


def _length(example: Example, sequences: Sequence[str]) -> int:
    lengths = [len(example[name]) for name in sequences]
    if len(set(lengths)) > 1:
        raise ValueError(f"fields {sequences} of one example have different lengths {lengths}")
    return lengths[0]


def _padded(parts: Sequence[Sequence[np.ndarray]], width: int, fill: int | float) -> np.ndarray:
    sample = parts[0][0]
    out = np.full((len(parts), width, *sample.shape[1:]), fill, dtype=sample.dtype)
    for row, pieces in zip(out, parts, strict=True):
        at = 0
        for piece in pieces:
            row[at : at + len(piece)] = piece
            at += len(piece)
    return out


def _structure(lengths: Sequence[Sequence[int]], width: int) -> dict[str, Tensor]:
    segments = np.zeros((len(lengths), width), np.int32)
    positions = np.zeros((len(lengths), width), np.int64)
    for row, sizes in enumerate(lengths):
        at = 0
        for number, size in enumerate(sizes, start=1):
            segments[row, at : at + size] = number
            positions[row, at : at + size] = np.arange(size)
            at += size
    return {"segments": torch.from_numpy(segments), "positions": torch.from_numpy(positions)}
