"""Conversations: rows of messages, or rows of an instruction and its answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmlab.data.files import combined_sha256, find_files
from mmlab.data.lines import Lines
from mmlab.data.sources.base import BadSampleError, Source, SourceConfig


@dataclass(frozen=True)
class ChatRowsConfig(SourceConfig):
    """Conversations from JSON-lines files, one a row.

    `paths` are files or globs; `.gz`, `.bz2` and `.xz` are unpacked into the cache. With `format: messages`
    the field `messages` holds a list of {"role": str, "content": str}. With `format: instruction` the text in
    `instruction`, with that in `input` below it where there is any, is the user's turn and the text in
    `output` the assistant's; `input: null` reads no such field.
    """

    paths: tuple[str, ...] = field(metadata={"how": True})
    format: Literal["messages", "instruction"] = "messages"
    messages: str = "messages"
    instruction: str = "instruction"
    input: str | None = "input"
    output: str = "output"

    def build(self, cache: Path | None = None) -> ChatRows:
        """The conversations of all files."""
        return ChatRows(find_files(self.paths, "paths of chat rows"), self, cache)


class ChatRows(Source):
    """{"messages": [{"role": str, "content": str}, ...]} for each row."""

    def __init__(self, files: list[Path], config: ChatRowsConfig, cache: Path | None = None) -> None:
        self._lines, self._config = Lines(files, cache), config

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._lines.row(index)
        if self._config.format == "messages":
            return {"messages": self._messages(row, index)}
        config, text = self._config, self._lines.text
        question = text(row, config.instruction, index)
        if config.input is not None and row.get(config.input) is not None:
            more = text(row, config.input, index)
            question = f"{question}\n\n{more}" if more else question
        answer = text(row, config.output, index)
        turns = (("user", question), ("assistant", answer))
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    def name(self, index: int) -> str:
        """File, row and byte."""
        return self._lines.name(index)

    def fingerprint(self) -> str:
        """Changes with the files' content and order and with how their rows are read."""
        config = self._config
        fields = (config.messages, config.instruction, config.input, config.output)
        return combined_sha256("chat-rows", config.format, repr(fields), *self._lines.hashes())

    def _messages(self, row: dict[str, Any], index: int) -> list[dict[str, str]]:
        field = self._config.messages
        found = row.get(field)
        if not isinstance(found, list):
            raise BadSampleError(f"{self.name(index)}: no list of messages in {field!r}: fields {list(row)}")
        for place, message in enumerate(found):
            texts = isinstance(message, dict) and all(
                isinstance(message.get(key), str) for key in ("role", "content")
            )
            if not texts:
                raise BadSampleError(
                    f"{self.name(index)}: {field}[{place}] is no message with a text in 'role' and 'content'"
                )
        return [{"role": message["role"], "content": message["content"]} for message in found]
