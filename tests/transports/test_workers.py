"""One URL, several processes behind it: what a session or a stream began in one goes on in another."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from faults import text_of
from patience import PATIENCE
from redis_servers import shared_server
from requirements import requirement
from servers_http import OPEN, Client, data, rest, take
from servers_load import Control, Process, RoundRobin, Run, running, stopped
from wires import ALL, LEGACY, Object, Wire
from wires_http import CANCELLED, OLD, HttpWire

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

Ran = Callable[[str, str], None]
Connect = Callable[..., "asyncio.Future[HttpWire]"]

R5 = "2026-07-28"
STREAMABLE = ("2025-03-26", "2025-06-18", "2025-11-25", "pocket")
ASKING = ("2025-06-18", "2025-11-25", "pocket")
EVERYTHING: Object = {"elicitation": {}, "sampling": {}}

_names = itertools.count()


def fresh() -> str:
    """A mark no other test uses."""
    return f"mark-{next(_names)}"


def of(*revisions: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("revision", revisions)


class Pair:
    """Two servers with one key and one store, and a balancer that is not sticky."""

    def __init__(self, control: Control, servers: list[Process], balancer: RoundRobin) -> None:
        self.control = control
        self.balancer = balancer
        self.urls = [each.url for each in servers]
        self.pids = [each.pid for each in servers]

    def next_is(self, at: int) -> None:
        """Which of them takes the next connection."""
        self.balancer.turn = at

    def number(self, pid: int | str) -> int:
        return self.pids.index(int(pid))


def shared_options(backend: str, folder: Path) -> Object:
    """What makes two servers share sessions: a file, or Redis."""
    if backend == "sqlite":
        return {"store": str(folder / "store.sqlite")}
    url = shared_server().url()
    return {"server": {"store": url, "accept_loss": True}}


@asynccontextmanager
async def two_servers(backend: str, folder: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(Control())
        key = secrets.token_hex(32)
        servers = [
            await stack.enter_async_context(
                running(control, env={"HANDRAIL_KEY": key}, **shared_options(backend, folder))
            )
            for _ in range(2)
        ]
        balancer = await stack.enter_async_context(RoundRobin(*(each.url for each in servers)))
        yield Pair(control, servers, balancer)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sqlite", "redis"])
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with two_servers(request.param, tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forked() -> AsyncIterator[Process]:
    """A server with two workers on one port."""
    async with Control() as control, running(control, workers=2) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def connect(pair: Pair, ran: Ran) -> AsyncIterator[Connect]:
    """`await connect(revision)`: a client of the balancer's address, opened."""
    async with AsyncExitStack() as stack:

        async def connected(revision: str, capabilities: Object | None = None) -> HttpWire:
            return await stack.enter_async_context(opened(pair.balancer.url, revision, ran, capabilities))

        yield lambda *args: asyncio.ensure_future(connected(*args))


@asynccontextmanager
async def opened(url: str, revision: str, ran: Ran, capabilities: Object | None = None) -> AsyncIterator[HttpWire]:
    wire = HttpWire(revision, url)
    try:
        await wire.open(capabilities)
        ran(revision, "http")
        yield wire
    finally:
        await wire.close()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for reply in OPEN:
        reply.close()
    OPEN.clear()


# Seven clients, one URL

ADDED = {
    "2024-10-07": {"toolResult"},
    "2024-11-05": {"content", "isError"},
    "2025-03-26": {"content", "isError"},
    "2025-06-18": {"content", "isError", "structuredContent"},
    "2025-11-25": {"content", "isError", "structuredContent"},
    "2026-07-28": {"content", "isError", "structuredContent", "resultType", "_meta"},
    "pocket": {"content", "isError", "structuredContent"},
}
"""What the answer to `add` is made of."""

ADDER = {
    "2024-10-07": {"name", "description", "inputSchema"},
    "2024-11-05": {"name", "description", "inputSchema"},
    "2025-03-26": {"name", "description", "inputSchema", "annotations"},
    "2025-06-18": {"name", "description", "inputSchema", "annotations", "outputSchema", "title", "_meta"},
    "2025-11-25": {"name", "description", "inputSchema", "annotations", "outputSchema", "title", "_meta"},
    "2026-07-28": {"name", "description", "inputSchema", "annotations", "outputSchema", "title", "_meta"},
    "pocket": {"name", "description", "inputSchema", "annotations", "outputSchema"},
}
"""What it is listed with."""


