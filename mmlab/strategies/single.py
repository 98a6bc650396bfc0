"""One process on one device."""

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from mmlab.strategies.state import AtomicCheckpointIO, NamedState


class Single(NamedState, SingleDeviceStrategy):
    """Lightning's single-device strategy with this project's checkpoint layout."""

    def __init__(self, device: str) -> None:
        super().__init__(
            device=torch.device(device, 0) if device == "cuda" else torch.device(device),
            checkpoint_io=AtomicCheckpointIO(),
        )
