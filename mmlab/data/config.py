"""What is read and how it is cut into optimizer steps. Free of torch at import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmlab.data.sources.base import SourceConfig

_HOW = {"how": True}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Sources, and the global batch that every optimizer step takes from them.

    `batch_size` counts one optimizer step over all ranks, in samples (`unit: samples`) or in places of the
    padded batch (`unit: tokens`). `micro_batch_size`, in the same unit, is what one rank holds at once; null
    means batch_size / ranks. The number of micro-batches that a rank accumulates follows from the two.

    Batching: `padded` takes the next `batch_size` samples; `packed` fills rows of `max_length` places with
    several samples each; `bucketed` puts samples of like length together, as many as fit `batch_size` when
    padded to the longest. The last two plan ahead from the lengths of `window` samples of the shuffled order.
    A bucketed step is divided by whole samples: a micro-batch of it may take more than `micro_batch_size`
    places, but always fewer than micro_batch_size + its step's longest sample.

    `bad_samples` is how many samples may prove unusable in one pass over the data: each is named in the log
    and leaves a hole; one more ends the run. 0 ends it at the first, null never. Where documents are
    tokenized first, the limit is applied to those left out only after the whole source has been tokenized.

    `validation_samples` validates on that many samples, drawn once for the run; null takes all.
    """

    train: SourceConfig
    batch_size: int
    max_length: int
    validation: SourceConfig | None = None
    batching: Literal["padded", "packed", "bucketed"] = "padded"
    unit: Literal["samples", "tokens"] = "samples"
    window: int = 4096
    shuffle: bool = True
    shuffle_block: int | None = None
    validation_samples: int | None = None
    bad_samples: int | None = 0
    micro_batch_size: int | None = field(default=None, metadata=_HOW)
    validation_micro_batch_size: int | None = field(default=None, metadata=_HOW)
    num_workers: int = field(default=0, metadata=_HOW)
    prefetch: int = field(default=2, metadata=_HOW)

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_length", "window", "prefetch"):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "shuffle_block",
            "validation_samples",
            "micro_batch_size",
            "validation_micro_batch_size",
        ):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("num_workers", self.num_workers, 0)
        if self.bad_samples is not None:
            _at_least("bad_samples", self.bad_samples, 0)
        unit = "samples" if self.batching == "padded" else "tokens"
        if self.unit != unit:
            raise ValueError(
                f"batching {self.batching!r} counts batch_size ({self.batch_size}) in {unit}, "
                f"but unit is {self.unit!r}"
            )
        if self.batching == "packed":
            for name in ("batch_size", "micro_batch_size", "validation_micro_batch_size"):
                self._check_rows(name)
        if self.batching == "bucketed":
            for name in ("batch_size", "micro_batch_size"):
                value = getattr(self, name)
                if value is not None and value < self.max_length:
                    raise ValueError(
                        f"{name} {value} has no room for one sample of max_length {self.max_length}"
                    )
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            )

    @property
    def row_size(self) -> int:
        """Units of `batch_size` that the smallest part of a batch takes: max_length when packed, else 1."""
        return self.max_length if self.batching == "packed" else 1

    def _check_rows(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and value % self.max_length:
            raise ValueError(
                f"{name} {value} is not a multiple of max_length {self.max_length}: packed rows are whole"
            )


def accumulation(config: DataConfig, ranks: int) -> int:
    """Micro-batches that every one of `ranks` ranks accumulates in an optimizer step.

    Raises:
        ValueError: if the global batch cannot be split that way; names the numbers.
    """
    _at_least("ranks", ranks, 1)
    size, row = config.batch_size, config.row_size
    share = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if config.micro_batch_size is None:
        if size % (ranks * row):
            rows = f" rows of max_length {row}" if row > 1 else ""
            raise ValueError(f"data.batch_size {size} cannot be split evenly over {share}{rows}")
        if config.batching == "bucketed" and size // ranks < config.max_length:
            raise ValueError(
                f"data.batch_size {size} over {share} leaves {size // ranks}, no room for one sample of "
                f"data.max_length {config.max_length}"
            )
        return 1
    per_round = ranks * config.micro_batch_size
    if size % per_round:
        raise ValueError(
            f"data.batch_size {size} is not a multiple of {per_round} = {share} x data.micro_batch_size "
            f"{config.micro_batch_size}"
        )
    return size // per_round


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
