"""Servers for the tests of lifecycle, listing and golden bytes; named there as `servers_lifecycle:function`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import subject
from handrail import (
    Audio,
    Call,
    EmbeddedResource,
    Image,
    ResourceLink,
    Server,
    Text,
    ToolError,
    ToolResult,
)

Json = Any
Object = dict[str, Any]

DRAFT_07 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020_12 = "https://json-schema.org/draft/2020-12/schema"
ICON = {"src": "https://example.org/icon.png", "mimeType": "image/png", "sizes": ["48x48"]}
GOLDEN_TIME = 1_700_000_000.0


def interleaved() -> Server:
    """The default tools, and a call that stays in flight until another one lets it go."""
    server = subject.make("default")
    gates: dict[str, asyncio.Event] = {}

    @server.tool
    async def hold(mark: str, call: Call) -> str:
        """Waits to be released."""
        await call.progress(1, 2, "held")
        await gates.setdefault(mark, asyncio.Event()).wait()
        return f"{mark} was held"

    @server.tool
    async def release(mark: str) -> str:
        """Lets a held call go on."""
        gates.setdefault(mark, asyncio.Event()).set()
        return f"{mark} may go"

    return server


def dressed() -> Server:
    """A server and a tool that say everything the newest revision lets them say."""
    server = Server(
        "dressed",
        version="3.2.1",
        title="Dressed up",
        description="Says everything",
        icons=[ICON],
        website_url="https://example.org/",
        instructions="Look closely.",
    )

    @server.tool(
        title="Full dress",
        annotations={"readOnlyHint": True, "openWorldHint": False},
        icons=[ICON],
        meta={"example.org/x": 1},
        tags=["evening"],
        input_schema=DRESSED_INPUT,
        output_schema=DRESSED_OUTPUT,
    )
    async def full(**arguments: Any) -> Json:
        """Every member there is."""
        return {"region": arguments.get("region", "none")}

    @server.tool(annotations={"title": "Mine", "destructiveHint": False}, title="Yours")
    async def titled_twice() -> None:
        """Has a title in its annotations too."""

    @server.tool
    async def bare() -> None: ...

    @server.tool(title="Only a title")
    async def titled() -> None: ...

    return server


DRESSED_INPUT: Object = {
    "type": "object",
    "properties": {
        "region": {"type": "string", "x-mcp-header": "Region"},
        "deep": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "x-mcp-header": "Count"},
                "x-mcp-header": {"type": "string"},
                "free": True,
            },
        },
        "anything": True,
        "never": False,
        "list": {"type": "array", "items": {"type": "object", "properties": {"free": True}}},
        "value": {"const": {"properties": {"x": True}}},
        "named": {"$ref": "#/$defs/Named"},
    },
    "$defs": {"Named": {"$anchor": "named", "type": "object", "properties": {"never": False}}},
    "x-unknown": {"kept": True},
}

DRESSED_OUTPUT: Object = {"type": "object", "properties": {"region": {"type": "string"}, "free": True}}


def wrapping() -> Server:
    """Tools whose output is not an object, or not always."""
    server = Server("wrapping")
    for name, schema in OUTPUTS.items():
        server.add(_giving(OUTPUT_VALUES[name]), name=name, input_schema={"type": "object"}, output_schema=schema)
    return server


OUTPUTS: dict[str, Object] = {
    "numbers": {"type": "array", "items": {"type": "integer"}},
    "tree": {
        "$schema": DRAFT_2020_12,
        "$ref": "#/$defs/Node",
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "next": {"$ref": "#/$defs/Node"},
                    "root": {"$ref": "#"},
                    "named": {"$ref": "#leaf"},
                    "$ref": {"$ref": "#/$defs/Leaf"},
                    "same": {"const": {"$ref": "#/$defs/Node"}},
                    "free": True,
                },
            },
            "Leaf": {"$anchor": "leaf", "type": "string", "default": {"$ref": "#/$defs/Leaf"}},
        },
    },
    "either": {"oneOf": [{"type": "object"}, {"type": "null"}]},
    "island": {
        "type": "array",
        "items": {"$id": "https://example.org/i", "$defs": {"A": {"type": "integer"}}, "$ref": "#/$defs/A"},
    },
}

OUTPUT_VALUES: dict[str, Json] = {
    "numbers": [2, 3, 5],
    "tree": {"next": {"next": {}}, "$ref": "leaf"},
    "either": {"a": 1},
    "island": [1],
}

WRAPPED_TREE: Object = {
    "$schema": DRAFT_2020_12,
    "type": "object",
    "properties": {
        "result": {
            "$ref": "#/properties/result/$defs/Node",
            "$defs": {
                "Node": {
                    "type": "object",
                    "properties": {
                        "next": {"$ref": "#/properties/result/$defs/Node"},
                        "root": {"$ref": "#/properties/result"},
                        "named": {"$ref": "#leaf"},
                        "$ref": {"$ref": "#/properties/result/$defs/Leaf"},
                        "same": {"const": {"$ref": "#/$defs/Node"}},
                        "free": {},
                    },
                },
                "Leaf": {"$anchor": "leaf", "type": "string", "default": {"$ref": "#/$defs/Leaf"}},
            },
        }
    },
    "required": ["result"],
}


def dialects() -> Server:
    """The same keywords in both dialects, for input (`in …`) and output (`out …`)."""
    server = Server("dialects")
    for name, schema in DIALECTS.items():
        server.add(_giving("fine"), name=f"in-{name}", input_schema=schema)
        server.add(_repeating, name=f"out-{name}", input_schema={"type": "object"}, output_schema=schema)
    return server


_PAIR = [{"type": "integer"}, {"type": "string"}]
_NEEDS = {"card": ["address"]}

DIALECTS: dict[str, Object] = {
    "items-07": {"$schema": DRAFT_07, "type": "object", "properties": {"pair": {"items": _PAIR}}},
    "prefix-07": {"$schema": DRAFT_07, "type": "object", "properties": {"pair": {"prefixItems": _PAIR}}},
    "prefix-none": {"type": "object", "properties": {"pair": {"prefixItems": _PAIR}}},
    "prefix-2020": {"$schema": DRAFT_2020_12, "type": "object", "properties": {"pair": {"prefixItems": _PAIR}}},
    "needs-07": {"$schema": DRAFT_07, "type": "object", "dependencies": _NEEDS},
    "needs-none": {"type": "object", "dependencies": _NEEDS},
    "needs-2020": {"$schema": DRAFT_2020_12, "type": "object", "dependencies": _NEEDS},
    "required-none": {"type": "object", "dependentRequired": _NEEDS},
    "required-07": {"$schema": DRAFT_07, "type": "object", "dependentRequired": _NEEDS},
    # Valid in draft-07 alone: that is what it must have been written for (PD-9).
    "items-none": {"type": "object", "properties": {"pair": {"items": _PAIR}}},
}


async def _repeating(**arguments: Any) -> Json:
    """Gives its arguments back."""
    return arguments


def _giving(value: Json) -> Callable[..., Any]:
    async def giving(**arguments: Any) -> Json:
        """Gives a fixed value."""
        return value

    return giving


NAMES = ["g", "Get", "get", "a.b-c_D9", "n" * 128, "n" * 129, "a b", "größe", "x,y", "../etc", "🚀"]


def named() -> Server:
    server = Server("named")
    for name in NAMES:
        server.add(_giving(f"this is {name}"), name=name, input_schema={"type": "object"})
    return server


def crowd() -> Server:
    """More tools than the default page holds."""
    server = Server("crowd")
    for at in range(1_200):
        server.add(_giving(at), name=f"tool{at}", input_schema={"type": "object"})
    return server


def ticking() -> Server:
    """Pages of two, and a clock that only its tool moves."""
    server = Server("ticking", page_size=2, cache_seconds=0)
    now = [1_000_000.0]
    server.engine.clock = lambda: now[0]

    @server.tool
    async def advance(seconds: float) -> str:
        """Let time pass."""
        now[0] += seconds
        return "later"

    @server.tool
    async def asks(call: Call) -> str:
        """Asks, so that there is a request state."""
        return (await call.ask("Your name?", subject.Name)).action

    @server.tool
    async def drop(name: str) -> str:
        """Takes a tool away."""
        server.remove(name)
        return "dropped"

    for at in range(5):
        server.add(_giving(at), name=f"tool{at}", input_schema={"type": "object"})
    return server


def grudging() -> Server:
    """Its own tools try to register what must not be registered."""
    server = Server("grudging")

    async def twin() -> str:
        """A tool."""
        return "twin"

    @server.tool
    async def register(name: str, schema: Json = None) -> str:
        """Registers one more tool."""
        try:
            if schema is None:
                server.add(twin, name=name)
            else:
                server.add(_giving("made"), name=name, input_schema=schema)
        except ValueError as problem:
            raise ToolError(f"refused: {problem}") from None
        return "registered"

    return server


# The server of the golden bytes: nothing in it depends on time, chance or order of arrival.


@dataclass
class Sum:
    sum: float


def unlimited() -> Server:
    server = subject.make("default")
    server.guard(rates=None)  # thousands of messages in a few seconds come from one address
    return server


def unsanitized() -> Server:
    server = subject.make("default")
    server.guard(sanitize=None)  # what is shown with it is that the wire itself changes no text
    return server


def golden() -> Server:
    server = Server(
        "golden",
        version="1.0.0",
        title="Golden",
        description="For the record",
        icons=[ICON],
        website_url="https://example.org/",
        instructions="Compare byte by byte.",
        page_size=9,
    )
    # The bytes on file were sealed with a key that a server does not take any more.
    server.engine.seal._keys = [hashlib.blake2b(b"k" * 32, person=b"handrail seal").digest()]
    server.engine.clock = lambda: GOLDEN_TIME
    _golden_values(server)
    _golden_blocks(server)
    _golden_talk(server)
    return server


def _golden_values(server: Server) -> None:
    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    @server.tool(title="Adder", annotations={"readOnlyHint": True}, icons=[ICON], meta={"example.org/x": 1})
    async def add(a: float, b: float) -> Sum:
        """Add two numbers."""
        return Sum(a + b)

    @server.tool
    async def numbers() -> list[int]:
        """A list."""
        return [2, 3, 5]

    @server.tool(output_schema={"type": ["null", "string"]})
    async def null() -> Any:
        """Nothing, as a value."""
        return None

    @server.tool
    async def nothing() -> None: ...

    @server.tool(
        input_schema={
            "type": "object",
            "properties": {"region": {"type": "string", "x-mcp-header": "Region"}, "free": True},
            "required": ["region"],
        }
    )
    async def regional(**arguments: Any) -> str:
        """Has a mirrored argument."""
        return str(arguments["region"])

    @server.tool
    async def fails() -> str:
        """Tells the model what went wrong."""
        raise ToolError("No such city: Atlantis", status="not_found")

    @server.tool(dangerous="written by strangers")
    async def risky() -> str:
        """Output to be handled with care."""
        return "whatever"


def _golden_blocks(server: Server) -> None:
    note = {"audience": ["user", "assistant"], "priority": 0.7, "lastModified": "2025-05-03T14:30:00Z"}

    @server.tool
    async def picture() -> Image:
        """An image."""
        return Image(subject.PNG, "image/png", annotations={"audience": ["user"], "priority": 0.9})

    @server.tool
    async def sound() -> Audio:
        """A sound."""
        return Audio(subject.WAV, "audio/wav")

    @server.tool
    async def link() -> ResourceLink:
        """A link."""
        return ResourceLink("file:///main.rs", "main.rs", title="Main", mime_type="text/x-rust", size=7, icons=[ICON])

    @server.tool
    async def embedded() -> EmbeddedResource:
        """A resource inside."""
        inner = {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "hello", "annotations": note}
        return EmbeddedResource(inner, annotations={"priority": 0.5})

    @server.tool
    async def annotated() -> list[Text]:
        """Texts with annotations."""
        return [Text("one", annotations=note, meta={"example.org/y": 2}), Text("two")]

    @server.tool
    async def mixed() -> ToolResult:
        """Structured data beside a picture."""
        content: list[Any] = [Text("look"), Image(subject.PNG, "image/png")]
        return ToolResult(content, structured={"n": 1}, meta={"example.org/z": 3})


def _golden_talk(server: Server) -> None:
    @server.tool
    async def progresses(call: Call) -> str:
        """Reports progress."""
        await call.progress(1, 2, "half")
        await call.progress(2, 2, "done")
        return "done"

    @server.tool
    async def logs(call: Call) -> str:
        """Logs at two levels."""
        await call.log("debug", "small")
        await call.log("warning", {"step": 1}, logger="golden")
        return "logged"

    @server.tool
    async def asks(call: Call) -> str:
        """Asks for a name."""
        answer = await call.ask("Your name?", subject.Name)
        return f"{answer.action} {answer.content.name}"

    @server.tool
    async def grows() -> str:
        """Adds a tool."""
        server.add(_giving("new"), name="grown", input_schema={"type": "object"})
        return "grown"
