"""Muon against torch's own and against its formula; AdamW's part, state, resume, half and sharded weights."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mmlab.backbone.config import BackboneConfig
from mmlab.models.decoder import Decoder, DecoderConfig
from mmlab.optim.base import set_learning_rate
from mmlab.optim.muon import MuonConfig
from mmlab.optim.orthogonal import fast_type, newton_schulz

CONFIG = MuonConfig(learning_rate=0.02, adamw_learning_rate=3e-3, newton_schulz_type="float32")
BACKBONE = BackboneConfig(width=16, depth=2, num_heads=2, num_kv_heads=1, activation="swiglu", bias=True)


def decoder(dtype=torch.float32):
    torch.manual_seed(0)
    return Decoder(BACKBONE, DecoderConfig(tie_embeddings=False), 23).to(dtype)


def set_gradients(module, step):
    for index, parameter in enumerate(module.parameters()):
        generator = torch.Generator().manual_seed(97 * step + index)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(optimizer, module, steps, start=0):
    for step in range(start, start + steps):
        set_gradients(module, step)
        set_learning_rate(optimizer, 1 - step / 10)
        optimizer.step()


def muon_names(module, optimizer):
    members = {id(p) for g in optimizer.param_groups if g["algorithm"] == "muon" for p in g["params"]}
    return {name for name, p in module.named_parameters() if id(p) in members}


def test_matrices_inside_the_blocks_are_muons_and_nothing_else():
    module = decoder()
    optimizer = CONFIG.build(module.named_parameters())
    matrices = {
        f"backbone.blocks.{block}.{part}.weight"
        for block in (0, 1)
        for part in (
            *(f"attention.{matrix}" for matrix in ("query", "key", "value", "output")),
            *(f"mlp.{matrix}" for matrix in ("gate", "up", "down")),
        )
    }
    assert muon_names(module, optimizer) == matrices
    peaks = {(g["algorithm"], g["weight_decay"]): g["peak_lr"] for g in optimizer.param_groups}
    assert peaks == {("muon", 0.1): 0.02, ("adamw", 0.1): 3e-3, ("adamw", 0.0): 3e-3}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(module.parameters()))


def test_blocks_may_stand_at_the_top_and_embeddings_named_otherwise_do_not_count():
    module = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)]), "other_blocks": nn.Linear(4, 4)})
    optimizer = CONFIG.build(module.named_parameters())
    assert muon_names(module, optimizer) == {"blocks.0.weight"}


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_torchs_muon_and_torchs_fused_adamw(kind, scale, nesterov, monkeypatch):
    if kind == "float32":  # torch's own has no such option
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    ours, theirs, start = decoder(), decoder(), dict(decoder().named_parameters())
    rates = {"learning_rate": 0.02, "adamw_learning_rate": 3e-3}
    config = MuonConfig(**rates, newton_schulz_type=kind, scale=scale, nesterov=nesterov)
    optimizer = config.build(ours.named_parameters())
    inner = muon_names(ours, optimizer)
    named = dict(theirs.named_parameters())
    options = {"weight_decay": 0.1, "momentum": 0.95, "nesterov": nesterov, "adjust_lr_fn": scale}
    muon = torch.optim.Muon([named[name] for name in inner], lr=0.02, **options)
    rest = [
        {
            "params": [p for n, p in named.items() if n not in inner and (p.ndim > 1) == matrix],
            "weight_decay": decay,
        }
        for matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(5):
        for module in (ours, theirs):
            set_gradients(module, step)
        for one in (optimizer, muon, adamw):
            one.step()
    for name, parameter in ours.named_parameters():
        if name not in inner:
            assert torch.equal(parameter, named[name]), name
        elif kind == "float32":
            torch.testing.assert_close(parameter, named[name], atol=1e-6, rtol=0, msg=name)
        else:  # each is within 3 % of float32
            difference, way = parameter - named[name], named[name] - start[name]
            assert difference.norm() < 0.05 * way.norm(), name


def written_out(gradients, scale, decay):
    """One matrix by torch's published algorithm in float64."""
    weight = gradients[0].double() * 0.1
    momentum = torch.zeros_like(weight)
    for gradient in gradients[1:]:
        gradient = gradient.double()
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.05 * gradient + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        weight = weight * (1 - 0.02 * decay) - 0.02 * scale * x
    return weight


