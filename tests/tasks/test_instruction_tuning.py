"""Loss where the assistant speaks and nowhere else, on whole answers, packed or not."""

import json
import math

import numpy as np
import pytest
import torch

from mmlab.config import configure
from mmlab.data.conversations import Conversations
from mmlab.data.datamodule import DataModule
from mmlab.data.sources.base import BadSampleError
from mmlab.data.sources.chat import ChatRowsConfig
from mmlab.data.sources.synthetic import SyntheticConfig
from mmlab.modalities.text.chat import CHATML, PLAIN
from mmlab.modalities.text.vocabulary import BytesConfig
from mmlab.models.decoder import IGNORE
from mmlab.tasks.text import InstructionTuningConfig, LanguageModelingConfig
from mmlab.train import build_task

S, E = "<|im_start|>", "<|im_end|>"


def turns(*contents, system=None):
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *said] if system else said


def write(path, conversations):
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in conversations))
    return ChatRowsConfig((str(path),))


def examples(max_length=200, truncate="refuse", chat=CHATML):
    return InstructionTuningConfig(truncate).examples({"text": BytesConfig(chat=chat)}, max_length)


def spelled(examples, ids):
    return [examples.vocabulary.decode([token]) if token != IGNORE else None for token in ids]


def test_targets_are_the_assistants_words_and_the_end_of_its_turn():
    task = examples()
    ids, trained = task.render({"messages": turns("hi", "yo", "?", "é")})
    example = task({"tokens": ids.astype(np.int64), "trained": trained}, None)
    before = [S, *"user\nhi", E, "\n", S, *"assistant\n"]
    between = ["\n", S, *"user\n?", E, "\n", S, *"assistant\n"]
    none, accent = [None], ["\ufffd", "\ufffd"]
    expected = [*none * (len(before) - 1), "y", "o", E, *none * len(between), *accent, E, None]
    assert spelled(task, example["targets"]) == expected
    read = [*before, "y", "o", E, *between, *accent, E]
    assert spelled(task, example["tokens"]) == read
    assert example["targets"][len(before) - 1] == ord("y")
    assert example["targets"][-4:-2].tolist() == list("é".encode())


def test_the_end_of_a_document_ends_a_plain_reply():
    task = examples(chat=PLAIN)
    ids, trained = task.render({"messages": turns("a", "b")})
    example = task({"tokens": ids, "trained": trained}, None)
    targets = spelled(task, example["targets"])
    assert [target for target in targets if target is not None] == ["b", "<|end|>"]


def test_conversations_are_written_down_once(tmp_path, monkeypatch):
    source = write(tmp_path / "a.jsonl", [turns("one", "1"), turns("two", "22")]).build()
    task = examples()
    first = task.prepare(source, tmp_path / "cache")
    assert isinstance(first, Conversations)
    lengths = [len(task.render(source[index]).ids) - 1 for index in range(2)]
    assert first.lengths.tolist() == lengths
    assert [len(task(first[index], None)["targets"]) for index in range(2)] == lengths
    monkeypatch.setattr(type(task), "render", lambda *_: pytest.fail("rendered again"))
    again = task.prepare(source, tmp_path / "cache")
    assert again.fingerprint() == first.fingerprint()
    assert again[1]["tokens"].tolist() == first[1]["tokens"].tolist()
    assert task.prepare(first, tmp_path / "cache") is first
    with pytest.raises(IndexError):
        first[2]


def test_what_is_written_down_depends_on_all_that_decides_it(tmp_path):
    source = write(tmp_path / "a.jsonl", [turns("one", "1")]).build()
    variants = [examples(), examples(max_length=199), examples(truncate="prompt"), examples(chat=PLAIN)]
    prints = {task.prepare(source, tmp_path).fingerprint() for task in variants}
    assert len(prints) == 4


def test_a_damaged_cache_is_named(tmp_path):
    prepared = examples().prepare(write(tmp_path / "a.jsonl", [turns("one", "1")]).build(), tmp_path)
    (prepared.folder / "trained.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"trained\.bin holds 1 bytes where \d+ were written; delete"):
        Conversations(prepared.folder, SyntheticConfig(size=1).build())


LONG = turns("q1", "a" * 30, "q2", "b" * 20, "q3", "c" * 10, system="sys")


def test_what_is_too_long_is_a_bad_sample_by_default(tmp_path):
    source = write(tmp_path / "a.jsonl", [turns("q", "a"), LONG, turns("q", "b")]).build()
    prepared = examples(max_length=100).prepare(source, tmp_path / "cache")
    assert len(prepared) == 2
    ((number, reason),) = prepared.bad
    assert number == 1
    assert reason.startswith(f"{tmp_path}/a.jsonl row 1 ")
    assert "a conversation of 141 targets, max_length is 100" in reason
    assert prepared.name(1) == source.name(2)


def test_the_oldest_exchanges_are_dropped_and_answers_stay_whole():
    def kept(max_length):
        task = examples(max_length, "prompt")
        ids, trained = task.render({"messages": LONG})
        text = task.vocabulary.decode(ids)
        assert len(ids) - 1 <= max_length
        assert task.vocabulary.decode(ids[trained]).endswith("c" * 10 + E)
        return text

    system = f"{S}system\nsys{E}\n"
    whole = kept(141)
    assert whole.count(S) == 7
    for length, first in ((140, "q2"), (88, "q2"), (87, "q3"), (45, "q3")):
        assert kept(length).startswith(f"{system}{S}user\n{first}")
        assert whole.endswith(kept(length).removeprefix(system))
    with pytest.raises(BadSampleError, match="a conversation of 45 targets, max_length is 44"):
        examples(44, "prompt").render({"messages": LONG})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (turns("only a question"), "nothing to train: no message of 'assistant'"),
        ([], "needs at least one message"),
        ([{"role": "narrator", "content": "x"}], "message 0 has the role 'narrator'"),
        (turns("\ud800", "x"), "has no UTF-8 form"),
    ],
)
def test_a_conversation_that_trains_nothing_is_a_bad_sample(tmp_path, messages, reason):
    source = write(tmp_path / "a.jsonl", [messages, turns("q", "a")]).build()
    prepared = examples().prepare(source, tmp_path / "cache")
    assert [sample for sample, _ in prepared.bad] == [0]
    assert reason in prepared.bad[0].reason
    assert len(prepared) == 1


