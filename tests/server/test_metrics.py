"""What a server tells of itself while it runs: numbers for Prometheus, and a line in the log for each request."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families

from faults import put_away
from handrail import Call, Principal, Server, ToolError
from handrail.guards.identity import ApiKeys
from handrail.observe.metrics import BUCKETS, Metrics, render
from paths import SUPPORT
from patience import PATIENCE
from requirements import requirement
from servers_http import Client, Desk, closed as closed, fetch, served, until
from wires_http import send_request

HERE = SUPPORT
R4, R5 = "2025-11-25", "2026-07-28"
REVISIONS = ("2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", R4, "pocket", R5)
TOKEN, _ = ApiKeys.new()
ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CANARY = "hunter2-canary"
LOADED = time.time()

Ran = Callable[[str, str], None]
Labels = frozenset[tuple[str, str]]

posix = pytest.mark.skipif(os.name != "posix", reason="fork")


class Page:
    """What Prometheus makes of the text."""

    def __init__(self, body: str) -> None:
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, Labels], float] = {}
        for family in text_string_to_metric_families(body):
            assert family.name not in self.kinds, "the lines of a family stand together"
            assert family.documentation
            self.kinds[family.name] = family.type
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.samples
                self.samples[key] = sample.value

    def get(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))

    def total(self, name: str, **labels: str) -> float:
        """Over all workers."""
        return sum(value for (found, has), value in self.samples.items() if found == name and has >= labels.items())

    def values(self, name: str, label: str) -> set[str]:
        return {dict(labels)[label] for found, labels in self.samples if found == name}


async def scrape(url: str, token: str = TOKEN) -> Page:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    reply = await fetch(url.removesuffix("/mcp") + "/metrics", "GET", headers)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Page((await reply.body()).decode())


async def status(url: str, *headers: tuple[str, str], verb: str = "GET") -> int:
    reply = await fetch(url, verb, list(headers))
    assert not [name for name in reply.headers if name.startswith("access-control-")]
    if reply.status != 200:
        assert b"handrail_" not in await reply.body()
    return reply.status


# Calls


def outcomes() -> Server:
    """A tool for each way a call can end."""
    server = Server("outcomes")

    @server.tool
    async def fine(text: str = "") -> str:
        """Works."""
        return text

    @server.tool(inline=True)
    def in_place() -> str:
        """Works on the loop."""
        return "done"

    @server.tool
    def in_thread() -> str:
        """Works in a thread."""
        return "done"

    @server.tool
    async def fails() -> str:
        """Tells why it cannot."""
        raise ToolError("no")

    @server.tool
    async def crashes() -> str:
        """Breaks."""
        raise RuntimeError(CANARY)

    @server.tool(timeout=0.01)
    async def slow() -> str:
        """Never ends."""
        await asyncio.Event().wait()
        return "never"

    @server.tool(timeout=0.01)
    async def stubborn() -> str:
        """Does not want to end."""
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "too late"

    @server.tool
    async def asks(call: Call) -> str:
        """Asks for something."""
        return (await call.ask("Your name?", {"type": "object", "properties": {"a": {"type": "string"}}})).action

    @server.tool
    async def samples(call: Call) -> str:
        """Needs what the client has not."""
        call.require("sampling")
        return "never"

    @server.tool(scopes={"admin"})
    async def forbidden() -> str:
        """Not for everybody."""
        return "never"

    @server.tool(scopes={"admin"}, hide=True)
    async def hidden() -> str:
        """Not even seen by everybody."""
        return "never"

    return server


ENDINGS = [
    ("fine", {}, "fine", "ok"),
    ("in_place", {}, "in_place", "ok"),
    ("in_thread", {}, "in_thread", "ok"),
    ("fails", {}, "fails", "tool_error"),
    ("crashes", {}, "crashes", "tool_error"),
    ("fine", {"text": 17}, "fine", "bad_arguments"),
    ("slow", {}, "slow", "timeout"),
    ("stubborn", {}, "stubborn", "timeout"),
    ("asks", {}, "asks", "input_required"),
    ("samples", {}, "samples", "needs_capability"),
    ("forbidden", {}, "forbidden", "forbidden"),
    ("hidden", {}, "", "unknown_tool"),
    (CANARY, {}, "", "unknown_tool"),
]


@pytest.mark.parametrize(("name", "arguments", "tool", "outcome"), ENDINGS)
async def test_a_call_is_counted_by_tool_and_outcome(
    name: str, arguments: dict[str, Any], tool: str, outcome: str
) -> None:
    async with served(outcomes().asgi(metrics_token=TOKEN)) as url:
        client = Client(url, R5)
        for number in range(2):
            call = client.call(
                number, name, arguments, **{"io.modelcontextprotocol/clientCapabilities": {"elicitation": {}}}
            )
            await (await client.post(call)).body()
        page = await scrape(url)
    calls = {key: value for key, value in page.samples.items() if key[0] == "handrail_calls_total"}
    assert calls == {("handrail_calls_total", frozenset({("tool", tool), ("outcome", outcome)})): 2}
    assert page.kinds["handrail_calls"] == "counter"


@pytest.mark.parametrize("revision", REVISIONS)
async def test_every_revision_is_counted_alike(revision: str) -> None:
    async with served(outcomes().asgi(metrics_token=TOKEN)) as url:
        client = await Client(url, revision).open()
        for name, arguments in (("fine", {}), ("fine", {"text": 1}), ("fails", {}), ("nobody", {})):
            await client.ask(client.call(name + str(arguments), name, arguments))
        page = await scrape(url)
    known = [("fine", "ok"), ("fine", "bad_arguments"), ("fails", "tool_error"), ("", "unknown_tool")]
    assert [page.get("handrail_calls_total", tool=tool, outcome=how) for tool, how in known] == [1] * 4
    assert page.total("handrail_calls_total") == 4


async def test_names_that_peers_make_up_become_no_labels() -> None:
    async with served(outcomes().asgi(metrics_token=TOKEN)) as url:
        client = Client(url, R5)
        for number in range(30):
            await client.ask(client.call(number, f"made-up-{number}"))
        assert await status(url, verb="PROPFIND") == 405
        page = await scrape(url)
    assert page.values("handrail_calls_total", "tool") == {""}
    assert page.values("handrail_http_requests_total", "method") == {"POST", "other"}


async def test_how_long_calls_took_is_a_histogram() -> None:
    async with served(outcomes().asgi(metrics_token=TOKEN)) as url:
        client = Client(url, R5)
        for number in range(3):
            await client.ask(client.call(number, "fine"))
        page = await scrape(url)
    assert page.kinds["handrail_call_seconds"] == "histogram"
    bounds = [*map(str, BUCKETS), "+Inf"]
    counts = [page.get("handrail_call_seconds_bucket", tool="fine", le=bound) for bound in bounds]
    assert counts == sorted(counts, key=lambda each: each or 0) and counts[-1] == 3
    assert page.get("handrail_call_seconds_count", tool="fine") == 3
    assert (page.get("handrail_call_seconds_sum", tool="fine") or 0) > 0


async def test_what_goes_on_is_seen_while_it_goes_on() -> None:
    desk = Desk()
    async with served(desk.server.asgi(metrics_token=TOKEN)) as url:
        client = Client(url, R5)
        names = ("handrail_calls_in_flight", "handrail_http_open_streams")
        page = await scrape(url)
        assert [page.get(name) for name in names] == [0, 0]
        reply = await client.post(client.call(1, "held", {"mark": "a"}, progressToken=1))
        assert reply.is_stream
        page = await scrape(url)
        assert [page.get(name) for name in names] == [1, 1]
        desk.gates["a"].set()
        await client.read(reply)
        page = await scrape(url)
        assert [page.get(name) for name in names] == [0, 0]


async def test_a_caller_who_goes_away_is_counted_as_such() -> None:
    desk = Desk()
    async with served(desk.server.asgi(metrics_token=TOKEN)) as url:
        client = Client(url, R5)
        call = client.call(1, "held", {"mark": "a", "before": 0})
        asked = asyncio.create_task(client.post(call))
        await desk.wait(desk.begun["a"])
        asked.cancel()
        await desk.wait(desk.ended["a"])
        page = await scrape(url)
    assert page.get("handrail_calls_total", tool="held", outcome="cancelled") == 1
    assert page.get("handrail_calls_in_flight") == 0


async def test_requests_are_counted_by_method_and_status() -> None:
    async with served(outcomes().asgi(metrics_token=TOKEN)) as url:
        client = Client(url, R5)
        await client.ask(client.call(1, "fine"))
        await client.post(b"not json")
        await fetch(url + "/nowhere", "GET")
        await fetch(url, "PUT")
        await fetch(url, "GET", {"Host": "evil.example"})
        page = await scrape(url)
    seen = {(dict(labels)["method"], dict(labels)["status"]) for name, labels in page.samples if "requests" in name}
    assert seen == {("POST", "200"), ("POST", "400"), ("GET", "404"), ("PUT", "405"), ("GET", "403")}


async def test_tools_are_counted_as_they_come_and_go() -> None:
    server = outcomes()
    async with served(server.asgi(metrics_token=TOKEN)) as url:
        before = (await scrape(url)).get("handrail_tools")
        server.disable("fine")
        assert (await scrape(url)).get("handrail_tools") == (before or 0) - 1 == len(server.tools)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_the_process_tells_of_itself() -> None:
    async with served(outcomes().asgi(metrics_token=TOKEN)) as url:
        first, second = await scrape(url), await scrape(url)
    assert first.get("process_start_time_seconds") == second.get("process_start_time_seconds")
    began = first.get("process_start_time_seconds") or 0
    assert LOADED - 24 * 3600 < began < LOADED
    assert (first.get("process_resident_memory_bytes") or 0) > 1024 * 1024
    assert (second.get("process_cpu_seconds_total") or 0) >= (first.get("process_cpu_seconds_total") or 0) > 0


# The text


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 2**53), max_size=5))
def test_any_label_is_read_back(values: dict[str, int]) -> None:
    metrics = Metrics()
    for tool, count in values.items():
        metrics.calls.add(tool, "ok", by=count)
    page = Page(render([metrics.snapshot()]).decode())
    assert {tool: page.get("handrail_calls_total", tool=tool, outcome="ok") for tool in values} == values


@given(st.lists(st.floats(0, 1e6) | st.sampled_from(BUCKETS)))
def test_a_histogram_counts_up_to_and_with_its_bounds(observed: list[float]) -> None:
    metrics = Metrics()
    for seconds in observed:
        metrics.call_seconds.observe(seconds, "a")
    page = Page(render([metrics.snapshot()]).decode())
    for bound in BUCKETS:
        wanted = sum(seconds <= bound for seconds in observed)
        assert (page.get("handrail_call_seconds_bucket", tool="a", le=str(bound)) or 0) == wanted
    assert math.isclose(page.get("handrail_call_seconds_sum", tool="a") or 0, math.fsum(observed), abs_tol=1e-3)


def test_workers_stand_side_by_side() -> None:
    one, two = Metrics(), Metrics()
    one.calls.add("a", "ok")
    two.calls.add("a", "ok", by=2)
    two.calls.add("b", "ok")
    page = Page(render([one.snapshot("1"), two.snapshot("2")]).decode())
    assert page.get("handrail_calls_total", tool="a", outcome="ok", worker="2") == 2
    assert page.total("handrail_calls_total") == 4


# Who may read them


@requirement("P-23", everywhere=True)
async def test_p23_without_a_token_there_is_no_page() -> None:
    async with served(outcomes().asgi()) as url:
        assert await status(url.replace("/mcp", "/metrics")) == 404
    async with served(outcomes().asgi(access_log=True)) as url:
        assert await status(url.replace("/mcp", "/metrics")) == 404


BEARER = ("Authorization", f"Bearer {TOKEN}")


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ([BEARER], 200),
        ([("authorization", f"bearer {TOKEN}")], 200),
        ([], 401),
        ([("Authorization", "Bearer ")], 401),
        ([("Authorization", f"Bearer {TOKEN}x")], 401),
        ([("Authorization", f"Bearer {TOKEN[:-1]}")], 401),
        ([("Authorization", f"Basic {TOKEN}")], 401),
        ([("Authorization", TOKEN)], 401),
        ([("X-Api-Key", TOKEN)], 401),
        ([BEARER, BEARER], 400),
    ],
)
@requirement("P-22")
async def test_only_the_token_opens_the_page(headers: list[tuple[str, str]], wanted: int, ran: Ran) -> None:
    async with served(outcomes().asgi(metrics_token=TOKEN)) as url:
        page = url.replace("/mcp", "/metrics")
        assert await status(page, *headers) == wanted
        assert await status(f"{page}?token={TOKEN}&access_token={TOKEN}", *headers) == wanted
    ran(R5, "http")


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ([("Host", "evil.example")], 403),
        ([("Host", "localhost.evil.example")], 403),
        ([("Host", "localhost"), ("Host", "localhost")], 400),
        ([("Origin", "http://evil.example")], 403),
        ([("Origin", "null")], 403),
        ([("Host", "localhost")], 200),
        ([("Host", "[::1]:9100")], 200),
        ([("Host", "tools.example")], 200),
    ],
)
@requirement("P-22")
async def test_the_page_has_the_same_door_as_everything(headers: list[tuple[str, str]], wanted: int, ran: Ran) -> None:
    async with served(outcomes().asgi(metrics_token=TOKEN, hosts=["tools.example"])) as url:
        assert await status(url.replace("/mcp", "/metrics"), BEARER, *headers) == wanted
    ran(R5, "http")


@pytest.mark.parametrize("path", ["/metrics", "/tools/metrics"])
async def test_mounted_the_page_is_beside_the_endpoint(path: str) -> None:
    """Some applications leave the place of a mount in the path, some take it out."""
    said: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        said.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", BEARER[1].encode())]
    scope = {"type": "http", "method": "GET", "path": path, "root_path": "/tools", "query_string": b""}
    endpoint = outcomes().asgi(metrics_token=TOKEN)
    await endpoint(scope | {"headers": headers}, receive, send)
    await endpoint.stop()
    assert said[0]["status"] == 200 and b"handrail_tools" in said[1]["body"]


@requirement("P-23", everywhere=True)
async def test_p23_the_token_of_the_page_opens_nothing_else() -> None:
    key, stored = ApiKeys.new()
    async with served(outcomes().asgi(metrics_token=TOKEN, auth=ApiKeys({"alice": stored}))) as url:
        client = Client(url, R5)
        assert (await client.post(client.call(1, "fine"), Authorization=f"Bearer {TOKEN}")).status == 401
        assert (await client.post(client.call(1, "fine"), Authorization=f"Bearer {key}")).status == 200
        page = url.replace("/mcp", "/metrics")
        assert await status(page, ("Authorization", f"Bearer {key}")) == 401
        assert await status(page, BEARER, verb="POST") == 405


@pytest.mark.parametrize("token", ["", "secret", "changeme-changeme-changeme", "aaaaaaaaaaaaaaaaaaaaaaaa"])
def test_a_weak_token_prevents_the_start(token: str) -> None:
    with pytest.raises(ValueError, match="weak or default"):
        outcomes().asgi(metrics_token=token)


# Processes


@asynccontextmanager
async def process(**options: Any) -> AsyncIterator[tuple[list[str], asyncio.subprocess.Process]]:
    """A server in a process of its own, and where it listens: metrics first, then the endpoint."""
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "servers_watch.py"),
        json.dumps(options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert running.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE):
            lines = [await running.stdout.readline() for _ in range(1 + ("metrics" in options))]
        yield [line.decode().strip() for line in lines], running
    finally:
        await put_away(running, group=True)


async def ended(running: asyncio.subprocess.Process) -> str:
    """Ask it to end; what it wrote to standard error meanwhile."""
    running.terminate()
    async with asyncio.timeout(PATIENCE):
        _, errors = await running.communicate()
    assert running.returncode == 0, errors.decode()
    return errors.decode()


@posix
@requirement("P-22")
async def test_the_page_has_a_listener_of_its_own(ran: Ran) -> None:
    async with process(metrics="127.0.0.1:0") as ((other, url), running):
        client = Client(url, R5)
        await client.ask(client.call(1, "echo", {"text": "x"}))
        page = await scrape(other, token="")
        assert page.get("handrail_calls_total", tool="echo", outcome="ok") == 1
        assert other.startswith("http://127.0.0.1:")
        assert await status(other + "/metrics", ("Host", "evil.example")) == 403
        assert await status(other + "/metrics", ("Origin", "http://evil.example")) == 403
        assert await status(other + "/mcp") == 404
        assert await status(url.replace("/mcp", "/metrics")) == 404
        ran(R5, "http")
        assert await ended(running) == ""


@posix
async def test_with_a_token_the_listener_wants_it_too() -> None:
    async with process(metrics="127.0.0.1:0", metrics_token=TOKEN, hosts=["tools.example"]) as ((other, url), _):
        assert await status(other + "/metrics") == 401
        assert await status(url.replace("/mcp", "/metrics"), ("Host", "tools.example")) == 401
        assert (await scrape(other)).get("handrail_tools") == 1
        assert (await scrape(url)).get("handrail_tools") == 1


@posix
async def test_whichever_worker_is_asked_tells_of_all() -> None:
    async with process(metrics="127.0.0.1:0", workers=2) as ((other, url), running):
        client, calls, page = Client(url, R5), 0, Page("")
        before: dict[tuple[str, Labels], float] = {}
        async with asyncio.timeout(PATIENCE):
            # Until both have begun, and each has served one: which of them takes a connection is up to the system.
            while len({dict(labels)["worker"] for name, labels in page.samples if name == "handrail_calls_total"}) < 2:
                calls += 1
                await client.ask(client.call(calls, "echo", {"text": "x"}))
                page = await scrape(other, token="")
                counted = {key: value for key, value in page.samples.items() if page_counts(key[0])}
                assert all(counted[key] >= value for key, value in before.items()), "a number has gone back"
                before = counted
            while page.total("handrail_calls_total", tool="echo", outcome="ok") < calls:
                page = await scrape(other, token="")
        assert page.total("handrail_calls_total") == calls
        assert len(page.values("handrail_tools", "worker")) == 2
        assert await ended(running) == ""


def page_counts(name: str) -> bool:
    return name.endswith(("_total", "_count", "_bucket", "_sum"))


# The access log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What the access log says, in the order it was said."""

    def read() -> list[dict[str, Any]]:
        found = [each.getMessage() for each in caplog.records if each.name == "handrail.access"]
        assert all(each.isascii() and each.isprintable() for each in found)
        return [json.loads(each) for each in found]

    yield read
    logging.getLogger("handrail.access").setLevel(logging.NOTSET)


