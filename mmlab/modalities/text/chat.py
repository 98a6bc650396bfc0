"""Conversations as token ids: which tokens stand around each message, and which of them are trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mmlab.modalities.text.vocabulary import Vocabulary

END = "<|end|>"
"""In a template: the token of this name, else the one that ends a document."""


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class Rendered(NamedTuple):
    """Ids of a conversation, int32 (n,), and which of them the assistant says, bool (n,)."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]


@dataclass(frozen=True)
class Turn:
    """What stands before and after each message of a role; names of special tokens in it become their ids."""

    header: str
    footer: str = ""


@dataclass(frozen=True)
class ChatTemplate:
    """How messages are written down.

    Special ids come from the template's own words only: a message that spells the name of a special token is
    ordinary text. Text between two special tokens is encoded as one, but the assistant's words are encoded by
    themselves, as they are when a model writes them after its header.

    Args:
        roles: words around the messages of each role. The assistant's footer begins with a special token,
            which ends the reply and is trained with it; what follows it is not.
        specials: names of the special tokens that the words use. `<|end|>` is what ends a document, unless
            the vocabulary has a token of that name.
        begin: words at the start of every conversation.
        system: content of a system message for conversations that do not begin with one; null for none.
        assistant: the role whose words are trained.
    """

    roles: dict[str, Turn]
    specials: tuple[str, ...] = ()
    begin: str = ""
    system: str | None = None
    assistant: str = "assistant"

    def __post_init__(self) -> None:
        if self.assistant not in self.roles:
            raise ValueError(f"roles has no {self.assistant!r}, only {sorted(self.roles)}")
        if "" in self.specials or len(set(self.specials)) != len(self.specials):
            raise ValueError(f"specials must be different names, got {list(self.specials)}")
        if self.system is not None and "system" not in self.roles:
            raise ValueError(f"system gives a message, but roles has no 'system', only {sorted(self.roles)}")
        footer = self.roles[self.assistant].footer
        if not footer.startswith(tuple(self.specials) or ("\0",)):
            raise ValueError(
                f"the footer of {self.assistant!r} must begin with one of specials {list(self.specials)}, "
                f"so that a reply has an end; got {footer!r}"
            )

    def render(self, messages: Sequence[Message], vocabulary: Vocabulary, *, reply: bool = False) -> Rendered:
        """Ids of a conversation; trained are the assistant's words and the token that ends its turn.

        Args:
            messages: at least one, each with a role of the template's.
            vocabulary: has all special tokens of the template.
            reply: append the header of an assistant's turn, which a model then continues.

        Raises:
            ValueError: no message, an unknown role, or a special token that the vocabulary lacks.
        """
        writer = _Writer(vocabulary)
        writer.words(self._pieces(self.begin, vocabulary))
        for message in self._checked(messages):
            turn = self.roles[message["role"]]
            writer.words(self._pieces(turn.header, vocabulary))
            footer = iter(self._pieces(turn.footer, vocabulary))
            if message["role"] == self.assistant:
                writer.trained(message["content"], next(footer))
            else:
                writer.words([message["content"]])
            writer.words(footer)
        if reply:
            writer.words(self._pieces(self.roles[self.assistant].header, vocabulary))
        return writer.rendered()

    def stops(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Ids after which a reply is complete: what ends the assistant's turn, and what ends a document."""
        first = self._pieces(self.roles[self.assistant].footer, vocabulary)[0]
        assert isinstance(first, int)
        return tuple(dict.fromkeys((first, vocabulary.end)))

    def _checked(self, messages: Sequence[Message]) -> Iterator[Message]:
        if not messages:
            raise ValueError("a conversation needs at least one message")
        if self.system is not None and messages[0].get("role") != "system":
            yield Message(role="system", content=self.system)
        for number, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if role not in self.roles:
                raise ValueError(
                    f"message {number} has the role {role!r}; the template knows {sorted(self.roles)}"
                )
            if not isinstance(content, str):
                raise ValueError(f"message {number} ({role}) has no text as content, but {content!r}")
            yield message

    def _pieces(self, words: str, vocabulary: Vocabulary) -> list[str | int]:
        """The template's own words, with ids where the names of special tokens stand."""
        if not self.specials:
            return [words] if words else []
        names = sorted(self.specials, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", words)
        ids = [self._id(part, vocabulary) if part in self.specials else part for part in parts]
        return [part for part in ids if part != ""]

    def _id(self, name: str, vocabulary: Vocabulary) -> int:
        if name in vocabulary.specials:
            return vocabulary.specials[name]
        if name == END:
            return vocabulary.end
        raise ValueError(
            f"the chat template needs the special token {name!r}, which the vocabulary lacks; "
            f"it has {list(vocabulary.specials)[:20]}"
        )


class _Writer:
    """Collects ids; text that nobody is trained on is encoded where a special token or a reply follows it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.text = ""
        self.ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
        self.flags: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]

    def words(self, pieces: Iterable[str | int]) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                self.text += piece
            else:
                self._flush()
                self._add(np.array([piece], np.int32), False)

    def trained(self, content: str, stop: str | int) -> None:
        self._flush()
        self._add(self.vocabulary.encode(content), True)
        self._add(np.array([stop], np.int32), True)

    def rendered(self) -> Rendered:
        self._flush()
        return Rendered(np.concatenate(self.ids), np.concatenate(self.flags))

    def _flush(self) -> None:
        if self.text:
            self._add(self.vocabulary.encode(self.text), False)
            self.text = ""

    def _add(self, ids: NDArray[np.int32], trained: bool) -> None:
        self.ids.append(ids)
        self.flags.append(np.full(len(ids), trained))


def _marked(start: str, end: str) -> dict[str, Turn]:
    return {role: Turn(f"{start}{role}\n", f"{end}\n") for role in ("system", "user", "assistant", "tool")}


CHATML = ChatTemplate(_marked("<|im_start|>", "<|im_end|>"), specials=("<|im_start|>", "<|im_end|>"))
"""`<|im_start|>role`, a line break, the message, `<|im_end|>`, a line break."""

SMOLLM2 = ChatTemplate(
    CHATML.roles,
    specials=CHATML.specials,
    system="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
)
"""CHATML with the system message that SmolLM2 was tuned with."""

PLAIN = ChatTemplate(
    {
        "system": Turn("System: ", "\n"),
        "user": Turn("User: ", "\n"),
        "assistant": Turn("Assistant: ", f"{END}\n"),
    },
    specials=(END,),
)
"""Roles as text, for vocabularies of bytes or characters; a reply ends like a document."""
