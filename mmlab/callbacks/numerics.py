"""The sizes of what flows through a network in training, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmlab.backbone.attention import Attention
from mmlab.backbone.masks import Mask
from mmlab.backbone.transformer import Block, Transformer, TransformerOutput
from mmlab.callbacks.attention_numerics import attention_numbers, called_with, queries_and_keys
from mmlab.callbacks.base import Published
from mmlab.callbacks.config import CallbackConfig
from mmlab.callbacks.shards import local, owners, reshard
from mmlab.data.collate import Batch

LOGITS = 1 << 24
"""Logits (numbers) that are held at once."""


@dataclass(frozen=True)
class NumericsConfig(CallbackConfig):
    """Publishes sizes in the network every `every` optimizer steps; the same tags whatever the modality.

    A tower is the path of a `Transformer` in the network. Values are of the whole global batch, tokens of
    padding left out; those with nothing to measure are not published.

    | tag under `numerics/` | value |
    |---|---|
    | `<tower>/block_00/activation_rms` | root mean square of the residual stream after the block |
    | `<tower>/block_00/gradient_rms` | of the gradient of the block's trained parameters, before clipping |
    | `<tower>/block_00/update_rms` | rms of the step's change of these parameters over their own rms |
    | `<tower>/block_00/attention_entropy` | of the weights of a query, mean over heads and queries, in nats |
    | `<tower>/block_00/largest_attention_logit` | largest scaled product of a query and a key that it sees |
    | `embedding/activation_rms`, ... | the first three of a table (its last name); padding counts |
    | `largest_logit` | of the output layer |

    Cross-attention has `cross_attention_entropy` and `largest_cross_attention_logit`.

    Args:
        every: optimizer steps between two measurements; in all others nothing is hooked.
        queries: of a micro-batch, whose attention is looked at, evenly spread.
    """

    every: int = 100
    queries: int = 64

    def __post_init__(self) -> None:
        if self.every < 1 or self.queries < 1:
            raise ValueError(f"every and queries must be at least 1, got {self.every} and {self.queries}")

    def build(self) -> Callback:
        """The callback."""
        return Numerics(self)


@runtime_checkable
class Headed(Protocol):
    """A network that gives logits of a tower's hidden states."""

    backbone: Transformer

    def logits(self, hidden: Tensor) -> Tensor: ...


