"""How a run is executed: devices, strategy, precision and the trainer's rhythm. Free of torch at import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


@dataclass(frozen=True)
class PrecisionConfig:
    """Number types of a run.

    `fp32`: everything in float32. `bf16-mixed`: float32 weights, gradients and optimizer state, matrix
    products in bfloat16 (autocast). `bf16-true`: bfloat16 weights and gradients, optimizer state in float32.
    Norm statistics, softmax, rotary phases and losses are float32 in each of them.
    """

    kind: Literal["fp32", "bf16-mixed", "bf16-true"] = "fp32"

    def build(self, device: str) -> Any:
        """Lightning's precision plugin for device type `device` ('cpu', 'cuda', 'mps')."""
        from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision

        if self.kind == "bf16-mixed":
            return MixedPrecision("bf16-mixed", device)
        return HalfPrecision("bf16-true") if self.kind == "bf16-true" else Precision()


@dataclass(frozen=True)
class StrategyConfig(ABC):
    """Which Lightning strategy spreads a run over devices."""

    @abstractmethod
    def build(self, devices: int, device: str) -> Strategy:
        """The strategy over `devices` processes on devices of type `device`."""


@dataclass(frozen=True)
class SingleConfig(StrategyConfig):
    """One process on one device."""

    def build(self, devices: int, device: str) -> Strategy:
        from mmlab.strategies.single import Single

        if devices != 1:
            raise ValueError(
                f"strategy=single runs on 1 device, got devices={devices}: take strategy=ddp or strategy=fsdp"
            )
        return Single(device)


@dataclass(frozen=True)
class DDPConfig(StrategyConfig):
    """Replicas of the whole model; gradients are averaged while the backward pass runs."""

    gradient_as_bucket_view: bool = True
    static_graph: bool = False

    def build(self, devices: int, device: str) -> Strategy:
        from mmlab.strategies.ddp import DDP

        return DDP(
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )


@dataclass(frozen=True)
class FSDPConfig(StrategyConfig):
    """Weights, gradients and optimizer state sharded block by block (FSDP2, `fully_shard`)."""

    def build(self, devices: int, device: str) -> Strategy:
        from mmlab.strategies.fsdp import FSDP

        return FSDP(data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False)


@dataclass(frozen=True)
class TrainerConfig:
    """The rhythm of a run, in optimizer steps, and its memory and speed switches.

    `validate_every`, `checkpoint_every` and `log_every` count optimizer steps; the last step always
    validates, saves and logs. `keep_last` newest checkpoints are kept, and `keep_best` with the lowest
    `monitor`. `activation_checkpointing` trades time for memory, `compile` compiles each block in place.
    """

    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    validate_every: int = 500
    checkpoint_every: int = 500
    log_every: int = 10
    keep_last: int = 2
    keep_best: int = 1
    monitor: str = "val/loss"
    sanity_batches: int = 1
    activation_checkpointing: bool = False
    compile: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("validate_every", "checkpoint_every", "log_every", "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("keep_best", "sanity_batches"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1 or null, got {self.threads}")
