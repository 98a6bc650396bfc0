"""Backbones that are named after published models have as many parameters as these."""

from __future__ import annotations

import pytest

from mmlab.backbone.config import BackboneConfig
from mmlab.config import compose, typed
from mmlab.models.decoder import DecoderConfig


@pytest.mark.parametrize(
    ("name", "model", "size", "parameters"),
    [
        ("gpt2", DecoderConfig(max_positions=1024), 50257, 124_439_808),
        ("smollm2_135m", DecoderConfig(), 49152, 134_515_008),
        ("llama_1b", DecoderConfig(), 128256, 1_235_814_400),
    ],
)
def test_number_of_parameters(name: str, model: DecoderConfig, size: int, parameters: int) -> None:
    backbone = typed(compose([f"backbone={name}"])["backbone"], BackboneConfig)
    assert model.cost(backbone, size, 1, 1).parameters == parameters
