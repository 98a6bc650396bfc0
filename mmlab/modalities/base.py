"""What every modality has: a configuration, and one error for a value that it cannot take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


class EncodingError(ValueError):
    """A raw value of one sample that the modality cannot represent; the message says what and where."""


@dataclass(frozen=True)
class ModalityConfig(ABC):
    """How raw values of one kind become tensors."""

    @abstractmethod
    def build(self) -> Any:
        """The object that encodes and decodes; it holds no weights."""
