"""Factors on the learning rate: by pattern, by the width of a module, and as parameter groups."""

import pytest
import torch
from torch import nn

from mmlab.backbone.layers import Linear
from mmlab.optim.adamw import AdamWConfig
from mmlab.optim.base import decay_groups, learning_rate_factors, set_learning_rate


def network():
    wide = Linear(4, 4, bias=True, std=0.1, width_factor=8.0)
    return nn.ModuleDict({"stem": nn.Embedding(5, 4), "first": wide, "second": Linear(4, 3, True, 0.1)})


def test_the_last_pattern_that_matches_counts_and_factors_of_one_are_left_out():
    patterns = {"*": 0.5, "second.*": 1.0, "*.bias": 0.0}
    assert learning_rate_factors(network(), patterns, 0.0) == {
        "stem.weight": 0.5,
        "first.weight": 0.5,
        "first.bias": 0.0,
        "second.bias": 0.0,
    }


def test_the_width_of_a_module_divides_its_weights_rate_by_a_power_and_multiplies_the_pattern():
    assert learning_rate_factors(network(), {}) == {"first.weight": 0.125}
    assert learning_rate_factors(network(), {}, 0.0) == {}
    patterns = {"first.*": 0.5}
    assert learning_rate_factors(network(), patterns) == {"first.weight": 0.0625, "first.bias": 0.5}
    assert learning_rate_factors(network(), {}, 1 / 3)["first.weight"] == pytest.approx(0.5)
    assert learning_rate_factors(Linear(2, 2, True, 0.1, 4.0), {}) == {"weight": 0.25}


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("frist.weight", r"'frist\.weight' matches no parameter; close names: first\.weight"),
        ("zzz", r"'zzz' matches no parameter; the first of 5: \['stem\.weight', 'first\.weight', "),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_names_that_are_close(pattern, words):
    with pytest.raises(ValueError, match=words):
        learning_rate_factors(network(), {"*": 1.0, pattern: 0.5})


def test_groups_are_pairs_of_decay_and_factor_without_what_is_frozen():
    module = network()
    module["stem"].requires_grad_(False)
    factors = {"first.weight": 0.5, "first.bias": 0.5, "stem.weight": 3.0}
    groups = decay_groups(module.named_parameters(), 0.3, 0.1, factors)
    names = {id(p): name for name, p in module.named_parameters()}
    found = [(g["weight_decay"], g["peak_lr"], g["lr"], [names[id(p)] for p in g["params"]]) for g in groups]
    assert found == [
        (0.3, 0.05, 0.05, ["first.weight"]),
        (0.3, 0.1, 0.1, ["second.weight"]),
        (0.0, 0.05, 0.05, ["first.bias"]),
        (0.0, 0.1, 0.1, ["second.bias"]),
    ]


def test_adamw_moves_by_the_factor_and_not_at_all_at_zero():
    module = network()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    factors = {"first.weight": 0.5, "first.bias": 0.0}
    config = AdamWConfig(learning_rate=0.1, weight_decay=0.0)
    optimizer = config.build(module.named_parameters(), factors)
    set_learning_rate(optimizer, 0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # the first step of Adam is the learning rate times the gradient's sign
    expected = {"stem.weight": 0.01, "first.weight": 0.005, "first.bias": 0.0}
    for name, parameter in module.named_parameters():
        moved = before[name] - parameter.detach()
        torch.testing.assert_close(moved, torch.full_like(moved, expected.get(name, 0.01)), msg=name)
