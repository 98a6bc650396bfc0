"""Plain nodes (dict, list, scalar) to frozen dataclasses by their annotations, and back.

A plain node is what a resolved configuration, a JSON file or a checkpoint's hyper-parameters hold. Nothing
is converted silently: `"7"` is not an int, `7` is not a string, `true` is not 1; only an int is taken for a
float. Every complaint names the full path of its key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import inspect
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

TARGET = "_target_"
MISSING = "???"

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the full path of the key."""


def typed(node: Mapping[str, Any], cls: type[T], path: str = "") -> T:
    """Instance of the dataclass `cls` from a plain node.

    Annotations may be int, float, bool, str, Literal, tuple, list, dict[str, X], X | None, dataclasses, and
    abstract dataclasses or unions of dataclasses, where the node's `_target_` names the class.

    Args:
        node: the plain node.
        cls: a dataclass; abstract ones need a `_target_` in the node.
        path: where the node stands, for messages.

    Raises:
        ConfigError: unknown or missing key, wrong type, unusable `_target_`, or a value that the
            dataclass itself refuses.
    """
    return typing.cast(T, _dataclass(node, cls, path))


def to_plain(config: Any, *, how: bool = True) -> dict[str, Any]:
    """Plain types only, such that `typed` gives an equal dataclass back.

    Args:
        config: a dataclass instance.
        how: also the leaves that only say how a run is executed.
    """
    cls: Any = type(config)
    hints, plain = _hints(cls), {}
    for field in dataclasses.fields(config):
        if how or not field.metadata.get("how"):
            plain[field.name] = _plain(getattr(config, field.name), hints[field.name], how)
    return plain


