"""Does the best learning rate carry over from a narrow network to a wide one? With muP and without.

    python -m experiments.benchmarks.mup                              # source code of the standard library
    python -m experiments.benchmarks.mup --text tinyshakespeare.txt --steps 500

Trains a small byte-level decoder with AdamW, on one thread, for every width, parametrization and learning
rate, all from the same weights' seed and on the same batches, and prints the loss of each on held-out text
(nats a byte) and the best rate of each row. muP's base is the first width, where it is the standard.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from mmlab.backbone.config import BackboneConfig
from mmlab.data.sources.python_files import PythonFilesConfig
from mmlab.models.decoder import Decoder, DecoderConfig
from mmlab.optim.adamw import AdamWConfig
from mmlab.optim.base import learning_rate_factors, set_learning_rate
from mmlab.optim.schedule import ScheduleConfig

LENGTH, ROWS, SIZE = 64, 16, 256
HELD_OUT = 0.1


def backbone(width: int, base_width: int | None) -> BackboneConfig:
    """Two blocks; four heads, which grow with the width."""
    return BackboneConfig(
        width=width,
        depth=2,
        num_heads=4,
        norm="rmsnorm",
        activation="gelu",
        bias=False,
        position="rotary",
        init_std=0.05,
        parametrization="standard" if base_width is None else "mup",
        base_width=base_width,
    )


def read(path: str | None) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out, of a file or of the standard library."""
    if path is not None:
        whole = Path(path).read_bytes()
        cut = int(len(whole) * (1 - HELD_OUT))
        parts = whole[:cut], whole[cut:]
    else:
        sources = [PythonFilesConfig(split=split).build() for split in ("train", "validation")]
        parts = tuple("\n".join(s[i]["text"] for i in range(len(s))).encode() for s in sources)  # type: ignore[assignment]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def batch(text: Tensor, seed: int) -> Tensor:
    """Rows of `LENGTH` + 1 bytes from places that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - LENGTH - 1, (ROWS,), generator=generator)
    return text[starts[:, None] + torch.arange(LENGTH + 1)].long()


def loss_of(network: Decoder, rows: Tensor) -> Tensor:
    """Mean nats a byte."""
    nll = network(rows[:, :-1], targets_BT=rows[:, 1:]).nll_BT
    assert nll is not None
    return nll.mean()


def train(config: BackboneConfig, rate: float, steps: int, text: tuple[Tensor, Tensor]) -> float:
    """Held-out loss after `steps` steps with a linear cool-down."""
    torch.manual_seed(0)
    network = Decoder(config, DecoderConfig(tie_embeddings=False), SIZE)
    factors = learning_rate_factors(network, {})
    optimizer = AdamWConfig(learning_rate=rate).build(network.named_parameters(), factors)
    schedule = ScheduleConfig(steps=steps, warmup_steps=steps // 20, shape="linear")
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_of(network, batch(text[0], step)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        set_learning_rate(optimizer, schedule.factor(step))
        optimizer.step()
    with torch.no_grad():
        return sum(loss_of(network, batch(text[1], -1 - i)).item() for i in range(16)) / 16


def main() -> None:
    """Prints the table, a row as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", help="a file; default: source code of the standard library")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    exponents = range(-10, -3)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0**exponent for exponent in exponents])
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = read(options.text)
    base = options.widths[0]
    print(f"{'':16}" + "".join(f"{rate:>10.2g}" for rate in options.rates) + "      best  seconds")
    for kind in ("standard", "mup"):
        for width in options.widths if kind == "standard" else options.widths[1:]:
            begin = time.perf_counter()
            config = backbone(width, base if kind == "mup" else None)
            losses = [train(config, rate, options.steps, text) for rate in options.rates]
            best = options.rates[min(range(len(losses)), key=losses.__getitem__)]
            numbers = "".join(f"{loss:10.4f}" for loss in losses)
            took = time.perf_counter() - begin
            print(f"{kind:10}{width:>6}{numbers}{best:10.2g}{took:9.0f}", flush=True)


if __name__ == "__main__":
    main()
