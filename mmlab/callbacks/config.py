"""What the configuration of every callback and of the loggers has in common. Free of torch at import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback


@dataclass(frozen=True)
class CallbackConfig(ABC):
    """Configures one callback of a run."""

    @abstractmethod
    def build(self) -> Callback:
        """The callback."""


@dataclass(frozen=True)
class LoggerConfig:
    """Where a run's numbers go, inside its run folder: TensorBoard events and a CSV file."""

    tensorboard: bool = True
    csv: bool = True
