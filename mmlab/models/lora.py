"""Low-rank updates of matrices, and which parameters of a network are trained."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlab.backbone.layers import Linear
from mmlab.models.adapt import AdaptConfig, LoRAConfig

NAMES = ("lora_a", "lora_b")


class LoRALinear(Linear):
    """A matrix W with a low-rank update (arXiv:2106.09685): x -> W x + bias + alpha / rank * B A x.

    The update is two further parameters, `lora_a` (rank, inputs) and `lora_b` (outputs, rank), in the type
    and on the device of W; dropout acts on its input. A is drawn uniformly from -1 / sqrt(inputs) to
    1 / sqrt(inputs), B is zero: before the first step the module computes exactly what W did.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float
    dropout: float

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        update = F.linear(F.linear(dropped, self.lora_a), self.lora_b)
        return super().forward(x) + self.scale * update


class ParameterCounts(NamedTuple):
    """Numbers (of weights, not of tensors) that are trained and that are not."""

    trained: int
    frozen: int


def add_lora(network: nn.Module, config: LoRAConfig) -> list[str]:
    """Gives matrices low-rank updates, in place; returns the modules' names. Existing keys keep their names.

    Call it before sharding and before the optimizer is built; `set_trained` says what is trained.

    Args:
        network: its modules of type `Linear` whose names match `config.targets` get an update.
        config: rank, scale, targets, dropout.

    Raises:
        ValueError: a pattern matches no `Linear`, a matrix has an update already, or is smaller than the
            rank.
    """
    matrices = {name: module for name, module in network.named_modules() if isinstance(module, Linear)}
    every = {name: type(module).__name__ for name, module in network.named_modules()}
    chosen: set[str] = set()
    for pattern in config.targets:
        matched = {name for name in matrices if fnmatchcase(name, pattern)}
        if not matched:
            others = sorted({kind for name, kind in every.items() if fnmatchcase(name, pattern)})
            reason = f" (those that it matches are of type {', '.join(others)})" if others else ""
            raise ValueError(f"targets: {pattern!r} matches no Linear{reason}{_near(pattern, matrices)}")
        chosen |= matched
    names = [name for name in matrices if name in chosen]
    for name in names:
        module = matrices[name]
        if isinstance(module, LoRALinear):
            raise ValueError(f"{name} has a low-rank update already")
        if config.rank > min(module.weight.shape):
            raise ValueError(f"rank {config.rank} is more than the matrix {name} has: {_shape(module)}")
    for name in names:
        _extend(matrices[name], config)
    return names


def merge_lora(network: nn.Module) -> list[str]:
    """Folds every low-rank update into its matrix, in place; returns the modules' names.

    Sums are taken in float32 at least and rounded to the matrix's type. The network then has the modules and
    keys that it had before `add_lora`. Not for a sharded network.
    """
    names = []
    for name, module in network.named_modules():
        if isinstance(module, LoRALinear):
            with torch.no_grad():
                exact = torch.promote_types(module.weight.dtype, torch.float32)
                update = module.lora_b.to(exact) @ module.lora_a.to(exact)
                module.weight.copy_(module.weight.to(exact) + module.scale * update)
            for parameter in NAMES:
                delattr(module, parameter)
            del module.scale, module.dropout
            cast(nn.Module, module).__class__ = Linear
            names.append(name)
    return names


def set_trained(network: nn.Module, config: AdaptConfig) -> ParameterCounts:
    """Sets `requires_grad` of every parameter.

    All are trained, or with `config.lora` the low-rank updates alone; without those that `freeze` names;
    and those that `train` names whatever else is said.

    Raises:
        ValueError: a pattern matches no parameter, `lora` is given but there are no updates, or nothing is
            left to train.
    """
    parameters = dict(network.named_parameters())
    updates = {name for name in parameters if name.rpartition(".")[2] in NAMES}
    if config.lora is not None and not updates:
        raise ValueError("lora is given, but the network has no low-rank updates: call add_lora first")
    frozen = _matched("freeze", config.freeze, parameters)
    wanted = _matched("train", config.train, parameters)
    base = set(parameters) if config.lora is None else updates
    trained = (base - frozen) | wanted
    if not trained:
        raise ValueError(f"freeze {list(config.freeze)} leaves nothing to train")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
    count = sum(parameters[name].numel() for name in trained)
    return ParameterCounts(count, sum(parameter.numel() for parameter in parameters.values()) - count)


def _extend(module: Linear, config: LoRAConfig) -> None:
    """Makes `module` a LoRALinear. The object stays the same: what refers to it or hooks it still does."""
    outputs, inputs = module.weight.shape
    a, b = module.weight.new_empty(config.rank, inputs), module.weight.new_zeros(outputs, config.rank)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    extended = cast(LoRALinear, module)
    extended.__class__ = LoRALinear
    extended.lora_a, extended.lora_b = nn.Parameter(a), nn.Parameter(b)
    extended.scale, extended.dropout = config.alpha / config.rank, config.dropout


def _matched(field: str, patterns: Sequence[str], names: Iterable[str]) -> set[str]:
    known, found = list(names), set()
    for pattern in patterns:
        matched = {name for name in known if fnmatchcase(name, pattern)}
        if not matched:
            raise ValueError(f"{field}: {pattern!r} matches no parameter{_near(pattern, known)}")
        found |= matched
    return found


def _near(pattern: str, names: Iterable[str]) -> str:
    known = list(names)
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
    return f"; near names are {', '.join(close)}" if close else f"; the first of {len(known)}: {known[:3]}"


def _shape(module: Linear) -> str:
    return " x ".join(map(str, module.weight.shape))
