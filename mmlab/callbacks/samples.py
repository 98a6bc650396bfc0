"""What the network in training writes, on TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from mmlab.callbacks.config import CallbackConfig
from mmlab.callbacks.interlude import interlude, language_model
from mmlab.callbacks.tensorboard import TensorBoard
from mmlab.inference.sampling import SamplingConfig
from mmlab.modalities.text.chat import Message

if TYPE_CHECKING:
    from mmlab.inference.model import LanguageModel


@dataclass(frozen=True)
class SamplesConfig(CallbackConfig):
    """Shows continuations of `prompts` under `samples/text`, after every `every`-th validation.

    Args:
        prompts: texts to go on from; an empty one begins a document.
        every: validations between two showings.
        sampling: how the text is drawn; the same seed each time, so that steps compare.
        chat: the prompts are a user's turns in the vocabulary's chat template.
    """

    prompts: tuple[str, ...] = ("",)
    every: int = 1
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    chat: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if not self.prompts:
            raise ValueError("prompts must hold at least one; an empty text begins a document")

    def build(self) -> Callback:
        """The callback."""
        return Samples(self)


class Samples(Callback):
    """Draws on every rank, since a sharded network needs them all; training notices nothing of it."""

    def __init__(self, config: SamplesConfig) -> None:
        self.config = config
        self.validations = 0
        self._model: LanguageModel | None = None

    def state_dict(self) -> dict[str, Any]:
        """How many validations there were."""
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting."""
        self.validations = state_dict["validations"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses a task that writes no text, before the first step."""
        self._model = language_model(pl_module, name=Path(trainer.default_root_dir).name)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws and shows, if it is due."""
        if trainer.sanity_checking or self._model is None:
            return
        self.validations += 1
        if self.validations % self.config.every:
            return
        with interlude(trainer):
            texts = continuations(self._model, self.config)
        shown = as_markdown(self.config.prompts, texts)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoard):
                logger.experiment.add_text("samples/text", shown, trainer.global_step)


def continuations(model: LanguageModel, config: SamplesConfig) -> list[str]:
    """What the model writes after each prompt."""
    from mmlab.inference.generation import encode_prompt, generate

    asked: list[str | list[Message]] = [
        [{"role": "user", "content": prompt}] if config.chat else prompt for prompt in config.prompts
    ]
    prompts = [encode_prompt(model, prompt) for prompt in asked]
    return [written.text for written in generate(model, prompts, config.sampling)]


def as_markdown(prompts: Sequence[str], texts: Sequence[str]) -> str:
    """Each prompt and its continuation as they stand, line breaks and marks included."""
    blocks = []
    for prompt, text in zip(prompts, texts, strict=True):
        if prompt:
            blocks += ["after", _indented(prompt)]
        blocks += ["the model writes", _indented(text)]
    return "\n\n".join(blocks)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
