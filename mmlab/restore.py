"""A model that can be used, from whatever holds its weights."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mmlab.typed import ConfigError, typed

if TYPE_CHECKING:
    import torch

    from mmlab.inference.model import LanguageModel


log = logging.getLogger("mmlab")


def chosen_device(name: str) -> str:
    """The device that `name` (`auto`, `cpu`, `cuda`, `cuda:N`, `mps`) stands for.

    Raises:
        ConfigError: it is none of these.
    """
    import torch

    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator.type if accelerator is not None else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise ConfigError(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}")
    return name


def restore(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    ema: bool = False,
) -> LanguageModel:
    """The language model at `path`, in evaluation mode; low-rank updates are merged into the weights.

    Args:
        path: a run folder (its best checkpoint, else its last), a checkpoint file, or a Hugging Face folder.
        device: where the network goes.
        dtype: number type of the weights; None keeps that of the file.
        ema: the averaged weights of a checkpoint that has them.

    Raises:
        ConfigError: nothing usable is there, or it is no language model.
    """
    from mmlab.inference.model import LanguageModel
    from mmlab.interop.checkpoint import is_huggingface, read_checkpoint
    from mmlab.interop.huggingface import import_folder
    from mmlab.modalities.text.vocabulary import TextModalityConfig
    from mmlab.models.decoder import Decoder
    from mmlab.tasks.config import TaskParts

    place = Path(path)
    if is_huggingface(place):
        if ema:
            raise ConfigError(f"{place} is a Hugging Face folder: it has no averaged weights")
        folder = import_folder(place)
        for warning in folder.warnings:
            log.warning("%s: %s", place, warning)
        if folder.modality is None:
            raise ConfigError(f"{place} has no tokenizer")
        network, text = folder.decoder.build(), folder.modality
    else:
        file, state, plain = read_checkpoint(place, ema=ema)
        parts = typed(plain, TaskParts)
        built = parts.model.build(parts.backbone, parts.modality)
        built.load_state_dict(state)
        found = parts.modality.get("text")
        if not isinstance(found, TextModalityConfig) or not isinstance(built, Decoder):
            raise ConfigError(
                f"{file} is no language model: a {type(built).__name__} over {sorted(parts.modality)}"
            )
        network, text = built, found
    network = network.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return LanguageModel(network, text.build(), text.chat, name=str(place))
