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
from typing import Any

from msgspec import convert
from msgspec.json import decode

from handrail.console import approvals as approving, statistics as figuring
from handrail.console.access import ApiRequest, RawResponse
from handrail.console.calls import call_row
from handrail.console.context import ConsoleContext
from handrail.console.statistics import Figures, connections, merge_connections, process_figures
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.observe.activity import NOT_FAILURES
from handrail.observe.per_minute import Minute, p95
from handrail.observe.snapshot import CallSnapshot
from handrail.protocol import sse
from handrail.stores import StoreError

log = logging.getLogger("handrail")

TICK_SECONDS, SLOW_TICK_SECONDS = 0.1, 1.0
BATCH_SECONDS = 0.02  # what begins and ends within it is told of once
RENEW_SECONDS, WATCH_SECONDS = 5.0, 12.5
GREET_SECONDS = 0.5
LOST_SECONDS = 5.0  # then a worker in which calls run, and which says nothing, is gone: else it would every second
MAX_RUNNING, MAX_FINISHED = 100, 20
_MAX_QUEUED_MESSAGES = 100


class ActivityPublisher:
    """Says what goes on in this process, while somebody looks."""

    def __init__(self, context: ConsoleContext) -> None:
        self.ticks = 0
        self._context = context
        self._changed = asyncio.Event()
        self._active = asyncio.Event()
        self._active_until = 0.0
        self._last_connections: list[tuple[Object, ...]] = []  # of the connections, when they were last told
        self._last_figures = b""  # as they were last told
        self._slow_published_at = 0.0  # at both
        self._tasks: set[asyncio.Task[Any]] = set()

    def activate(self) -> None:
        """Somebody looks, here or in another worker."""
        self._active_until = asyncio.get_running_loop().time() + WATCH_SECONDS
        self._context.feed.on_change = self._changed.set
        self._active.set()
        self._changed.set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
                    await self._run_logged(self._publish_slow())  # a stream was closed, or a second has passed
                    continue
                await asyncio.sleep(max(BATCH_SECONDS, last + TICK_SECONDS - loop.time()))
                self._changed.clear()
                last = loop.time()
                await self._run_logged(self._publish_tick())
        finally:
            feed.on_change = None
            for task in self._tasks:
                task.cancel()

    async def _run_logged(self, work: Coroutine[Any, Any, None]) -> None:
        """What cannot be told once must not keep all else from being told."""
        try:
            await work
        except StoreError:
            pass
        except Exception:
            log.exception("console: what goes on could not be told")

    async def _publish_tick(self) -> None:
        context, feed = self._context, self._context.feed
        fresh, feed.unread = feed.unread, []
        self.ticks += 1
        payloads = encode(process_tick(context, fresh)), encode(internal_data(context))
        await context.publish_raw("tick", b"\n".join(payloads), to=context.worker)
        if (
            asyncio.get_running_loop().time() >= self._slow_published_at + SLOW_TICK_SECONDS
        ):  # their counts change with every call
            await self._publish_slow()

    async def _publish_slow(self) -> None:
        """What changes with every call and with time: the figures, and who is there. If it has changed."""
        context, self._slow_published_at = self._context, asyncio.get_running_loop().time()
        encoded_figures = encode(process_figures(context))
        if encoded_figures != self._last_figures:
            self._last_figures = encoded_figures
            await context.publish_raw("figures", encoded_figures, to=context.worker)
        connection_rows = connections(context)
        if [(each["id"], each["open"], each["calls"]) for each in connection_rows] != self._last_connections:
            self._last_connections = [(each["id"], each["open"], each["calls"]) for each in connection_rows]
            await context.publish("connections", connection_rows, to=context.worker)


def process_tick(context: ConsoleContext, fresh: list[CallSnapshot]) -> Object:
    """A `Tick` of this process."""
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
    """What pages do not get, and what workers need of each other."""
    return {
        "times": _nonzero_times(context.feed.minutes.current) if context.workers > 1 else {}
    }  # one alone adds up nothing


def _nonzero_times(minute_stats: Minute) -> dict[int, int]:
    return {number: count for number, count in enumerate(minute_stats.times) if count}


async def renew_watch(context: ConsoleContext, data: Object) -> None:
    context.on_watch()


async def send_greeting(context: ConsoleContext, data: Object) -> None:
    """Tell a new stream everything."""
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
    }


class MergedView:
    """What all workers say, put together."""

    def __init__(self, context: ConsoleContext) -> None:
        self._context = context
        self.ticks: dict[str, Object] = {}
        self.internal: dict[str, Object] = {}
        self.minutes: dict[str, list[Object]] = {}
        self.connections: dict[str, list[Object]] = {}
        self.figures: dict[str, Figures] = {}
        self._last_tick_at: dict[str, float] = {}  # when each was

    def add_greeting(self, greeting: Object) -> None:
        worker = greeting["worker"]
        self._last_tick_at[worker] = asyncio.get_running_loop().time()
        self.ticks.setdefault(worker, greeting["tick"])
        self.internal.setdefault(worker, greeting["inner"])
        self.minutes[worker] = greeting["minutes"]
        self.connections[worker] = greeting["connections"]
        self.figures[worker] = convert(greeting["figures"], Figures, strict=False)  # JSON has no numbers for keys

    def merge_tick(self, worker: str, page_tick: bytes, internal: bytes) -> bytes:
        """A tick of one worker, as the page gets it: of all. One alone need not be read for that."""
        if self._context.workers == 1:
            self.internal[""] = decode(internal)
            return page_tick
        worker_tick = self.ticks[worker] = decode(page_tick)
        self.internal[worker] = decode(internal)
        self._last_tick_at[worker] = asyncio.get_running_loop().time()
        return encode(self.merged_tick(worker_tick["finished"]))

    def drop_lost_workers(self) -> bool:
        """Whether a worker is gone: nothing runs in it any more, and nobody is connected to it."""
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
            self.connections[worker] = []
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

    def hello(self, approvals: list[Object]) -> Object:
        finished = sorted((call for each in self.ticks.values() for call in each["finished"]), key=_ended_at)
        by_time: dict[float, list[Object]] = {}
        for each in (each for minutes in self.minutes.values() for each in minutes):
            by_time.setdefault(each["at"], []).append(each)
        return {
            **self.merged_tick(finished[-MAX_FINISHED:]),
            "minutes": [_sum_minutes(at, by_time[at]) for at in sorted(by_time)],
            "approvals": approvals,
            "connections": merge_connections(self.connections.values()),
            "figures": self.page_figures(),
            "health": self.health(len(approvals)),
        }

    def page_figures(self) -> Object:
        return figuring.page_figures(self._context, figuring.merge_figures(self.figures.values()))

    def health(self, pending_count: int) -> Object:
        return figuring.health(self._context, figuring.merge_figures(self.figures.values()), pending_count)


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
    return RawResponse(_events(context, request), "text/event-stream", headers=((b"x-accel-buffering", b"no"),))


