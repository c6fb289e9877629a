"""Upstreams that each caller signs in to for itself: no token is used for another, and none is seen anywhere."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from authorized_upstream import Upstream, authorized_upstream, name_of
from handrail import AuthorizationError, Client, Elicitation, Principal, Server, stores
from handrail.auth import ApiKeys, OAuth, open_browser
from handrail.engine.dispatcher import Dispatcher
from handrail.engine.reply_channel import NullChannel
from handrail.gateway.pool import SessionPool
from handrail.gateway.session import principal_of
from handrail.gateway.sign_in import SignIn
from handrail.guards import Policy, Rule
from patience import PATIENCE
from redis_servers import ON_DISK, RedisServer, require_redis
from requirements import requirement
from servers_http import served
from servers_listen import listening
from wires_gateway import LegWire, failure_of, text_of

Json = Any
Object = dict[str, Any]
Ran = Callable[[str, str], None]

R3, R4, R5 = "2025-06-18", "2025-11-25", "2026-07-28"
ABLE: Object = {"elicitation": {"form": {}, "url": {}}}
KEYS = {name: ApiKeys.new() for name in ("alice", "bob")}
SEAL = sha256(b"the processes of one gateway").digest()
DISCOVERY = "/.well-known/oauth-authorization-server"
CODE = re.compile(r"<h1>([A-Z2-9]{4}-[A-Z2-9]{4})</h1>")

by_caller = pytest.mark.parametrize("revision", [R4, R5])
by_upstream = pytest.mark.parametrize("upstream_revision", [R3, R5])


class House:
    """A gateway over HTTP for two callers, in front of an upstream that each signs in to."""

    def __init__(self, upstream: Upstream, folder: Path, store: str = "") -> None:
        self.upstream = upstream
        self.kept: Object = {"store": store} if store else {"audit": folder / "state.db"}
        self.url = ""
        self.server: Server

    @asynccontextmanager
    async def serving(self, *more: str, **auth: Any) -> AsyncIterator[House]:
        """A process of the gateway: all have one store and one key. The upstream may be there under more names."""
        self.server = Server("house", policy=Policy([Rule(verdict="allow")]), rates=None, keys=[SEAL], **self.kept)
        for name in ("box", *more):
            oauth = OAuth(grant="user", **auth)
            self.server.include(self.upstream.url, name=name, prefix=f"{name}_", trusted=True, new="allow", auth=oauth)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.server.serving())
            endpoint = self.server.asgi(auth=ApiKeys({name: stored for name, (_, stored) in KEYS.items()}))
            self.url = await stack.enter_async_context(served(endpoint))
            yield self

    @asynccontextmanager
    async def caller(self, name: str, revision: str, capabilities: Object | None = None) -> AsyncIterator[LegWire]:
        wire = LegWire(revision, self.url, "http")
        wire.extra = {"Authorization": f"Bearer {KEYS[name][0]}"}
        try:
            await wire.open(ABLE if capabilities is None else capabilities)
            yield wire
        finally:
            await wire.close()


@asynccontextmanager
async def house(
    folder: Path, upstream_revision: str = R3, *, more: Sequence[str] = (), **auth: Any
) -> AsyncIterator[House]:
    async with (
        authorized_upstream([upstream_revision]) as upstream,
        House(upstream, folder).serving(*more, **auth) as rig,
    ):
        yield rig


@asynccontextmanager
async def twins(folder: Path) -> AsyncIterator[tuple[House, House]]:
    """Two processes of one gateway."""
    async with (
        authorized_upstream() as upstream,
        House(upstream, folder).serving() as one,
        House(upstream, folder).serving() as two,
    ):
        yield one, two


async def open_page(url: str) -> tuple[int, str]:
    """What a browser shows."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        return response.status, await response.text()


async def sign_in(house: House, url: str) -> str:
    """Sign in with a browser; the code on the page at the end."""
    home = house.upstream.home
    status, page = await open_page(await home.paste(url, urlsplit(url).netloc))
    assert status == 200, page
    match = CODE.search(page)
    assert match is not None, page
    return match[1]


