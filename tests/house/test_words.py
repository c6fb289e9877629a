"""Names are nouns of the domain: a participle or a pronoun says nothing of a value."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from paths import SRC

BANNED = frozenset("found said made known seen given told kept shown taken wanted heard it how ident".split())
STORED = frozenset({"made", "kept"})
"""`Grant.made` is a member of stored grants, `audit.kept` a key of `handrail.toml`."""


def banned_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, parameter, attribute, function and class with a banned name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case _:
                continue
        if name in BANNED:
            yield node.lineno, name


def test_no_name_in_the_package_is_a_participle_or_a_pronoun() -> None:
    modules = [(path.relative_to(SRC), path.read_text("utf-8")) for path in sorted(SRC.rglob("*.py"))]
    names = [f"{path}:{line}: {name}" for path, source in modules for line, name in banned_names(source)]
    assert [each for each in names if each.rpartition(" ")[2] not in STORED] == []


@pytest.mark.parametrize(
    "source",
    ["found = 1", "def f(wanted): ...", "self.seen = 2", "def told(): ...", "class known: ...", "[it for it in x]"],
)
def test_a_planted_name_is_found(source: str) -> None:
    assert [*banned_names(source)]