def plain_defaults(cls: Any) -> dict[str, Any]:
    """The plain defaults of a dataclass's fields; fields without one are left out."""
    hints, plain = _hints(cls), {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            plain[field.name] = _plain(field.default, hints[field.name], True)
        elif field.default_factory is not dataclasses.MISSING:
            plain[field.name] = _plain(field.default_factory(), hints[field.name], True)
    return plain


def identity(config: Any) -> str:
    """Hash (sha256) of every leaf that says what a run is."""
    text = json.dumps(to_plain(config, how=False), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf of a plain node; a list is one leaf, and so is an empty dict."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, _join(path, str(key)))
    else:
        yield path, node


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the known words where none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}" if known else ""


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _plain(value: Any, hint: Any, how: bool) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        body = to_plain(value, how=how)
        return {TARGET: _name(type(value)), **body} if _needs_target(type(value), hint) else body
    if isinstance(value, Mapping):
        inner = typing.get_args(hint)[1] if len(typing.get_args(hint)) == 2 else Any
        return {str(key): _plain(item, inner, how) for key, item in value.items()}
    if isinstance(value, list | tuple):
        arguments = [member for member in typing.get_args(_without_none(hint)) if member is not Ellipsis]
        inner_hints = arguments if len(arguments) == len(value) else (arguments[:1] or [Any]) * len(value)
        return [_plain(item, inner, how) for item, inner in zip(value, inner_hints, strict=True)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is not a plain type; a config dataclass must not hold it")


def _without_none(hint: Any) -> Any:
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return members[0] if _is_union(hint) and len(members) == 1 else hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _needs_target(cls: type, hint: Any) -> bool:
    return _without_none(hint) is not cls


def _dataclass(node: Any, cls: type, path: str) -> Any:
    if not isinstance(node, Mapping):
        wanted = f"a node with keys ({cls.__name__})"
        raise ConfigError(f"{path or 'config'}: expected {wanted}, got {_show(node)}")
    body = dict(node)
    if TARGET in body:
        cls = _class(body.pop(TARGET), (cls,), _join(path, TARGET))
    if inspect.isabstract(cls):
        raise ConfigError(f"{_join(path, TARGET)}: missing; it names the kind of {cls.__name__}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in body:
        if key not in fields:
            raise ConfigError(f"{_join(path, str(key))}: unknown key{suggest(str(key), fields)}")
    hints, values = _hints(cls), {}
    for name, field in fields.items():
        if name in body:
            values[name] = _value(body[name], hints[name], _join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(path, name)}: missing")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def _value(value: Any, hint: Any, path: str) -> Any:
    if value == MISSING and isinstance(value, str):
        raise ConfigError(f"{path}: missing; it must be given")
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _dataclass(value, typing.cast(type, hint), path)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return _literal(value, arguments, path)
    if _is_union(hint):
        return _union(value, arguments, path)
    if hint in (dict, list, tuple):
        origin = hint
    if origin in (dict, Mapping):
        return _dict(value, arguments, path)
    if origin in (list, tuple):
        return _sequence(value, origin, arguments, path)
    return _scalar(value, hint, path)


def _scalar(value: Any, hint: Any, path: str) -> Any:
    if type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{path}: expected a finite number, got {value}")
    if type(value) is hint or (value is None and hint in (None, type(None))):
        return value
    if hint is float and type(value) is int:
        return float(value)
    raise ConfigError(f"{path}: expected {_describe(hint)}, got {_show(value)}{_hint(value, hint)}")


def _hint(value: Any, hint: Any) -> str:
    if hint is str and isinstance(value, bool | int | float):
        return "; put it in quotes if text is meant"
    if hint is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if hint is bool and isinstance(value, str):
        return "; write true or false"
    if isinstance(value, str) and value.lstrip("+-").replace(".", "", 1).isdigit():
        return "; write it without quotes or leading zeros"
    return ""


def _literal(value: Any, choices: tuple[Any, ...], path: str) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    listed = ", ".join(repr(choice) for choice in choices)
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    wish = f"; did you mean {close[0]!r}?" if close and isinstance(value, str) else ""
    raise ConfigError(f"{path}: expected one of {listed}, got {_show(value)}{wish}")


def _union(value: Any, members: tuple[Any, ...], path: str) -> Any:
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if len(members) == 1:
        return _value(value, members[0], path)
    if isinstance(value, Mapping):
        configs: tuple[type, ...] = tuple(filter(dataclasses.is_dataclass, members))
        if TARGET in value:
            return _dataclass(value, _class(value[TARGET], configs, _join(path, TARGET)), path)
        if configs:
            names = ", ".join(_name(member) for member in configs)
            raise ConfigError(f"{_join(path, TARGET)}: missing; it names one of {names}")
    for member in sorted(members, key=lambda member: member is not type(value)):
        try:
            return _value(value, member, path)
        except ConfigError:
            continue
    raise ConfigError(f"{path}: expected {' or '.join(map(_describe, members))}, got {_show(value)}")


def _dict(value: Any, arguments: tuple[Any, ...], path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected a node with keys, got {_show(value)}")
    inner = arguments[1] if arguments else Any
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: keys are text, got {_show(key)}; put it in quotes")
    return {key: _value(item, inner, _join(path, key)) for key, item in value.items()}


def _sequence(value: Any, kind: type, arguments: tuple[Any, ...], path: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path}: expected a list, got {_show(value)}; write [a, b]")
    fixed = kind is tuple and arguments and arguments[-1] is not Ellipsis
    if fixed and len(value) != len(arguments):
        raise ConfigError(f"{path}: expected {len(arguments)} values, got {len(value)}")
    inner = arguments if fixed else (arguments[:1] or (Any,)) * len(value)
    pairs = zip(value, inner, strict=True)
    return kind(_value(item, hint, f"{path}[{index}]") for index, (item, hint) in enumerate(pairs))


def _class(name: Any, bases: tuple[type, ...], path: str) -> type:
    """The concrete dataclass called `name`, a subclass of one of `bases`."""
    if not isinstance(name, str):
        raise ConfigError(f"{path}: expected the full name of a class, got {_show(name)}")
    module_name, _, class_name = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{path}: {name!r} is not the full name of a class")
    try:
        module = importlib.import_module(module_name or name)
    except ModuleNotFoundError as error:
        parts = (module_name or name).split(".")
        if error.name not in [".".join(parts[:end]) for end in range(1, len(parts) + 1)]:
            raise  # a module that exists, and itself lacks an import
        raise ConfigError(f"{path}: there is no module {error.name!r} (for {name!r})") from error
    found = getattr(module, class_name, None)
    if found is None:
        classes = inspect.getmembers(module, inspect.isclass)
        known = [key for key, value in classes if issubclass(value, bases) and not inspect.isabstract(value)]
        raise ConfigError(f"{path}: {module_name} has no class {class_name!r}{suggest(class_name, known)}")
    wanted = " or ".join(base.__name__ for base in bases)
    if not (isinstance(found, type) and issubclass(found, bases) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"{path}: {name} is not a kind of {wanted}")
    if inspect.isabstract(found):
        raise ConfigError(f"{path}: {name} is abstract; name a kind of it")
    return found


def _describe(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _show(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
