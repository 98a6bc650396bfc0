"""The execution plan changes neither results nor gradients nor the names of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.parallel import apply_plan
from mmlab.backbone.transformer import Transformer
from mmlab.models.decoder import Decoder, DecoderConfig

CONFIG = BackboneConfig(width=16, depth=2, num_heads=2, dropout=0.2, position="rotary", init_std=0.2)
TOKENS = torch.arange(24).view(2, 12)
SEGMENTS = torch.tensor([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3])


def _decoder(config: BackboneConfig) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config, DecoderConfig(), 24)


def _run(network: Decoder) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    nll = network(TOKENS, segments_BT=SEGMENTS, targets_BT=TOKENS).nll_BT
    assert nll is not None
    nll.sum().backward()
    gradients = {}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        whole = parameter.grad
        gradients[name] = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return nll.detach(), gradients


def _equal(first: Decoder, second: Decoder, tolerance: float) -> None:
    one, other = _run(first), _run(second)
    torch.testing.assert_close(other[0], one[0], atol=tolerance, rtol=0)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(other[1][name], gradient, atol=tolerance, rtol=0)
    assert list(first.state_dict()) == list(second.state_dict())


def test_checkpointing_repeats_the_same_dropout() -> None:
    planned = _decoder(CONFIG)
    apply_plan(planned, activation_checkpointing=True)
    assert all(block.activation_checkpointing for block in planned.backbone.blocks)
    _equal(_decoder(CONFIG), planned, 0.0)


def test_checkpointing_keeps_less() -> None:
    def kept(network: Decoder) -> int:
        total = 0

        def pack(x: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            network(TOKENS, targets_BT=TOKENS)
        return total

    planned = _decoder(CONFIG)
    apply_plan(planned, activation_checkpointing=True)
    assert kept(planned) < kept(_decoder(CONFIG)) / 2


def test_blocks_are_found_in_any_model() -> None:
    network = torch.nn.ModuleDict({"a": torch.nn.Sequential(Transformer(CONFIG, causal=False))})
    apply_plan(network, activation_checkpointing=True)
    assert all(block.activation_checkpointing for block in network["a"][0].blocks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at gradients of its own inputs
def test_compiled_blocks_give_the_same_result() -> None:
    config = dataclasses.replace(CONFIG, dropout=0.0, depth=1)
    planned = _decoder(config)
    apply_plan(planned, compile=True)
    _equal(_decoder(config), planned, 1e-5)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.usefixtures("group")
def test_sharded_blocks_give_the_same_result(activation_checkpointing: bool) -> None:
    planned = _decoder(CONFIG)
    mesh = init_device_mesh("cpu", (1,))
    apply_plan(planned, mesh=mesh, activation_checkpointing=activation_checkpointing)
    assert all(isinstance(parameter, DTensor) for parameter in planned.parameters())
    _equal(_decoder(CONFIG), planned, 1e-6)
