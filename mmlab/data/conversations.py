"""Conversations as one memory-mapped file of token ids, with a mark on those that are trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.data.files import combined_sha256, fresh_folder
from mmlab.data.sources.base import BadSample, BadSampleError, Source

_FORMAT = 1

Render = Callable[[dict[str, Any]], tuple[NDArray[np.integer], NDArray[np.bool_]]]
"""A raw sample to its ids (n,) and whether each is trained (n,); BadSampleError if it cannot be used."""


class Conversations(Source):
    """{"tokens": int64 (n,), "trained": bool (n,)} for each conversation; `lengths` holds n - 1, the targets.

    Those that could not be used are left out and listed in `bad`. The folder holds `tokens.bin`,
    `trained.bin`, `offsets.npy`, `ids.npy` and `meta.json`; it is written whole or not at all.
    """

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder, self._source = Path(folder), source
        self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text())
        self.bad = [BadSample(int(sample), str(reason)) for sample, reason in self.meta["bad"]]
        self._offsets: NDArray[np.int64] = np.load(self.folder / "offsets.npy")
        self._ids: NDArray[np.int64] = np.load(self.folder / "ids.npy")
        self.lengths = np.diff(self._offsets) - 1
        self._tokens = self._mapped("tokens.bin", self.meta["dtype"])
        self._trained = self._mapped("trained.bin", "bool")

    def __reduce__(self) -> tuple[type[Conversations], tuple[Path, Source]]:
        return Conversations, (self.folder, self._source)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        start, stop = self._offsets[index : index + 2].tolist()
        return {
            "tokens": self._tokens[start:stop].astype(np.int64),
            "trained": self._trained[start:stop].copy(),
        }

    def name(self, index: int) -> str:
        """What the source calls the conversation."""
        return self._source.name(int(self._ids[index]))

    def fingerprint(self) -> str:
        """Changes with the conversations and with how they were written down."""
        return str(self.meta["fingerprint"])

    def _mapped(self, name: str, dtype: str) -> NDArray[Any]:
        path, count = self.folder / name, int(self._offsets[-1])
        found, expected = path.stat().st_size, count * np.dtype(dtype).itemsize
        if found != expected:
            raise ValueError(
                f"{path} holds {found} bytes where {expected} were written; delete the folder to build anew"
            )
        if not count:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def build_conversations(
    source: Source, render: Render, vocabulary_size: int, key: str, cache: Path
) -> Conversations:
    """Renders every sample of `source` once, into `cache`; later calls find the file there.

    Args:
        source: what holds the conversations.
        render: a raw sample to ids below `vocabulary_size`.
        vocabulary_size: number of ids; decides the width of the stored integers.
        key: fingerprint of `render`.
        cache: folder for caches.
    """
    fingerprint = combined_sha256(
        "conversations", str(_FORMAT), source.fingerprint(), key, str(vocabulary_size)
    )
    folder = Path(cache) / "conversations" / fingerprint[:32]
    if not folder.is_dir():
        with fresh_folder(folder) as temporary:
            _write(temporary, source, render, vocabulary_size, fingerprint)
    return Conversations(folder, source)


def _write(folder: Path, source: Source, render: Render, vocabulary_size: int, fingerprint: str) -> None:
    dtype = np.min_scalar_type(max(vocabulary_size - 1, 0))
    offsets, kept, bad = [0], [], []
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as marks:
        for index in range(len(source)):
            try:
                raw = source[index]
            except BadSampleError as error:
                bad.append(BadSample(index, str(error)))
                continue
            try:
                ids, trained = render(raw)
            except BadSampleError as error:
                bad.append(BadSample(index, f"{source.name(index)}: {error}"))
                continue
            tokens.write(ids.astype(dtype).tobytes())
            marks.write(trained.astype(np.bool_).tobytes())
            kept.append(index)
            offsets.append(offsets[-1] + len(ids))
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    np.save(folder / "ids.npy", np.array(kept, np.int64))
    meta = {"format": _FORMAT, "dtype": dtype.name, "fingerprint": fingerprint, "bad": bad}
    (folder / "meta.json").write_text(json.dumps(meta))