class Asked:
    """A call of a tool, and the questions that the caller is asked on its way."""

    def __init__(self, wire: LegWire, tool: str, arguments: Object) -> None:
        self.wire = wire
        self.params: Object = {"name": tool, "arguments": arguments}
        self.ident = 0
        self._key: Json = None
        self._state = ""

    async def question(self) -> Object:
        """The params of the next question."""
        if not self.ident:
            self.ident = await self.wire.ask("tools/call", self.params)
        if not self.wire.stateless:
            asked = await self.wire.notice("elicitation/create")
            self._key = asked["id"]
            return dict(asked["params"])
        result = (await self.wire.answer(self.ident))["result"]
        assert result.get("resultType") == "input_required", result
        ((self._key, asked),) = result["inputRequests"].items()
        self._state = result["requestState"]
        return dict(asked["params"])

    async def reply(self, action: str = "accept", **content: Json) -> None:
        given = {"action": action, **({"content": content} if content else {})}
        if not self.wire.stateless:
            await self.wire.send({"jsonrpc": "2.0", "id": self._key, "result": given})
            return
        params = {**self.params, "requestState": self._state, "inputResponses": {self._key: given}}
        self.ident = await self.wire.ask("tools/call", params)

    async def answer(self) -> Object:
        if not self.ident:
            self.ident = await self.wire.ask("tools/call", self.params)
        return await self.wire.answer(self.ident)


async def tools_of(wire: LegWire) -> list[str]:
    return [tool["name"] for tool in (await wire.request("tools/list", {}))["result"]["tools"]]


async def signed_in(house: House, wire: LegWire, tool: str = "sign_in_to_box", **arguments: Json) -> Object:
    """The answer to a call whose caller signs in on its way."""
    asked = Asked(wire, tool, arguments)
    page = await asked.question()
    assert page["mode"] == "url"
    await asked.reply()
    form = await asked.question()
    assert [*form["requestedSchema"]["properties"]] == ["code"]
    await asked.reply(code=await sign_in(house, page["url"]))
    return await asked.answer()


@requirement("GW-08", "P-24")
@by_caller
@by_upstream
async def test_each_caller_signs_in_and_only_its_token_is_used_for_it(
    tmp_path: Path, revision: str, upstream_revision: str, ran: Ran
) -> None:
    ran(revision, "http")
    async with house(tmp_path, upstream_revision) as rig, rig.caller("alice", revision) as alice:
        assert await tools_of(alice) == ["sign_in_to_box"]
        assert text_of(await signed_in(rig, alice)) == "You are signed in to box."
        assert await tools_of(alice) == ["box_whoami", "box_hold", "box_write"]
        async with rig.caller("bob", revision) as bob:
            assert await tools_of(bob) == ["sign_in_to_box"]
            assert "sign_in_to_box" in str(await bob.call("box_whoami", {"mark": "bob"}))
            assert not rig.upstream.seen
            assert text_of(await signed_in(rig, bob)) == "You are signed in to box."
            names = {
                text_of(await wire.call("box_whoami", {"mark": mark}))
                for _ in range(3)
                for wire, mark in ((alice, "alice"), (bob, "bob"))
            }
        tokens = {mark: {token for token, other in rig.upstream.seen if other == mark} for mark in ("alice", "bob")}
        assert [len(each) for each in tokens.values()] == [1, 1] and not tokens["alice"] & tokens["bob"]
        assert names == {name_of(token) for each in tokens.values() for token in each}


async def whoami(wire: LegWire) -> Object:
    return await wire.call("box_whoami")


# Whose sign-in it is


@requirement("P-25", "P-26", "GW-08")
@by_caller
async def test_a_sign_in_of_another_person_counts_only_with_the_code_of_its_page(
    tmp_path: Path, revision: str, ran: Ran
) -> None:
    """Alice sends her link to Bob, who signs in: his account is not hers to use."""
    ran(revision, "http")
    async with house(tmp_path) as rig, rig.caller("alice", revision) as alice, rig.caller("bob", revision) as bob:
        asked = Asked(alice, "sign_in_to_box", {})
        link = (await asked.question())["url"]
        await asked.reply()
        await asked.question()
        code = await sign_in(rig, link)
        await asked.reply(code="AAAA-AAAA")
        assert "not the code on the page" in failure_of(await asked.answer())
        assert "not the code on the page" in failure_of(await bob.call("sign_in_to_box", {"code": code}))
        assert await tools_of(alice) == ["sign_in_to_box"] and not rig.upstream.offered
        assert text_of(await alice.call("sign_in_to_box", {"code": f" {code.lower()} "})) == "You are signed in to box."


