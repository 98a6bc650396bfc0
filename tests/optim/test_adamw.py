"""AdamW: which parameters decay, and the half-width variant against torch's own in float32."""

import pytest
import torch
from torch import nn

from mmlab.optim.adamw import AdamWConfig
from mmlab.optim.base import set_learning_rate
from mmlab.optim.half import HalfAdamW


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    module = nn.ModuleDict({"linear": nn.Linear(8, 4), "norm": nn.LayerNorm(4)}).to(dtype)
    module.register_parameter("temperature", nn.Parameter(torch.ones((), dtype=dtype)))
    return module


def test_only_matrices_decay():
    module = parameters()
    optimizer = AdamWConfig(learning_rate=0.1, weight_decay=0.3).build(module.named_parameters())
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: decay[id(p)] for name, p in module.named_parameters()}
    assert named == {
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "temperature": 0.0,
    }


def test_frozen_parameters_are_left_out():
    module = parameters()
    module["linear"].requires_grad_(False)
    optimizer = AdamWConfig(learning_rate=0.1).build(module.named_parameters())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 3


def test_the_learning_rate_is_a_fraction_of_each_groups_peak():
    optimizer = AdamWConfig(learning_rate=0.5).build(parameters().named_parameters())
    optimizer.param_groups[1]["peak_lr"] = 0.1
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.05]


def train(optimizer, module, steps):
    for step in range(steps):
        for index, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(97 * step + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def test_half_adamw_equals_torch_adamw_where_the_parameters_are_float32():
    ours, theirs = parameters(), parameters()
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    train(HalfAdamW([{"params": list(ours.parameters()), "weight_decay": 0.1}], **options), ours, 20)
    train(torch.optim.AdamW(theirs.parameters(), weight_decay=0.1, **options), theirs, 20)
    for (name, mine), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, reference, atol=1e-6), name


def test_half_parameters_get_float32_state_and_keep_steps_that_their_own_type_would_lose():
    module = parameters(torch.bfloat16)
    optimizer = AdamWConfig(learning_rate=1e-4, weight_decay=0.0).build(module.named_parameters())
    assert isinstance(optimizer, HalfAdamW)
    weight = module["norm"].weight
    for _ in range(100):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = optimizer.state[weight]
    assert {value.dtype for value in state.values()} == {torch.float32}
    # 100 steps of 1e-4 move a weight of 1 to 0.99; each alone is under half a bfloat16 step and would vanish
    assert weight[0].item() == pytest.approx(0.99, abs=0.004)
    assert state["master"][0].item() == pytest.approx(0.99, abs=1e-4)


def test_state_of_half_adamw_survives_saving_in_float32():
    module = parameters(torch.bfloat16)
    optimizer = HalfAdamW([{"params": list(module.parameters())}], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    train(optimizer, module, 3)
    saved = optimizer.state_dict()
    other = HalfAdamW([{"params": list(module.parameters())}], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    other.load_state_dict(saved)
    for parameter in module.parameters():
        for name, value in optimizer.state[parameter].items():
            assert torch.equal(other.state[parameter][name], value), name
            assert other.state[parameter][name].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"learning_rate": -1.0}, "-1.0"),
        ({"learning_rate": 0.1, "clip_norm": 0.0}, "got 0.0"),
        ({"learning_rate": 0.1, "betas": (0.9, 1.0)}, "1.0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(options, numbers):
    with pytest.raises(ValueError, match=numbers):
        AdamWConfig(**options)
