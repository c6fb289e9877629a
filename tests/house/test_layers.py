"""Imports go down the layers of docs/architecture.md, never up, and the lower layers do no I/O."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import ROOT

SOURCE = ROOT / "src" / "handrail"

LEVELS = (
    # Level 0 is four lines: there the order itself is the rule.
    ("errors", "lazy", "suggest"),
    ("model",),
    ("jsonrpc",),
    ("revisions",),
    ("protocol", "schema", "stores"),
    ("text",),
    ("guards", "audit", "oauth"),
    ("approvals",),
    ("engine",),
    ("observe",),
    ("transports",),
    ("client",),
    ("gateway",),
    ("server",),
    ("config",),
    ("console", "testing"),
    ("cli",),
    ("__main__",),
)
LEVEL = {box: number for number, line in enumerate(LEVELS) for box in line}

SURFACE = frozenset({"handrail", "handrail.auth", "handrail.guards"})
"""The public names are imported lazily, from every layer."""

DOORS = ("handrail.revisions", "handrail.revisions.base")
"""The table of revisions, and their type. No other file of `revisions/` is imported from outside."""

PURE = frozenset({"errors", "suggest", "model", "jsonrpc", "revisions", "protocol", "schema"})
"""No async, no clock, no socket, no file: time, randomness and bytes come in as arguments."""
IMPURE_MODULES = frozenset({"asyncio", "time", "socket", "os", "threading"})
ASYNC = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)


def problems(module: str, source: str) -> list[str]:
    """What `module` (`handrail.engine.call`, `handrail.revisions` for its `__init__`) does against the rules."""
    box = _box(module)
    if box not in LEVEL:
        return [f"{module}: {box} is on no level; add it to LEVELS and to docs/architecture.md"]
    found: list[str] = []
    for line, imported in _imports(ast.parse(source), module):
        where = f"{module}:{line}: imports {imported}"
        if imported.split(".")[0] != "handrail":
            if box in PURE and imported.split(".")[0] in IMPURE_MODULES:
                found.append(f"{where}, which {box} must not")
            continue
        other = _box(imported)
        if other == box or imported == "handrail.__version__":
            continue
        if other not in LEVEL:
            found.append(f"{where}, not a layer: name the module, not the package")
        elif LEVEL[other] > LEVEL[box]:
            found.append(f"{where}, which is above {box}")
        elif LEVEL[other] == LEVEL[box]:
            found.append(f"{where}, which is beside {box}")
        elif other == "revisions" and imported not in DOORS:
            found.append(f"{where}: revisions are reached through {' and '.join(DOORS)} only")
    if box in PURE:
        found += [
            f"{module}:{node.lineno}: async code, which {box} must not have"
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ASYNC)
        ]
    return found


def _box(module: str) -> str:
    """The part of the package a module is in: `engine` for `handrail.engine.call`."""
    return [*module.split("."), ""][1]


def _imports(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Every imported module, also inside functions and under TYPE_CHECKING: types bind layers as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, f"handrail.<relative import in {module}>"
            elif node.module == "handrail" or _is_package(node.module or ""):
                # `from handrail import engine` and `from handrail.revisions import r2025_06_18` import a module each.
                for name in node.names:
                    yield node.lineno, _submodule(node.module or "", name.name)
            else:
                yield node.lineno, node.module or ""


def _is_package(module: str) -> bool:
    return module.startswith("handrail.") and SOURCE.joinpath(*module.split(".")[1:]).is_dir()


def _submodule(package: str, name: str) -> str:
    folder = SOURCE.joinpath(*package.split(".")[1:])
    is_module = (folder / name).is_dir() or (folder / f"{name}.py").exists()
    return f"{package}.{name}" if is_module or package == "handrail" else package


def _modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in SURFACE:
            found.append((name, path))
    return found


@pytest.mark.parametrize(("module", "path"), _modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_go_down(module: str, path: Path) -> None:
    assert problems(module, path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("handrail.engine.call", "from handrail.transports.stdio import x", "above engine"),
        ("handrail.engine.call", "from handrail import server", "above engine"),
        ("handrail.engine.call", "import handrail.server", "above engine"),
        ("handrail.engine.call", "def f():\n    from handrail.server import Server", "above engine"),
        ("handrail.engine.call", "from typing import *\nif TYPE_CHECKING:\n    import handrail.server", "above engine"),
        ("handrail.errors", "from handrail.model import Tool", "above errors"),
        ("handrail.model", "import handrail.jsonrpc", "above model"),
        ("handrail.jsonrpc", "from handrail.revisions import Revision", "above jsonrpc"),
        ("handrail.testing", "from handrail.console import Console", "beside testing"),
        ("handrail.schema.derive", "from handrail.protocol.seal import seal", "beside schema"),
        ("handrail.audit.format", "from handrail.oauth.resource_server import x", "beside audit"),
        ("handrail.testing", "from handrail.cli import main", "above testing"),
        (
            "handrail.engine.dispatcher",
            "from handrail.revisions.r2025_06_18 import REVISION",
            "revisions are reached through",
        ),
        ("handrail.engine.dispatcher", "import handrail.revisions.pocket", "revisions are reached through"),
        ("handrail.engine.dispatcher", "from handrail.revisions import downlevel", "revisions are reached through"),
        ("handrail.engine.call", "from .call import Call", "not a layer"),
        ("handrail.engine.call", "from handrail import Server", "not a layer"),
        ("handrail.helpers", "", "on no level"),
        ("handrail.protocol.connection", "async def f(): ...", "async code"),
        ("handrail.protocol.connection", "import asyncio", "must not"),
        ("handrail.protocol.seal", "from time import time", "must not"),
        ("handrail.schema.derive", "import os.path", "must not"),
        ("handrail.revisions.base", "import threading", "must not"),
        ("handrail.jsonrpc", "from socket import socket", "must not"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, complaint: str) -> None:
    assert [problem for problem in problems(module, source) if complaint in problem]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("handrail.engine.call", "import asyncio\nfrom handrail.engine.catalog import Catalog\nasync def f(): ..."),
        (
            "handrail.engine.call",
            "from handrail.revisions import Revision\nfrom handrail.revisions.base import ErrorMapping",
        ),
        ("handrail.revisions.r2025_06_18", "from handrail.revisions import r2025_03_26"),
        ("handrail.revisions.pocket", "from handrail.revisions.r2025_06_18 import REVISION"),
        ("handrail.stores.memory", "import asyncio, time\nasync def f(): ..."),
        ("handrail.testing", "from handrail.server import Server\nfrom handrail.client import Client"),
        ("handrail.__main__", "from handrail.server import Server"),
        ("handrail.errors", "from msgspec import Struct\nimport datetime"),
    ],
)
def test_what_is_allowed_is_not_complained_about(module: str, source: str) -> None:
    assert problems(module, source) == []


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other in a circle, whatever the way."""
    reached = {module: _reachable(module, imports) for module in imports}
    circles = {module: frozenset(other for other in reached[module] if module in reached[other]) for module in imports}
    return sorted(sorted(circle) for circle in set(circles.values()) if len(circle) > 1)


