"""Documents as one memory-mapped file of token ids, and windows into it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.data.files import combined_sha256, fresh_folder
from mmlab.data.sources.base import BadSample, BadSampleError, Source
from mmlab.modalities.base import EncodingError

_FORMAT = 1


class TokenFile:
    """Token ids of many documents, memory-mapped: `end, document 0, end, document 1, end, ...`.

    Document d with the end token on both sides is `tokens[offsets[d] : offsets[d + 1] + 1]`. The folder holds
    `tokens.bin`, `offsets.npy` and `meta.json`; it is written whole or not at all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text())
        self.offsets: NDArray[np.int64] = np.load(self.folder / "offsets.npy")
        mapped = np.memmap(self.folder / "tokens.bin", dtype=self.meta["dtype"], mode="r")
        # A plain view: every slice of np.memmap itself pays for its bookkeeping.
        self.tokens: NDArray[Any] = mapped.view(np.ndarray)
        if self.tokens.size != self.meta["tokens"] or int(self.offsets[-1]) + 1 != self.tokens.size:
            raise ValueError(
                f"{self.folder / 'tokens.bin'} holds {self.tokens.size} tokens where {self.meta['tokens']} "
                "were written; delete the folder to build it again"
            )

    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path]]:
        return TokenFile, (self.folder,)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def bad(self) -> list[BadSample]:
        """Documents that could not be read or encoded, by their id in the source they came from."""
        return [BadSample(int(sample), str(reason)) for sample, reason in self.meta["bad"]]

    def fingerprint(self) -> str:
        """Changes with the documents and with how they were encoded."""
        return str(self.meta["fingerprint"])


def build_token_file(
    documents: Source,
    encode: Callable[[str], NDArray[Any]],
    end: int,
    vocabulary_size: int,
    key: str,
    cache: Path,
    on_bad: Callable[[BadSample], None] | None = None,
) -> TokenFile:
    """Encodes every document of `documents` once, into `cache`; later calls find the file there.

    Processes that build the same file at once do no harm: one result stays. Documents that cannot be read or
    encoded are left out and listed in the file's `bad`, so that whoever uses it can apply a limit.

    Args:
        documents: source of {"text": str}.
        encode: text to ids below `vocabulary_size`, never `end`.
        end: id that stands before, between and after the documents.
        vocabulary_size: number of ids; decides the width of the stored integers.
        key: fingerprint of `encode`.
        cache: folder for caches.
        on_bad: called with each document that is left out; may raise to stop.
    """
    fingerprint = combined_sha256(
        "tokens", str(_FORMAT), documents.fingerprint(), key, str(end), str(vocabulary_size)
    )
    folder = Path(cache) / "tokens" / fingerprint[:32]
    if not folder.is_dir():
        with fresh_folder(folder) as temporary:
            _write(temporary, documents, encode, end, vocabulary_size, fingerprint, on_bad)
    return TokenFile(folder)


def _write(
    folder: Path,
    documents: Source,
    encode: Callable[[str], NDArray[Any]],
    end: int,
    vocabulary_size: int,
    fingerprint: str,
    on_bad: Callable[[BadSample], None] | None,
) -> None:
    dtype = next(
        kind for kind in ("uint8", "uint16", "uint32") if vocabulary_size <= 1 << 8 * np.dtype(kind).itemsize
    )
    offsets, bad = [0], []
    with (folder / "tokens.bin").open("wb") as file:
        file.write(np.array([end], dtype).tobytes())
        for index in _progress(len(documents)):
            try:
                ids = np.asarray(encode(documents[index]["text"]))
            except (BadSampleError, EncodingError) as error:
                named = isinstance(error, BadSampleError)
                bad.append(BadSample(index, str(error) if named else f"{documents.name(index)}: {error}"))
                if on_bad is not None:
                    on_bad(bad[-1])
                continue
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary_size:
                raise ValueError(
                    f"document {index} was encoded to ids {ids.min()}..{ids.max()}, outside the vocabulary's "
                    f"0..{vocabulary_size - 1}"
                )
            file.write(ids.astype(dtype).tobytes())
            file.write(np.array([end], dtype).tobytes())
            offsets.append(offsets[-1] + len(ids) + 1)
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    meta = {
        "format": _FORMAT,
        "dtype": dtype,
        "tokens": offsets[-1] + 1,
        "end": end,
        "vocabulary_size": vocabulary_size,
        "fingerprint": fingerprint,
        "bad": bad,
    }
    (folder / "meta.json").write_text(json.dumps(meta))


def _progress(count: int) -> Iterator[int]:
    if not sys.stderr.isatty():
        yield from range(count)
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(range(count), "tokenizing", console=Console(stderr=True), transient=True)


class TokenWindows(Source):
    """Windows of at most `max_length` targets over the documents of a token file.

    A document is the sequence [end] + ids + [end]; its window j reads inputs from j * max_length on, each
    with the token after it as its target, so every token after the first end is a target exactly once. With
    `stream` the windows run over the whole file, document after document, and all but the last are full.

    A sample is {"tokens": int64 (n + 1,), "document": d, "start": a}: n targets, beginning at place a of the
    document's sequence (of the file's, with `stream`). Memory grows with the documents, not the windows.
    """

    def __init__(self, tokens: TokenFile, max_length: int, stream: bool = False) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.file, self.max_length, self.stream = tokens, max_length, stream
        if not tokens.documents:
            raise ValueError(f"{tokens.folder} holds no document ({len(tokens.bad)} could not be used)")
        starts = tokens.offsets[[0, -1]] if stream else tokens.offsets
        counts = -(-np.diff(starts) // max_length)
        self._starts = starts
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.lengths = _WindowLengths(self)

    @property
    def bad(self) -> Sequence[BadSample]:  # type: ignore[override]
        """Documents that are not in the file."""
        return self.file.bad

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        span = int(np.searchsorted(self._first, index, side="right")) - 1
        start = (index - int(self._first[span])) * self.max_length
        low = int(self._starts[span]) + start
        high = min(low + self.max_length, int(self._starts[span + 1]))
        tokens = self.file.tokens[low : high + 1].astype(np.int64)
        document = int(np.searchsorted(self.file.offsets, low, side="right")) - 1 if self.stream else span
        return {"tokens": tokens, "document": document, "start": start}

    def fingerprint(self) -> str:
        """Changes with the tokens and with how they are cut."""
        return combined_sha256("windows", self.file.fingerprint(), str(self.max_length), str(self.stream))


class _WindowLengths:
    """Targets of each window, computed where they are asked for."""

    def __init__(self, windows: TokenWindows) -> None:
        self._first, self._starts, self._full = windows._first, windows._starts, windows.max_length

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, ids: Any) -> Any:
        if isinstance(ids, slice):
            ids = np.arange(*ids.indices(len(self)))
        ids = np.asarray(ids)
        spans = np.searchsorted(self._first, ids, side="right") - 1
        taken = (ids - self._first[spans]) * self._full
        return np.minimum(self._starts[spans + 1] - self._starts[spans] - taken, self._full)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)