async def test_a_code_cannot_be_guessed(tmp_path: Path) -> None:
    async with house(tmp_path) as rig, rig.caller("alice", R5) as alice:
        asked = Asked(alice, "sign_in_to_box", {})
        code = await sign_in(rig, (await asked.question())["url"])
        for number in range(5):
            assert "not the code" in failure_of(await alice.call("sign_in_to_box", {"code": f"AAAA-AAA{number + 2}"}))
        assert "not the code" in failure_of(await alice.call("sign_in_to_box", {"code": code}))
        assert not rig.upstream.offered


@requirement("P-25", "P-26")
async def test_a_redirect_counts_once(tmp_path: Path) -> None:
    async with house(tmp_path) as rig, rig.caller("alice", R5) as alice:
        home = rig.upstream.home
        url = (await Asked(alice, "sign_in_to_box", {}).question())["url"]
        back = await home.paste(url, urlsplit(url).netloc)
        home.holds = "authorization_code"
        home.held.clear()
        first = asyncio.create_task(open_page(back))
        async with asyncio.timeout(PATIENCE):
            await home.refresh_came.wait()
        assert (await open_page(back))[0] == 400  # while the first is on its way
        home.held.set()
        assert (await first)[0] == 200
        for again in (back, back.replace("code=", "code=x")):
            status, page = await open_page(again)
            assert status in (400, 404) and not CODE.search(page)
        assert home.count("/token") == 1


CHANGES: dict[str, Callable[[str], str]] = {
    "issuer": lambda back: re.sub(r"iss=[^&]*", "iss=https%3A%2F%2Fother.example", back),
    "no issuer": lambda back: re.sub(r"&?iss=[^&]*", "", back),
    "state": lambda back: re.sub(r"state=..", "state=AA", back),
    "no state": lambda back: re.sub(r"state=[^&]*&?", "", back),
    "two states": lambda back: f"{back}&state=x",
    "error": lambda back: re.sub(r"code=[^&]*", "error=access_denied&error_description=%3Cb%3E", back),
}


@requirement("P-25", "P-26")
@pytest.mark.parametrize("change", CHANGES)
async def test_a_redirect_that_was_changed_gets_no_token(tmp_path: Path, change: str) -> None:
    async with house(tmp_path) as rig, rig.caller("alice", R5) as alice:
        home = rig.upstream.home
        url = (await Asked(alice, "sign_in_to_box", {}).question())["url"]
        status, page = await open_page(CHANGES[change](await home.paste(url, urlsplit(url).netloc)))
        assert status == 400 and not CODE.search(page) and "<b>" not in page
        assert home.count("/token") == 0


@requirement("P-25", "P-26")
async def test_a_code_of_the_authorization_server_is_good_for_its_own_sign_in_only(tmp_path: Path) -> None:
    async with house(tmp_path) as rig, rig.caller("alice", R5) as alice, rig.caller("bob", R5) as bob:
        home, backs = rig.upstream.home, []
        for wire in (alice, bob):
            url = (await Asked(wire, "sign_in_to_box", {}).question())["url"]
            backs.append(await home.paste(url, urlsplit(url).netloc))
        [code] = re.findall(r"code=([^&]*)", backs[0])
        status, page = await open_page(re.sub(r"code=[^&]*", f"code={code}", backs[1]))
        assert status == 400 and "You are not signed in" in page and not home.issued


# How a caller is brought to it


@by_caller
async def test_a_call_asks_when_the_upstream_takes_the_grant_no_longer_and_goes_on_then(
    tmp_path: Path, revision: str, ran: Ran
) -> None:
    ran(revision, "http")
    async with house(tmp_path) as rig, rig.caller("alice", revision) as alice:
        rig.upstream.home.gives_refresh = False
        await signed_in(rig, alice)
        first = text_of(await whoami(alice))
        for issued in rig.upstream.home.issued.values():
            issued.expires_at = 0
        second = text_of(await signed_in(rig, alice, "box_whoami"))
        assert second.startswith("user-") and second != first
        assert text_of(await whoami(alice)) == second


