"""The rules of the package's structure: each takes modules and returns what breaks it, one line a breach."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable

from tests.architecture.source import Import, Package, imports, inside, is_own

# From top to bottom; a row holds folders and single modules, and a module imports only from its own folder or
# from rows below. The modules of the first row share one folder, mmlab/ itself; every other name is its own.
ROWS: tuple[tuple[str, ...], ...] = (
    (
        "cli",
        "help",
        "launch",
        "train",
        "config",
        "runconfig",
        "complaints",
        "restore",
        "generate",
        "evaluate",
        "prepare",
    ),
    ("tasks", "callbacks", "strategies", "records"),
    ("evaluation",),
    ("inference", "interop", "optim"),
    ("models", "data"),
    ("modalities",),
    ("backbone",),
    ("typed", "provenance"),
)

# Third-party packages and the only places that may import them.
PLACES: dict[str, tuple[str, ...]] = {
    "hydra": ("config", "cli"),
    "omegaconf": ("config", "cli"),
    "lightning": ("tasks", "callbacks", "strategies", "records", "train", "data.datamodule"),
    "pytorch_lightning": (),
}

# In these folders a module imports no sibling but the ones named.
SIBLINGS: dict[str, tuple[str, ...]] = {
    "tasks": ("base", "config"),
    "modalities": ("base", "config"),
    "data.sources": ("base", "config"),
}

VAGUE_NAMES = ("utils", "util", "common", "helpers", "helper", "misc")
FOREIGN_NAMES = ("n_embd", "d_model", "hidden_dim", "n_layer", "n_head", "hidden_size")
MAX_LINES, GUIDE_LINES = 400, 300


def _row(name: str) -> int | None:
    top = name.split(".")[1] if "." in name else "typed"
    return next((i for i, row in enumerate(ROWS) if top in row), None)


def _folder(name: str) -> str:
    top = name.split(".")[1] if "." in name else ""
    return "" if top in ROWS[0] else top


def upward_imports(package: Package) -> list[str]:
    """Imports of the own package that point to the same row in another folder, or to a row above."""
    found = [f"{name}: not in the table of layers" for name in package if _row(name) is None]
    for edge in imports(package):
        here, there = _row(edge.source), _row(edge.target)
        if not is_own(edge.target) or here is None or edge.target == "mmlab":
            continue
        if there is None:
            found.append(f"{edge}: not in the table of layers")
        elif there <= here and not (there == here and _folder(edge.source) == _folder(edge.target)):
            found.append(f"{edge}: row {there} from row {here}, only rows below are open")
    return found


def _components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one module."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for following in graph.get(stack.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
        reach[start] = seen
    components: list[set[str]] = []
    for name in graph:
        if name in reach[name] and not any(name in c for c in components):
            components.append({other for other in graph if other in reach[name] and name in reach[other]})
    return components


def _graph(package: Package, kinds: Iterable[str]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {name: set() for name in package}
    for edge in imports(package):
        if edge.where in kinds and edge.target in package:
            graph[edge.source].add(edge.target)
    return graph


def cycles(package: Package) -> list[str]:
    """Cycles of imports at module level."""
    return ["cycle: " + ", ".join(sorted(c)) for c in _components(_graph(package, ("module",)))]


def hidden_cycles(package: Package) -> list[str]:
    """Imports inside functions that would close a cycle if they stood at the top of their module."""
    components = _components(_graph(package, ("module", "function")))
    return [
        f"{edge} inside a function, which hides a cycle"
        for edge in imports(package)
        if edge.where == "function" and any({edge.source, edge.target} <= c for c in components)
    ]


def misplaced_packages(package: Package) -> list[str]:
    """Third-party packages outside their places, and anything but torch in the backbone."""
    found = []
    for edge in imports(package):
        top = edge.target.split(".")[0]
        places = PLACES.get(top)
        if places is not None and not any(inside(edge.source, place) for place in places):
            found.append(f"{edge}: {top} belongs in {', '.join(places) or 'no module'}")
        own = inside(edge.source, "backbone") and is_own(edge.target) and inside(edge.target, "backbone")
        if inside(edge.source, "backbone") and not own and top not in {"torch", *sys.stdlib_module_names}:
            found.append(f"{edge}: the backbone has torch and the standard library only")
    return found


def _sibling_breach(edge: Import) -> bool:
    for folder, open_to in SIBLINGS.items():
        if inside(edge.source, folder) and is_own(edge.target) and inside(edge.target, folder):
            here, there = (
                name.removeprefix(f"mmlab.{folder}").strip(".").split(".")[0]
                for name in (edge.source, edge.target)
            )
            return here != there and there not in open_to  # the modules of a subfolder are one sibling
    if inside(edge.source, "models") and is_own(edge.target) and inside(edge.target, "models"):
        plain = edge.source.split(".")[-1] in ("base", "encoder", "decoder")
        return edge.target.split(".")[-1] not in (
            ("base",) if plain else ("base", "adapt", "encoder", "decoder")
        )
    return False


def sibling_imports(package: Package) -> list[str]:
    """Siblings that import each other where they may not; composite models may import encoder and decoder."""
    return [f"{edge}: siblings stay apart" for edge in imports(package) if _sibling_breach(edge)]


def eager_folders(package: Package) -> list[str]:
    """An `__init__` that imports at module level: importing one module would then import all of them."""
    return [
        f"{edge}: an __init__ is empty or lazy"
        for edge in imports(package)
        if package[edge.source].is_folder
        and edge.where == "module"
        and edge.target.split(".")[0] not in sys.stdlib_module_names
    ]


def mentions(package: Package, name: str) -> list[str]:
    """Every use of `name` as a name, an attribute or an import; strings and comments do not count."""
    found = []
    for module in package.values():
        for node in ast.walk(module.tree):
            hit = (
                (isinstance(node, ast.Name) and node.id == name)
                or (isinstance(node, ast.Attribute) and node.attr == name)
                or (isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names))
            )
            if hit:
                found.append(f"{module.name}:{node.lineno} mentions {name}")  # type: ignore[attr-defined]
    return found


def attention_sites(package: Package) -> list[str]:
    """More or fewer than one mention of scaled-dot-product attention."""
    found = mentions(package, "scaled_dot_product_attention")
    return [] if len(found) == 1 else (found or ["no call of scaled_dot_product_attention"])


def vague_names(package: Package) -> list[str]:
    """Modules and folders whose name says nothing."""
    return [
        f"{name}: a name that says nothing"
        for name in package
        if any(part.strip("_") in VAGUE_NAMES or part.endswith("_utils") for part in name.split("."))
    ]


def foreign_names(package: Package) -> list[str]:
    """Other projects' words for width, depth and heads, outside `interop`."""
    found = []
    for module in package.values():
        if inside(module.name, "interop"):
            continue
        for node in ast.walk(module.tree):
            kind = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg"}.get(type(node))
            if kind and getattr(node, kind) in FOREIGN_NAMES:
                found.append(f"{module.name}:{node.lineno} says {getattr(node, kind)}")  # type: ignore[attr-defined]
    return found


