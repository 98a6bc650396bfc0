"""`mmlab prepare`: trains a vocabulary, turns documents into a token file, or fetches a named vocabulary."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mmlab.data.files import fresh_file
from mmlab.data.sources.base import BadSampleError, Source, SourceConfig
from mmlab.data.sources.tokens import build_token_file
from mmlab.modalities.text.bpe import NAMED, Name, NamedBPEConfig, check_pattern, read_ranks, write_ranks
from mmlab.modalities.text.bpe_training import train_bpe
from mmlab.modalities.text.vocabulary import TextModalityConfig
from mmlab.runconfig import PathsConfig
from mmlab.typed import ConfigError

_TIMEOUT = 60  # seconds without an answer


@dataclass(frozen=True)
class PrepareConfig:
    """What is made from what.

    `vocabulary` trains byte pairs on the documents of `source` and writes them to `output`; `tokens` encodes
    the documents of `source` with `modality.text` into a token file in the cache, where training finds it;
    `named` fetches a published vocabulary over the network.

    Args:
        preparation: which of the three.
        source: documents, for the first two.
        modality: `text` is the vocabulary of `tokens`.
        size: tokens of a vocabulary, the 256 bytes included; special tokens come on top.
        pattern: how text is cut before bytes are merged: gpt2, cl100k, o200k or a regular expression.
        min_frequency: a pair is merged only if it occurs this often.
        output: file of a trained vocabulary (`.tiktoken` or `.tiktoken.gz`), or folder of a named one, where
            it is not the usual one.
        overwrite: replaces a vocabulary that is there.
        num_processes: how many encode at the same time.
        name: which vocabulary is fetched.
        paths: `cache` gets token files.
    """

    preparation: Literal["vocabulary", "tokens", "named"]
    source: SourceConfig | None = None
    modality: dict[str, TextModalityConfig] | None = None
    size: int = 4096
    pattern: str = "gpt2"
    min_frequency: int = 2
    output: str | None = None
    overwrite: bool = False
    num_processes: int = 1
    name: Name | None = None
    paths: PathsConfig = field(default_factory=PathsConfig)

    def __post_init__(self) -> None:
        wanted = {"vocabulary": ("source", "output"), "tokens": ("source", "modality"), "named": ("name",)}
        for name in wanted[self.preparation]:
            if getattr(self, name) is None:
                raise ValueError(f"preparation={self.preparation} needs {name}")
        check_pattern(self.pattern)
        for name, least in (("size", 256), ("min_frequency", 1), ("num_processes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.preparation == "vocabulary" and not str(self.output).endswith((".tiktoken", ".tiktoken.gz")):
            raise ValueError(f"output must end in .tiktoken or .tiktoken.gz, got {self.output!r}")
        if self.preparation == "tokens" and set(self.modality or ()) != {"text"}:
            raise ValueError(f"modality must hold text and nothing else, got {sorted(self.modality or ())}")


def run(config: PrepareConfig) -> None:
    """Does it and says what came of it.

    Raises:
        ConfigError: a file is in the way, or the source or its documents cannot be used.
        OSError: the network does not answer.
    """
    {"vocabulary": _vocabulary, "tokens": _tokens, "named": _named}[config.preparation](config)


def _vocabulary(config: PrepareConfig) -> None:
    output = Path(str(config.output)).expanduser()
    if output.exists() and not config.overwrite:
        raise ConfigError(f"output: {output} is there; overwrite=true replaces it")
    texts = _Texts(_source(config))
    start = time.monotonic()
    with _faults("source"):
        trained = train_bpe(texts, config.size, config.pattern, config.min_frequency)
    content = write_ranks(trained.ranks)
    with fresh_file(output) as temporary:
        temporary.write_bytes(gzip.compress(content, mtime=0) if output.suffix == ".gz" else content)
    digest = hashlib.sha256(content).hexdigest()
    _say(f"{output}: {config.size} tokens of pattern {config.pattern}, in {time.monotonic() - start:.0f} s")
    _say(
        f"  {trained.bytes / max(trained.tokens, 1):.3f} bytes a token: {trained.texts} documents, "
        f"{trained.bytes} bytes, {trained.tokens} tokens; tiktoken and tokenizers give the same ids for all"
    )
    if texts.bad:
        _say(f"  left out {len(texts.bad)} documents that cannot be read: {next(iter(texts.bad.values()))}")
    _say(f"  sha256 {digest}")
    _say(f"mmlab train modality/text=bpe modality.text.path={output} modality.text.sha256={digest}")


def _tokens(config: PrepareConfig) -> None:
    assert config.modality is not None
    with _faults("modality.text"):
        vocabulary = config.modality["text"].build()
    source = _source(config)
    start = time.monotonic()
    file = build_token_file(
        source,
        vocabulary.encode,
        end=vocabulary.end,
        vocabulary_size=vocabulary.size,
        key=vocabulary.fingerprint(),
        cache=Path(config.paths.cache),
        num_processes=config.num_processes,
    )
    ends = file.documents + 1
    words = file.tokens.size - ends
    stored = int(vocabulary.byte_lengths[file.tokens].sum()) if file.tokens.size < _COUNTED else 0
    ratio = f", {stored / words:.3f} bytes a token" if stored and words else ""
    _say(f"{file.folder}: {file.documents} documents in {time.monotonic() - start:.0f} s")
    _say(f"  {file.tokens.size} tokens, {ends} of them document ends{ratio}")
    if file.bad:
        _say(f"  left out {len(file.bad)} documents that cannot be used: {file.bad[0].reason}")


_COUNTED = 1 << 28  # tokens whose bytes are counted; more would take minutes


def _named(config: PrepareConfig) -> None:
    assert config.name is not None
    path, known = NamedBPEConfig(config.name, folder=config.output).path, NAMED[config.name]
    if path.is_file() and not config.overwrite:
        with _faults("output"):
            read_ranks(path, known.sha256)
        _say(f"{path}: is there, and is the published one")
        return
    address = _address(config.name)
    content = _fetched(address)
    digest = hashlib.sha256(content).hexdigest()
    if digest != known.sha256:
        raise OSError(
            f"{len(content)} bytes came for {config.name} from {address}, with sha256 {digest}, expected "
            f"{known.sha256}; nothing was written"
        )
    with fresh_file(path) as temporary:
        temporary.write_bytes(content)
    _say(f"{path}: {len(content)} bytes, sha256 {digest}")


def _address(name: str) -> str:
    """Where tiktoken itself fetches the ranks of `name` from: asked of it, with a loader that only notes."""
    from tiktoken_ext import openai_public

    found: list[str] = []

    def note(address: str, expected_hash: str | None = None) -> dict[bytes, int]:
        found.append(address)
        return {}

    constructor = openai_public.ENCODING_CONSTRUCTORS["r50k_base" if name == "gpt2" else name]
    types.FunctionType(constructor.__code__, {**constructor.__globals__, "load_tiktoken_bpe": note})()
    return found[0]


def _fetched(address: str) -> bytes:
    import urllib.request

    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT) as answer:
            content: bytes = answer.read()
    except OSError as error:
        raise OSError(f"{address} does not answer: {error}") from error
    return content


def _source(config: PrepareConfig) -> Source:
    assert config.source is not None
    with _faults("source"):
        return config.source.build(Path(config.paths.cache))


@contextlib.contextmanager
def _faults(key: str) -> Iterator[None]:
    """What files and their content lack is said as a fault of the configuration under `key`."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error


class _Texts:
    """Texts of a source's documents, as often as they are gone through; those that are bad are noted."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.bad: dict[int, str] = {}

    def __iter__(self) -> Iterator[str]:
        for index in range(len(self.source)):
            try:
                text = self.source[index]["text"]
            except BadSampleError as error:
                self.bad[index] = str(error)
                continue
            yield text


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
