"""The decoder: packing, tied weights, loss, size and cost."""

from __future__ import annotations

import copy
import dataclasses
import io

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmlab.backbone.config import BackboneConfig
from mmlab.modalities.text.vocabulary import BytesConfig, CharactersConfig
from mmlab.models import decoder as module
from mmlab.models.decoder import IGNORE, Decoder, DecoderConfig

GPT = BackboneConfig(width=16, depth=2, num_heads=2, init_std=0.2)
LLAMA = dataclasses.replace(
    GPT, norm="rmsnorm", activation="swiglu", bias=False, position="rotary", num_kv_heads=1, qk_norm=True
)
SIZE = 20
KINDS = {
    "learned positions": (GPT, DecoderConfig(max_positions=32)),
    "rotary": (LLAMA, DecoderConfig(tie_embeddings=False)),
    "window": (dataclasses.replace(LLAMA, window=2), DecoderConfig()),
}


def _decoder(kind: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(*KINDS[kind], SIZE)


# -- packing ----------------------------------------------------------------------------------------

A, B = [3, 5, 7], [2, 4, 6, 8, 10]
PACKED = torch.tensor([[*A, *B, 0]])
SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 0]])
TARGETS = torch.tensor([[5, 7, 0, 4, 6, 8, 10, 0, IGNORE]])


