"""The one event stream of a page: everything as it is, and then what changes. The page never asks again.

Each worker says what goes on in it, at most ten times a second and only while somebody looks; the stream puts together
what all of them say. A stream that lost something ends, and the page opens another, which begins with everything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

from msgspec import convert
from msgspec.json import decode

from handrail.console import approvals as approving, statistics as figuring
from handrail.console.access import Download, Request
from handrail.console.calls import row
from handrail.console.connections import connections, merged
from handrail.console.statistics import Figures, figures
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.observe.activity import NEITHER
from handrail.observe.per_minute import Minute, p95
from handrail.observe.snapshot import Seen
from handrail.protocol import sse
from handrail.stores import StoreError

if TYPE_CHECKING:
    from handrail.console import Console

log = logging.getLogger("handrail")

TICK_SECONDS, SLOW_SECONDS = 0.1, 1.0
SOON_SECONDS = 0.02  # what begins and ends within it is told of once
RENEW_SECONDS, WATCH_SECONDS = 5.0, 12.5
GREET_SECONDS = 0.5
LOST_SECONDS = 5.0  # then a worker in which calls run, and which says nothing, is gone: else it would every second
MAX_RUNNING, MAX_FINISHED = 100, 20
_MAX_WAITING = 100


class Pulse:
    """Says what goes on in this process, while somebody looks."""

    def __init__(self, console: Console) -> None:
        self.ticks = 0
        self._console = console
        self._news = asyncio.Event()
        self._watched = asyncio.Event()
        self._until = 0.0
        self._said: list[tuple[Object, ...]] = []  # of the connections, when they were last told
        self._figures = b""  # as they were last told
        self._looked = 0.0  # at both
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ended = asyncio.Event()

    def watch(self) -> None:
        """Somebody looks, here or in another worker."""
        self._until = asyncio.get_running_loop().time() + WATCH_SECONDS
        self._console.feed.news = self._news.set
        self._watched.set()
        self._news.set()

    def soon(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        self.ended.set()

    async def run(self) -> None:
        loop, feed = asyncio.get_running_loop(), self._console.feed
        last = 0.0
        try:
            while True:
                await self._watched.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(SLOW_SECONDS):
                        await self._news.wait()
                if loop.time() >= self._until:
                    self._watched.clear()
                    feed.news = None
                    feed.fresh = []
                    continue
                if not self._news.is_set() and not feed.running:
                    await self._try(self._tell_slowly())  # a stream was closed, or a second has passed
                    continue
                await asyncio.sleep(max(SOON_SECONDS, last + TICK_SECONDS - loop.time()))
                self._news.clear()
                last = loop.time()
                await self._try(self._tick())
        finally:
            feed.news = None
            for task in self._tasks:
                task.cancel()

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        """What cannot be told once must not keep all else from being told."""
        try:
            await work
        except StoreError:
            pass
        except Exception:
            log.exception("console: what goes on could not be told")

    async def _tick(self) -> None:
        console, feed = self._console, self._console.feed
        fresh, feed.fresh = feed.fresh, []
        self.ticks += 1
        shown = encode(tick(console, fresh)), encode(inner(console))
        await console.topics.publish(f"console:{console.name}", b"tick\n%b\n%b\n%b" % (console.worker.encode(), *shown))
        if asyncio.get_running_loop().time() >= self._looked + SLOW_SECONDS:  # their counts change with every call
            await self._tell_slowly()

    async def _tell_slowly(self) -> None:
        """What changes with every call and with time: the figures, and who is there. If it has changed."""
        console, self._looked = self._console, asyncio.get_running_loop().time()
        told = encode(figures(console))
        if told != self._figures:
            self._figures = told
            await console.topics.publish(
                f"console:{console.name}", b"figures\n%b\n%b" % (console.worker.encode(), told)
            )
        there = connections(console)
        if [(each["id"], each["open"], each["calls"]) for each in there] != self._said:
            self._said = [(each["id"], each["open"], each["calls"]) for each in there]
            await console.publish("connections", there, to=console.worker)


def tick(console: Console, fresh: list[Seen]) -> Object:
    """A `Tick` of this process."""
    feed = console.feed
    calls, errors, refused = feed.totals
    running = sorted(feed.running.values(), key=lambda seen: seen.began)
    if len(fresh) > MAX_FINISHED:
        failed = [seen for seen in fresh if seen.outcome not in NEITHER][-MAX_FINISHED:]
        rest = [seen for seen in fresh if seen.outcome in NEITHER]
        fresh = failed + rest[len(rest) - MAX_FINISHED + len(failed) :]
    return {
        "at": console.clock(),
        "running": [row(console, seen) for seen in running[:MAX_RUNNING]],
        "running_total": len(running),
        "finished": [row(console, seen) for seen in sorted(fresh, key=lambda seen: seen.answered)],
        "totals": {"calls": calls, "errors": errors, "refused": refused},
        "minute": minute(feed.minutes.now),
    }


def minute(given: Minute) -> Object:
    p95_ms = round(p95(given.times) * 1000, 3)
    return {"at": given.at, "calls": given.calls, "errors": given.errors, "refused": given.refused, "p95_ms": p95_ms}


def inner(console: Console) -> Object:
    """What pages do not get, and what workers need of each other."""
    return {"times": _times(console.feed.minutes.now) if console.workers > 1 else {}}  # one alone adds up nothing


def _times(given: Minute) -> dict[int, int]:
    return {number: count for number, count in enumerate(given.times) if count}


async def watch(console: Console, data: Object) -> None:
    console.pulse.watch()


async def greet(console: Console, data: Object) -> None:
    """Tell a new stream everything."""
    console.pulse.watch()
    await console.publish("greeting", _greeting(console), to=data["stream"])


def _greeting(console: Console) -> Object:
    return {
        "worker": console.worker,
        "tick": tick(console, console.feed.kept[-MAX_FINISHED:]),
        "inner": {**inner(console), "times": _times(console.feed.minutes.now)},
        "minutes": [{**minute(each), "times": _times(each)} for each in console.feed.minutes.past],
        "connections": connections(console),
        "figures": figures(console),
    }


class View:
    """What all workers say, put together."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.ticks: dict[str, Object] = {}
        self.inner: dict[str, Object] = {}
        self.minutes: dict[str, list[Object]] = {}
        self.connections: dict[str, list[Object]] = {}
        self.figures: dict[str, Figures] = {}
        self._heard: dict[str, float] = {}  # when each was

    def greeted(self, told: Object) -> None:
        worker = told["worker"]
        self._heard[worker] = asyncio.get_running_loop().time()
        self.ticks.setdefault(worker, told["tick"])
        self.inner.setdefault(worker, told["inner"])
        self.minutes[worker] = told["minutes"]
        self.connections[worker] = told["connections"]
        self.figures[worker] = convert(told["figures"], Figures, strict=False)  # JSON has no numbers for keys

    def heard(self, worker: str, shown: bytes, more: bytes) -> bytes:
        """A tick of one worker, as the page gets it: of all. One alone need not be read for that."""
        if self._console.workers == 1:
            self.inner[""] = decode(more)
            return shown
        told = self.ticks[worker] = decode(shown)
        self.inner[worker] = decode(more)
        self._heard[worker] = asyncio.get_running_loop().time()
        return encode(self.tick(told["finished"]))

    def lost(self) -> bool:
        """Whether a worker is gone: nothing runs in it any more, and nobody is connected to it."""
        now = asyncio.get_running_loop().time()
        gone = [
            worker
            for worker, told in self.ticks.items()
            if self._console.workers > 1 and told["running_total"] and now - self._heard[worker] > LOST_SECONDS
        ]
        for worker in gone:
            self.ticks[worker] |= {"running": [], "running_total": 0}
            self.connections[worker] = []
        return bool(gone)

    def tick(self, finished: list[Object]) -> Object:
        ticks = list(self.ticks.values())
        at = max(each["minute"]["at"] for each in ticks)
        running = sorted((row for each in ticks for row in each["running"]), key=lambda row: row["began"])
        going = [name for name, each in self.ticks.items() if each["minute"]["at"] == at]
        return {
            "at": max(each["at"] for each in ticks),
            "running": running[:MAX_RUNNING],
            "running_total": sum(each["running_total"] for each in ticks),
            "finished": finished,
            "totals": {name: sum(each["totals"][name] for each in ticks) for name in ("calls", "errors", "refused")},
            "minute": _sum(at, [{**self.ticks[name]["minute"], "times": self.inner[name]["times"]} for name in going]),
        }

    def hello(self, approvals: list[Object]) -> Object:
        finished = sorted((row for each in self.ticks.values() for row in each["finished"]), key=_ended)
        by_time: dict[float, list[Object]] = {}
        for each in (each for minutes in self.minutes.values() for each in minutes):
            by_time.setdefault(each["at"], []).append(each)
        return {
            **self.tick(finished[-MAX_FINISHED:]),
            "minutes": [_sum(at, by_time[at]) for at in sorted(by_time)],
            "approvals": approvals,
            "connections": merged(self.connections.values()),
            "figures": self.shown(),
            "health": self.health(len(approvals)),
        }

    def shown(self) -> Object:
        return figuring.shown(self._console, figuring.merged(self.figures.values()))

    def health(self, waiting: int) -> Object:
        return figuring.health(self._console, figuring.merged(self.figures.values()), waiting)


