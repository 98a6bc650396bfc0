"""What every importer shares: a decoder taken from elsewhere, and tables that rename its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmlab.backbone.config import BackboneConfig
from mmlab.models.decoder import Decoder, DecoderConfig

State = dict[str, Tensor]

COMPUTED = (
    "width",
    "depth",
    "num_heads",
    "kv_heads",
    "key_size",
    "inner_size",
    "activation",
    "norm",
    "norm_eps",
    "bias",
    "qk_norm",
    "position",
    "rope_base",
    "window",
)
"""What of a backbone's configuration decides the values that it computes."""


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
    """A decoder in our terms: configurations, number of ids, and the state of `Decoder`."""

    backbone: BackboneConfig
    model: DecoderConfig
    size: int
    state: State

    def build(self) -> Decoder:
        """The network with these weights, in their type."""
        decoder = Decoder(self.backbone, self.model, self.size)
        decoder.load_state_dict({name: value.clone() for name, value in self.state.items()}, assign=True)
        return decoder


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
    with torch.device("meta"):
        built = Decoder(imported.backbone, imported.model, imported.size).state_dict()
    for name, tensor in built.items():
        given = imported.state[name]
        if given.shape != tensor.shape:
            raise InteropError(
                f"{name}: the checkpoint gives {tuple(given.shape)}, the configuration {tuple(tensor.shape)}"
            )
    if expected is not None:
        for name in COMPUTED:
            ours, wanted = getattr(imported.backbone, name), getattr(expected, name)
            if ours != wanted:
                raise InteropError(f"{name}: the checkpoint has {ours!r}, {wanted!r} was asked for")
    return imported


def require(what: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """InteropError naming the first of `values` (field: (is, must be)) that differs."""
    for name, (given, needed) in values.items():
        if given != needed:
            raise InteropError(f"{what}: {name} is {given!r}, only {needed!r} can be expressed")
