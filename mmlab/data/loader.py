"""Loaders of whole optimizer steps (training) and of every sample exactly once (validation)."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mmlab.data.collate import Batch, Examples
from mmlab.data.micro_batches import MicroBatches, MicroPlan, read
from mmlab.data.order import Order
from mmlab.data.packing import Planner, balanced
from mmlab.data.sources.base import BadSample, BadSampleError, Source

log = logging.getLogger("mmlab")

AllReduce = Callable[[dict[str, float]], dict[str, float]]
"""Sums named numbers over all data-parallel ranks."""

_BAD = " bad samples"


@dataclass(frozen=True)
class Execution:
    """How micro-batches are made and shared out; nothing here changes what a step contains.

    Args:
        ranks: data-parallel processes; `rank` is this one of them.
        accumulation: micro-batches of an optimizer step on every rank.
        num_workers: processes that read for this rank; 0 reads in this one.
        prefetch: micro-batches that each worker prepares ahead.
        pin_memory: whether tensors go to page-locked memory.
        all_reduce: sums named numbers over the ranks.
    """

    ranks: int = 1
    rank: int = 0
    accumulation: int = 1
    num_workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    all_reduce: AllReduce = dict

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must lie in 0..ranks - 1 ({self.ranks - 1}), got {self.rank}")


class BadSamples:
    """Counts the unusable samples of one pass over the data, names each in the log, and keeps to a limit.

    Args:
        where: what is being read, for messages.
        limit: how many a pass may hold; None sets no limit.
    """

    def __init__(self, where: str, limit: int | None) -> None:
        self.where, self.limit, self.count = where, limit, 0

    def add(self, found: list[BadSample], count: int, total: int) -> None:
        """Takes this rank's `found` and their number over all ranks; raises the same on every rank.

        Args:
            found: what this rank met.
            count: how many all ranks met.
            total: samples in the pass, for the message.

        Raises:
            BadSampleError: above the limit.
        """
        for sample in found:
            log.warning("bad sample %d (%s): %s", sample.id, self.where, sample.reason)
        self.count += count
        if count and self.limit is not None and self.count > self.limit:
            named = "".join(f"\n  sample {sample.id}: {sample.reason}" for sample in found[:5])
            raise BadSampleError(
                f"{self.count} of {total} samples ({self.where}) cannot be used; data.bad_samples allows "
                f"{self.limit}{named or ' (named in the log of another rank)'}"
            )


class TrainLoader:
    """`total_steps` optimizer steps, each as `accumulation` micro-batches on every rank.

    It walks over as many epochs of the data as that takes; a step never crosses from one epoch to the next.
    The samples of step n depend on the planner alone; ranks, micro-batches and workers only share them out.
    Iteration starts after the last step that was delivered whole, which is also what `state_dict` holds: a
    few integers, from which any number of ranks and workers goes on.

    Every micro-batch carries the counts of its whole step (`totals`), summed over micro-batches and ranks
    before the first is delivered.

    Args:
        source: what is read.
        examples: how samples become arrays.
        planner: which samples make a step.
        total_steps: optimizer steps of the whole run.
        execution: how the work is shared out.
        bad_samples: unusable samples that one epoch may hold; None sets no limit.
    """

    def __init__(
        self,
        source: Source,
        examples: Examples,
        planner: Planner,
        total_steps: int,
        execution: Execution | None = None,
        bad_samples: int | None = 0,
    ) -> None:
        if not planner.order.size:
            raise ValueError("there are no samples to train on")
        self.planner, self.total_steps = planner, total_steps
        self.execution = execution or Execution()
        width = planner.max_length if planner.batching == "packed" else None
        self._batches = MicroBatches(source, examples, planner.order.seed, width)
        self._bad = BadSamples("training", bad_samples)
        self._cursor = (0, 0, 0)
        self._step = 0

    def __len__(self) -> int:
        return self.total_steps * self.execution.accumulation

    @property
    def bad(self) -> int:
        """Unusable samples met so far in this epoch, over all ranks."""
        return self._bad.count

    def __iter__(self) -> Iterator[Batch]:
        run = self.execution
        cursors: list[tuple[int, int, int]] = []
        stream = read(self._batches, self._plans(cursors), run.num_workers, run.prefetch, run.pin_memory)
        while self._step < self.total_steps:
            batches = [next(stream) for _ in range(run.accumulation)]
            self._stamp(batches)
            yield from batches[:-1]
            self._cursor, self._step = cursors.pop(0), self._step + 1
            yield batches[-1]

    def state_dict(self) -> dict[str, int]:
        """Where the next step starts, how many there were, and what the plans depend on."""
        epoch, window, step_in_window = self._cursor
        return {
            "epoch": epoch,
            "window": window,
            "step_in_window": step_in_window,
            "step": self._step,
            "bad": self._bad.count,
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to where `state` was taken.

        Raises:
            ValueError: if the data, the global batch or the order are not those of the state.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                if name == "order":
                    *names, last = self._settings()
                    raise ValueError(
                        "the data cannot be resumed: the state was saved with another order of the samples; "
                        f"one of {', '.join(names)} and {last} has changed"
                    )
                raise ValueError(
                    f"the data cannot be resumed: {name} was {state.get(name)} when the state was saved "
                    f"and is {value} now"
                )
        self._cursor = (state["epoch"], state["window"], state["step_in_window"])
        self._step = state["step"]
        self._bad.count = state["bad"]

    def _identity(self) -> dict[str, int]:
        planner = self.planner
        return {
            "samples": planner.order.size,
            "batch_size": planner.batch_size,
            "samples_in_window": planner.span,
            "order": zlib.crc32(repr(tuple(self._settings().values())).encode()),
        }

    def _settings(self) -> dict[str, Any]:
        planner = self.planner
        return {**planner.order.settings, "batching": planner.batching, "max_length": planner.max_length}

    def _plans(self, cursors: list[tuple[int, int, int]]) -> Iterator[MicroPlan]:
        """Plans of this rank from the cursor on; appends to `cursors` where each step ends."""
        run = self.execution
        (epoch, window, skip), number = self._cursor, self._step
        while True:
            for place, step in enumerate(self.planner.steps(epoch, window)):
                if place < skip:
                    continue
                if number == self.total_steps:
                    return
                number += 1
                cursors.append((epoch, window, place + 1))
                parts = balanced(step, run.ranks * run.accumulation)
                for micro in range(run.accumulation):
                    yield MicroPlan(parts[micro * run.ranks + run.rank], epoch, number, micro)
            skip, window = 0, window + 1
            if window == self.planner.windows:
                epoch, window = epoch + 1, 0

    def _stamp(self, batches: list[Batch]) -> None:
        run = self.execution
        sums = {name: sum(batch.counts[name] for batch in batches) for name in sorted(batches[0].counts)}
        found = [sample for batch in batches for sample in batch.bad]
        totals = run.all_reduce({**sums, _BAD: float(len(found))})
        if batches[0].epoch != self._cursor[0]:
            self._bad.count = 0
        self._bad.where = f"training, epoch {batches[0].epoch}"
        self._bad.add(found, round(totals.pop(_BAD)), self.planner.order.size)
        for batch in batches:
            batch.totals, batch.ranks, batch.accumulation = totals, run.ranks, run.accumulation


class ValidationLoader:
    """Every sample once over all ranks, in the same micro-batches each time, as many on every rank.

    What the last micro-batches lack are empty ones. With known lengths, neighbours of like length share a
    micro-batch, which saves padding.

    Args:
        source: what is read.
        examples: how samples become arrays.
        rows: samples in a micro-batch.
        seed: seed of the run.
        samples: how many samples, drawn once by `seed`; None takes all, in their order.
        sort_within: samples among which those of like length are put together; 0 keeps the order.
        execution: how the work is shared out.
        bad_samples: unusable samples that one pass may hold; None sets no limit.
    """

    def __init__(
        self,
        source: Source,
        examples: Examples,
        rows: int,
        seed: int,
        samples: int | None = None,
        sort_within: int = 0,
        execution: Execution | None = None,
        bad_samples: int | None = 0,
    ) -> None:
        if not len(source):
            raise ValueError("there are no samples to validate on")
        size = len(source)
        self.samples = size if samples is None else min(samples, size)
        self.execution = execution or Execution()
        self._limit = bad_samples
        self._order = Order(size, seed, shuffle=self.samples < size)
        self._rows, self._window = rows, max(sort_within // rows, 1) * rows
        self._lengths = source.lengths if sort_within else None
        self._batches = MicroBatches(source, examples, seed)
        self.bad = 0

    def __len__(self) -> int:
        micro_batches = -(-self.samples // self._rows)
        return -(-micro_batches // self.execution.ranks)

    def __iter__(self) -> Iterator[Batch]:
        run = self.execution
        bad, pending = BadSamples("validation", self._limit), []
        stream = read(self._batches, self._plans(), run.num_workers, run.prefetch, run.pin_memory)
        for batch in stream:
            batch.ranks = run.ranks
            pending += batch.bad
            if run.ranks == 1 or batch.micro == len(self) - 1:
                count = run.all_reduce({_BAD: float(len(pending))})[_BAD]
                bad.add(pending, round(count), self.samples)
                self.bad, pending = bad.count, []
            yield batch

    def _plans(self) -> Iterator[MicroPlan]:
        run = self.execution
        groups = self._groups()
        for micro in range(len(self)):
            mine: list[int] = []
            for rank in range(run.ranks):
                group = next(groups, [])
                mine = group if rank == run.rank else mine
            yield MicroPlan([[sample] for sample in mine], 0, 0, micro)

    def _groups(self) -> Iterator[list[int]]:
        for start in range(0, self.samples, self._window):
            ids = self._order.indices(0, start, min(start + self._window, self.samples))
            if self._lengths is not None:
                ids = ids[self._lengths[ids].argsort(kind="stable")]
            yield from (ids[at : at + self._rows].tolist() for at in range(0, len(ids), self._rows))
