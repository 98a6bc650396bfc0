"""Linear maps, norms and the MLP of a block."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlab.backbone.config import BackboneConfig


def compute_dtype(x: Tensor) -> torch.dtype:
    """Type that matrix products of `x` are computed in: autocast's where it is on, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Linear(nn.Linear):
    """Matrix with normal initial weights of standard deviation `std / sqrt(width_factor)` and a zero bias.

    Optimizers read `width_factor` here and divide the weight's learning rate by it. (It stands at the module:
    sharding replaces parameters.)
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, std: float, width_factor: float = 1.0) -> None:
        self.std = std / math.sqrt(width_factor)
        self.width_factor = width_factor
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std) if self.std else nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LayerNorm(nn.LayerNorm):
    """LayerNorm whose statistics are float32 for every input type; the result has the input's type."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """RMSNorm (arXiv:1910.07467) in float32 for every input type; the result has the input's type."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


def norm(config: BackboneConfig) -> nn.Module:
    """The norm of `config` over vectors of `width`."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.width, eps=config.norm_eps)
    return LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh formula (arXiv:1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), the activation of OpenAI's CLIP."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (arXiv:2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu2": relu2,
    "swiglu": F.silu,
}


class MLP(nn.Module):
    """(B, T, D) -> (B, T, D) through an inner size F; `swiglu` multiplies by a gate (arXiv:2002.05202)."""

    def __init__(self, config: BackboneConfig, residual_std: float) -> None:
        super().__init__()
        width, inner, bias, std = config.width, config.inner_size, config.bias, config.init_std
        factor = config.width_factor
        self.activation = ACTIVATIONS[config.activation]
        self.gate = Linear(width, inner, bias, std, factor) if config.activation == "swiglu" else None
        self.up = Linear(width, inner, bias, std, factor)
        self.down = Linear(inner, width, bias, residual_std, factor)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD.to(compute_dtype(x_BTD))
        if self.gate is not None:
            return self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))
        return self.down(self.activation(self.up(x_BTD)))