class Numerics(Callback):
    """Measures by hooks that only read; nothing that the run computes or draws is changed."""

    def __init__(self, config: NumericsConfig) -> None:
        self.config = config
        self._parameters: dict[str, list[nn.Parameter]] = {}
        self._before: dict[str, list[Tensor]] = {}
        self._hooks: list[RemovableHandle] = []
        self._ratios: dict[str, list[float]] = {}
        self._largest: dict[str, float] = {}
        self._seen: set[tuple[str, nn.Module]] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the towers; refuses compiled blocks, whose inside cannot be looked at."""
        if any(block._compiled_call_impl is not None for _, block in _blocks(pl_module)):
            raise ValueError("numerics looks into blocks by hooks: set trainer.compile to false")
        reshard(pl_module)
        parts = [*_blocks(pl_module), *_tables(pl_module)]
        self._parameters = {tag: [] for tag, _ in parts}
        for tag, module in parts:
            self._parameters[tag] += [p for p in module.parameters() if p.requires_grad]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Hooks the network before the first micro-batch of a step that is due."""
        if batch.step % self.config.every:
            return
        self._seen.clear()
        if batch.micro == 0:
            self._unhook()
            self._ratios.clear()
            self._largest.clear()
            self._hook(pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Measures the gradient and keeps the weights."""
        if not self._hooks:
            return
        for tag, parameters in self._parameters.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            for gradient in gradients:
                share = 1 / owners(gradient, trainer.world_size)
                count = local(gradient).numel()
                self._add(f"{tag}/gradient_rms", _squares(local(gradient)) * share, count * share)
            self._before[tag] = [local(p.detach()).clone() for p in parameters]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Measures the update, publishes, and takes the hooks away."""
        if not self._hooks or batch.micro + 1 < batch.accumulation:
            return
        for tag, parameters in self._parameters.items():
            for parameter, before in zip(parameters, self._before[tag], strict=True):
                share = 1 / owners(parameter, trainer.world_size)
                change = local(parameter.detach()).float() - before.float()
                self._add(f"{tag}/update_rms", _squares(change) * share, _squares(before) * share)
        self._unhook()
        cast(Published, pl_module).publish(self._values(trainer, pl_module))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Takes the hooks away."""
        self._unhook()

    # -- hooks --------------------------------------------------------------------------------------------

    def _hook(self, network: nn.Module) -> None:
        """Hooks every module that is looked at, and names what every rank will have a value of."""
        for tag, block in _blocks(network):
            self._watch(block, tag, self._block)
            for kind in ("attention", "cross_attention"):
                attention = getattr(block, kind)
                if isinstance(attention, Attention):
                    self._add(f"{tag}/{kind}_entropy", 0.0, 0.0)
                    self._largest[f"{tag}/largest_{kind}_logit"] = -math.inf
                    self._attention(attention, tag, kind)
        for tag, table in _tables(network):
            self._watch(table, tag, self._table)
        for _, module in network.named_modules():
            if isinstance(module, Headed):
                self._largest["numerics/largest_logit"] = -math.inf
                self._watch(module.backbone, "numerics", self._tower(module))
        for tag in self._parameters:
            for kind in ("activation_rms", "gradient_rms", "update_rms"):
                self._add(f"{tag}/{kind}", 0.0, 0.0)

    def _watch(
        self, module: nn.Module, tag: str, measure: Callable[[str, dict[str, Any], Any], None]
    ) -> None:
        """Calls `measure` after the module's first call in a micro-batch; a recomputation is not another."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if (tag, module) not in self._seen:
                self._seen.add((tag, module))
                with torch.no_grad():
                    measure(tag, called_with(module, args, kwargs), output)

        self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def _block(self, tag: str, call: dict[str, Any], output: Tensor) -> None:
        tokens = _real(output, call["mask"])
        self._add(f"{tag}/activation_rms", _squares(tokens), tokens.numel())

    def _table(self, tag: str, call: dict[str, Any], output: Tensor) -> None:
        self._add(f"{tag}/activation_rms", _squares(output), output.numel())

    def _tower(self, network: Headed) -> Callable[[str, dict[str, Any], TransformerOutput], None]:
        def measure(tag: str, call: dict[str, Any], output: TransformerOutput) -> None:
            tokens_ND = _real(output.hidden_BTD, call.get("mask")).reshape(-1, output.hidden_BTD.shape[-1])
            size = network.logits(tokens_ND[:1]).shape[-1]
            for chunk_ND in tokens_ND.split(max(1, LOGITS // size)):
                if len(chunk_ND):
                    self._raise("numerics/largest_logit", network.logits(chunk_ND).max().item())

        return measure

    def _attention(self, attention: Attention, tag: str, kind: str) -> None:
        parts: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[str, dict[str, Any], Tensor], None]:
            return lambda tag, call, output: parts.update({name: output.detach()})

        def measure(tag: str, call: dict[str, Any], output: Tensor) -> None:
            query, key = parts.pop("query"), parts.pop("key")
            with torch.autocast(query.device.type, enabled=False):
                q_BTHK, k_BSGK = queries_and_keys(attention, query, key, call)
                found = attention_numbers(q_BTHK, k_BSGK, call["mask"], attention.scale, self.config.queries)
            self._add(f"{tag}/{kind}_entropy", found.entropy, found.pairs)
            self._raise(f"{tag}/largest_{kind}_logit", found.largest)

        self._watch(attention.query, tag, keep("query"))
        self._watch(attention.key, tag, keep("key"))
        self._watch(attention, tag, measure)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._before.clear()

    # -- values -------------------------------------------------------------------------------------------

    def _add(self, tag: str, upper: float, lower: float) -> None:
        """Adds to the two sums whose ratio is published (its root, for an rms)."""
        ratio = self._ratios.setdefault(tag, [0.0, 0.0])
        ratio[0] += upper
        ratio[1] += lower

    def _raise(self, tag: str, value: float) -> None:
        self._largest[tag] = max(self._largest[tag], value)

    def _values(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        """Ratios and largest values over all ranks."""
        sums = [value for ratio in self._ratios.values() for value in ratio]
        largest = list(self._largest.values())
        if trainer.world_size > 1:
            sums = _reduced(trainer, module, sums, "sum")
            largest = _reduced(trainer, module, largest, "max")
        values = {}
        for tag, upper, lower in zip(self._ratios, sums[::2], sums[1::2], strict=True):
            if lower:
                values[tag] = math.sqrt(upper / lower) if tag.endswith("_rms") else upper / lower
        pairs = zip(self._largest, largest, strict=True)
        return values | {tag: value for tag, value in pairs if value != -math.inf}


def _blocks(network: nn.Module) -> Iterator[tuple[str, Block]]:
    """Every block of every tower, by its tag."""
    for path, module in network.named_modules():
        if isinstance(module, Transformer):
            tower = path.removeprefix("network.") or "backbone"
            for index, block in enumerate(module.blocks):
                yield f"numerics/{tower}/block_{index:02d}", cast(Block, block)


def _tables(network: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    """Every table of vectors, by its tag; those of one name share it."""
    for path, module in network.named_modules():
        if isinstance(module, nn.Embedding):
            yield f"numerics/{path.rpartition('.')[2]}", module


def _real(tokens_BTD: Tensor, mask: Mask | None) -> Tensor:
    """The tokens that are no padding."""
    if mask is None or mask.padded_BS is None:
        return tokens_BTD
    return tokens_BTD[~mask.padded_BS]


def _squares(tensor: Tensor) -> float:
    """Sum of squares, in float32."""
    return tensor.detach().float().square().sum().item()


def _reduced(trainer: Trainer, module: LightningModule, values: list[float], how: str) -> list[float]:
    packed = torch.tensor(values, dtype=torch.float64, device=module.device)
    result = trainer.strategy.reduce(packed, reduce_op=how)
    assert isinstance(result, Tensor)
    return result.tolist()
