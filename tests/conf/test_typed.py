"""Plain nodes to frozen dataclasses and back: what is taken, and how everything else is refused."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import yaml

from mmlab.typed import ConfigError, identity, leaves, plain_defaults, to_plain, typed


@dataclass(frozen=True)
class Shape(ABC):
    @abstractmethod
    def area(self) -> float: ...


@dataclass(frozen=True)
class Square(Shape):
    side: float

    def __post_init__(self) -> None:
        if self.side < 0:
            raise ValueError(f"side must not be negative, got {self.side}")

    def area(self) -> float:
        return self.side**2


@dataclass(frozen=True)
class Circle(Shape):
    radius: float = 1.0

    def area(self) -> float:
        return 3.14 * self.radius**2


@dataclass(frozen=True)
class Inner:
    number: int = 1
    speed: int = field(default=0, metadata={"how": True})


@dataclass(frozen=True)
class Outer:
    text: str
    flag: bool
    ratio: float
    shape: Shape
    inner: Inner = Inner()
    kind: Literal["one", "two", 3] = "one"
    pair: tuple[float, int] = (0.5, 2)
    many: tuple[int, ...] = ()
    words: list[str] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    maybe: int | None = None
    either: Square | Circle | None = None
    scalar: int | str = 0
    free: dict[str, Any] = field(default_factory=dict)
    where: Inner = field(default=Inner(), metadata={"how": True})


SQUARE = {"_target_": f"{__name__}.Square", "side": 2.0}
GOOD: dict[str, Any] = {"text": "a", "flag": True, "ratio": 1, "shape": SQUARE}


def test_takes_every_kind_of_annotation() -> None:
    node = GOOD | {
        "inner": {"number": 4},
        "kind": 3,
        "pair": [1, 2],
        "many": [1, 2, 3],
        "words": ["x"],
        "shapes": {"a": {"_target_": f"{__name__}.Circle"}, "b": SQUARE},
        "maybe": 5,
        "either": {"_target_": f"{__name__}.Circle", "radius": 2},
        "scalar": "7",
        "free": {"deep": [1, {"x": None}]},
    }
    found = typed(node, Outer)
    assert found.ratio == 1.0
    assert type(found.ratio) is float
    assert found.shape == Square(2.0)
    assert found.inner == Inner(4)
    assert found.kind == 3
    assert found.pair == (1.0, 2)
    assert type(found.pair[0]) is float
    assert found.many == (1, 2, 3)
    assert found.shapes == {"a": Circle(1.0), "b": Square(2.0)}
    assert found.either == Circle(2.0)
    assert found.scalar == "7"
    assert found.free == {"deep": [1, {"x": None}]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"txet": "a"}, "txet: unknown key; did you mean 'text'?"),
        ({"inner": {"numbre": 1}}, "inner.numbre: unknown key; did you mean 'number'?"),
        ({"inner": {"number": "7"}}, "inner.number: expected int, got '7' (str); write it without quotes"),
        ({"inner": {"number": True}}, "inner.number: expected int, got True (bool)"),
        ({"inner": {"number": 7.0}}, "inner.number: expected int, got 7.0 (float); write 7"),
        ({"inner": {"number": None}}, "inner.number: expected int, got null"),
        ({"inner": {"number": "???"}}, "inner.number: missing; it must be given"),
        ({"inner": 3}, "inner: expected a node with keys (Inner), got 3 (int)"),
        ({"text": 7}, "text: expected str, got 7 (int); put it in quotes if text is meant"),
        ({"text": False}, "text: expected str, got False (bool); put it in quotes if text is meant"),
        ({"flag": "no"}, "flag: expected bool, got 'no' (str); write true or false"),
        ({"flag": 1}, "flag: expected bool, got 1 (int)"),
        ({"ratio": "1e-3"}, "ratio: expected float, got '1e-3' (str)"),
        ({"ratio": True}, "ratio: expected float, got True (bool)"),
        ({"kind": "tow"}, "kind: expected one of 'one', 'two', 3, got 'tow' (str); did you mean 'two'?"),
        ({"pair": [1.0]}, "pair: expected 2 values, got 1"),
        ({"pair": [1.0, 2.5]}, "pair[1]: expected int, got 2.5 (float)"),
        ({"many": 3}, "many: expected a list, got 3 (int); write [a, b]"),
        ({"many": [1, "x"]}, "many[1]: expected int, got 'x' (str)"),
        ({"shapes": {"a": {"radius": 1.0}}}, "shapes.a._target_: missing; it names the kind of Shape"),
        ({"shapes": {1: SQUARE}}, "shapes: keys are text, got 1 (int)"),
        ({"shape": SQUARE | {"side": -1.0}}, "shape: side must not be negative, got -1.0"),
        ({"shape": {"_target_": f"{__name__}.Square"}}, "shape.side: missing"),
        ({"shape": {"_target_": f"{__name__}.Sqare"}}, "has no class 'Sqare'; did you mean 'Square'?"),
        ({"shape": {"_target_": "mmlab.nowhere.X"}}, "shape._target_: there is no module 'mmlab.nowhere'"),
        ({"shape": {"_target_": f"{__name__}.Shape"}}, "is abstract; name a kind of it"),
        (
            {"shape": {"_target_": f"{__name__}.Inner"}},
            "shape._target_: tests.conf.test_typed.Inner is not a kind",
        ),
        ({"shape": {"_target_": "os.system"}}, "shape._target_: os.system is not a kind of Shape"),
        ({"shape": {"_target_": 3}}, "shape._target_: expected the full name of a class, got 3 (int)"),
        ({"shape": {"_target_": ""}}, "shape._target_: '' is not the full name of a class"),
        ({"shape": {"_target_": ".x"}}, "shape._target_: '.x' is not the full name of a class"),
        ({"either": {"side": 1.0}}, "either._target_: missing; it names one of"),
        ({"scalar": 1.5}, "scalar: expected int or str, got 1.5 (float)"),
    ],
)
def test_refuses_with_the_full_path(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        typed(GOOD | change, Outer)


def test_names_a_missing_key() -> None:
    with pytest.raises(ConfigError, match=r"^flag: missing$"):
        typed({"text": "a"}, Outer)


def test_checks_fields_in_their_order() -> None:
    with pytest.raises(ConfigError, match=r"^flag: "):
        typed(GOOD | {"flag": 3, "shape": {"_target_": "never.imported.X"}}, Outer)


def test_plain_form_gives_an_equal_dataclass_back_through_yaml() -> None:
    config = Outer(
        "é: '${x}' #", False, 1e-8, Circle(), pair=(1e20, -1), shapes={"s": Square(1)}, scalar="1e-3"
    )
    plain = to_plain(config)
    assert plain["shape"] == {"_target_": f"{__name__}.Circle", "radius": 1.0}
    assert "_target_" not in plain["inner"]
    assert typed(yaml.safe_load(yaml.safe_dump(plain)), Outer) == config


def test_plain_form_refuses_what_is_not_plain() -> None:
    with pytest.raises(TypeError, match="object is not a plain type"):
        to_plain(Outer("a", True, 1.0, Circle(), free={"x": object()}))


def test_identity_ignores_how_a_run_is_executed() -> None:
    config = typed(GOOD, Outer)
    assert identity(typed(GOOD | {"inner": {"speed": 9}, "where": {"number": 9}}, Outer)) == identity(config)
    assert identity(typed(GOOD | {"inner": {"number": 9}}, Outer)) != identity(config)
    assert set(to_plain(config)) - set(to_plain(config, how=False)) == {"where"}


def test_leaves_and_defaults() -> None:
    assert dict(leaves({"a": {"b": 1, "c": {}}, "d": [1, 2]})) == {"a.b": 1, "a.c": {}, "d": [1, 2]}
    assert plain_defaults(Inner) == {"number": 1, "speed": 0}
    assert "text" not in plain_defaults(Outer)
