"""What every source of samples has in common. Free of torch, so that configurations import at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class BadSampleError(ValueError):
    """One sample cannot be used (undecodable, cut off, missing); the others can.

    The message names the file and what is wrong with it. Loaders count such samples, name them in the log
    and leave a hole up to a limit; any other exception is a bug and ends the run.
    """


class BadSample(NamedTuple):
    """A sample that was left out, and why."""

    id: int
    reason: str


class Lengths(Protocol):
    """Length of each sample along the sequence axis: an integer array, or something indexed like one."""

    def __len__(self) -> int: ...

    def __getitem__(self, ids: Any, /) -> Any: ...


class Source(ABC):
    """Random access to raw samples. It never shuffles, keeps no state, knows no model, and can be pickled."""

    lengths: Lengths | NDArray[np.int64] | None = None
    """Units of the sequence axis of every sample, known before anything is decoded; None if they are not."""

    bad: Sequence[BadSample] = ()
    """What could not be used when the source was prepared, by the ids of the source it was made from."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample `index` (0-based) as named raw values; BadSampleError if this one cannot be used."""

    def batch(self, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]] | None:
        """Samples `ids` at once, stacked along a first axis; None where this cannot be had cheaper.

        What it gives is equal to the stacked samples, fields that no example needs aside.
        """
        return None

    def name(self, index: int) -> str:
        """What sample `index` is called in messages: its file where it has one."""
        return f"sample {index}"

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the content, the same wherever it lies."""


@dataclass(frozen=True)
class SourceConfig(ABC):
    """Names a source of samples and how to read it."""

    has_order: ClassVar[bool] = False
    """Whether it says in what order and how often its samples are drawn, which no wrapper can keep."""

    @abstractmethod
    def build(self, cache: Path | None = None) -> Source:
        """The source. Indices and hashes of large files are kept under `cache` when it is given."""
