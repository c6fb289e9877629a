"""Mistakes in Python: each is refused when it is made, and told with what was wrong, where, and what would be right."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import socket
import subprocess
import sys
import typing
from collections import abc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypedDict, Unpack, get_args, get_origin, get_type_hints

import pytest
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

import handrail
from handrail import Call, Client, Clocks, Form, Gateway, Limits, Principal, SchemaError, Server, ToolError
from handrail.auth import ApiKeys, Introspection, JwtVerifier, OAuth
from handrail.errors import CallFailed, InvalidResult, LocalProtocolError
from handrail.guards import Approvals, Policy, Predicate, Rates, Rule, Sanitize, ToolRate, UpstreamRate
from handrail.testing import Peer
from requirements import requirement

Object = dict[str, Any]


def refund(order: str) -> str:
    """Pay an order back."""
    return f"paid back {order}"


def annotations_of(**options: Any) -> Object:
    server = Server("shop")
    server.add(refund, **options)
    found = server.tools[0].annotations
    assert isinstance(found, dict)
    return found


# Hints of a tool


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"destructive": True}, {"destructiveHint": True}),
        ({"read_only": True}, {"readOnlyHint": True}),
        ({"idempotent": True, "open_world": False}, {"idempotentHint": True, "openWorldHint": False}),
        ({"destructive": True, "annotations": {"title": "Pay"}}, {"title": "Pay", "destructiveHint": True}),
        ({"destructive": True, "annotations": {"destructiveHint": True}}, {"destructiveHint": True}),
        ({"destructive": None}, None),
        ({"annotations": {"x-team": "billing", "example.org/cost": 3}}, {"x-team": "billing", "example.org/cost": 3}),
    ],
)
def test_options_of_a_tool_become_its_annotations(options: Object, expected: Object | None) -> None:
    server = Server("shop")
    server.tool(**options)(refund)
    found = server.tools[0].annotations
    assert found == expected if expected else not isinstance(found, dict)


@requirement("SRV-602", everywhere=True)
async def test_a_tool_that_says_destructive_is_not_run_unasked() -> None:
    server, ran = Server("shop"), list[str]()

    @server.tool(destructive=True)
    async def erase(path: str) -> str:
        """Erase."""
        ran.append(path)
        return "gone"

    async with Peer(server) as peer:
        answer = await peer.request("tools/call", {"name": "erase", "arguments": {"path": "/"}})
        assert ran == []
        assert "error" in answer or answer["result"]["isError"]


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        (
            {"destructive": True},
            "annotations.destructive: unknown; did you mean 'destructiveHint', or the option destr",
        ),
        ({"read_only": True}, "annotations.read_only: unknown; did you mean 'readOnlyHint', or the option read_only="),
        ({"readOnly": True}, "annotations.readOnly: unknown; did you mean 'readOnlyHint'"),
        ({"openworld": True}, "did you mean 'openWorldHint'"),
        ({"destructivehint": True}, "did you mean 'destructiveHint'"),
        ({"cost": 3}, "annotations.cost: unknown; known are title, readOnlyHint.*begins with 'x-'"),
        ({"x-": 3}, "annotations.x-: unknown"),
        ({"destructiveHint": "yes"}, "annotations.destructiveHint: 'yes' is not a boolean"),
        ({"destructiveHint": True, "readOnlyHint": True}, "cannot both be read-only and destroy"),
        (["destructiveHint"], "annotations: expected a dict, got list; or write destructive=True"),
        ("destructiveHint", "annotations: expected a dict, got 'destructiveHint'"),
    ],
)
def test_annotations_that_say_nothing_are_refused(annotations: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message) as refused:
        annotations_of(annotations=annotations)
    assert "tool 'refund'" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"destructive": True, "read_only": True}, "cannot both be read-only and destroy"),
        ({"read_only": True, "annotations": {"destructiveHint": True}}, "cannot both be read-only and destroy"),
        ({"destructive": False, "annotations": {"destructiveHint": True}}, "destructive=False contradicts annotations"),
        ({"destructive": "yes"}, "tool 'refund': destructive: expected True or False, got 'yes'"),
        ({"destructiv": True}, "unknown option 'destructiv'; did you mean 'destructive'"),
    ],
)
def test_hints_that_contradict_each_other_are_refused(options: Object, message: str) -> None:
    with pytest.raises((SchemaError, TypeError), match=message):
        annotations_of(**options)


class ToolAnnotations(BaseModel):
    """As `mcp.types` has it: snake case in Python, the specification's names as aliases, None for what is not said."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    title: str | None = None
    read_only_hint: bool | None = None
    destructive_hint: bool | None = None
    idempotent_hint: bool | None = None
    open_world_hint: bool | None = None


def test_annotations_of_the_official_package_are_taken() -> None:
    assert annotations_of(annotations=ToolAnnotations(title="Pay", destructive_hint=True)) == {
        "title": "Pay",
        "destructiveHint": True,
    }
    with pytest.raises(SchemaError, match="annotations: expected a dict, got ToolAnnotations itself"):
        annotations_of(annotations=ToolAnnotations)


