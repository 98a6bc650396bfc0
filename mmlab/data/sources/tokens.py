"""Documents as one memory-mapped file of token ids, and windows into it."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.data.files import combined_sha256, fresh_file, fresh_folder
from mmlab.data.sources.base import BadSample, BadSampleError, Source
from mmlab.modalities.base import EncodingError

_FORMAT = 1
_SHARDS = 128
_LARGEST_SHARD = 8192  # documents
_SECONDS_A_LINE = 10.0


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
    num_processes: int = 1,
) -> TokenFile:
    """Encodes every document of `documents` once, into `cache`; later calls find the file there.

    The work is done in shards of documents. Those that an interrupted call finished are used by the next one,
    and the file does not depend on the number of processes. Callers that build the same file at once do no
    harm: one result stays. Documents that cannot be read or encoded are left out and listed in the file's
    `bad`, so that whoever uses it can apply a limit.

    Args:
        documents: source of {"text": str}.
        encode: text to ids below `vocabulary_size`, never `end`; it can be pickled if there are processes.
        end: id that stands before, between and after the documents.
        vocabulary_size: number of ids; decides the width of the stored integers.
        key: fingerprint of `encode`.
        cache: folder for caches.
        on_bad: called with each document that is left out, shard by shard; may raise to stop.
        num_processes: how many encode at the same time; 1 means this one.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {num_processes}")
    fingerprint = combined_sha256(
        "tokens", str(_FORMAT), documents.fingerprint(), key, str(end), str(vocabulary_size)
    )
    folder = Path(cache) / "tokens" / fingerprint[:32]
    if not folder.is_dir():
        parts = folder.with_name(f".parts-{folder.name}")
        job = _Job(documents, encode, end, vocabulary_size, parts)
        try:
            for number in _progress(job, _finished_shards(job, num_processes)):
                if on_bad is not None:
                    for bad in _read_shard(job.path(number))[2]:
                        on_bad(bad)
            with fresh_folder(folder) as temporary:
                _merge(job, temporary, fingerprint)
        except FileNotFoundError:
            if not folder.is_dir():  # else another caller has finished, and has put the shards away
                raise
        shutil.rmtree(parts, ignore_errors=True)
    return TokenFile(folder)