Lines = Callable[[], list[dict[str, Any]]]


def test_nobody_watches_unless_asked() -> None:
    server = outcomes()
    assert server.asgi().monitor is None and not server.engine.sinks


async def test_there_is_no_access_log_unless_wanted(lines: Lines) -> None:
    async with served(outcomes().asgi(metrics_token=TOKEN)) as url:
        client = Client(url, R5)
        await client.ask(client.call(1, "fine"))
    assert lines() == []


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_request_is_a_line(revision: str, lines: Lines) -> None:
    async with served(outcomes().asgi(access_log=True)) as url:
        client = await Client(url, revision).open()
        message = client.call(1, "fine", {"text": "x"}, traceparent=f"00-{ID}-{PARENT}-01")
        reply = await client.post(message)
        size = len(await reply.body())
        await until(lambda: bool(lines()) and "tool" in lines()[-1])
    line = lines()[-1]
    assert line.pop("ms") >= 0
    assert line == {
        "method": "POST",
        "path": "/mcp",
        "status": 200,
        "bytes": size,
        "principal": "anonymous",
        "mcp_method": "tools/call",
        "tool": "fine",
        "revision": revision,
        "trace": ID,
    }
    if revision != R5:
        opened = [(each["mcp_method"], each["status"], each["revision"]) for each in lines()[:2]]
        assert opened == [("initialize", 200, revision), ("notifications/initialized", 202, revision)]


