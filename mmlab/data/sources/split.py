"""Parts of one source, for training, tuning and validation: disjoint, complete, and always the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmlab.data.files import combined_sha256
from mmlab.data.order import Order
from mmlab.data.sources.base import Source, SourceConfig


@dataclass(frozen=True)
class SplitConfig(SourceConfig):
    """One `part` of `source`, whose samples are shared out by the shares in `parts` (they add up to 1).

    Whole samples go to one part or another. Sample counts are exact to rounding: of n samples a part that
    covers the shares a to b holds n * b - n * a, both rounded. `by: shuffled` draws them by a permutation
    that `seed` and the number of samples decide, `by: contiguous` cuts the source in the order of `parts`.
    The same configuration with another `part` reads another part of the same division.
    """

    source: SourceConfig
    parts: dict[str, float]
    part: str
    by: Literal["shuffled", "contiguous"] = "shuffled"
    seed: int = 0

    def __post_init__(self) -> None:
        if any(not share > 0 for share in self.parts.values()):
            raise ValueError(f"every share of parts must be positive, got {self.parts}")
        total = math.fsum(self.parts.values())
        if abs(total - 1) > 1e-9:
            raise ValueError(f"the shares of parts must add up to 1, got {total:g} from {self.parts}")
        if self.part not in self.parts:
            raise ValueError(f"part {self.part!r} is none of {list(self.parts)}")
        if self.source.has_order:
            raise ValueError("a mixture cannot be split: split its sources")

    def build(self, cache: Path | None = None) -> Split:
        """The samples of this part.

        Raises:
            ValueError: if the source has too few samples for the part to hold one.
        """
        return Split(self.source.build(cache), self)


class Split(Source):
    """Samples of one part, in the order of the source they are taken from. Memory grows with the part."""

    def __init__(self, source: Source, config: SplitConfig) -> None:
        self._source, self._config = source, config
        names, size = list(config.parts), len(source)
        shares = list(config.parts.values())
        cuts = [*(math.fsum(shares[:end]) for end in range(len(names))), 1.0]
        place = names.index(config.part)
        start, stop = round(size * cuts[place]), round(size * cuts[place + 1])
        if start >= stop:
            raise ValueError(
                f"part {config.part!r} with a share of {shares[place]:g} of {size} samples is empty"
            )
        self._ids = np.sort(Order(size, config.seed, config.by == "shuffled").indices(0, start, stop))
        self.lengths = None if source.lengths is None else np.asarray(source.lengths[self._ids], np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._source[self._at(index)]

    def name(self, index: int) -> str:
        """What the source calls the sample."""
        return self._source.name(self._at(index))

    def fingerprint(self) -> str:
        """Changes with the source's content and with the division."""
        config = self._config
        parts = repr((list(config.parts.items()), config.part, config.by, config.seed))
        return combined_sha256("split", self._source.fingerprint(), parts)

    def _at(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return int(self._ids[index])