@dataclass(frozen=True)
class _Job:
    """What one token file is made from, and where its shards lie."""

    documents: Source
    encode: Callable[[str], NDArray[Any]]
    end: int
    vocabulary_size: int
    parts: Path

    @property
    def shard_size(self) -> int:
        """Documents in a shard; follows from their number alone, as restarts must cut them alike."""
        return min(max(-(-len(self.documents) // _SHARDS), 1), _LARGEST_SHARD)

    @property
    def num_shards(self) -> int:
        return -(-len(self.documents) // self.shard_size)

    @property
    def dtype(self) -> str:
        kinds = ("uint8", "uint16", "uint32")
        return next(kind for kind in kinds if self.vocabulary_size <= 1 << 8 * np.dtype(kind).itemsize)

    def path(self, number: int) -> Path:
        return self.parts / f"{number:08d}.npz"

    def write(self, number: int) -> int:
        """Encodes the documents of shard `number` into its file, whole or not at all."""
        lengths: list[int] = []
        bad: list[BadSample] = []
        encoded = [np.zeros(0, self.dtype)]
        first = number * self.shard_size
        for index in range(first, min(first + self.shard_size, len(self.documents))):
            try:
                ids = np.asarray(self.encode(self.documents[index]["text"]))
            except (BadSampleError, EncodingError) as error:
                named = isinstance(error, BadSampleError)
                reason = str(error) if named else f"{self.documents.name(index)}: {error}"
                bad.append(BadSample(index, reason))
                continue
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary_size:
                raise ValueError(
                    f"document {index} was encoded to ids {ids.min()}..{ids.max()}, outside the vocabulary's "
                    f"0..{self.vocabulary_size - 1}"
                )
            encoded += [ids.astype(self.dtype), np.array([self.end], self.dtype)]
            lengths.append(len(ids) + 1)
        with fresh_file(self.path(number)) as temporary:
            stored = np.frombuffer(json.dumps(bad).encode(), np.uint8)
            np.savez(
                temporary, tokens=np.concatenate(encoded), lengths=np.array(lengths, np.int64), bad=stored
            )
        return number


def _read_shard(path: Path) -> tuple[NDArray[Any], NDArray[np.int64], list[BadSample]]:
    """Tokens, lengths of the documents with their end, and what was left out."""
    with np.load(path) as file:
        bad = [BadSample(*entry) for entry in json.loads(file["bad"].tobytes())]
        return file["tokens"], file["lengths"], bad


def _merge(job: _Job, folder: Path, fingerprint: str) -> None:
    lengths, bad = [np.zeros(1, np.int64)], []
    with (folder / "tokens.bin").open("wb") as file:
        file.write(np.array([job.end], job.dtype).tobytes())
        for number in range(job.num_shards):
            tokens, of_documents, left_out = _read_shard(job.path(number))
            file.write(tokens.tobytes())
            lengths.append(of_documents)
            bad += left_out
    offsets = np.cumsum(np.concatenate(lengths))
    np.save(folder / "offsets.npy", offsets)
    meta = {
        "format": _FORMAT,
        "dtype": job.dtype,
        "tokens": int(offsets[-1]) + 1,
        "end": job.end,
        "vocabulary_size": job.vocabulary_size,
        "fingerprint": fingerprint,
        "bad": bad,
    }
    (folder / "meta.json").write_text(json.dumps(meta))


def _finished_shards(job: _Job, num_processes: int) -> Iterator[int]:
    """Numbers of the shards in their order, each once it is written; those that are there come at once."""
    missing = [number for number in range(job.num_shards) if not job.path(number).is_file()]
    if num_processes == 1 or len(missing) < 2:
        for number in range(job.num_shards):
            yield number if job.path(number).is_file() else job.write(number)
        return
    # Spawned, not forked: threads of the caller would not survive a fork.
    context = multiprocessing.get_context("spawn")
    workers = min(num_processes, len(missing))
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(job,))
    try:
        waiting = {number: executor.submit(_write_shard, number) for number in missing}
        for number in range(job.num_shards):
            if number in waiting:
                waiting.pop(number).result()
            yield number
    finally:
        executor.shutdown(cancel_futures=True)


_here: dict[str, _Job] = {}


def _start_worker(job: _Job) -> None:
    _here["job"] = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_shard(number: int) -> int:
    return _here["job"].write(number)


def _progress(job: _Job, numbers: Iterator[int]) -> Iterator[int]:
    """Passes `numbers` on and shows them: a bar on a terminal, else a line every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(
            numbers, "tokenizing", total=job.num_shards, console=Console(stderr=True), transient=True
        )
        return
    said = time.monotonic()
    for number in numbers:
        yield number
        if time.monotonic() - said >= _SECONDS_A_LINE:
            said = time.monotonic()
            done = min((number + 1) * job.shard_size, len(job.documents))
            sys.stderr.write(f"tokenizing: {done} of {len(job.documents)} documents\n")
            sys.stderr.flush()


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

    def batch(self, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]] | None:
        """{"tokens": (len(ids), max_length + 1)}, as they are stored, if all of these windows are full."""
        if not ids.size or int(ids.min()) < 0 or int(ids.max()) >= len(self):
            return None
        spans = np.searchsorted(self._first, ids, side="right") - 1
        lows = self._starts[spans] + (ids - self._first[spans]) * self.max_length
        if (lows + self.max_length > self._starts[spans + 1]).any():
            return None
        rows = np.empty((len(ids), self.max_length + 1), self.file.tokens.dtype)
        for row, low in zip(rows, lows.tolist(), strict=True):
            row[:] = self.file.tokens[low : low + self.max_length + 1]
        return {"tokens": rows}

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
