"""An output layer that is the embedding stays it, and constants stay what they are, whatever is done."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmlab.interop.huggingface import export_folder, import_folder
from mmlab.interop.weights import ImportedDecoder
from mmlab.models.decoder import Decoder
from mmlab.optim.adamw import AdamWConfig
from mmlab.optim.base import set_learning_rate
from tests.parity.families import CASES, Case

TIED = [case for case in CASES if case.name in ("gpt2", "llama, grouped, tied")]
by_name = pytest.mark.parametrize("case", TIED, ids=[case.name for case in TIED])
TOKENS = torch.arange(12)[None]


def imported(case: Case) -> ImportedDecoder:
    reference = case.reference()
    return case.take(reference.config.to_dict(), reference.state_dict())


def is_tied(network: Decoder) -> bool:
    """Whether logits follow the embedding, by changing it: no parameter is trusted to be the right one."""
    changed = copy.deepcopy(network).eval()
    with torch.no_grad():
        hidden = changed(TOKENS).logits_BTV
        changed.stem.embedding.weight[-1] *= 2  # an id that TOKENS does not have
        after = changed(TOKENS).logits_BTV
    assert hidden is not None
    assert after is not None
    return bool(
        torch.equal(after[..., :-1], hidden[..., :-1])
        and torch.allclose(after[..., -1], 2 * hidden[..., -1], rtol=1e-5)
        and network.head is None
    )


@by_name
def test_with_and_without_the_output_layer_in_the_file(case: Case) -> None:
    reference = case.reference()
    state: dict[str, Tensor] = dict(reference.state_dict())
    assert "lm_head.weight" in state
    both = case.take(reference.config.to_dict(), state).state
    del state["lm_head.weight"]
    one = case.take(reference.config.to_dict(), state)
    assert both.keys() == one.state.keys()
    assert "head.weight" not in both
    assert is_tied(one.build())


@by_name
def test_the_tie_outlives_everything_that_is_done_to_a_network(case: Case, tmp_path: Path) -> None:
    given = imported(case)
    network = given.build().eval()
    assert is_tied(network)

    network.load_state_dict(copy.deepcopy(network.state_dict()), strict=True)
    assert is_tied(network)
    network.load_state_dict(copy.deepcopy(network.state_dict()), strict=True, assign=True)
    assert is_tied(network)
    assert is_tied(copy.deepcopy(network))

    before = network.stem.embedding.weight.detach().clone()
    optimizer = AdamWConfig(learning_rate=1e-2).build(network.named_parameters())
    set_learning_rate(optimizer, 1.0)
    network(TOKENS).logits_BTV.square().mean().backward()
    optimizer.step()
    assert not torch.equal(network.stem.embedding.weight, before)
    assert is_tied(network)

    torch.save(network.state_dict(), tmp_path / "x.pt")
    again = given.build().eval()
    again.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    assert is_tied(again)
    assert torch.equal(again(TOKENS).logits_BTV, network(TOKENS).logits_BTV)


@by_name
def test_an_average_of_weights_keeps_the_tie(case: Case) -> None:
    network = imported(case).build()
    average = torch.optim.swa_utils.AveragedModel(
        network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.update_parameters(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    average.update_parameters(network)
    assert torch.allclose(average.module.stem.embedding.weight, network.stem.embedding.weight * 0.75)
    assert is_tied(average.module)


@by_name
def test_the_shared_matrix_is_counted_once(case: Case) -> None:
    reference = case.reference()
    given = imported(case)
    network = given.build()
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == reference.num_parameters()
    assert count == given.model.cost(given.backbone, given.size, 1, 1).parameters
    optimizer = AdamWConfig(learning_rate=1e-2).build(network.named_parameters())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sum(parameter.numel() for parameter in held) == count
    assert len({id(parameter) for parameter in held}) == len(held)
    untied = replace(given.model, tie_embeddings=False)
    more = Decoder(given.backbone, untied, given.size)
    assert (
        sum(parameter.numel() for parameter in more.parameters()) == count + reference.lm_head.weight.numel()
    )


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_constants_outlive_saving_and_loading(case: Case, tmp_path: Path) -> None:
    given = imported(case)
    again = import_folder(export_folder(given, tmp_path / "out"), expected=given.backbone).decoder
    assert replace(again.backbone, mlp_size=None) == replace(given.backbone, mlp_size=None)
    assert again.model == given.model
    with torch.no_grad():
        assert torch.equal(again.build().eval()(TOKENS).logits_BTV, given.build().eval()(TOKENS).logits_BTV)
    epsilons = {
        module.eps for module in again.build().modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)
    }
    assert epsilons <= {given.backbone.norm_eps}