async def walk(wire: Wire) -> str:
    """Some of all a server has to say; every message is checked as it comes. Gives the process of a call."""
    revision = wire.revision
    tools = {each["name"]: each for each in (await wire.request("tools/list"))["result"]["tools"]}
    assert set(tools["add"]) == ADDER[revision]
    found = await wire.call("add", {"a": 1, "b": 2})
    assert set(found["result"]) == ADDED[revision]

    mark = fresh()
    idents = [await wire.ask("tools/call", {"name": "echo", "arguments": {"text": f"{mark} {n}"}}) for n in range(4)]
    assert [text_of(await wire.answer(each)) for each in reversed(idents)] == [f"{mark} {n}" for n in (3, 2, 1, 0)]

    assert text_of(await wire.call("progresses", {}, progressToken=mark)) == "done"
    told = [await wire.notice("notifications/progress") for _ in range(3)]
    assert [(each["params"]["progressToken"], each["params"]["progress"]) for each in told] == [
        (mark, done) for done in (0, 50, 100)
    ]
    assert ("message" in told[0]["params"]) == (revision not in OLD)

    assert text_of(await wire.call("logs", {}, **({"logLevel": "info"} if wire.stateless else {}))) == "logged"
    assert [(await wire.notice("notifications/message"))["params"]["level"] for _ in range(2)] == ["info", "error"]

    assert (await wire.call("no such tool"))["error"]["code"] == -32602
    wrong = await wire.call("add", {"a": "one", "b": 2})
    assert ("error" in wrong) == (revision not in ("2025-11-25", R5))
    assert "it did not work" in text_of(await wire.call("fails"))
    assert await wire.silent()
    return text_of(await wire.call("pid"))


async def interleaved(url: str, ran: Ran) -> dict[str, set[str]]:
    """Seven clients at once, each walking five times; the processes that served them."""
    served: dict[str, set[str]] = {}

    async def one(revision: str) -> None:
        async with opened(url, revision, ran) as wire:
            served[revision] = {await walk(wire) for _ in range(5)}

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for revision in ALL:
            group.create_task(one(revision))
    return served


@requirement("SRV-101", "SRV-120")
async def test_seven_clients_of_two_processes_see_only_their_own_shapes(pair: Pair, ran: Ran) -> None:
    before = len(pair.balancer.taken)
    served = await interleaved(pair.balancer.url, ran)
    assert set().union(*served.values()) == {str(pid) for pid in pair.pids}
    taken = pair.balancer.taken[before:]
    assert abs(taken.count(0) - taken.count(1)) <= 1
    assert len(taken) > 7 * 5 * 10


@requirement("SRV-101", "SRV-120")
async def test_seven_clients_of_two_workers_on_one_port_see_only_their_own_shapes(forked: Process, ran: Ran) -> None:
    served = await interleaved(forked.url, ran)
    assert set().union(*served.values()) <= {str(pid) for pid in forked.workers}


@of(*ALL)
async def test_both_processes_serve_the_requests_of_one_client(pair: Pair, connect: Connect, revision: str) -> None:
    pair.next_is(0)
    wire = await connect(revision)
    pair.next_is(1)
    before = len(pair.balancer.taken)
    pids = [int(text_of(await wire.call("pid"))) for _ in range(4)]
    assert pair.balancer.taken[before:] == [1, 0, 1, 0]
    if revision in OLD:  # the calls run where the stream is, whoever takes them
        assert pids == [pair.pids[0]] * 4
    else:
        assert [pair.number(each) for each in pids] == [1, 0, 1, 0]


# What reaches another process than the one in which somebody waits for it


async def asked(pair: Pair, wire: HttpWire, tool: str, at: int, question: str) -> tuple[int, Object]:
    """Call a tool in this process; the id of the call, and the question it asks."""
    pair.next_is(at)
    ident = await wire.ask("tools/call", {"name": tool, "arguments": {"question": question}})
    method = "sampling/createMessage" if tool == "asks_model" else "elicitation/create"
    return ident, await wire.notice(method)


