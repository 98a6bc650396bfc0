"""Replicas of the whole model on every device."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from mmlab.strategies.state import AtomicCheckpointIO, NamedState


class DDP(NamedState, DDPStrategy):
    """Lightning's DDP with this project's checkpoint layout."""

    def __init__(self, **options: Any) -> None:
        super().__init__(checkpoint_io=AtomicCheckpointIO(), **options)
