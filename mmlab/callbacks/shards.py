"""Parameters as each rank holds them: whole, or a part of a sharded one (DTensor)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, which shares the memory of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which each rank has such a part as of `like`; every rank must call it."""
    if not isinstance(like, DTensor):
        return part
    sharded = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()


def part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank has, cut like `like`."""
    if not isinstance(like, DTensor):
        return whole
    sharded = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to_local()


def owners(tensor: Tensor, ranks: int) -> int:
    """How many of `ranks` hold the same part of `tensor` as this one."""
    if not isinstance(tensor, DTensor):
        return ranks
    parts = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            parts *= tensor.device_mesh.size(axis)
    return ranks // parts


def reshard(network: nn.Module) -> None:
    """Frees gathered weights, so that the parameters are the sharded ones and a change of them is seen.

    FSDP2 keeps its root's weights gathered from a forward pass until the backward pass.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
