"""Rates of a run, and how well the processor is used: values against a clock by hand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import losses, make_run, tiny
from torch import nn

from mmlab.callbacks import peak as peak_module
from mmlab.callbacks import throughput as module
from mmlab.callbacks.interlude import Clock
from mmlab.callbacks.peak import data_sheet_peak, measured_peak
from mmlab.callbacks.throughput import Throughput, ThroughputConfig, peaks
from mmlab.data.collate import Batch
from mmlab.strategies.config import PrecisionConfig
from mmlab.tasks.text import LanguageModeling
from mmlab.train import run

RATE, TFLOPS = "train/tokens_per_second", "train/tflops_per_second"
MEASURED, SHEET = "train/mfu_of_measured_peak", "train/mfu"
TRAINER: Any = SimpleNamespace(is_global_zero=True)


class FakeTask(nn.Module):
    """Says when numbers are due (every second step), and keeps what is published."""

    rate = ("tokens", "nll")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.device = torch.device("cpu")
        self.published: list[dict[str, float]] = []

    def publish(self, values: dict[str, float]) -> None:
        self.published.append(values)

    def is_due(self, step: int) -> bool:
        return step % 2 == 0


class CostedTask(FakeTask):
    """Has one cost for every micro-batch."""

    cost: float | None = 4e12

    def flops(self, batch: Batch) -> float | None:
        return self.cost


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    found = HandClock()
    monkeypatch.setattr(module, "time", found)
    return found


def step(
    callback: Any, task: Any, clock: HandClock, number: int, seconds: float, accumulation: int = 2
) -> None:
    """One optimizer step of `seconds`."""
    for micro in range(accumulation):
        batch = Batch({}, torch.zeros(0), {}, step=number, micro=micro, accumulation=accumulation)
        batch.totals = {"nll": 300.0}
        callback.on_train_batch_start(TRAINER, task, batch, 0)
        clock.now += seconds / accumulation
        callback.on_train_batch_end(TRAINER, task, None, batch, 0)


def test_the_rate_leaves_validation_and_interludes_out(clock: HandClock) -> None:
    callback, task = ThroughputConfig().build(), FakeTask()
    assert isinstance(callback, Throughput)
    assert isinstance(callback, Clock)
    callback.on_train_start(TRAINER, task)  # type: ignore[arg-type]
    step(callback, task, clock, 1, 2.0)
    callback.on_validation_start(TRAINER, task)  # type: ignore[arg-type]
    clock.now += 50.0
    callback.leave_out(20.0)  # an interlude inside of it: its time is out already
    callback.on_validation_end(TRAINER, task)  # type: ignore[arg-type]
    clock.now += 7.0
    callback.leave_out(7.0)
    step(callback, task, clock, 2, 4.0)
    step(callback, task, clock, 3, 1.0)
    step(callback, task, clock, 4, 1.0)
    assert task.published == [
        {RATE: pytest.approx(100.0)},
        {RATE: pytest.approx(300.0)},
    ]


def test_operations_of_all_micro_batches_and_their_share_of_the_peaks(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(trainer: Any, task: Any) -> dict[str, float]:
        clock.now += 30.0  # the measurement is off the clock
        return {MEASURED: 16e12, SHEET: 320e12}

    monkeypatch.setattr(module, "peaks", slow)
    callback, task = Throughput(), CostedTask()
    callback.on_train_start(TRAINER, task)  # type: ignore[arg-type]
    step(callback, task, clock, 1, 1.0)
    step(callback, task, clock, 2, 1.0)
    assert task.published == [
        {
            RATE: pytest.approx(300),
            TFLOPS: pytest.approx(8),
            MEASURED: pytest.approx(0.5),
            SHEET: pytest.approx(0.025),
        }
    ]
    task.cost = None
    step(callback, task, clock, 3, 1.0)
    task.cost = 4e12
    step(callback, task, clock, 4, 1.0)  # a part of the interval is unknown
    assert list(task.published[1]) == [RATE]
    step(callback, task, clock, 5, 2.0)
    step(callback, task, clock, 6, 2.0)
    assert task.published[2][TFLOPS] == pytest.approx(4)


@pytest.mark.parametrize("cost", [None, "no method"])
def test_a_task_of_unknown_cost_has_a_rate_alone_and_nothing_is_measured(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch, cost: Any
) -> None:
    monkeypatch.setattr(module, "peaks", lambda *_: pytest.fail("measured"))
    task = FakeTask() if cost else CostedTask()
    task.cost = None  # type: ignore[assignment]
    callback = Throughput()
    callback.on_train_start(TRAINER, task)  # type: ignore[arg-type]
    step(callback, task, clock, 1, 1.0)
    step(callback, task, clock, 2, 1.0)
    assert task.published == [{RATE: pytest.approx(300.0)}]


@pytest.mark.parametrize(
    ("precision", "weights", "expected"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_peak_is_that_of_the_type_that_the_run_computes_in(
    monkeypatch: pytest.MonkeyPatch, precision: Any, weights: torch.dtype, expected: torch.dtype
) -> None:
    asked = []
    monkeypatch.setattr(module, "measured_peak", lambda *key: asked.append(key) or 5.0)
    trainer: Any = SimpleNamespace(precision_plugin=PrecisionConfig(precision).build("cpu"))
    task: Any = FakeTask().to(weights)
    assert peaks(trainer, task) == {MEASURED: 5.0}  # a CPU has no data sheet here
    assert asked == [(torch.device("cpu"), expected)]
    assert torch.get_default_dtype() == torch.float32


def test_the_measured_peak_is_that_of_the_fastest_product(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Small ones are slower, and so is every one but the third of a size."""
        assert (a.shape, b.dtype, out.shape) == (b.shape, torch.bfloat16, b.shape)
        sizes.append(len(a))
        rate = (70e9 if len(a) > 256 else 50e9) / (1 if sizes.count(len(a)) == 3 else 2)
        clock.now += 2 * len(a) ** 3 / rate

    monkeypatch.setattr(peak_module, "time", clock)
    monkeypatch.setattr(torch, "mm", product)
    peak_module._measured.cache_clear()
    began = clock.now
    assert measured_peak(torch.device("cpu"), torch.bfloat16) == pytest.approx(70e9)
    assert clock.now - began < 0.5
    assert sizes == [256] * 10 + [512] * 10 + [1024] * 2  # then the time was up
    assert measured_peak(torch.device("cpu"), torch.bfloat16) == pytest.approx(70e9)
    assert len(sizes) == 22  # not measured again
    peak_module._measured.cache_clear()


