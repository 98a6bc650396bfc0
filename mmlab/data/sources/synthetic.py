"""Made-up sequences of uneven length, for tests and for measuring everything but the data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.data.files import combined_sha256
from mmlab.data.order import sample_generator
from mmlab.data.sources.base import BadSampleError, Source, SourceConfig


@dataclass(frozen=True)
class SyntheticConfig(SourceConfig):
    """`size` sequences of `shortest` to `longest` ids below `vocabulary`; those in `bad` are unusable."""

    size: int
    shortest: int = 1
    longest: int = 32
    vocabulary: int = 26
    seed: int = 0
    bad: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.shortest <= self.longest:
            raise ValueError(f"shortest must lie in 0..longest ({self.longest}), got {self.shortest}")
        if self.size < 1 or self.vocabulary < 1:
            raise ValueError(f"size and vocabulary must be at least 1, got {self.size} and {self.vocabulary}")

    def build(self, cache: Path | None = None) -> Synthetic:
        """The sequences."""
        return Synthetic(self)


class Synthetic(Source):
    """{"tokens": int64 (n + 1,), "text": str of n + 1 letters}; `lengths` holds n, the targets."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        draws = sample_generator(config.seed, 0, 0).integers(config.shortest, config.longest + 1, config.size)
        self.lengths: NDArray[np.int64] = draws.astype(np.int64)
        self._bad = frozenset(config.bad)

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self._bad:
            raise BadSampleError(f"synthetic sample {index} is bad by configuration")
        generator = sample_generator(self.config.seed, 1, index)
        tokens = generator.integers(0, self.config.vocabulary, int(self.lengths[index]) + 1)
        return {"tokens": tokens, "text": "".join(chr(97 + token % 26) for token in tokens.tolist())}

    def fingerprint(self) -> str:
        """Changes with the configuration."""
        return combined_sha256("synthetic", repr(self.config))
