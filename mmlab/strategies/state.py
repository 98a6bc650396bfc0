"""One layout of weights and optimizer state in a checkpoint, whatever strategy wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class NamedState:
    """Mixin for a Lightning strategy: whole tensors, and optimizer state keyed by parameter name.

    Lightning keys optimizer state by position in one strategy and by name in another; here every strategy
    writes and reads the same, so a run can be resumed under another one. Sharded state is assembled on
    rank 0 and each rank takes its own part of what it reads.
    """

    lightning_module: Any
    optimizers: list[Optimizer]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights by name, on the CPU; empty on the other ranks of a sharded run."""
        return get_model_state_dict(self.lightning_module, options=FULL)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Takes this rank's part of the weights in `checkpoint`."""
        options = StateDictOptions(full_state_dict=True, strict=strict)
        set_model_state_dict(self.lightning_module, dict(checkpoint["state_dict"]), options=options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole optimizer state by parameter name; empty on the other ranks of a sharded run."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state_dict(self.lightning_module, inner, options=FULL)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes this rank's part of the optimizer state in `checkpoint`."""
        options = StateDictOptions(full_state_dict=True)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            set_optimizer_state_dict(self.lightning_module, optimizer, state, options=options)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name and renames it: a reader never sees half a file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves `checkpoint` at `path`; a kill at any moment leaves the old file or the new one."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads plain types and tensors only; tensors are mapped into memory, not copied."""
        return torch.load(path, map_location=map_location or "cpu", weights_only=True, mmap=True)