async def _events(context: ConsoleContext, request: ApiRequest) -> AsyncIterator[bytes]:
    session, stream_id, view = request.session, secrets.token_hex(8), MergedView(context)
    queue: asyncio.Queue[bytes] = asyncio.Queue(_MAX_QUEUED_MESSAGES)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        updates = await stack.enter_async_context(context.topics.subscribe(f"console:{context.instance_id}"))
        approval_updates = await stack.enter_async_context(context.store.subscribe("approvals"))
        tasks = [
            asyncio.create_task(each) for each in (_pump(updates, queue), _pump(approval_updates, queue, b"asked\n\n"))
        ]
        tasks.append(asyncio.create_task(_signal_end(context.stopping, queue)))
        for task in tasks:
            stack.callback(task.cancel)
        await context.send_command("greet", {"stream": stream_id})
        if not await _collect_greetings(context, queue, stream_id, view, session.key):
            return
        cards = await approving.cards(context, session)
        pending_callers = {each["id"]: each["caller"] for each in cards}
        hello = view.hello(cards)
        last_health, renewed, checked = hello["health"], loop.time(), loop.time()
        yield sse.encode_event(encode(hello), name="hello", retry_ms=1000)
        while True:
            message, ends = b"", min(renewed + RENEW_SECONDS, checked + SLOW_TICK_SECONDS)
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
                        yield sse.encode_event(view.merge_tick(to.decode(), *data.split(b"\n", 1)), name="tick")
                    case "connections":
                        view.connections[to.decode()] = decode(data)
                        yield sse.encode_event(encode(merge_connections(view.connections.values())), name="connections")
                    case "figures":
                        view.figures[to.decode()] = decode(data, type=Figures)
                        yield sse.encode_event(encode(view.page_figures()), name="figures")
                    case "asked" if not data:
                        yield sse.encode_event(b"{}", name="grants")
                    case "asked":
                        card = await approving.card(context, session, data.decode())
                        if card is not None:
                            pending_callers.pop(card["id"], None)
                            if card["state"] == "pending":
                                pending_callers[card["id"]] = card["caller"]
                            yield sse.encode_event(encode(card), name="approval")
                    case "greeting" | "signed-out":
                        pass
                    case name if to in (b"", session.key.encode()):
                        yield sse.encode_event(data, name=name)
            if loop.time() >= renewed + RENEW_SECONDS:
                renewed = loop.time()
                await context.send_command("watch", {})
                yield sse.KEEP_ALIVE
                if await context.sessions.find_session(request.token) is None:
                    return
                for approval_id, caller in list(pending_callers.items()):  # a caller leaves without a word
                    card = await approving.card(context, session, approval_id)
                    if card is not None and card["state"] == "pending" and card["caller"] != caller:
                        pending_callers[approval_id] = card["caller"]
                        yield sse.encode_event(encode(card), name="approval")
            if loop.time() >= checked + SLOW_TICK_SECONDS:
                checked = loop.time()
                if view.drop_lost_workers():
                    yield sse.encode_event(encode(view.merged_tick([])), name="tick")
                    yield sse.encode_event(encode(merge_connections(view.connections.values())), name="connections")
                if (new_health := view.health(len(pending_callers))) != last_health:
                    last_health = new_health
                    yield sse.encode_event(encode(last_health), name="health")


async def _pump(messages: AsyncIterator[bytes], queue: asyncio.Queue[bytes], prefix: bytes = b"") -> None:
    with suppress(StoreError):
        async for message in messages:
            await queue.put(prefix + message)
    await queue.put(b"end\n\n")  # a stream that lost something is of no use


async def _signal_end(closed: asyncio.Event, queue: asyncio.Queue[bytes]) -> None:
    await closed.wait()
    await queue.put(b"end\n\n")


async def _collect_greetings(
    context: ConsoleContext, queue: asyncio.Queue[bytes], stream_id: str, view: MergedView, session: str
) -> bool:
    """Wait for what every worker says of itself, but not for one that does not; False if the stream ends meanwhile."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GREET_SECONDS):
            while len(view.minutes) < context.workers:
                event, to, data = (await queue.get()).split(b"\n", 2)
                if event == b"end" or (event, to) == (b"signed-out", session.encode()):
                    return False
                if event == b"greeting" and to == stream_id.encode():
                    view.add_greeting(decode(data))
    if not view.ticks:
        view.add_greeting(decode(encode(_greeting(context))))
    return True