def long_files(package: Package) -> list[str]:
    """Files over the limit, which lies above the guide so that a file is not cut in a bad place."""
    counts = {name: len(module.text.splitlines()) for name, module in package.items()}
    return [
        f"{name}: {lines} lines, the limit is {MAX_LINES} (guide {GUIDE_LINES}); split it by concept"
        for name, lines in counts.items()
        if lines > MAX_LINES
    ]


def _says_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...)
        for node in body
    )


def swallowed_exceptions(package: Package) -> list[str]:
    """Bare excepts, handlers that do nothing, and broad ones that neither raise nor look at the exception."""
    found = []
    for module in package.values():
        for node in ast.walk(module.tree):
            where = f"{module.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler):
                inner = [n for statement in node.body for n in ast.walk(statement)]
                broad = {n.id for n in ast.walk(node.type or ast.Pass()) if isinstance(n, ast.Name)}
                raises = any(isinstance(n, ast.Raise) for n in inner)
                looks = any(isinstance(n, ast.Name) and n.id == node.name for n in inner)
                if node.type is None:
                    found.append(f"{where} bare except")
                elif _says_nothing(node.body):
                    found.append(f"{where} except that does nothing")
                elif broad & {"Exception", "BaseException"} and not raises and not looks:
                    found.append(f"{where} broad except that swallows")
            elif isinstance(node, ast.Call) and "suppress" in ast.unparse(node.func):
                broad = {
                    n.id for argument in node.args for n in ast.walk(argument) if isinstance(n, ast.Name)
                }
                if broad & {"Exception", "BaseException"}:
                    found.append(f"{where} suppresses every exception")
    return found


# Kept apart by brackets, so that this file is not its own first finding.
MACHINE_PATH = re.compile(r"(?<![\w./])[/](?:root|home|work|Users|mnt|workspace)/\w")
PRIVATE_ID = re.compile(r"\b(?:LT|HY|TK|DP|PK|TB|GA|AT|PR|IMP|KV|SA|RL|DF|MO|MM|CL|IM|WH|AU|NB)-\d\d\b")


def private_text(texts: dict[str, str]) -> list[str]:
    """Paths of one machine, and ids of a list that is not in the repository."""
    found = []
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            for pattern, what in ((MACHINE_PATH, "path of one machine"), (PRIVATE_ID, "private id")):
                if match := pattern.search(line):
                    found.append(f"{name}:{number} {what}: {match.group()!r}")
    return found


def duplicate_names(paths: Iterable[str]) -> list[str]:
    """Names that differ in upper and lower case only, which some file systems cannot hold together."""
    names = list(paths)
    counts = Counter(name.lower() for name in names)
    return [f"{name}: differs from another in case only" for name in names if counts[name.lower()] > 1]
