"""`mmlab prepare`: files that are whole or absent, what it says, and that only one kind asks the network."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mmlab import prepare
from mmlab.config import ConfigError, compose, typed
from mmlab.data.sources.jsonl import JsonlConfig
from mmlab.data.sources.tokens import TokenFile, build_token_file
from mmlab.modalities.text.bpe import NAMED, BPEConfig, read_ranks, write_ranks
from mmlab.modalities.text.vocabulary import BytesConfig
from mmlab.prepare import PrepareConfig, run

TEXTS = ["the cat and the other cat", "the mat, the hat, the bat!", "ein Käfer läuft", "naïve"]


def configured(*overrides: str) -> PrepareConfig:
    return typed(compose(overrides, config_name="prepare"), PrepareConfig)


@pytest.fixture
def source(tmp_path: Path) -> str:
    lines = [json.dumps({"text": text}) for text in TEXTS] + ['{"other": 1}']
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    return f"source.paths=[{tmp_path / 'texts.jsonl'}]"


@pytest.mark.parametrize("name", ["own.tiktoken", "own.tiktoken.gz"])
def test_vocabulary_is_trained_written_and_described(
    name: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / name
    words = [
        "preparation=vocabulary",
        source,
        "size=262",
        f"output={output}",
        f"paths.cache={tmp_path / 'c'}",
    ]
    run(configured(*words))
    said = capsys.readouterr().out
    ranks = read_ranks(output)
    assert len(ranks) == 262
    assert b"the" in ranks or b" the" in ranks
    digest = hashlib.sha256(write_ranks(ranks)).hexdigest()
    assert f"sha256 {digest}" in said
    assert f"modality.text.path={output} modality.text.sha256={digest}" in said
    vocabulary = BPEConfig(str(output), sha256=digest).build()
    size = sum(len(text.encode()) for text in TEXTS)
    tokens = sum(len(vocabulary.encode(text)) for text in TEXTS)
    assert f"  {size / tokens:.3f} bytes a token: 4 documents, {size} bytes, {tokens} tokens;" in said
    assert "left out 1 documents that cannot be read" in said
    assert "no text in 'text'" in said

    before = output.read_bytes()
    with pytest.raises(ConfigError, match=f"output: {output} is there; overwrite=true replaces it"):
        run(configured(*words))
    assert output.read_bytes() == before
    run(configured(*words, "overwrite=true"))
    assert output.read_bytes() == before  # the same texts, the same vocabulary
    run(configured(*words, "overwrite=true", "size=260"))
    assert len(read_ranks(output)) == 260


def test_a_failure_leaves_no_file(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "new" / "own.tiktoken"
    words = ["preparation=vocabulary", source, f"output={output}", f"paths.cache={tmp_path / 'c'}"]
    with pytest.raises(ConfigError, match=r"source: the texts give only \d+ tokens, not 4096"):
        run(configured(*words))
    monkeypatch.setattr(prepare, "write_ranks", lambda ranks: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(configured(*words, "size=260"))
    assert not output.parent.exists() or not list(output.parent.iterdir())


def test_tokens_lie_where_training_looks(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    run(configured("preparation=tokens", source, f"paths.cache={cache}"))
    said = capsys.readouterr().out
    (folder,) = (cache / "tokens").iterdir()
    total = sum(len(text.encode()) + 1 for text in TEXTS) + 1
    assert said.splitlines()[0].startswith(f"{folder}: 4 documents in ")
    assert f"  {total} tokens, 5 of them document ends, 1.000 bytes a token" in said
    assert "left out 1 documents" in said
    vocabulary = BytesConfig().build()
    found = build_token_file(
        JsonlConfig((str(tmp_path / "texts.jsonl"),)).build(),
        lambda text: pytest.fail("encoded again"),
        end=vocabulary.end,
        vocabulary_size=vocabulary.size,
        key=vocabulary.fingerprint(),
        cache=cache,
    )
    assert found.folder == folder
    assert bytes(TokenFile(folder).tokens[1:4].tolist()) == b"the"


@pytest.mark.slow
def test_tokens_with_processes_and_byte_pairs(source: str, tmp_path: Path) -> None:
    output = tmp_path / "own.tiktoken"
    cache = f"paths.cache={tmp_path / 'cache'}"
    run(configured("preparation=vocabulary", source, "size=263", f"output={output}", cache))
    words = ["preparation=tokens", source, "modality/text=bpe", f"modality.text.path={output}"]
    run(configured(*words, cache, "num_processes=2"))
    run(configured(*words, f"paths.cache={tmp_path / 'one'}"))
    (two,), (one,) = ((tmp_path / name / "tokens").iterdir() for name in ("cache", "one"))
    assert (two / "tokens.bin").read_bytes() == (one / "tokens.bin").read_bytes()
    vocabulary = BPEConfig(str(output)).build()
    assert vocabulary.decode(TokenFile(two).tokens) == "<|end|>".join(["", *TEXTS, ""])


class Answers:
    """Stands for the network: notes the addresses, answers with `content`."""

    def __init__(self, content: bytes | OSError) -> None:
        self.content, self.asked = content, []

    def __call__(self, address: str, timeout: float) -> io.BytesIO:
        self.asked.append(address)
        assert timeout > 0
        if isinstance(self.content, OSError):
            raise self.content
        return io.BytesIO(self.content)


def test_a_named_vocabulary_is_fetched_once(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = (shared_data / "tokenizers" / "cl100k_base.tiktoken.gz").read_bytes()
    network = Answers(gzip.decompress(packed))
    monkeypatch.setattr(urllib.request, "urlopen", network)
    monkeypatch.setenv("MMLAB_CACHE", str(tmp_path))
    config = configured("preparation=named", "name=cl100k_base")
    run(config)
    path = tmp_path / "vocabularies" / "cl100k_base.tiktoken"
    assert path.read_bytes() == network.content
    assert f"{path}: 1681126 bytes, sha256 {NAMED['cl100k_base'].sha256}" in capsys.readouterr().out
    run(config)
    assert len(network.asked) == 1
    assert network.asked[0].endswith("/cl100k_base.tiktoken")
    assert "is there, and is the published one" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(NAMED))
def test_what_is_not_the_published_file_is_not_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("preparation=named", f"name={name}", f"output={tmp_path}")
    network = Answers(b"<html>blocked</html>")
    monkeypatch.setattr(urllib.request, "urlopen", network)
    with pytest.raises(OSError, match=f"20 bytes came for {name} from .*{NAMED[name].sha256}; nothing was"):
        run(config)
    wanted = "r50k_base" if name == "gpt2" else name
    assert network.asked[0].endswith(f"/{wanted}.tiktoken")
    monkeypatch.setattr(urllib.request, "urlopen", Answers(urllib.error.URLError("no route to host")))
    with pytest.raises(OSError, match=r"does not answer: .*no route to host"):
        run(config)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"{name}.tiktoken").write_bytes(b"YWI= 0\n")
    with pytest.raises(ConfigError, match=f"output: .* expected {NAMED[name].sha256}"):
        run(config)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["preparation=vocabulary", "output=a.tiktoken"], "source.paths: missing"),
        (["preparation=vocabulary", "source=python"], "output: missing"),
        (["preparation=vocabulary", "source=python", "output=a.json"], "output must end in .tiktoken"),
        (
            ["preparation=vocabulary", "source=python", "output=a.tiktoken", "size=9"],
            "size must be at least 256",
        ),
        (
            ["preparation=vocabulary", "source=python", "output=a.tiktoken", "pattern=x"],
            "pattern must be one of",
        ),
        (["preparation=named"], "name: missing"),
        (["preparation=named", "name=gpt3"], "name: expected one of 'gpt2'"),
        (["preparation=tokens", "source=python", "num_processes=0"], "num_processes must be at least 1"),
        (["preparation=tokens", "source=python", "size=300"], "size"),
        ([], "preparation"),
    ],
)
def test_what_cannot_be_done_is_said_before(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        configured(*words)


def test_an_absent_source_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source: .* no file matches"):
        run(configured("preparation=tokens", f"source.paths=[{tmp_path}/x.jsonl]", f"paths.cache={tmp_path}"))
    with pytest.raises(ConfigError, match=r"modality\.text: no vocabulary at .*x\.tiktoken"):
        run(
            configured(
                "preparation=tokens", "source=python", "modality/text=bpe", "modality.text.path=x.tiktoken"
            )
        )
    with pytest.raises(ValueError, match="preparation=vocabulary needs source"):
        PrepareConfig("vocabulary")


@pytest.mark.parametrize("name", ["jsonl", "text_files", "parquet", "python"])
def test_every_source_composes(name: str) -> None:
    paths = [] if name == "python" else [f"source.paths=[a.{name}]"]
    config = configured("preparation=tokens", f"source={name}", *paths, "modality/text/chat=chatml")
    assert config.source is not None
    assert config.modality is not None
    assert config.modality["text"].chat is not None


def test_importing_asks_for_no_torch() -> None:
    import subprocess
    import sys

    program = "import sys, mmlab.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
