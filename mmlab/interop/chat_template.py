"""Chat templates of Hugging Face (Jinja) to ours and back.

A Jinja template is a program. It is run on probes, the words around the messages are read off, and the result
counts only if it writes further probes letter by letter as the program does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmlab.interop.tensors import read_json
from mmlab.interop.weights import InteropError
from mmlab.modalities.text.chat import END, ChatTemplate, Message, Turn

if TYPE_CHECKING:
    from mmlab.modalities.text.vocabulary import Vocabulary

FILE = "chat_template.jinja"
ROLES = ("system", "user", "assistant")
Program = Callable[[Sequence[Message], bool], str]

# Contents that programs are known to treat in a special way: blanks at the ends, nothing, reasoning.
_CONTENTS = ("Hi", "  two\n\nlines ", "", "<think>\nwhy\n</think>\n\nso", "{{ 'x' }} <|im_end|>")
_ORDERS = (
    ("user",),
    ("system", "user"),
    ("user", "assistant"),
    ("system", "user", "assistant"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "user"),
    ("user", "system", "user"),
)


def find_template(folder: Path) -> str | None:
    """The Jinja text of the chat template in `folder`; None if it has none."""
    if (folder / FILE).is_file():
        return (folder / FILE).read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (folder / name).is_file():
            found = read_json(folder / name).get("chat_template")
            if isinstance(found, list):  # several by name
                found = {entry["name"]: entry["template"] for entry in found}.get("default")
            if isinstance(found, str):
                return found
    return None


def recognise(text: str, folder: Path, vocabulary: Vocabulary) -> tuple[ChatTemplate | None, str | None]:
    """Our form of the Jinja template `text`, or None and the reason why it has none.

    Args:
        text: the template.
        folder: where its names of special tokens (`bos_token`, ...) stand.
        vocabulary: has the special tokens; what is compared are the texts of the ids that our form gives.
    """
    try:
        program = _program(text, _names(folder))
        template = _read_off(program, vocabulary)
        compared = 0
        for order, shift, reply in itertools.product(_ORDERS, range(len(_CONTENTS)), (False, True)):
            contents = itertools.islice(itertools.cycle(_CONTENTS), shift, None)
            messages = [Message(role=role, content=next(contents)) for role in order]
            wanted = _if_allowed(program, messages, reply)
            if wanted is None:
                continue
            found = vocabulary.decode(template.render(messages, vocabulary, reply=reply).ids)
            compared += 1
            if found != wanted:
                raise InteropError(f"for {messages} it writes {wanted!r}, our form {found!r}")
        if not compared:
            raise InteropError("it refuses every conversation that was tried")
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        return None, f"the chat template has no form here and is left out: {error}"
    return template, None


def jinja(template: ChatTemplate, vocabulary: Vocabulary) -> str:
    """`template` as a Jinja program; unknown roles raise."""
    ends = {index: name for name, index in vocabulary.specials.items()}[vocabulary.end]
    named = {END: ends} if END in template.specials and END not in vocabulary.specials else {}

    def words(*parts: str) -> str:
        text = "".join(parts)
        for name, actual in named.items():
            text = text.replace(name, actual)
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"

    lines = [f"{{{{ {words(template.begin)} }}}}"] if template.begin else []
    if template.system is not None:
        turn = template.roles["system"]
        always = words(turn.header, template.system, turn.footer)
        lines.append(f"{{% if messages[0]['role'] != 'system' %}}{{{{ {always} }}}}{{% endif %}}")
    lines.append("{% for message in messages %}")
    for number, (role, turn) in enumerate(template.roles.items()):
        test = f"{{% {'elif' if number else 'if'} message['role'] == {words(role)} %}}"
        lines.append(f"{test}{{{{ {words(turn.header)} + message['content'] + {words(turn.footer)} }}}}")
    lines.append("{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}{% endfor %}")
    header = words(template.roles[template.assistant].header)
    lines.append(f"{{% if add_generation_prompt %}}{{{{ {header} }}}}{{% endif %}}")
    return "".join(lines)


def _program(text: str, names: Mapping[str, str]) -> Program:
    """Runs `text` with the settings of `transformers`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    compiled = environment.from_string(text)
    return lambda messages, reply: compiled.render(
        messages=[dict(message) for message in messages], add_generation_prompt=reply, **names
    )


def _if_allowed(program: Program, messages: Sequence[Message], reply: bool) -> str | None:
    """What the program writes; None for an order of roles that it refuses."""
    try:
        return program(messages, reply)
    except TemplateError:
        return None


def _read_off(program: Program, vocabulary: Vocabulary) -> ChatTemplate:
    """The template that writes what the program does for a conversation with and without a system message."""
    marks = {name: f"@{name}@" for name in ("system", "user", "assistant", "again")}
    whole = [Message(role=role, content=marks[role]) for role in ROLES]
    whole.append(Message(role="user", content=marks["again"]))
    text = program(whole, False)
    if any(text.count(mark) != 1 for mark in marks.values()):
        raise InteropError("it does not write every message once")
    before, rest = text.split(marks["system"])
    system_to_user, rest = rest.split(marks["user"])
    user_to_assistant, rest = rest.split(marks["assistant"])
    assistant_to_user, user_footer = rest.split(marks["again"])
    with_reply = program(whole, True)
    assistant_header = with_reply[len(text) :]
    if not with_reply.startswith(text) or user_to_assistant != user_footer + assistant_header:
        raise InteropError("a reply does not begin as the turn of an assistant")
    assistant_footer = program(whole[:3], False).split(marks["assistant"])[1]
    user_header = _without(assistant_to_user, assistant_footer, "")
    system_footer = _without(system_to_user, "", user_header)

    bare = _without(program(whole[1:2], False), "", user_header + marks["user"] + user_footer)
    default: str | None = None
    begin = bare if before.startswith(bare) else ""
    if bare != begin:  # a system message of its own
        default = _without(bare, before, system_footer)
    headers = {"system": before[len(begin) :], "user": user_header, "assistant": assistant_header}
    footers = {"system": system_footer, "user": user_footer, "assistant": assistant_footer}
    turns = {role: Turn(headers[role], footers[role]) for role in ROLES}
    words = "".join([begin, *headers.values(), *footers.values()])
    specials = tuple(name for name in vocabulary.specials if name in words)
    return ChatTemplate(turns, specials=specials, begin=begin, system=default)


def _without(text: str, start: str, end: str) -> str:
    """`text` without what it must start and end with."""
    if not text.startswith(start) or not text.endswith(end) or len(text) < len(start) + len(end):
        raise InteropError(f"{text!r} does not start with {start!r} and end with {end!r}")
    return text[len(start) : len(text) - len(end)]


def _names(folder: Path) -> dict[str, Any]:
    """`bos_token` and its like, by the names that templates use."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found |= read_json(folder / name)
    tokens = {key: value for key, value in found.items() if key.endswith("_token")}
    contents = {
        key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()
    }
    return {key: value for key, value in contents.items() if isinstance(value, str)}
