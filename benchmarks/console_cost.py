"""What a console costs the server: `python benchmarks/console.py [--seconds 30] [--page]`.

Three servers get the same calls at the same time, so many a second each: one without a console, and two with it, of
which one has an event stream open; halfway they change places, because no two processes cost the same. Where there are
two cores, the servers share one and the load has the other. Compared is what a call costs: CPU of the whole process.
At the same time, because on a machine with neighbours a second can cost twice what the one before did. Then a slow call
is made now and then: how long until the stream shows that it runs? At the end the stream must have counted every call.

Before that the same without any transport: calls handed to a server as fast as it takes them, with the feed of a
console and without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from handrail import Server
from handrail.engine.dispatcher import Dispatcher
from handrail.engine.reply_channel import NullChannel
from handrail.model import Principal
from handrail.observe.activity import ActivityFeed

__all__ = ["Outcome", "Served", "measure"]

HERE = Path(__file__).resolve().parent
CONNECTIONS = 20
SLICE_SECONDS = 1.0
HOLDS = 6  # in each half
FORGOTTEN_SECONDS = 14.0  # after which a server knows that nobody looks any more
FEED_CALLS, FEED_TURNS = 2_000, 30
HOLD_SECONDS = 0.4
MOST, VISIBLE_SECONDS = 1.2, 0.2  # at most; seconds
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
HEAD = "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n"


class Outcome(Struct):
    """Microseconds of CPU a call, how soon running calls appeared, how many were counted."""

    off_us: float
    without_us: float
    with_us: float
    ratios: list[float]  # of the last two, second by second
    visible_s: list[float]
    made: int
    counted: int
    events: int

    @property
    def ratio(self) -> float:
        return self.with_us / self.without_us

    @property
    def problems(self) -> list[str]:
        found = []
        if self.ratio > MOST:
            found.append(f"a call costs {self.ratio:.2f} times as much while a page is open; {MOST} is the most")
        if self.counted != self.made:
            found.append(f"{self.counted:,} of {self.made:,} calls were counted")
        if max(self.visible_s) > VISIBLE_SECONDS:
            found.append(f"a running call was visible after {max(self.visible_s):.3f} s; {VISIBLE_SECONDS} is the most")
        return found


class Served:
    """`handrail serve … --console`, without an audit: that costs more than all the rest, and would hide it."""

    def __init__(self, folder: Path, *, has_console: bool = True) -> None:
        (folder / "handrail.toml").write_text("[audit]\non = false\n", "utf-8")
        command = [sys.executable, "-m", "handrail", "serve", str(HERE / "server_console.py"), "--json"]
        command += ["--http=127.0.0.1:0", *(["--console=127.0.0.1:0"] if has_console else [])]
        environment = {**os.environ, "XDG_STATE_HOME": str(folder), "PYTHONPATH": str(HERE.parent / "src")}
        environment["PYTHONHASHSEED"] = "0"  # by which processes differ, too
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", cwd=folder, env=environment)
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.port = int(re.findall(r":(\d+)/", told["url"])[0])
        url, _, self.code = told.get("console", "").partition("/#code=")
        self.page = int(url.rpartition(":")[2] or 0)
        self._clock = ~self._process.pid << 3 | 2  # the CPU clock of the process: clock_getcpuclockid(3)
        self._session = ""
        self._last = 0
        self._lines: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.sent = 0  # calls, in all

    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text("ascii").split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 1e6

    def close(self) -> None:
        for _, writer in self._lines:
            writer.close()
        self._process.terminate()
        self._process.communicate()

    async def open(self) -> None:
        async with connected(self.port) as (reader, writer):
            head, _ = await ask(reader, writer, self._request("initialize", HELLO))
            self._session = re.findall(rb"mcp-session-id: (\S+)", head)[0].decode()

    def _request(self, method: str, params: object) -> bytes:
        self._last += 1
        body = _message(method, params, self._last)
        known = f"Mcp-Session-Id: {self._session}\r\n" if self._session else ""
        return (HEAD % (self.port, known, len(body))).encode() + body

    async def calls(self, rate: float, seconds: float) -> int:
        """So many a second, evenly, over some connections that stay open; how many were made."""
        while len(self._lines) < CONNECTIONS:
            self._lines.append(await asyncio.open_connection("127.0.0.1", self.port))

        async def line(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
            count, pause = 0, CONNECTIONS / rate
            while (due := begun + (count + number / CONNECTIONS) * pause) < begun + seconds:
                await asyncio.sleep(max(0.0, due - loop.time()))
                request = self._request("tools/call", {"name": "add", "arguments": {"a": count, "b": number}})
                _, body = await ask(reader, writer, request)
                assert b'"isError":false' in body or b"structuredContent" in body, body
                count += 1
                self.sent += 1
            return count

        loop = asyncio.get_running_loop()
        begun = loop.time()
        return sum(await asyncio.gather(*(line(number, *each) for number, each in enumerate(self._lines))))

    async def hold(self) -> None:
        async with connected(self.port) as (reader, writer):
            request = self._request("tools/call", {"name": "hold", "arguments": {"seconds": HOLD_SECONDS}})
            await ask(reader, writer, request)
            self.sent += 1


class Watching:
    """The event stream of a page."""

    def __init__(self) -> None:
        self.calls = self.events = 0
        self.shown: dict[str, float] = {}  # slow calls: when they were first seen to run
        self._news = asyncio.Event()

    async def read(self, served: Served) -> None:
        page = served.page
        async with connected(page) as (reader, writer):
            body = json.dumps({"code": served.code}).encode()
            request = f"POST /api/sign-in HTTP/1.1\r\nHost: 127.0.0.1:{page}\r\nContent-Type: application/json\r\n"
            head, answer = await ask(reader, writer, f"{request}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            cookie = re.findall(rb"set-cookie: ([^;]+)", head)[0].decode()
            known = f"Cookie: {cookie}\r\nX-Handrail-CSRF: {json.loads(answer)['csrf']}\r\n"
            writer.write(f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{page}\r\n{known}\r\n".encode())
            while line := await reader.readline():
                if line.startswith(b"data: {") and b'"totals"' in line:
                    self._take(json.loads(line[6:]))

    def _take(self, tick: dict[str, object]) -> None:
        self._news.set()
        self.events += 1
        totals, running = tick["totals"], tick["running"]
        assert isinstance(totals, dict) and isinstance(running, list)
        self.calls = totals["calls"]
        for row in running:
            if row["tool"] == "hold":
                self.shown.setdefault(row["id"], time.monotonic())

    async def counted(self, calls: int) -> None:
        """Until the page knows of so many; at once, for 0: until it knows of anything."""
        await self._news.wait()
        while self.calls < calls:
            self._news.clear()
            await self._news.wait()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[bytes, bytes]:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    return head, await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))


async def measure(seconds: float, rate: float = 1000.0, slice_s: float = SLICE_SECONDS) -> Outcome:
    roles = ("off", "without", "with")
    spent: dict[str, list[float]] = {role: [] for role in roles}
    visible: list[float] = []
    made = counted = events = 0
    with contextlib.ExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))
        stack.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, cores[:1])  # which the servers inherit
        servers = [await _started(stack, rate, has_console=number > 0) for number in range(3)]
        os.sched_setaffinity(0, cores[-1:])
        for half in (0, 1):
            by_role = dict(zip(roles, servers, strict=True))
            watched, watching = by_role["with"], Watching()
            stream = asyncio.create_task(watching.read(watched))
            await watching.counted(0)
            loads = [asyncio.create_task(served.calls(rate, 1.0 + seconds / 2)) for served in servers]
            await asyncio.sleep(1.0)  # what the stream needs is loaded by then
            for _ in range(max(1, int(seconds / 2 / slice_s) - 1)):
                begun = [(served.cpu_s(), served.sent) for served in by_role.values()]
                await asyncio.sleep(slice_s)
                for (role, served), (cpu, sent) in zip(by_role.items(), begun, strict=True):
                    spent[role].append((served.cpu_s() - cpu) / (served.sent - sent) * 1e6)
            await asyncio.gather(*loads)
            visible += [await _visible(watched, watching, rate) for _ in range(HOLDS)]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watching.counted(watched.sent), 5.0)
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            made, counted, events = made + watched.sent, counted + watching.calls, events + watching.events
            servers = [servers[0], servers[2], servers[1]]
            if not half:
                await asyncio.sleep(FORGOTTEN_SECONDS)
    off, without, page = (statistics.mean(each) for each in spent.values())
    ratios = [more / less for more, less in zip(spent["with"], spent["without"], strict=True)]
    return Outcome(off, without, page, ratios, visible, made, counted, events)


async def _started(stack: contextlib.ExitStack, rate: float, *, has_console: bool) -> Served:
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="handrail-bench-")))
    served = Served(folder, has_console=has_console)
    stack.callback(served.close)
    await served.open()
    await served.calls(rate, 1.0)
    return served


async def _visible(served: Served, watching: Watching, rate: float) -> float:
    """How long until a call that runs was told of, while as much goes on as before."""
    load = asyncio.create_task(served.calls(rate, 0.5))
    await asyncio.sleep(0.05)
    known, begun = set(watching.shown), time.monotonic()
    await asyncio.gather(served.hold(), load)
    return min((at - begun for ident, at in watching.shown.items() if ident not in known), default=float("inf"))


async def feed() -> tuple[float, float]:
    """Microseconds a call takes without any transport: of a server that nobody can watch, and of one with a feed."""
    conversations = [_conversation(has_feed=has_feed) for has_feed in (False, True)]
    loop, taken = asyncio.get_running_loop(), ([0.0], [0.0])
    for _ in range(FEED_TURNS):
        for conversation, times in zip(conversations, taken, strict=True):
            over = loop.create_future()
            loop.call_soon(_hand_over, conversation, over)  # outside of any task, as a transport does it
            times.append(await over)
    off, on = (statistics.median(each[1:]) for each in taken)
    return off, on


def _conversation(*, has_feed: bool) -> Dispatcher:
    server = Server("bench", rates=None)

    @server.tool
    async def add(a: int, b: int) -> int:
        return a + b

    if has_feed:
        ActivityFeed.of(server.engine)
    made = Dispatcher(server.engine, NullChannel(), Principal("bench"))
    made.receive(_message("initialize", HELLO))
    return made


def _hand_over(conversation: Dispatcher, over: asyncio.Future[float]) -> None:
    message, begun = _message("tools/call", {"name": "add", "arguments": {"a": 1, "b": 2}}), time.process_time()
    for _ in range(FEED_CALLS):
        conversation.receive(message)
    over.set_result((time.process_time() - begun) / FEED_CALLS * 1e6)


def _message(method: str, params: object, ident: int = 1) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": ident, "method": method, "params": params}).encode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--page", action="store_true", help="also open the page, in Chromium (needs playwright)")
    parser.add_argument("--only-page", action="store_true", help="only that")
    args = parser.parse_args()
    problems: list[str] = []
    what = f"{args.rate:,.0f} calls a second, {args.seconds:g} s"
    if not args.only_page:
        off, on = asyncio.run(feed())
        print(
            f"The feed alone: a call takes {off:.1f} µs without it, {on:.1f} with: {on - off:.1f}, × {on / off:.2f}\n"
        )
        problems += told(asyncio.run(measure(args.seconds, args.rate)), what)
    if args.page or args.only_page:
        from benchmarks import console_page

        looked = asyncio.run(console_page.look(args.seconds, args.rate))
        print(f"\n{what}. {console_page.told(looked)}")
        problems += looked.problems
    for problem in problems:
        print(f"NOT MET: {problem}")
    return 1 if problems else 0


def told(found: Outcome, what: str) -> list[str]:
    low, middle, high = statistics.quantiles(found.ratios, n=4)
    print(f"| {what}: CPU a call, µs | no console | no page | a page open | page ÷ no page | allowed |")
    print("|---|--:|--:|--:|--:|--:|")
    costs = f"{found.off_us:.1f} | {found.without_us:.1f} | {found.with_us:.1f}"
    print(f"| three servers at once | {costs} | {found.ratio:.3f} | {MOST} |")
    print(f"\nSecond by second: median {middle:.3f}, half between {low:.3f} and {high:.3f}.")
    print(f"A console nobody looks at costs a call {found.without_us - found.off_us:+.1f} µs.")
    print(f"Counted {found.counted:,} of {found.made:,} calls, in {found.events:,} events.")
    print(f"A running call was told of within {max(found.visible_s):.3f} s ({len(found.visible_s)} tries).")
    return found.problems


if __name__ == "__main__":
    sys.exit(main())
