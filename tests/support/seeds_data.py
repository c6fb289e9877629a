"""The example messages of the five seed texts, as data: each with the seed it is printed in, and what it means.

`printed` is the example as the seed shows it, read tolerantly (comments gone, `{ … }` empty, newlines inside strings
kept). What may differ on a real wire is marked by the placeholders of the seeds: `base64-…` and the two cursors.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from handrail import Audio, EmbeddedResource, Image, ResourceLink, Text, ToolResult
from handrail.model import Tool
from subject import PNG, WAV

Json = Any
Object = dict[str, Any]

FILES = {
    "000": "000_a7d5a7d6464305ce.txt",
    "001": "001_22befc8030e0b741.txt",
    "002": "002_5ef9a34d6f85e1e1.txt",
    "003": "003_a2be89b80e16811a.txt",
    "004": "004_f9524caed41c93cf.txt",
}
REVISION = {"000": "2025-06-18", "001": "2025-11-25", "002": "2024-10-07", "003": "2024-11-05", "004": "pocket"}

CURSOR = "optional-cursor-value"
NEXT_CURSOR = "next-page-cursor"
BASE64 = {
    "base64-data": PNG,
    "base64-encoded-data": PNG,
    "base64-audio": WAV,
    "base64-encoded-audio-data": WAV,
}


def live(value: Json) -> Json:
    """An example with real pictures and sounds where the seed says `base64-…`."""
    if isinstance(value, dict):
        return {name: live(each) for name, each in value.items()}
    if isinstance(value, list):
        return [live(each) for each in value]
    if isinstance(value, str) and value in BASE64:
        return base64.b64encode(BASE64[value]).decode()
    return value


@dataclass(frozen=True)
class Capability:
    """What a server declares: `printed` is the part of the opening answer that is about tools."""

    seed: str
    printed: Object
    server: str
    whole: bool = True  # False: printed without the outer `capabilities`

    @property
    def capabilities(self) -> Object:
        shown: Object = self.printed["capabilities"] if self.whole else self.printed
        return shown


@dataclass(frozen=True)
class Page:
    """`tools/list`, question and answer."""

    seed: str
    request: Object
    response: Object
    tools: list[Tool]
    server: str


@dataclass(frozen=True)
class Definition:
    """A tool as it is listed, printed by itself."""

    seed: str
    name: str
    printed: Object
    tool: Tool
    server: str
    proves: tuple[str, ...] = ("SRV-301",)


@dataclass(frozen=True)
class Exchange:
    """`tools/call`. Where the seed prints no question, `asked` is False and the question is ours."""

    seed: str
    name: str
    request: Object
    response: Object
    means: ToolResult
    server: str
    asked: bool = True
    bare: bool = False  # the seed prints the result without the message around it
    parsed: bool = False  # the text is JSON and compared parsed; an absent `isError` is false
    proves: tuple[str, ...] = ("SRV-402",)


@dataclass(frozen=True)
class Failure:
    """`tools/call` answered with a JSON-RPC error; the question is ours."""

    seed: str
    name: str
    request: Object
    response: Object
    server: str
    proves: tuple[str, ...] = ("SRV-121", "SRV-411")


@dataclass(frozen=True)
class Content:
    """A content block, printed by itself; `tool` of the seed's content server gives it."""

    seed: str
    tool: str
    printed: Object
    means: Text | Image | Audio | ResourceLink | EmbeddedResource


@dataclass(frozen=True)
class Notice:
    """A change of the tool list."""

    seed: str
    printed: Object


@dataclass(frozen=True)
class EmptySchema:
    """An input schema for a tool without parameters, printed inside a sentence."""

    seed: str
    tool: str
    printed: Object


def call(ident: int, name: str, **arguments: Json) -> Object:
    params = {"name": name, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": params}


# What several seeds print alike.

CITY = {
    "type": "object",
    "properties": {"location": {"type": "string", "description": "City name or zip code"}},
    "required": ["location"],
}
CITY_AND_UNITS = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "City name or zip code"},
        "units": {"type": "string", "enum": ["metric", "imperial"], "default": "metric"},
    },
    "required": ["location"],
}
QUERY = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "SQL query to execute"},
        "database": {"type": "string", "enum": ["users", "products", "orders"], "default": "users"},
    },
    "required": ["query"],
}
MEASURED = {
    "type": "object",
    "properties": {
        "temperature": {"type": "number", "description": "Temperature in celsius"},
        "conditions": {"type": "string", "description": "Weather conditions description"},
        "humidity": {"type": "number", "description": "Humidity percentage"},
    },
    "required": ["temperature", "conditions", "humidity"],
}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
NUMBERS_DRAFT_07 = {"$schema": "http://json-schema.org/draft-07/schema#", **NUMBERS}
CLOSED = {"type": "object", "additionalProperties": False}
OPEN = {"type": "object"}
ICONS = [{"src": "https://example.com/weather-icon.png", "mimeType": "image/png", "sizes": ["48x48"]}]

