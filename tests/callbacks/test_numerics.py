"""Sizes in a network: values against a computation by hand, and that the run does not notice."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import losses, make_run, start, tiny
from torch import Tensor, nn

from mmlab.backbone.attention import Attention
from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.masks import build_mask, dense_mask
from mmlab.backbone.positions import document_positions, rotary, rotate
from mmlab.callbacks.attention_numerics import _visible, attention_numbers
from mmlab.callbacks.numerics import Numerics, NumericsConfig
from mmlab.config import configure
from mmlab.data.collate import Batch
from mmlab.models.adapt import AdaptConfig
from mmlab.models.decoder import IGNORE, Decoder, DecoderConfig
from mmlab.models.lora import set_trained
from mmlab.train import run

GPT = BackboneConfig(width=16, depth=2, num_heads=2, init_std=0.2)
LLAMA = dataclasses.replace(
    GPT, norm="rmsnorm", activation="swiglu", bias=False, position="rotary", num_kv_heads=1, qk_norm=True
)
SIZE = 20
TOKENS = torch.tensor([[3, 5, 7, 2, 4, 6, 8, 10, 0], [1, 9, 9, 9, 3, 2, 1, 1, 8]])
SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
TARGETS = TOKENS.roll(-1, 1).masked_fill(SEGMENTS == 0, IGNORE)
MICRO_BATCHES = [(TOKENS, SEGMENTS, TARGETS), (TOKENS[:1], SEGMENTS[:1], TARGETS[:1])]
TRAINER: Any = SimpleNamespace(world_size=1)


class FakeTask(nn.Module):
    """A network, and what is published of it."""

    def __init__(self, network: Decoder) -> None:
        super().__init__()
        self.network = network
        self.published: list[dict[str, float]] = []

    def publish(self, values: dict[str, float]) -> None:
        self.published.append(values)


def decoder(backbone: BackboneConfig, **model: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(backbone, DecoderConfig(**model), SIZE)


def step(callback: Any, task: FakeTask, number: int = 1, rate: float = 0.1) -> dict[str, Tensor]:
    """An optimizer step of gradient descent; returns the gradients."""
    for micro, (tokens, segments, targets) in enumerate(MICRO_BATCHES):
        batch = Batch({}, torch.zeros(0), {}, step=number, micro=micro, accumulation=len(MICRO_BATCHES))
        callback.on_train_batch_start(TRAINER, task, batch, 0)
        task.network(tokens, segments_BT=segments, targets_BT=targets).nll_BT.sum().backward()
        if micro + 1 == len(MICRO_BATCHES):
            gradients = {n: p.grad.clone() for n, p in task.network.named_parameters() if p.grad is not None}
            callback.on_before_optimizer_step(TRAINER, task, None)
            with torch.no_grad():
                for parameter in task.network.parameters():
                    if parameter.grad is not None:
                        parameter -= rate * parameter.grad
                        parameter.grad = None
        callback.on_train_batch_end(TRAINER, task, None, batch, 0)
    return gradients


def rms(tensors: list[Tensor]) -> float:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).double().square().mean().sqrt().item()


def weights_by_hand(attention: Attention, x_BTD: Tensor, segments_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and weights (B, H, T, S) of self-attention, from its formula."""
    q, k = (
        (x_BTD @ m.weight.T + (0 if m.bias is None else m.bias)).unflatten(-1, (-1, attention.head_size))
        for m in (attention.query, attention.key)
    )
    if attention.query_norm is not None:
        assert attention.key_norm is not None
        q, k = attention.query_norm(q), attention.key_norm(k)
        tables = rotary(document_positions(segments_BT), attention.head_size, 10000.0)
        q, k = rotate(q, tables), rotate(k, tables)
    k = k.expand(-1, -1, q.shape[2], -1)
    scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(attention.head_size)
    T = x_BTD.shape[1]
    allowed = (segments_BT[:, :, None] == segments_BT[:, None]) & torch.ones(T, T, dtype=torch.bool).tril()
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    return scores, scores.softmax(dim=-1)


