"""The package as data: its modules, their syntax trees, and who imports whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]

Where = Literal["module", "function", "typing"]


@dataclass(frozen=True)
class Module:
    """One file of the package; `name` is dotted, an `__init__` has the name of its folder."""

    name: str
    text: str
    is_folder: bool = False

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


@dataclass(frozen=True)
class Import:
    """`source` imports `target` at `line`; `typing` stands for a block under TYPE_CHECKING."""

    source: str
    target: str
    line: int
    where: Where

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


Package = dict[str, Module]


def read_package(folder: Path = ROOT / "mmlab") -> Package:
    """Every module below `folder`, by dotted name."""
    package = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        is_folder = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_folder else parts)
        package[name] = Module(name, path.read_text(encoding="utf-8"), is_folder)
    return package


def package_of(**texts: str) -> Package:
    """A made-up package: `package_of(mmlab__data__order="import torch")` has the module mmlab.data.order."""
    names = {key.replace("__", "."): text for key, text in texts.items()}
    return {name: Module(name, text) for name, text in names.items()}


class _Imports(ast.NodeVisitor):
    def __init__(self, module: Module, package: Package) -> None:
        self.module, self.package = module, package
        self.where: Where = "module"
        self.found: list[Import] = []

    def _add(self, target: str, line: int) -> None:
        if target != self.module.name:
            self.found.append(Import(self.module.name, target, line, self.where))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self.module.name.split(".")
            drop = node.level - self.module.is_folder
            base = ".".join([*parents[: len(parents) - drop], *([base] if base else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            self._add(inner if inner in self.package else base, node.lineno)

    def _inside(self, where: Where, nodes: list[ast.stmt]) -> None:
        outer = self.where
        self.where = where if outer != "typing" else outer
        for node in nodes:
            self.visit(node)
        self.where = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside("function", node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside("function", node.body)

    def visit_If(self, node: ast.If) -> None:
        names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
        self._inside("typing" if "TYPE_CHECKING" in names else self.where, node.body)
        self._inside(self.where, node.orelse)


def imports(package: Package) -> Iterator[Import]:
    """Every import of every module, names resolved to modules of the package where they are one."""
    for module in package.values():
        visitor = _Imports(module, package)
        visitor.visit(module.tree)
        yield from dict.fromkeys(visitor.found)  # `from a import b, c` is one import of a


def is_own(name: str) -> bool:
    """Whether `name` is a module of mmlab."""
    return name == "mmlab" or name.startswith("mmlab.")


def inside(name: str, folder: str) -> bool:
    """Whether module `name` is `folder` or lies in it (both without the leading `mmlab.`)."""
    own = name.removeprefix("mmlab.")
    return own == folder or own.startswith(folder + ".")
