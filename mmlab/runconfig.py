"""A run's configuration as frozen dataclasses, checked key by key, and the file that keeps it.

Free of torch at import. A config in a run folder is read without Hydra and without any other file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from mmlab.backbone.config import BackboneConfig
from mmlab.callbacks.config import CallbackConfig, LoggerConfig
from mmlab.data.config import DataConfig, accumulation
from mmlab.modalities.base import ModalityConfig
from mmlab.models.adapt import AdaptConfig
from mmlab.models.base import ModelConfig, tower
from mmlab.optim.base import OptimizerConfig
from mmlab.optim.schedule import ScheduleConfig
from mmlab.strategies.config import PrecisionConfig, SingleConfig, StrategyConfig, TrainerConfig
from mmlab.tasks.config import TaskConfig
from mmlab.typed import ConfigError, leaves, to_plain, typed

CONFIG_FILE = "config.yaml"
HOW = {"how": True}


@dataclass(frozen=True)
class PathsConfig:
    """Where a run writes: `runs` gets run folders, `cache` what can be computed again."""

    runs: str = "runs"
    cache: str = ".cache/mmlab"


@dataclass(frozen=True)
class RunConfig:
    """Everything that one training run is, and (the fields marked `how`) how it is executed.

    Fields are checked in this order: those whose classes need torch come last.
    `resume` is `none`, `auto` (the newest run of the same identity) or a run folder.
    """

    name: str = field(metadata=HOW)
    seed: int
    backbone: BackboneConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    precision: PrecisionConfig
    adapt: AdaptConfig
    strategy: StrategyConfig = field(metadata=HOW)
    devices: int = field(metadata=HOW)
    trainer: TrainerConfig = field(metadata=HOW)
    logger: LoggerConfig = field(metadata=HOW)
    paths: PathsConfig = field(metadata=HOW)
    resume: str = field(metadata=HOW)
    modality: dict[str, ModalityConfig]
    model: ModelConfig
    task: TaskConfig
    callbacks: dict[str, CallbackConfig] = field(metadata=HOW)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"name becomes a folder: letters, digits, '_', '-' and '.', got {self.name!r}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.devices < 1:
            raise ValueError(f"devices must be at least 1, got {self.devices}")
        if self.devices > 1 and isinstance(self.strategy, SingleConfig):
            raise ValueError(
                f"devices={self.devices} needs strategy=ddp or strategy=fsdp, got strategy=single"
            )
        accumulation(self.data, self.devices)
        longest = self.model.longest()
        if longest is not None and self.data.max_length > longest:
            raise ValueError(
                f"data.max_length {self.data.max_length} is more than the {longest} positions of the model"
            )
        for entry in fields(self.model):  # a dict in a model is one tower's departures from the backbone
            changes = getattr(self.model, entry.name)
            if isinstance(changes, dict):
                tower(self.backbone, f"model.{entry.name}", changes)


def flat(config: RunConfig) -> dict[str, bool | int | float | str]:
    """Scalars and strings by dotted name, for hyper-parameter tables; every run has the same kind of keys."""
    values = {}
    for path, value in leaves(to_plain(config)):
        name = re.sub(r"[^A-Za-z0-9_./-]", "_", path)
        values[name] = value if isinstance(value, bool | int | float | str) else _text(value)
    return values


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def load_config(folder: str | os.PathLike[str]) -> RunConfig:
    """The configuration of the run in `folder`, from its config.yaml alone.

    Raises:
        ConfigError: no such file, or it does not fit the present code.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        node = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; a run folder holds it") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from error
    return typed(node, RunConfig)


def save_config(config: RunConfig, folder: str | os.PathLike[str]) -> Path:
    """Writes config.yaml into `folder`, whole or not at all; `load_config` gives an equal config back."""
    path = Path(folder) / CONFIG_FILE
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    text = yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


class _Loader(yaml.SafeLoader):
    """Takes `1e-3` for a number, as a person who edits the file does; YAML 1.1 takes it for text."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
