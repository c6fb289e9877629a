"""The options of `Server` and `Client`: one list in the signature, in `help()`, in the reference, and in the checks."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Callable
from typing import Any

import pytest

from handrail import (
    Client,
    EndpointOptions,
    HttpOptions,
    PromptOptions,
    ResourceOptions,
    Server,
    ServerOptions,
    ToolOptions,
)
from handrail.guards import GuardOptions
from paths import ROOT

CLASSES: list[tuple[Any, Any]] = [
    (ServerOptions, GuardOptions),
    (GuardOptions, None),
    (ToolOptions, None),
    (ResourceOptions, PromptOptions),
    (PromptOptions, None),
    (HttpOptions, EndpointOptions),
    (EndpointOptions, None),
]
"""Each class of options, and the class it inherits from."""
SERVER: dict[str, tuple[Callable[..., Any], Any, set[str]]] = {
    "Server": (Server, ServerOptions, {"name", "lifespan"}),
    "Server.guard": (Server.guard, GuardOptions, {"self"}),
    "Server.tool": (Server.tool, ToolOptions, {"self", "function"}),
    "Server.add": (Server.add, ToolOptions, {"self", "function"}),
    "Server.resource": (Server.resource, ResourceOptions, {"self", "uri"}),
    "Server.prompt": (Server.prompt, PromptOptions, {"self", "function"}),
    "Server.asgi": (Server.asgi, EndpointOptions, {"self", "store"}),
    "Server.run": (Server.run, HttpOptions, {"self", "http"}),
}
LINE = re.compile(r"^    (\w+): \S", re.MULTILINE)


def table(page: str, heading: str) -> list[str]:
    """The names in the first column of the first table with defaults below a heading."""
    text = (ROOT / "docs" / "reference" / page).read_text("utf-8")
    section = re.split(r"^## ", text.split(f"## {heading}", 1)[1], flags=re.MULTILINE)[0]
    rows = section.split("| option |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]


@pytest.mark.parametrize(("options", "base"), CLASSES)
def test_a_class_of_options_documents_each_of_them(options: Any, base: Any) -> None:
    own = [name for name in options.__annotations__ if base is None or name not in base.__annotations__]
    assert LINE.findall(options.__doc__) == own


@pytest.mark.parametrize("name", SERVER)
def test_a_signature_has_every_option(name: str) -> None:
    function, options, others = SERVER[name]
    parameters = inspect.signature(function).parameters
    assert parameters.keys() == options.__annotations__.keys() | others
    for option in options.__annotations__:
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[option].annotation == options.__annotations__[option].__forward_arg__


@pytest.mark.parametrize("name", SERVER)
def test_help_explains_every_option(name: str) -> None:
    function, options, others = SERVER[name]
    text = pydoc.plain(pydoc.render_doc(function))
    for option in [*options.__annotations__, *others - {"self", "function", "uri"}]:
        assert re.search(rf"^[ |]*{option}: \S", text, re.MULTILINE), option


def test_help_explains_every_option_of_a_client() -> None:
    text = pydoc.plain(pydoc.render_doc(Client))
    for option in inspect.signature(Client).parameters.keys() - {"target"}:
        assert re.search(rf"^[ |]*{option}: \S", text, re.MULTILINE), option


REFERENCE: dict[str, tuple[str, str, set[str]]] = {
    "a server": (
        "server.md",
        "`Server(name, *, …)`",
        {"lifespan", *ServerOptions.__annotations__} - {*GuardOptions.__annotations__},
    ),
    "its guards": ("server.md", "Guards", {*GuardOptions.__annotations__}),
    "a tool": ("server.md", "`@server.tool`", {*ToolOptions.__annotations__}),
    "a resource": ("server.md", "`@server.resource`", {*ResourceOptions.__annotations__}),
    "a prompt": ("server.md", "`@server.prompt`", {*PromptOptions.__annotations__}),
    "a listener": ("server.md", "Running", {*HttpOptions.__annotations__}),
    "a client": ("client.md", "`Client(target, *, …)`", {*inspect.signature(Client).parameters} - {"target"}),
}


@pytest.mark.parametrize("thing", REFERENCE)
def test_the_reference_has_every_option_of(thing: str) -> None:
    page, heading, options = REFERENCE[thing]
    documented = table(page, heading)
    assert sorted(documented) == sorted(options)
