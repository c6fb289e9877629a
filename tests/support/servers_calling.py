"""Servers for the tests of calling, results, questions and notices; run by `subject.py servers_calling:name`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from handrail import (
    Audio,
    Call,
    EmbeddedResource,
    Form,
    Image,
    Limits,
    ResourceLink,
    Sample,
    SchemaError,
    Server,
    Text,
    ToolError,
    ToolResult,
    Url,
)
from patience import PATIENCE
from subject import PNG, WAV, Name, Sum, add_tools

if TYPE_CHECKING:
    from wires import Wire

Json = Any
Object = dict[str, Any]

DRAFT_07 = "http://json-schema.org/draft-07/schema#"
MODIFIED = "2025-05-03T14:30:00Z"


def _of(schema: Json) -> Object:
    """An input schema with one argument, `x`."""
    return {"type": "object", "properties": {"x": schema}}


TREE = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/node"}},
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["value"],
        }
    },
}

# Every keyword that can refuse a value: input schema, arguments that fit, arguments that do not.
KEYWORDS: dict[str, tuple[Object, Object, Object]] = {
    "type": (_of({"type": "integer"}), {"x": 1}, {"x": "1"}),
    "type_list": (_of({"type": ["string", "null"]}), {"x": None}, {"x": 1}),
    "enum": (_of({"enum": ["a", 1, None]}), {"x": 1}, {"x": "1"}),
    "const": (_of({"const": {"a": [1]}}), {"x": {"a": [1]}}, {"x": {"a": [1, 2]}}),
    "multipleOf": (_of({"multipleOf": 5}), {"x": 10}, {"x": 11}),
    "maximum": (_of({"maximum": 3}), {"x": 3}, {"x": 4}),
    "exclusiveMaximum": (_of({"exclusiveMaximum": 3}), {"x": 2}, {"x": 3}),
    "minimum": (_of({"minimum": 3}), {"x": 3}, {"x": 2}),
    "exclusiveMinimum": (_of({"exclusiveMinimum": 3}), {"x": 4}, {"x": 3}),
    "maxLength": (_of({"maxLength": 2}), {"x": "é€"}, {"x": "abc"}),
    "minLength": (_of({"minLength": 2}), {"x": "ab"}, {"x": "€"}),
    "pattern": (_of({"pattern": "^a+$"}), {"x": "aa"}, {"x": "ab"}),
    "items": (_of({"items": {"type": "integer"}}), {"x": [1, 2]}, {"x": [1, "2"]}),
    "prefixItems": (_of({"prefixItems": [{"type": "string"}]}), {"x": ["a", 1]}, {"x": [1]}),
    "items_after_prefix": (_of({"prefixItems": [True], "items": False}), {"x": [1]}, {"x": [1, 2]}),
    "maxItems": (_of({"maxItems": 1}), {"x": [1]}, {"x": [1, 2]}),
    "minItems": (_of({"minItems": 1}), {"x": [1]}, {"x": []}),
    "uniqueItems": (_of({"uniqueItems": True}), {"x": [1, "1", True]}, {"x": [{"a": 1}, {"a": 1.0}]}),
    "contains": (_of({"contains": {"const": 1}}), {"x": [2, 1]}, {"x": [2]}),
    "minContains": (_of({"contains": {"const": 1}, "minContains": 2}), {"x": [1, 1]}, {"x": [1, 2]}),
    "maxContains": (_of({"contains": {"const": 1}, "maxContains": 1}), {"x": [1, 2]}, {"x": [1, 1]}),
    "unevaluatedItems": (
        _of({"allOf": [{"prefixItems": [{"type": "integer"}]}], "unevaluatedItems": False}),
        {"x": [1]},
        {"x": [1, 2]},
    ),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    "minProperties": ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    "required": ({"type": "object", "required": ["a"]}, {"a": None}, {"b": 1}),
    "properties": ({"type": "object", "properties": {"a": {"type": "string"}}}, {"a": ""}, {"a": 1}),
    "properties_false": ({"type": "object", "properties": {"a": False}}, {"b": 1}, {"a": 1}),
    "patternProperties": ({"type": "object", "patternProperties": {"^n_": {"type": "null"}}}, {"n_": None}, {"n_a": 0}),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        {"a": 1},
        {"a": 1, "b": 1},
    ),
    "additionalProperties_schema": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"a": "", "b": 1},
        {"b": "1"},
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 2}}, {"ab": 1}, {"abc": 1}),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        {"b": 1},
        {"a": 1},
    ),
    "unevaluatedProperties": (
        {"type": "object", "allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"a": 1},
        {"a": 1, "b": 1},
    ),
    "allOf": (_of({"allOf": [{"minimum": 1}, {"maximum": 3}]}), {"x": 2}, {"x": 4}),
    "anyOf": (_of({"anyOf": [{"type": "null"}, {"minimum": 5}]}), {"x": 5}, {"x": 4}),
    "oneOf": (_of({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}), {"x": 9}, {"x": 6}),
    "not": (_of({"not": {"type": "string"}}), {"x": 1}, {"x": "1"}),
    "if_then": (_of({"if": {"type": "integer"}, "then": {"minimum": 0}}), {"x": 0}, {"x": -1}),
    "if_else": (_of({"if": {"type": "integer"}, "else": {"type": "null"}}), {"x": None}, {"x": "a"}),
    "ref": (TREE, {"x": {"value": 1, "next": {"value": 2}}}, {"x": {"value": 1, "next": {"value": "2"}}}),
    "anchor": (
        {"type": "object", "properties": {"x": {"$ref": "#small"}}, "$defs": {"s": {"$anchor": "small", "maximum": 9}}},
        {"x": 9},
        {"x": 10},
    ),
    "dynamicRef": (
        {
            "type": "object",
            "properties": {"x": {"$dynamicRef": "#leaf"}},
            "$defs": {"leaf": {"$dynamicAnchor": "leaf", "type": "integer"}},
        },
        {"x": 9},
        {"x": "9"},
    ),
    "id": (
        {
            "$id": "https://example.org/root",
            "type": "object",
            "properties": {"x": {"$ref": "other"}},
            "$defs": {"other": {"$id": "https://example.org/other", "type": "integer"}},
        },
        {"x": 9},
        {"x": "9"},
    ),
    "format_date_time": (_of({"format": "date-time"}), {"x": MODIFIED}, {"x": "yesterday"}),
    "format_date": (_of({"format": "date"}), {"x": "2025-05-03"}, {"x": "2025-13-03"}),
    "format_time": (_of({"format": "time"}), {"x": "14:30:00Z"}, {"x": "25:00:00Z"}),
    "format_duration": (_of({"format": "duration"}), {"x": "PT1H"}, {"x": "1 hour"}),
    "format_email": (_of({"format": "email"}), {"x": "a@example.org"}, {"x": "a at b"}),
    "format_uri": (_of({"format": "uri"}), {"x": "https://example.org/"}, {"x": "not a uri"}),
    "format_uuid": (_of({"format": "uuid"}), {"x": "6f1c1f1e-0f4b-4c8e-9a55-2f4d3a7f9b10"}, {"x": "6f1c1f1e"}),
    "format_ipv4": (_of({"format": "ipv4"}), {"x": "127.0.0.1"}, {"x": "127.0.0.256"}),
    "format_ipv6": (_of({"format": "ipv6"}), {"x": "::1"}, {"x": ":::"}),
    "format_hostname": (_of({"format": "hostname"}), {"x": "example.org"}, {"x": "-bad-.org"}),
    "format_regex": (_of({"format": "regex"}), {"x": "^a$"}, {"x": "(a"}),
    "format_json_pointer": (_of({"format": "json-pointer"}), {"x": "/a/0"}, {"x": "a/0"}),
    "draft07_items": (
        {"$schema": DRAFT_07, **_of({"items": [{"type": "string"}], "additionalItems": False})},
        {"x": ["a"]},
        {"x": ["a", 1]},
    ),
    "draft07_dependencies": (
        {"$schema": DRAFT_07, "type": "object", "dependencies": {"a": ["b"]}},
        {"a": 1, "b": 1},
        {"a": 1},
    ),
    "draft07_definitions": (
        {
            "$schema": DRAFT_07,
            "type": "object",
            "properties": {"x": {"$ref": "#/definitions/n"}},
            "definitions": {"n": {"type": "integer"}},
        },
        {"x": 1},
        {"x": "1"},
    ),
}


def keywords() -> Server:
    """One tool for every JSON Schema keyword; each counts how often it ran."""
    server = Server("keywords")
    ran: dict[str, int] = {}

    def add(name: str, schema: Object) -> None:
        async def tool(**arguments: Json) -> str:
            """Runs on arguments that fit."""
            ran[name] = ran.get(name, 0) + 1
            return "ran"

        server.add(tool, name=name, input_schema=schema)

    for name, (schema, _, _) in KEYWORDS.items():
        add(name, schema)

    @server.tool
    async def times_run(name: str) -> int:
        """How often a tool ran."""
        return ran.get(name, 0)

    @server.tool
    async def takes(text: str, number: int, share: float, flag: bool, words: list[str]) -> str:
        """One of each kind."""
        ran["takes"] = ran.get("takes", 0) + 1
        return "ran"

    return server


def registrar() -> Server:
    """A server whose tools are added by a tool."""
    server = Server("registrar")

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    @server.tool(input_schema={"type": "object", "properties": {"schema": {}}, "required": ["schema"]})
    async def register(**arguments: Json) -> str:
        """Add a tool with this input schema."""

        async def added(**given: Json) -> str:
            """Was added while the server ran."""
            return "ran"

        with contextlib.suppress(KeyError):
            server.remove("added")
        try:
            server.add(added, input_schema=arguments["schema"])
        except SchemaError as problem:
            raise ToolError(str(problem)) from None
        return "added"

    return server


def stateful() -> Server:
    """A server with state behind handles, as stateless revisions want it."""
    server = Server("stateful")
    baskets: dict[str, list[str]] = {}

    @server.tool
    async def open_basket() -> str:
        """A new basket; gives its handle."""
        handle = f"basket-{len(baskets) + 1}"
        baskets[handle] = []
        return handle

    @server.tool
    async def put(handle: str, item: str) -> str:
        """Put something into a basket."""
        if handle not in baskets:
            raise ToolError(f"There is no basket {handle!r}, or it has expired; call open_basket for a new one")
        baskets[handle].append(item)
        return ", ".join(baskets[handle])

    @server.tool
    async def expire(handle: str) -> None:
        """Forget a basket."""
        del baskets[handle]

    return server


def noisy() -> Server:
    """A server that logs all it has to log, with tools that fail in every way."""
    logging.basicConfig(level=logging.DEBUG)
    server = Server("noisy")
    add_tools(server)

    @server.tool(timeout=(0.05, 0.1))
    async def hangs(secret: str) -> str:
        """Is given up."""
        await asyncio.Event().wait()
        return secret

    @server.tool
    async def refuses(secret: str) -> str:
        """Fails, without saying why."""
        raise ValueError("no")

    @server.tool
    async def tells(secret: str) -> str:
        """Fails, and says why."""
        raise ToolError("not today")

    return server


def census() -> Server:
    """The usual tools, and one that counts what is alive inside the process."""
    # rates: its calls come as fast as they can, from one caller
    server = Server("census", limits=Limits(max_calls=2_000), rates=None)
    add_tools(server)

    @server.tool
    async def census() -> dict[str, int]:
        """Tasks, calls and objects."""
        gc.collect()
        objects = gc.get_objects()
        return {
            "tasks": len(asyncio.all_tasks()),
            "calls": sum(type(each) is Call for each in objects),
            "objects": len(objects),
        }

    return server


def talkative() -> Server:
    """Tools that talk at the wrong time."""
    server = Server("talkative")
    add_tools(server)
    released = asyncio.Event()
    late: set[asyncio.Task[None]] = set()

    @server.tool
    async def talks_after(call: Call) -> str:
        """Leaves a task behind that goes on talking."""

        async def talk() -> None:
            await released.wait()
            await call.progress(99, 100, "late")
            await call.log("emergency", "late")

        late.add(asyncio.create_task(talk()))
        return "done"

    @server.tool
    async def release() -> str:
        """Let it talk."""
        released.set()
        await asyncio.gather(*late)
        late.clear()
        released.clear()
        return "released"

    @server.tool
    def blocks_aloud(mark: str, call: Call) -> str:
        """A `def` tool that says when it begins, and stops when it is told to."""
        gate = threading.Event()
        try:
            call.blocking.progress(1)  # which the client may answer with a cancel before we are told that it is out
            while not call.cancelled:
                gate.wait(0.005)
        finally:
            stopped.append(mark)
        return "stopped"

    stopped: list[str] = []

    @server.tool
    async def has_stopped(mark: str) -> bool:
        """Whether `blocks_aloud` was stopped."""
        return mark in stopped

    return server


def always_error() -> Server:
    server = Server("always-error", invalid_arguments="error")
    add_tools(server)
    return server


def always_result() -> Server:
    server = Server("always-result", invalid_arguments="result")
    add_tools(server)
    return server


# Results: what a tool returns, by the names of the rows in tests/protocol/test_results.py.


def shapes() -> Server:
    server = Server("shapes")
    results: dict[str, Any] = {
        "one_text": "hello",
        "several_blocks": [Text("one"), Image(PNG, "image/png")],
        "object_as_text": ToolResult([], structured={"n": 1}),
        "object_said_already": ToolResult([Text('{ "n": 1 }')], structured={"n": 1}),
        "object_with_text": ToolResult([Text("one")], structured={"n": 1}),
        "object_with_media": ToolResult([Image(PNG, "image/png")], structured={"n": 1}),
        "value": ToolResult([], structured=[2, 3, 5]),
        "null": ToolResult([], structured=None),
        "error": ToolResult([Text("one"), Text("two")], is_error=True, data={"status": "failed"}),
        "error_with_data": ToolResult([Text("no")], structured={"why": "x"}, is_error=True),
        "empty": ToolResult([]),
        "with_meta": ToolResult([Text("hello")], meta={"example.org/z": 3}),
        "audio": [Audio(WAV, "audio/wav", annotations={"audience": ["user"], "lastModified": MODIFIED})],
        "image": [Image(PNG, "image/png")],
        "link": [
            ResourceLink(
                "file:///a.rs", "a.rs", title="A", description="Entry", mime_type="text/x-rust", size=7,
                icons=[{"src": "https://example.org/i.png"}], annotations={"priority": 0.5}, meta={"example.org/l": 1},
            ),
            Text("after"),
        ],
        "bare_link": [ResourceLink("file:///b", "b"), Text("after")],
        "text_resource": [EmbeddedResource({"uri": "file:///a.txt", "mimeType": "text/plain", "text": "hello"})],
        "blob_resource": [EmbeddedResource({"uri": "file:///a.bin", "blob": "AAEC"})],
        "annotated_resource": [
            EmbeddedResource(
                {
                    "uri": "file:///a.txt",
                    "text": "hello",
                    "title": "A",
                    "annotations": {"audience": ["assistant"], "lastModified": MODIFIED},
                    "_meta": {"example.org/r": 1},
                },
                annotations={"priority": 0.5},
            )
        ],
        "annotated_text": [
            Text("one", annotations={"audience": ["user"], "priority": 0.7, "lastModified": MODIFIED}),
            Text("two", meta={"example.org/y": 2}),
        ],
    }  # fmt: skip
    for name, result in results.items():
        server.add(_returning(result), name=name)

    server.add(_returning({"n": 2}), name="declared_object", output_schema={"type": "object", "required": ["n"]})
    server.add(_returning([1]), name="declared_list", output_schema={"type": "array"})
    # The schema does not say `object`: older revisions show it wrapped, so the value is wrapped too.
    server.add(_returning({"n": 3}), name="declared_any", output_schema={"type": ["object", "null"]})

    broken: dict[str, Any] = {
        "wrong_type": {"n": "many"},
        "no_structure": ToolResult([Text("n is 1")]),
        "only_text": "n is 1",
        "missing_member": {},
        "not_finite": {"n": float("inf")},
        "no_json_form": {"n": object()},
    }
    for name, result in broken.items():
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        server.add(_returning(result), name=name, output_schema=schema)
    loose: dict[str, Any] = {
        "loose_nan": {"x": float("nan")},
        "loose_bytes": {"x": b"raw"},
        "loose_cycle": _cycle(),
        "loose_meta": ToolResult([Text("x")], meta={"example.org/x": float("nan")}),
        "loose_block_meta": [Text("x", meta={"example.org/x": float("inf")})],
        "loose_resource": [EmbeddedResource({"uri": "a:b", "text": "x", "_meta": {"example.org/x": float("nan")}})],
        "loose_mixture": [Text("x"), 5],
    }
    for name, result in loose.items():
        server.add(_returning(result), name=name)

    @server.tool(name="declared_error", output_schema={"type": "object", "required": ["n"]})
    async def declared_error() -> Object:
        """Fails although it declares an output."""
        raise ToolError("no such thing")

    @server.tool(name="error_with_nan")
    async def error_with_nan() -> str:
        """Tells the model what went wrong, with what JSON cannot say."""
        raise ToolError("it went wrong", value=float("nan"))

    @server.tool
    async def add(a: float, b: float) -> Sum:
        """Add two numbers."""
        return Sum(a + b)

    return server


def _returning(value: Any) -> Any:
    async def returns() -> Any:
        """Returns what it was made with."""
        return value

    return returns


def _cycle() -> Object:
    made: Object = {}
    made["self"] = made
    return made


# Questions


@dataclass
class Wish:
    """A form with a default for every kind of field."""

    name: str = "nobody"
    count: int = 3
    gift: bool = True


CHOICES: Object = {
    "type": "object",
    "properties": {
        "one": {
            "type": "string",
            "oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}],
            "default": "a",
        },
        "many": {
            "type": "array",
            "title": "Several",
            "items": {"anyOf": [{"const": "x", "title": "X"}, {"const": "y", "title": "Y"}]},
            "minItems": 1,
        },
        "plain": {"type": "array", "items": {"type": "string", "enum": ["p", "q"]}},
        "sure": {"type": "boolean", "default": True},
    },
    "required": ["one", "many"],
}


def asking() -> Server:
    server = Server("asking", limits=Limits(grace_seconds=1.0))
    add_tools(server)
    begun: dict[str, int] = {}
    ended: list[str] = []

    @server.tool
    async def swallows(call: Call) -> str:
        """Catches every exception."""
        try:
            answer = await call.ask("Your name?", Name)
        except Exception as problem:
            return f"swallowed {type(problem).__name__}"
        return f"{answer.action} {answer.content.name}"

    @server.tool
    async def asks_in_group(call: Call) -> str:
        """Asks two things at once, each in a task of its own."""
        async with asyncio.TaskGroup() as group:
            first = group.create_task(call.ask("First?", Name, key="first"))
            second = group.create_task(call.ask("Second?", Name, key="second"))
        return f"{first.result().content.name} {second.result().content.name}"

    @server.tool
    async def asks_marked(mark: str, call: Call) -> str:
        """Asks for a name, by its mark."""
        answer = await call.ask(f"The name of {mark}?", Name, key="name")
        return f"{mark} {answer.content.name}"

    @server.tool
    async def asks_wish(call: Call) -> str:
        """A form with defaults."""
        answer = await call.ask("Your wish?", Wish)
        return f"{answer.action} {answer.content}"

    @server.tool
    async def asks_titled(call: Call) -> str:
        """Titled and multiple choices."""
        answer = await call.ask("Choose", CHOICES)
        return f"{answer.action} {answer.content}"

    @server.tool
    async def asks_everything(call: Call) -> str:
        """A form, a page and a model, together."""
        found = await call.ask_all(
            {"form": Form("Your name?", Name), "page": Url("Sign in", "https://example.com/in"), "model": Sample("Hi")}
        )
        return f"{found['form'].action} {found['page'].action} {found['model']['role']}"

    @server.tool(timeout=(0.5, PATIENCE))
    async def asks_patiently(call: Call) -> str:
        """Has little time for itself, and much for an answer."""
        answer = await call.ask("Your name?", Name)
        return f"{answer.action} {answer.content.name}"

    @server.tool
    def asks_blocking_thrice(call: Call) -> str:
        """Everything a `def` tool can ask and say."""
        call.blocking.progress(1, 2, "begun")
        call.blocking.log("error", "asking")
        try:
            name = call.blocking.ask("Your name?", Name, key="name").content.name
            folders = call.blocking.roots(key="folders")
            said = call.blocking.sample("Hi", key="model")
        except Exception as problem:
            return f"swallowed {type(problem).__name__}"
        return f"{name} {len(folders)} {said['role']}"

    @server.tool
    async def samples_with_tools(call: Call) -> str:
        """Lets the client's model use tools."""
        answer = await call.sample("Go", tools=[{"name": "t", "inputSchema": {"type": "object"}}])
        return str(answer["role"])

    @server.tool
    async def counts_asking(mark: str, call: Call) -> str:
        """Asks, and remembers how it began and ended."""
        begun[mark] = begun.get(mark, 0) + 1
        try:
            answer = await call.ask("Your name?", Name)
        finally:
            ended.append(mark)
        return str(answer.action)

    @server.tool
    def counts_blocking(mark: str, call: Call) -> str:
        """The same from a worker thread, with a net too wide."""
        begun[mark] = begun.get(mark, 0) + 1
        try:
            answer = call.blocking.ask("Your name?", Name)
        except Exception:
            ended.extend([mark, mark])
            raise
        finally:
            ended.append(mark)
        return str(answer.action)

    @server.tool
    async def how_it_went(mark: str) -> Object:
        """How often `counts_asking` began and ended."""
        return {"begun": begun.get(mark, 0), "ended": ended.count(mark)}

    return server


