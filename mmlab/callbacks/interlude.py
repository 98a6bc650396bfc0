"""A use of the network between two optimizer steps, of which training notices nothing."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer

from mmlab.evaluation.scoring import evaluating

if TYPE_CHECKING:
    from mmlab.inference.model import LanguageModel
    from mmlab.modalities.base import ModalityConfig
    from mmlab.models.decoder import Decoder


@runtime_checkable
class Clock(Protocol):
    """A callback that measures time, and leaves some out."""

    def leave_out(self, seconds: float) -> None:
        """Does not count the `seconds` that have just passed."""


def _eager() -> AbstractContextManager[Any]:
    """Runs compiled parts as they are written: other shapes would cost compilations."""
    compiles = "torch._dynamo" in sys.modules  # which the call would import, in two seconds
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


class Parts(Protocol):
    """What a task is built from."""

    modality: Mapping[str, ModalityConfig]


class TextTask(Protocol):
    """A task with a decoder over text."""

    network: Decoder
    parts: Parts


@contextmanager
def interlude(trainer: Trainer) -> Iterator[None]:
    """Evaluation mode, no gradients, validation's precision, nothing compiled anew.

    Afterwards all random states and every module's mode are what they were, and clocks among the callbacks
    are told of the time. Under a sharded strategy every rank must do the same forward passes in it.
    """
    module, began = trainer.lightning_module, time.perf_counter()
    device = module.device
    own, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    other = accelerator.get_rng_state() if accelerator is not None else None
    try:
        with (
            evaluating(module),
            trainer.precision_plugin.val_step_context(),
            _eager(),
        ):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if accelerator is not None:
            accelerator.set_rng_state(other)
        seconds = time.perf_counter() - began
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Clock):
                callback.leave_out(seconds)


def language_model(module: LightningModule, name: str) -> LanguageModel:
    """The network in training with its vocabulary; ValueError if the task has no text."""
    from mmlab.inference.model import LanguageModel
    from mmlab.modalities.text.vocabulary import TextModalityConfig
    from mmlab.models.decoder import Decoder

    task = cast(TextTask, module)
    text = task.parts.modality.get("text")
    if not isinstance(text, TextModalityConfig) or not isinstance(task.network, Decoder):
        raise ValueError(
            f"{type(module).__name__} trains no language model: nothing here can read or write text"
        )
    return LanguageModel(task.network, text.build(), text.chat, name=name)
