"""muP: the same network at the base width, its three corrections elsewhere, and flat changes over widths."""

import dataclasses
import math

import pytest
import torch

from mmlab.backbone.config import BackboneConfig
from mmlab.models.decoder import Decoder, DecoderConfig
from mmlab.optim.adamw import AdamWConfig
from mmlab.optim.base import learning_rate_factors
from mmlab.optim.muon import MuonConfig

SIZE = 48
STANDARD = BackboneConfig(
    width=32, depth=2, num_heads=4, norm="rmsnorm", activation="swiglu", bias=False, position="rotary"
)
WIDER = dataclasses.replace(STANDARD, parametrization="mup", base_width=8)
"""Four times the base width; as many heads there, of a quarter of the size."""

OWN_HEAD = DecoderConfig(tie_embeddings=False)


def decoder(config, model=OWN_HEAD, seed=0):
    torch.manual_seed(seed)
    return Decoder(config, model, SIZE)


def tokens(seed=0):
    return torch.randint(0, SIZE, (8, 17), generator=torch.Generator().manual_seed(seed))


def train(network, optimizer, steps):
    """Steps on one batch of random tokens; returns the losses."""
    factors = learning_rate_factors(network, {}, optimizer.width_exponent)
    built = optimizer.build(network.named_parameters(), factors)
    losses = []
    for _ in range(steps):
        built.zero_grad()
        loss = network(tokens()[:, :-1], targets_BT=tokens()[:, 1:]).nll_BT.mean()
        loss.backward()
        built.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_at_the_base_width_both_parametrizations_are_the_same(tied, precision):
    standard = decoder(STANDARD, DecoderConfig(tie_embeddings=tied))
    mup = decoder(
        dataclasses.replace(STANDARD, parametrization="mup", base_width=32),
        DecoderConfig(tie_embeddings=tied),
    )
    optimizer = AdamWConfig(learning_rate=1e-2)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        assert train(standard, optimizer, 3) == train(mup, optimizer, 3)
    for (name, a), b in zip(standard.named_parameters(), mup.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_matrices_inside_the_blocks_start_smaller_and_all_else_the_same():
    standard, mup = decoder(STANDARD), decoder(WIDER)
    for (name, a), b in zip(standard.named_parameters(), mup.named_parameters(), strict=True):
        shrunk = ".blocks." in name and a.ndim == 2
        torch.testing.assert_close(b[1], a / 2 if shrunk else a, msg=name)


def test_adamws_rates_of_these_matrices_are_divided_by_the_width_factor_and_muons_by_none():
    network = decoder(WIDER)
    names = [name for name, _ in network.named_parameters()]
    inner = [name for name in names if ".attention." in name or ".mlp." in name]
    assert len(inner) == 14
    adamw = AdamWConfig(learning_rate=0.1)
    assert learning_rate_factors(network, {}, adamw.width_exponent) == dict.fromkeys(inner, 0.25)
    rates = {"learning_rate": 0.1, "adamw_learning_rate": 0.1}
    for scale, factors in (("original", {}), ("match_rms_adamw", dict.fromkeys(inner, 0.5))):
        exponent = MuonConfig(scale=scale, **rates).width_exponent
        assert learning_rate_factors(network, {}, exponent) == factors


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_divided_by_the_width_factor(tied):
    """Heads of a given size need no other scale of attention, so equal weights give logits in that ratio."""
    heads = {"head_size": 8}
    standard = decoder(dataclasses.replace(STANDARD, **heads), DecoderConfig(tie_embeddings=tied))
    mup = decoder(dataclasses.replace(WIDER, **heads), DecoderConfig(tie_embeddings=tied))
    mup.load_state_dict(standard.state_dict())
    expected = standard(tokens()).logits_BTV / 4
    torch.testing.assert_close(mup(tokens()).logits_BTV, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
def test_products_of_queries_and_keys_are_divided_by_the_size_of_a_head_that_grows(precision, packed):
    """Against the standard network with smaller queries: sqrt(2) / 8 is 1 / sqrt(8) times 1 / sqrt(4)."""
    assert WIDER.attention_scale == pytest.approx(math.sqrt(2) / 8)
    config = dataclasses.replace(WIDER, init_std=0.5)  # scores far from 0
    mup = decoder(config).backbone
    standard = decoder(dataclasses.replace(config, parametrization="standard", base_width=None)).backbone
    weights = mup.state_dict()
    scaled = {name: x / 2 if ".query." in name else x for name, x in weights.items()}
    standard.load_state_dict(scaled)
    x_BTD = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    segments_BT = torch.tensor([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2]) if packed else None
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        results = [network(x_BTD, mask=network.mask(segments_BT)).hidden_BTD for network in (mup, standard)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    standard.load_state_dict(weights)
    assert not torch.allclose(
        standard(x_BTD, mask=standard.mask(segments_BT)).hidden_BTD, results[0], atol=1e-2
    )


def test_heads_of_a_given_size_keep_their_scale():
    assert dataclasses.replace(WIDER, head_size=16).attention_scale == 1 / math.sqrt(16)
    assert dataclasses.replace(STANDARD, head_size=16).attention_scale == 1 / math.sqrt(16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parametrization": "mup"}, "'mup' and base_width None"),
        ({"base_width": 8}, "'standard' and base_width 8"),
        ({"parametrization": "mup", "base_width": 0}, "base_width must be at least 1, got 0"),
    ],
)
def test_a_base_width_goes_with_mup_alone(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(STANDARD, **change)


# -- coordinate check (arXiv:2203.03466, section D.1) -------------------------------------------------------

WIDTHS = (32, 64, 128, 256)
ADAMW = AdamWConfig(learning_rate=0.01, weight_decay=0.0)
MUON = {"learning_rate": 0.05, "adamw_learning_rate": 1e-3, "newton_schulz_type": "float32"}


def activations(network):
    """Residual stream after each block, and logits, on the training batch."""
    seen = {}
    hooks = [
        block.register_forward_hook(lambda _, __, out, name=f"block {index}": seen.update({name: out}))
        for index, block in enumerate(network.backbone.blocks)
    ]
    with torch.no_grad():
        logits = network(tokens()[:, :-1]).logits_BTV
    for hook in hooks:
        hook.remove()
    return {**seen, "logits": logits}


def slopes(config, optimizer, tied=True):
    """Exponent of the width in the change (root mean square) of each activation over four steps."""
    logs = []
    for width in WIDTHS:
        heads = width // config.head_size if config.head_size else config.num_heads
        wide = dataclasses.replace(config, width=width, num_heads=heads)
        network = decoder(wide, DecoderConfig(tie_embeddings=tied))
        before = activations(network)
        train(network, optimizer, 4)
        after = activations(network)
        logs.append(
            {name: (after[name] - x).square().mean().sqrt().log().item() for name, x in before.items()}
        )
    x = torch.tensor(WIDTHS).double().log()
    x -= x.mean()
    return {name: float(x @ torch.tensor([log[name] for log in logs]).double() / (x @ x)) for name in logs[0]}


MUP = dataclasses.replace(STANDARD, parametrization="mup", base_width=32)


@pytest.mark.parametrize(
    ("config", "optimizer", "tied"),
    [
        (MUP, ADAMW, True),
        (MUP, ADAMW, False),
        (dataclasses.replace(MUP, head_size=8), ADAMW, True),
        (MUP, MuonConfig(**MUON), True),
        (MUP, MuonConfig(**MUON, scale="match_rms_adamw"), True),
    ],
    ids=["tied", "own head", "more heads", "muon", "muon as adamw"],
)
def test_under_mup_activations_change_alike_at_every_width(config, optimizer, tied):
    found = slopes(config, optimizer, tied)
    assert set(found) == {"block 0", "block 1", "logits"}
    assert all(-0.2 < slope < 0.1 for slope in found.values()), found


def test_in_the_standard_parametrization_their_changes_grow_with_the_width():
    found = slopes(STANDARD, ADAMW)
    assert min(found["block 0"], found["block 1"]) > 1, found
    assert found["logits"] > 0.5, found
