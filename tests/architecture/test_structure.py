"""The package keeps its structure: layers, no cycles, one attention, places of packages, names, sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.architecture import rules
from tests.architecture.source import Module, Package, package_of, read_package

Rule = Callable[[Package], list[str]]

RULES: list[Rule] = [
    rules.upward_imports,
    rules.cycles,
    rules.hidden_cycles,
    rules.misplaced_packages,
    rules.sibling_imports,
    rules.eager_folders,
    rules.attention_sites,
    rules.vague_names,
    rules.foreign_names,
    rules.long_files,
    rules.swallowed_exceptions,
]

ATTENTION = "y = F.scaled_dot_product_attention(q, k, v)"

OFFENDERS: list[tuple[Rule, dict[str, str], str]] = [
    (rules.upward_imports, {"mmlab__data__order": "import mmlab.tasks.base"}, "imports mmlab.tasks.base"),
    (rules.upward_imports, {"mmlab__tasks__base": "from mmlab.callbacks import config"}, "row 1 from row 1"),
    (rules.upward_imports, {"mmlab__tasks__text": "def f():\n    import mmlab.train"}, "text:2 imports"),
    (
        rules.upward_imports,
        {"mmlab__backbone__masks": "from .. import data", "mmlab__data": ""},
        "imports mmlab.data",
    ),
    (rules.upward_imports, {"mmlab__plugins__new": ""}, "not in the table"),
    (rules.upward_imports, {"mmlab__train": "import mmlab.plugins"}, "not in the table"),
    (rules.cycles, {"mmlab__a": "import mmlab.b", "mmlab__b": "from mmlab import a"}, "mmlab.a, mmlab.b"),
    (rules.cycles, {"mmlab__d__a": "from . import b", "mmlab__d__b": "from .a import x"}, "cycle"),
    (
        rules.hidden_cycles,
        {"mmlab__a": "def f():\n    from mmlab.b import g", "mmlab__b": "import mmlab.a"},
        "mmlab.a:2 imports mmlab.b inside a function",
    ),
    (rules.misplaced_packages, {"mmlab__train": "import hydra"}, "hydra belongs in config, cli"),
    (rules.misplaced_packages, {"mmlab__records": "from omegaconf import OmegaConf"}, "omegaconf belongs"),
    (rules.misplaced_packages, {"mmlab__data__order": "import lightning"}, "lightning belongs"),
    (rules.misplaced_packages, {"mmlab__tasks__a": "import pytorch_lightning.loggers"}, "no module"),
    (rules.misplaced_packages, {"mmlab__backbone__masks": "import numpy as np"}, "torch and the"),
    (
        rules.misplaced_packages,
        {"mmlab__backbone__a": "from mmlab import typed"},
        "torch and the",
    ),
    (rules.sibling_imports, {"mmlab__tasks__text": "", "mmlab__tasks__a": "from . import text"}, "a:1"),
    (rules.sibling_imports, {"mmlab__data__sources__a": "import mmlab.data.sources.b"}, "stay apart"),
    (rules.sibling_imports, {"mmlab__models__decoder": "import mmlab.models.encoder"}, "stay apart"),
    (rules.sibling_imports, {"mmlab__models__a": "import mmlab.models.b"}, "stay apart"),
    (rules.attention_sites, {"mmlab__a": ATTENTION, "mmlab__b": ATTENTION}, "mmlab.b:1"),
    (rules.attention_sites, {"mmlab__a": f"{ATTENTION}\n{ATTENTION}"}, "mmlab.a:2"),
    (rules.attention_sites, {"mmlab__a": ""}, "no call"),
    (rules.vague_names, {"mmlab__data__utils": ""}, "mmlab.data.utils"),
    (rules.vague_names, {"mmlab__data__text_utils": ""}, "text_utils"),
    (rules.vague_names, {"mmlab__common__x": ""}, "mmlab.common.x"),
    (rules.foreign_names, {"mmlab__models__a": "def f(d_model): ..."}, "says d_model"),
    (rules.foreign_names, {"mmlab__models__a": "f(n_embd=3)"}, "says n_embd"),
    (rules.long_files, {"mmlab__a": "x = 1\n" * 401}, "401 lines, the limit is 400"),
    (rules.swallowed_exceptions, {"mmlab__a": "try:\n    f()\nexcept:\n    g()"}, "a:3 bare except"),
    (rules.swallowed_exceptions, {"mmlab__a": "try:\n    f()\nexcept KeyError:\n    ..."}, "does nothing"),
    (rules.swallowed_exceptions, {"mmlab__a": "try:\n    f()\nexcept Exception:\n    g()"}, "swallows"),
    (rules.swallowed_exceptions, {"mmlab__a": "with contextlib.suppress(Exception):\n    f()"}, "suppresses"),
]

CLEAN: list[tuple[Rule, dict[str, str]]] = [
    (
        rules.upward_imports,
        {"mmlab__cli": "import mmlab.train", "mmlab__data__a": "from mmlab import typed"},
    ),
    (rules.cycles, {"mmlab__a": "if TYPE_CHECKING:\n    import mmlab.b", "mmlab__b": "import mmlab.a"}),
    (rules.hidden_cycles, {"mmlab__a": "def f():\n    import mmlab.b", "mmlab__b": "import torch"}),
    (
        rules.misplaced_packages,
        {"mmlab__backbone__a": "import math, torch.nn\nimport mmlab.backbone.b"},
    ),
    (rules.sibling_imports, {"mmlab__tasks__a": "import mmlab.tasks.base", "mmlab__tasks__base": ""}),
    (rules.sibling_imports, {"mmlab__models__multimodal": "import mmlab.models.decoder"}),
    (rules.attention_sites, {"mmlab__a": f"# F.scaled_dot_product_attention\n{ATTENTION}"}),
    (rules.foreign_names, {"mmlab__interop__a": "x = config.n_embd"}),
    (
        rules.swallowed_exceptions,
        {"mmlab__a": "try:\n    f()\nexcept Exception as error:\n    raise ValueError('f') from error"},
    ),
]


EAGER = "mmlab.data:1 imports mmlab.data.order: an __init__ is empty or lazy"


@pytest.fixture(scope="module")
def package() -> Package:
    return read_package()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule: Rule, package: Package) -> None:
    assert len(package) > 30, "the package was not found"
    breaches = rule(package)
    assert not breaches, "\n".join(["", *breaches])


@pytest.mark.parametrize(("rule", "texts", "says"), OFFENDERS)
def test_rule_finds_offender(rule: Rule, texts: dict[str, str], says: str) -> None:
    breaches = rule(package_of(**texts))
    assert any(says in breach for breach in breaches), breaches


@pytest.mark.parametrize(("rule", "texts"), CLEAN)
def test_rule_accepts_clean_source(rule: Rule, texts: dict[str, str]) -> None:
    assert rule(package_of(**texts)) == []


def test_folder_that_imports_its_modules_is_found() -> None:
    package = {"mmlab.data": Module("mmlab.data", "from mmlab.data.order import Order", is_folder=True)}
    package |= package_of(mmlab__data__order="")
    assert rules.eager_folders(package) == [
        "mmlab.data:1 imports mmlab.data.order: an __init__ is empty or lazy"
    ]


def test_relative_import_in_a_folder_resolves_to_the_folder() -> None:
    package = {"mmlab.data": Module("mmlab.data", "from .order import Order", is_folder=True)}
    package |= package_of(mmlab__data__order="from ..tasks import base", mmlab__tasks__base="")
    assert rules.eager_folders(package) == [
        "mmlab.data:1 imports mmlab.data.order: an __init__ is empty or lazy"
    ]
    assert rules.upward_imports(package) == [
        "mmlab.data.order:1 imports mmlab.tasks.base: row 1 from row 4, only rows below are open"
    ]