async def test_what_is_refused_is_a_line_too(lines: Lines) -> None:
    _, stored = ApiKeys.new()
    async with served(outcomes().asgi(access_log=True, auth=ApiKeys({"alice": stored}))) as url:
        client = Client(url, R5)
        await client.post(client.call(1, "fine"))
        await fetch(url + "/nowhere", "GET", {"traceparent": f"00-{ID}-{PARENT}-01"})
        await fetch(url, "GET", {"Host": "evil.example"})
        await until(lambda: len(lines()) == 3)
    assert [(each["status"], each.get("principal"), each.get("trace")) for each in lines()] == [
        (401, None, None),
        (404, None, ID),
        (403, None, None),
    ]


async def test_who_called_is_told_by_the_principals_name(lines: Lines) -> None:
    key, stored = ApiKeys.new()
    async with served(outcomes().asgi(access_log=True, auth=ApiKeys({"alice": stored}))) as url:
        client = Client(url, R5)
        await client.ask(client.call(1, "fine"), Authorization=f"Bearer {key}")
        await until(lambda: bool(lines()))
    assert lines()[0]["principal"] == "alice"


async def test_a_stream_is_told_when_it_ends(lines: Lines) -> None:
    desk = Desk()
    async with served(desk.server.asgi(access_log=True)) as url:
        client = Client(url, R5)
        reply = await client.post(client.call(1, "held", {"mark": "a"}, progressToken=1))
        assert reply.is_stream and lines() == []
        desk.gates["a"].set()
        await client.read(reply)
        await until(lambda: bool(lines()))
    assert (lines()[0]["tool"], lines()[0]["status"]) == ("held", 200)
    assert lines()[0]["bytes"] > 100


