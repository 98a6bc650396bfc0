"""The smallest things that can be read and turned into batches."""

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from mmlab.data.loader import Execution, TrainLoader, ValidationLoader
from mmlab.data.order import Order
from mmlab.data.packing import Planner
from mmlab.data.sources.base import BadSampleError, Source
from mmlab.data.sources.tokens import TokenWindows, build_token_file

IGNORE = -100


class Numbers(Source):
    """Sample i is the number i, repeated `lengths[i]` times (once without lengths); some may be bad."""

    def __init__(self, size, lengths=None, bad=()):
        self.size, self.lengths, self._bad = size, lengths, frozenset(bad)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self._bad:
            raise BadSampleError(f"clip-{index}.wav is cut off")
        return {"value": index, "length": 1 if self.lengths is None else int(self.lengths[index])}

    def fingerprint(self):
        return f"numbers {self.size}"


@dataclass(frozen=True)
class Echo:
    """Tokens that are all the sample's number + 1; counts them. `draw` holds a draw from the sample's rng."""

    padding: ClassVar = {"tokens": 0}
    stored: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def prepare(self, source, cache):
        return source

    def __call__(self, raw, rng):
        tokens = np.full(raw["length"], raw["value"] + 1, np.int64)
        return {"tokens": tokens, "draw": np.array(rng.integers(1 << 40), np.int64)}

    def counts(self, tensors):
        return {"tokens": float((tensors["tokens"] != 0).sum())}

    def empty(self):
        return {"tokens": np.zeros(1, np.int64), "draw": np.array(0, np.int64)}

    def fingerprint(self):
        return "echo"


@dataclass(frozen=True)
class ByteWindows:
    """Windows over the UTF-8 bytes of documents."""

    max_length: int
    padding: ClassVar = {"tokens": 0, "targets": IGNORE}

    def prepare(self, source, cache):
        file = build_token_file(source, encode, end=256, vocabulary_size=257, key="bytes", cache=cache)
        return TokenWindows(file, self.max_length)

    def __call__(self, raw, rng):
        return {"tokens": raw["tokens"][:-1], "targets": raw["tokens"][1:]}

    def counts(self, tensors):
        return {"nll": float((tensors["targets"] != IGNORE).sum())}

    def empty(self):
        return {"tokens": np.zeros(1, np.int64), "targets": np.full(1, IGNORE, np.int64)}

    def fingerprint(self):
        return hashlib.sha256(f"bytes {self.max_length}".encode()).hexdigest()


def encode(text):
    return np.frombuffer(text.encode("utf-8"), np.uint8)


def train_loader(source, steps, *, batch_size=1, ranks=1, rank=0, accumulation=1, workers=0, seed=0, **more):
    """A training loader over `source`; `more` goes to the planner, but for `bad_samples` and `all_reduce`."""
    bad_samples, all_reduce = more.pop("bad_samples", 0), more.pop("all_reduce", dict)
    options = {"batching": "padded", "max_length": 16, "window": 8, "lengths": source.lengths} | more
    planner = Planner(Order(len(source), seed), batch_size=batch_size, **options)
    execution = Execution(ranks, rank, accumulation, workers, 2, False, all_reduce)
    return TrainLoader(source, Echo(), planner, steps, execution, bad_samples)


def validation_loader(source, rows, *, ranks=1, rank=0, workers=0, bad_samples=0, **more):
    execution = Execution(ranks, rank, num_workers=workers, all_reduce=more.pop("all_reduce", dict))
    more = {"seed": 0} | more
    return ValidationLoader(source, Echo(), rows, execution=execution, bad_samples=bad_samples, **more)


def by_step(*streams):
    """Sorted sample ids of every optimizer step over the streams of all ranks: {(epoch, step): ids}."""
    steps = {}
    for batch in (batch for stream in streams for batch in stream):
        steps.setdefault((batch.epoch, batch.step), []).extend(batch.ids.tolist())
    return {key: sorted(ids) for key, ids in sorted(steps.items(), key=lambda item: item[0][1])}