@pytest.mark.parametrize("peer", ["mcp1", "mcp2"])
def test_annotations_of_the_installed_official_package_are_taken(
    peer: str, installed_peer: Callable[[str], Path]
) -> None:
    packages = next((installed_peer(peer) / "lib").glob("python*/site-packages"))
    code = (
        "import json, sys\nsys.path.append(sys.argv[1])\n"
        "from mcp.types import ToolAnnotations\nfrom handrail import Server\n"
        "server = Server('shop')\ndef refund(order: str) -> str: return order\n"
        "server.add(refund, annotations=ToolAnnotations(title='Pay', **{'destructiveHint': True}))\n"
        "print(json.dumps(server.tools[0].annotations))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, packages], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"title": "Pay", "destructiveHint": True}


# Functions that cannot be tools as they are


class Shop:
    def refund(self, order: str) -> str:
        """Pay back."""
        return f"{type(self).__name__} {order}"

    @classmethod
    def close(cls, day: str) -> str:
        """Close."""
        return f"{cls.__name__} {day}"


def untyped(order, note: str = "") -> str:  # type: ignore[no-untyped-def]  # the mistake
    """Pay back."""
    return f"{order} {note}"


async def test_a_parameter_without_a_hint_is_refused_with_what_to_write() -> None:
    server = Server("shop")
    with pytest.raises(
        SchemaError, match=r"untyped\(\): parameter 'order' has no type hint; write order: str, or order: Any"
    ):
        server.add(untyped)
    assert server.tools == []
    server.add(untyped, input_schema={"type": "object", "properties": {"order": {}}, "required": ["order"]})

    @server.tool
    def anything(order: Any) -> str:
        """Whatever it is."""
        return str(order)

    async with Peer(server) as peer:
        assert (await peer.call("anything", {"order": [1]})).text == "[1]"


async def test_a_method_without_its_object_is_refused_with_how_to_add_it() -> None:
    server = Server("shop")
    with pytest.raises(
        SchemaError,
        match=r"refund\(\): a method of a class, without its object: shop = Shop\(…\), then server.add\(shop.refund",
    ):

        class Shop:
            @server.tool
            def refund(self, order: str) -> str:
                """Pay back."""
                return order

    shop = globals()["Shop"]()
    for method in (shop.refund, shop.close):
        server.add(method)
    assert [sorted(tool.input_schema["properties"]) for tool in server.tools] == [["order"], ["day"]]
    async with Peer(server) as peer:
        assert (await peer.call("refund", {"order": "17"})).text == "Shop 17"


# What a docstring says of parameters

GOOGLE = """Pay an order back.

Takes a day or two.

Args:
    order (str): The number of the order,
        as it is on the bill: 17.
    amount: In cents.
    call: Not for clients.

Returns:
    What was paid.
"""
NUMPY = """Pay an order back.

Takes a day or two.

Parameters
----------
order : str
    The number of the order,
    as it is on the bill: 17.
amount : int, optional
    In cents.

Returns
-------
str
    What was paid.
"""
SPHINX = """Pay an order back.

Takes a day or two.

:param str order: The number of the order,
    as it is on the bill: 17.
:type order: str
:param amount: In cents.
:type amount: int
:returns: What was paid.
"""


@pytest.mark.parametrize(
    ("docstring", "rest"),
    [(GOOGLE, "Returns:\n    What"), (NUMPY, "Returns\n-------\nstr\n    What"), (SPHINX, ":returns: What")],
    ids=["google", "numpy", "sphinx"],
)
@pytest.mark.parametrize("indent", ["", "        "])
def test_what_a_docstring_says_of_parameters_describes_them(docstring: str, rest: str, indent: str) -> None:
    def pay(order: str, call: Call, amount: int = 0) -> str:
        return order

    pay.__doc__ = docstring.replace("\n", f"\n{indent}")
    server = Server("shop")
    tool = server.add(pay)
    properties = tool.input_schema["properties"]
    assert properties["order"]["description"] == "The number of the order, as it is on the bill: 17."
    assert properties["amount"] == {"type": "integer", "default": 0, "description": "In cents."}
    assert tool.description == f"Pay an order back.\n\nTakes a day or two.\n\n{rest} was paid."


@pytest.mark.parametrize("prose", ["Note: only on Mondays.", "Deprecated"])
def test_prose_after_the_parameters_of_a_docstring_is_kept(prose: str) -> None:
    def pay(order: str, amount: int = 0) -> str:
        return order

    pay.__doc__ = f"Pay.\n\nParameters\n----------\norder : str\n    The bill.\n\namount : int\n    Cents.\n\n{prose}\n"
    tool = Server("shop").add(pay)
    assert tool.description == f"Pay.\n\n{prose}"
    described = {name: each["description"] for name, each in tool.input_schema["properties"].items()}
    assert described == {"order": "The bill.", "amount": "Cents."}


def test_a_description_in_the_signature_wins_and_a_schema_of_ones_own_is_kept() -> None:
    def pay(order: Annotated[str, "Written here."], amount: Annotated[int, Field(ge=1)] = 1) -> str:
        """Pay.

        Args:
            order: Written there.
            amount: In cents.
        """
        return order

    server = Server("shop")
    properties = server.add(pay).input_schema["properties"]
    assert properties["order"]["description"] == "Written here."
    assert properties["amount"]["description"] == "In cents."
    own = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
    assert server.add(pay, name="own", input_schema=own).input_schema == own
    assert server.add(pay, name="said", description="Said.").description == "Said."


@pytest.mark.parametrize(
    "docstring",
    [
        "Count.\n\nArgs:\n    other: not a parameter of it",
        "Parameters are none.\n\nParameters\n----------",
        "Args: order is a number",
        "Use `:param order` with care.",
        "",
    ],
)
def test_a_docstring_without_parameters_stays_as_it_is(docstring: str) -> None:
    def count(order: str = "") -> str:
        return order

    count.__doc__ = docstring
    tool = Server("shop").add(count)
    assert (tool.description or "") == docstring
    assert "description" not in tool.input_schema["properties"]["order"]


# One text where several are meant


def use_tool(**options: Any) -> None:
    Server("shop").tool(**options)(refund)


def secret_of_size(size: int) -> str:
    return "".join(chr(97 + place % 26) for place in range(size))


CALLS: dict[str, tuple[Callable[..., Any], Object]] = {
    "handrail.Server": (Server, {"name": "shop"}),
    "handrail.Gateway": (lambda **options: Gateway(**options), {"name": "work"}),
    "handrail.Server.include": (lambda **options: Server("shop").include("a-server", **options), {}),
    "handrail.Server.tool": (use_tool, {}),
    "handrail.Server.add": (lambda **options: Server("shop").add(refund, **options), {}),
    "handrail.Server.resource": (lambda **options: Server("shop").resource("a:{order}", **options)(refund), {}),
    "handrail.Server.prompt": (lambda **options: Server("shop").prompt(**options)(refund), {}),
    "handrail.Server.guard": (lambda **options: Server("shop").guard(**options), {}),
    "handrail.Server.asgi": (lambda **options: Server("shop").asgi(**options), {}),
    "handrail.Server.run": (lambda **options: Server("shop").run(http="127.0.0.1:0", **options), {}),
    "handrail.Client": (Client, {"target": Server("shop")}),
    "handrail.Form": (Form, {"message": "How many?"}),
    "handrail.Principal": (Principal, {"id": "ada"}),
    "handrail.guards.Policy": (Policy, {}),
    "handrail.guards.Rule": (Rule, {"verdict": "deny"}),
    "handrail.guards.Rates": (Rates, {}),
    "handrail.guards.UpstreamRate": (UpstreamRate, {}),
    "handrail.guards.Sanitize": (Sanitize, {}),
    "handrail.auth.ApiKeys": (ApiKeys, {"keys": {}}),
    "handrail.auth.JwtVerifier": (
        JwtVerifier,
        {"issuer": "https://id.example", "audience": "a", "keys": {}},
    ),
    "handrail.auth.Introspection": (
        Introspection,
        {
            "url": "https://id.example/ask",
            "client_id": "a",
            "client_secret": secret_of_size(32),
            "audience": "https://api.example",
        },
    ),
    "handrail.auth.OAuth": (OAuth, {}),
    "handrail.testing.Peer": (Peer, {"target": Server("shop")}),
}
"""How each public callable is called; what it takes besides is found in its signature."""

ELSEWHERE = {
    # Values that come from others: a tool's answer, and what clients and callers read. What a tool gives is checked
    # when it has given it, see below.
    *"Text Image Audio ResourceLink EmbeddedResource ToolResult Tool ClientInfo Answer".split(),
    *"Resource ResourceTemplate Prompt PromptMessage ResourceNotFound".split(),
    *"Resources Templates Prompts ListedResource ListedTemplate ListedPrompt ReadResult Contents".split(),
    *"PromptMessages PromptResult Completion Subscription".split(),
    *"Elicitation Sampling Confirmation CallResult Finding Approval ApprovalRequest Subject Decision".split(),
    *"Tools ListedTool ServerEntry ApprovalQueue Sanitizer BlockingClient".split(),
    *"Call Console ToolError Refused RemoteProtocolError TrailError open_trail".split(),
    *"Trail Verifier Store MemoryStore SqliteStore PeerChannel ApprovalGrant".split(),
    *"EndpointOptions HttpOptions ServerOptions GuardOptions".split(),  # checked where they are given
    *"ToolOptions ResourceOptions PromptOptions".split(),
    "Predicate",  # which the policy checks, see below
}
MODULES = ("handrail", "handrail.guards", "handrail.auth", "handrail.testing")
COLLECTIONS = (list, set, frozenset, tuple, dict, abc.Iterable, abc.Collection, abc.Sequence, abc.Set, abc.Mapping)


def options_of(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return options_of(get_args(hint)[0])
    if get_origin(hint) in (typing.Union, UnionType):
        return [each for option in get_args(hint) for each in options_of(option)]
    return [hint]


def is_collection(hint: Any) -> bool:
    """Whether several things are meant, and a text is not one of the forms."""
    options = options_of(hint)
    return str not in options and any((get_origin(each) or each) in COLLECTIONS for each in options)


def public_callables() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for module in MODULES:
        home = importlib.import_module(module)
        for name in vars(home)["__all__"]:
            thing = getattr(home, name)
            if callable(thing) and name not in ELSEWHERE and not typing.get_origin(thing):
                found.setdefault(f"{module}.{name}", thing)
    for name in ("tool", "add", "resource", "prompt", "guard", "asgi", "run"):
        found[f"handrail.Server.{name}"] = getattr(Server, name)
    return {name: thing for name, thing in found.items() if not name.startswith("handrail.client.Client")}


def collections_in(thing: Callable[..., Any]) -> list[str]:
    """The parameters that take several things, also those of `**options`."""
    function = getattr(thing, "__init__") if inspect.isclass(thing) else thing  # noqa: B009  # which types do not allow
    struct = inspect.isclass(thing) and hasattr(thing, "__struct_fields__")
    spaces = {**vars(typing), **vars(abc), "Path": Path}
    for module in ("handrail.transports.http.endpoint", "handrail.client.client", *MODULES):
        home = importlib.import_module(module)
        spaces |= vars(home) | {name: getattr(home, name) for name in vars(home).get("__all__", ())}
    hints = get_type_hints(thing if struct else function, localns=spaces, include_extras=True)
    found: list[str] = []
    for name, hint in hints.items():
        if name == "return":
            continue
        if get_origin(hint) is Unpack:
            inner = get_type_hints(get_args(hint)[0], localns=spaces, include_extras=True)
            found += [option for option, kind in inner.items() if is_collection(kind)]
        elif is_collection(hint):
            found.append(name)
    return found


WALKED = [(name, option) for name, thing in public_callables().items() for option in collections_in(thing)]


def test_the_walk_meets_what_it_is_for() -> None:
    assert {
        ("handrail.Server.tool", "tags"),
        ("handrail.Server.tool", "scopes"),
        ("handrail.Server", "secrets"),
        ("handrail.Server.guard", "secrets"),
        ("handrail.Server.asgi", "hosts"),
        ("handrail.Server.run", "origins"),
        ("handrail.Client", "roots"),
        ("handrail.guards.Rule", "tags"),
        ("handrail.auth.OAuth", "scopes"),
        ("handrail.Principal", "scopes"),
    } <= set(WALKED)
    assert len(WALKED) > 40


@pytest.mark.parametrize(("name", "option"), WALKED)
@pytest.mark.parametrize("given", ["money", b"money-money-money-money"], ids=["text", "bytes"])
def test_one_text_is_not_taken_for_a_collection(name: str, option: str, given: str | bytes) -> None:
    call, others = CALLS[name]
    with pytest.raises((TypeError, ValueError, LocalProtocolError), match=rf"\b{option}\b.*expected.*, got") as refused:
        call(**{**others, option: given})
    if option in ("secrets", "keys"):
        assert "money" not in str(refused.value), "what may be a secret is not repeated"


def test_one_text_for_the_values_of_an_argument_is_refused_by_the_policy() -> None:
    with pytest.raises(ValueError, match=r"rule 1: arguments\.a\.in: Expected `array`, got `str`"):
        Policy([Rule(verdict="deny", arguments={"a": wrong(Predicate, in_="money")})])


@pytest.mark.parametrize("scopes", [["a", "b"], {"a", "b"}, ("a", "b")])
def test_any_collection_of_scopes_is_taken(scopes: Any) -> None:
    assert Principal("ada", scopes) == Principal("ada", frozenset({"a", "b"}))
    ApiKeys({"ada": ApiKeys.new()[1]}, scopes={"ada": scopes})
    server = Server("shop", policy=[Rule(verdict="deny", scopes=scopes)], secrets=scopes)
    server.add(refund, scopes=scopes, tags=scopes)


async def test_a_text_in_place_of_blocks_is_told() -> None:
    server = Server("shop", sanitize=None)  # the engine says it, not the sanitizer

    @server.tool
    def say() -> handrail.ToolResult:
        """Say."""
        return wrong(handrail.ToolResult, "hello")  # type: ignore[no-any-return]  # the mistake

    async with Peer(server) as peer:
        result = await peer.call("say")
        assert result.is_error
        assert "ToolResult.content: expected a list or set of blocks" in result.text


async def test_a_rule_on_a_tag_holds_for_a_tag_in_a_list() -> None:
    server = Server("shop", policy=[Rule(verdict="deny", tags=["money"])])
    server.add(refund, tags=["money"])
    async with Peer(server) as peer:
        answer = await peer.request("tools/call", {"name": "refund", "arguments": {"order": "17"}})
        assert "error" in answer or answer["result"]["isError"]


# Objects that are not what is meant


async def unfinished(server: Server) -> AsyncIterator[str]:
    yield "open"


async def without_yield(server: Server) -> str:
    return "open"


@asynccontextmanager
async def right(server: Server) -> AsyncIterator[str]:
    yield "open"


@asynccontextmanager
async def takes_nothing() -> AsyncIterator[str]:
    yield "open"


def wrong(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call something as its type does not allow."""
    return make(*args, **options)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "rates as a text": (
        lambda: wrong(Server, "shop", rates="10/s"),
        r"server 'shop': rates: expected Rates\(principal=\"10/second\"\).*, got '10/s'",
    ),
    "rates as a number": (lambda: wrong(Rates, principal=10), "principal: expected a text such as '60/minute', got 10"),
    "rate of a tool as a text": (
        lambda: wrong(Rates, tools={"pay": "10/minute"}),
        r"Rates: tools.pay: expected ToolRate\(rate=\"10/minute\"\), got '10/minute'",
    ),
    "slots as a text": (lambda: wrong(ToolRate, concurrent="5"), "concurrent: expected a number of calls"),
    "approvals as a text": (
        lambda: wrong(Server, "shop", approvals="operator"),
        r"approvals: expected Approvals\(by=\"operator\"\).*, got 'operator'",
    ),
    "approvals as a class": (
        lambda: wrong(Server, "shop", approvals=Approvals),
        "approvals: expected Approvals.*, got Approvals itself",
    ),
    "a wait as a text": (
        lambda: wrong(Approvals, wait="1m"),
        "approvals.wait: expected a number of seconds, got '1m'; write wait=60",
    ),
    "sanitize switched off with False": (
        lambda: wrong(Server, "shop", sanitize=False),
        "sanitize: expected Sanitize.*or None for none, got False",
    ),
    "policy as a text": (
        lambda: wrong(Server, "shop", policy="deny"),
        r"policy: expected Policy\(\[Rule\(…\)\]\) or a list of rules, got 'deny'",
    ),
    "policy as one rule": (
        lambda: wrong(Server, "shop", policy=Rule(verdict="deny")),
        r"got one rule; write policy=\[Rule\(…\)\]",
    ),
    "a rule as a dict": (
        lambda: wrong(Server, "shop", policy=[{"verdict": "deny"}]),
        r"rule 1: expected Rule\(…\), got dict",
    ),
    "policy of a client": (
        lambda: wrong(Client, Server("shop"), policy="deny"),
        r"Client: policy: expected Policy\(\[Rule",
    ),
    "trail as a dict": (lambda: wrong(Server, "shop", trail={}), "trail: expected TrailSettings"),
    "audit as a switch": (
        lambda: wrong(Server, "shop", audit=True),
        'audit: expected a file such as "calls.db"',
    ),
    "store as a number": (lambda: wrong(Server, "shop", store=1), 'store: expected a file such as "state.db"'),
    "repair as a text": (lambda: wrong(Server, "shop", repair="yes"), "repair: expected True or False, got 'yes'"),
    "inspectors that are none": (
        lambda: wrong(Server, "shop", inspectors=["x"]),
        r"inspectors: expected functions \(tool, result\), got 'x' among them",
    ),
    "tools as a list": (
        lambda: wrong(Server, "shop", tools=[refund]),
        "tools: expected True or False .*added with @server.tool",
    ),
    "workers as a text": (lambda: wrong(Server, "shop", workers="4"), "workers: expected a number of threads, got '4'"),
    "limits as a dict": (lambda: wrong(Server, "shop", limits={}), r"limits: expected Limits\(…\), got dict"),
    "a limit as a text": (lambda: wrong(Limits, max_calls="9"), "Limits: max_calls: expected a number, got '9'"),
    "a key as a text": (
        lambda: wrong(Server, "shop", keys=["x" * 32]),
        "keys: expected bytes, got str; `handrail keys seal`",
    ),
    "no name": (lambda: wrong(Server, None), "Server: name: expected a text, got None"),
    "lifespan without a decorator": (
        lambda: wrong(Server, "shop", lifespan=unfinished),
        "server 'shop': lifespan: decorate unfinished with @asynccontextmanager",
    ),
    "lifespan without yield": (
        lambda: wrong(Server, "shop", lifespan=without_yield),
        "without_yield has no `yield`; yield the state, and decorate without_yield with @asynccontextmanager",
    ),
    "lifespan that was called": (
        lambda: wrong(Server, "shop", lifespan=right(Server("x"))),
        "lifespan: expected a function decorated with @asynccontextmanager.*without calling it",
    ),
    "lifespan that takes nothing": (
        lambda: wrong(Server, "shop", lifespan=takes_nothing),
        r"takes_nothing must take the server: `async def takes_nothing\(server\)",
    ),
    "timeout as a text": (
        lambda: wrong(Server("shop").add, refund, timeout="1m"),
        "tool 'refund': timeout: expected a number of seconds, got '1m'; write timeout=60",
    ),
    "timeout in hours": (
        lambda: wrong(Server("shop").add, refund, timeout="1.5 hours"),
        "write timeout=5400",
    ),
    "timeouts as texts": (
        lambda: wrong(Server("shop").add, refund, timeout=("10s", "1m")),
        "got '10s'; write timeout=10",
    ),
    "timeout below 0": (lambda: wrong(Server("shop").add, refund, timeout=-1), "-1 is not a number of seconds above 0"),
    "three timeouts": (
        lambda: wrong(Server("shop").add, refund, timeout=(1, 2, 3)),
        r"timeout: expected seconds, or \(idle, total\), got \(1, 2, 3\)",
    ),
    "timeout of a client": (
        lambda: wrong(Client, Server("shop"), timeout="1m"),
        "timeout: expected a number of seconds, got '1m'; write timeout=60",
    ),
    "a clock": (lambda: wrong(Clocks, connect="5 s"), "Clocks: connect: expected a number of seconds.*write connect=5"),
    "timeout of a peer": (
        lambda: wrong(Peer, Server("shop"), timeout="9s"),
        "Peer: timeout: .*write timeout=9",
    ),
    "dangerous as a switch": (
        lambda: wrong(Server("shop").add, refund, dangerous=True),
        "tool 'refund': dangerous: expected the reason as a text, got True",
    ),
    "extra as pydantic has it": (
        lambda: wrong(Server("shop").add, refund, extra="ignore"),
        "tool 'refund': extra: expected 'forbid' or 'allow', got 'ignore'",
    ),
    "hide as a text": (lambda: wrong(Server("shop").add, refund, hide="no"), "hide: expected True or False, got 'no'"),
    "auth as a key": (
        lambda: wrong(Server("shop").asgi, auth="hk_123"),
        r"http: auth: expected a verifier such as ApiKeys\(\{…\}\), got",
    ),
    "confirm as a switch": (
        lambda: wrong(Client, Server("shop"), confirm=True),
        "Client: confirm: expected a function, got True; confirm=handrail.allow agrees to everything",
    ),
    "strict as a text": (
        lambda: wrong(Client, Server("shop"), strict="no"),
        "Client: strict: expected True or False, got 'no'",
    ),
    "trusted as a text": (
        lambda: wrong(Client, Server("shop"), trusted="no"),
        "Client: trusted: expected True or False, got 'no'",
    ),
    "auth of a client as a token": (
        lambda: wrong(Client, "https://api.example/mcp", auth="hk_123"),
        "Client: auth: expected OAuth.*headers=",
    ),
    "a peer of a file": (
        lambda: wrong(Peer, "server.py"),
        "Peer: expected a Server, or a channel of your own, got 'server.py'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_object_that_is_not_meant_is_refused_when_it_is_given(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_guard_set_later_is_checked_as_well() -> None:
    server = Server("shop")
    with pytest.raises(TypeError, match="server 'shop': rates: expected Rates"):
        wrong(server.guard, rates="10/s")
    with pytest.raises(TypeError, match="server 'shop': secrets: expected a list or set of texts, got one text"):
        server.guard(secrets="hunter2-hunter2")


async def test_a_list_of_rules_is_a_policy() -> None:
    server = Server("shop")
    server.add(refund)
    server.guard(policy=[Rule(verdict="hide", tools=["refund"])])
    async with Peer(server) as peer:
        assert await peer.tools() == []
    async with Client(Server("empty"), policy=[Rule(verdict="hide", tools=["x"])]) as client:
        assert list(await client.tools()) == []


async def test_a_lifespan_that_is_not_asynchronous_is_told_when_the_server_begins() -> None:
    @contextmanager
    def opened(server: Server) -> Any:
        yield "open"

    with pytest.raises(TypeError, match=r"server 'shop': lifespan: .* is no asynchronous context manager"):
        async with Peer(wrong(Server, "shop", lifespan=opened)):
            pass


async def test_a_peer_outside_of_async_with_says_so() -> None:
    server = Server("shop")
    server.add(refund)
    peer = Peer(server)
    for use in (peer.tools, lambda: peer.call("refund"), lambda: peer.notify("x")):
        with pytest.raises(LocalProtocolError, match="not connected; use it inside `async with Peer"):
            await use()
    async with peer:
        assert len(await peer.tools()) == 1
    with pytest.raises(LocalProtocolError, match="not connected"):
        await peer.tools()


# Notifications that are not awaited


LONG = "far enough. " * 20_000


@pytest.mark.parametrize("mode", ["async", "def", "inline"])
@pytest.mark.parametrize("revision", ["2024-11-05", "2025-11-25", "2026-07-28"])
@pytest.mark.parametrize("text", ["far enough", LONG], ids=["short", "long"])
@requirement("SRV-515")
async def test_progress_and_logs_leave_before_the_answer_without_await(
    mode: str, revision: str, text: str, ran: Callable[[str, str], None]
) -> None:
    server = Server("shop")

    async def works(call: Call) -> str:
        """Work."""
        for step in (1, 2, 3):
            call.progress(step, 3, text)
            call.log("error", {"step": step})
        return "done"

    def works_too(call: Call) -> str:
        """Work."""
        for step in (1, 2, 3):
            call.progress(step, 3, text)
            call.log("error", {"step": step})
        return "done"

    server.add(works if mode == "async" else works_too, name="works", inline=mode == "inline")
    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")
        level: Object = {"io.modelcontextprotocol/logLevel": "debug"} if revision == "2026-07-28" else {}
        result = await peer.call("works", progressToken="t", **level)
        assert result.text == "done"
        steps = [each["params"].get("progress", each["params"].get("data")) for each in peer.notices]
        logged = [each for each in steps if isinstance(each, dict)]
        assert [each for each in steps if not isinstance(each, dict)] == [1, 2, 3]
        assert logged == [{"step": 1}, {"step": 2}, {"step": 3}]
        assert b'"result"' in peer.wire[-1], "the answer is the last of them"


async def test_a_def_tool_asks_without_blocking_or_await() -> None:
    server = Server("shop")

    @server.tool
    def asks(call: Call) -> str:
        """Ask."""
        answer: Any = call.ask("How many?", {"type": "object", "properties": {"count": {"type": "integer"}}})
        return f"{answer.action} {answer.content}"

    peer = Peer(
        server,
        capabilities={"elicitation": {}},
        answers=lambda method, params: {"action": "accept", "content": {"count": 3}},
    )
    async with peer:
        assert (await peer.call("asks")).text == "accept {'count': 3}"


async def test_progress_works_as_a_task_and_in_a_loop_of_the_tools_own() -> None:
    server = Server("shop")

    @server.tool
    async def spawns(call: Call) -> str:
        """Work."""
        progress: Any = call.progress(1)
        await asyncio.create_task(progress)
        await asyncio.gather(call.progress(2), call.progress(3))
        return "done"

    @server.tool
    def loops(call: Call) -> str:
        """Work."""

        async def inside() -> None:
            await call.progress(4)

        asyncio.run(inside())
        nothing: Any = call.progress(5)
        asyncio.run(nothing)
        return "done"

    async with Peer(server) as peer:
        for name in ("spawns", "loops"):
            assert (await peer.call(name, progressToken="t")).text == "done"
        assert [each["params"]["progress"] for each in peer.notices] == [1, 2, 3, 4, 5]


async def test_what_is_wrong_with_a_notification_that_is_not_awaited_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server("shop")

    @server.tool
    async def works(call: Call) -> str:
        """Work."""
        call.log("loud", "x")
        return "done"

    @server.tool
    def works_too(call: Call) -> str:
        """Work."""
        try:
            call.log("loud", "x")
        except ValueError as problem:
            return str(problem)
        return "done"

    async with Peer(server) as peer:
        assert (await peer.call("works")).text == "done"
        assert (
            "tool 'works': a notification that was not awaited was not sent: log: 'loud' is not one of" in caplog.text
        )
        assert "log: 'loud' is not one of" in (await peer.call("works_too")).text


async def test_progress_that_begins_with_a_text_is_told_the_order() -> None:
    server = Server("shop")

    @server.tool
    async def works(call: Call) -> str:
        """Work."""
        try:
            await wrong(call.progress, "half", 2)
        except TypeError as problem:
            return str(problem)
        return "done"

    async with Peer(server) as peer:
        told = "progress: expected numbers first, then a text: progress(1, 2, 'half'); got 'half', 2"
        assert (await peer.call("works")).text == told


async def test_a_coroutine_as_a_result_is_told_to_be_awaited() -> None:
    server = Server("shop")
    made: list[Coroutine[Any, Any, None]] = []

    @server.tool
    def works() -> Any:
        """Work."""
        made.append(asyncio.sleep(0))
        return made[-1]

    async with Peer(server) as peer:
        assert "coroutine has no JSON form; `await` it, in an `async def`" in (await peer.call("works")).text
    await made[0]


# What a server says when something is off


async def test_a_tool_that_blocks_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    server = Server("shop")
    now = asyncio.get_running_loop().time

    @server.tool
    async def blocks(seconds: float) -> str:
        """Hold the loop up."""
        ends = now() + seconds
        while now() < ends:
            pass
        return "done"

    async with Peer(server, timeout=60) as peer:
        for _ in range(2):
            assert (await peer.call("blocks", {"seconds": 0.6})).text == "done"
    told = [each.getMessage() for each in caplog.records if "held the event loop" in each.getMessage()]
    assert len(told) == 1, "once a minute"
    assert told[0].startswith("tool 'blocks' held the event loop for ")
    assert "asyncio.sleep in place of time.sleep" in told[0]


async def test_a_result_that_breaks_its_schema_says_which_member_does() -> None:
    server = Server("shop")

    @server.tool
    def totals() -> dict[str, int]:
        """Add up."""
        return wrong(dict, may="much")  # type: ignore[no-any-return]  # the mistake

    async with Peer(server) as peer:
        result = await peer.call("totals")
        assert result.is_error
        assert result.text.endswith("does not fit its own schema at /may (type).")
        assert "much" not in result.text, "the value belongs into the log"


async def test_a_result_that_is_too_large_says_what_to_do() -> None:
    server = Server("shop", limits=Limits(max_message_bytes=100_000))

    @server.tool
    def all_of_it() -> str:
        """Too much."""
        return "x" * 200_000

    async with Peer(server) as peer:
        text = (await peer.call("all_of_it")).text
        assert "at most 100,000 can be sent. Ask for less of it. (Its author can return pages, cut texts with" in text


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


SERVES = """
import os, signal, sys
from handrail import Server
server = Server("shop")
def ready(url):
    print(url, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
server.run(http=int(sys.argv[1]), ready=ready)
"""


def test_a_port_alone_is_an_address() -> None:
    done = run(SERVES, 0)
    assert done.stdout.startswith("http://127.0.0.1:"), done.stderr
    assert done.stdout.strip().endswith("/mcp")


def test_a_port_in_use_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(SERVES, taken.getsockname()[1])
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("server 'shop': cannot listen on 127.0.0.1:")
    assert line.endswith("; end what listens there, or choose another port")


# Names of other packages


NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "Server.add_tool": (lambda: Server("shop"), r"Server.add_tool: write server.add\(function\)"),
    "Server.list_tools": (lambda: Server("shop"), "Server.list_tools: write server.tools"),
    "Server.call_tool": (lambda: Server("shop"), "Server.call_tool: write `async with handrail.Client"),
    "Server.add_prompt": (lambda: Server("shop"), r"Server.add_prompt: write server.prompt\(name\)\(function\)"),
    "Client.call_tool": (lambda: Client(Server("shop")), r"Client.call_tool: write client.call\(name, {…}\)"),
    "Client.list_tools": (lambda: Client(Server("shop")), r"Client.list_tools: write client.tools\(\)"),
    "Client.list_resources": (lambda: Client(Server("shop")), r"Client.list_resources: write client.resources\(\)"),
    "Peer.call_tool": (lambda: Peer(Server("shop")), "Peer.call_tool: write peer.call"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_another_package_is_answered_with_ours(name: str) -> None:
    make, message = NAMES[name]
    thing, attribute = make(), name.partition(".")[2]
    with pytest.raises(AttributeError, match=message):
        getattr(thing, attribute)
    assert not hasattr(thing, attribute)


async def test_a_call_answers_to_names_of_other_packages() -> None:
    server, told = Server("shop"), list[str]()

    @server.tool
    async def looks(call: Call) -> str:
        """Look for names."""
        for name in ("report_progress", "elicit", "info", "request_id", "session"):
            try:
                getattr(call, name)
            except AttributeError as problem:
                told.append(str(problem))
        return "done"

    async with Peer(server) as peer:
        await peer.call("looks")
    assert told[:3] == [
        "Call.report_progress: write await call.progress(done, total, message)",
        "Call.elicit: write await call.ask(message, form)",
        'Call.info: write await call.log("info", data)',
    ]
    assert len(told) == 5


async def test_arguments_as_options_are_answered_with_where_they_go() -> None:
    server = Server("shop")
    server.add(refund)
    async with Client(server) as client:
        with pytest.raises(TypeError, match=r"'order'; arguments go into a dict: call\('refund', {'order': '17'}\)"):
            await wrong(client.call, "refund", order="17")
        with pytest.raises(TypeError, match="unknown option 'timout'; did you mean 'timeout'"):
            await wrong(client.call, "refund", {"order": "17"}, timout=1)


def test_a_client_with_a_misspelt_option_is_refused_with_the_closest_one() -> None:
    with pytest.raises(TypeError, match="Client: unknown option 'timout'; did you mean 'timeout'"):
        wrong(Client, Server("shop"), timout=1)


def test_a_blocking_client_answers_alike() -> None:
    server = Server("shop")
    server.add(refund)
    with Client(server) as client:
        with pytest.raises(AttributeError, match=r"BlockingClient.list_tools: write client.tools\(\)"):
            wrong(getattr, client, "list_tools")
        with pytest.raises(TypeError, match="arguments go into a dict"):
            wrong(client.call, "refund", order="17")


def test_a_tool_is_named_by_the_decorator() -> None:
    server = Server("shop")
    server.tool("pay_back")(refund)
    server.tool("other", title="Other")(refund)
    assert [tool.name for tool in server.tools] == ["pay_back", "other"]
    with pytest.raises(TypeError, match="tool 'a': name: given twice, also as 'b'"):
        wrong(server.tool, "a", name="b")


# Results as objects of a class


@dataclass
class Line:
    article: str
    count: int


@dataclass
class Bill:
    number: int
    lines: list[Line]


class BillStruct(Struct):
    number: int
    lines: list[Line]


class BillDict(TypedDict):
    number: int
    lines: list[dict[str, Any]]


class LineModel(BaseModel):
    article: str
    count: int


class BillModel(BaseModel):
    number: int
    lines: list[LineModel]


def bills() -> Server:
    server = Server("shop")

    @server.tool
    def bill(number: int) -> Bill:
        """A bill."""
        if number < 0:
            raise ToolError("There is no such bill")
        return Bill(number, [Line("tea", 2)])

    @server.tool
    def count() -> int:
        """How many there are."""
        return 3

    @server.tool
    def words() -> str:
        """No data."""
        return "many"

    return server


EXPECTED: dict[Any, Any] = {
    Bill: Bill(7, [Line("tea", 2)]),
    BillStruct: BillStruct(7, [Line("tea", 2)]),
    BillDict: {"number": 7, "lines": [{"article": "tea", "count": 2}]},
    BillModel: BillModel(number=7, lines=[LineModel(article="tea", count=2)]),
}


@pytest.mark.parametrize("revision", ["2024-10-07", "2024-11-05", "2025-06-18", "2025-11-25", "2026-07-28"])
@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
async def test_a_result_becomes_an_object_of_a_class(kind: Any, revision: str) -> None:
    async with Client(bills(), revision=revision) as client:
        assert await client.call("bill", {"number": 7}, into=kind) == EXPECTED[kind]
        assert (await client.call("bill", {"number": 7})).into(kind) == EXPECTED[kind]
        assert await client.call("count", into=int) == 3


def test_a_blocking_client_gives_objects_too() -> None:
    with Client(bills()) as client:
        found = client.call("bill", {"number": 7}, into=Bill)
        assert found.lines[0].article == "tea"
        assert client.call("bill", {"number": 7}).data["number"] == 7


class Other(BaseModel):
    number: str


@dataclass
class OtherLine:
    number: list[int]


@pytest.mark.parametrize("kind", [Other, OtherLine])
async def test_a_result_that_does_not_fit_a_class_is_told(kind: Any) -> None:
    async with Client(bills()) as client:
        with pytest.raises(InvalidResult, match=rf"tools/call bill: the result does not fit {kind.__name__}: numbe"):
            await client.call("bill", {"number": 7}, into=kind)
        with pytest.raises(InvalidResult, match="its text is not JSON: it cannot become Bill"):
            await client.call("words", into=Bill)
        with pytest.raises(CallFailed, match="There is no such bill"):
            await client.call("bill", {"number": -1}, into=kind)
