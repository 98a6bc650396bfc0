"""A Jinja template is taken over exactly, or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmlab.interop.chat_template import find_template, jinja, recognise
from mmlab.modalities.text.chat import CHATML, PLAIN, SMOLLM2, ChatTemplate, Message, Turn
from mmlab.modalities.text.vocabulary import ByteVocabulary

VOCABULARY = ByteVocabulary(["<|im_start|>", "<|im_end|>", "<s>", "<|eot_id|>", "<|h|>"])

# As such templates are written by others, in the styles that occur.
LOOP = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM_FIRST = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + LOOP.split("%}", 1)[1]
)
BLOCKS = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "assistant" or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|h|>' + message['role'] + ': ' + message['content'] + "
    "'<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|h|>assistant: ' }}{% endif %}"
)


def folder(path: Path, **files: Any) -> Path:
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("text", "system", "begin", "header"),
    [
        (LOOP, None, "", "<|im_start|>user\n"),
        (SYSTEM_FIRST, "You help.", "", "<|im_start|>user\n"),
        (BLOCKS, "You help.", "", "<|im_start|>user\n"),
        (HEADERS, None, "<s>", "<|h|>user: "),
    ],
)
def test_known_forms_are_taken_over(
    tmp_path: Path, text: str, system: str | None, begin: str, header: str
) -> None:
    place = folder(tmp_path, special_tokens_map={"bos_token": {"content": "<s>"}})
    template, reason = recognise(text, place, VOCABULARY)
    assert reason is None
    assert template is not None
    assert (template.system, template.begin) == (system, begin)
    assert template.roles["user"].header == header
    # An order, contents and a length that recognition did not try.
    messages: list[Message] = [{"role": "user", "content": f" q{i}\n"} for i in range(3)]
    messages[1:1] = [{"role": "assistant", "content": "\ta "}]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    compiled = environment.from_string(text)
    wanted = compiled.render(messages=messages, add_generation_prompt=True, bos_token="<s>")
    assert VOCABULARY.decode(template.render(messages, VOCABULARY, reply=True).ids) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LOOP.replace("message['content']", "message['content'] | trim"), "it writes"),
        (LOOP.replace("message['content']", "message['content'].split('</think>')[-1]"), "it writes"),
        (LOOP.replace("message['role'] +", "message['role'] + loop.index | string +"), ""),
        (LOOP.replace("<|im_end|>", "</s>"), "must begin with one of specials"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "must begin with one of specials"),
        ("{{ messages[0]['content'] }}", "does not write every message once"),
        ("{{ raise_exception('no') }}", "no$"),
        (LOOP.replace("add_generation_prompt", "false"), ""),
        ("{{ strftime_now('%d') }}" + LOOP, "strftime_now"),
        ("{% for message in %}", ""),
        (LOOP + "{% if messages | length == 4 and add_generation_prompt %}x{% endif %}", ""),
    ],
)
def test_others_are_not(tmp_path: Path, text: str, message: str) -> None:
    template, reason = recognise(text, tmp_path, VOCABULARY)
    assert template is None
    assert reason is not None
    assert reason.startswith("the chat template has no form here and is left out: ")
    assert re.search(message, reason), reason


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    text = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    template, reason = recognise(text, tmp_path, VOCABULARY)
    assert template is None
    assert "unsafe" in (reason or "")


MARKED = ChatTemplate(
    {
        "system": Turn("<|h|>{{ 'sys' }}\n", "\\n'\"<|eot_id|>"),
        "user": Turn("<|h|>{% u %}", "<|eot_id|>\n\n"),
        "assistant": Turn("<|h|>a: ", "<|eot_id|>"),
    },
    specials=("<|h|>", "<|eot_id|>", "<s>"),
    begin="<s>",
)


@pytest.mark.parametrize("template", [CHATML, SMOLLM2, PLAIN, MARKED])
def test_what_is_written_is_recognised_again(tmp_path: Path, template: ChatTemplate) -> None:
    program = jinja(template, VOCABULARY)
    again, reason = recognise(program, tmp_path, VOCABULARY)
    assert reason is None
    assert again is not None
    expected = {role: turn for role, turn in template.roles.items() if role != "tool"}
    assert (dict(again.roles), again.system, again.begin) == (expected, template.system, template.begin)


def test_writing_names_what_ends_a_document_as_the_vocabulary_does() -> None:
    vocabulary = ByteVocabulary()
    vocabulary.specials = {"<|endoftext|>": 256}
    assert "Assistant: " in jinja(PLAIN, vocabulary)
    assert "<|endoftext|>\\n" in jinja(PLAIN, vocabulary)
    assert "<|end|>" not in jinja(PLAIN, vocabulary)


def test_unknown_roles_raise_in_what_is_written(tmp_path: Path) -> None:
    program = jinja(replace(CHATML, system=None), VOCABULARY)
    environment = ImmutableSandboxedEnvironment()

    def refuse(message: str) -> None:
        raise LookupError(message)

    environment.globals["raise_exception"] = refuse
    with pytest.raises(LookupError, match="unknown role nobody"):
        environment.from_string(program).render(messages=[{"role": "nobody", "content": ""}])


def test_places_of_a_template(tmp_path: Path) -> None:
    assert find_template(tmp_path) is None
    folder(tmp_path, tokenizer_config={"chat_template": "one"})
    assert find_template(tmp_path) == "one"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    folder(tmp_path, tokenizer_config={"chat_template": named})
    assert find_template(tmp_path) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert find_template(tmp_path) == "three"