CHANGED = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
DECLARED = {"capabilities": {"tools": {"listChanged": True}}}
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"cursor": CURSOR}}
ABOUT_WEATHER = "Get current weather information for a location"
WEATHER = "Current weather in New York:\nTemperature: 72°F\nConditions: Partly cloudy"
SHOWN_WEATHER = {
    "jsonrpc": "2.0",
    "id": 2,
    "result": {"content": [{"type": "text", "text": WEATHER}], "isError": False},
}
UNKNOWN_TOOL = {
    "jsonrpc": "2.0",
    "id": 3,
    "error": {"code": -32602, "message": "Unknown tool: invalid_tool_name"},
}


def weather_page(**members: Json) -> Object:
    """The one page three seeds print; the newer the seed, the more members the tool has."""
    tool = {"name": "get_weather", "description": ABOUT_WEATHER, "inputSchema": CITY, **members}
    return {"jsonrpc": "2.0", "id": 1, "result": {"tools": [tool], "nextCursor": NEXT_CURSOR}}


def weather_call(seed: str) -> Exchange:
    return Exchange(
        seed,
        "weather in New York",
        call(2, "get_weather", location="New York"),
        SHOWN_WEATHER,
        ToolResult([Text(WEATHER)]),
        "weather",
    )


CAPABILITIES = [
    Capability("000", DECLARED, "weather"),
    Capability("001", DECLARED, "weather"),
    Capability("002", {"capabilities": {"tools": {}}}, "quiet"),
    Capability("002", DECLARED, "oldest"),
    Capability("003", DECLARED, "weather"),
    Capability("004", {"tools": {"listChanged": True}}, "pocket", whole=False),
]

