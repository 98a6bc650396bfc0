"""Our decoder against Hugging Face's on small random weights: logits and the gradient of every parameter."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.parity.families import CASES, VOCABULARY, Case

by_name = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@by_name
def test_logits_and_gradients_equal_the_reference(case: Case) -> None:
    reference = case.reference()
    imported = case.take(reference.config.to_dict(), reference.state_dict())
    ours = imported.build().eval()
    tokens_BT = torch.randint(0, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
    theirs_BTV = reference(tokens_BT).logits
    logits_BTV = ours(tokens_BT).logits_BTV
    weight_BTV = torch.randn(theirs_BTV.shape, generator=torch.Generator().manual_seed(2)) / 60
    (theirs_BTV * weight_BTV).sum().backward()
    (logits_BTV * weight_BTV).sum().backward()

    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    expected = case.take(reference.config.to_dict(), gradients).state
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert found.keys() == expected.keys()
    worst = max((float((found[name] - expected[name]).abs().max()), name) for name in found)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    logits = float((logits_BTV - theirs_BTV).detach().abs().max())
    print(f"{case.name:30s} logits {logits:.1e}   gradients {worst[0]:.1e} of {scale:.1e} ({worst[1]})")
    assert logits <= 1e-4
    assert worst[0] <= 1e-4
    assert scale > 0.1


@by_name
def test_export_of_an_import_is_the_same_bits(case: Case) -> None:
    reference = case.reference()
    state = reference.state_dict()
    config, exported = case.give(case.take(reference.config.to_dict(), state))
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], state[name]) for name in state)
    for name, value in reference.config.to_dict().items():
        if name in config and name not in ("architectures", "attn_pdrop", "n_inner"):
            assert config[name] == value, name
    again = case.take(config, exported)
    assert case.give(again)[0] == config


@by_name
def test_reference_loads_an_export(case: Case) -> None:
    reference = case.reference()
    config, exported = case.give(case.take(reference.config.to_dict(), reference.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = type(reference)(type(reference.config)(**config, attn_implementation="eager")).eval()
    again.load_state_dict(exported)
    tokens_BT = torch.arange(20)[None]
    assert torch.equal(again(tokens_BT).logits, reference(tokens_BT).logits)
