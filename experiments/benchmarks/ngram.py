"""Bits per byte of a character n-gram model: what a language model has to beat.

    python -m experiments.benchmarks.ngram [ORDER] key=value ...

The keys are those of `mmlab train`; the model counts `data.train` and is measured on `data.validation`. It is
an interpolated n-gram with Witten-Bell smoothing (Witten and Bell 1991), down to a uniform distribution over
the characters of both sets; every document ends in an end symbol, as for the language models.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from mmlab.config import configure
from mmlab.data.sources.base import Source

END = "\0"


class WittenBell:
    """Counts of characters after contexts of 0 to order - 1 characters."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.counts: list[defaultdict[str, Counter[str]]] = [defaultdict(Counter) for _ in range(order)]

    def train(self, text: str) -> None:
        """Counts a document."""
        padded = END * (self.order - 1) + text + END
        for at in range(self.order - 1, len(padded)):
            for length in range(self.order):
                self.counts[length][padded[at - length : at]][padded[at]] += 1

    def finish(self, alphabet: int) -> None:
        """Fixes the number of characters, and sums the counts."""
        self.alphabet = alphabet
        self.totals = [{context: c.total() for context, c in table.items()} for table in self.counts]

    def bits(self, text: str) -> float:
        """Code length of a document."""
        padded = END * (self.order - 1) + text + END
        return -sum(math.log2(self._probability(padded, at)) for at in range(self.order - 1, len(padded)))

    def _probability(self, padded: str, at: int) -> float:
        p = 1 / self.alphabet
        for length in range(self.order):
            context = padded[at - length : at]
            found = self.counts[length].get(context)
            if found is None:
                break
            total, kinds = self.totals[length][context], len(found)
            p = (found[padded[at]] + kinds * p) / (total + kinds)
        return p


def documents(source: Source) -> Iterator[str]:
    """The texts of a source."""
    return (source[index]["text"] for index in range(len(source)))


def bits_per_byte(order: int, train: Iterable[str], validation: Iterable[str]) -> float:
    """Bits of the validation texts, their ends included, over their UTF-8 bytes."""
    train, validation = list(train), list(validation)
    model = WittenBell(order)
    for text in train:
        model.train(text)
    model.finish(len(set().union(*train, *validation)) + 1)
    return sum(map(model.bits, validation)) / sum(len(text.encode()) for text in validation)


def main(words: list[str]) -> None:
    order = int(words.pop(0)) if words and words[0].isdigit() else 5
    config = configure(words)
    if config.data.validation is None:
        raise SystemExit("data.validation is null: there is nothing to measure on")
    cache = Path(config.paths.cache)
    train, validation = config.data.train.build(cache), config.data.validation.build(cache)
    value = bits_per_byte(order, documents(train), documents(validation))
    print(f"character {order}-gram: {value:.4f} bits per byte ({len(train)} and {len(validation)} documents)")


if __name__ == "__main__":
    main(sys.argv[1:])
