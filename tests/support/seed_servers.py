"""Servers that say what the seed texts print: schemas as printed, settings by default (but for one at most)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from handrail import Audio, EmbeddedResource, Image, ResourceLink, Server, Text, ToolError
from seeds_data import (
    ABOUT_WEATHER,
    ANNOTATED,
    CITY,
    CITY_AND_UNITS,
    CLOSED,
    DEPARTURE,
    FOR_USER,
    ICONS,
    IMPERIAL,
    MAIN,
    MEASURED,
    MEASUREMENT,
    NAMES,
    NO_RESULTS,
    NOTE,
    NUMBERS,
    NUMBERS_DRAFT_07,
    OPEN,
    QUERY,
    RATE_LIMIT,
    RUST,
    TITLED,
    WEATHER,
)
from subject import PNG, WAV


async def get_weather(location: str) -> str:
    if location != "New York":
        raise ToolError(RATE_LIMIT)
    return WEATHER


def _add_weather(server: Server) -> None:
    server.add(
        get_weather,
        title="Weather Information Provider",
        description=ABOUT_WEATHER,
        input_schema=CITY,
        icons=ICONS,
    )


def weather() -> Server:
    """Seeds 000, 001 and 003: the weather, and a flight that cannot be booked."""
    server = Server("weather")
    _add_weather(server)

    @server.tool
    async def book_flight(departure: str) -> str:
        raise ToolError(DEPARTURE)

    return server


def paged() -> Server:
    """Seeds 000, 001 and 003: a page with one tool before the weather, and one after it."""
    server = Server("paged", page_size=1)

    @server.tool
    async def first() -> str:
        return "first"

    _add_weather(server)

    @server.tool
    async def last() -> str:
        return "last"

    return server


def _add_oldest(server: Server) -> None:
    @server.tool(description="Get current weather information for a specific location", input_schema=CITY_AND_UNITS)
    async def get_weather(location: str, units: Literal["metric", "imperial"] = "metric") -> Any:
        return IMPERIAL if units == "imperial" else {**IMPERIAL, "temperature": 22}

    @server.tool(description="Execute a SQL query on the database", input_schema=QUERY)
    async def query_database(query: str, database: str = "users") -> Any:
        raise ToolError(NO_RESULTS, status="empty_results")


def oldest() -> Server:
    """Seed 002: two tools."""
    server = Server("oldest")
    _add_oldest(server)
    return server


def quiet() -> Server:
    """Seed 002: the same two tools, and no notices."""
    server = Server("quiet", list_changed=False)
    _add_oldest(server)
    return server


def changing() -> Server:
    """A server that can be told to have one tool more."""
    server = Server("changing")
    _add_changes(server)
    return server


def changing_quietly() -> Server:
    server = Server("changing", list_changed=False)
    _add_changes(server)
    return server


def _add_changes(server: Server) -> None:
    @server.tool
    async def grow() -> str:
        async def grown() -> str:
            return "new"

        server.add(grown)
        await asyncio.sleep(0)
        return "one more"


def schemas() -> Server:
    """Seed 001: every tool definition printed by itself, but the second `calculate_sum`."""
    server = Server("schemas")

    @server.tool(
        title="Weather Data Retriever",
        description="Get current weather data for a location",
        input_schema=CITY,
        output_schema=MEASURED,
    )
    async def get_weather_data(location: str) -> Any:
        return MEASUREMENT

    _add_sum(server, NUMBERS)

    @server.tool
    async def get_current_time() -> str:
        """Returns the current server time"""
        return "2025-08-08T12:00:00Z"

    @server.tool(input_schema=CLOSED)
    async def takes_nothing() -> str:
        return "nothing"

    @server.tool(input_schema=OPEN)
    async def takes_anything(**arguments: Any) -> str:
        return ", ".join(arguments)

    return server


def draft07() -> Server:
    """Seed 001: the second `calculate_sum`."""
    server = Server("draft07")
    _add_sum(server, NUMBERS_DRAFT_07)
    return server


def _add_sum(server: Server, schema: dict[str, Any]) -> None:
    @server.tool(description="Add two numbers", input_schema=schema)
    async def calculate_sum(a: float, b: float) -> Any:
        return str(a + b)


def names() -> Server:
    """Seed 001: the three names it gives as examples, and the shortest and longest it allows."""
    server = Server("names")
    for name in [*NAMES, "x", "y" * 128, "z" * 129]:
        server.add(_named(name), name=name)
    return server


def _named(name: str) -> Callable[[], Any]:
    async def named() -> str:
        return name

    return named


def content_000() -> Server:
    server = Server("content")
    _add_text(server)

    @server.tool
    async def image() -> Image:
        return Image(PNG, "image/png")

    @server.tool
    async def audio() -> Audio:
        return Audio(WAV, "audio/wav")

    @server.tool
    async def link() -> ResourceLink:
        return ResourceLink(MAIN, "main.rs", description="Primary entry point", mime_type=RUST)

    @server.tool
    async def embedded() -> EmbeddedResource:
        return EmbeddedResource(TITLED)

    return server


def content_001() -> Server:
    server = Server("content")
    _add_text(server)

    @server.tool
    async def image() -> Image:
        return Image(PNG, "image/png", annotations=FOR_USER)

    @server.tool
    async def audio() -> Audio:
        return Audio(WAV, "audio/wav")

    @server.tool
    async def link() -> ResourceLink:
        return ResourceLink(MAIN, "main.rs", description="Primary application entry point", mime_type=RUST)

    @server.tool
    async def embedded() -> EmbeddedResource:
        return EmbeddedResource(ANNOTATED)

    return server


def content_003() -> Server:
    server = Server("content")
    _add_text(server)

    @server.tool
    async def image() -> Image:
        return Image(PNG, "image/png")

    @server.tool
    async def embedded() -> EmbeddedResource:
        return EmbeddedResource(NOTE)

    return server


def _add_text(server: Server) -> None:
    @server.tool
    async def text() -> Text:
        return Text("Tool result text")


def pocket() -> Server:
    """Seed 004: the tool of its one call, whatever it is called, and one that fails."""
    server = Server("pocket")

    async def whatever() -> str:
        return "…"

    server.add(whatever, name="<tool-name>")

    @server.tool
    async def fails() -> str:
        raise ToolError("It ran, and failed.")

    return server


def pocket_pages() -> Server:
    """Seed 004: two pages."""
    server = Server("pages", page_size=1)
    server.add(_named("one"), name="one")
    server.add(_named("two"), name="two")
    return server
