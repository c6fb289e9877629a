"""Replicas of one server that have nothing in common but Redis: nginx sends each connection to the next of them."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.request import urlopen

import aiohttp
import pytest

from cli_runs import handrail
from consoles import Served
from faults import text_of, until
from fleets import Fleet, fleet
from handrail import Client, RemoteProtocolError, Server, __version__, stores
from handrail.engine import fleet as engine_fleet
from handrail.engine.fleet import replicas_in
from patience import PATIENCE
from redis_servers import ON_DISK, RedisServer, shared_server
from requirements import requirement
from rigs_console import Object, Page
from servers_http import OPEN, Client as SessionClient
from wires import ALL
from wires_http import HttpWire

Ran = Callable[[str, str], None]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for reply in OPEN:
        reply.close()
    OPEN.clear()


@pytest.fixture(scope="module")
def redis_url() -> str:
    return shared_server().url(database=3)  # no other server has a name there


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet"), redis_url) as made:
        yield made


@pytest.fixture(scope="module")
def url(three: Fleet) -> str:
    return three.balanced()


async def command(three: Fleet, *words: str) -> str:
    """Run a command on a machine that serves nothing, and shares only the store; return what it printed."""
    home = three.folder / "operator"
    home.mkdir(exist_ok=True)
    done = await asyncio.to_thread(handrail, *words, home=home, env={"HANDRAIL_STORE": three.store})
    assert done.returncode == 0, done.stderr
    return done.stdout


async def waiting_approval(three: Fleet) -> str:
    """Return the id of the only approval that waits, as the command line lists it."""
    async with asyncio.timeout(PATIENCE):
        while not (waiting := json.loads(await command(three, "approve", "--json"))):
            pass
    [approval] = waiting
    return str(approval["id"])


async def works(url: str, tool: str, **arguments: str) -> bool:
    """Return whether a call succeeds."""
    async with Client(url, confirm=lambda *_: True) as client:
        try:
            return not (await client.call(tool, arguments)).result.is_error
        except RemoteProtocolError:
            return False


@requirement("SRV-101", "SRV-120")
async def test_seven_clients_of_three_replicas_see_only_their_own_shapes(url: str, three: Fleet, ran: Ran) -> None:
    async def one(revision: str) -> set[str]:
        # The 2024 transport has one stream, and its calls run where that is; all others go to every replica in turn.
        expected = 1 if revision.startswith("2024") else len(three.replicas)
        wire = HttpWire(revision, url)
        try:
            await wire.open(None)
            ran(revision, "http")
            answers = [await wire.call("pid") for _ in range(9)]
            async with asyncio.timeout(PATIENCE):  # the turns are those of all clients together
                while len(set(map(text_of, answers))) < expected:
                    answers.append(await wire.call("pid"))
            assert len({frozenset(each["result"]) for each in answers}) == 1
            served = {text_of(each) for each in answers}
            assert len(served) == expected, revision
            return served
        finally:
            await wire.close()

    served = await asyncio.gather(*map(one, ALL))
    assert len(set().union(*served)) == len(three.replicas)


@requirement("P-18", "P-19")
async def test_an_approval_is_decided_on_another_machine_and_used_once(url: str, three: Fleet) -> None:
    async def call() -> str:
        async with Client(url, confirm=lambda *_: True) as client:
            return str(await client.call("pay", {"to": "Ada"}))

    before = len(three.runs)
    calls = asyncio.create_task(call())
    await command(three, "approve", await waiting_approval(three), "yes")
    async with asyncio.timeout(PATIENCE):
        await calls
    assert [line.split()[0] for line in three.runs[before:]] == ["Ada"]
    assert json.loads(await command(three, "approve", "--json")) == []


async def test_a_no_on_another_machine_is_told_to_the_caller(url: str, three: Fleet) -> None:
    before = len(three.runs)
    async with Client(url, confirm=lambda *_: True) as client:
        call = asyncio.create_task(client.call("pay", {"to": "Bob"}))
        await command(three, "approve", await waiting_approval(three), "no", "--note", "not him")
        result = await call
        assert result.result.is_error and "not him" in result.text
    assert len(three.runs) == before


async def test_a_stop_holds_on_every_replica_until_it_is_undone(three: Fleet) -> None:
    async def outcomes() -> list[bool]:
        return [await works(replica.endpoint, "pid") for replica in three.replicas]

    await command(three, "stop", "--tool", "pid", "--note", "not today")
    async with asyncio.timeout(PATIENCE):
        while any(await outcomes()):
            pass
    await command(three, "stop", "--tool", "pid", "--undo")
    async with asyncio.timeout(PATIENCE):
        while not all(await outcomes()):
            pass


@asynccontextmanager
async def console_page(replica: Served) -> AsyncIterator[Page]:
    """Sign in at the console of a replica, by its start link, which works once."""
    jar = aiohttp.CookieJar(unsafe=True)  # which is: also of numbers
    page = Page(aiohttp.ClientSession(cookie_jar=jar), replica.url)
    try:
        await page.sign_in(replica.link.partition("#code=")[2])
        yield page
    finally:
        await page.close()


async def rows_of(page: Page, rows: list[Object], processes: set[int]) -> list[Object]:
    """Return the replicas on a page once they are these: `rows`, or those of a later event."""
    async with asyncio.timeout(PATIENCE):
        while {row["process"] for row in rows} != processes:
            rows = await page.event("replicas")
    return rows


async def row_of(page: Page, part: str, member: str, value: str) -> Object:
    """Return the call with this member in the next tick that has it among the `running` or the `finished`."""
    async with asyncio.timeout(PATIENCE):
        while True:
            tick = await page.event("tick")
            for row in tick[part]:
                if row[member] == value:
                    return dict(row)


async def test_replicas_list_themselves_and_pages_see_them_come_and_go(three: Fleet, redis_url: str) -> None:
    store = stores.open(redis_url, name="fleet")
    try:
        async with console_page(three.replicas[0]) as page:
            before = {each.process for each in await replicas_in(store)}
            assert len(before) == 3
            hello = await page.listen()
            rows = await rows_of(page, hello["replicas"], before)
            extra = await asyncio.to_thread(three.add)
            try:
                [new] = [each for each in await replicas_in(store) if each.process not in before]
                assert (new.server_version, new.calls) == ("1", 0)
                rows = await rows_of(page, rows, {*before, new.process})
                [row] = [row for row in rows if row["id"] == new.id]
                expected = {"host": socket.gethostname(), "version": __version__, "server_version": "1", "calls": 0}
                assert row | expected == row and row["started"] == new.started and row["seen"] >= 0
            finally:
                await asyncio.to_thread(extra.end)
                three.replicas.remove(extra)
            assert {each.process for each in await replicas_in(store)} == before
            await rows_of(page, rows, before)
    finally:
        await store.close()


@requirement("APP-02", "APP-03")
async def test_a_page_shows_a_call_of_another_replica_and_decides_it(three: Fleet) -> None:
    _, looking, other = three.replicas
    before = len(three.runs)
    async with console_page(looking) as page, Client(other.endpoint, confirm=lambda *_: True) as client:
        await page.listen()
        process = (await client.call("pid")).text
        call = asyncio.create_task(client.call("pay", {"to": "Eve"}))
        card = await page.event("approval", state="pending")
        running = await row_of(page, "running", "tool", "pay")
        assert running["worker"] == f"{socket.gethostname()}/{process}"
        assert (await page.post(f"approvals/{card['id']}", yes=True))["state"] == "approved"
        async with asyncio.timeout(PATIENCE):
            assert (await call).text == "paid Eve"
        finished = await row_of(page, "finished", "id", running["id"])
        assert finished["outcome"] == "ok"
    assert three.runs[before:] == [f"Eve {process}"]


def start(folder: Path, store: str, settings: str = "", **env: str) -> str:
    """Try to serve, in a way that ends at once; return what was printed."""
    folder.mkdir(exist_ok=True)
    (folder / "handrail.toml").write_text(settings)
    server = Path(__file__).parents[1] / "support" / "servers_fleet.py"
    words = ("serve", str(server), "--http", "127.0.0.1:0", "--store", store, "--config", "handrail.toml")
    done = handrail(*words, home=folder, env=env)
    assert done.returncode != 0
    return done.stderr


REFUSED: dict[str, tuple[str, Callable[[Fleet], dict[str, str]], str]] = {
    "no key": ("[store]\naccept_loss = true\n", lambda fleet: {}, "HANDRAIL_KEY is not set"),
    "another key": (
        "[store]\naccept_loss = true\n",
        lambda fleet: {"HANDRAIL_KEY": secrets.token_hex(32)},
        "another key than those that share its store",
    ),
    "a store that may lose an approval": ("", lambda fleet: {"HANDRAIL_KEY": fleet.key}, "accept_loss = true"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_replica_that_would_do_harm_does_not_start(three: Fleet, tmp_path: Path, case: str) -> None:
    settings, env, expected = REFUSED[case]
    text = await asyncio.to_thread(start, tmp_path / "home", three.store, settings, **env(three))
    assert expected in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("store", "options", "is_warned"),
    [
        ("redis", "", True),
        ("redis", ", keys=[__import__('hashlib').sha256(b'one').digest()]", False),
        ("memory:", "", False),
    ],
)
async def test_check_says_whether_a_shared_store_lacks_a_key(
    three: Fleet, tmp_path: Path, store: str, options: str, is_warned: bool
) -> None:
    (tmp_path / "one.py").write_text(f"from handrail import Server\nserver = Server('one'{options})\n")
    place = three.store if store == "redis" else store
    done = await asyncio.to_thread(handrail, "check", "one.py", "--store", place, home=tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("HANDRAIL_KEY is not set" in done.stdout + done.stderr) == is_warned


async def test_a_key_is_replaced_while_replicas_run(tmp_path: Path) -> None:
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    database = shared_server().url(database=1)  # no other replica has a key there
    with fleet(tmp_path, database, count=0, key=old) as rolling:
        client = SessionClient((await asyncio.to_thread(rolling.add)).endpoint, "2025-11-25")
        await client.open()
        for keys in (f"{old},{new}", f"{new},{old}", f"{old},{new}", f"{new},{old}"):
            rolling.key = keys
            client.url = (await asyncio.to_thread(rolling.add)).endpoint
            assert (await client.ask(client.message(2, "ping")))[0] == 200
        rolling.key = new
        client.url = (await asyncio.to_thread(rolling.add)).endpoint
        assert (await client.ask(client.message(3, "ping")))[0] == 404  # sealed with the key that has gone
        settings = "[store]\naccept_loss = true\n"
        text = await asyncio.to_thread(start, tmp_path / "old", database, settings, HANDRAIL_KEY=old)
        assert "another key" in text


async def test_a_fleet_that_runs_for_months_keeps_its_name_and_the_note_of_its_key(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_fleet, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(engine_fleet, "BEATS_PER_NOTE", 2)
    server = Server("lasting", keys=[secrets.token_bytes(32)], store=redis_url, accept_loss=True)
    store, directory = stores.open(redis_url, name="lasting"), stores.open(redis_url)
    try:
        async with server.serving(), asyncio.timeout(PATIENCE):
            assert await store.delete(engine_fleet.KEY_NOTE)  # as their time to live does
            assert await directory.delete(engine_fleet.SERVER_PREFIX + "lasting")
            while not await store.get(engine_fleet.KEY_NOTE):
                pass
            while "lasting" not in await engine_fleet.servers_in(redis_url):
                pass
    finally:
        await directory.delete(engine_fleet.SERVER_PREFIX + "lasting")  # the commands of other tests name no server
        await directory.close()
        await store.close()


@requirement("P-21")
async def test_while_redis_is_frozen_sessions_go_on_and_nothing_hangs(tmp_path: Path) -> None:
    server = RedisServer(*ON_DISK)
    try:
        with fleet(tmp_path, server.url(), count=1) as one:
            [replica] = one.replicas
            async with (
                Client(replica.endpoint) as modern,
                Client(replica.endpoint, revision="2025-11-25") as session,
            ):
                for client in (modern, session):
                    await client.call("pid")
                server.freeze()
                try:
                    async with asyncio.timeout(PATIENCE):
                        for client in (modern, session):
                            assert str(await client.call("pid"))
                        assert not await works(replica.endpoint, "pay", to="Eve")
                    assert "sessions: not reachable" in await _readyz(replica)
                finally:
                    server.thaw()
                async with asyncio.timeout(PATIENCE):
                    while await _readyz(replica) != "ok":
                        pass
                assert one.runs == []
                await session.call("pid")
    finally:
        server.stop()


async def _readyz(replica: Served) -> str:
    def read() -> str:
        with urlopen(replica.endpoint.removesuffix("/mcp") + "/readyz", timeout=PATIENCE) as reply:
            return str(reply.read().decode())

    return await asyncio.to_thread(read)


@requirement("P-21")
async def test_after_a_crash_of_redis_everything_goes_on_without_a_restart(tmp_path: Path) -> None:
    server = RedisServer(*ON_DISK)
    try:
        with fleet(tmp_path, server.url(), count=2, settings=SETTINGS_DURABLE) as two:
            url = two.balanced()
            call = asyncio.create_task(works(url, "pay", to="Ada"))
            approval = await waiting_approval(two)
            server.kill()
            server.start()
            async with asyncio.timeout(PATIENCE):
                while approval not in await command(two, "approve", "--json"):
                    pass
                await command(two, "approve", approval, "yes")
                if not await call:  # its wait was cut: it was told so, and may call again
                    assert two.runs == []
                    assert await works(url, "pay", to="Ada")
            assert [line.split()[0] for line in two.runs] == ["Ada"]
    finally:
        server.stop()


SETTINGS_DURABLE = '[limits]\nprincipal = ""\naddress = ""\nlists = ""\n'


async def test_a_rolling_restart_loses_no_call(tmp_path: Path) -> None:
    with fleet(tmp_path, shared_server().url(database=4)) as rolling:  # no other replica has a key there
        balancer = rolling.balancer()
        done, is_over = 0, asyncio.Event()

        async def load() -> None:
            nonlocal done
            async with Client(balancer.url) as client:
                while not is_over.is_set():
                    await client.call("pid")
                    done += 1

        callers = [asyncio.create_task(load()) for _ in range(4)]
        for replica in rolling.replicas:
            before = done
            others = [each.endpoint for each in rolling.replicas if each is not replica]
            await asyncio.to_thread(balancer.lead_to, *others)
            await asyncio.to_thread(replica.end)
            await asyncio.to_thread(replica.start_again)
            await asyncio.to_thread(balancer.lead_to, replica.endpoint, *others)
            await until(lambda: done > before + 20, "calls go on")  # noqa: B023 — it is used here only
        is_over.set()
        await asyncio.gather(*callers)
