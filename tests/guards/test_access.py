"""Who may call what over HTTP: tokens, scopes, and nothing of one caller's in another's hands."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from handrail import Call, Server
from handrail.guards.identity import ApiKeys
from patience import PATIENCE
from requirements import requirement
from servers_http import OPEN, Client, code, fetch, served
from wires import Object

pytestmark = pytest.mark.asyncio(loop_scope="module")

Ran = Callable[[str, str], None]

STREAMABLE = ("2025-03-26", "2025-06-18", "2025-11-25")
R5 = "2026-07-28"
EVERY = ("2024-10-07", "2024-11-05", *STREAMABLE, "pocket", R5)
ALICE, ALICE_STORED = ApiKeys.new()
BOB, BOB_STORED = ApiKeys.new()
RAN: list[str] = []


class Documented(ApiKeys):
    """Keys that are said to come from an authorization server."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.metadata = {"authorization_servers": ["https://login.example.org"], "scopes_supported": ["orders:write"]}


def make() -> Server:
    server = Server("shop", page_size=2)

    @server.tool
    async def whoami(call: Call) -> str:
        RAN.append("whoami")
        return call.principal.id

    @server.tool(scopes={"orders:write", "orders:read"})
    async def cancel_order(order: int) -> str:
        RAN.append("cancel_order")
        return f"cancelled {order}"

    @server.tool(scopes={"admin"}, hide=True)
    async def wipe() -> str:
        RAN.append("wipe")
        return "wiped"

    @server.tool
    async def asks(call: Call) -> str:
        answer = await call.ask("Sure?", {"type": "object", "properties": {"ok": {"type": "boolean"}}})
        return answer.action

    return server


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    RAN.clear()
    yield
    for reply in OPEN:
        reply.close()
    OPEN.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    scopes = {"alice": {"orders:write", "orders:read", "admin"}, "bob": {"orders:read"}}
    auth = Documented({"alice": ALICE_STORED, "bob": BOB_STORED}, scopes=scopes)
    async with served(make().asgi(auth=auth)) as address:
        yield address


class Caller(Client):
    """A client with a token."""

    def __init__(self, url: str, revision: str, token: str) -> None:
        super().__init__(url, revision)
        self.token = token

    def headers(self, message: object = None, **changes: str | None) -> dict[str, str]:
        return super().headers(message, **{"Authorization": f"Bearer {self.token}", **changes})

    async def names(self) -> list[str]:
        """Every tool, over all pages."""
        found: list[str] = []
        cursor: Object = {}
        while True:
            _, answer = await self.ask(self.message("l", "tools/list", cursor))
            found += [tool["name"] for tool in answer["result"]["tools"]]
            cursor = {"cursor": answer["result"].get("nextCursor")}
            if not cursor["cursor"]:
                return found


@requirement("SRV-606", "SRV-608", "P-24")
@pytest.mark.parametrize("revision", EVERY)
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer x", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", f"Bearer {ALICE} {BOB}"],
    ids=["none", "empty", "scheme", "space", "wrong", "basic", "bare", "longer", "two"],
)
async def test_without_a_good_token_nothing_runs(url: str, revision: str, authorization: str | None, ran: Ran) -> None:
    ran(revision, "http")
    client = Client(url, revision)
    for message in (
        client.message(1, "initialize", {"protocolVersion": revision, "capabilities": {}, "clientInfo": {}}),
        client.call(2, "whoami"),
        client.message(3, "tools/list"),
    ):
        reply = await client.post(message, Authorization=authorization)
        assert reply.status == 401
        assert reply.headers["www-authenticate"].startswith("Bearer")
        assert "mcp-session-id" not in reply.headers
        assert ALICE not in (await reply.body()).decode()
    assert RAN == []


