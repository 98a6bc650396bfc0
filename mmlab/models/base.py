"""What the configuration of every network shape has, and how a tower departs from the common backbone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmlab.backbone.config import BackboneConfig
from mmlab.modalities.base import ModalityConfig
from mmlab.typed import to_plain, typed

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelConfig(ABC):
    """A network shape: stems, one or more backbones, heads."""

    @abstractmethod
    def build(self, backbone: BackboneConfig, modality: dict[str, ModalityConfig]) -> nn.Module:
        """The network, on torch's default device and type, with weights from torch's global generator."""

    def longest(self) -> int | None:
        """Tokens of the longest sequence that the network can take; None sets no limit."""
        return None


def tower(backbone: BackboneConfig, name: str, changes: Mapping[str, Any]) -> BackboneConfig:
    """The common `backbone` with the fields that tower `name` has otherwise.

    Raises:
        ConfigError: an unknown field, a wrong type or a value that does not fit, by its full path.
    """
    return typed({**to_plain(backbone), **changes}, BackboneConfig, name)