@pytest.mark.parametrize(("shape", "scale"), [((8, 24), 1.0), ((24, 8), 3**0.5), ((8, 8), 1.0)])
def test_in_float32_it_is_the_formula(shape, scale):
    torch.manual_seed(1)
    gradients = [torch.randn(shape) for _ in range(5)]
    parameter = nn.Parameter(gradients[0] * 0.1)
    optimizer = CONFIG.build([("blocks.0.weight", parameter)])
    for gradient in gradients[1:]:
        parameter.grad = gradient
        optimizer.step()
    expected = written_out(gradients, scale, 0.1)
    torch.testing.assert_close(parameter.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7), (6, 24), (24, 6)])
def test_newton_schulz_keeps_singular_vectors_and_moves_values_towards_one(shape):
    torch.manual_seed(2)
    x_NAB = torch.randn(3, *shape)
    result = newton_schulz(x_NAB.clone(), 5)
    left, _, right = torch.linalg.svd(x_NAB, full_matrices=False)
    values = left.mT @ result @ right.mT
    diagonal = values.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(values, torch.diag_embed(diagonal), atol=1e-5, rtol=0)
    assert 0.6 < diagonal.min() < diagonal.max() < 1.3
    assert torch.equal(newton_schulz(torch.zeros(1, 2, 3), 5), torch.zeros(1, 2, 3))


def test_a_batch_gives_what_its_matrices_give_alone(monkeypatch):
    together, alone = decoder(), decoder()
    train(CONFIG.build(together.named_parameters()), together, 2)
    monkeypatch.setattr("mmlab.optim.muon_adamw.BATCH", 1)
    train(CONFIG.build(alone.named_parameters()), alone, 2)
    for (name, a), b in zip(together.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0, msg=name)


def named_state(module, optimizer):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(module, optimizer, options=options)


def restore(module, optimizer, state):
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_by_name_gives_the_weights_of_a_run_that_was_not_stopped(dtype, tmp_path):
    factors = {"backbone.blocks.0.mlp.up.weight": 0.5, "head.weight": 0.25}
    whole = decoder(dtype)
    train(CONFIG.build(whole.named_parameters(), factors), whole, 6)
    first = decoder(dtype)
    optimizer = CONFIG.build(first.named_parameters(), factors)
    train(optimizer, first, 3)
    torch.save({"weights": first.state_dict(), "optimizer": named_state(first, optimizer)}, tmp_path / "c")
    saved = torch.load(tmp_path / "c", weights_only=True)
    assert set(saved["optimizer"]["state"]) == {name for name, _ in first.named_parameters()}
    second = decoder(dtype)
    second.load_state_dict(saved["weights"])
    resumed = CONFIG.build(second.named_parameters(), factors)
    restore(second, resumed, saved["optimizer"])
    train(resumed, second, 3, start=3)
    for (name, a), b in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_half_weights_have_float32_state_and_follow_the_float32_run():
    half, exact = decoder(torch.bfloat16), decoder(torch.bfloat16).float()
    optimizer, reference = (CONFIG.build(m.named_parameters()) for m in (half, exact))
    for step in range(20):
        set_gradients(half, step)
        for parameter, other in zip(half.parameters(), exact.parameters(), strict=True):
            other.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
    for (name, parameter), other in zip(half.named_parameters(), exact.parameters(), strict=True):
        state = optimizer.state[parameter]
        assert {value.dtype for value in state.values()} == {torch.float32}, name
        torch.testing.assert_close(state["master"], other, atol=1e-5, rtol=0, msg=name)
        assert torch.equal(parameter, state["master"].bfloat16()), name


def test_a_parameter_without_gradient_stays_and_a_zero_rate_changes_nothing():
    module = decoder()
    factors = dict.fromkeys((name for name, _ in module.named_parameters()), 0.0)
    factors.pop("backbone.blocks.1.mlp.up.weight")
    before = copy.deepcopy(module)
    optimizer = CONFIG.build(module.named_parameters(), factors)
    set_gradients(module, 0)
    module.stem.embedding.weight.grad = None
    optimizer.step()
    changed = {
        name
        for (name, a), b in zip(module.named_parameters(), before.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert changed == {"backbone.blocks.1.mlp.up.weight"}
    assert module.stem.embedding.weight not in optimizer.state


def test_the_type_of_newton_schulz_follows_the_processor(monkeypatch):
    device = torch.device("cpu")
    for able, expected in (
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "amx_bf16": False}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: able)
        assert fast_type(device) == expected


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"adamw_learning_rate": -1.0}, "adamw_learning_rate .* -1.0"),
        ({"momentum": 1.0}, "momentum .* 1.0"),
        ({"newton_schulz_steps": 0}, "got 0"),
        ({"betas": (1.0, 0.9)}, "betas .*1.0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(options, numbers):
    with pytest.raises(ValueError, match=numbers):
        MuonConfig(**{"learning_rate": 0.02, "adamw_learning_rate": 1e-3, **options})
