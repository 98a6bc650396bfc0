"""One read for many samples gives what reading them one by one gives."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from mmlab.data.micro_batches import MicroBatches, MicroPlan
from mmlab.data.sources.base import Source
from mmlab.modalities.text.vocabulary import BytesConfig
from mmlab.tasks.text import LanguageModelExamples


class Windows(Source):
    """Windows of 9 random bytes, all but the last full; counts how they are read."""

    def __init__(self, full=8):
        rng = np.random.default_rng(0)
        self.rows = [rng.integers(0, 256, full + 1).astype(np.uint8) for _ in range(6)]
        self.rows.append(self.rows[0][:4])
        self.lengths = np.array([len(row) - 1 for row in self.rows])
        self.reads = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.reads.append(index)
        return {"tokens": self.rows[index].astype(np.int64), "document": index}

    def batch(self, ids):
        if len({len(self.rows[index]) for index in ids}) > 1:
            return None
        self.reads.append(ids.tolist())
        return {"tokens": np.stack([self.rows[index] for index in ids])}

    def fingerprint(self):
        return "windows"


@dataclass(frozen=True)
class Slow(LanguageModelExamples):
    """The same examples without the way to make many at once."""

    stacked: ClassVar = None


def batches(rows, width=None):
    fast = LanguageModelExamples(BytesConfig().build(), 8)
    slow = Slow(fast.vocabulary, 8)
    found = []
    for examples in (fast, slow):
        source = Windows()
        batch = MicroBatches(source, examples, 0, width)[MicroPlan(rows, 2, 5, 1)]
        found.append((batch, source.reads))
    return found


@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize("rows", [[[3], [0], [5]], [[1]], [[2 + 7], [2 + 70]]])
def test_full_windows_are_read_at_once(rows, width):
    (fast, reads), (slow, others) = batches(rows, width)
    ids = [row[0] % 7 for row in rows]
    assert reads == [ids]
    assert others == ids
    assert fast.tensors.keys() == slow.tensors.keys() == {"tokens", "targets"}
    for name, value in slow.tensors.items():
        assert torch.equal(fast.tensors[name], value)
        assert fast.tensors[name].dtype == value.dtype == torch.int64
        assert fast.tensors[name].is_contiguous()
    assert torch.equal(fast.ids, slow.ids)
    assert replace(fast, tensors={}, ids=slow.ids) == replace(slow, tensors={})


@pytest.mark.parametrize(
    ("rows", "width"), [([[0], [6]], None), ([[0, 1], [2]], 16), ([[0], [1]], 16), ([], 8)]
)
def test_what_is_not_alike_is_read_one_by_one(rows, width):
    (fast, reads), (slow, others) = batches(rows, width)
    assert [read for read in reads if isinstance(read, int)] == others == sum(rows, [])  # noqa: RUF017
    for name, value in slow.tensors.items():
        assert torch.equal(fast.tensors[name], value)
