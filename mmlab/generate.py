"""`mmlab generate`: continues texts, or answers as a chat, with a trained or imported model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.data.files import fresh_file
from mmlab.inference.sampling import SamplingConfig
from mmlab.runconfig import PathsConfig
from mmlab.strategies.config import PrecisionConfig
from mmlab.typed import ConfigError

if TYPE_CHECKING:
    from mmlab.inference.generation import Generation
    from mmlab.inference.model import LanguageModel

Prompt = str | list[Any]
"""A text, or the messages of a conversation."""


@dataclass(frozen=True)
class GenerateConfig:
    """What is continued with which model.

    Args:
        checkpoint: a run folder (its best checkpoint, else its last), a checkpoint file, or a Hugging Face
            folder.
        prompt: one text; its continuation is printed as it is made.
        prompts: a file of many, instead: a text a line, or JSON lines with `prompt` or `messages`.
        chat: a prompt is what the user says, and the model answers in its chat template.
        output: JSON-lines file for the results, written whole or not at all; null prints them.
        overwrite: replaces `output` where it is there.
        sampling: how tokens are chosen.
        batch_size: prompts at once.
        device: where the network runs: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        precision: number type of the weights and of matrix products.
        ema: uses the averaged weights of the checkpoint.
        threads: of the CPU; null is torch's own choice.
        paths: not used; what every command has.
    """

    checkpoint: str
    prompt: str | None = None
    prompts: str | None = None
    chat: bool = False
    output: str | None = None
    overwrite: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    batch_size: int = 16
    device: str = "auto"
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    ema: bool = False
    threads: int | None = None
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("give prompt=TEXT or prompts=FILE, one of the two")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1 or null, got {self.threads}")


def run(config: GenerateConfig) -> None:
    """Generates, and prints or writes the results.

    Raises:
        ConfigError: no such checkpoint or file of prompts, a row that holds no prompt, or an output that is
            there already.
    """
    output = Path(config.output) if config.output is not None else None
    if output is not None and output.exists() and not config.overwrite:
        raise ConfigError(f"output: {output} is there already; overwrite=true replaces it")
    prompts = _prompts(config)
    model, autocast = _model(config)
    if output is None and config.prompt is not None:
        with autocast:
            _generate(model, prompts, config, stream=True)
        print(flush=True)
        return
    with autocast:
        results = _generate(model, prompts, config, stream=False)
    rows = [
        json.dumps(_row(prompt, result), ensure_ascii=False)
        for prompt, result in zip(prompts, results, strict=True)
    ]
    if output is None:
        print("\n".join(rows))
        return
    with fresh_file(output) as partial:
        partial.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows in {output}")


def _model(config: GenerateConfig) -> tuple[LanguageModel, Any]:
    """The model, and the context that its products are computed in."""
    import torch

    from mmlab.restore import chosen_device, restore

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device, kind = chosen_device(config.device), config.precision.kind
    dtype = torch.bfloat16 if kind == "bf16-true" else torch.float32
    model = restore(config.checkpoint, device=device, dtype=dtype, ema=config.ema)
    mixed = kind == "bf16-mixed"
    return model, torch.autocast(device.split(":")[0], torch.bfloat16, enabled=mixed)


def _generate(
    model: LanguageModel, prompts: Sequence[Prompt], config: GenerateConfig, *, stream: bool
) -> list[Generation]:
    from mmlab.inference.generation import encode_prompt, generate

    ids = []
    for number, prompt in enumerate(prompts):
        wrapped: Prompt = prompt
        if config.chat and isinstance(prompt, str):
            wrapped = [{"role": "user", "content": prompt}]
        try:
            ids.append(encode_prompt(model, wrapped))
        except ValueError as error:
            raise ConfigError(f"prompt {number}: {error}") from error
    return generate(
        model, ids, config.sampling, on_text=_print if stream else None, batch_size=config.batch_size
    )


def _print(number: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _row(prompt: Prompt, result: Generation) -> dict[str, Any]:
    return {
        "messages" if isinstance(prompt, list) else "prompt": prompt,
        "text": result.text,
        "ids": result.ids,
        "stopped_by": result.stopped_by,
        "seed": result.seed,
    }


def _prompts(config: GenerateConfig) -> list[Prompt]:
    if config.prompt is not None:
        return [config.prompt]
    path = Path(str(config.prompts))
    if not path.is_file():
        raise ConfigError(f"prompts: {path} does not exist")
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(_read_row(f"{path}:{number}", line) if path.suffix == ".jsonl" else line)
    if not found:
        raise ConfigError(f"prompts: {path} holds no prompt")
    return found


def _read_row(where: str, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if isinstance(row, dict):
        prompt, messages = row.get("prompt"), row.get("messages")
        if isinstance(prompt, str) and messages is None:
            return prompt
        if isinstance(messages, list) and prompt is None:
            return messages
    raise ConfigError(f'{where}: a row needs "prompt" (a text) or "messages" (a list)')
