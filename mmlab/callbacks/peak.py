"""What a processor can multiply at most: measured here, and by its data sheet."""

from __future__ import annotations

import functools
import re
import time

import torch

SECONDS = 0.2
"""Time that a measurement may take, its first products aside."""

SIZES = {"cuda": (4096, 8192)}
"""Rows of the smallest and the largest matrix that are tried, by type of device; the smallest is always."""

DATA_SHEET = {
    r"\bA100\b(?!.*\bMIG\b)": 312e12,
    r"\bH[12]00\b(?!.*\b(PCIe|NVL|MIG)\b)": 989e12,
}
"""Dense bfloat16 operations a second by a pattern of the name (NVIDIA's data sheets; H100 and H200 as SXM
modules: their other boards are slower, and a MIG slice is a part of one)."""


def data_sheet_peak(name: str) -> float | None:
    """Dense bfloat16 operations a second of the accelerator `name`; None where it is not known for sure."""
    return next((peak for pattern, peak in DATA_SHEET.items() if re.search(pattern, name)), None)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the fastest product of two square matrices of `dtype` on `device`.

    Taken once a process, with its present number of threads, in about 0.2 s; a multiply and an add are two
    operations. No generator but its own is used.
    """
    return _measured(device, dtype, torch.get_num_threads())


@functools.cache
def _measured(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    size, limit = SIZES.get(device.type, (256, 2048))
    best, began = 0.0, None
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        while True:
            generator = torch.Generator(device).manual_seed(0)
            a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
            result = a @ b  # the first one may load libraries and choose a kernel
            _wait(device)
            began = time.perf_counter() if began is None else began
            seconds = _fastest(a, b, result, began)
            best = max(best, 2 * size**3 / seconds)
            # A product of the next size takes eight times as long; two of them should fit.
            if size == limit or time.perf_counter() - began + 16 * seconds > SECONDS:
                return best
            size *= 2


def _fastest(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor, began: float) -> float:
    """Seconds of the fastest of at most ten products, the last of them when the time is up."""
    best = float("inf")
    for _ in range(10):
        _wait(a.device)
        start = time.perf_counter()
        torch.mm(a, b, out=result)
        _wait(a.device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now - began > SECONDS:
            break
    return best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
