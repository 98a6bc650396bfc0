"""Several sources drawn from by weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mmlab.data.files import combined_sha256
from mmlab.data.sources.base import Lengths, Source, SourceConfig

_CHUNK = 1 << 20


@dataclass(frozen=True)
class MixtureConfig(SourceConfig):
    """`sources` by name, drawn from in proportion to their `weights` (positive, of any sum).

    With `unit: samples` the weights are parts of the samples, with `unit: tokens` parts of the sequence axis:
    a source of long samples is drawn from less often, by the mean length of its samples (exact over a pass).
    In training an epoch is as many draws as there are samples in all; small sources are repeated in it, large
    ones go on in the next (see `mmlab.data.mixing`). In validation each sample counts once, weights do not.
    """

    sources: dict[str, SourceConfig]
    weights: dict[str, float]
    unit: Literal["samples", "tokens"] = "samples"

    has_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("a mixture needs at least one source")
        if self.sources.keys() != self.weights.keys():
            raise ValueError(f"weights are given for {list(self.weights)}, sources are {list(self.sources)}")
        for name, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(
                    f"weights.{name} must be positive, got {weight}; leave the source out for none"
                )
        nested = [name for name, source in self.sources.items() if source.has_order]
        if nested:
            raise ValueError(f"sources.{nested[0]} is a mixture itself: put its sources into this one")

    def build(self, cache: Path | None = None) -> Mixture:
        """The samples of all sources, one source after another."""
        built = {name: source.build(cache) for name, source in self.sources.items()}
        return Mixture(built, self.weights, self.unit)


class Mixture(Source):
    """The samples of all components, one component after another; the weights are for whoever orders them."""

    def __init__(self, components: Mapping[str, Source], weights: Mapping[str, float], unit: str) -> None:
        self.components, self.weights, self.unit = dict(components), dict(weights), unit
        self._sources = list(self.components.values())
        self._first = np.cumsum([0, *map(len, self._sources)])
        known = [source.lengths for source in self._sources]
        lengths = [each for each in known if each is not None]
        self.lengths = _Joined(lengths, self._first) if len(lengths) == len(known) else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each component."""
        return tuple(map(len, self._sources))

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, inside = self._place(index)
        return self._sources[number][inside]

    def prepared(self, prepare: Callable[[str, Source], Source]) -> Mixture:
        """The mixture of what `prepare` makes of each component, given its name and itself."""
        ready = {name: prepare(name, source) for name, source in self.components.items()}
        return Mixture(ready, self.weights, self.unit)

    def shares(self) -> tuple[float, ...]:
        """Part of the draws that each component gets, in samples.

        Raises:
            ValueError: if the weights count tokens and a component does not know its lengths or has none.
        """
        rates = [self.weights[name] for name in self.components]
        if self.unit == "tokens":
            rates = [self.weights[name] / self._mean_length(name) for name in self.components]
        return tuple(rate / sum(rates) for rate in rates)

    def name_of(self, index: int) -> str:
        """Name of the component that sample `index` belongs to."""
        return list(self.components)[self._place(index)[0]]

    def name(self, index: int) -> str:
        """The component, and what it calls the sample."""
        number, inside = self._place(index)
        return f"{self.name_of(index)}: {self._sources[number].name(inside)}"

    def fingerprint(self) -> str:
        """Changes with the components' content, their names and order, and with the weights."""
        parts = [part for name, source in self.components.items() for part in (name, source.fingerprint())]
        weights = [float(self.weights[name]) for name in self.components]
        return combined_sha256("mixture", self.unit, repr(weights), *parts)

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        return number, index - int(self._first[number])

    def _mean_length(self, name: str) -> float:
        lengths, count = self.components[name].lengths, len(self.components[name])
        if lengths is None:
            raise ValueError(f"weights by tokens need lengths, which the samples of {name!r} do not have")
        chunks = (np.arange(at, min(at + _CHUNK, count)) for at in range(0, count, _CHUNK))
        total = sum(int(np.sum(lengths[ids])) for ids in chunks)
        if not total:
            raise ValueError(
                f"weights by tokens need lengths, and all {count} samples of {name!r} have length 0"
            )
        return total / count


class _Joined:
    """Lengths of several sources as those of one."""

    def __init__(self, parts: Sequence[Lengths | NDArray[np.int64]], first: NDArray[np.int64]) -> None:
        self._parts, self._first = parts, first

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, ids: Any) -> Any:
        if isinstance(ids, slice):
            ids = np.arange(*ids.indices(len(self)))
        ids = np.asarray(ids)
        numbers = np.searchsorted(self._first, ids, side="right") - 1
        out = np.zeros(ids.shape, np.int64)
        for number, part in enumerate(self._parts):
            mine = numbers == number
            if mine.any():
                out[mine] = part[ids[mine] - self._first[number]]
        return out if out.ndim else int(out)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)
