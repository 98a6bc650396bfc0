"""Weights out of run folders, checkpoint files and Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from mmlab.backbone.config import BackboneConfig
from mmlab.interop.huggingface import CONFIG, import_decoder
from mmlab.interop.tensors import load_pickled
from mmlab.interop.weights import ImportedDecoder, InteropError, State, same_backbone
from mmlab.models.adapt import AdaptConfig
from mmlab.models.base import ModelConfig, tower
from mmlab.models.decoder import Decoder, DecoderConfig
from mmlab.typed import typed

Which = Literal["best", "last"]
CHECKPOINTS = "checkpoints"
NETWORK = "network."
LORA = (".lora_a", ".lora_b")


class Checkpoint(NamedTuple):
    """The file that was read, the state of its network, and the parts of its task as plain types."""

    file: Path
    state: State
    parts: dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """Weights of a network, from wherever they were.

    Args:
        state: by our names; those of a checkpoint are mapped from its file.
        backbone: of the decoder, its overrides applied; None for another network.
        model: what is not the backbone's; None for a network that is no decoder.
        size: number of ids; None for a network that is no decoder.
        source: file or folder that was read.
    """

    state: State
    backbone: BackboneConfig | None
    model: DecoderConfig | None
    size: int | None
    source: Path

    def decoder(self) -> ImportedDecoder:
        """The decoder, for `export_folder`; InteropError if these are weights of another network."""
        if self.backbone is None or self.model is None or self.size is None:
            raise InteropError(f"{self.source} holds no decoder")
        return ImportedDecoder(self.backbone, replace(self.model, decoder={}), self.size, self.state)


def is_huggingface(path: Path) -> bool:
    """Whether `path` is a folder in Hugging Face's layout."""
    return (path / CONFIG).is_file()


def read_weights(
    path: str | Path, *, which: Which = "best", ema: bool = False, merge: bool = True
) -> Weights:
    """The weights at `path`.

    Args:
        path: a run folder, a checkpoint file, or a Hugging Face folder.
        which: which checkpoint of a run folder; a run without a best has its last read.
        ema: the averaged weights, from a checkpoint that has them.
        merge: low-rank updates are merged into the weights; else they keep their names.

    Raises:
        InteropError: names the path and what is missing, cut off or foreign there.
    """
    place = Path(path)
    if is_huggingface(place):
        if ema:
            raise InteropError(f"{place} is a Hugging Face folder: it has no averaged weights")
        found = import_decoder(place)
        return Weights(found.state, found.backbone, found.model, found.size, place)
    file, state, parts = read_checkpoint(place, which=which, ema=ema, merge=merge)
    model = typed(parts["model"], ModelConfig, f"{file}: model")  # type: ignore[type-abstract]
    if not isinstance(model, DecoderConfig):
        return Weights(state, None, None, None, file)
    common = typed(parts["backbone"], BackboneConfig, f"{file}: backbone")
    backbone = tower(common, f"{file}: model.decoder", model.decoder)
    return Weights(state, backbone, model, len(_named(state, "stem.embedding.weight", file)), file)


def read_checkpoint(
    path: str | Path, *, which: Which = "best", ema: bool = False, merge: bool = True
) -> Checkpoint:
    """The network's state out of a run folder or a checkpoint file; arguments are those of `read_weights`.

    Raises:
        InteropError: names the path and what is missing, cut off or foreign there.
    """
    file = find_checkpoint(Path(path), which)
    content = load_pickled(file)
    stored, parameters = content.get("state_dict"), content.get("hyper_parameters")
    parts = parameters.get("parts") if isinstance(parameters, Mapping) else None
    if not isinstance(stored, Mapping) or not isinstance(parts, Mapping) or "model" not in parts:
        raise InteropError(
            f"{file} is no checkpoint of a run: it needs state_dict and hyper_parameters.parts.model, "
            f"and holds {sorted(map(str, content))}"
        )
    foreign = sorted(name for name in stored if not name.startswith(NETWORK))
    if foreign or not stored:
        raise InteropError(f"{file}: weights begin with {NETWORK!r}, but there are {foreign[:5]}")
    state = {name.removeprefix(NETWORK): value for name, value in stored.items()}
    if ema:
        state |= _averaged(content, state, file)
    plain = {str(name): value for name, value in parts.items()}
    adapt = typed(plain.get("adapt") or {}, AdaptConfig, f"{file}: adapt")
    if merge and any(name.endswith(LORA) for name in state):
        if adapt.lora is None:
            raise InteropError(f"{file} has low-rank updates, but its parts name no adapt.lora")
        state = merge_updates(state, adapt.lora.rank, adapt.lora.alpha)
    return Checkpoint(file, state, plain)