def test_the_measured_peak_is_no_less_than_a_product_reaches() -> None:
    state = torch.get_rng_state()
    found = measured_peak(torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    a = torch.randn(512, 512)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    assert found > 0.25 * 2 * 512**3 / min(times)  # other processes may have slowed the measurement


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA A10", None),
        ("NVIDIA H1000", None),
        ("", None),
    ],
)
def test_an_unknown_processor_has_no_data_sheet(name: str, expected: float | None) -> None:
    assert data_sheet_peak(name) == expected


def test_a_run_publishes_the_operations_of_its_batches(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LanguageModeling, "flops", lambda self, batch: 1000 * batch.counts["nll"], raising=False
    )
    monkeypatch.setattr(module, "measured_peak", lambda device, dtype: 5e9)
    words = tiny(tmp_path, "schedule.steps=4", "data.micro_batch_size=64", "logger.tensorboard=false")
    folder = make_run(tmp_path / "run", [*words, "trainer.validate_every=4", "trainer.log_every=2"])
    run(folder)
    rates, shares = losses(folder, TFLOPS), losses(folder, MEASURED)
    assert sorted(rates) == [1, 2, 4]
    for number, rate in losses(folder, RATE).items():
        assert rates[number] == pytest.approx(1000 * rate / 1e12, rel=1e-9)
        assert shares[number] == pytest.approx(1000 * rate / 5e9, rel=1e-9)
