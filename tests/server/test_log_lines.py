"""Foreign text begins no line of our logs, and none that passes for a line of our command (P-33)."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import pytest

from cli_runs import COMMAND, Terminal, handrail
from handrail import Call, Client, Principal, Server, ToolError
from handrail.audit.reader import TrailFile
from handrail.errors import PeerError
from handrail.guards.identity import ApiKeys
from handrail.testing import Peer
from requirements import requirement
from servers_http import Client as ClientOverHttp, closed as closed, fetch, served

FORGED = "handrail: order 7 was approved"
BREAKS = ["\n", "\r", "\r\n", "\n\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
ESCAPES = ["\x1b[2K\x1b[1G", "\x1b]0;title\x07", "\x9b1G", "\x08" * 80, "\u202e"]
HOSTILE = [f"text{each}{FORGED}" for each in (*BREAKS, *ESCAPES)]
MARK = "  | "

hostile = pytest.mark.parametrize("text", HOSTILE, ids=ascii)


class Log(logging.Handler):
    """As a user of the library would set one up, with a format of theirs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records = 0
        self.text = io.StringIO()
        self.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.records += 1
        self.text.write(self.format(record) + "\n")

    def check(self) -> str:
        """Return the text, in which each record has one line, and further lines are marked."""
        text = self.text.getvalue()
        lines = text.splitlines()
        own = [line for line in lines if re.match(r"(DEBUG|INFO|WARNING|ERROR):handrail", line)]
        assert len(own) == self.records
        assert [line for line in lines if line not in own and not line.startswith(MARK)] == []
        assert all(char == "\n" or char.isprintable() for char in text), ascii(text)
        return text


@pytest.fixture
def log() -> Iterator[Log]:
    handler, loggers = Log(), [logging.getLogger("handrail"), logging.getLogger("handrail.access")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.DEBUG)
    loggers[0].addHandler(handler)
    yield handler
    loggers[0].removeHandler(handler)
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


def raises(text: str) -> None:
    raise ValueError(text)


def raises_because(text: str) -> None:
    try:
        raise KeyError(text)
    except KeyError as problem:
        raise RuntimeError(text) from problem


def raises_with_a_note(text: str) -> None:
    problem = ValueError("short")
    problem.add_note(text)
    raise problem


def raises_a_group(text: str) -> None:
    raise ExceptionGroup(text, [ValueError(text)])


def raises_a_class_of_its_own(text: str) -> None:
    raise type("Made", (Exception,), {"__qualname__": text, "__module__": "builtins"})("x")


def breaks_the_output_schema(text: str) -> Annotated[dict[str, int], "numbers"]:
    return {text: text}  # type: ignore[dict-item]  # which is what it tests


def cannot_be_sent(text: str) -> Any:
    return {text: object()}


def fails_with_what_cannot_be_sent(text: str) -> None:
    raise ToolError("no", data={text: type(text, (), {"__repr__": lambda self: text})()})


async def logs(text: str, call: Call) -> None:
    await call.log("error", text, logger=text)


TOOLS: list[Callable[..., Any]] = [
    raises,
    raises_because,
    raises_with_a_note,
    raises_a_group,
    raises_a_class_of_its_own,
    breaks_the_output_schema,
    cannot_be_sent,
    fails_with_what_cannot_be_sent,
    logs,
]