def _ended(row: Object) -> float:
    return float(row["began"] + row["seconds"])


def _sum(at: float, minutes: list[Object]) -> Object:
    times: dict[int, int] = {}
    for each in minutes:
        for number, count in each["times"].items():
            times[int(number)] = times.get(int(number), 0) + count
    listed = [times.get(number, 0) for number in range(max(times, default=0) + 1)]
    sums = {name: sum(each[name] for each in minutes) for name in ("calls", "errors", "refused")}
    return {"at": at, **sums, "p95_ms": round(p95(listed) * 1000, 3)}


async def events(console: Console, request: Request) -> Download:
    return Download(_events(console, request), "text/event-stream", fields=((b"x-accel-buffering", b"no"),))


async def _events(console: Console, request: Request) -> AsyncIterator[bytes]:
    session, mine, view = request.session, secrets.token_hex(8), View(console)
    queue: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        news = await stack.enter_async_context(console.topics.subscribe(f"console:{console.name}"))
        asked = await stack.enter_async_context(console.store.subscribe("approvals"))
        tasks = [asyncio.create_task(each) for each in (_pump(news, queue), _pump(asked, queue, b"asked\n\n"))]
        tasks.append(asyncio.create_task(_ended_soon(console.pulse.ended, queue)))
        for task in tasks:
            stack.callback(task.cancel)
        await console.command("greet", {"stream": mine})
        if not await _greeted(console, queue, mine, view, session.key):
            return
        cards = await approving.cards(console, session)
        waiting = {each["id"]: each["caller"] for each in cards}
        hello = view.hello(cards)
        state, renewed, checked = hello["health"], loop.time(), loop.time()
        yield sse.event(encode(hello), name="hello", retry_ms=1000)
        while True:
            message, ends = b"", min(renewed + RENEW_SECONDS, checked + SLOW_SECONDS)
            with suppress(TimeoutError):  # around nothing else, which would be lost
                async with asyncio.timeout(max(0.0, ends - loop.time())):
                    message = await queue.get()
            if message:
                event, to, data = message.split(b"\n", 2)
                match event.decode():
                    case "end":
                        return
                    case "signed-out" if to.decode() == session.key:
                        return
                    case "tick":
                        yield sse.event(view.heard(to.decode(), *data.split(b"\n", 1)), name="tick")
                    case "connections":
                        view.connections[to.decode()] = decode(data)
                        yield sse.event(encode(merged(view.connections.values())), name="connections")
                    case "figures":
                        view.figures[to.decode()] = decode(data, type=Figures)
                        yield sse.event(encode(view.shown()), name="figures")
                    case "asked" if not data:
                        yield sse.event(b"{}", name="grants")
                    case "asked":
                        card = await approving.card(console, session, data.decode())
                        if card is not None:
                            waiting.pop(card["id"], None)
                            if card["state"] == "pending":
                                waiting[card["id"]] = card["caller"]
                            yield sse.event(encode(card), name="approval")
                    case "greeting" | "signed-out":
                        pass
                    case name if to in (b"", session.key.encode()):
                        yield sse.event(data, name=name)
            if loop.time() >= renewed + RENEW_SECONDS:
                renewed = loop.time()
                await console.command("watch", {})
                yield sse.KEEP_ALIVE
                if await console.access.session(request.token) is None:
                    return
                for ident, caller in list(waiting.items()):  # a caller leaves without a word
                    card = await approving.card(console, session, ident)
                    if card is not None and card["state"] == "pending" and card["caller"] != caller:
                        waiting[ident] = card["caller"]
                        yield sse.event(encode(card), name="approval")
            if loop.time() >= checked + SLOW_SECONDS:
                checked = loop.time()
                if view.lost():
                    yield sse.event(encode(view.tick([])), name="tick")
                    yield sse.event(encode(merged(view.connections.values())), name="connections")
                if (now := view.health(len(waiting))) != state:
                    state = now
                    yield sse.event(encode(state), name="health")


async def _pump(messages: AsyncIterator[bytes], queue: asyncio.Queue[bytes], prefix: bytes = b"") -> None:
    with suppress(StoreError):
        async for message in messages:
            await queue.put(prefix + message)
    await queue.put(b"end\n\n")  # a stream that lost something is of no use


async def _ended_soon(ended: asyncio.Event, queue: asyncio.Queue[bytes]) -> None:
    await ended.wait()
    await queue.put(b"end\n\n")


async def _greeted(console: Console, queue: asyncio.Queue[bytes], mine: str, view: View, session: str) -> bool:
    """Wait for what every worker says of itself, but not for one that does not; False if the stream ends meanwhile."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GREET_SECONDS):
            while len(view.minutes) < console.workers:
                event, to, data = (await queue.get()).split(b"\n", 2)
                if event == b"end" or (event, to) == (b"signed-out", session.encode()):
                    return False
                if event == b"greeting" and to == mine.encode():
                    view.greeted(decode(data))
    if not view.ticks:
        view.greeted(decode(encode(_greeting(console))))
    return True
