"""What Hydra could not compose, said in one line with the word that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmlab.typed import ConfigError, leaves, suggest


def message(
    error: BaseException,
    overrides: Sequence[str],
    folder: Path,
    compose: Callable[[Sequence[str]], Mapping[str, Any]],
) -> str:
    """Explains `error`.

    Args:
        error: what Hydra or OmegaConf raised.
        overrides: the command line's.
        folder: the folder of config groups.
        compose: gives the configuration that other overrides compose, to look up the known keys.
    """
    text = _whole(error)
    if "Ambiguous value" in text or "OverrideParseException" in _kinds(error):
        return _unreadable(text, overrides)
    key = re.search(r"Could not override '([^']+)'", text)
    if key and "in the defaults list" not in text.replace("No match in the defaults list", ""):
        return _unknown_key(key[1], overrides, folder, compose)
    option = re.search(r"(?:Could not find|In '[^']+': Could not find) '([^']+)'", text)
    if option:
        return _unknown_option(option[1], folder)
    missing = re.search(r"You must specify '([^']+)'", text)
    if missing:
        return f"{missing[1]}: missing; choose one of {', '.join(options(folder, missing[1]))}"
    return text


def options(folder: Path, group: str) -> list[str]:
    """Names that a config group can take, those in its sub-folders included."""
    below = folder / group
    return sorted(path.relative_to(below).with_suffix("").as_posix() for path in below.rglob("*.yaml"))


def groups(folder: Path) -> list[str]:
    """The config groups: folders that hold YAML files; an option of `experiment` may itself have a folder."""
    found = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("*/*.yaml")}
    return sorted({name.split("/")[0] if name.startswith("experiment/") else name for name in found})


def _chain(error: BaseException) -> Iterable[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _kinds(error: BaseException) -> set[str]:
    return {type(link).__name__ for link in _chain(error)}


def _whole(error: BaseException) -> str:
    lines: list[str] = []
    for link in _chain(error):
        lines += [line for line in str(link).splitlines() if line.strip() and line not in lines]
    return "\n".join(lines)


def _unknown_key(
    path: str,
    overrides: Sequence[str],
    folder: Path,
    compose: Callable[[Sequence[str]], Mapping[str, Any]],
) -> str:
    """Looks the key up in the configuration that the other overrides compose."""
    others = [word for word in overrides if path not in word.split("=")[0]]
    try:
        node: Any = compose(others)
    except ConfigError:  # another override is wrong too
        return f"{path}: unknown key"
    parts = path.split("@")[0].split(".")
    for index, part in enumerate(parts):
        if not isinstance(node, Mapping):
            return f"{path}: {'.'.join(parts[:index])} is a value and has no keys"
        if part not in node:
            known = set(node) | (set(groups(folder)) if index == 0 else set())
            last = index == len(parts) - 1
            place = f"{path}: unknown key" if last else f"{path}: unknown key {part!r}"
            if not known:
                return f"{place}; to add it write +{path}=..."
            if index == 0 and not difflib.get_close_matches(part, known):
                return place + _deeper(part, node, known)
            return place + suggest(part, known)
        node = node[part]
    return f"{path}: cannot be overridden here"


def _deeper(word: str, node: Mapping[str, Any], known: Iterable[str]) -> str:
    """A key further down that is called like `word`."""
    ends: dict[str, list[str]] = {}
    for path, _ in leaves(node):
        ends.setdefault(path.rpartition(".")[2], []).append(path)
    close = difflib.get_close_matches(word, ends, n=1, cutoff=0.75)
    if close:
        return f"; did you mean {' or '.join(map(repr, ends[close[0]][:3]))}?"
    return suggest(word, known)


def _unknown_option(name: str, folder: Path) -> str:
    group, _, option = name.rpartition("/")
    if name.startswith("experiment/"):
        group, option = "experiment", name.removeprefix("experiment/")
    while group and not (folder / group).is_dir():
        head, _, tail = group.rpartition("/")
        group, option = head, f"{tail}/{option}"
    if not group:
        return f"{name}: unknown config group{suggest(name.split('/')[0], groups(folder))}"
    known = options(folder, group)
    close = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    wish = f"; did you mean {close[0]!r}?" if close else ""
    return f"{group}={option}: unknown option{wish} ({group} can be {', '.join(known)})"


def _unreadable(text: str, overrides: Sequence[str]) -> str:
    """The override that could not be read, and how to quote its value for the shell and for Hydra."""
    if "Ambiguous value" in text:
        found = re.search(r"Ambiguous value for argument '([^']*)'", text)
        word = found[1] if found else ""
        key, _, value = word.partition("=")
        return (
            f"{word}: a comma makes a sweep, which needs -m; a list is {key}=[{value}], "
            f"and text with a comma is \"{key}='{value}'\""
        )
    word = next((word for word in overrides if repr(word) in text or word in text), "")
    key, equals, value = word.partition("=")
    if not equals:
        return f"{word or text}: expected key=value"
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{word}: this value cannot be read as it stands; quote it twice: \"{key}='{quoted}'\""
