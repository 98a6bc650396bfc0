"""Bits per byte of `xz -9` on the documents of a text source: what a language model has to beat.

    python experiments/benchmarks/compression.py                      # the held-out files of text/python
    python experiments/benchmarks/compression.py data.validation.split=tuning

Arguments are overrides of `mmlab train`. Two figures: each document compressed alone, and all of them as one
stream in the order of the source.
"""

import lzma
import sys
from pathlib import Path

from mmlab.config import configure


def main() -> None:
    """Prints both figures for the validation source of the configuration."""
    config = configure(sys.argv[1:])
    if config.data.validation is None:
        raise SystemExit("data.validation is null: there is nothing to compress")
    source = config.data.validation.build(Path(config.paths.cache))
    documents = [source[index]["text"].encode() for index in range(len(source))]
    size = sum(map(len, documents))
    alone = sum(len(lzma.compress(document, preset=9)) for document in documents)
    stream = len(lzma.compress(b"".join(documents), preset=9))
    print(f"{len(documents)} documents, {size:,} bytes")
    print(f"xz -9, document by document  {8 * alone / size:.4f} bits per byte")
    print(f"xz -9, as one stream         {8 * stream / size:.4f} bits per byte")


if __name__ == "__main__":
    main()