def test_what_can_train_nothing_at_all_is_refused():
    with pytest.raises(ValueError, match=r"needs a chat template, but modality\.text\.chat is null"):
        InstructionTuningConfig().examples({"text": BytesConfig()}, 10)
    with pytest.raises(ValueError, match=r"instruction tuning needs modality\.text; the modalities are \[\]"):
        InstructionTuningConfig().examples({}, 10)
    with pytest.raises(ValueError, match=r"samples with 'messages', got the fields \['tokens', 'text'\]"):
        examples().render(SyntheticConfig(size=1).build()[0])
    with pytest.raises(ValueError, match=r"language modelling needs modality\.text"):
        LanguageModelingConfig().examples({}, 10)


CONVERSATIONS = [
    turns("q" * (number % 5 + 1), "abc"[number % 3] * (number * 7 % 11 + 1), *["on", "end"][: number % 2 * 2])
    for number in range(9)
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A task with random weights, and its conversations in a file."""
    folder = tmp_path_factory.mktemp("chat")
    write(folder / "a.jsonl", CONVERSATIONS)
    config = configure(
        [
            "backbone=tiny",
            "task=instruction_tuning",
            "modality/text/chat=chatml",
            "data=instructions",
            "data.max_length=256",
            "data.batch_size=1024",
        ]
    )
    task = build_task(config)
    task.configure_model()
    return config, task, folder


def loader(config, folder, **changes):
    from dataclasses import replace

    source = ChatRowsConfig((f"{folder}/a.jsonl",))
    data = replace(config.data, train=source, validation=source, bad_samples=0, **changes)
    examples = config.task.examples(config.modality, data.max_length)
    return DataModule(data, examples, seed=0, total_steps=4, cache=folder / "cache")


def by_hand(task, examples):
    """Summed loss of the assistant's words, and their number, message by message."""
    total, count = 0.0, 0
    with torch.no_grad():
        for messages in CONVERSATIONS:
            ids = examples.template.render(messages, examples.vocabulary).ids.tolist()
            logits = task.network(torch.tensor([ids])).logits_BTV[0].double()
            text = examples.vocabulary.decode(ids)
            for at in [place for place in range(len(ids)) if ids[place] == ids[0]]:  # turns begin alike
                if not examples.vocabulary.decode(ids[at : at + 11]).endswith("assistant\n"):
                    continue
                place = at + 11
                while True:
                    total -= float(torch.log_softmax(logits[place - 1], -1)[ids[place]])
                    count += 1
                    if ids[place] == examples.vocabulary.specials[E]:
                        break
                    place += 1
            assert text.count("assistant\n") == sum(message["role"] == "assistant" for message in messages)
    return total, count


def test_the_loss_is_that_of_the_trained_tokens(parts):
    config, task, folder = parts
    module = loader(config, folder)
    batches = list(module.validation_loader())
    expected, count = by_hand(task, module.examples)
    words = [message["content"] for messages in CONVERSATIONS for message in messages[1::2]]
    assert count == sum(len(word) + 1 for word in words)
    counts = {name: sum(batch.counts[name] for batch in batches) for name in batches[0].counts}
    assert counts == {
        "nll": count,
        "bytes": sum(map(len, words)),
        "tokens": sum(module.validation.lengths),
    }
    with torch.no_grad():
        found = sum(float(task.sums(batch)["nll"]) for batch in batches)
    assert found == pytest.approx(expected, rel=1e-5)
    metrics = task.metrics({"nll": found}, counts)
    assert metrics["val/loss"] == pytest.approx(expected / count, rel=1e-5)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(expected / count), rel=1e-4)


def test_packed_conversations_give_the_sum_of_separate_ones(parts):
    config, task, folder = parts

    def total(module):
        batches = [batch for batch in module.loader() if batch.epoch == 0]
        assert sorted(sample for batch in batches for sample in batch.ids.tolist()) == list(range(9))
        with torch.no_grad():
            sums = [float(task.sums(batch)["nll"]) for batch in batches]
        rows = max(len(batch.tensors["tokens"]) for batch in batches)
        return sum(sums), sum(batch.counts["nll"] for batch in batches), rows

    packed = total(loader(config, folder))
    alone = total(loader(config, folder, batching="padded", unit="samples", batch_size=9, micro_batch_size=1))
    assert packed[1] == alone[1]
    assert packed[2] < 9
    assert packed[0] == pytest.approx(alone[0], rel=1e-5)


def test_an_empty_micro_batch_counts_nothing(parts):
    config, task, folder = parts
    options = {"batching": "padded", "unit": "samples", "batch_size": 16, "micro_batch_size": 1}
    batches = list(loader(config, folder, **options).loader())
    empty = next(batch for batch in batches if not len(batch.ids))
    assert empty.counts == {"nll": 0.0, "bytes": 0.0, "tokens": 0.0}
    with torch.no_grad():
        assert float(task.sums(empty)["nll"]) == 0.0
    assert task.rate == ("tokens", "tokens")