@pytest.mark.parametrize("kind", ["gpt", "llama", "checkpointed"])
def test_values_are_those_of_a_computation_by_hand(kind: str) -> None:
    network = decoder(LLAMA if kind == "llama" else GPT, tie_embeddings=kind != "llama")
    for block in network.backbone.blocks:
        block.activation_checkpointing = kind == "checkpointed"  # type: ignore[assignment]
    task, callback = FakeTask(network), NumericsConfig(every=1, queries=1000).build()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    reference = decoder(LLAMA if kind == "llama" else GPT, tie_embeddings=kind != "llama")
    callback.on_train_start(TRAINER, task)  # type: ignore[arg-type]
    gradients = step(callback, task)
    (values,) = task.published
    expected: dict[str, float] = {}
    outputs: dict[int, list[Tensor]] = {0: [], 1: []}
    entropies: dict[int, list[Tensor]] = {0: [], 1: []}
    largest: dict[int, list[Tensor]] = {0: [], 1: []}
    logits, embedded = [], []
    for tokens, segments, _ in MICRO_BATCHES:
        real = segments > 0
        x = reference.stem(tokens)
        embedded.append(x)
        mask, positions = build_mask(segments, causal=True), document_positions(segments)
        tables = rotary(positions, 8, 10000.0) if kind == "llama" else None
        for index, block in enumerate(reference.backbone.blocks):
            scores, p = weights_by_hand(block.attention, block.attention_norm(x), segments)  # type: ignore[operator, arg-type]
            surprise = -(p * p.clamp(min=1e-30).log()).sum(-1)
            entropies[index].append(surprise.transpose(1, 2)[real].flatten())
            largest[index].append(scores.transpose(1, 2)[real].max())
            x = block(x, mask, tables)
            outputs[index].append(x[real])
        logits.append(reference(tokens, segments_BT=segments).logits_BTV[real].max())
    for index in (0, 1):
        tag, path = f"numerics/backbone/block_0{index}", f"backbone.blocks.{index}."
        names = [name for name in before if name.startswith(path)]
        size = rms([gradients[name] for name in names])
        expected[f"{tag}/activation_rms"] = rms(outputs[index])
        expected[f"{tag}/gradient_rms"] = size
        expected[f"{tag}/update_rms"] = 0.1 * size / rms([before[name] for name in names])
        expected[f"{tag}/attention_entropy"] = torch.cat(entropies[index]).mean().item()
        expected[f"{tag}/largest_attention_logit"] = max(largest[index]).item()
    size = rms([gradients["stem.embedding.weight"]])
    expected["numerics/embedding/activation_rms"] = rms(embedded)
    expected["numerics/embedding/gradient_rms"] = size
    expected["numerics/embedding/update_rms"] = 0.1 * size / rms([before["stem.embedding.weight"]])
    expected["numerics/largest_logit"] = max(logits).item()
    assert sorted(values) == sorted(expected)
    assert values == pytest.approx(expected, rel=2e-4)


def test_a_sample_of_queries_and_uniform_weights() -> None:
    q, k = torch.zeros(2, 9, 4, 8), torch.zeros(2, 9, 2, 8)
    q[..., 0], k[0, 0, 1, 0] = 2.0, 3.0
    k[:, 1:, :, 0], k[1, 0, :, 0], k[0, 0, 0, 0] = -1.0, -1.0, -1.0
    mask = build_mask(None, causal=True)
    found = attention_numbers(q, k, mask, 0.5, queries=3)
    assert found.pairs == 3 * 4
    assert found.largest == 3.0  # the first query of row 0, heads 2 and 3
    uniform = attention_numbers(q, torch.zeros_like(k), mask, 0.5, queries=3)
    sees = [1, 9, 9]  # tokens 0, 8 (round(8.5) is even) and 17 of the flattened rows
    assert uniform.entropy == pytest.approx(4 * sum(math.log(n) for n in sees), rel=1e-6)
    assert uniform.largest == 0.0


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_pieces_and_booleans_show_a_query_the_same_keys(causal: bool, window: int | None) -> None:
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        steps = torch.rand(3, 12, generator=generator) < 0.3
        segments = (1 + steps.cumsum(1)).masked_fill(torch.arange(12) >= torch.tensor([[12], [9], [0]]), 0)
        pieces = build_mask(segments, causal=causal, window=window)
        dense = dense_mask(segments, segments, causal, window)
        assert pieces.pieces is not None
        assert dense.allowed_BTS is not None
        keys = torch.zeros(3, 12, 1, 2)
        for row in (0, 1):
            tokens = torch.arange(12)[segments[row] > 0]
            found = _visible(pieces, row, tokens, 12, keys)
            assert torch.equal(found, dense.allowed_BTS[row, tokens])
        q, k = torch.randn(2, 3, 12, 1, 4, generator=generator)
        whole, of_pieces = (attention_numbers(q, k, mask, 0.5, 100) for mask in (dense, pieces))
        assert whole.pairs == of_pieces.pairs == int((segments > 0).sum())
        assert of_pieces.entropy == pytest.approx(whole.entropy, rel=1e-5)
        assert of_pieces.largest == whole.largest


def test_cross_attention_sees_the_memory_of_its_document() -> None:
    queries = torch.tensor([[1, 1, 2, 0], [1, 3, 3, 3]])
    memory = torch.tensor([[1, 2, 2, 2, 0], [2, 2, 3, 3, 0]])
    pieces = build_mask(queries, memory, causal=False)
    dense = dense_mask(queries, memory, False, None)
    assert pieces.pieces is not None
    q, k = torch.randn(2, 4, 2, 4), torch.randn(2, 5, 2, 4)
    k[:, -1] = torch.nan  # padding
    found, expected = (attention_numbers(q, k, mask, 1.0, 100) for mask in (pieces, dense))
    assert found.pairs == expected.pairs == 6 * 2  # not the padding, not segment 1 of row 1
    assert found.entropy == pytest.approx(expected.entropy, rel=1e-5)
    assert found.largest == expected.largest
    nothing = attention_numbers(q, k, dense_mask(queries * 0, memory, False, None), 1.0, 100)
    assert nothing == (0.0, 0, -math.inf)


