"""What the configuration of every task has in common, and the parts that a task is built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmlab.backbone.config import BackboneConfig
from mmlab.modalities.base import ModalityConfig
from mmlab.models.adapt import AdaptConfig
from mmlab.models.base import ModelConfig
from mmlab.optim.base import OptimizerConfig
from mmlab.optim.schedule import ScheduleConfig

if TYPE_CHECKING:
    from mmlab.data.collate import Examples
    from mmlab.tasks.base import Task


@dataclass(frozen=True)
class TaskConfig(ABC):
    """Names a training objective: its module, and how raw samples become its examples."""

    @abstractmethod
    def examples(self, modality: dict[str, ModalityConfig], max_length: int) -> Examples:
        """How raw samples become examples of at most `max_length` tokens, for the loader's workers."""

    @abstractmethod
    def task_class(self) -> type[Task]:
        """The LightningModule that trains this objective."""


@dataclass(frozen=True)
class TaskParts:
    """Everything that decides what a task computes; stored as plain types in every checkpoint."""

    backbone: BackboneConfig
    modality: dict[str, ModalityConfig]
    model: ModelConfig
    task: TaskConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    seed: int
    adapt: AdaptConfig = field(default_factory=AdaptConfig)

    def build(self) -> Task:
        """The task; its network is built when the trainer asks for it."""
        return self.task.task_class()(self)
