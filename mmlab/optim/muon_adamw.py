"""One optimizer of two algorithms: groups marked `muon` and groups marked `adamw`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from mmlab.optim.half import half_adamw_update, keep_float32, master_weight
from mmlab.optim.orthogonal import fast_type, newton_schulz

BATCH = 1 << 26
"""Numbers of the matrices that are made orthogonal at once; bounds memory."""


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW in one, with state by parameter and plain values in the groups.

    Matrices of equal shape are made orthogonal together. Of a sharded matrix (DTensor)
    every rank gathers the whole averaged gradient, makes it orthogonal and updates its own part. Parameters
    in a half-width type have momentum, moments and a master copy in float32.

    Args:
        groups: each with `params`, `lr`, `weight_decay`, `algorithm`, and `momentum`, `nesterov`, `scale` (of
            `muon`) or `betas`, `eps`, `fused` (of `adamw`).
        steps: Newton-Schulz iterations.
        type: what they are computed in (`MuonConfig.newton_schulz_type`).
    """

    def __init__(
        self, groups: list[dict[str, Any]], steps: int, type: Literal["auto", "bfloat16", "float32"]
    ) -> None:
        super().__init__(groups, {})
        self.steps = steps
        self.type = type

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["algorithm"] == "muon":
                for batch in _batches(trained):
                    self._muon(batch, group)
            else:
                self._adamw(trained, group)
        return loss

    def _muon(self, batch: list[Tensor], group: dict[str, Any]) -> None:
        """Updates matrices of one shape."""
        updates = self._averages(batch, group)
        device, shape = updates[0].device, batch[0].shape
        dtype = fast_type(device) if self.type == "auto" else getattr(torch, self.type)
        stacked_NAB = torch.empty(len(batch), *shape, dtype=dtype, device=device)
        for place_AB, update, parameter in zip(stacked_NAB, updates, batch, strict=True):
            place_AB.copy_(_whole(update.to(dtype) if isinstance(parameter, DTensor) else update, parameter))
        results = newton_schulz(stacked_NAB, self.steps).float().unbind()
        half = batch[0].dtype != torch.float32
        weights = [_local(master_weight(p, self.state[p]) if half else p) for p in batch]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        parts = [_part(result, parameter) for result, parameter in zip(results, batch, strict=True)]
        torch._foreach_add_(weights, parts, alpha=-group["lr"] * _scale(group["scale"], *shape))
        if half:
            torch._foreach_copy_([_local(parameter) for parameter in batch], weights)

    def _averages(self, batch: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Takes the gradients into the momentum; returns this rank's part of what is made orthogonal."""
        for parameter in batch:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
        gradients = [_local(parameter.grad).float() for parameter in batch]
        averages = [_local(self.state[parameter]["momentum_buffer"]) for parameter in batch]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            averages = list(torch._foreach_lerp(gradients, averages, group["momentum"]))
        return averages

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        exact = [parameter for parameter in parameters if parameter.dtype == torch.float32]
        for parameter in parameters:
            if parameter.dtype != torch.float32:
                half_adamw_update(parameter, self.state[parameter], group)
        for parameter in exact:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in exact]
        if not exact:
            return
        beta1, beta2 = group["betas"]
        adamw(
            [_local(parameter) for parameter in exact],
            [_local(parameter.grad) for parameter in exact],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state and its float32 types."""
        super().load_state_dict(state_dict)
        keep_float32(self, state_dict)


def _batches(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of one shape, type and device; at most `BATCH` numbers, or one matrix, at a time."""
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for matrix in matrices:
        kinds.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(matrix)
    for members in kinds.values():
        count = max(BATCH // max(members[0].numel(), 1), 1)
        for start in range(0, len(members), count):
            yield members[start : start + count]


def _scale(kind: str, outputs: int, inputs: int) -> float:
    if kind == "original":
        return math.sqrt(max(1.0, outputs / inputs))
    return 0.2 * math.sqrt(max(outputs, inputs))


def _local(tensor: Tensor | None) -> Tensor:
    """This rank's part; a change in place changes the tensor."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor, gathered where `like` is sharded."""
    if not isinstance(like, DTensor):
        return part
    sharded = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, which every rank has, where `like` is sharded."""
    if not isinstance(like, DTensor):
        return whole
    sharded = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to_local()
