"""Muon on sharded weights (FSDP2) equals Muon on whole ones: one rank in this process, two in fresh ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mmlab.backbone.config import BackboneConfig
from mmlab.backbone.parallel import apply_plan
from mmlab.models.decoder import Decoder, DecoderConfig
from mmlab.optim.muon import MuonConfig

CONFIG = MuonConfig(learning_rate=0.02, adamw_learning_rate=3e-3, newton_schulz_type="float32")
BACKBONE = BackboneConfig(width=12, depth=2, num_heads=2, mlp_size=25, norm="rmsnorm", bias=False)
"""25 rows do not divide by two ranks: their parts differ in size."""


def decoder():
    torch.manual_seed(0)
    return Decoder(BACKBONE, DecoderConfig(), 23)


def train(network, optimizer, steps):
    tokens_BT = torch.randint(0, 23, (2, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        network(tokens_BT, targets_BT=tokens_BT.roll(-1, 1)).nll_BT.mean().backward()
        optimizer.step()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare():
    """Trains whole and sharded; the sharded run passes through a checkpoint of whole tensors by name."""
    plain = decoder()
    train(plain, CONFIG.build(plain.named_parameters()), 4)
    sharded = decoder()
    apply_plan(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = CONFIG.build(sharded.named_parameters())
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    train(sharded, optimizer, 2)
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = [get_optimizer_state_dict(sharded, optimizer, options=options)]
    dist.broadcast_object_list(state, src=0)
    resumed = CONFIG.build(sharded.named_parameters())
    set_optimizer_state_dict(sharded, resumed, state[0], options=StateDictOptions(full_state_dict=True))
    train(sharded, resumed, 2)
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(whole(b), a, atol=2e-5, rtol=0, msg=name)


def test_one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        compare()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare()
    print("equal", flush=True)
    dist.destroy_process_group()