async def test_a_caller_who_goes_before_there_is_a_status_has_none(lines: Lines) -> None:
    async with served(outcomes().asgi(access_log=True)) as url:
        client = Client(url, R5)
        reply = await send_request(url, "POST", client.headers() | {"Content-Length": "100000"}, b"{")
        await reply.gone()
        await until(lambda: bool(lines()))
    assert (lines()[0]["status"], lines()[0]["bytes"]) == (499, 0)


async def test_an_application_that_breaks_is_told_as_500(lines: Lines) -> None:
    class Broken(ApiKeys):
        async def verify(self, token: str) -> Principal | None:
            raise RuntimeError("broken")

    _, stored = ApiKeys.new()
    async with served(outcomes().asgi(access_log=True, auth=Broken({"alice": stored}))) as url:
        client = Client(url, R5)
        reply = await client.post(client.call(1, "fine"), Authorization="Bearer x")
        assert reply.status == 500
    assert lines()[0]["status"] == 500


@requirement("P-34")
async def test_no_secret_reaches_log_or_numbers(caplog: pytest.LogCaptureFixture, lines: Lines, ran: Ran) -> None:
    """A canary in every place a client can put one; for R4 also the session id, which is as good as a password."""
    key, stored = ApiKeys.new()
    who = {"Authorization": f"Bearer {key}"}
    seen = [CANARY, key, TOKEN]
    async with served(outcomes().asgi(access_log=True, metrics_token=TOKEN, auth=ApiKeys({"alice": stored}))) as url:
        for revision in (R4, R5):
            client = Client(url, revision)
            if revision == R4:
                hello = {"protocolVersion": R4, "capabilities": {}, "clientInfo": {"name": CANARY, "version": CANARY}}
                client.session = (await client.post(client.message(0, "initialize", hello), **who)).headers[
                    "mcp-session-id"
                ]
                seen.append(client.session)
            for message in (
                client.call(1, "fine", {"text": CANARY}, baggage=CANARY, tracestate=f"a={CANARY}"),
                client.call(CANARY, "fine", {CANARY: 1}),
                client.call(2, CANARY),
                client.call(3, "crashes"),
                client.message(4, "tools/list", {"cursor": CANARY}),
            ):
                await (await client.post(message, Cookie=CANARY, X_Token=CANARY, Referer=CANARY, **who)).body()
                client.url = f"{url}?token={CANARY}"
            await client.post(client.call(5, "fine"), Authorization=f"Bearer {CANARY}")
            ran(revision, "http")
        reply = await fetch(url.replace("/mcp", "/metrics"), "GET", [BEARER])
        numbers = (await reply.body()).decode()
        await until(lambda: lines()[-1]["path"] == "/metrics")
    told = "\n".join(each.getMessage() for each in caplog.records if each.name == "handrail.access")
    assert len(lines()) == 14
    assert [each for each in seen if each in told + numbers] == []


