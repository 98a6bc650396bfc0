"""Models so small that their likelihoods can be computed by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlab.backbone.config import BackboneConfig
from mmlab.inference.model import LanguageModel
from mmlab.modalities.text.vocabulary import ByteVocabulary, CharacterVocabulary, Vocabulary
from mmlab.models.decoder import IGNORE, Decoder, DecoderConfig, DecoderOutput

WINDOWED = BackboneConfig(
    width=16, depth=2, num_heads=2, init_std=0.3, norm="rmsnorm", position="rotary", bias=False, window=6
)


class Bigram(nn.Module):
    """Predicts the next id from the present one alone, with the given probabilities (V, V)."""

    def __init__(self, probabilities_VV: Tensor) -> None:
        super().__init__()
        self.config = DecoderConfig()
        self.logits_VV = nn.Parameter(probabilities_VV.log())
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, tokens_BT: Tensor, *, targets_BT: Tensor | None = None) -> DecoderOutput:
        self.shapes.append(tuple(tokens_BT.shape))
        logits_BTV = self.logits_VV[tokens_BT]
        if targets_BT is None:
            return DecoderOutput(logits_BTV, None, {})
        nll_BT = F.cross_entropy(logits_BTV.mT, targets_BT, reduction="none", ignore_index=IGNORE)
        return DecoderOutput(None, nll_BT, {})


def bigram(characters: str, probabilities: dict[str, dict[str, float]]) -> LanguageModel:
    """A bigram model over `characters` and the end, which is written `.` in `probabilities`."""
    vocabulary = CharacterVocabulary(characters)
    names = {name: index for index, name in enumerate(characters)} | {".": vocabulary.end}
    table_VV = torch.full((vocabulary.size, vocabulary.size), 1e-30)
    for first, following in probabilities.items():
        for second, value in following.items():
            table_VV[names[first], names[second]] = value
    return LanguageModel(Bigram(table_VV).eval(), vocabulary)  # type: ignore[arg-type]


def tiny(
    vocabulary: Vocabulary | None = None, backbone: BackboneConfig = WINDOWED, **options: Any
) -> LanguageModel:
    """A decoder with random weights that say something."""
    vocabulary = vocabulary or ByteVocabulary()
    torch.manual_seed(0)
    return LanguageModel(Decoder(backbone, DecoderConfig(**options), vocabulary.size).eval(), vocabulary)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """The rows as JSON lines, compressed where the name says so; gives the path back."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return str(path)
