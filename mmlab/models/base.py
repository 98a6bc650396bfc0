"""What the configuration of every network shape has, and how a tower departs from the common backbone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from mmlab.backbone.config import BackboneConfig
from mmlab.modalities.base import ModalityConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelConfig(ABC):
    """A network shape: stems, one or more backbones, heads."""

    @abstractmethod
    def build(self, backbone: BackboneConfig, modality: dict[str, ModalityConfig]) -> nn.Module:
        """The network, on torch's default device and type, with weights from torch's global generator."""


def tower(backbone: BackboneConfig, name: str, changes: Mapping[str, Any]) -> BackboneConfig:
    """The common `backbone` with the fields that tower `name` has otherwise; ValueError names a wrong one."""
    known = {field.name: field.type for field in fields(BackboneConfig)}
    for key, value in changes.items():
        if key not in known:
            raise ValueError(f"{name}.{key} is not a field of the backbone: {', '.join(known)}")
        if not _fits(value, getattr(backbone, key), str(known[key])):
            raise ValueError(f"{name}.{key} must be {known[key]}, got {value!r}")
    try:
        return replace(backbone, **changes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _fits(value: Any, default: Any, annotation: str) -> bool:
    if value is None:
        return "None" in annotation
    if annotation == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation == "bool":
        return isinstance(value, bool)
    if annotation.startswith("Literal"):
        return f'"{value}"' in annotation or f"'{value}'" in annotation
    return isinstance(value, int) and not isinstance(value, bool)
