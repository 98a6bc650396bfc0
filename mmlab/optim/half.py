"""AdamW for parameters kept in a half-width type, with its state in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class HalfAdamW(torch.optim.Optimizer):
    """AdamW whose moments and master weights stay in float32 while the parameters are bfloat16 or float16.

    With beta2 = 0.95 a bfloat16 second moment cannot represent its own update, and a step smaller than
    1/256 of a weight would be lost: the update is computed in float32 on a float32 copy of the weight,
    which is then rounded into the parameter.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    half_adamw_update(parameter, self.state[parameter], group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state and its float32 types."""
        super().load_state_dict(state_dict)
        keep_float32(self, state_dict)


def half_adamw_update(parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One AdamW update of `parameter` from its gradient, in float32; an empty `state` is begun."""
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
    assert parameter.grad is not None
    beta1, beta2 = group["betas"]
    gradient = parameter.grad.float()
    state["step"] += 1
    step = state["step"].item()
    master, average, square = master_weight(parameter, state), state["exp_avg"], state["exp_avg_sq"]
    master.mul_(1 - group["lr"] * group["weight_decay"])
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    spread = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    master.addcdiv_(average, spread, value=-group["lr"] / (1 - beta1**step))
    parameter.copy_(master)


def master_weight(parameter: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The float32 copy of `parameter` in its `state`, made where it is missing."""
    if "master" not in state:
        state["master"] = parameter.detach().to(torch.float32, copy=True)
    return state["master"]


def keep_float32(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Takes state of half-width parameters again, in float32: torch has cast it to the parameters' type."""
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(saved, mine, strict=True):
        if parameter.dtype == torch.float32:
            continue
        for name, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and name != "step":
                optimizer.state[parameter][name] = value.to(parameter.device, torch.float32, copy=True)
