"""Conversations from rows of messages and from rows of instructions."""

import gzip
import json
import pickle

import pytest

from mmlab.data.sources.base import BadSampleError
from mmlab.data.sources.chat import ChatRowsConfig

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def source(tmp_path, rows, **options):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return ChatRowsConfig((f"{tmp_path}/a.jsonl.gz",), **options).build(tmp_path / "cache")


def test_rows_of_messages(tmp_path):
    more = [{"role": "user", "content": "x", "name": "ann"}]
    rows = source(tmp_path, [{"messages": TALK, "id": 1}, {"messages": more}])
    assert len(rows) == 2
    assert rows[0] == {"messages": TALK}
    assert rows[1] == {"messages": [{"role": "user", "content": "x"}]}
    assert pickle.loads(pickle.dumps(rows))[0] == rows[0]


def test_rows_of_instructions(tmp_path):
    written = [
        {"instruction": "Add.", "input": "1 2", "output": "3", "id": "a"},
        {"instruction": "Greet.", "input": "", "output": "Hello"},
        {"instruction": "Greet.", "output": ""},
    ]
    rows = source(tmp_path, written, format="instruction")
    contents = [[message["content"] for message in rows[index]["messages"]] for index in range(3)]
    assert contents == [["Add.\n\n1 2", "3"], ["Greet.", "Hello"], ["Greet.", ""]]
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]
    renamed = source(
        tmp_path,
        [{"question": "1+1?", "input": 3, "answer": "2"}],
        format="instruction", instruction="question", input=None, output="answer",
    )  # fmt: skip
    assert [message["content"] for message in renamed[0]["messages"]] == ["1+1?", "2"]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "x"}, {}, r"a\.jsonl\.gz row 0 .*no list of messages in 'messages': fields \['text'\]"),
        ({"messages": [*TALK, {"role": "user"}]}, {}, r"messages\[2\] is no message with a text in"),
        ({"messages": ["hi"]}, {}, r"messages\[0\] is no message"),
        ({"output": "x"}, {"format": "instruction"}, r"no text in 'instruction': fields \['output'\]"),
        ({"instruction": "x", "input": 3, "output": "x"}, {"format": "instruction"}, "'input' is int"),
        ({"instruction": "x", "output": None}, {"format": "instruction"}, "'output' is NoneType"),
    ],
)
def test_a_row_that_is_none_is_a_bad_sample(tmp_path, row, options, message):
    rows = source(tmp_path, [row], **options)
    with pytest.raises(BadSampleError, match=message):
        rows[0]


def test_the_fingerprint_follows_how_rows_are_read(tmp_path):
    options = [{}, {"format": "instruction"}, {"format": "instruction", "input": None}]
    prints = {source(tmp_path, [{"messages": TALK}], **each).fingerprint() for each in options}
    assert len(prints) == 3
    assert source(tmp_path, [{"messages": TALK[:1]}]).fingerprint() not in prints