async def reply(pair: Pair, wire: HttpWire, at: int, question: Object, result: Object) -> None:
    """Answer a question, through this process."""
    pair.next_is(at)
    await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": result})
    assert pair.balancer.taken[-1] == at


def accept(name: str) -> Object:
    return {"action": "accept", "content": {"name": name}}


def sampled(text: str) -> Object:
    return {"role": "assistant", "content": {"type": "text", "text": text}, "model": "m"}


@requirement("SRV-507")
@of(*LEGACY)
@pytest.mark.parametrize("at", [0, 1])
async def test_what_a_model_says_finds_the_process_that_asked_it(
    pair: Pair, connect: Connect, revision: str, at: int
) -> None:
    pair.next_is(at)
    wire = await connect(revision, EVERYTHING)
    ident, question = await asked(pair, wire, "asks_model", at, "Capital?")
    await reply(pair, wire, 1 - at, question, sampled("Paris"))
    assert text_of(await wire.answer(ident)) == f"Paris {pair.pids[at]}"


@requirement("SRV-507")
@of(*ASKING)
@pytest.mark.parametrize("at", [0, 1])
async def test_what_a_person_says_finds_the_process_that_asked(
    pair: Pair, connect: Connect, revision: str, at: int
) -> None:
    wire = await connect(revision, EVERYTHING)
    ident, question = await asked(pair, wire, "asks_person", at, "Name?")
    await reply(pair, wire, 1 - at, question, accept("Ada"))
    assert text_of(await wire.answer(ident)) == f"Ada {pair.pids[at]}"


@requirement("SRV-507", "P-08")
@of(*ASKING)
@pytest.mark.parametrize("crossed", [False, True], ids=["straight", "crossed"])
async def test_two_questions_of_one_session_from_two_processes_get_their_own_answers(
    pair: Pair, connect: Connect, revision: str, crossed: bool
) -> None:
    wire = await connect(revision, EVERYTHING)
    calls = [await asked(pair, wire, "asks_person", at, "Who is") for at in (0, 1)]
    assert [question["params"]["message"] for _, question in calls] == [f"Who is {pid}" for pid in pair.pids]
    assert calls[0][1]["id"] != calls[1][1]["id"], "two questions that are open have one id"
    for at, (_, question) in enumerate(calls):
        await reply(pair, wire, 1 - at if crossed else at, question, accept(f"name{at}"))
    for at, (ident, _) in enumerate(calls):
        assert text_of(await wire.answer(ident)) == f"name{at} {pair.pids[at]}"


@requirement("SRV-506")
@pytest.mark.parametrize("at", [0, 1])
async def test_a_call_that_needs_input_is_tried_again_in_another_process(pair: Pair, connect: Connect, at: int) -> None:
    wire = await connect(R5, EVERYTHING)
    pair.next_is(at)
    call: Object = {"name": "asks_person", "arguments": {}}
    first = (await wire.request("tools/call", call))["result"]
    assert first["resultType"] == "input_required"
    (key,) = first["inputRequests"]
    again = {**call, "inputResponses": {key: accept("Ada")}, "requestState": first["requestState"]}
    pair.next_is(1 - at)
    assert text_of(await wire.request("tools/call", again)) == f"Ada {pair.pids[1 - at]}"


UPDATED = "notifications/resources/updated"


@requirement("SRV-710", "SRV-711")
@of(*ALL)
@pytest.mark.parametrize("at", [0, 1])
async def test_an_update_in_one_process_reaches_subscribers_of_both(
    pair: Pair, connect: Connect, revision: str, at: int
) -> None:
    wires = [await connect(revision) for _ in range(2)]
    uri = f"load://{fresh()}"
    for number, wire in enumerate(wires):
        pair.next_is(number)
        if wire.stateless:
            wanted: Object = {"notifications": {"resourceSubscriptions": [uri]}}
            params = wire.params(wanted)
            await wire.send({"jsonrpc": "2.0", "id": "s", "method": "subscriptions/listen", "params": params})
            await wire.notice("notifications/subscriptions/acknowledged")
        else:
            assert (await wire.request("resources/subscribe", {"uri": uri}))["result"] == {}
    for toucher in wires:
        pair.next_is(at)
        said = text_of(await toucher.call("touch", {"uri": uri}))
        assert toucher.is_old or pair.number(said) == at
        for wire in wires:
            assert (await wire.notice(UPDATED))["params"]["uri"] == uri
            assert await wire.silent()
    if not wires[0].stateless:
        pair.next_is(1 - at)
        await wires[0].request("resources/unsubscribe", {"uri": uri})
        await wires[1].call("touch", {"uri": uri})
        await wires[1].notice(UPDATED)
        assert await wires[0].silent()


