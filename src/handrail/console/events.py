"""The event stream of a page: first the whole state, then every change. The page never polls.

Each worker publishes its activity, at most ten times a second and only while a page is open; the stream merges the
messages of all workers. A stream that lost a message ends. The page then opens another, which begins with the whole
state.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

from msgspec import convert
from msgspec.json import decode

from handrail.console import approvals, statistics, upstreams
from handrail.console.access import ApiRequest, RawResponse
from handrail.console.calls import call_row
from handrail.console.context import ConsoleContext
from handrail.console.statistics import Figures, connections, merge_connections, process_figures
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.observe.activity import NOT_FAILURES, CallSnapshot, Minute, p95
from handrail.protocol import framing as sse
from handrail.stores import StoreError

log = logging.getLogger("handrail")

TICK_SECONDS, SLOW_TICK_SECONDS = 0.1, 1.0
BATCH_SECONDS = 0.02  # calls that begin and end within it are published once
RENEW_SECONDS, WATCH_SECONDS = 5.0, 12.5
GREET_SECONDS = 0.5
LOST_SECONDS = 5.0  # without a tick from a worker in which calls run, it counts as gone: it sends one every second
MAX_RUNNING, MAX_FINISHED = 100, 20
_MAX_QUEUED_MESSAGES = 100


class ActivityPublisher:
    """Publishes the activity of this process while a page is open."""

    def __init__(self, context: ConsoleContext) -> None:
        self.ticks = 0
        self._context = context
        self._changed = asyncio.Event()
        self._active = asyncio.Event()
        self._active_until = 0.0
        self._last_connections: list[tuple[Object, ...]] = []  # as published last
        self._last_figures = b""  # as published last
        self._last_upstreams = b"[]"  # as published last
        self._slow_published_at = 0.0  # loop time of all three

    def activate(self) -> None:
        """Publish for the next WATCH_SECONDS: a page is open, here or in another worker."""
        self._active_until = asyncio.get_running_loop().time() + WATCH_SECONDS
        self._context.feed.on_change = self._changed.set
        self._active.set()
        self._changed.set()

    async def run(self) -> None:
        loop, feed = asyncio.get_running_loop(), self._context.feed
        last = 0.0
        try:
            while True:
                await self._active.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(SLOW_TICK_SECONDS):
                        await self._changed.wait()
                if loop.time() >= self._active_until:
                    self._active.clear()
                    feed.on_change = None
                    feed.unread = []
                    continue
                if not self._changed.is_set() and not feed.running:
                    await self._run_logged(self._publish_slow())
                    continue
                await asyncio.sleep(max(BATCH_SECONDS, last + TICK_SECONDS - loop.time()))
                self._changed.clear()
                last = loop.time()
                await self._run_logged(self._publish_tick())
        finally:
            feed.on_change = None

    async def _run_logged(self, work: Coroutine[Any, Any, None]) -> None:
        """Log a failure: one message that cannot be published must not stop the others."""
        try:
            await work
        except StoreError:
            pass
        except Exception:
            log.exception("console: activity not published")

    async def _publish_tick(self) -> None:
        context, feed = self._context, self._context.feed
        fresh, feed.unread = feed.unread, []
        self.ticks += 1
        payloads = encode(process_tick(context, fresh)), encode(internal_data(context))
        await context.publish_raw("tick", b"\n".join(payloads), to=context.worker)
        if asyncio.get_running_loop().time() >= self._slow_published_at + SLOW_TICK_SECONDS:
            await self._publish_slow()

    async def _publish_slow(self) -> None:
        """Publish figures, connections and upstreams if they have changed: all do with every call, and with time."""
        context, self._slow_published_at = self._context, asyncio.get_running_loop().time()
        encoded_figures = encode(process_figures(context))
        if encoded_figures != self._last_figures:
            self._last_figures = encoded_figures
            await context.publish_raw("figures", encoded_figures, to=context.worker)
        connection_rows = connections(context)
        if [(each["id"], each["open"], each["calls"]) for each in connection_rows] != self._last_connections:
            self._last_connections = [(each["id"], each["open"], each["calls"]) for each in connection_rows]
            await context.publish("connections", connection_rows, to=context.worker)
        encoded_upstreams = encode(upstreams.rows(context))
        if encoded_upstreams != self._last_upstreams:
            self._last_upstreams = encoded_upstreams
            await context.publish_raw("upstreams", encoded_upstreams, to=context.worker)


def process_tick(context: ConsoleContext, fresh: list[CallSnapshot]) -> Object:
    """Return the `Tick` of this process."""
    feed = context.feed
    calls, errors, refused = feed.totals
    running = sorted(feed.running.values(), key=lambda snapshot: snapshot.started_at)
    if len(fresh) > MAX_FINISHED:
        failed = [snapshot for snapshot in fresh if snapshot.outcome not in NOT_FAILURES][-MAX_FINISHED:]
        rest = [snapshot for snapshot in fresh if snapshot.outcome in NOT_FAILURES]
        fresh = failed + rest[len(rest) - MAX_FINISHED + len(failed) :]
    return {
        "at": context.clock(),
        "running": [call_row(context, snapshot) for snapshot in running[:MAX_RUNNING]],
        "running_total": len(running),
        "finished": [call_row(context, snapshot) for snapshot in sorted(fresh, key=lambda snapshot: snapshot.ended_at)],
        "totals": {"calls": calls, "errors": errors, "refused": refused},
        "minute": minute_row(feed.minutes.current),
    }


def minute_row(minute_stats: Minute) -> Object:
    p95_ms = round(p95(minute_stats.times) * 1000, 3)
    return {
        "at": minute_stats.start,
        "calls": minute_stats.calls,
        "errors": minute_stats.errors,
        "refused": minute_stats.refused,
        "p95_ms": p95_ms,
    }


def internal_data(context: ConsoleContext) -> Object:
    """Return the part of a tick that workers need of each other, and that pages do not get."""
    return {"times": _nonzero_times(context.feed.minutes.current) if context.workers > 1 else {}}


def _nonzero_times(minute_stats: Minute) -> dict[int, int]:
    return {number: count for number, count in enumerate(minute_stats.times) if count}


async def renew_watch(context: ConsoleContext, data: Object) -> None:
    context.on_watch()


async def send_greeting(context: ConsoleContext, data: Object) -> None:
    """Send the whole state of this process to a new stream."""
    context.on_watch()
    await context.publish("greeting", _greeting(context), to=data["stream"])


def _greeting(context: ConsoleContext) -> Object:
    return {
        "worker": context.worker,
        "tick": process_tick(context, context.feed.recent[-MAX_FINISHED:]),
        "inner": {**internal_data(context), "times": _nonzero_times(context.feed.minutes.current)},
        "minutes": [{**minute_row(each), "times": _nonzero_times(each)} for each in context.feed.minutes.past],
        "connections": connections(context),
        "figures": process_figures(context),
        "upstreams": upstreams.rows(context),
    }


class MergedView:
    """The state of all workers, merged."""

    def __init__(self, context: ConsoleContext) -> None:
        self._context = context
        self.ticks: dict[str, Object] = {}
        self.internal: dict[str, Object] = {}
        self.minutes: dict[str, list[Object]] = {}
        self.connections: dict[str, list[Object]] = {}
        self.figures: dict[str, Figures] = {}
        self.upstreams: dict[str, list[Object]] = {}
        self._last_tick_at: dict[str, float] = {}

    def add_greeting(self, greeting: Object) -> None:
        worker = greeting["worker"]
        self._last_tick_at[worker] = asyncio.get_running_loop().time()
        self.ticks.setdefault(worker, greeting["tick"])
        self.internal.setdefault(worker, greeting["inner"])
        self.minutes[worker] = greeting["minutes"]
        self.connections[worker] = greeting["connections"]
        self.upstreams[worker] = greeting["upstreams"]
        self.figures[worker] = convert(greeting["figures"], Figures, strict=False)  # keys in JSON are strings

    def merge_tick(self, worker: str, page_tick: bytes, internal: bytes) -> bytes:
        """Return the tick of all workers after one from `worker`. The tick of an only worker passes unread."""
        if self._context.workers == 1:
            self.internal[""] = decode(internal)
            return page_tick
        worker_tick = self.ticks[worker] = decode(page_tick)
        self.internal[worker] = decode(internal)
        self._last_tick_at[worker] = asyncio.get_running_loop().time()
        return encode(self.merged_tick(worker_tick["finished"]))

    def drop_lost_workers(self) -> bool:
        """Drop the calls and connections of workers that are gone; return whether there were any."""
        now = asyncio.get_running_loop().time()
        lost_workers = [
            worker
            for worker, worker_tick in self.ticks.items()
            if self._context.workers > 1
            and worker_tick["running_total"]
            and now - self._last_tick_at[worker] > LOST_SECONDS
        ]
        for worker in lost_workers:
            self.ticks[worker] |= {"running": [], "running_total": 0}
            self.connections[worker] = self.upstreams[worker] = []
        return bool(lost_workers)

    def merged_tick(self, finished: list[Object]) -> Object:
        ticks = list(self.ticks.values())
        at = max(each["minute"]["at"] for each in ticks)
        running = sorted((call for each in ticks for call in each["running"]), key=lambda call: call["began"])
        current_workers = [name for name, each in self.ticks.items() if each["minute"]["at"] == at]
        return {
            "at": max(each["at"] for each in ticks),
            "running": running[:MAX_RUNNING],
            "running_total": sum(each["running_total"] for each in ticks),
            "finished": finished,
            "totals": {name: sum(each["totals"][name] for each in ticks) for name in ("calls", "errors", "refused")},
            "minute": _sum_minutes(
                at, [{**self.ticks[name]["minute"], "times": self.internal[name]["times"]} for name in current_workers]
            ),
        }

    def hello(self, cards: list[Object]) -> Object:
        finished = sorted((call for each in self.ticks.values() for call in each["finished"]), key=_ended_at)
        by_time: dict[float, list[Object]] = {}
        for each in (each for minutes in self.minutes.values() for each in minutes):
            by_time.setdefault(each["at"], []).append(each)
        return {
            **self.merged_tick(finished[-MAX_FINISHED:]),
            "minutes": [_sum_minutes(at, by_time[at]) for at in sorted(by_time)],
            "approvals": cards,
            "replicas": self._context.replicas,
            "connections": merge_connections(self.connections.values()),
            "figures": self.page_figures(),
            "upstreams": upstreams.merge_rows(self.upstreams.values()),
            "health": self.health(len(cards)),
        }

    def page_figures(self) -> Object:
        return statistics.page_figures(self._context, statistics.merge_figures(self.figures.values()))

    def connections_event(self) -> bytes:
        return sse.encode_event(encode(merge_connections(self.connections.values())), name="connections")

    def health(self, pending_count: int) -> Object:
        total, rows = statistics.merge_figures(self.figures.values()), upstreams.merge_rows(self.upstreams.values())
        return statistics.health(self._context, total, pending_count, rows)


def _ended_at(call: Object) -> float:
    return float(call["began"] + call["seconds"])


def _sum_minutes(at: float, minutes: list[Object]) -> Object:
    times: dict[int, int] = {}
    for each in minutes:
        for number, count in each["times"].items():
            times[int(number)] = times.get(int(number), 0) + count
    listed = [times.get(number, 0) for number in range(max(times, default=0) + 1)]
    sums = {name: sum(each[name] for each in minutes) for name in ("calls", "errors", "refused")}
    return {"at": at, **sums, "p95_ms": round(p95(listed) * 1000, 3)}


async def events(context: ConsoleContext, request: ApiRequest) -> RawResponse:
    stream = EventStream(context, request)
    return RawResponse(stream.run(), "text/event-stream", headers=((b"x-accel-buffering", b"no"),))


class EventStream:
    """The event stream of one page: first the whole state, then every change."""

    def __init__(self, context: ConsoleContext, request: ApiRequest) -> None:
        self._context = context
        self._session = request.session
        self._token = request.token
        self._view = MergedView(context)
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(_MAX_QUEUED_MESSAGES)
        self._pending_callers: dict[str, str] = {}  # by approval: whether its caller still waits
        self._health: Object = {}
        self._replicas: list[Object] = []

    async def run(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        async with AsyncExitStack() as stack:
            await self._subscribe(stack)
            if not await self._collect_greetings():
                return
            hello = await self._hello()
            renewed = checked = clock()
            yield hello
            while True:
                message, ends = b"", min(renewed + RENEW_SECONDS, checked + SLOW_TICK_SECONDS)
                with suppress(TimeoutError):  # around nothing else: a message would be lost
                    async with asyncio.timeout(max(0.0, ends - clock())):
                        message = await self._queue.get()
                if message:
                    event, to, data = message.split(b"\n", 2)
                    if self._is_end(event, to):
                        return
                    async for each in self._updates(event.decode(), to.decode(), data):
                        yield each
                if clock() >= renewed + RENEW_SECONDS:
                    renewed = clock()
                    await self._context.send_command("watch", {})
                    yield sse.KEEP_ALIVE
                    if await self._context.sessions.find_session(self._token) is None:
                        return
                    async for each in self._changed_callers():
                        yield each
                if clock() >= checked + SLOW_TICK_SECONDS:
                    checked = clock()
                    for each in self._check():
                        yield each

    async def _subscribe(self, stack: AsyncExitStack) -> None:
        """Put the messages of all workers and the changes of approvals into the queue."""
        context = self._context
        updates = await stack.enter_async_context(context.topics.subscribe(f"console:{context.channel}"))
        approval_updates = await stack.enter_async_context(context.store.subscribe("approvals"))
        for pump in (
            _pump(updates, self._queue),
            _pump(approval_updates, self._queue, b"asked\n\n"),
            _signal_end(context.stopping, self._queue),
        ):
            stack.callback(asyncio.create_task(pump).cancel)

    async def _collect_greetings(self) -> bool:
        """Wait for the greetings of all workers, at most GREET_SECONDS; return False if the stream ends meanwhile."""
        stream_id, context = secrets.token_hex(8).encode(), self._context
        await context.send_command("greet", {"stream": stream_id.decode()})
        with suppress(TimeoutError):
            async with asyncio.timeout(GREET_SECONDS):
                while len(self._view.minutes) < context.workers:
                    event, to, data = (await self._queue.get()).split(b"\n", 2)
                    if self._is_end(event, to):
                        return False
                    if event == b"greeting" and to == stream_id:
                        self._view.add_greeting(decode(data))
        if not self._view.ticks:
            self._view.add_greeting(decode(encode(_greeting(context))))
        return True

    async def _hello(self) -> bytes:
        cards = await approvals.cards(self._context, self._session)
        self._pending_callers = {each["id"]: each["caller"] for each in cards}
        hello = self._view.hello(cards)
        self._health, self._replicas = hello["health"], hello["replicas"]
        return sse.encode_event(encode(hello), name="hello", retry_ms=1000)

    def _is_end(self, event: bytes, to: bytes) -> bool:
        return event == b"end" or (event == b"signed-out" and to.decode() == self._session.key)

    async def _updates(self, event: str, to: str, data: bytes) -> AsyncIterator[bytes]:
        """Yield the events of the page for one message; `to` is the worker it is from, or the session it is for."""
        view = self._view
        match event:
            case "tick":
                yield sse.encode_event(view.merge_tick(to, *data.split(b"\n", 1)), name="tick")
            case "connections":
                view.connections[to] = decode(data)
                yield view.connections_event()
            case "upstreams":
                view.upstreams[to] = decode(data)
                yield sse.encode_event(encode(upstreams.merge_rows(view.upstreams.values())), name="upstreams")
            case "figures":
                view.figures[to] = decode(data, type=Figures)
                yield sse.encode_event(encode(view.page_figures()), name="figures")
            case "asked" if not data:
                yield sse.encode_event(b"{}", name="grants")
            case "asked":
                card = await approvals.card(self._context, self._session, data.decode())
                if card is not None:
                    self._pending_callers.pop(card["id"], None)
                    if card["state"] == "pending":
                        self._pending_callers[card["id"]] = card["caller"]
                    yield sse.encode_event(encode(card), name="approval")
            case "greeting" | "signed-out":
                pass
            case _ if to in ("", self._session.key):
                yield sse.encode_event(data, name=event)

    async def _changed_callers(self) -> AsyncIterator[bytes]:
        """Yield the approvals whose caller has left or come back: no message tells of that."""
        for approval_id, caller in list(self._pending_callers.items()):
            card = await approvals.card(self._context, self._session, approval_id)
            if card is not None and card["state"] == "pending" and card["caller"] != caller:
                self._pending_callers[approval_id] = card["caller"]
                yield sse.encode_event(encode(card), name="approval")

    def _check(self) -> Iterator[bytes]:
        """Yield what has changed by time alone: workers that are lost, and the health of the server."""
        view = self._view
        if view.drop_lost_workers():
            yield sse.encode_event(encode(view.merged_tick([])), name="tick")
            yield view.connections_event()
        if (health := view.health(len(self._pending_callers))) != self._health:
            self._health = health
            yield sse.encode_event(encode(health), name="health")
        if self._context.replicas != self._replicas:
            self._replicas = self._context.replicas
            yield sse.encode_event(encode(self._replicas), name="replicas")


async def _pump(messages: AsyncIterator[bytes], queue: asyncio.Queue[bytes], prefix: bytes = b"") -> None:
    with suppress(StoreError):
        async for message in messages:
            await queue.put(prefix + message)
    await queue.put(b"end\n\n")  # after a lost message the page must start from the whole state again


async def _signal_end(stopping: asyncio.Event, queue: asyncio.Queue[bytes]) -> None:
    await stopping.wait()
    await queue.put(b"end\n\n")
