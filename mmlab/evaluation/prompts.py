"""From the fields of a row to the tokens of a prompt."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmlab.inference.model import LanguageModel
    from mmlab.modalities.text.vocabulary import Ids


def check_template(name: str, template: str) -> None:
    """Refuses (ValueError) a format string that is malformed or has a field without a name."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ValueError(f"{name} {template!r} is no format string: {error}") from error
    if any(not field or field[0].isdigit() for field in fields):
        raise ValueError(
            f"{name} {template!r} has a field without a name; write {{question}}, and {{{{ for {{"
        )


def fill(name: str, template: str, values: Mapping[str, Any]) -> str:
    """The template with its fields replaced; ValueError names a field that is not among `values`."""
    try:
        return template.format_map(values)
    except (KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{name} {template!r} needs {error.args[0]!r}; the fields are {', '.join(values)}"
        ) from error


def context_ids(model: LanguageModel, prompt: str, chat: bool) -> Ids:
    """Tokens that a model reads before it answers: the prompt, or a conversation with the prompt in it."""
    from mmlab.inference.generation import encode_prompt

    return encode_prompt(model, [{"role": "user", "content": prompt}] if chat else prompt)