@pytest.mark.parametrize("spans", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_have_the_loss_that_they_have_alone(kind: str, spans: bool) -> None:
    network = _decoder(kind)
    network.backbone.spans = spans
    packed = network(PACKED, segments_BT=SEGMENTS, targets_BT=TARGETS).nll_BT
    first = network(PACKED[:, :3], targets_BT=TARGETS[:, :3]).nll_BT
    second = network(PACKED[:, 3:8], targets_BT=TARGETS[:, 3:8]).nll_BT
    assert packed is not None
    assert first is not None
    assert second is not None
    torch.testing.assert_close(packed[:, :3], first, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed.sum(), first.sum() + second.sum(), atol=1e-5, rtol=1e-6)
    assert packed[0, -1] == 0


@pytest.mark.parametrize("spans", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_one_document_does_not_touch_another(kind: str, spans: bool) -> None:
    network = _decoder(kind)
    network.backbone.spans = spans
    changed = PACKED.clone()
    changed[0, 1], changed[0, -1] = 9, 11
    before, after = (network(x, segments_BT=SEGMENTS).logits_BTV for x in (PACKED, changed))
    assert torch.equal(before[:, 3:8], after[:, 3:8])
    assert torch.equal(before[:, :1], after[:, :1])
    assert not torch.equal(before[:, 1:3], after[:, 1:3])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_padding(kind: str) -> None:
    gradients = []
    for length in (9, 14):
        network = _decoder(kind)
        pads = (0, length - 9)
        tokens, segments = F.pad(PACKED, pads, value=13), F.pad(SEGMENTS, pads)
        nll = network(tokens, segments_BT=segments, targets_BT=F.pad(TARGETS, pads, value=IGNORE)).nll_BT
        assert nll is not None
        nll.sum().backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=0)


# -- tied weights -----------------------------------------------------------------------------------


def _is_tied(network: Decoder) -> bool:
    """The head follows a change of the embedding, and there is one parameter."""
    hidden = torch.ones(1, GPT.width)
    with torch.no_grad():
        before = network.logits(hidden)
        network.stem.embedding.weight[3] += 1
        after = network.logits(hidden)
    shapes = [tuple(p.shape) for p in network.parameters()]
    return bool(after[0, 3] > before[0, 3]) and shapes.count((SIZE, GPT.width)) == 1


def test_tie_survives_every_way_of_copying() -> None:
    network = _decoder("learned positions")
    assert "head.weight" not in network.state_dict()
    assert _is_tied(network)
    other = _decoder("learned positions")
    other.load_state_dict(copy.deepcopy(network.state_dict()), assign=True)
    assert _is_tied(other)
    assert _is_tied(copy.deepcopy(network))
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    assert _is_tied(other)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    nll = other(PACKED, targets_BT=PACKED).nll_BT
    assert nll is not None
    nll.sum().backward()
    optimizer.step()
    assert _is_tied(other)


def test_parameter_names() -> None:
    names = set(_decoder("learned positions").state_dict())
    assert {"stem.embedding.weight", "stem.positions.weight", "backbone.norm.weight"} <= names
    assert "backbone.blocks.1.attention.query.weight" in names
    assert "head.weight" in _decoder("rotary").state_dict()


# -- loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 2.0])
def test_loss_in_chunks_equals_the_whole(cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    network = _decoder("rotary")
    network.config = DecoderConfig(tie_embeddings=False, logit_soft_cap=cap)
    tokens = torch.randint(0, SIZE, (3, 7))
    targets = torch.randint(0, SIZE, (3, 7))
    targets[1, 2:] = IGNORE
    results = []
    for chunk in (module.CHUNK, 4 * SIZE):
        monkeypatch.setattr(module, "CHUNK", chunk)
        network.zero_grad()
        nll = network(tokens, targets_BT=targets).nll_BT
        assert nll is not None
        nll.sum().backward()
        results.append((nll.detach(), {n: p.grad.clone() for n, p in network.named_parameters()}))
    logits = network(tokens).logits_BTV
    assert logits is not None
    chosen = targets.clamp(min=0)[..., None]
    expected = -logits.log_softmax(dim=-1).gather(-1, chosen)[..., 0].masked_fill(targets == IGNORE, 0)
    torch.testing.assert_close(results[0][0], expected.detach())
    torch.testing.assert_close(results[1][0], results[0][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, atol=1e-6, rtol=1e-5)
    if cap is not None:
        assert logits.abs().max() <= cap


def test_all_targets_ignored_give_zero_and_finite_gradients() -> None:
    network = _decoder("rotary")
    nll = network(PACKED, segments_BT=torch.zeros_like(PACKED), targets_BT=PACKED * 0 + IGNORE).nll_BT
    assert nll is not None
    assert not nll.any()
    nll.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in network.parameters())


# -- cost -------------------------------------------------------------------------------------------

COSTS = [
    (GPT, DecoderConfig(max_positions=32)),
    (dataclasses.replace(GPT, bias=False), DecoderConfig(tie_embeddings=False)),
    (LLAMA, DecoderConfig(tie_embeddings=False)),
    (dataclasses.replace(LLAMA, head_size=6, mlp_size=40), DecoderConfig(decoder={"depth": 3})),
]


@pytest.mark.parametrize(("backbone", "config"), COSTS)
def test_cost_equals_the_network(backbone: BackboneConfig, config: DecoderConfig) -> None:
    text = BytesConfig()
    size = text.build().size
    network = config.build(backbone, {"text": text})
    cost = config.cost(backbone, size, B=2, T=8)
    assert cost.parameters == sum(p.numel() for p in network.parameters())
    assert cost.bytes() == sum(p.nbytes for p in network.parameters())
    tokens = torch.zeros(2, 8, dtype=torch.long)
    # The counter knows no formula for the fused kernel of a CPU; the plain one is two matrix products.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            logits = network(tokens).logits_BTV
        assert counter.get_total_flops() == cost.forward_flops
        with FlopCounterMode(display=False) as counter:
            logits.sum().backward()
        assert counter.get_total_flops() == cost.training_flops - cost.forward_flops


# -- configuration ----------------------------------------------------------------------------------


def test_tower_overrides_are_applied_and_checked() -> None:
    config = DecoderConfig(decoder={"depth": 1, "norm_eps": 1, "window": None, "norm": "rmsnorm"})
    network = config.build(GPT, {"text": CharactersConfig("abc")})
    assert len(network.backbone.blocks) == 1
    assert network.stem.embedding.num_embeddings == 4
    for changes, message in [
        ({"deep": 1}, "model.decoder.deep: unknown key; did you mean 'depth'"),
        ({"depth": "2"}, "model.decoder.depth: expected int, got '2'"),
        ({"depth": True}, "model.decoder.depth: expected int, got True"),
        ({"norm": "batch"}, "model.decoder.norm: expected one of 'layernorm', 'rmsnorm'"),
        ({"num_heads": 3}, "model.decoder: width 16 .* num_heads 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            DecoderConfig(decoder=changes).build(GPT, {"text": BytesConfig()})


def test_decoder_needs_text_and_sound_values() -> None:
    with pytest.raises(ValueError, match="modality named text"):
        DecoderConfig().build(GPT, {})
    with pytest.raises(ValueError, match="max_positions"):
        DecoderConfig(max_positions=0)
    with pytest.raises(ValueError, match="logit_soft_cap"):
        DecoderConfig(logit_soft_cap=0.0)
