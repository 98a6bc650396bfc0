"""What every evaluation of a language model has in common. Free of torch at import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.typed import TARGET, to_plain

if TYPE_CHECKING:
    from mmlab.inference.model import LanguageModel

Progress = Callable[[int, int], None]
"""Told how much is done, and of how much."""


@dataclass(frozen=True)
class Execution:
    """How an evaluation is run; beyond rounding, none of it changes a number.

    Args:
        batch_tokens: tokens of a batch, padding included; a longer row is a batch of its own.
        autocast: matrix products in bfloat16; otherwise in the type of the weights.
        progress: told after every batch.
    """

    batch_tokens: int = 16384
    autocast: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {self.batch_tokens}")


DEFAULT = Execution()


@dataclass(frozen=True)
class Result:
    """What an evaluation found.

    Attributes:
        metrics: by name; `name/group` is the same over one group of the items.
        counts: what was measured, and what could not be.
        items: one for each sample, with its id (the number of its row or document), so that the metrics can
            be computed again and two models be compared item by item.
        data: fingerprint of what was measured, by content.
    """

    metrics: dict[str, float]
    counts: dict[str, int]
    items: list[dict[str, Any]]
    data: str


@dataclass(frozen=True)
class EvaluationConfig(ABC):
    """Measures something on a language model."""

    @abstractmethod
    def run(self, model: LanguageModel, cache: Path, execution: Execution = DEFAULT) -> Result:
        """Metrics, counts and items; the model's mode and torch's random state are left as they were.

        Args:
            model: what is measured.
            cache: folder for what can be computed again.
            execution: how it is run.
        """

    @abstractmethod
    def label(self) -> str:
        """A name for the results' folder, where none is given."""


def described(evaluation: EvaluationConfig) -> dict[str, Any]:
    """An evaluation as plain types; `_target_` names its kind."""
    cls = type(evaluation)
    return {TARGET: f"{cls.__module__}.{cls.__qualname__}", **to_plain(evaluation)}


def file_label(path: str) -> str:
    """The name of a file without its endings."""
    return Path(path).name.split(".")[0] or "evaluation"
