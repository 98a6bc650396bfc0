"""How the blocks of any network are recomputed, compiled and sharded."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from mmlab.backbone.transformer import Block, Transformer


def apply_plan(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    activation_checkpointing: bool = False,
    compile: bool = False,
    **sharding: Any,
) -> None:
    """Changes how `model` is executed, in place; neither results nor state-dict keys change.

    Args:
        model: any network; its blocks are found by type.
        mesh: data-parallel mesh over which each block, then the rest, is sharded (FSDP2); None for none.
        activation_checkpointing: blocks keep their input only and recompute the rest in backward.
        compile: each block is compiled at its first call, and once for each new shape.
        sharding: further arguments of `fully_shard`, such as `mp_policy`.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.activation_checkpointing = activation_checkpointing
        if compile:
            block.compile()
        if mesh is not None:
            fully_shard(block, mesh=mesh, **sharding)
    if compile:
        for module in model.modules():
            if isinstance(module, Transformer):
                # Host-side spans would be compiled anew for every layout of documents.
                module.spans = False
    if mesh is not None:
        fully_shard(model, mesh=mesh, **sharding)
