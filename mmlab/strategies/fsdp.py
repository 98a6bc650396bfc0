"""Weights, gradients and optimizer state sharded over devices (FSDP2)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, Strategy

from mmlab.strategies.state import AtomicCheckpointIO, NamedState


class FSDP(NamedState, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy with this project's checkpoint layout.

    The parent reads and writes checkpoints by itself, in a layout of its own; here the trainer's ordinary
    path is used, as under every other strategy.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.checkpoint_io = AtomicCheckpointIO()

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only=weights_only)
