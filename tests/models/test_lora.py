"""Low-rank updates: equal to the base at first, trained alone, merged without a change; what is trained."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from probes import StopHere
from tiny_runs import losses, make_run, tiny
from torch import nn

from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.layers import Linear
from mmlab.config import configure
from mmlab.models.adapt import AdaptConfig, LoRAConfig
from mmlab.models.decoder import Decoder, DecoderConfig
from mmlab.models.lora import LoRALinear, add_lora, merge_lora, set_trained
from mmlab.runconfig import save_config
from mmlab.train import build_task, run

BACKBONE = BackboneConfig(width=16, depth=2, num_heads=2, init_std=0.2)
LORA = LoRAConfig(rank=2, alpha=6.0)
TOKENS = torch.tensor([[3, 5, 7, 11], [2, 4, 6, 8]])
ADAPTED = [f"backbone.blocks.{i}.attention.{name}" for i in (0, 1) for name in ("query", "value")]


def decoder(tie: bool = True, **changes: object) -> Decoder:
    torch.manual_seed(0)
    return Decoder(dataclasses.replace(BACKBONE, **changes), DecoderConfig(tie_embeddings=tie), 20)  # type: ignore[arg-type]


def loss(network: Decoder) -> torch.Tensor:
    return network(TOKENS, targets_BT=TOKENS.flip(1)).nll_BT.sum()


def adapted(config: LoRAConfig = LORA, *, touched: bool = True) -> Decoder:
    """A decoder with updates; `touched` ones are not zero."""
    network = decoder()
    add_lora(network, config)
    set_trained(network, AdaptConfig(lora=config))
    if touched:
        for name, parameter in network.named_parameters():
            if name.endswith("lora_b"):
                nn.init.normal_(parameter, std=0.3)
    return network


def test_a_fresh_network_with_updates_is_the_base_and_keeps_its_keys() -> None:
    base, network = decoder(), adapted(touched=False)
    assert torch.equal(network(TOKENS).logits_BTV, base(TOKENS).logits_BTV)
    new = {f"{name}.{part}" for name in ADAPTED for part in ("lora_a", "lora_b")}
    assert set(network.state_dict()) == set(base.state_dict()) | new
    for name, value in base.state_dict().items():
        assert torch.equal(network.state_dict()[name], value)
    module = network.get_submodule(ADAPTED[0])
    assert isinstance(module, LoRALinear)
    assert (module.lora_a.shape, module.lora_b.shape) == ((2, 16), (16, 2))
    assert 0 < module.lora_a.abs().max() <= 16**-0.5  # Kaiming's bound for sqrt(5)


def test_the_update_is_alpha_over_rank_times_b_a_x() -> None:
    module = Linear(6, 4, bias=True, std=1.0)
    nn.init.normal_(module.bias)
    weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
    add_lora(nn.ModuleDict({"m": module}), dataclasses.replace(LORA, targets=("m",)))
    assert isinstance(module, LoRALinear)
    nn.init.normal_(module.lora_b)
    x = torch.randn(3, 6)
    expected = x @ (weight + 6.0 / 2 * module.lora_b @ module.lora_a).T + bias
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=0)


def test_gradients_are_those_of_the_updates_alone_and_a_step_leaves_the_base_bits() -> None:
    network, base = adapted(touched=False), decoder().state_dict()
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.1)
    before = loss(network).item()
    for _ in range(3):
        optimizer.zero_grad()
        loss(network).backward()
        got = {name for name, p in network.named_parameters() if p.grad is not None}
        assert got == {f"{name}.{part}" for name in ADAPTED for part in ("lora_a", "lora_b")}
        optimizer.step()
    assert loss(network).item() < before - 1
    assert all(torch.equal(network.state_dict()[name], value) for name, value in base.items())
    assert all(network.state_dict()[f"{name}.lora_b"].abs().min() > 0 for name in ADAPTED)


def test_merged_weights_give_the_same_outputs_without_the_parameters() -> None:
    network = adapted()
    expected, plain = network(TOKENS).logits_BTV, decoder()(TOKENS).logits_BTV
    assert merge_lora(network) == ADAPTED
    torch.testing.assert_close(network(TOKENS).logits_BTV, expected, atol=1e-5, rtol=0)
    assert (expected - plain).abs().max() > 0.1
    exported = decoder()
    exported.load_state_dict(network.state_dict(), strict=True)
    assert torch.equal(exported(TOKENS).logits_BTV, network(TOKENS).logits_BTV)
    assert not any(isinstance(module, LoRALinear) for module in network.modules())
    assert merge_lora(network) == []
    assert add_lora(network, LORA) == ADAPTED


def test_copies_and_states_carry_the_updates() -> None:
    network = adapted()
    expected = network(TOKENS).logits_BTV
    copied = copy.deepcopy(network)
    with torch.no_grad():
        network.get_parameter(f"{ADAPTED[0]}.lora_b").zero_()
    assert torch.equal(copied(TOKENS).logits_BTV, expected)
    other = adapted(touched=False)
    other.load_state_dict(copied.state_dict(), strict=True)
    assert torch.equal(other(TOKENS).logits_BTV, expected)
    with pytest.raises(RuntimeError, match="lora_a"):
        decoder().load_state_dict(copied.state_dict(), strict=True)


def test_updates_follow_autocast_and_half_width_weights() -> None:
    network = adapted()
    expected = network(TOKENS).logits_BTV
    with torch.autocast("cpu", torch.bfloat16):
        module = network.get_submodule(ADAPTED[0])
        assert module(torch.randn(2, 16)).dtype == torch.bfloat16
        found = network(TOKENS).logits_BTV
    assert 0 < (found - expected).abs().max() < 0.15
    half = decoder().to(torch.bfloat16)
    add_lora(half, LORA)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert torch.isfinite(half(TOKENS).logits_BTV).all()
    merge_lora(half)
    assert half.get_parameter(f"{ADAPTED[0]}.weight").dtype == torch.bfloat16


def test_dropout_acts_on_the_update_in_training_alone() -> None:
    network = adapted(dataclasses.replace(LORA, dropout=0.5))
    network.eval()
    expected = adapted()(TOKENS).logits_BTV
    assert torch.equal(network(TOKENS).logits_BTV, expected)
    network.train()
    assert not torch.equal(network(TOKENS).logits_BTV, expected)
    base = adapted(dataclasses.replace(LORA, dropout=0.5), touched=False).train()
    assert torch.equal(base(TOKENS).logits_BTV, decoder()(TOKENS).logits_BTV)


def test_a_factor_on_the_width_stays_with_the_matrix() -> None:
    module = Linear(8, 8, bias=False, std=1.0, width_factor=4.0)
    add_lora(nn.ModuleDict({"m": module}), dataclasses.replace(LORA, targets=("m",)))
    assert module.width_factor == 4.0


@pytest.mark.parametrize(
    ("targets", "rank", "message"),
    [
        (
            ("*.attention.quary",),
            2,
            r"'\*.attention.quary' matches no Linear; near names are backbone.*query",
        ),
        (("stem.embedding",), 2, r"'stem.embedding' matches no Linear \(.* of type Embedding\)"),
        (("*.mlp",), 2, r"of type MLP\)"),
        (("*.query",), 17, r"rank 17 is more than the matrix backbone.*query has: 16 x 16"),
    ],
)
def test_targets_must_be_matrices(targets: tuple[str, ...], rank: int, message: str) -> None:
    network = decoder()
    with pytest.raises(ValueError, match=message):
        add_lora(network, LoRAConfig(rank=rank, targets=targets))
    assert not any(isinstance(module, LoRALinear) for module in network.modules())


def test_a_second_update_is_refused() -> None:
    network = adapted()
    with pytest.raises(ValueError, match=r"backbone.blocks.0.attention.query has a low-rank update already"):
        add_lora(network, LORA)


# -- what is trained --------------------------------------------------------------------------------


def trained(network: nn.Module) -> set[str]:
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


def test_what_is_trained_and_how_much() -> None:
    network = decoder()
    names = {name for name, _ in network.named_parameters()}
    total = sum(parameter.numel() for parameter in network.parameters())
    assert set_trained(network, AdaptConfig()) == (total, 0)
    assert trained(network) == names
    counts = set_trained(network, AdaptConfig(freeze=("stem.*", "backbone.blocks.0.*")))
    left = {name for name in names if not name.startswith(("stem.", "backbone.blocks.0."))}
    assert trained(network) == left
    assert counts.trained == sum(network.get_parameter(name).numel() for name in left)
    assert sum(counts) == total
    set_trained(network, AdaptConfig(freeze=("*",), train=("*norm*",)))
    assert trained(network) == {name for name in names if "norm" in name}
    set_trained(network, AdaptConfig())
    assert trained(network) == names


def test_updates_are_trained_alone_save_what_train_names() -> None:
    network = adapted()
    counts = set_trained(
        network, AdaptConfig(lora=LORA, freeze=("*.blocks.0.*",), train=("backbone.norm.*",))
    )
    assert trained(network) == {
        "backbone.norm.weight",
        "backbone.norm.bias",
        *(f"{name}.{part}" for name in ADAPTED[2:] for part in ("lora_a", "lora_b")),
    }
    assert counts.trained == 2 * 16 + 2 * 2 * (2 * 16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            AdaptConfig(freeze=("stem.embeding.*",)),
            "freeze: 'stem.embeding.*' matches no .*stem.embedding.weight",
        ),
        (AdaptConfig(train=("header",)), "train: 'header' matches no parameter"),
        (AdaptConfig(freeze=("*",)), r"freeze \['\*'\] leaves nothing to train"),
        (AdaptConfig(lora=LORA), "no low-rank updates: call add_lora first"),
    ],
)
def test_what_cannot_be_meant_is_refused(config: AdaptConfig, message: str) -> None:
    network = decoder()
    with pytest.raises(ValueError, match=message):
        set_trained(network, config)
    assert trained(network) == {name for name, _ in network.named_parameters()}


# -- a run ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_run_of_updates_goes_on_as_if_it_had_not_and_leaves_the_base_alone(tmp_path: Path) -> None:
    lora = "adapt.lora={rank: 4, alpha: 8.0, targets: ['*.attention.*'], dropout: 0.1}"
    words = tiny(tmp_path, "schedule.steps=8", "trainer.checkpoint_every=3", "trainer.validate_every=3", lora)
    whole = make_run(tmp_path / "whole", words)
    run(whole)
    stop = "+callbacks.stop={_target_: probes.StopConfig, step: 5}"
    stopped = make_run(tmp_path / "stopped", [*words, stop])
    with pytest.raises(StopHere):
        run(stopped)
    save_config(configure(words), stopped)
    run(stopped)
    assert losses(stopped) == losses(whole)
    first, last = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True) for folder in (whole, stopped)
    )
    task = build_task(configure(words))
    task.configure_model()
    for name, value in task.state_dict().items():
        changed = not torch.equal(first["state_dict"][name], value)
        assert changed == name.endswith(("lora_a", "lora_b")), name
        assert torch.equal(first["state_dict"][name], last["state_dict"][name])
    names = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    assert set(first["optimizer_states"][0]["state"]) == names


def test_an_output_layer_of_its_own_can_be_updated() -> None:
    network, config = decoder(tie=False), dataclasses.replace(LORA, targets=("head",))
    add_lora(network, config)
    set_trained(network, AdaptConfig(lora=config))
    loss(network).backward()
    assert network.get_parameter("head.lora_b").grad.abs().max() > 0