def test_what_is_not_trained_has_no_gradient_and_no_update() -> None:
    network = decoder(GPT)
    set_trained(network, AdaptConfig(freeze=("stem.*", "backbone.blocks.0.*")))
    task, callback = FakeTask(network), NumericsConfig(every=1).build()
    callback.on_train_start(TRAINER, task)  # type: ignore[arg-type]
    step(callback, task)
    tags = {tag for tag in task.published[0] if tag.endswith(("gradient_rms", "update_rms"))}
    assert tags == {f"numerics/backbone/block_01/{kind}" for kind in ("gradient_rms", "update_rms")}
    assert "numerics/embedding/activation_rms" in task.published[0]


def test_steps_that_are_not_due_have_no_hooks() -> None:
    network = decoder(GPT)
    task, callback = FakeTask(network), NumericsConfig(every=2).build()
    assert isinstance(callback, Numerics)
    callback.on_train_start(TRAINER, task)  # type: ignore[arg-type]

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in network.modules())

    counts = []
    network.stem.register_forward_pre_hook(lambda *_: counts.append(hooks()))
    for number in (1, 2, 3):
        step(callback, task, number)
    assert [count > 0 for count in counts] == [False, False, True, True, False, False]
    assert hooks() == 0
    assert len(task.published) == 1
    batch = Batch({}, torch.zeros(0), {}, step=4)
    callback.on_train_batch_start(TRAINER, task, batch, 0)  # type: ignore[arg-type]
    assert hooks() > 0
    callback.on_exception(TRAINER, task, RuntimeError())  # type: ignore[arg-type]
    assert hooks() == 0


def test_compiled_blocks_and_senseless_values_are_refused() -> None:
    network = decoder(GPT)
    network.backbone.blocks[1]._compiled_call_impl = network.backbone.blocks[1]._call_impl  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"set trainer.compile to false"):
        NumericsConfig().build().on_train_start(TRAINER, FakeTask(network))  # type: ignore[arg-type]
    for fields in ({"every": 0}, {"queries": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            NumericsConfig(**fields)


# -- runs -------------------------------------------------------------------------------------------

STEPS = [
    "schedule.steps=4",
    "schedule.warmup_steps=2",
    "logger.tensorboard=false",
    "data.micro_batch_size=64",
]
MEASURED = ["debug=numerics", "callbacks.numerics.every=2", "callbacks.numerics.queries=10000"]


def measured(folder: Path) -> dict[int, dict[str, float]]:
    """Numerics by optimizer step and tag."""
    with (folder / "metrics.csv").open(newline="") as file:
        return {
            int(row["step"]): found
            for row in csv.DictReader(file)
            if (found := {t: float(v) for t, v in row.items() if t.startswith("numerics/") and v})
        }


@pytest.mark.parametrize("switch", ["false", "true"])
def test_a_run_is_the_same_to_the_last_bit(tmp_path: Path, switch: str) -> None:
    words = tiny(tmp_path, *STEPS, "backbone.dropout=0.1", f"trainer.activation_checkpointing={switch}")
    plain, looked_at = make_run(tmp_path / "plain", words), make_run(tmp_path / "on", [*words, *MEASURED])
    run(plain)
    run(looked_at)
    for tag in ("train/loss", "train/gradient_norm", "val/loss"):
        assert losses(looked_at, tag) == losses(plain, tag)
    assert sorted(losses(plain)) == [1, 2, 3, 4]
    found = measured(looked_at)
    assert sorted(found) == [2, 4]
    depth = configure(words).backbone.depth
    for values in found.values():
        assert len(values) == 5 * depth + 3 + 1
        assert all(math.isfinite(value) for value in values.values())
        assert 0 < values["numerics/backbone/block_00/attention_entropy"] < math.log(32)
    norm = math.sqrt(sum(value**2 for tag, value in found[2].items() if tag.endswith("gradient_rms")))
    assert 0 < norm < losses(plain, "train/gradient_norm")[2]


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(tmp_path: Path) -> None:
    folders = {}
    for name, devices, strategy in (("one", 1, "single"), ("ddp", 2, "ddp"), ("fsdp", 2, "fsdp")):
        layout = [f"devices={devices}", f"strategy={strategy}"]
        folders[name] = make_run(tmp_path / name, tiny(tmp_path, *STEPS, *MEASURED, *layout))
    run(folders["one"])
    (tmp_path / "cells.json").write_text(json.dumps([str(folders["ddp"]), str(folders["fsdp"])]))
    done = start(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "cells", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    expected = measured(folders["one"])
    for name in ("ddp", "fsdp"):
        found = measured(folders[name])
        assert sorted(found) == [2, 4]
        for number, values in found.items():
            assert values == pytest.approx(expected[number], rel=1e-3)
