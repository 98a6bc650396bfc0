"""Weights come out of run folders, checkpoint files and Hugging Face folders, or it is said why not."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmlab.backbone.config import BackboneConfig
from mmlab.interop.checkpoint import load_weights, merge_updates, read_checkpoint, read_weights
from mmlab.interop.huggingface import export_folder
from mmlab.interop.weights import ImportedDecoder, InteropError
from mmlab.models.adapt import AdaptConfig, LoRAConfig
from mmlab.models.decoder import Decoder, DecoderConfig
from mmlab.models.lora import add_lora, merge_lora
from mmlab.typed import to_plain

BACKBONE = BackboneConfig(
    16, 2, 2, activation="swiglu", norm="rmsnorm", bias=False, position="rotary", dropout=0.1
)
MODEL = DecoderConfig(decoder={"depth": 1})
SIZE = 31


def network(seed: int = 0, model: DecoderConfig = MODEL) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(BackboneConfig(**{**to_plain(BACKBONE), **model.decoder}), model, SIZE)


def content(net: Decoder, **changes: Any) -> dict[str, Any]:
    """A checkpoint as a run writes it, as far as weights are concerned."""
    parts = {
        "backbone": to_plain(BACKBONE),
        "model": {"_target_": "mmlab.models.decoder.DecoderConfig", **to_plain(net.config)},
        "modality": {"text": {"_target_": "mmlab.modalities.text.vocabulary.BytesConfig"}},
        "adapt": to_plain(AdaptConfig()),
    }
    state = {f"network.{name}": value for name, value in net.state_dict().items()}
    return {"state_dict": state, "hyper_parameters": {"parts": parts}, "global_step": 3} | changes


def run_folder(root: Path, **files: dict[str, Any]) -> Path:
    (root / "checkpoints").mkdir(parents=True)
    for name, value in files.items():
        torch.save(value, root / "checkpoints" / f"{name}.ckpt")
    return root


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_run_folder_gives_its_best_else_its_last(tmp_path: Path) -> None:
    best, last = network(1), network(2)
    both = run_folder(tmp_path / "both", best=content(best), last=content(last))
    one = run_folder(tmp_path / "one", last=content(last))
    assert same(read_weights(both).state, best.state_dict())
    assert same(read_weights(both, which="last").state, last.state_dict())
    assert same(read_weights(one).state, last.state_dict())
    assert read_weights(one).source == one / "checkpoints" / "last.ckpt"


def test_links_as_a_run_makes_them_are_followed(tmp_path: Path) -> None:
    net = network()
    folder = run_folder(tmp_path / "run", **{"step-0000000003": content(net)}) / "checkpoints"
    (folder / "last.ckpt").symlink_to("step-0000000003.ckpt")
    assert same(read_weights(tmp_path / "run").state, net.state_dict())
    (folder / "best.ckpt").symlink_to("step-0000000002.ckpt")
    with pytest.raises(
        InteropError, match=r"best\.ckpt points to step-0000000002\.ckpt, which does not exist"
    ):
        read_weights(tmp_path / "run")


def test_a_file_gives_state_and_configuration(tmp_path: Path) -> None:
    net = network()
    path = tmp_path / "x.ckpt"
    torch.save(content(net), path)
    weights = read_weights(path)
    assert same(weights.state, net.state_dict())
    assert weights.backbone == BackboneConfig(**{**to_plain(BACKBONE), "depth": 1})
    assert (weights.model, weights.size, weights.source) == (MODEL, SIZE, path)
    file, state, parts = read_checkpoint(path)
    assert (file, parts["backbone"]) == (path, to_plain(BACKBONE))
    assert same(state, net.state_dict())


def test_a_hugging_face_folder_gives_the_same(tmp_path: Path) -> None:
    net = network()
    imported = ImportedDecoder(
        BackboneConfig(**{**to_plain(BACKBONE), "depth": 1}), DecoderConfig(), SIZE, net.state_dict()
    )
    folder = export_folder(imported, tmp_path / "hf")
    weights = read_weights(folder)
    assert same(weights.state, net.state_dict())
    assert (weights.size, weights.source) == (SIZE, folder)
    with pytest.raises(InteropError, match="has no averaged weights"):
        read_weights(folder, ema=True)


def test_averaged_weights_are_read_where_asked(tmp_path: Path) -> None:
    net, average = network(1), network(2)
    path = tmp_path / "x.ckpt"
    torch.save(content(net, ema={"weights": average.state_dict(), "count": 5}), path)
    assert same(read_weights(path).state, net.state_dict())
    assert same(read_weights(path, ema=True).state, average.state_dict())

    part = {"network.stem.embedding.weight": average.state_dict()["stem.embedding.weight"]}
    torch.save(content(net, ema={"weights": part}), path)  # only what was trained
    mixed = read_weights(path, ema=True).state
    assert torch.equal(mixed["stem.embedding.weight"], average.stem.embedding.weight)
    assert torch.equal(mixed["backbone.norm.weight"], net.backbone.norm.weight)

    torch.save(content(net, ema={"weights": {"nonsense": torch.zeros(1)}}), path)
    with pytest.raises(InteropError, match=r"ema\.weights has \['nonsense'\]"):
        read_weights(path, ema=True)
    torch.save(content(net), path)
    with pytest.raises(InteropError, match=r"x\.ckpt has no averaged weights"):
        read_weights(path, ema=True)


def test_low_rank_updates_are_merged_by_their_formula(tmp_path: Path) -> None:
    net, rng = network(), np.random.default_rng(0)
    module = "backbone.blocks.0.attention.query"
    a, b = rng.normal(size=(2, 16)).astype(np.float32), rng.normal(size=(16, 2)).astype(np.float32)
    saved = content(net)
    saved["state_dict"] |= {f"network.{module}.lora_a": torch.tensor(a)}
    saved["state_dict"] |= {f"network.{module}.lora_b": torch.tensor(b)}
    path = tmp_path / "x.ckpt"
    torch.save(saved, path)
    with pytest.raises(InteropError, match=r"has low-rank updates, but its parts name no adapt\.lora"):
        read_weights(path)

    adapt = AdaptConfig(lora=LoRAConfig(rank=2, alpha=6.0))
    saved["hyper_parameters"]["parts"]["adapt"] = to_plain(adapt)
    torch.save(saved, path)
    weight = net.state_dict()[f"{module}.weight"].numpy()
    merged = read_weights(path).state
    np.testing.assert_allclose(merged[f"{module}.weight"].numpy(), weight + 3.0 * b @ a, atol=1e-6)
    assert merged.keys() == net.state_dict().keys()
    apart = read_weights(path, merge=False).state
    assert torch.equal(apart[f"{module}.weight"], torch.tensor(weight))
    assert torch.equal(apart[f"{module}.lora_b"], torch.tensor(b))


def test_low_rank_updates_are_merged_as_in_a_network() -> None:
    net, config = network(), LoRAConfig(rank=2, alpha=6.0)
    assert len(add_lora(net, config)) == 2
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_()
    state = copy.deepcopy(net.state_dict())
    merge_lora(net)
    assert same(merge_updates(state, config.rank, config.alpha), net.state_dict())
    assert not torch.equal(
        state["backbone.blocks.0.attention.query.weight"], net.backbone.blocks[0].attention.query.weight
    )


def test_what_a_run_trained_goes_out_as_a_folder(tmp_path: Path) -> None:
    net = network()
    torch.save(content(net), tmp_path / "x.ckpt")
    weights = read_weights(tmp_path / "x.ckpt")
    folder = export_folder(weights.decoder(), tmp_path / "hf")
    again = read_weights(folder)
    assert same(again.state, net.state_dict())
    load_weights(network(7), folder, BACKBONE)
    with pytest.raises(InteropError, match=r"x\.ckpt holds no decoder"):
        replace(weights, model=None).decoder()


def test_an_update_that_does_not_fit_is_named() -> None:
    state = {"m.weight": torch.zeros(3, 4), "m.lora_a": torch.zeros(2, 4), "m.lora_b": torch.zeros(3, 2)}
    with pytest.raises(InteropError, match=r"A \(2, 4\) and B \(3, 2\), which do not fit rank 1"):
        merge_updates(state, 1, 1.0)
    for name in state:
        with pytest.raises(InteropError, match=rf"update of m lacks \['{name}'\]"):
            merge_updates({key: value for key, value in state.items() if key != name}, 2, 1.0)
    half = {name: value.bfloat16() for name, value in state.items()}
    assert merge_updates(half, 2, 1.0)["m.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_dict": None}, r"x\.ckpt is no checkpoint of a run: .* and holds \['global_step'"),
        ({"hyper_parameters": {}}, r"needs state_dict and hyper_parameters\.parts"),
        ({"state_dict": {}}, "weights begin with 'network.', but there are"),
        ({"state_dict": {"model.w": torch.zeros(1)}}, r"there are \['model\.w'\]"),
        ({"state_dict": {"network.w": torch.zeros(1)}}, r"lacks stem\.embedding\.weight"),
        ({"hyper_parameters": {"parts": {"model": {"_target_": "os.path"}}}}, r"x\.ckpt: model"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    torch.save(content(network(), **changes), tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path / "x.ckpt")


def test_missing_and_cut_off_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InteropError, match="nowhere does not exist"):
        read_weights(tmp_path / "nowhere")
    with pytest.raises(
        InteropError, match=r"neither a run folder \(no checkpoints\) nor has it a config\.json"
    ):
        read_weights(tmp_path)
    run = run_folder(tmp_path / "run")
    with pytest.raises(InteropError, match=r"checkpoints has no best\.ckpt and no last\.ckpt"):
        read_weights(run)
    last = run / "checkpoints" / "last.ckpt"
    torch.save(content(network()), last)
    whole = last.read_bytes()
    for size in (0, 100, len(whole) // 2):
        last.write_bytes(whole[:size])
        with pytest.raises(InteropError, match=r"last\.ckpt cannot be read, it may be cut off"):
            read_weights(run)
    torch.save({"state_dict": Path("x")}, last)
    with pytest.raises(InteropError, match=r"last\.ckpt cannot be read, it may be cut off or foreign"):
        read_weights(run)


def test_weights_go_into_a_network_that_computes_the_same(tmp_path: Path) -> None:
    source, target = network(1), network(2).bfloat16()
    path = tmp_path / "x.ckpt"
    torch.save(content(source), path)
    weight = target.stem.embedding.weight
    load_weights(target, path, BACKBONE)
    assert target.stem.embedding.weight is weight  # an optimizer or a sharding plan may know it
    assert torch.equal(weight, source.stem.embedding.weight.bfloat16())


@pytest.mark.parametrize(
    ("backbone", "model", "size", "message"),
    [
        ({"norm_eps": 1e-3}, {}, SIZE, r"x\.ckpt: norm_eps: the checkpoint has 1e-05, 0\.001 was asked for"),
        ({"qk_norm": True}, {}, SIZE, "qk_norm"),
        ({"depth": 1}, {"decoder": {}}, SIZE, None),
        ({}, {"logit_soft_cap": 3.0}, SIZE, r"model\.logit_soft_cap is None there, 3\.0 was asked for"),
        ({}, {"tie_embeddings": False}, SIZE, "model.tie_embeddings is True there, False"),
        ({}, {}, SIZE + 1, "has 31 ids, the vocabulary 32"),
        ({"dropout": 0.5, "init_std": 1.0}, {}, SIZE, None),
        ({"norm_eps": 9.999999747378752e-06}, {}, SIZE, None),  # 1e-5 in float32
    ],
)
def test_weights_of_another_network_are_refused(
    tmp_path: Path, backbone: dict[str, Any], model: dict[str, Any], size: int, message: str | None
) -> None:
    torch.save(content(network()), tmp_path / "x.ckpt")
    config = DecoderConfig(**{"decoder": {"depth": 1}, **model})
    common = BackboneConfig(**{**to_plain(BACKBONE), **backbone})
    target = Decoder(BackboneConfig(**{**to_plain(common), **config.decoder}), config, size)
    if message is None:
        load_weights(target, tmp_path / "x.ckpt", common)
        assert torch.equal(target.stem.embedding.weight, network().stem.embedding.weight)
    else:
        with pytest.raises(InteropError, match=message):
            load_weights(target, tmp_path / "x.ckpt", common)
