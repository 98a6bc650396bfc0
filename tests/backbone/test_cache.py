"""A cache changes no number: neither lengths of rows, nor windows, nor padding, nor the order of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmlab.backbone.cache import Cache
from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.transformer import Transformer
from mmlab.models.decoder import Decoder, DecoderConfig

GPT = BackboneConfig(width=32, depth=2, num_heads=4, init_std=0.2)
LLAMA = BackboneConfig(
    width=32,
    depth=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    activation="swiglu",
    norm="rmsnorm",
    bias=False,
    qk_norm=True,
    position="rotary",
    init_std=0.2,
)


def windowed(window: int) -> BackboneConfig:
    from dataclasses import replace

    return replace(LLAMA, window=window)


def decoder(config: BackboneConfig, max_positions: int | None = None) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config, DecoderConfig(max_positions=max_positions), 50).eval()


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(1))


def stepwise(network: Decoder, tokens_BT: Tensor, cache: Cache, first: int) -> Tensor:
    """Logits from position first - 1 on: `first` tokens at once, then one by one."""
    results = [network(tokens_BT[:, :first], cache=cache).logits_BTV]
    results += [
        network(tokens_BT[:, t : t + 1], cache=cache).logits_BTV for t in range(first, tokens_BT.shape[1])
    ]
    return torch.cat(results, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 7])
@pytest.mark.parametrize(
    ("config", "positions"), [(GPT, 40), (LLAMA, None), (windowed(8), None), (windowed(1), None)]
)
def test_steps_equal_the_whole(config: BackboneConfig, positions: int | None, first: int) -> None:
    network, tokens_BT = decoder(config, positions), tokens(3, 40)
    whole = network(tokens_BT).logits_BTV
    steps = stepwise(network, tokens_BT, Cache(config, 3, 40, chunk=8), first)
    torch.testing.assert_close(steps, whole[:, first - 1 :], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("config", [GPT, LLAMA, windowed(8)])
def test_ragged_rows_equal_each_alone(config: BackboneConfig) -> None:
    """Rows of 1, 5 and 20 tokens, padded on the right, then ten steps in which one row stands still."""
    network = decoder(config, 64 if config is GPT else None)
    lengths, tokens_BT = [1, 5, 20], tokens(3, 40)
    cache = Cache(config, 3, 40, chunk=20)
    padded = tokens_BT[:, :20].clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 49
    found = [[x] for x in network(padded, cache=cache, counts=lengths).logits_BTV[:, 0]]
    for step in range(10):
        next_B1 = torch.stack([tokens_BT[row, length + step] for row, length in enumerate(lengths)])[:, None]
        counts = [1, 0, 1] if step == 9 else [1, 1, 1]
        logits = network(next_B1, cache=cache, counts=counts).logits_BTV[:, 0]
        for row, count in enumerate(counts):
            if count:
                found[row].append(logits[row])
    assert cache.lengths == [11, 14, 30]
    for row, length in enumerate(lengths):
        alone = network(tokens_BT[row : row + 1, : cache.lengths[row]]).logits_BTV[0, length - 1 :]
        torch.testing.assert_close(torch.stack(found[row]), alone, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_window_bounds_the_cache() -> None:
    config = windowed(8)
    network, cache = decoder(config), Cache(config, 2, 1000, chunk=4)
    assert cache.slots == 8 + 4 - 1
    network(tokens(2, 4), cache=cache)
    before = cache.nbytes
    assert before == 2 * 2 * 2 * 11 * 2 * 16 * 4  # keys and values, layers, rows, slots, heads, size, bytes
    for _ in range(30):
        network(tokens(2, 4), cache=cache)
    assert cache.nbytes == before
    with pytest.raises(ValueError, match="5 tokens at once; with a window the cache takes 4"):
        network(tokens(2, 5), cache=cache)


@torch.no_grad()
def test_parts_of_a_prompt_through_a_window_equal_the_whole() -> None:
    config = windowed(8)
    network, tokens_BT = decoder(config), tokens(2, 40)
    cache = Cache(config, 2, 40, chunk=5)
    parts = [network(part, cache=cache).logits_BTV[:, 0] for part in tokens_BT.split(5, dim=1)]
    whole = network(tokens_BT).logits_BTV[:, 4::5]
    torch.testing.assert_close(torch.stack(parts, dim=1), whole, atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_type_is_that_of_the_activations() -> None:
    network, cache = decoder(LLAMA), Cache(LLAMA, 1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        network(tokens(1, 4), cache=cache)
    assert cache.keys is not None
    assert cache.keys.dtype == torch.bfloat16
    true = Cache(LLAMA, 1, 8)
    network.bfloat16()(tokens(1, 4), cache=true)
    assert true.keys is not None
    assert true.keys.dtype == torch.bfloat16


@torch.no_grad()
def test_half_steps_are_as_good_as_half_whole() -> None:
    exact = decoder(LLAMA)(tokens(2, 30)).logits_BTV[:, 9:]
    network = decoder(LLAMA).bfloat16()
    whole = network(tokens(2, 30)).logits_BTV[:, 9:]
    steps = stepwise(network, tokens(2, 30), Cache(LLAMA, 2, 30), 10)
    assert (steps - exact).abs().mean() < 1.5 * (whole - exact).abs().mean()


@torch.no_grad()
@pytest.mark.parametrize("config", [LLAMA, windowed(6)])
def test_chosen_rows_go_on_as_they_were(config: BackboneConfig) -> None:
    network, tokens_BT = decoder(config), tokens(3, 20)
    cache = Cache(config, 3, 20, chunk=12)
    network(tokens_BT[:, :12], cache=cache, counts=[12, 9, 10])
    cache.select([2, 0, 2])
    assert cache.lengths == [10, 12, 10]
    logits = network(torch.tensor([[7], [8], [9]]), cache=cache).logits_BTV[:, 0]
    for row, (source, length, token) in enumerate([(2, 10, 7), (0, 12, 8), (2, 10, 9)]):
        sequence = torch.cat([tokens_BT[source, :length], torch.tensor([token])])[None]
        torch.testing.assert_close(logits[row], network(sequence).logits_BTV[0, -1], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("config", [LLAMA, windowed(6)])
def test_nothing_is_read_from_slots_that_hold_no_token(config: BackboneConfig) -> None:
    """Stored numbers change where no token is; the results do not."""
    network, tokens_BT = decoder(config), tokens(2, 12)
    clean, dirty = Cache(config, 2, 30, chunk=12), Cache(config, 2, 30, chunk=12)
    for cache in (clean, dirty):
        network(tokens_BT, cache=cache, counts=[12, 3])
    assert dirty.keys is not None
    assert dirty.values is not None
    unused = torch.ones(2, dirty.slots, dtype=torch.bool)
    unused[0, :12], unused[1, :3] = False, False
    for store in (dirty.keys, dirty.values):
        store[:, unused] = 1e4
    for _ in range(3):
        first, second = (network(tokens_BT[:, :1], cache=cache).logits_BTV for cache in (clean, dirty))
        assert torch.equal(first, second)


@torch.no_grad()
def test_a_memory_is_projected_once_and_equals_no_cache() -> None:
    torch.manual_seed(0)
    network = Transformer(GPT, causal=True, cross_attention=True).eval()
    x_BTD, memory_BSD = torch.randn(2, 9, 32), torch.randn(2, 6, 32)
    segments_BS = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    ones = torch.ones(2, 9, dtype=torch.int64)
    whole = network(
        x_BTD, memory_BSD=memory_BSD, memory_mask=network.memory_mask(ones, segments_BS)
    ).hidden_BTD
    cache = Cache(GPT, 2, 9)
    calls = []
    network.blocks[0].cross_attention.key.register_forward_hook(lambda *a: calls.append(1))  # type: ignore[union-attr]
    steps = []
    for t in range(9):
        mask = network.memory_mask(ones[:, :1], segments_BS)
        given = memory_BSD if t == 0 else None
        steps.append(network(x_BTD[:, t : t + 1], memory_BSD=given, memory_mask=mask, cache=cache).hidden_BTD)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=0)
    assert len(calls) == 1


def test_complaints() -> None:
    network, cache = decoder(LLAMA), Cache(LLAMA, 2, 5)
    with torch.no_grad():
        with pytest.raises(ValueError, match="the cache holds 5 tokens a row, 6 were to be stored"):
            network(tokens(2, 6), cache=cache)
        with pytest.raises(ValueError, match=r"counts must be 2 numbers in 0..3, got \[4, 1\]"):
            network(tokens(2, 3), cache=cache, counts=[4, 1])
        learned = decoder(GPT, 4)
        with pytest.raises(ValueError, match="5 tokens in a row, but only 4 learned positions"):
            learned(tokens(2, 5), cache=Cache(GPT, 2, 9))
    with pytest.raises(ValueError, match="without gradients"):
        network(tokens(2, 3), cache=cache)