async def begun(pair: Pair, wire: HttpWire, at: int, mark: str, **meta: str) -> tuple[int, Run]:
    """A call of `held` that runs in this process (or, in 2024, was taken by it)."""
    pair.next_is(at)
    ident = await wire.ask("tools/call", {"name": "held", "arguments": {"mark": mark}}, **meta)
    run = await pair.control.run(mark)
    assert pair.balancer.taken[-1] == at
    assert wire.is_old or run.pid == pair.pids[at]
    return ident, run


@requirement("SRV-516", "P-09")
@of(*LEGACY[1:])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("progress", [False, True])
async def test_a_cancellation_finds_the_process_the_call_runs_in(
    pair: Pair, connect: Connect, revision: str, at: int, progress: bool
) -> None:
    pair.next_is(at)
    wire = await connect(revision)
    mark, other = fresh(), fresh()
    ident, run = await begun(pair, wire, at, mark, **({"progressToken": mark} if progress else {}))
    beside, undisturbed = await begun(pair, wire, at, other)
    if progress:
        await wire.notice("notifications/progress")
    pair.next_is(1 - at)
    await wire.notify(CANCELLED, {"requestId": ident})
    assert await run.end() == "stopped"
    assert not undisturbed.is_over
    undisturbed.let_go()
    assert text_of(await wire.answer(beside)).startswith(other)
    await wire.settle()
    assert await wire.silent()


@requirement("SRV-207", "SRV-208")
@of(*STREAMABLE)
@pytest.mark.parametrize("at", [0, 1])
async def test_a_session_ended_in_one_process_is_gone_in_both(pair: Pair, ran: Ran, revision: str, at: int) -> None:
    client = await Client(pair.urls[at], revision).open()
    ran(revision, "http")
    listening = (await client.get()).events()
    await anext(listening)
    mark = fresh()
    call = await client.post(client.call(1, "held", {"mark": mark}, progressToken=mark))
    run = await pair.control.run(mark)
    client.url = pair.urls[1 - at]
    assert (await client.delete()).status == 204
    for client.url in (*pair.urls, *pair.urls):
        assert (await client.ask(client.message(2, "ping")))[0] == 404
        assert (await client.get()).status == 404
        assert (await client.delete()).status == 404
    assert not [each for each in await rest(listening) if each.get("data")]
    assert await run.end() == "stopped"
    assert not [each for each in await client.messages(call) if "id" in each]


@requirement("SRV-518")
@of(*LEGACY)
@pytest.mark.parametrize("at", [0, 1])
async def test_a_log_level_set_in_one_process_counts_in_the_other(
    pair: Pair, connect: Connect, revision: str, at: int
) -> None:
    pair.next_is(at)
    wire = await connect(revision)
    for level, expected in (("error", ["error"]), ("debug", ["debug", "info", "error"]), ("emergency", [])):
        pair.next_is(at)
        assert "result" in await wire.request("logging/setLevel", {"level": level})
        for other in (1 - at, at):
            pair.next_is(other)
            assert text_of(await wire.call("logs")) == "logged"
            assert [each["params"]["level"] for each in wire.others] == expected
            wire.others.clear()


@requirement("SRV-229")
@of(*OLD)
@pytest.mark.parametrize("at", [0, 1])
async def test_the_stream_of_2024_answers_what_another_process_took(
    pair: Pair, connect: Connect, revision: str, at: int
) -> None:
    pair.next_is(at)
    wire = await connect(revision)
    before = len(pair.balancer.taken)
    for method in ("ping", "tools/list"):
        pair.next_is(1 - at)
        assert "result" in await wire.request(method)
    mark = fresh()
    ident, run = await begun(pair, wire, 1 - at, mark, progressToken=mark)
    assert (await wire.notice("notifications/progress"))["params"]["progressToken"] == mark
    run.let_go()
    assert text_of(await wire.answer(ident)) == f"{mark} {pair.pids[at]}"
    assert pair.balancer.taken[before:] == [1 - at] * 3
    assert wire.statuses[-3:] == [202] * 3