# Reading answers, whatever the revision


def said(answer: Object) -> str:
    """What a successful answer says, as text."""
    result = answer["result"]
    if "toolResult" in result:
        told = result["toolResult"]
        assert not (isinstance(told, dict) and "error" in told), f"a failure: {told}"
        return told if isinstance(told, str) else json.dumps(told)
    assert result.get("isError") is False, f"a failure: {result}"
    return "\n".join(block["text"] for block in result["content"] if block["type"] == "text")


def failure(answer: Object) -> str:
    """What an answer says went wrong with the tool; fails if it is a protocol error or a success."""
    result = answer["result"]
    if "toolResult" in result:
        told = result["toolResult"]
        assert isinstance(told, dict), f"not a failure: {told}"
        return str(told["error"])
    assert result["isError"] is True, f"not a failure: {result}"
    return "\n".join(block["text"] for block in result["content"])


async def until(wire: Wire, tool: str, mark: str) -> None:
    """Wait until a tool says that it is so; a second is the most that stopping may take."""
    async with asyncio.timeout(PATIENCE):
        while said(await wire.call(tool, {"mark": mark})) != "true":  # noqa: ASYNC110 - it may be in another process
            # In memory this loop and the tool's thread want the same lock, and who never waits keeps it.
            await asyncio.sleep(0.001)