@requirement("SRV-608")
@pytest.mark.parametrize("revision", EVERY)
async def test_a_token_in_the_address_does_not_count(url: str, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    client = Client(f"{url}?access_token={ALICE}", revision)
    assert (await client.post(client.call(1, "whoami"))).status == 401


@requirement("SRV-607")
@pytest.mark.parametrize("revision", ["2025-06-18", "2025-11-25", R5])
async def test_the_challenge_leads_to_the_metadata(url: str, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    client = Client(url, revision)
    challenge = (await client.post(client.call(1, "whoami"))).headers["www-authenticate"]
    address = challenge.partition('resource_metadata="')[2].partition('"')[0]
    reply = await fetch(address, "GET")
    document = json.loads(await reply.body())
    assert (reply.status, document["resource"]) == (200, url)
    assert document["authorization_servers"] == ["https://login.example.org"]
    assert (
        "invalid_token"
        in (await client.post(client.call(1, "whoami"), Authorization="Bearer x")).headers["www-authenticate"]
    )


@requirement("SRV-606", "SRV-608")
@pytest.mark.parametrize("revision", [*STREAMABLE, "pocket", R5])
async def test_a_call_without_the_scope_is_told_which_it_needs(url: str, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    bob = Caller(url, revision, BOB)
    await bob.open()
    reply = await bob.post(bob.call(1, "cancel_order", {"order": 7}))
    assert reply.status == 403
    challenge = reply.headers["www-authenticate"]
    assert 'error="insufficient_scope"' in challenge and 'scope="orders:read orders:write"' in challenge
    assert code(bob.checked(await reply.body())) == 403
    assert RAN == []
    alice = Caller(url, revision, ALICE)
    await alice.open()
    _, answer = await alice.ask(alice.call(1, "cancel_order", {"order": 7}))
    assert answer["result"]["content"][0]["text"] == "cancelled 7"


@requirement("SRV-602")
@pytest.mark.parametrize("revision", [*STREAMABLE, "pocket", R5])
async def test_a_hidden_tool_is_one_that_does_not_exist(url: str, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    bob, alice = Caller(url, revision, BOB), Caller(url, revision, ALICE)
    await bob.open()
    await alice.open()
    assert await bob.names() == ["whoami", "cancel_order", "asks"]
    assert await alice.names() == ["whoami", "cancel_order", "wipe", "asks"]
    hidden = await bob.post(bob.call(1, "wipe"))
    absent = await bob.post(bob.call(1, "wipo"))
    told, expected = await hidden.body(), await absent.body()
    assert (hidden.status, told.replace(b"wipe", b"wipo")) == (absent.status, expected)
    assert RAN == []
    _, answer = await alice.ask(alice.call(2, "wipe"))
    assert answer["result"]["content"][0]["text"] == "wiped"


@requirement("SRV-313")
async def test_a_list_that_depends_on_the_caller_is_not_for_everybodys_cache(url: str, ran: Ran) -> None:
    ran(R5, "http")
    alice = Caller(url, R5, ALICE)
    _, answer = await alice.ask(alice.message(1, "tools/list"))
    assert answer["result"]["cacheScope"] == "private"


@requirement("P-25")
@pytest.mark.parametrize("revision", [*STREAMABLE, "pocket"])
async def test_p25_the_session_of_another_is_no_session(url: str, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    alice, bob = Caller(url, revision, ALICE), Caller(url, revision, BOB)
    await alice.open()
    bob.session = alice.session
    for reply in (
        await bob.post(bob.call(1, "whoami")),
        await bob.post({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}),
        await bob.get(),
        await bob.get(Last_Event_ID="x.1"),
        await bob.delete(),
    ):
        assert reply.status == 404
    assert RAN == []
    _, answer = await alice.ask(alice.call(2, "whoami"))
    assert answer["result"]["content"][0]["text"] == "alice"


@requirement("P-25")
@pytest.mark.parametrize("revision", [*STREAMABLE, "pocket", R5])
async def test_p25_the_cursor_of_another_is_refused(url: str, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    alice, bob = Caller(url, revision, ALICE), Caller(url, revision, BOB)
    await alice.open()
    await bob.open()
    _, page = await alice.ask(alice.message(1, "tools/list"))
    cursor = page["result"]["nextCursor"]
    _, answer = await bob.ask(bob.message(2, "tools/list", {"cursor": cursor}))
    assert code(answer) == -32602
    _, answer = await alice.ask(alice.message(2, "tools/list", {"cursor": cursor}))
    assert "result" in answer


@requirement("P-25")
async def test_p25_the_request_state_of_another_is_refused(url: str, ran: Ran) -> None:
    ran(R5, "http")
    alice, bob = Caller(url, R5, ALICE), Caller(url, R5, BOB)
    able: Object = {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}}}
    _, asked = await alice.ask(alice.call(1, "asks", **able))
    state = asked["result"]["requestState"]
    key = next(iter(asked["result"]["inputRequests"]))
    retry = {"name": "asks", "arguments": {}, "requestState": state, "inputResponses": {key: {"action": "decline"}}}
    _, answer = await bob.ask(bob.message(2, "tools/call", retry, **able))
    assert code(answer) == -32602
    _, answer = await alice.ask(alice.message(3, "tools/call", retry, **able))
    assert answer["result"]["content"][0]["text"] == "decline"


@requirement("P-25")
@pytest.mark.parametrize("revision", ["2024-10-07", "2024-11-05"])
async def test_the_stream_of_another_takes_no_message(url: str, revision: str, ran: Ran) -> None:
    ran(revision, "http")
    alice, bob = Caller(url, revision, ALICE), Caller(url, revision, BOB)
    stream = await alice.get()
    event = await anext(stream.events())
    address = url.removesuffix("/mcp") + event["data"]
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}).encode()
    assert (await fetch(address, "POST", bob.headers(), body)).status == 404
    assert (await fetch(address, "POST", alice.headers(), body)).status == 202


@requirement("SRV-609")
@pytest.mark.parametrize("revision", [*STREAMABLE[1:], R5])
async def test_a_token_goes_nowhere_but_where_it_is_looked_at(revision: str, ran: Ran) -> None:
    """Two tools call another service, one with all it can learn of its caller; neither has the token to pass on."""
    ran(revision, "http")
    heard: list[bytes] = []
    is_over = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.close()
        await writer.wait_closed()
        is_over.set()

    other = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    server = Server("forwarding")

    @server.tool
    async def forward(call: Call) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        known = [getattr(call, name, None) for name in dir(call) if not name.startswith("__")]
        around = [call._state.peer, *vars(call._state.peer).values(), os.environ, *contextvars.copy_context().items()]
        writer.write(repr([*known, *around, call.principal.scopes]).encode())
        writer.close()
        await writer.wait_closed()
        return call.principal.id

    async with other, served(server.asgi(auth=ApiKeys({"alice": ALICE_STORED}))) as address:
        alice = Caller(address, revision, ALICE)
        await alice.open()
        _, answer = await alice.ask(alice.call(1, "forward"))
        async with asyncio.timeout(PATIENCE):
            await is_over.wait()
    assert answer["result"]["content"][0]["text"] == "alice"
    assert len(heard) == 1 and b"alice" in heard[0]
    assert ALICE.encode() not in heard[0]