@requirement("SRV-516", "P-09")
async def test_what_a_client_of_2024_says_is_heard_in_its_order(pair: Pair, connect: Connect) -> None:
    pair.next_is(0)
    wire = await connect("2024-11-05")
    marks = [fresh() for _ in range(10)]
    for mark in marks:
        pair.next_is(1)
        ident = await wire.ask("tools/call", {"name": "held", "arguments": {"mark": mark}})
        pair.next_is(0)  # where the stream is
        await wire.notify(CANCELLED, {"requestId": ident})
    pair.next_is(1)
    last = fresh()
    await wire.ask("tools/call", {"name": "held", "arguments": {"mark": last}})
    (await pair.control.run(last)).let_go()  # it has begun: all that was said before it was heard before
    for run in filter(None, map(pair.control.begun, marks)):
        assert await run.end() == "stopped"


@requirement("SRV-211", "SRV-215")
@of("2025-03-26", "2025-06-18", "2025-11-25")
async def test_whoever_was_cut_off_comes_back_to_another_process(pair: Pair, ran: Ran, revision: str) -> None:
    client = await Client(pair.urls[0], revision).open()
    ran(revision, "http")
    mark = fresh()
    cut = await client.post(client.call("cut", "held", {"mark": mark}, progressToken=mark))
    (seen,) = await take(cut.events())
    run = await pair.control.run(mark)
    cut.close()
    client.url = pair.urls[1]
    resumed = await client.get(Last_Event_ID=seen["id"])
    run.let_go()
    (answer,) = [data(each) for each in await rest(resumed.events()) if each.get("data")]
    assert (answer["id"], text_of(answer)) == ("cut", f"{mark} {pair.pids[0]}")


@requirement("P-04", "P-08")
@of(*ALL)
@pytest.mark.parametrize("apart", [False, True], ids=["in one process", "in two"])
async def test_ids_that_differ_in_type_alone_are_in_flight_together(
    pair: Pair, connect: Connect, revision: str, apart: bool
) -> None:
    wire = await connect(revision)
    marks: dict[int | str, str] = {1: fresh(), "1": fresh()}
    runs = {}
    for at, (ident, mark) in enumerate(marks.items()):
        pair.next_is(at if apart else 0)
        params = wire.params({"name": "held", "arguments": {"mark": mark}})
        await wire.send({"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": params})
        runs[ident] = await pair.control.run(mark)
    assert (runs[1].pid != runs["1"].pid) == (apart and not wire.is_old)
    for ident in ("1", 1):
        runs[ident].let_go()
        assert text_of(await wire.answer(ident)) == f"{marks[ident]} {runs[ident].pid}"


# Workers on one port


@of(*ALL)
async def test_any_worker_serves_any_request_of_a_client(forked: Process, revision: str, ran: Ran) -> None:
    async with opened(forked.url, revision, ran, EVERYTHING) as wire:
        home = int(text_of(await wire.call("pid")))
        for pid in forked.workers:
            async with stopped(pid):
                ident = await wire.ask("tools/call", {"name": "pid"})
                if wire.is_old:  # taken by whoever is awake, and run where the stream is
                    assert wire.statuses[-1] == 202
                else:
                    assert int(text_of(await wire.answer(ident))) == sum(forked.workers) - pid
            if wire.is_old:
                assert int(text_of(await wire.answer(ident))) == home


@of(*LEGACY)
async def test_any_worker_takes_the_answer_to_a_question(forked: Process, revision: str, ran: Ran) -> None:
    async with opened(forked.url, revision, ran, EVERYTHING) as wire:
        ident = await wire.ask("tools/call", {"name": "asks_model"})
        question = await wire.notice("sampling/createMessage")
        asker = int(question["params"]["messages"][0]["content"]["text"].split()[-1])
        async with stopped(asker):
            await wire.send({"jsonrpc": "2.0", "id": question["id"], "result": sampled("Paris")})
            assert wire.statuses[-1] == 202
        assert text_of(await wire.answer(ident)) == f"Paris {asker}"