def _reachable(module: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        for other in imports.get(waiting.pop(), ()):
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    return reached


def _imports_in_folder(modules: list[tuple[str, str]]) -> dict[str, set[str]]:
    """What each module imports of its own folder, in functions and under TYPE_CHECKING too."""
    names = {module for module, _ in modules}
    return {
        module: {
            imported
            for _, imported in _imports(ast.parse(source), module)
            if imported in names and imported != module and imported.rpartition(".")[0] == module.rpartition(".")[0]
        }
        for module, source in modules
    }


def test_no_more_than_two_modules_of_a_folder_import_each_other_in_a_circle() -> None:
    imports = _imports_in_folder([(module, path.read_text("utf-8")) for module, path in _modules()])
    assert [circle for circle in cycles(imports) if len(circle) > 2] == []


@pytest.mark.parametrize(
    "last",
    [
        "from handrail.a.one import x",
        "def f():\n    from handrail.a.one import x",
        "if TYPE_CHECKING:\n    import handrail.a.one",
    ],
    ids=["plain", "deferred", "for types"],
)
def test_a_planted_circle_of_three_is_found(last: str) -> None:
    modules = [
        ("handrail.a.one", "from handrail.a.two import x"),
        ("handrail.a.two", "from handrail.a.three import x\nfrom handrail.b.four import y"),
        ("handrail.a.three", last),
        ("handrail.b.four", "from handrail.a.one import x"),
    ]
    assert cycles(_imports_in_folder(modules)) == [["handrail.a.one", "handrail.a.three", "handrail.a.two"]]


UNIMPORTED = {"uvloop"}
"""A loop that an application may choose to run on; we run on any."""


def test_every_extra_installs_only_what_is_imported() -> None:
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
    imported = {name.split(".")[0] for path in SOURCE.rglob("*.py") for name in _imported(path)}
    imported |= {"pydantic"}  # which is used where a tool has imported it
    for extra, packages in project["optional-dependencies"].items():
        for package in packages:
            name = re.split(r"[\[<>=;~ ]", package)[0].removesuffix("-api").replace("-", "_")
            assert name in {"handrail", *imported, *UNIMPORTED}, f"{extra}: nothing imports {name}"


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