@hostile
@requirement("P-33", everywhere=True)
@pytest.mark.parametrize("tool", TOOLS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("sanitize", [True, False])
async def test_p33_what_a_tool_says_begins_no_record(
    log: Log, text: str, tool: Callable[..., Any], sanitize: bool
) -> None:
    server = Server("shop") if sanitize else Server("shop", sanitize=None)
    server.tool(tool)
    async with Peer(server) as peer:
        await peer.request("tools/call", {"name": tool.__name__, "arguments": {"text": text}})
    shown = log.check()
    assert log.records == (tool is not logs)
    assert tool is logs or tool.__name__ in shown


async def _unknown_tool(peer: Peer, text: str) -> None:
    await peer.request("tools/call", {"name": text, "arguments": {}})


async def _wrong_argument(peer: Peer, text: str) -> None:
    await peer.request("tools/call", {"name": "add", "arguments": {text: text, "n": text}})


async def _repaired_argument(peer: Peer, text: str) -> None:
    await peer.request("tools/call", {"name": "add", "arguments": {"n": {text: "1"}}})


async def _unknown_method(peer: Peer, text: str) -> None:
    await peer.request(text, {text: text})


async def _wrong_level(peer: Peer, text: str) -> None:
    await peer.request("logging/setLevel", {"level": text})


@hostile
@requirement("P-33", everywhere=True)
@pytest.mark.parametrize(
    "ask",
    [_unknown_tool, _wrong_argument, _repaired_argument, _unknown_method, _wrong_level],
    ids=lambda each: each.__name__,
)
async def test_p33_what_a_caller_says_begins_no_record(
    log: Log, text: str, ask: Callable[[Peer, str], Awaitable[None]], tmp_path: Path
) -> None:
    trail = tmp_path / "calls.jsonl"
    server = Server("shop", repair=True, audit=trail, audit_arguments=True)

    @server.tool
    def add(n: dict[str, int]) -> int:
        return sum(n.values())

    @server.middleware
    async def fails(call: Call, following: Any) -> Any:
        try:
            return await following(call)
        finally:
            if call.name != "add":
                raise RuntimeError(call.name)

    async with Peer(server) as peer:
        await ask(peer, text)
    async with Peer(server, revision="2026-07-28") as peer:
        named = {"io.modelcontextprotocol/clientInfo": {"name": text, "version": text}}
        await peer.request("tools/call", {"name": "add", "arguments": {"n": {}}}, named)
        await peer.request("tools/call", {"name": text, "arguments": {"n": {}}}, named)
    log.check()
    lines = [line.decode() for _, line in TrailFile(trail).lines()]
    assert all(line.splitlines() == [line.rstrip("\n")] for line in lines), "one record, one line, for every reader"


@hostile
@requirement("P-33", everywhere=True)
async def test_p33_a_request_over_http_is_one_line_of_the_access_log(log: Log, text: str) -> None:
    class Broken(ApiKeys):
        async def verify(self, token: str) -> Principal | None:
            raise RuntimeError(text)

    header = "".join(char for char in text if (char.isprintable() and char.isascii()) or char == "\x85")
    async with served(Server("shop").asgi(access_log=True, auth=Broken({}))) as url:
        client = ClientOverHttp(url, "2026-07-28")
        for path in (quote(f"/mcp/{text}"), quote(f"/{text}"), "/mcp"):
            to = url.replace("/mcp", path)
            names = {"User-Agent": header, "Mcp-Name": header, "Origin": header, "Authorization": f"Bearer {header}"}
            for extra in (names, {"Authorization": "Bearer x"}):
                reply = await fetch(to, "POST", client.headers() | extra, json.dumps(client.call(1, text)).encode())
                await reply.body()
    shown = log.check()
    assert log.records >= 6 and "RuntimeError" in shown


# What a server says to our client, and to our command

SERVER = """
import json, sys
text = json.load(open(sys.argv[0] + ".json"))
def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked.get("method"), asked.get("params", {})
    if method == "initialize":
        about = {"name": text, "version": text}
        send(id=asked["id"], result={"protocolVersion": "2025-06-18", "capabilities": {"tools": {}, "logging": {}},
             "serverInfo": about, "instructions": text})
    elif method == "tools/list":
        schema = {"type": "object"}
        names = ["fails", "errs", "says", "breaks", "asks", text, text * 20]
        send(id=asked["id"], result={"tools": [{"name": name, "title": text, "description": text, "inputSchema": schema,
             "annotations": {"readOnlyHint": True, "title": text}} for name in names]})
    elif method == "tools/call":
        said = {"level": "error", "data": text, "logger": text}
        send(method="notifications/message", params=said)
        send(method=text, params={text: text})
        print(text, file=sys.stderr, flush=True)
        name, content = params["name"], [{"type": "text", "text": text}]
        if name == "fails":
            send(id=asked["id"], error={"code": -32000, "message": text, "data": text})
        elif name == "breaks":
            send(id=asked["id"], result={"content": text, "isError": text})
        elif name == "errs":
            send(id=asked["id"], result={"content": content, "isError": True})
        else:
            send(id=asked["id"], result={"content": content})
    elif "id" in asked and method:
        send(id=asked["id"], error={"code": -32601, "message": text})
"""


@pytest.fixture
def server(tmp_path: Path, text: str) -> str:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "server.py.json").write_text(json.dumps(text))
    return f"{sys.executable} {tmp_path / 'server.py'}"


@hostile
@requirement("P-33", everywhere=True)
async def test_p33_what_a_server_says_begins_no_record(log: Log, text: str, server: str) -> None:
    async with Client(server, trusted=True) as client:
        await client.tools()
        for tool in ("fails", "errs", "says", "breaks"):
            try:
                await client.call(tool, {})
            except PeerError as problem:
                logging.getLogger("handrail").warning("as an application would: %s", problem, exc_info=True)
    shown = log.check()
    assert "as an application would" in shown and ": standard error: " in shown


@pytest.mark.parametrize(
    "text",
    [
        FORGED,
        *HOSTILE[:2],
        f"text\u2028{FORGED}",
        f"text{ESCAPES[0]}{FORGED}",
        "".join("a" * n + FORGED for n in range(80)),
    ],
    ids=lambda each: ascii(each)[:60],
)
@requirement("P-33", everywhere=True)
@pytest.mark.parametrize(
    "words", ["call fails", "call errs", "call says", "call breaks", "list", "show says", "inspect"]
)
def test_p33_what_a_server_says_passes_for_no_line_of_the_command(
    text: str, words: str, server: str, tmp_path: Path
) -> None:
    verb, *rest = words.split()
    rest += ["--yes"] if verb == "call" else []
    _, shown = Terminal(*COMMAND, verb, server, *rest, home=tmp_path).end()
    drawn = re.sub(r"\x1b\[[0-9;]*[mK]|\r", "", shown.replace("\r\n", "\n"))
    assert FORGED in drawn
    rows = [line[at : at + 80] for line in drawn.splitlines() for at in range(0, len(line), 80)]
    assert [row for row in rows if row.startswith(FORGED)] == []
    done = handrail(verb, server, *rest, home=tmp_path)
    assert [line for line in done.stderr.splitlines() if line.startswith(FORGED)] == []