@by_caller
async def test_a_call_asks_for_a_scope_that_the_upstream_wants(tmp_path: Path, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    async with house(tmp_path) as rig, rig.caller("alice", revision) as alice:
        await signed_in(rig, alice)
        assert text_of(await signed_in(rig, alice, "box_write")).startswith("user-")
        assert any(fields.get("scope") == "write" for path, fields in rig.upstream.home.asked if path == "/authorize")


@by_caller
async def test_a_caller_may_decline(tmp_path: Path, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    async with house(tmp_path) as rig, rig.caller("alice", revision) as alice:
        for answers in (["decline"], ["accept", "cancel"]):
            asked = Asked(alice, "sign_in_to_box", {})
            for action in answers:
                await asked.question()
                await asked.reply(action)
            assert failure_of(await asked.answer()) == "You have not signed in to box. Nothing was done."


@pytest.mark.parametrize("revision", [R3, R4, R5])
async def test_a_client_that_takes_no_questions_gets_the_page_from_the_tool(
    tmp_path: Path, revision: str, ran: Ran
) -> None:
    ran(revision, "http")
    async with house(tmp_path) as rig, rig.caller("alice", revision, {}) as alice:
        assert await tools_of(alice) == ["sign_in_to_box"]
        text = text_of(await alice.call("sign_in_to_box"))
        [url] = re.findall(r"http://\S+", text)
        assert "then call sign_in_to_box with the code on the page" in text
        assert text_of(await alice.call("sign_in_to_box")) == text  # the same page
        code = await sign_in(rig, url)
        assert "call sign_in_to_box with the code" in failure_of(await alice.call("sign_in_to_box"))
        assert text_of(await alice.call("sign_in_to_box", {"code": code})) == "You are signed in to box."
        assert text_of(await whoami(alice)).startswith("user-")


@by_caller
async def test_a_client_that_opens_pages_and_has_no_forms_calls_the_tool_with_the_code(
    tmp_path: Path, revision: str, ran: Ran
) -> None:
    ran(revision, "http")
    async with house(tmp_path) as rig, rig.caller("alice", revision, {"elicitation": {"url": {}}}) as alice:
        asked = Asked(alice, "sign_in_to_box", {})
        code = await sign_in(rig, (await asked.question())["url"])
        await asked.reply()
        assert "call sign_in_to_box with the code on the page" in failure_of(await asked.answer())
        assert text_of(await alice.call("sign_in_to_box", {"code": code})) == "You are signed in to box."


async def test_a_client_that_cannot_be_asked_on_its_stream_gets_the_page_as_an_error(tmp_path: Path, ran: Ran) -> None:
    ran(R4, "http")
    async with house(tmp_path) as rig, rig.caller("alice", R4) as alice:
        alice.extra["Accept"] = "application/json"
        error = (await alice.call("sign_in_to_box"))["error"]
        [page] = error["data"]["elicitations"]
        assert (error["code"], page["mode"]) == (-32042, "url") and page["elicitationId"]
        code = await sign_in(rig, page["url"])
        assert "call sign_in_to_box with the code" in failure_of(await alice.call("sign_in_to_box"))
        assert text_of(await alice.call("sign_in_to_box", {"code": code})) == "You are signed in to box."


@requirement("GW-08")
@by_caller
async def test_an_anonymous_caller_has_no_grant_and_is_told_why(tmp_path: Path, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    async with authorized_upstream() as upstream:
        server = Server("house", rates=None, policy=Policy([Rule(verdict="allow")]))
        server.include(upstream.url, name="box", prefix="box_", auth=OAuth(grant="user"))
        async with server.serving(), listening(server.asgi()) as url:
            wire = LegWire(revision, f"{url}/mcp", "http")
            await wire.open(ABLE)
            assert await tools_of(wire) == []
            for tool in ("box_whoami", "sign_in_to_box"):
                assert "this caller is anonymous: a grant needs an owner" in str(await wire.call(tool))
            await wire.close()
        assert not upstream.offered


# Grants over time


@requirement("P-13")
async def test_a_grant_outlives_the_process_and_is_one_in_all_processes(tmp_path: Path) -> None:
    async with authorized_upstream() as upstream:
        async with House(upstream, tmp_path).serving() as rig, rig.caller("alice", R5) as alice:
            await signed_in(rig, alice)
            before = text_of(await whoami(alice))
        async with House(upstream, tmp_path).serving() as rig, House(upstream, tmp_path).serving() as other:
            for each in (rig, other):
                async with each.caller("alice", R5) as alice:
                    assert text_of(await whoami(alice)) == before
        assert upstream.home.count("/authorize") == 1


async def test_two_processes_refresh_once(tmp_path: Path) -> None:
    async with twins(tmp_path) as (one, two):
        home = one.upstream.home
        async with one.caller("alice", R5) as alice, two.caller("alice", R5) as again:
            await signed_in(one, alice)
            await whoami(again)
            for issued in home.issued.values():
                issued.expires_at = 0
            home.held.clear()
            before = home.count(DISCOVERY)
            calls = [asyncio.create_task(whoami(wire)) for wire in (alice, again)]
            async with asyncio.timeout(PATIENCE):
                await home.refresh_came.wait()
                while home.count(DISCOVERY) < before + 2:
                    await open_page(f"{two.url}/connect/none")
            for _ in range(20):  # both have had the time to refresh
                await open_page(f"{two.url}/connect/none")
            home.held.set()
            [name] = {text_of(await each) for each in calls}
            assert name.startswith("user-")
        assert home.count("/token", grant_type="refresh_token") == 1
        assert home.count("/authorize") == 1


@requirement("P-20")
async def test_while_the_store_is_away_a_call_is_refused_and_afterwards_the_grant_is_there(tmp_path: Path) -> None:
    require_redis()
    server = RedisServer(*ON_DISK, "--maxmemory-policy", "noeviction")
    try:
        async with (
            authorized_upstream() as upstream,
            House(upstream, tmp_path, server.url()).serving() as rig,
            rig.caller("alice", R5) as alice,
        ):
            await signed_in(rig, alice)
            before = text_of(await whoami(alice))
            server.kill()
            assert "Nothing was done" in str(await whoami(alice))
            assert len(upstream.seen) == 1
            server.start()
            async with asyncio.timeout(PATIENCE):
                while "Nothing was done" in str(answer := await whoami(alice)):
                    pass
            assert text_of(answer) == before
    finally:
        server.stop()


async def test_a_grant_that_is_revoked_is_used_no_more_in_any_process_even_if_it_is_being_renewed(
    tmp_path: Path,
) -> None:
    async with twins(tmp_path) as (one, two), AsyncExitStack() as stack:
        home = one.upstream.home
        async with one.caller("alice", R5, {}) as alice, one.caller("bob", R5) as bob:
            async with one.caller("alice", R5) as asked:
                await signed_in(one, asked)
            await signed_in(one, bob)
            await whoami(alice)
            there = await stack.enter_async_context(two.caller("alice", R5, {}))
            assert await tools_of(there) == ["box_whoami", "box_hold", "box_write"]
            for issued in home.issued.values():
                issued.expires_at = 0
            home.held.clear()
            call = asyncio.create_task(whoami(alice))
            async with asyncio.timeout(PATIENCE):
                await home.refresh_came.wait()
            grants = sign_in_of(two).grants
            assert sorted(await grants.callers()) == ["alice", "bob"]
            assert await grants.revoke("alice") and not await grants.revoke("alice")
            assert await tools_of(there) == ["sign_in_to_box"]
            home.held.set()
            assert "call sign_in_to_box" in failure_of(await call)
            assert "call sign_in_to_box" in failure_of(await whoami(alice))
            assert await grants.callers() == ["bob"]
            assert text_of(await whoami(bob)).startswith("user-")


def sign_in_of(house: House) -> SignIn:
    sign_in = house.server.upstreams["box"].sign_in
    assert sign_in is not None
    return sign_in


def content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


@requirement("P-24", "P-34")
async def test_no_token_is_seen_in_logs_records_results_or_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    texts: list[str] = []
    async with house(tmp_path) as rig, rig.caller("alice", R5) as alice:
        home = rig.upstream.home
        texts.append(str(await signed_in(rig, alice)))
        for issued in home.issued.values():
            issued.expires_at = 0
        texts.append(str(await whoami(alice)))
        home.refuses = True
        texts.append(str(await alice.call("box_whoami")))
        texts.append(str(rig.server.upstreams["box"].problem))
        tokens, secret = rig.upstream.tokens, KEYS["alice"][0]
        assert len(tokens) == 4 and secret not in rig.upstream.offered
        texts += map(str, alice.others)
    stored = content(tmp_path)
    assert b"sign-in:" in stored and b"signed in to upstream box" in stored
    texts += [each.getMessage() for each in caplog.records if each.name.startswith("handrail")]
    for token in (*tokens, secret):
        assert token.encode() not in stored
        assert not [text for text in texts if token in text]


@requirement("P-25", "P-26")
async def test_a_sign_in_to_one_upstream_is_none_to_another(tmp_path: Path) -> None:
    async with house(tmp_path, more=("twin",)) as rig:
        upstream = rig.upstream
        async with rig.caller("alice", R5) as alice:
            url = (await Asked(alice, "sign_in_to_box", {}).question())["url"]
            back = await upstream.home.paste(url, urlsplit(url).netloc)
            assert "/connect/box?" in back
            assert (await open_page(back.replace("/connect/box?", "/connect/twin?")))[0] == 400
            assert upstream.home.count("/token") == 0
            await signed_in(rig, alice)
            assert sorted(await tools_of(alice)) == ["box_hold", "box_whoami", "box_write", "sign_in_to_twin"]
            await signed_in(rig, alice, "sign_in_to_twin")
            names = {text_of(await alice.call(f"{name}_whoami")) for name in ("box", "twin")}
            assert len(names) == 2


async def test_a_grant_is_not_used_at_another_address_nor_for_another_caller(tmp_path: Path) -> None:
    async with authorized_upstream() as upstream:
        async with House(upstream, tmp_path).serving() as rig, rig.caller("alice", R5) as alice:
            await signed_in(rig, alice)
        store = stores.open(tmp_path / "state.db")
        ((key, value),) = await store.scan("sign-in:")
        await store.put(key.replace("alice", "bob"), value)
        await store.close()
        async with House(upstream, tmp_path).serving() as rig, rig.caller("bob", R5) as bob:
            assert "sign_in_to_box" in str(await whoami(bob))
    async with house(tmp_path) as moved, moved.caller("alice", R5) as alice:
        assert await tools_of(alice) == ["sign_in_to_box"] and not moved.upstream.offered


@by_caller
async def test_a_sign_in_that_fails_tells_the_caller_no_address_and_the_log_the_reason(
    tmp_path: Path, revision: str, caplog: pytest.LogCaptureFixture, ran: Ran
) -> None:
    ran(revision, "http")
    async with house(tmp_path) as rig, rig.caller("alice", revision) as alice:
        home = rig.upstream.home
        home.more_metadata = {"code_challenge_methods_supported": ["plain"]}
        text = failure_of(await alice.call("sign_in_to_box"))
        assert text == "box: no sign-in is possible now; the gateway's log says why. Nothing was done."
        assert "does not offer PKCE with S256" in caplog.text
        home.more_metadata = {}
        await signed_in(rig, alice)
        assert text_of(await whoami(alice)).startswith("user-")
        home.is_down = True
        for issued in home.issued.values():
            issued.expires_at = 0
        text = failure_of(await whoami(alice))
        assert text == "box does not take your sign-in, or it cannot be renewed now. Nothing was done."
        home.is_down = False
        assert text_of(await whoami(alice)).startswith("user-")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"redirect": "https://gw.example/callback"}, "does not end in /connect/box, where it is received"),
        ({"browser": open_browser}, "each caller of a gateway signs in; leave browser and folder out"),
        ({"folder": "x"}, "each caller of a gateway signs in; leave browser and folder out"),
    ],
)
def test_options_that_do_not_fit_are_refused_when_the_upstream_is_included(options: Object, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Server("house").include("http://127.0.0.1:9/mcp", name="box", auth=OAuth(grant="user", **options))


def test_a_command_is_not_signed_in_to() -> None:
    with pytest.raises(ValueError, match="callers sign in over HTTP; this server is a command"):
        Server("house").include(["python", "x.py"], name="box", auth=OAuth(grant="user"))


async def test_a_client_has_one_user() -> None:
    with pytest.raises(AuthorizationError, match="'user' is for the callers of a gateway"):
        async with Client("http://127.0.0.1:9/mcp", auth=OAuth(grant="user")):
            pass


async def test_browsers_come_back_where_the_options_say(tmp_path: Path) -> None:
    redirect = "https://tools.example/mcp/connect/box"
    async with house(tmp_path, redirect=redirect) as rig:
        upstream = rig.upstream
        async with rig.caller("alice", R5) as alice:
            url = (await Asked(alice, "sign_in_to_box", {}).question())["url"]
            back = await upstream.home.paste(url, urlsplit(url).netloc)
            assert back.startswith(f"{redirect}?")
            status, page = await open_page(back.replace("https://tools.example/mcp", rig.url))
            assert status == 200 and CODE.search(page)


@pytest.mark.parametrize("principal", ["alice", "a #5", "a ##5", " #", "iss#sub #12", "a\n #1"])
@pytest.mark.parametrize("has_roots", [False, True])
async def test_the_owner_of_a_connection_names_one_principal_only(principal: str, has_roots: bool) -> None:
    server = Server("house")
    peer = Dispatcher(server.engine, NullChannel(), Principal(principal))
    owner = SessionPool.owner(peer, (False, False, False, False, has_roots), server.engine.offer.handshake[R4])
    assert principal_of(owner) == principal and (owner == principal) is not (" #" in principal or has_roots)


@by_caller
async def test_a_new_grant_ends_no_call_that_runs_and_is_told_to_its_caller(
    tmp_path: Path, revision: str, ran: Ran
) -> None:
    ran(revision, "http")
    async with house(tmp_path) as rig, rig.caller("alice", R4) as alice:
        upstream = rig.upstream
        await signed_in(rig, alice)
        running = await alice.ask("tools/call", {"name": "box_hold", "arguments": {}})
        async with asyncio.timeout(PATIENCE):
            await upstream.begun.wait()
        async with rig.caller("alice", revision) as again:
            assert text_of(await signed_in(rig, again, "box_write")).startswith("user-")
        upstream.gate.set()
        assert text_of(await alice.answer(running)).startswith("user-")
        assert (await alice.notice("notifications/tools/list_changed"))["method"]


@requirement("P-26")
@pytest.mark.parametrize("is_registered_by_hand", [False, True])
async def test_a_client_and_its_secret_are_for_the_authorization_server_of_before_only(
    tmp_path: Path, is_registered_by_hand: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An upstream that names another one does not get what the first one knows."""
    auth: Object = {"client_id": "gateway", "client_secret": "canary-secret"} if is_registered_by_hand else {}
    async with (
        authorized_upstream() as other,
        house(tmp_path, **auth) as rig,
        rig.caller("alice", R5) as alice,
    ):
        upstream, home = rig.upstream, rig.upstream.home
        redirect = f"{rig.url}/connect/box"
        home.knows("gateway", "canary-secret", "client_secret_basic", redirects=(redirect,))
        await signed_in(rig, alice)
        assert await sign_in_of(rig).grants.revoke("alice")
        await signed_in(rig, alice)
        assert home.count("/register") == (0 if is_registered_by_hand else 1)
        assert await sign_in_of(rig).grants.revoke("alice")
        upstream.metadata = {"authorization_servers": [other.home.issuer]}
        other.home.url = upstream.url
        asked = Asked(alice, "sign_in_to_box", {})
        if not is_registered_by_hand:
            assert (await asked.question())["url"].startswith(other.home.issuer)
            assert other.home.count("/register") == 1
            return
        assert "no sign-in is possible now" in failure_of(await asked.answer())
        assert "another authorization server than that of the client_id" in caplog.text
        assert "canary-secret" not in str(other.home.asked) + caplog.text


async def test_a_call_in_this_process_does_not_come_back_to_an_address_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(tmp_path, redirect="https://tools.example/mcp/connect/box") as rig, Client(rig.server) as client:
        assert "no sign-in is possible now" in (await client.call("sign_in_to_box")).text
        assert "this caller has not come over HTTP" in caplog.text


async def test_a_sign_in_and_its_code_and_its_grant_end_by_their_time(tmp_path: Path) -> None:
    async with house(tmp_path) as rig, rig.caller("alice", R5) as alice:
        start, late = time.time(), 0.0
        rig.server.engine.clock = lambda: start + late
        home = rig.upstream.home
        first = (await Asked(alice, "sign_in_to_box", {}).question())["url"]
        back = await home.paste(first, urlsplit(first).netloc)
        late += 601
        assert (await open_page(back))[0] == 400 and home.count("/token") == 0
        second = (await Asked(alice, "sign_in_to_box", {}).question())["url"]
        code = await sign_in(rig, second)
        assert second != first
        late += 601
        assert "not the code on the page" in failure_of(await alice.call("sign_in_to_box", {"code": code}))
        await signed_in(rig, alice)
        assert text_of(await whoami(alice)).startswith("user-")
        late += 91 * 24 * 3600
        assert (await Asked(alice, "box_whoami", {}).question())["mode"] == "url"


@pytest.mark.parametrize("revision", [R3, R4, R5])
async def test_a_caller_on_this_machine_needs_no_code(tmp_path: Path, revision: str) -> None:
    """Whether its client opens the page, or its user does; and also if the user takes a while."""
    tasks = set[asyncio.Task[bool]]()

    async def visit(question: Elicitation) -> bool:
        agree = rig.upstream.home.agree(question.url, urlsplit(question.url).netloc)
        tasks.add(asyncio.create_task(agree))  # goes on after the client has answered
        return True

    async with house(tmp_path) as rig:
        if revision != R3:
            async with Client(rig.server, revision=revision, elicit_url=visit) as client:
                assert (await client.call("sign_in_to_box")).text == "You are signed in to box."
                assert (await client.call("box_whoami")).text.startswith("user-")
            assert {await task for task in tasks} == {True}
            assert await sign_in_of(rig).grants.revoke("local")
        async with Client(rig.server, revision=revision) as client:
            text = (await client.call("sign_in_to_box")).text
            assert text.startswith("Open this page, sign in to box, then call again: http://127.0.0.1:")
            assert (await client.call("sign_in_to_box")).text == text
            url = text.rpartition(" ")[2]
            assert await rig.upstream.home.agree(url, urlsplit(url).netloc)
            async with asyncio.timeout(PATIENCE):
                while (answer := (await client.call("sign_in_to_box")).text) == text:
                    pass  # the browser has its page, and the listener is just being told
            assert answer == "You are signed in to box."
            assert (await client.call("box_whoami")).text.startswith("user-")


@requirement("GW-07")
@by_upstream
async def test_lists_are_for_one_caller_and_instructions_of_an_account_for_none(
    tmp_path: Path, upstream_revision: str
) -> None:
    async with house(tmp_path, upstream_revision) as rig, rig.caller("alice", R5) as alice:
        await signed_in(rig, alice)
        page = (await alice.request("tools/list", {}))["result"]
        assert (len(page["tools"]), page["cacheScope"]) == (3, "private")
        assert rig.server.upstreams["box"].instructions == "canary-instructions"
        async with rig.caller("bob", R4) as bob:
            assert bob.welcome and "canary" not in str(bob.welcome)


@requirement("P-24")
async def test_a_completion_has_the_token_of_its_own_caller(tmp_path: Path) -> None:
    async with house(tmp_path) as rig, rig.caller("alice", R5) as alice:
        await signed_in(rig, alice)
        upstream, reference = rig.server.upstreams["box"], {"type": "ref/prompt", "name": "greet"}
        rig.upstream.offered.clear()
        for principal, count in (("alice #5", 0), ("bob", 0), ("alice", 1)):
            peer = Dispatcher(rig.server.engine, NullChannel(), Principal(principal))
            await upstream.complete(reference, "city", "", {}, peer)
            assert len(rig.upstream.offered) == count
