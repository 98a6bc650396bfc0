"""What every importer shares: a decoder taken from elsewhere, and tables that rename its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import isclose
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmlab.backbone.config import BackboneConfig
from mmlab.models.decoder import Decoder, DecoderConfig

State = dict[str, Tensor]

TRAINING = ("dropout", "init_std", "residual_init")
"""Fields of a backbone's configuration that do not decide the values that it computes from given weights."""

EXPRESSED = (
    "width",
    "depth",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "mlp_size",
    "activation",
    "norm",
    "norm_eps",
    "bias",
    "qk_norm",
    "position",
    "rope_base",
    "window",
)
"""Fields that an exporter writes or checks itself."""

DERIVED = {"num_kv_heads": "kv_heads", "head_size": "key_size", "mlp_size": "inner_size"}
"""Fields that may be null, and where their value stands then."""


class InteropError(ValueError):
    """A checkpoint, or a network, that the other side's layout cannot express exactly."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the other layout: ours joined along the first axis, then transposed if so stored."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def split(self, tensor: Tensor) -> State:
        """Our tensors out of theirs, as copies."""
        tensor = tensor.T if self.transposed else tensor
        parts = tensor.chunk(len(self.ours)) if len(self.ours) > 1 else (tensor,)
        if len(parts) != len(self.ours):
            raise InteropError(f"{self.theirs} of shape {tuple(tensor.shape)} has no {len(self.ours)} parts")
        copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return dict(zip(self.ours, copies, strict=True))

    def join(self, state: Mapping[str, Tensor]) -> Tensor:
        """Their tensor out of ours, as a copy."""
        tensor = torch.cat([state[name] for name in self.ours])
        return tensor.T.contiguous() if self.transposed else tensor


@dataclass(frozen=True)
class ImportedDecoder:
    """A decoder in our terms.

    Args:
        backbone: of the decoder, its overrides applied.
        model: what is not the backbone's.
        size: number of ids.
        state: the state of `Decoder`.
        trained_length: tokens of the longest rows it was trained on, where rotary positions set no limit.
    """

    backbone: BackboneConfig
    model: DecoderConfig
    size: int
    state: State
    trained_length: int | None = None

    def build(self) -> Decoder:
        """The network with these weights, in their type."""
        with _Undrawn():
            decoder = Decoder(self.backbone, self.model, self.size)
        decoder.load_state_dict({name: value.clone() for name, value in self.state.items()}, assign=True)
        return decoder


class _Undrawn(TorchFunctionMode):
    """Leaves weights undrawn that are replaced at once: drawing takes seconds, on the meta device too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "trunc_normal_", "uniform_"):
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def import_state(
    state: Mapping[str, Tensor], entries: Iterable[Entry], head: str, embedding: str, tied: bool
) -> State:
    """Our state dict out of theirs; every key is used exactly once.

    Args:
        state: their tensors, buffers removed.
        entries: all tensors but the output layer.
        head: their key of the output layer; when tied it may be absent, and must else equal the embedding.
        embedding: their key of the embedding.
        tied: whether the output layer is the embedding.

    Raises:
        InteropError: lists missing and unknown keys; or names the tied tensors that differ.
    """
    entries = list(entries) + ([] if tied else [Entry(head, ("head.weight",))])
    known = {entry.theirs for entry in entries}
    missing = sorted(known - state.keys())
    unknown = sorted(state.keys() - known - ({head} if tied else set()))
    if missing or unknown:
        raise InteropError(f"the checkpoint lacks {missing} and has the unknown keys {unknown}")
    if tied and head in state and not torch.equal(state[head], state[embedding]):
        raise InteropError(f"{head} and {embedding} differ, but the configuration ties them")
    ours: State = {}
    for entry in entries:
        ours.update(entry.split(state[entry.theirs]))
    return ours


def export_state(
    state: Mapping[str, Tensor], entries: Iterable[Entry], head: str, embedding: str, tied: bool
) -> State:
    """Their state dict out of ours, the output layer included."""
    theirs = {entry.theirs: entry.join(state) for entry in entries}
    theirs[head] = theirs[embedding].clone() if tied else state["head.weight"].clone()
    return theirs


def checked(imported: ImportedDecoder, expected: BackboneConfig | None) -> ImportedDecoder:
    """`imported`, once its shapes fit its configuration and that is `expected`, if given.

    Raises:
        InteropError: names the tensor and both shapes, or the field and both values.
    """
    with torch.device("meta"), _Undrawn():
        built = Decoder(imported.backbone, imported.model, imported.size).state_dict()
    for name, tensor in built.items():
        given = imported.state[name]
        if given.shape != tensor.shape:
            raise InteropError(
                f"{name}: the checkpoint gives {tuple(given.shape)}, the configuration {tuple(tensor.shape)}"
            )
    if expected is not None:
        same_backbone(imported.backbone, expected)
    return imported


def same_backbone(found: BackboneConfig, expected: BackboneConfig) -> None:
    """InteropError names the first field that makes the two compute different values."""
    for field in fields(BackboneConfig):
        name = DERIVED.get(field.name, field.name)
        ours, wanted = getattr(found, name), getattr(expected, name)
        # Some writers round a configuration to float32.
        near = isinstance(ours, float) and isinstance(wanted, float) and isclose(ours, wanted, rel_tol=1e-6)
        if ours != wanted and not near and field.name not in TRAINING:
            raise InteropError(f"{name}: the checkpoint has {ours!r}, {wanted!r} was asked for")


def plain_backbone(what: str, backbone: BackboneConfig) -> None:
    """InteropError for a field, other than those `EXPRESSED` or of training, that is not at its default."""
    for field in fields(BackboneConfig):
        value = getattr(backbone, field.name)
        if field.name not in (*EXPRESSED, *TRAINING) and value != field.default:
            raise InteropError(f"{what}: {field.name} is {value!r}, only {field.default!r} can be expressed")


def needed(config: Mapping[str, Any], key: str) -> Any:
    """The value of `key`; InteropError if the other side's configuration lacks it."""
    if key not in config:
        raise InteropError(f"the configuration lacks {key!r}")
    return config[key]


def require(what: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """InteropError naming the first of `values` (field: (is, must be)) that differs."""
    for name, (given, needed) in values.items():
        if given != needed:
            raise InteropError(f"{what}: {name} is {given!r}, only {needed!r} can be expressed")