def find_checkpoint(path: Path, which: Which = "best") -> Path:
    """The checkpoint file that `path` (a file, or a run folder) stands for.

    Raises:
        InteropError: says what is missing.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise InteropError(f"{path} does not exist")
    folder = path / CHECKPOINTS
    names = ["best.ckpt", "last.ckpt"] if which == "best" else ["last.ckpt"]
    if not folder.is_dir():
        raise InteropError(f"{path} is neither a run folder (no {CHECKPOINTS}) nor has it a {CONFIG}")
    for name in names:
        file = folder / name
        if file.is_symlink() and not file.exists():
            raise InteropError(f"{file} points to {file.readlink()}, which does not exist")
        if file.is_file():
            return file
    raise InteropError(f"{folder} has no {' and no '.join(names)}")


def merge_updates(state: Mapping[str, torch.Tensor], rank: int, alpha: float) -> State:
    """Every matrix W with a low-rank update becomes W + alpha / rank * B A, in its own number type.

    Args:
        state: matrices `<module>.weight` (out, in), `<module>.lora_a` (rank, in) and `.lora_b` (out, rank).
        rank: inner size of the updates.
        alpha: scale of the updates.

    Raises:
        InteropError: half an update, one without a matrix, or shapes that do not fit.
    """
    merged = {name: value for name, value in state.items() if not name.endswith(LORA)}
    for module in sorted({name.rpartition(".")[0] for name in state if name.endswith(LORA)}):
        names = [f"{module}.weight", *(f"{module}{kind}" for kind in LORA)]
        missing = [name for name in names if name not in state]
        if missing:
            raise InteropError(f"the low-rank update of {module} lacks {missing}")
        weight, a, b = (state[name] for name in names)
        if a.shape != (rank, weight.shape[1]) or b.shape != (weight.shape[0], rank):
            raise InteropError(
                f"the update of {module} has A {tuple(a.shape)} and B {tuple(b.shape)}, which do not fit "
                f"rank {rank} and the matrix {tuple(weight.shape)}"
            )
        exact = torch.promote_types(weight.dtype, torch.float32)
        update = b.to(exact) @ a.to(exact)
        merged[names[0]] = (weight.to(exact) + alpha / rank * update).to(weight.dtype)
    return merged


def load_weights(network: nn.Module, path: str | Path, backbone: BackboneConfig) -> None:
    """Copies the weights at `path` into `network`, which keeps its number type.

    Args:
        network: built, neither sharded nor compiled, without low-rank updates.
        path: as in `read_weights`.
        backbone: what the network was built from; that of the weights must compute the same.

    Raises:
        InteropError: nothing usable at `path`; another backbone, model or vocabulary; names that differ.
    """
    weights = read_weights(path)
    if isinstance(network, Decoder) and weights.backbone is not None and weights.model is not None:
        expected = tower(backbone, "model.decoder", network.config.decoder)
        _same_decoder(weights, expected, network)
    own = network.state_dict()
    missing, unknown = sorted(own.keys() - weights.state.keys()), sorted(weights.state.keys() - own.keys())
    if missing or unknown:
        raise InteropError(f"{weights.source} lacks {missing} and has the unknown keys {unknown}")
    for name, value in weights.state.items():
        if value.shape != own[name].shape:
            raise InteropError(
                f"{weights.source}: {name} has {tuple(value.shape)}, the network {tuple(own[name].shape)}"
            )
    network.load_state_dict(weights.state)


def _same_decoder(weights: Weights, expected: BackboneConfig, network: Decoder) -> None:
    assert weights.backbone is not None
    assert weights.model is not None
    try:
        same_backbone(weights.backbone, expected)
    except InteropError as error:
        raise InteropError(f"{weights.source}: {error}") from None
    for name in ("tie_embeddings", "max_positions", "logit_soft_cap"):
        found, wanted = getattr(weights.model, name), getattr(network.config, name)
        if found != wanted:
            raise InteropError(f"{weights.source}: model.{name} is {found!r} there, {wanted!r} was asked for")
    size = network.stem.embedding.num_embeddings
    if weights.size != size:
        raise InteropError(f"{weights.source} has {weights.size} ids, the vocabulary {size}")


def _averaged(content: Mapping[str, Any], state: State, file: Path) -> State:
    """The averaged weights of a checkpoint, by the names of `state`."""
    average = content.get("ema")
    stored = average.get("weights") if isinstance(average, Mapping) else None
    if not isinstance(stored, Mapping) or not stored:
        raise InteropError(f"{file} has no averaged weights (no ema.weights)")
    weights = {name.removeprefix(NETWORK): value for name, value in stored.items()}
    unknown = sorted(weights.keys() - state.keys())
    if unknown:
        raise InteropError(f"{file}: ema.weights has {unknown[:5]}, which the network lacks")
    return weights


def _named(state: State, name: str, file: Path) -> torch.Tensor:
    if name not in state:
        raise InteropError(f"{file} lacks {name}")
    return state[name]
