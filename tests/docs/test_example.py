"""The example: `make demo` and its walk, each tool once, and what its database refuses."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import wave
import zlib
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from examples.everyday import CLIMATE, DOCUMENTS, MAX_ROWS, server
from handrail import Audio, Client, EmbeddedResource, Image, RemoteProtocolError, ResourceLink, Text
from handrail.model import Json, Object
from handrail.testing import Peer
from paths import ROOT
from patience import PATIENCE
from rigs_console import Page

EXAMPLES = ROOT / "examples"
GATEWAY_GUARDS = "handrail: guards: built in; there is no handrail.toml in this folder\n"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with Peer(server) as each:
        yield each


@pytest.fixture
def no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


def answering(**content: Json) -> Peer:
    """A client whose user fills in every form like this."""
    return Peer(server, capabilities={"elicitation": {}}, answers=lambda *_: {"action": "accept", "content": content})


def saying(action: str) -> Peer:
    return Peer(server, capabilities={"elicitation": {}}, answers=lambda *_: {"action": action})


async def structured(peer: Peer, name: str, arguments: Object) -> Json:
    result = await peer.call(name, arguments)
    assert not result.is_error, result.text
    return result.structured


async def status_of(peer: Peer, order: int) -> Json:
    query = f"SELECT status FROM orders WHERE id = {order}"
    return (await structured(peer, "query_database", {"query": query, "database": "orders"}))["rows"][0][0]


# The walk


def walk(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "PYTHONUTF8": "1", **environment},
    )


def test_the_walk_meets_what_it_expects_and_reads_well_without_colours() -> None:
    done = walk(str(EXAMPLES / "walk.py"))
    assert (done.returncode, done.stderr) == (0, GATEWAY_GUARDS), done.stdout
    for step in ("list", "call", "error", "progress", "ask", "one call, every revision, one process"):
        assert f"\n== {step} =" in done.stdout
    for step in ("three servers in one, one of them of 2024", "every revision in front, two others behind"):
        assert f"\n== gateway: {step} =" in done.stdout
    assert '2024-10-07  {"toolResult": ["lamps"]}' in done.stdout
    assert '2024-10-07  result  {"toolResult": 5}' in done.stdout
    assert "[image/png, " in done.stdout and "[audio/wav, 4,044 bytes]" in done.stdout
    assert "did you mean units?" in done.stdout
    assert "step 4 of 4" in done.stdout
    assert "Bonjour, Ada." in done.stdout
    assert "\n  NO" not in done.stdout and "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert done.stdout.endswith("answers as expected.\n")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("from handrail import Server; Server('everyday').run()", id="without tools"),
        pytest.param("print('hello')", id="no server"),
        pytest.param("raise SystemExit(3)", id="gone at once"),
    ],
)
def test_the_walk_fails_if_the_server_answers_otherwise(code: str, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(code, "utf-8")
    done = walk(str(EXAMPLES / "walk.py"), str(other))
    assert done.returncode == 1
    assert "\n  NO" in done.stdout and "Traceback" not in done.stderr


# make demo


def test_the_demo_says_where_everything_is_and_walks_without_a_terminal_for_its_time() -> None:
    began = time.monotonic()
    done = walk(str(EXAMPLES / "demo.py"), DEMO_SECONDS="4")
    assert time.monotonic() - began >= 4
    told = "handrail: guards: built in; there is no handrail.toml beside everyday.py or in this folder\n"
    assert (done.returncode, done.stderr) == (0, told + 2 * GATEWAY_GUARDS), done.stdout
    assert re.search(r"^Console:   http://127\.0\.0\.1:\d+/#code=\S{32}$", done.stdout, re.MULTILINE)
    endpoint = re.search(r"^Endpoint:  (http://127\.0\.0\.1:\d+/mcp)$", done.stdout, re.MULTILINE)
    entry = json.loads(done.stdout[done.stdout.index("{") : done.stdout.index("\n}") + 2])
    assert endpoint and entry == {"mcpServers": {"everyday": {"type": "http", "url": endpoint[1]}}}
    gateway = done.stdout[done.stdout.index("behind a gateway:") :]
    assert re.search(r"^Console:   http://127\.0\.0\.1:\d+/#code=\S{32}$", gateway, re.MULTILINE)
    address = re.search(r"^Endpoint:  (http://127\.0\.0\.1:\d+/mcp)$", gateway, re.MULTILINE)
    assert address and address[1] != endpoint[1]
    assert done.stdout.endswith("34 of 34 answers as expected.\n")


async def test_the_demo_has_sample_calls_and_one_that_waits_until_ctrl_c() -> None:
    environment = {**os.environ, "SAMPLE": "1", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / "demo.py"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**environment, "DEMO_SECONDS": "600"},
    )
    assert process.stdout is not None
    url, code = (await process.stdout.readline()).decode().removeprefix("Console:").strip().split("/#code=")
    page = Page(aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)), url)
    await page.sign_in(code)
    await page.listen()
    async with asyncio.timeout(PATIENCE):
        while (await page.event("tick"))["totals"]["calls"] < 10:
            pass
    [waiting] = (await page.get("approvals"))["open"]
    assert (waiting["tool"], waiting["client"], waiting["arguments"]) == ("cancel_order", "assistant", {"order_id": 3})
    await page.close()
    process.send_signal(signal.SIGINT)
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0 and b"34 of 34" in said


# Each tool once


async def test_every_tool_says_what_it_does_and_whether_it_changes_anything(peer: Peer) -> None:
    tools = {tool.name: tool for tool in await peer.tools()}
    assert set(tools) == {
        *("get_weather", "query_database", "get_current_time", "calculate_sum", "calculate_sum_draft07"),
        *("draw_chart", "play_tone", "find_document", "read_document", "slow_count", "greet", "cancel_order"),
    }
    for tool in tools.values():
        assert tool.description and tool.title
        assert isinstance(tool.annotations, dict) and tool.annotations["openWorldHint"] is False
        assert tool.annotations["readOnlyHint"] is (tool.name != "cancel_order")
    assert tools["cancel_order"].annotations == {
        "readOnlyHint": False,
        "destructiveHint": True,
        "idempotentHint": True,
        "openWorldHint": False,
    }


async def test_no_text_number_or_list_a_tool_takes_is_without_a_bound(peer: Peer) -> None:
    by_hand = {"calculate_sum", "calculate_sum_draft07"}  # two numbers, as the specification prints them
    bounds = {"string": "maxLength", "array": "maxItems", "number": "maximum", "integer": "maximum"}
    for tool in await peer.tools():
        for name, field in tool.input_schema.get("properties", {}).items():
            if tool.name not in by_hand and "enum" not in field:
                assert bounds[field["type"]] in field, f"{tool.name}.{name}"


async def test_get_weather_gives_an_average_and_says_so(peer: Peer) -> None:
    metric = await structured(peer, "get_weather", {"location": " new york "})
    assert metric["location"] == "New York" and metric["unit"] == "°C" and metric["temperature"] in CLIMATE["New York"]
    assert "shipped with this example" in metric["source"]
    imperial = await structured(peer, "get_weather", {"location": "Lima", "units": "imperial"})
    assert imperial["unit"] == "°F" and 60 < imperial["temperature"] < 77


async def test_get_weather_names_the_known_cities_when_it_does_not_know_one(peer: Peer) -> None:
    result = await peer.call("get_weather", {"location": "Atlantis"})
    assert result.is_error and "Atlantis" in result.text and all(city in result.text for city in CLIMATE)


async def test_get_current_time_takes_nothing_and_gives_utc(peer: Peer) -> None:
    assert datetime.fromisoformat((await peer.call("get_current_time")).text).utcoffset() == timedelta(0)


@pytest.mark.parametrize("name", ["calculate_sum", "calculate_sum_draft07"])
async def test_calculate_sum_adds(peer: Peer, name: str) -> None:
    assert (await peer.call(name, {"a": 2, "b": 0.5})).structured == {"result": 2.5}
    assert (await peer.call(name, {"a": 1e308, "b": 1e308})).is_error


async def test_the_schemas_of_both_sums_are_kept_as_written(peer: Peer) -> None:
    tools = {tool.name: tool.input_schema for tool in await peer.tools()}
    numbers = {"a": {"type": "number"}, "b": {"type": "number"}}
    written: Object = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    assert tools["calculate_sum"] == written
    assert tools["calculate_sum_draft07"] == {"$schema": "http://json-schema.org/draft-07/schema#", **written}


async def test_draw_chart_draws_bars_as_png(peer: Peer) -> None:
    [image] = (await peer.call("draw_chart", {"values": [0, 5, 10]})).content
    assert isinstance(image, Image) and image.mime_type == "image/png"
    png = base64.b64decode(image.data)
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(png):
        size, kind = struct.unpack_from(">I4s", png, at)
        chunks[kind] = png[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", png, at + 8 + size)[0] == zlib.crc32(kind + chunks[kind])
        at += 12 + size
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    pixels = zlib.decompress(chunks[b"IDAT"])
    lines = [pixels[row * (width + 1) + 1 : (row + 1) * (width + 1)] for row in range(height)]
    dark = [sum(line[bar * width // 3] < 128 for line in lines) for bar in range(3)]
    assert dark == [0, height // 2, height]


async def test_play_tone_gives_a_wav_of_the_length_asked_for(peer: Peer) -> None:
    [audio] = (await peer.call("play_tone", {"frequency": 440, "seconds": 1.5})).content
    assert isinstance(audio, Audio) and audio.mime_type == "audio/wav"
    with wave.open(io.BytesIO(base64.b64decode(audio.data))) as sound:
        assert sound.getnframes() / sound.getframerate() == 1.5


async def test_a_document_is_found_and_read(peer: Peer) -> None:
    [link] = (await peer.call("find_document", {"word": "Kettles"})).content
    assert isinstance(link, ResourceLink)
    [document] = (await peer.call("read_document", {"name": link.name})).content
    assert isinstance(document, EmbeddedResource)
    assert document.resource["uri"] == link.uri and len(document.resource["text"].encode()) == link.size
    assert "returns" in (await peer.call("find_document", {"word": "dragons"})).text


async def test_every_document_is_a_resource_of_the_uri_that_the_tools_name() -> None:
    async with Client(server) as client:
        [template] = await client.templates()
        names = (await client.complete(template, "name")).values
        assert names == list(DOCUMENTS) and (await client.complete(template, "name", "s")).values == ["shipping"]
        for name in names:
            link = (await client.call("find_document", {"word": DOCUMENTS[name][:40]})).content[0]
            assert isinstance(link, ResourceLink) and template.matches(link.uri)
            assert (await client.read(link.uri)).text == DOCUMENTS[name]
        with pytest.raises(RemoteProtocolError, match="not found: shop://documents/dragons"):
            await client.read("shop://documents/dragons")


async def test_the_prompt_has_the_document_and_the_question() -> None:
    async with Client(server) as client:
        [prompt] = await client.prompts()
        assert prompt.title and prompt.description and all(each["description"] for each in prompt.arguments)
        found = await client.prompt(prompt.name, {"question": "Where is it?", "document": "shipping"})
        document, question = (message.content for message in found.messages)
        assert isinstance(document, EmbeddedResource) and document.resource["text"] == DOCUMENTS["shipping"]
        assert isinstance(question, Text) and "Where is it?" in question.text
        assert (await client.complete(prompt, "document", "w")).values == ["warranty"]


async def test_slow_count_tells_its_progress(peer: Peer) -> None:
    result = await peer.call("slow_count", {"steps": 2}, progressToken="count")
    assert result.content == [Text("Counted to 2.")]
    assert [(each["params"]["progress"], each["params"]["total"]) for each in peer.notices] == [(1, 2), (2, 2)]


@pytest.mark.parametrize("revision", ["2025-06-18", "2025-11-25", "pocket", "2026-07-28"])
async def test_greet_asks_for_a_name(revision: str) -> None:
    def answers(method: str, params: Object) -> Object:
        return {"action": "accept", "content": {"name": "Ada", "language": "German"}}

    async with Peer(server, revision=revision, capabilities={"elicitation": {}}, answers=answers) as peer:
        assert (await peer.call("greet")).text == "Guten Tag, Ada."


async def test_greet_does_without_a_name() -> None:
    async with saying("decline") as peer:
        assert (await peer.call("greet")).text == "Hello, whoever you are."


# The tool that destroys something


async def test_cancel_order_cancels_once_the_person_agrees_and_twice_is_like_once() -> None:
    async with answering() as peer:
        assert (await peer.call("cancel_order", {"order_id": 1})).text == "Order 1 is cancelled."
        again = await peer.call("cancel_order", {"order_id": 1})
        assert not again.is_error and "already" in again.text
        assert await status_of(peer, 1) == "cancelled"


@pytest.mark.parametrize("unwilling", [saying("decline"), saying("cancel")])
async def test_cancel_order_leaves_the_order_unless_the_person_agrees(unwilling: Peer) -> None:
    async with unwilling as peer:
        assert "was not approved" in (await peer.call("cancel_order", {"order_id": 1})).text
        assert await status_of(peer, 1) == "open"


async def test_cancel_order_does_nothing_once_the_call_is_cancelled() -> None:
    asked, decided = asyncio.Event(), asyncio.Event()

    async def answers(method: str, params: Object) -> Object:
        asked.set()
        await decided.wait()
        return {"action": "accept", "content": {}}

    async with Peer(server, capabilities={"elicitation": {}}, answers=answers) as peer:
        call = asyncio.create_task(peer.request("tools/call", {"name": "cancel_order", "arguments": {"order_id": 1}}))
        await asked.wait()
        await peer.notify("notifications/cancelled", {"requestId": 2})  # 1 was the handshake
        decided.set()
        assert [await status_of(peer, 1) for _ in range(10)] == ["open"] * 10
        call.cancel()


async def test_cancel_order_does_nothing_for_a_client_that_cannot_ask(peer: Peer) -> None:
    assert (await peer.call("cancel_order", {"order_id": 1})).is_error
    assert await status_of(peer, 1) == "open"


@pytest.mark.parametrize(("order", "why"), [(2, "shipped"), (99, "no order 99")])
async def test_cancel_order_says_why_it_cannot(order: int, why: str) -> None:
    async with answering() as peer:
        result = await peer.call("cancel_order", {"order_id": order})
    assert result.is_error and why in result.text


# The database


async def test_query_database_reads_the_database_it_is_told(peer: Peer) -> None:
    result = await peer.call("query_database", {"query": "SELECT id, name FROM users WHERE city = 'Paris'"})
    assert result.structured == {"columns": ["id", "name"], "rows": [[2, "Edsger"]], "more": False}
    result = await peer.call("query_database", {"query": "SELECT count(*) AS n FROM orders", "database": "orders"})
    assert result.structured == {"columns": ["n"], "rows": [[4]], "more": False}


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO users VALUES (9, 'Eve', 'Paris')",
        "INSERT INTO users VALUES (9, 'Eve', 'Paris') RETURNING id",
        "UPDATE users SET name = 'Eve'",
        "DELETE FROM users",
        "DROP TABLE users",
        "CREATE TEMP TABLE t (x)",
        "BEGIN IMMEDIATE",
        "VACUUM INTO 'copy.db'",
        "ATTACH 'orders.db' AS other",
        "PRAGMA writable_schema = 1",
        "PRAGMA table_info(users)",
        "SELECT * FROM pragma_table_info('users')",
        "SELECT load_extension('anything')",
    ],
)
@pytest.mark.usefixtures("no_new_file")
async def test_query_database_refuses_all_but_reading(peer: Peer, query: str) -> None:
    result = await peer.call("query_database", {"query": query})
    assert result.is_error and "Only reading is allowed" in result.text
    rows = (await structured(peer, "query_database", {"query": "SELECT name FROM users"}))["rows"]
    assert rows == [["Ada"], ["Edsger"], ["Grace"], ["Hidetoshi"]]


@pytest.mark.parametrize("query", ["SELECT 1; DELETE FROM users", "-- nothing", " ", "SELECT '\0'", "REINDEX"])
async def test_query_database_wants_one_select(peer: Peer, query: str) -> None:
    assert (await peer.call("query_database", {"query": query})).is_error


async def test_query_database_helps_with_a_mistake(peer: Peer) -> None:
    result = await peer.call("query_database", {"query": "SELECT email FROM users"})
    assert result.is_error and "no such column: email" in result.text and "users(id, name, city)" in result.text


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(ENDLESS + "SELECT sum(i) FROM n", id="a sum without end"),
        pytest.param(ENDLESS + "SELECT i FROM n WHERE i < 0", id="a search without end"),
        pytest.param(ENDLESS + "SELECT i FROM n ORDER BY zeroblob(9000)", id="a sort without end"),
        pytest.param("SELECT count(*) FROM users" + "".join(f", users u{i}" for i in range(20)), id="join"),
    ],
)
async def test_query_database_stops_an_endless_query(peer: Peer, query: str) -> None:
    result = await peer.call("query_database", {"query": query})
    assert result.is_error and "stopped after" in result.text


async def test_query_database_bounds_what_comes_back(peer: Peer) -> None:
    many = await structured(peer, "query_database", {"query": ENDLESS + "SELECT i FROM n"})
    assert many["rows"] == [[i + 1] for i in range(MAX_ROWS)] and many["more"] is True
    long = await structured(peer, "query_database", {"query": "SELECT printf('%.*c', 9000, 'x')"})
    assert len(long["rows"][0][0]) < 300
    huge = await peer.call("query_database", {"query": "SELECT zeroblob(1000000000)"})
    assert huge.is_error and "too big" in huge.text
    wide = await peer.call("query_database", {"query": "SELECT " + ", ".join("1" * 33)})
    assert wide.is_error and "too many columns" in wide.text


async def test_query_database_gives_what_json_has_no_word_for_as_text(peer: Peer) -> None:
    query = "SELECT 9e999, x'00ff', CAST(x'ff' AS TEXT), NULL"
    assert (await structured(peer, "query_database", {"query": query}))["rows"] == [
        ["inf", "<2 bytes>", "\ufffd", None]
    ]
