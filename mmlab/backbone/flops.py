"""Parameters, bytes and floating-point operations of a transformer, from its configuration alone.

Convention: a multiply and an add are two operations; only matrix products count; attention counts all T x T
pairs whether or not a mask hides them; backward costs twice the forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmlab.backbone.config import BackboneConfig


@dataclass(frozen=True)
class Cost:
    """Size and cost of a network: `parameters` (tied ones once) and `forward_flops` of one call."""

    parameters: int
    forward_flops: int

    @property
    def training_flops(self) -> int:
        """Operations of forward and backward."""
        return 3 * self.forward_flops

    def bytes(self, bytes_each: int = 4) -> int:
        """Bytes of the weights."""
        return self.parameters * bytes_each

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.parameters + other.parameters, self.forward_flops + other.forward_flops)


def linear_cost(inputs: int, outputs: int, bias: bool, tokens: int) -> Cost:
    """Cost of one matrix applied to `tokens` vectors."""
    return Cost(inputs * outputs + (outputs if bias else 0), 2 * inputs * outputs * tokens)


def norm_cost(config: BackboneConfig) -> Cost:
    """Cost of one norm over `width`."""
    return Cost(config.width * (2 if config.norm == "layernorm" and config.bias else 1), 0)


def attention_cost(config: BackboneConfig, B: int, T: int, S: int | None = None) -> Cost:
    """Cost of one attention of T queries to S keys a row (None: to themselves)."""
    S = T if S is None else S
    heads, kv = config.num_heads * config.key_size, config.kv_heads * config.key_size
    cost = linear_cost(config.width, heads, config.bias, B * T)
    cost += linear_cost(config.width, kv, config.bias, B * S)
    cost += linear_cost(config.width, kv, config.bias, B * S)
    cost += linear_cost(heads, config.width, config.bias, B * T)
    return cost + Cost(2 * config.key_size if config.qk_norm else 0, 4 * B * T * S * heads)


def mlp_cost(config: BackboneConfig, tokens: int) -> Cost:
    """Cost of one MLP over `tokens` vectors."""
    cost = linear_cost(config.width, config.inner_size, config.bias, tokens)
    if config.activation == "swiglu":
        cost += linear_cost(config.width, config.inner_size, config.bias, tokens)
    return cost + linear_cost(config.inner_size, config.width, config.bias, tokens)


def transformer_cost(config: BackboneConfig, B: int, T: int, S: int | None = None) -> Cost:
    """Cost of a `Transformer` over B rows of T tokens; with cross-attention to S memory tokens if given."""
    block = norm_cost(config) + attention_cost(config, B, T) + norm_cost(config) + mlp_cost(config, B * T)
    if S is not None:
        block += norm_cost(config) + attention_cost(config, B, T, S)
    total = norm_cost(config)
    for _ in range(config.depth):
        total += block
    return total
