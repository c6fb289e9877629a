"""What an attack on resources and prompts found once: each mended, and each tried again here."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail import Call, EmbeddedResource, MemoryStore, Principal, ResourceNotFound, Server, Text, ToolError
from handrail.audit.reader import TrailFile
from handrail.guards import Approvals, Policy, Rates, Rule, Sanitize, ToolRate, ToolSanitize
from handrail.guards.identity import ApiKeys
from handrail.model import ToolResult
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from servers_http import Client, closed as closed, data, served, take
from tests.guards.test_resources import ALICE, ALICE_STORED, BOB as BOBS_KEY, BOB_STORED, Caller
from wires import ALL

Json = Any
Object = dict[str, Any]
Ran = Callable[[str, str], None]

R4, R5 = "2025-11-25", "2026-07-28"
HANDSHAKES = [each for each in ALL if each != R5]
SECRET = "s3cr3t-hunter2"
ANN, BOB = Principal("ann"), Principal("bob")


def code(answer: Object) -> int:
    return int(answer.get("error", {"code": 0})["code"])


def completion(what: str, argument: str, value: str = "", **context: str) -> Object:
    ref = {"type": "ref/resource", "uri": what} if ":" in what else {"type": "ref/prompt", "name": what}
    more = {"context": {"arguments": context}} if context else {}
    return {"ref": ref, "argument": {"name": argument, "value": value}, **more}


# Cache hints


async def same() -> str:
    return "x"


async def own(call: Call) -> str:
    return call.principal.id


CACHED: list[tuple[str, Object, Object, str]] = [
    ("nothing differs by caller", {}, {}, "public"),
    ("a rule about tools", {"policy": [Rule(verdict="deny", tools=["x"])]}, {}, "public"),
    ("a rule about prompts", {"policy": [Rule(verdict="deny", kind="prompt")]}, {}, "public"),
    ("no hint", {}, {"cache_seconds": None}, "private"),
    ("scopes", {}, {"scopes": ["admin"]}, "private"),
    ("a rule that denies", {"policy": [Rule(verdict="deny", uri="x:*", principals=["bob"])]}, {}, "private"),
    ("a rule that asks", {"policy": [Rule(verdict="ask", uri="x:*", principals=["bob"])]}, {}, "private"),
    ("a rule about all", {"policy": [Rule(verdict="deny", principals=["bob"])]}, {}, "private"),
    ("the function takes the call", {}, {"function": own}, "private"),
    ("middleware", {"middleware": True}, {}, "private"),
]


@requirement("SRV-704", "P-29")
@pytest.mark.parametrize(("options", "how", "scope"), [each[1:] for each in CACHED], ids=[each[0] for each in CACHED])
async def test_content_that_may_differ_by_caller_is_private(options: Object, how: Object, scope: str, ran: Ran) -> None:
    options, how = {**options}, {"cache_seconds": 60, **how}
    middleware, function = options.pop("middleware", False), how.pop("function", same)
    server = Server("s", **options)
    server.resource("x:a", **how)(function)
    if middleware:
        server.middleware(lambda call, next: next(call))
    async with Peer(server, revision=R5, principal=Principal("ann", frozenset({"admin"}))) as peer:
        ran(R5, "memory")
        result = (await peer.request("resources/read", {"uri": "x:a"}))["result"]
    assert (result["cacheScope"], result["ttlMs"]) == (scope, 60_000 if how["cache_seconds"] else 0)


# Completion


@requirement("SRV-731", "P-01", "P-08")
@pytest.mark.parametrize("problem", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), ValueError(SECRET)])
@pytest.mark.parametrize("runs_async", [False, True])
@pytest.mark.parametrize("revision", ALL)
async def test_a_completion_that_raises_is_an_error_and_nothing_else(
    revision: str, runs_async: bool, problem: BaseException, ran: Ran
) -> None:
    def fails(value: str) -> list[str]:
        raise problem

    async def fails_async(value: str) -> list[str]:
        raise problem

    server = Server("s")
    server.prompt("p", complete={"a": fails_async if runs_async else fails})(taking_a)
    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")
        async with asyncio.timeout(PATIENCE):
            answer = await peer.request("completion/complete", completion("p", "a"))
        assert code(answer) == -32603 and SECRET not in json.dumps(answer)
        assert "result" in await peer.request("prompts/get", {"name": "p", "arguments": {"a": "x"}})


async def taking_a(a: str) -> str:
    return a


@requirement("SRV-733", "SRV-742")
@pytest.mark.parametrize("revision", ALL)
async def test_completion_offers_no_value_whose_uri_is_hidden(revision: str, tmp_path: Path, ran: Ran) -> None:
    (tmp_path / "secret").mkdir()
    for name in ("open.txt", "secret/merger.txt", "secret.txt"):
        (tmp_path / name).write_text("x")
    rules = [Rule(verdict="hide", uri=["file:///d/secret*", "y://x/b"], principals=["ann"])]
    server = Server("s", policy=rules)
    server.add_files(tmp_path, uri="file:///d/")

    @server.resource("y://{a}/{b}", complete={"b": lambda value: ["a", "b"]})
    async def two(a: str, b: str) -> str:
        return a + b

    async with (
        Peer(server, revision=revision, principal=ANN) as ann,
        Peer(server, revision=revision, principal=BOB) as bob,
    ):
        ran(revision, "memory")

        async def values(peer: Peer, params: Object) -> list[str]:
            return list((await peer.request("completion/complete", params))["result"]["completion"]["values"])

        asked = completion("file:///d/{+path}", "path")
        assert await values(ann, asked) == ["open.txt"]
        assert await values(bob, asked) == ["open.txt", "secret.txt", "secret/merger.txt"]
        assert await values(ann, completion("y://{a}/{b}", "b")) == []  # the URI is not known yet
        if revision >= "2025-06-18":  # from then on the other arguments are told
            assert await values(ann, completion("y://{a}/{b}", "b", a="x")) == ["a"]
            assert await values(ann, completion("y://{a}/{b}", "b", a="z")) == ["a", "b"]


@requirement("SRV-732", "P-10")
async def test_completions_take_no_thread_of_a_tool_and_few_of_their_own(ran: Ran) -> None:
    goes_on, begun = threading.Event(), threading.Semaphore(0)

    def waits(value: str) -> list[str]:
        begun.release()
        goes_on.wait(PATIENCE)
        return [value]

    server = Server("s", workers=1, rates=None)
    server.prompt("p", complete={"a": waits})(taking_a)

    @server.tool
    def quick() -> str:
        return "quick"

    async with Peer(server, revision=R4, principal=ANN) as ann, Peer(server, revision=R4, principal=BOB) as bob:
        ran(R4, "memory")
        try:
            tasks = [asyncio.create_task(ann.request("completion/complete", completion("p", "a"))) for _ in range(4)]
            for _ in tasks:
                assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE)
            assert code(await ann.request("completion/complete", completion("p", "a"))) == 429
            other = asyncio.create_task(bob.request("completion/complete", completion("p", "a", "b")))
            assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE), "another caller has threads too"
            assert (await bob.call("quick")).text == "quick"
        finally:
            goes_on.set()
        assert all("result" in each for each in await asyncio.gather(*tasks, other))


@requirement("SRV-732", "P-04", "P-09")
@pytest.mark.parametrize("revision", [*ALL[1:]])
async def test_a_completion_in_flight_has_its_id_and_can_be_cancelled(revision: str, ran: Ran) -> None:
    began, stopped = asyncio.Event(), asyncio.Event()

    async def waits(value: str) -> list[str]:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return []

    server = Server("s")
    server.prompt("p", complete={"a": waits})(taking_a)
    async with Peer(server, revision=revision) as peer, asyncio.timeout(PATIENCE):
        ran(revision, "memory")
        asks = message(revision, "completion/complete", completion("p", "a"))
        await peer.send(asks)
        await began.wait()
        await peer.send(message(revision, "prompts/list", {}))
        assert code(await answer_to(peer, "c")) == -32600, "the id is in use"
        await peer.notify("notifications/cancelled", {"requestId": "c"})
        await stopped.wait()
        assert "result" in await peer.request("prompts/list")
    assert len([each for each in peer.wire if json.loads(each).get("id") == "c"]) == 1


def message(revision: str, method: str, params: Object) -> bytes:
    """A request with the id "c"."""
    names = {"protocolVersion": R5, "clientCapabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    meta = {f"io.modelcontextprotocol/{name}": value for name, value in names.items()} if revision == R5 else {}
    whole = {**params, **({"_meta": meta} if meta else {})}
    return json.dumps({"jsonrpc": "2.0", "id": "c", "method": method, "params": whole}).encode()


async def answer_to(peer: Peer, ident: str) -> Object:
    while True:
        for each in map(json.loads, peer.wire):
            if each.get("id") == ident:
                return dict(each)
        await asyncio.sleep(0)


# What is withheld is an error, everywhere by the same name


@requirement("SRV-708", "SRV-741", "SRV-604")
@pytest.mark.parametrize("size", [20, 60_000], ids=["small", "large"])
async def test_settings_of_sanitizing_name_prompts_and_templates_as_limits_do(size: int, ran: Ran) -> None:
    token = "ghp_" + "a1B2" * 9
    text = f"{'word ' * (size // 5)}{token}"
    keep, block = ToolSanitize(secrets="keep"), ToolSanitize(secrets="block")
    names = {"same": keep, "prompt:same": block, "x://{a}": block}
    server = Server("s", sanitize=Sanitize(tools=names, max_text=0, max_result=0))

    async def says(a: str = "") -> str:
        return text

    server.add(says, name="same")
    server.prompt("same")(says)
    server.resource("x://{a}")(says)
    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")
        assert token in (await peer.call("same")).text
        for method, params in (("prompts/get", {"name": "same"}), ("resources/read", {"uri": "x://1"})):
            answer = await peer.request(method, params)
            assert code(answer) == -32603 and token not in json.dumps(answer), method


@requirement("SRV-708", "SRV-614")
@pytest.mark.parametrize("what", ["withheld", "over the limit", "not JSON"])
async def test_the_audit_log_says_that_a_read_failed_that_could_not_be_sent(
    what: str, tmp_path: Path, ran: Ran
) -> None:
    server = Server("s", audit=tmp_path / "a.jsonl", sanitize=Sanitize(max_text=0, max_result=0))
    contents: dict[str, Any] = {
        "withheld": EmbeddedResource({"uri": "x:a", "mimeType": "image/svg+xml", "text": "<svg onload='x()'/>"}),
        "over the limit": "y" * (server.engine.limits.max_message_bytes + 1),
        "not JSON": {"x": float("nan")},
    }

    @server.resource("x:a")
    async def a() -> Any:
        return contents[what]

    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")
        assert code(await peer.request("resources/read", {"uri": "x:a"})) == -32603
    records = [json.loads(line) for _, line in TrailFile(tmp_path / "a.jsonl").lines()]
    assert [each.get("outcome") for each in records if "call" in each] == [None, "tool_error"]


@requirement("SRV-604", "SRV-704")
async def test_json_is_cleaned_of_what_its_escapes_say(ran: Ran) -> None:
    secret = 'quo"te-hunter2'
    server = Server("s", secrets=[secret])

    @server.resource("x:a")
    async def a() -> Object:
        return {"\x1b[31m": [secret, "ü"]}

    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")
        (content,) = (await peer.request("resources/read", {"uri": "x:a"}))["result"]["contents"]
    assert json.loads(content["text"]) == {"": ["****", "ü"]}


# Middleware and approvals


@requirement("SRV-707", "SRV-741")
@pytest.mark.parametrize("revision", ALL)
async def test_middleware_may_find_nothing_or_add_a_block(revision: str, ran: Ran) -> None:
    server = Server("s")

    @server.middleware
    async def changes(call: Call, next: Any) -> ToolResult:
        if call.name == "x:gone":
            raise ResourceNotFound()
        result: ToolResult = await next(call)
        if call.method == "prompts/get":
            result.content.append(Text("footer"))
        return result

    server.resource("x:{a}")(taking_a)
    server.prompt("p")(same)
    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")
        error = (await peer.request("resources/read", {"uri": "x:gone"}))["error"]
        assert (error["code"], error["data"]["uri"]) == (-32602 if revision == R5 else -32002, "x:gone")
        messages = (await peer.request("prompts/get", {"name": "p"}))["result"]["messages"]
        assert [each["content"]["text"] for each in messages] == ["x", "footer"]


@requirement("SRV-741", "P-32")
async def test_an_approved_read_is_of_the_uri_that_was_asked_for(ran: Ran) -> None:
    policy = Policy([Rule(verdict="deny", uri="x:secret"), Rule(verdict="ask", uri="x:*")])
    server = Server("s", policy=policy, approvals=Approvals(wait=0.02, round=0.005, by="operator"))
    read: list[str] = []

    @server.resource("x:{a}")
    async def a(a: str) -> str:
        read.append(a)
        return a

    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")
        assert code(await peer.request("resources/read", {"uri": "x:open"})) == 403
        (waiting,) = await server.approvals.open()
        await server.approvals.decide(waiting.id, True, by="operator", edited={"a": "secret"})
        answer = await peer.request("resources/read", {"uri": "x:open"})
        assert code(answer) == 403 and "URI that was asked for" in answer["error"]["message"]
    assert read == []


@requirement("SRV-411", "SRV-741")
async def test_the_data_of_a_failure_reaches_the_client(ran: Ran) -> None:
    server = Server("s")

    @server.resource("x:a")
    async def a() -> str:
        raise ToolError("upstream is down", status=502)

    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")
        error = (await peer.request("resources/read", {"uri": "x:a"}))["error"]
    assert (error["code"], error["message"], error["data"]) == (-32603, "upstream is down", {"status": 502})


# Subscriptions


@requirement("SRV-710", "SRV-711", "SRV-742")
@pytest.mark.parametrize("revision", ALL)
async def test_a_hidden_uri_below_a_template_is_subscribed_to_as_an_absent_one(revision: str, ran: Ran) -> None:
    server = Server("s", policy=[Rule(verdict="hide", uri="x:hidden")])
    server.resource("x:{a}")(taking_a)
    server.resource("x:hidden")(same)
    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")
        if revision == R5:
            wanted = {"resourceSubscriptions": ["x:hidden", "x:absent", "no:such"]}
            await peer.send(message(R5, "subscriptions/listen", {"notifications": wanted}))
            notice = await peer.notice("notifications/subscriptions/acknowledged")
            assert notice["params"]["notifications"]["resourceSubscriptions"] == ["x:hidden", "x:absent"]
        else:
            for method in ("resources/subscribe", "resources/unsubscribe"):
                hidden, absent, unknown = [
                    await peer.request(method, {"uri": uri}) for uri in ("x:hidden", "x:absent", "no:such")
                ]
                assert hidden["result"] == absent["result"] and code(unknown) == -32002, method
            for uri in ("x:hidden", "x:absent"):
                await peer.request("resources/subscribe", {"uri": uri})
        server.resource_updated("x:hidden")
        server.resource_updated("x:absent")
        notice = await peer.notice("notifications/resources/updated")
        assert notice["params"]["uri"] == "x:absent"
        await peer.request("resources/list")
        assert [each["params"]["uri"] for each in peer.notices if "updated" in each["method"]] == ["x:absent"]


def veiled() -> Server:
    """A template above what a rule hides, and what needs a scope to be seen."""
    server = Server("s", rates=None, policy=[Rule(verdict="hide", uri="x:hidden")])
    names = ["hidden", "open", "veiled"]
    server.resource("x:{a}", complete={"a": lambda value: [each for each in names if each.startswith(value)]})(taking_a)
    server.resource("x:veiled", scopes=["admin"], hide=True)(same)
    return server


@requirement("SRV-711", "SRV-742", "P-29")
@pytest.mark.parametrize("hidden", ["x:hidden", "x:veiled"])
async def test_a_hidden_uri_that_is_listened_to_twice_is_acknowledged_once(hidden: str, ran: Ran) -> None:
    heard = []
    for uri in (hidden, "x:absent"):
        async with Peer(veiled(), revision=R5) as peer:
            ran(R5, "memory")
            wanted = [uri, uri, uri.replace("x:", "X:"), "x:open"]
            await peer.send(message(R5, "subscriptions/listen", {"notifications": {"resourceSubscriptions": wanted}}))
            await peer.notice("notifications/subscriptions/acknowledged")
            heard.append(peer.wire[-1].replace(uri.encode(), b"URI"))
    assert heard[0] == heard[1] and heard[0].count(b"URI") == 1


@requirement("SRV-710", "SRV-712", "SRV-742", "P-29")
@pytest.mark.parametrize("revision", HANDSHAKES)
async def test_what_is_hidden_fills_the_table_of_subscriptions_as_what_is_absent(
    revision: str, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.engine.dispatcher.MAX_SUBSCRIPTIONS", 3)
    heard = []
    for uri in ("x:hidden", "x:veiled", "x:absent"):
        async with Peer(veiled(), revision=revision) as peer:
            ran(revision, "memory")
            asked = [uri, uri, "x:1", "x:2", "x:3", uri, "x:1"]
            first = [await peer.request("resources/subscribe", {"uri": each}) for each in asked]
            await peer.request("resources/unsubscribe", {"uri": uri})
            again = [await peer.request("resources/subscribe", {"uri": each}) for each in ("x:4", uri)]
            assert [code(each) for each in first + again] == [0, 0, 0, 0, 429, 0, 0, 0, 429]
            heard.append([each.replace(uri.encode(), b"URI") for each in peer.wire])
    assert heard[0] == heard[1] == heard[2]


@requirement("SRV-710", everywhere=True)
async def test_what_is_denied_and_not_subscribed_to_can_be_given_up() -> None:
    server = Server("s", policy=[Rule(verdict="deny", uri="x:denied")])
    server.resource("x:{a}")(taking_a)
    async with Peer(server, revision=R4) as peer:
        assert code(await peer.request("resources/subscribe", {"uri": "x:denied"})) == 403
        assert (await peer.request("resources/unsubscribe", {"uri": "x:denied"}))["result"] == {}


READ_BY_TYPE: list[tuple[str, Object, str]] = [  # of a rule about `page: int`: the verdict, the test, what may be read
    ("deny", {"over": 5}, "3 5"),
    ("deny", {"is": 7}, "3 5 8"),
    ("deny", {"is": "7"}, ""),  # a test of texts says nothing of a number
    ("deny", {"not_in": [3, 5]}, "3 5"),
    ("deny", {"matches": "^7$"}, ""),
    ("deny", {"longer_than": 9}, ""),
    ("allow", {"at_most": 5}, "3 5"),
    ("allow", {"matches": "^[35]$"}, ""),
    ("allow", {"is": "3"}, ""),
]


@requirement("SRV-710", "SRV-711", "SRV-741", "SRV-602")
@pytest.mark.parametrize("revision", ALL)
@pytest.mark.parametrize(("verdict", "test", "may_be_read"), READ_BY_TYPE)
async def test_what_may_be_read_may_be_subscribed_to_whatever_type_a_rule_looks_at(
    revision: str, verdict: Any, test: Object, may_be_read: str, ran: Ran
) -> None:
    default: Any = "allow" if verdict == "deny" else "deny"
    server = Server("s", policy=Policy([Rule(verdict=verdict, uri="b:*", arguments={"page": test})], default=default))

    @server.resource("b:{page}")
    async def book(page: int) -> str:
        return str(page)

    uris = [f"b:{page}" for page in (3, 5, 7, 8)]
    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")
        read = [uri for uri in uris if "result" in await peer.request("resources/read", {"uri": uri})]
        assert read == [f"b:{page}" for page in may_be_read.split()]
        if revision == R5:
            wanted = {"resourceSubscriptions": uris}
            await peer.send(message(R5, "subscriptions/listen", {"notifications": wanted}))
            notice = await peer.notice("notifications/subscriptions/acknowledged")
            assert notice["params"]["notifications"].get("resourceSubscriptions", []) == read
        else:
            codes = {uri: code(await peer.request("resources/subscribe", {"uri": uri})) for uri in uris}
            assert codes == {uri: 0 if uri in read else 403 for uri in uris}


@requirement("SRV-733", "SRV-742", "P-29")
@pytest.mark.parametrize("revision", ALL)
async def test_completion_offers_no_value_whose_uri_needs_a_scope_to_be_seen(revision: str, ran: Ran) -> None:
    server = Server("s")
    server.resource("x:{a}", complete={"a": lambda value: ["open", "veiled"]})(taking_a)
    server.resource("x:veiled", scopes=["admin"], hide=True)(same)
    for principal, values in ((BOB, ["open"]), (Principal("boss", frozenset({"admin"})), ["open", "veiled"])):
        async with Peer(server, revision=revision, principal=principal) as peer:
            ran(revision, "memory")
            result = (await peer.request("completion/complete", completion("x:{a}", "a")))["result"]
            assert result["completion"]["values"] == values


@requirement("SRV-712", "P-30")
async def test_updates_that_nobody_reads_wait_once_each(ran: Ran) -> None:
    server = Server("s")
    server.resource("x:a")(same)
    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")
        await peer.request("resources/subscribe", {"uri": "x:a"})
        (stream,) = server.engine.open_streams
        unsent: list[bytes] = []
        blocked, second = asyncio.Event(), asyncio.Event()

        class Slow:
            two_way, stopping, disconnected = True, False, False

            def send(self, message: bytes) -> None:
                unsent.append(message)
                if len(unsent) > 1:
                    second.set()

            async def drain(self) -> None:
                await blocked.wait()

            def pause(self) -> None: ...

        stream.reply_channel, channel = Slow(), stream.reply_channel
        for _ in range(1_000):
            server.resource_updated("x:a")
            await asyncio.sleep(0)
        assert len(unsent) == 1
        blocked.set()
        async with asyncio.timeout(PATIENCE):
            await second.wait()
        assert len(unsent) == 2
        stream.reply_channel = channel


@requirement("SRV-712", "P-30")
async def test_a_caller_has_one_allowance_of_subscriptions_for_all_its_streams(ran: Ran) -> None:
    server = Server("s", rates=None)
    server.resource("x:{a}")(taking_a)
    async with served(server.asgi()) as url:
        ran(R5, "http")
        client, counts = Client(url, R5), []
        for at in range(3):
            uris = [f"x:{at}-{number}" for number in range(600)]
            params = {"notifications": {"resourceSubscriptions": uris}}
            reply = await client.post(client.message(f"l{at}", "subscriptions/listen", params))
            (notice,) = await take(reply.events())
            counts.append(len(data(notice)["params"]["notifications"].get("resourceSubscriptions", ())))
        assert counts == [600, 400, 0]


LONG = "a" * 2_000


@requirement("SRV-710", "SRV-712", "P-30")
@pytest.mark.parametrize("revision", HANDSHAKES)
async def test_the_characters_of_a_peers_subscriptions_are_bounded(revision: str, ran: Ran) -> None:
    server = Server("s", rates=None)
    server.resource("x:{a}")(taking_a)
    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")

        async def asks(verb: str, at: int) -> int:
            return code(await peer.request(f"resources/{verb}", {"uri": f"x:{at}{LONG}"}))

        codes = [await asks("subscribe", at) for at in range(100)]
        most = codes.count(0)
        assert 128 * 1024 - 3_000 < most * 2_003 < 128 * 1024 and codes == [0] * most + [429] * (100 - most)
        assert await asks("subscribe", 0) == 0, "it is subscribed to already"
        assert await asks("unsubscribe", 0) == 0
        assert [await asks("subscribe", at) for at in (most, most + 1)] == [0, 429]


@requirement("SRV-710", "SRV-712", "P-30")
@pytest.mark.parametrize("revision", ["2025-03-26", R4])
async def test_a_caller_has_one_allowance_of_subscriptions_for_all_its_sessions(
    revision: str, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.engine.http_sessions.MAX_CALLER_CHARS", 20_000)
    server, store = Server("s", rates=None), MemoryStore()
    server.resource("x:{a}")(taking_a)
    auth = ApiKeys({"alice": ALICE_STORED, "bob": BOB_STORED})
    async with served(server.asgi(auth=auth, store=store)) as url:
        ran(revision, "http")

        async def asks(client: Client, verb: str, at: int) -> int:
            asked = client.message(f"{verb} {at}", f"resources/{verb}", {"uri": f"x:{at}{LONG}"})
            return code((await client.ask(asked))[1])

        sessions = [Caller(url, revision, ALICE) for _ in range(3)]
        codes = []
        for session in sessions:
            await session.open()
            codes.append([await asks(session, "subscribe", at) for at in range(4)])
        assert codes == [[0] * 4, [0] * 4, [0, 429, 429, 429]]
        bob = Caller(url, revision, BOBS_KEY)
        await bob.open()
        assert await asks(bob, "subscribe", 0) == 0, "another caller has its own"
        assert [await asks(session, "subscribe", 0) for session in sessions] == [0] * 3, "those there are stay"
        assert await asks(sessions[0], "unsubscribe", 0) == 0
        assert [await asks(sessions[2], "subscribe", at) for at in (1, 2)] == [0, 429]
        await sessions[1].delete()
        assert [await asks(sessions[2], "subscribe", at) for at in range(6)] == [0] * 6
        assert [await asks(sessions[2], "unsubscribe", at) for at in range(6)] == [0] * 6
        await sessions[0].delete()
        assert dict(await store.scan("subscribed:"))["subscribed:alice 127.0.0.1"] == b"0"


@requirement("SRV-710", "SRV-712", "P-30")
async def test_a_caller_has_one_allowance_of_subscriptions_for_all_streams_of_2024(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.engine.dispatcher.MAX_CALLER_CHARS", 7_000)
    server = Server("s", rates=None)
    server.resource("x:{a}")(taking_a)
    uris = [f"x:{at}{LONG}" for at in range(3)]
    async with (
        Peer(server, revision="2024-11-05", principal=ANN) as one,
        Peer(server, revision="2024-11-05", principal=ANN) as two,
        Peer(server, revision="2024-11-05", principal=BOB) as bob,
    ):
        ran("2024-11-05", "memory")
        codes = [
            [code(await peer.request("resources/subscribe", {"uri": uri})) for uri in uris] for peer in (one, two, bob)
        ]
        assert codes == [[0, 0, 0], [429, 429, 429], [0, 0, 0]]
        await one.request("resources/unsubscribe", {"uri": uris[0]})
        assert code(await two.request("resources/subscribe", {"uri": uris[0]})) == 0


class SlowStore(MemoryStore):
    """A store as those of other processes: others go on while one waits for it."""

    async def get(self, key: str) -> bytes | None:
        value = await super().get(key)
        await asyncio.sleep(0)
        return value


@requirement("SRV-710", "SRV-712")
async def test_subscriptions_of_a_session_end_with_it_and_hold_in_a_batch(ran: Ran) -> None:
    store = SlowStore()
    server = Server("s", rates=None)
    server.resource("x:{a}")(taking_a)
    async with served(server.asgi(store=store)) as url:
        ran("2025-03-26", "http")
        client = Client(url, "2025-03-26")
        await client.open()
        batch = [client.message(at, "resources/subscribe", {"uri": f"x:{at}"}) for at in range(3)]
        assert (await client.post(batch)).status == 200
        (row,) = await store.scan("subscriptions:")
        assert json.loads(row[1]) == {f"x:{at}": f"x:{at}" for at in range(3)}
        many = [client.ask(client.message(at, "resources/subscribe", {"uri": f"x:m{at}"})) for at in range(20)]
        await asyncio.gather(*many)
        (row,) = await store.scan("subscriptions:")
        assert len(json.loads(row[1])) == 23, "requests side by side keep what the others have stored"
        batches = [
            [client.message(at + one, "resources/subscribe", {"uri": f"x:b{at + one}"}) for one in range(250)]
            for at in range(0, 2_000, 250)
        ]
        await asyncio.gather(*map(client.post, batches))
        (row,) = await store.scan("subscriptions:")
        assert len(json.loads(row[1])) == 1_000, "together they have no more room than one"
        await client.delete()
        assert await store.scan("subscriptions:") == []


@requirement("SRV-701", "SRV-713")
@pytest.mark.parametrize("revision", HANDSHAKES)
async def test_a_capability_that_was_declared_stays(revision: str, ran: Ran) -> None:
    server = Server("s")
    server.prompt("p")(same)
    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")
        server.remove("p", kind="prompt")
        assert (await peer.request("prompts/list"))["result"]["prompts"] == []
        assert code(await peer.request("prompts/get", {"name": "p"})) == -32602


@requirement("SRV-610", "P-34")
async def test_an_unknown_uri_with_a_secret_is_masked_on_record(tmp_path: Path, ran: Ran) -> None:
    server = Server("s", audit=tmp_path / "a.jsonl", secrets=[SECRET])
    server.resource("x:{a}")(taking_a)
    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")
        for uri in (f"no:{SECRET}", f"x:{SECRET}", "x:%733cr3t-hunter2"):
            await peer.request("resources/read", {"uri": uri})
    text = (tmp_path / "a.jsonl").read_text()
    assert SECRET not in text and "hunter2" not in text


async def test_two_principals_over_http_see_their_own_only() -> None:
    """Bob can neither read, subscribe nor unsubscribe in the session of Ann."""
    ann_key, ann_stored = ApiKeys.new()
    bob_key, bob_stored = ApiKeys.new()
    server = Server("s")
    server.resource("x:a")(same)
    async with served(server.asgi(auth=ApiKeys({"ann": ann_stored, "bob": bob_stored}))) as url:
        ann, bob = Caller(url, R4, ann_key), Caller(url, R4, bob_key)
        await ann.open()
        bob.session = ann.session
        for at, method in enumerate(("resources/read", "resources/subscribe", "resources/unsubscribe")):
            reply = await bob.post(bob.message(at, method, {"uri": "x:a"}))
            assert reply.status == 404, method


# Spellings


GUARDED: list[tuple[str, str, list[str]]] = [  # a guarded resource or template, its URI, and other spellings of that
    ("d:///secret/x", "d:///secret/x", ["d:///secret%2Fx", "d:///secret%2fx", "D:///secret/x"]),
    ("d:///secret/{a}", "d:///secret/x", ["d:///secret%2Fx", "d:///%73ecret%2Fx"]),
    ("d:///secret/{+p}", "d:///secret/x/y", ["d:///secret%2Fx/y", "d:///secret/x%2Fy"]),
    ("d:///{a}/{b}.key", "d:///x/y.key", ["d:///x%2Fy.key", "d:///x%2Fy%2Ekey"]),
    ("d:///a,b@c", "d:///a,b@c", ["d:///a%2Cb@c", "d:///a,b%40c"]),
]


@requirement("SRV-709", "SRV-742")
@pytest.mark.parametrize(("guarded", "uri", "spellings"), GUARDED, ids=[each[0] for each in GUARDED])
@pytest.mark.parametrize("how", [{"scopes": ["admin"]}, {"scopes": ["admin"], "hide": True}, {"tags": ["t"]}], ids=str)
async def test_no_spelling_goes_around_a_closer_resource(
    how: Object, guarded: str, uri: str, spellings: list[str], ran: Ran
) -> None:
    server = Server("s", policy=[Rule(verdict="deny", tags=["t"])])
    read: list[str] = []

    async def anything(p: str) -> str:
        read.append(p)
        return p

    async def closer(a: str = "", b: str = "", p: str = "") -> str:
        read.append("closer")
        return "closer"

    server.resource("d:///{+p}")(anything)
    server.resource(guarded, **how)(closer)
    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")
        for each in (uri, *spellings):
            assert code(await peer.request("resources/read", {"uri": each})) in (403, -32002), each
        assert read == []
        assert "result" in await peer.request("resources/read", {"uri": "d:///elsewhere"})


@requirement("SRV-706", "SRV-708")
async def test_a_file_below_too_many_folders_is_not_there(tmp_path: Path, ran: Ran) -> None:
    inner = tmp_path
    for _ in range(40):
        inner = inner / "a"
        inner.mkdir()
        (inner / "f.txt").write_text("x")
    server = Server("s", rates=None)
    server.add_files(tmp_path, uri="file:///d/")
    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")
        for depth in (1, 31, 32, 40):
            answer = await peer.request("resources/read", {"uri": f"file:///d/{'a/' * depth}f.txt"})
            assert code(answer) == (0 if depth < 32 else -32002), depth


@requirement("SRV-712", "P-01")
async def test_a_listen_of_endless_uris_is_cut_short(ran: Ran) -> None:
    server = Server("s", rates=None)
    server.resource("x:{a}")(taking_a)
    uris = [f"x:{at}{'%C3%BC' * 300}" for at in range(500)]
    async with Peer(server, revision=R5) as peer:
        ran(R5, "memory")
        await peer.send(message(R5, "subscriptions/listen", {"notifications": {"resourceSubscriptions": uris}}))
        notice = await peer.notice("notifications/subscriptions/acknowledged")
        honoured = notice["params"]["notifications"]["resourceSubscriptions"]
        assert honoured == uris[: len(honoured)] and 0 < len(honoured) < 100


@requirement("SRV-603", "SRV-705")
async def test_all_files_of_a_folder_have_one_budget_and_one_set_of_scopes(tmp_path: Path, ran: Ran) -> None:
    for at in range(3):
        (tmp_path / f"{at}.txt").write_text("x")
    server = Server("s", rates=Rates(tools={"file:///d/{+path}": ToolRate(rate="2/hour")}))
    server.add_files(tmp_path, uri="file:///d/", scopes=["files"], hide=True)
    async with (
        Peer(server, revision=R4, principal=Principal("ann", frozenset({"files"}))) as ann,
        Peer(server, revision=R4, principal=BOB) as bob,
    ):
        ran(R4, "memory")
        codes = [code(await ann.request("resources/read", {"uri": f"file:///d/{at}.txt"})) for at in range(3)]
        assert codes == [0, 0, 429]
        assert (await bob.request("resources/list"))["result"]["resources"] == []
        assert code(await bob.request("resources/read", {"uri": "file:///d/0.txt"})) == -32002


@requirement("SRV-705", "SRV-731", "SRV-732")
async def test_the_path_of_a_file_is_completed_also_if_it_is_not_listed(
    tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = ["a/one.txt", "z/deep/one.txt", "z/deeper/two.txt", "z/file.txt"]
    paths = sorted([*(f"f{at}.txt" for at in range(1_100)), *below])
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    server = Server("s")
    server.add_files(tmp_path, uri="file:///d/")
    async with Peer(server, revision=R4) as peer:
        ran(R4, "memory")

        async def completed(value: str) -> tuple[list[str], int]:
            answer = await peer.request("completion/complete", completion("file:///d/{+path}", "path", value))
            result = answer["result"]["completion"]
            return result["values"], result["total"]

        assert len(server.resources) == 1_000
        for value in ("", "f", "f109", "z", "z/", "z/dee", "z/deep/", "z/deep/one.txt", "z/deep/one.txt/", "/", "Z"):
            fitting = [path for path in paths if path.startswith(value)]
            assert await completed(value) == (fitting[:100], len(fitting)), value
        monkeypatch.setattr("handrail.engine.files.MAX_SCANNED", 1_104)  # no more than the folders on the way have
        for value in ("a/", "z/f"):
            assert (await completed(value))[1] == 1, value