@requirement("P-33")
async def test_foreign_text_cannot_act_in_the_log(lines: Lines, ran: Ran) -> None:
    hostile = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x200B, 0x2028, 0x202E, 0x2066, 0xE0041]))
    server = outcomes()

    @server.tool(name=f"bad{hostile}")
    async def bad() -> str:
        """Has a name nobody should have."""
        return "fine"

    async with served(server.asgi(access_log=True)) as url:
        client = Client(url, R5)
        await client.ask(client.call(1, f"bad{hostile}"))
        await client.post(client.message(2, hostile))
        path = "/%1b%5b31m%0a%7f%c2%9b%e2%80%ae"
        await fetch(url + path, "GET")
        await until(lambda: len(lines()) == 3)
    assert lines()[0]["tool"] == f"bad{hostile}"
    assert lines()[2]["path"].lower() == "/mcp" + path
    ran(R5, "http")


async def test_a_long_path_is_cut(lines: Lines) -> None:
    async with served(outcomes().asgi(access_log=True)) as url:
        await fetch(url + "/" + "x" * 5000, "GET")
        await until(lambda: bool(lines()))
    assert len(lines()[0]["path"]) == 200


@posix
async def test_lines_go_to_standard_error_where_nobody_says_otherwise() -> None:
    async with process(access_log=True) as ((url,), running):
        client = Client(url, R5)
        await client.ask(client.call(1, "echo", {"text": "x"}))
        (line,) = (await ended(running)).splitlines()
    assert json.loads(line)["tool"] == "echo"