PAGES = [
    Page(
        "000",
        LIST,
        weather_page(title="Weather Information Provider"),
        [
            Tool(
                name="get_weather",
                title="Weather Information Provider",
                description=ABOUT_WEATHER,
                input_schema=CITY,
            )
        ],
        "paged",
    ),
    Page(
        "001",
        LIST,
        weather_page(title="Weather Information Provider", icons=ICONS),
        [
            Tool(
                name="get_weather",
                title="Weather Information Provider",
                description=ABOUT_WEATHER,
                input_schema=CITY,
                icons=ICONS,
            )
        ],
        "paged",
    ),
    Page(
        "002",
        {"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
        {
            "jsonrpc": "2.0",
            "id": 1,
            "result": {
                "tools": [
                    {
                        "name": "get_weather",
                        "description": "Get current weather information for a specific location",
                        "inputSchema": CITY_AND_UNITS,
                    },
                    {
                        "name": "query_database",
                        "description": "Execute a SQL query on the database",
                        "inputSchema": QUERY,
                    },
                ]
            },
        },
        [
            Tool(
                name="get_weather",
                description="Get current weather information for a specific location",
                input_schema=CITY_AND_UNITS,
            ),
            Tool(name="query_database", description="Execute a SQL query on the database", input_schema=QUERY),
        ],
        "oldest",
    ),
    Page(
        "003",
        LIST,
        weather_page(),
        [Tool(name="get_weather", description=ABOUT_WEATHER, input_schema=CITY)],
        "paged",
    ),
]

DEFINITIONS = [
    Definition(
        "001",
        "get_weather_data",
        {
            "name": "get_weather_data",
            "title": "Weather Data Retriever",
            "description": "Get current weather data for a location",
            "inputSchema": CITY,
            "outputSchema": MEASURED,
        },
        Tool(
            name="get_weather_data",
            title="Weather Data Retriever",
            description="Get current weather data for a location",
            input_schema=CITY,
            output_schema=MEASURED,
        ),
        "schemas",
    ),
    Definition(
        "001",
        "calculate_sum, 2020-12",
        {"name": "calculate_sum", "description": "Add two numbers", "inputSchema": NUMBERS},
        Tool(name="calculate_sum", description="Add two numbers", input_schema=NUMBERS),
        "schemas",
    ),
    Definition(
        "001",
        "calculate_sum, draft-07",
        {"name": "calculate_sum", "description": "Add two numbers", "inputSchema": NUMBERS_DRAFT_07},
        Tool(name="calculate_sum", description="Add two numbers", input_schema=NUMBERS_DRAFT_07),
        "draft07",
    ),
    Definition(
        "001",
        "get_current_time",
        {"name": "get_current_time", "description": "Returns the current server time", "inputSchema": CLOSED},
        Tool(name="get_current_time", description="Returns the current server time", input_schema=CLOSED),
        "schemas",
        proves=("SRV-301", "SRV-305"),
    ),
    Definition(
        "002",
        "get_weather",
        {
            "name": "get_weather",
            "description": "Get current weather information for a specific location",
            "inputSchema": CITY_AND_UNITS,
        },
        Tool(
            name="get_weather",
            description="Get current weather information for a specific location",
            input_schema=CITY_AND_UNITS,
        ),
        "oldest",
    ),
    Definition(
        "002",
        "query_database",
        {"name": "query_database", "description": "Execute a SQL query on the database", "inputSchema": QUERY},
        Tool(name="query_database", description="Execute a SQL query on the database", input_schema=QUERY),
        "oldest",
    ),
]

EMPTY_SCHEMAS = [
    EmptySchema("001", "takes_nothing", CLOSED),
    EmptySchema("001", "takes_anything", OPEN),
]

DEPARTURE = "Invalid departure date: must be in the future. Current date is 08/08/2025."
RATE_LIMIT = "Failed to fetch weather data: API rate limit exceeded"
NO_RESULTS = "No search results found for query: 'widgets manufactured in 1972'"
MEASUREMENT = {"temperature": 22.5, "conditions": "Partly cloudy", "humidity": 65}
MEASUREMENT_TEXT = '{"temperature": 22.5, "conditions": "Partly cloudy", "humidity": 65}'
IMPERIAL = {"temperature": 72, "humidity": 65, "description": "Partly cloudy"}
POCKET_RESULT = {"content": [{"type": "text", "text": "…"}], "structuredContent": {}, "isError": False}

EXCHANGES = [
    weather_call("000"),
    weather_call("001"),
    weather_call("003"),
    Exchange(
        "001",
        "get_weather_data",
        call(5, "get_weather_data", location="New York"),
        {
            "jsonrpc": "2.0",
            "id": 5,
            "result": {"content": [{"type": "text", "text": MEASUREMENT_TEXT}], "structuredContent": MEASUREMENT},
        },
        ToolResult([Text(MEASUREMENT_TEXT)], structured=MEASUREMENT),
        "schemas",
        asked=False,
        parsed=True,
        proves=("SRV-402", "SRV-405", "SRV-406"),
    ),
    Exchange(
        "001",
        "departure date",
        call(4, "book_flight", departure="07/08/2025"),
        {"jsonrpc": "2.0", "id": 4, "result": {"content": [{"type": "text", "text": DEPARTURE}], "isError": True}},
        ToolResult([Text(DEPARTURE)], is_error=True),
        "weather",
        asked=False,
        proves=("SRV-402", "SRV-414"),
    ),
    Exchange(
        "003",
        "rate limit",
        call(4, "get_weather", location="Nowhere"),
        {"jsonrpc": "2.0", "id": 4, "result": {"content": [{"type": "text", "text": RATE_LIMIT}], "isError": True}},
        ToolResult([Text(RATE_LIMIT)], is_error=True),
        "weather",
        asked=False,
        proves=("SRV-402", "SRV-414"),
    ),
    Exchange(
        "002",
        "imperial",
        call(2, "get_weather", location="New York", units="imperial"),
        {"jsonrpc": "2.0", "id": 2, "result": {"toolResult": IMPERIAL}},
        ToolResult([Text('{"temperature":72,"humidity":65,"description":"Partly cloudy"}')], structured=IMPERIAL),
        "oldest",
        proves=("SRV-401",),
    ),
    Exchange(
        "002",
        "empty results",
        call(5, "query_database", query="widgets manufactured in 1972"),
        {"jsonrpc": "2.0", "id": 5, "result": {"toolResult": {"error": NO_RESULTS, "status": "empty_results"}}},
        ToolResult([Text(NO_RESULTS)], is_error=True, data={"status": "empty_results"}),
        "oldest",
        asked=False,
        proves=("SRV-401",),
    ),
    Exchange(
        "004",
        "id 7",
        call(7, "<tool-name>"),
        {"jsonrpc": "2.0", "id": 7, "result": POCKET_RESULT},
        ToolResult([Text("…")]),
        "pocket",
        bare=True,
        proves=("SRV-402", "SRV-404"),
    ),
]

FAILURES = [
    Failure("001", "unknown tool", call(3, "invalid_tool_name"), UNKNOWN_TOOL, "weather"),
    Failure("003", "unknown tool", call(3, "invalid_tool_name"), UNKNOWN_TOOL, "weather"),
    Failure(
        "002",
        "missing location",
        call(3, "get_weather", units="imperial"),
        {
            "jsonrpc": "2.0",
            "id": 3,
            "error": {
                "code": -32602,
                "message": "Invalid params",
                "data": {"reason": "Missing required argument: location"},
            },
        },
        "oldest",
        proves=("SRV-121", "SRV-412"),
    ),
    Failure(
        "002",
        "unknown tool",
        call(4, "invalid_tool_name"),
        {
            "jsonrpc": "2.0",
            "id": 4,
            "error": {
                "code": -32602,
                "message": "Invalid params",
                "data": {"reason": "Unknown tool: invalid_tool_name"},
            },
        },
        "oldest",
    ),
]

TEXT = {"type": "text", "text": "Tool result text"}
MAIN = "file:///project/src/main.rs"
RUST = "text/x-rust"
INSIDE = {"audience": ["user", "assistant"], "priority": 0.7, "lastModified": "2025-05-03T14:30:00Z"}
TITLED = {"uri": MAIN, "title": "Project Rust Main File", "mimeType": RUST, "text": "fn main() {...}"}
ANNOTATED = {
    "uri": MAIN,
    "mimeType": RUST,
    "text": 'fn main() {\n println!("Hello world!");\n}',
    "annotations": INSIDE,
}
NOTE = {"uri": "resource://example", "mimeType": "text/plain", "text": "Resource content"}
FOR_USER = {"audience": ["user"], "priority": 0.9}
PNG_TEXT = base64.b64encode(PNG).decode()
WAV_TEXT = base64.b64encode(WAV).decode()

CONTENT = [
    Content("000", "text", TEXT, Text("Tool result text")),
    Content(
        "000",
        "image",
        {"type": "image", "data": "base64-data", "mimeType": "image/png"},
        Image(PNG_TEXT, "image/png"),
    ),
    Content(
        "000",
        "audio",
        {"type": "audio", "data": "base64-audio", "mimeType": "audio/wav"},
        Audio(WAV_TEXT, "audio/wav"),
    ),
    Content(
        "000",
        "link",
        {
            "type": "resource_link",
            "uri": MAIN,
            "name": "main.rs",
            "description": "Primary entry point",
            "mimeType": RUST,
        },
        ResourceLink(MAIN, "main.rs", description="Primary entry point", mime_type=RUST),
    ),
    Content("000", "embedded", {"type": "resource", "resource": TITLED}, EmbeddedResource(TITLED)),
    Content("001", "text", TEXT, Text("Tool result text")),
    Content(
        "001",
        "image",
        {"type": "image", "data": "base64-encoded-data", "mimeType": "image/png", "annotations": FOR_USER},
        Image(PNG_TEXT, "image/png", annotations=FOR_USER),
    ),
    Content(
        "001",
        "audio",
        {"type": "audio", "data": "base64-encoded-audio-data", "mimeType": "audio/wav"},
        Audio(WAV_TEXT, "audio/wav"),
    ),
    Content(
        "001",
        "link",
        {
            "type": "resource_link",
            "uri": MAIN,
            "name": "main.rs",
            "description": "Primary application entry point",
            "mimeType": RUST,
        },
        ResourceLink(MAIN, "main.rs", description="Primary application entry point", mime_type=RUST),
    ),
    Content("001", "embedded", {"type": "resource", "resource": ANNOTATED}, EmbeddedResource(ANNOTATED)),
    Content("003", "text", TEXT, Text("Tool result text")),
    Content(
        "003",
        "image",
        {"type": "image", "data": "base64-encoded-data", "mimeType": "image/png"},
        Image(PNG_TEXT, "image/png"),
    ),
    Content("003", "embedded", {"type": "resource", "resource": NOTE}, EmbeddedResource(NOTE)),
]

NOTICES = [Notice(seed, CHANGED) for seed in FILES]

NAMES = ["getUser", "DATA_EXPORT_v2", "admin.tools.list"]  # seed 001


def printed(seed: str) -> list[Object]:
    """Every object of ours that one seed prints."""
    found: list[Object] = []
    for capability in CAPABILITIES:
        if capability.seed == seed:
            found.append(capability.printed)
    for page in PAGES:
        if page.seed == seed:
            found += [page.request, page.response]
    for exchange in EXCHANGES:
        if exchange.seed == seed:
            found.append(exchange.response["result"] if exchange.bare else exchange.response)
            if exchange.asked:
                found.append(exchange.request)
    for failure in FAILURES:
        if failure.seed == seed:
            found.append(failure.response)
    alone: list[Definition | Content | Notice | EmptySchema] = [*DEFINITIONS, *CONTENT, *NOTICES, *EMPTY_SCHEMAS]
    found += [each.printed for each in alone if each.seed == seed]
    return found
