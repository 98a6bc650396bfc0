"""A language model that is ready for use."""

from __future__ import annotations

from dataclasses import dataclass

from mmlab.modalities.text.chat import ChatTemplate
from mmlab.modalities.text.vocabulary import Vocabulary
from mmlab.models.decoder import Decoder


@dataclass(frozen=True)
class LanguageModel:
    """A decoder with what its ids mean.

    Args:
        network: in evaluation mode.
        vocabulary: of its ids; the network may have further ones, which are never generated.
        chat: how conversations are written; None if it holds none.
        name: what it is called in messages and results.
    """

    network: Decoder
    vocabulary: Vocabulary
    chat: ChatTemplate | None = None
    name: str = ""

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence; None if nothing bounds it."""
        return self.network.config.max_positions
