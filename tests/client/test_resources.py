"""The client and what servers offer beside tools: resources, templates, prompts, completion; in every revision."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clients import ALL, LEGACY, R0, R1, R2, R3, R4, R5, Heard, P
from handrail import Client, Confirmation, Elicitation
from handrail.errors import (
    CallTimeout,
    ConfirmationRequired,
    Denied,
    InvalidResult,
    LocalProtocolError,
    PeerError,
    RemoteProtocolError,
    Sent,
    TransportError,
)
from handrail.guards import Rule
from handrail.model import Audio, EmbeddedResource, Image, PromptMessage, ResourceLink, Text
from handrail.transports.memory import MemoryTransport
from patience import PATIENCE
from requirements import record_ran, requirement
from rigs import Object, Rig
from tests.client.resource_rig import ENTRIES, KINDS, LISTS, HttpShelf, ShelfRig, capabilities, command, shelf

TRANSPORTS = ("memory", "stdio", "http")
BOTH_LISTS = {"resourcesListChanged": True, "promptsListChanged": True}
COMPLETIONS = (R2, R3, R4, P, R5)  # revisions in which completion has to be declared
NAMES = {"resources/list": "resources", "resources/templates/list": "templates", "prompts/list": "prompts"}

OpenShelf = Callable[..., AbstractAsyncContextManager[tuple[Client, Heard]]]


def everywhere(*revisions: str, transports: tuple[str, ...] = TRANSPORTS) -> pytest.MarkDecorator:
    places = [(revision, transport) for revision in revisions for transport in transports]
    return pytest.mark.parametrize(("revision", "transport"), places)


@pytest.fixture
def open_shelf(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenShelf:
    """`async with open_shelf(revision, transport, state, **options of Client) as (client, heard)`."""
    monkeypatch.setattr("handrail.client.negotiation._handshake_servers", {})
    monkeypatch.setattr("handrail.client.resources.RENEW_SECONDS", 0.0)
    monkeypatch.setattr("handrail.client.connection.MAX_PAUSE_SECONDS", 0.0)  # before a server is started again
    monkeypatch.setattr("handrail.transports.http_client.MIN_RETRY_SECONDS", 0.0)

    @asynccontextmanager
    async def opened(
        revision: str, transport: str, state: Object | None = None, /, **options: Any
    ) -> AsyncIterator[tuple[Client, Heard]]:
        record_ran(request, revision, transport)
        options = {"revision": revision, "timeout": PATIENCE, **options}
        rig = HttpShelf(revision) if transport == "http" else ShelfRig(shelf, revision)
        rig.state.update(state or {})
        if isinstance(rig, HttpShelf):
            rig.has_stream = rig.state.get("has_stream", True)
            async with rig.listening() as url, Client(url, **options) as client:
                yield client, Heard(rig, None)
        elif transport == "memory":
            async with Client(rig, **options) as client:
                yield client, Heard(rig, None)
        else:
            assert not state, "a process cannot be prepared"
            log = tmp_path / "shelf.log"
            async with Client(command(revision, log), **options) as client:
                yield client, Heard(rig, log)

    return opened


def listing(client: Client, method: str) -> Callable[..., Any]:
    lists: Callable[..., Any] = getattr(client, NAMES[method])
    return lists


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if is_so():
                return
            await asyncio.sleep(0)


async def kept(lists: Callable[..., Any]) -> Any:
    """The list that lasts: in 2026-07-28 the first is old as soon as the subscription to its changes has begun."""
    async with asyncio.timeout(PATIENCE):
        while True:
            entries = await lists()
            if await lists() is entries:
                return entries
            await asyncio.sleep(0)


# Lists


@requirement("CLI-50")
@everywhere(*ALL)
async def test_every_page_is_listed_once(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with open_shelf(revision, transport) as (client, heard):
        for method in NAMES:
            lists = listing(client, method)
            entries = await lists()
            assert [each.raw for each in entries] == ENTRIES[method] and entries.refused == {}
            entries = await kept(lists)
            assert await lists(fresh=True) is not entries
            pages = [each.get("params", {}).get("cursor") for each in heard.asked(method)]
            one_list = [None, "2", "4"][: (len(ENTRIES[method]) + 1) // 2]
            assert pages == one_list * (len(pages) // len(one_list)) and len(pages) >= 2 * len(one_list)


@requirement("CLI-50")
@everywhere(*ALL)
async def test_a_notice_makes_the_lists_of_its_kind_stale(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with open_shelf(revision, transport) as (client, heard):
        for method in NAMES:
            kind = method.partition("/")[0]
            lists = listing(client, method)
            await lists()
            if revision == R5:
                await until(lambda: len(heard.asked("subscriptions/listen")) > 0)
                listened = heard.asked("subscriptions/listen")[-1]["params"]["notifications"]
                assert listened == BOTH_LISTS
            entries = await kept(lists)
            await client.call("echo", {"changed": [kind]})
            async with asyncio.timeout(PATIENCE):
                while True:
                    if await lists() is not entries:
                        break
                    await asyncio.sleep(0)


@requirement("CLI-50")
@everywhere(R5)
async def test_one_subscription_watches_all_lists(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    changed: list[str] = []
    async with open_shelf(revision, transport, on_tools_changed=changed.append) as (client, heard):
        await kept(client.resources)
        await client.tools()
        changed.clear()
        await kept(client.templates)
        await kept(client.prompts)
        assert [params(each) for each in heard.asked("subscriptions/listen")] == [BOTH_LISTS]
        assert changed == []


@requirement("CLI-50")
@everywhere(R1, R5, transports=("memory",))
@pytest.mark.parametrize("method", NAMES)
async def test_a_cursor_that_comes_again_ends_the_list(
    open_shelf: OpenShelf, revision: str, transport: str, method: str
) -> None:
    again = {method: {LISTS[method]: [], "nextCursor": "again"}}
    async with open_shelf(revision, transport, {"answers": again}) as (client, heard):
        with pytest.raises(InvalidResult, match="came before") as caught:
            await listing(client, method)()
        assert caught.value.result["nextCursor"] == "again" and caught.value.phase == method
        assert len(heard.asked(method)) == 2


@requirement("CLI-50")
@everywhere(*ALL, transports=("memory",))
async def test_entries_tell_what_the_server_says_of_them(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with open_shelf(revision, transport) as (client, _):
        text, binary, *_ = await client.resources()
        assert (text.uri, text.name, text.title, text.mime_type, text.size) == (
            "doc://text",
            "text",
            "A text",
            "text/plain",
            5,
        )
        assert (binary.mime_type, binary.size, binary.annotations, binary.icons) == ("", None, {"priority": 0.5}, [])
        assert (await client.resources())["doc://several"].description == "More than one."
        assert repr(text) == f"<resource 'text' of {text.server!r}>"
        note, odd, _ = await client.templates()
        assert (note.uri_template, note.mime_type, note.title) == ("note://{name}/{page}", "text/markdown", "note")
        assert note.matches("note://a/1") and not note.matches("note://a") and not odd.matches("odd://abc")
        review, kinds, _ = await client.prompts()
        assert [each["name"] for each in review.arguments] == ["code", "style"]
        assert review.arguments[0]["required"] is True and review.arguments[1]["title"] == "Style"
        assert (kinds.title, kinds.arguments, kinds.server) == ("All kinds", [], text.server)


@requirement("CLI-50", "CLI-55")
@everywhere(*ALL, transports=("memory",))
async def test_one_bad_entry_does_not_hide_the_others(
    open_shelf: OpenShelf, revision: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    for method in NAMES:
        caplog.clear()
        await check_bad_entries(open_shelf, revision, transport, method, caplog)


async def check_bad_entries(
    open_shelf: OpenShelf, revision: str, transport: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = "name" if method == "prompts/list" else "uri" if method == "resources/list" else "uriTemplate"
    good = {key: "good:x", "name": "good:x", "unknown": [1]}
    bad: list[Any] = [dict(good), {key: ""}, {key: 7}, 7, None, {}, {key: "a:b", "description": "x" * 20_000}]
    odd = {key: "odd:x", "name": "odd:x", "title": 7, "description": [], "mimeType": 1, "size": "1", "arguments": 1}
    async with open_shelf(revision, transport, {method: [good, *bad, odd, {key: "bare:x"}]}) as (client, _):
        entries = await listing(client, method)()
        assert [each.key for each in entries] == ["good:x", "odd:x", "bare:x"]
        assert len(entries.refused) == len(bad) == caplog.text.count(" left out: ")
        assert (entries["odd:x"].title, entries["odd:x"].description) == ("odd:x", "")
        if method == "prompts/list":
            assert entries[1].arguments == []
        else:
            assert (entries[1].mime_type, entries[1].size, entries["bare:x"].name) == ("", None, "bare:x")


@requirement("CLI-17", "CLI-50")
@everywhere(*ALL, transports=("memory", "http"))
async def test_what_a_server_does_not_declare_is_not_asked_for(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    async with open_shelf(revision, transport, {"capabilities": {"tools": {}}}) as (client, heard):
        before = len(heard.messages)
        for lists in (client.resources, client.templates, client.prompts):
            assert list(await lists()) == []
        for attempt, capability in (
            (client.read("doc://text"), "resources"),
            (client.subscribe("doc://text").__aenter__(), "resources"),
            (client.prompt("review"), "prompts"),
        ):
            with pytest.raises(RemoteProtocolError, match=f"no {capability}") as caught:
                await attempt
            assert caught.value.sent is Sent.NO and caught.value.server
        await client.call("echo", {})  # so that all there was is heard
        assert [each["method"] for each in heard.messages[before:] if "id" in each] == ["tools/list", "tools/call"]


@requirement("CLI-50")
async def test_a_server_may_have_resources_and_no_templates(open_shelf: OpenShelf) -> None:
    def script(rig: Rig, message: Object) -> None:
        if message.get("method") == "resources/templates/list":
            rig.error(message, rig.state["code"], "no")
        else:
            shelf(rig, message)

    rig = Rig(script, R4)
    async with Client(rig, revision=R4, timeout=PATIENCE) as client:
        rig.state["code"] = -32601
        assert list(await client.templates()) == []
        rig.state["code"] = -32603
        with pytest.raises(RemoteProtocolError):
            await client.templates()


# Reading


@requirement("CLI-51")
@everywhere(*ALL)
async def test_all_contents_are_read(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with open_shelf(revision, transport) as (client, heard):
        result = await client.read("doc://text")
        (content,) = result.contents
        assert (content.uri, content.mime_type, content.text, content.meta) == (
            "doc://text",
            "text/plain",
            "hello ü",
            {"a": 1},
        )
        assert content.data == "hello ü".encode() and result.text == "hello ü" and result.problems == []
        assert result.raw["contents"][0]["text"] == "hello ü"
        (content,) = (await client.read("doc://binary")).contents
        assert (content.text, content.data, content.meta) == (None, b"\x89PNG\r\n\x1a\n", {})
        several = await client.read("doc://several")
        assert [each.text for each in several.contents] == ["one", None, ""]
        assert [each.data for each in several.contents] == [b"one", b"\0\1", b""]
        assert several.text == "one\n"
        sent = [{k: v for k, v in each["params"].items() if k != "_meta"} for each in heard.asked("resources/read")]
        assert sent == [{"uri": "doc://text"}, {"uri": "doc://binary"}, {"uri": "doc://several"}]


@requirement("CLI-51")
@everywhere(*ALL)
async def test_an_unknown_uri_is_an_error_with_code_and_uri(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    async with open_shelf(revision, transport) as (client, _):
        with pytest.raises(RemoteProtocolError) as caught:
            await client.read("doc://nowhere")
        problem = caught.value
        assert (problem.code, problem.data) == (-32602 if revision == R5 else -32002, {"uri": "doc://nowhere"})
        assert problem.sent is Sent.FAILED and problem.phase == "resources/read doc://nowhere"
        with pytest.raises(LocalProtocolError, match="not sent: a URI is a text"):
            await client.read(7)  # type: ignore[arg-type]


async def test_what_only_reads_is_sent_again_when_the_transport_fails(open_shelf: OpenShelf) -> None:
    def script(rig: Rig, message: Object) -> None:
        if message.get("method") in ("resources/read", "prompts/get") and rig.state.pop("dies", False):
            rig.die()
        else:
            shelf(rig, message)

    rig = Rig(script, R4)
    async with Client(rig, revision=R4, timeout=PATIENCE) as client:
        rig.state["dies"] = True
        assert (await client.read("doc://text")).text == "hello ü"
        rig.state["dies"] = True
        assert (await client.prompt("review", {"code": "x"})).text == '{"code": "x"}'
        assert len(rig.asked("resources/read")) == len(rig.asked("prompts/get")) == 2


BAD_CONTENTS: list[Any] = [
    7,
    None,
    {},
    {"uri": 7, "text": "x"},
    {"uri": "doc://a"},
    {"uri": "doc://a", "text": 7},
    {"uri": "doc://a", "blob": "not base64!"},
    {"uri": "doc://a", "blob": "AAA"},
    {"uri": "doc://a", "blob": []},
    {"uri": "doc://a", "text": "x", "blob": "AAAA"},
    {"uri": "doc://a", "text": "x", "mimeType": 7},
    {"uri": "doc://a", "text": "x", "_meta": [1]},
]
BAD_MESSAGES: list[Any] = [
    7,
    None,
    {},
    {"role": "system", "content": {"type": "text", "text": "x"}},
    {"role": ["user"], "content": {"type": "text", "text": "x"}},
    {"role": "user"},
    {"role": "user", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
]
BAD_COMPLETIONS: list[Any] = [
    {},
    {"values": None},
    {"values": "abc"},
    {"values": ["a", 7]},
    {"values": {"a": 1}},
    7,
    None,
]
ODD_BLOCKS: list[Any] = [
    {"type": "image"},
    {"type": "text", "text": 7},
    {"text": "x"},
    {"type": "text", "text": "x", "y": 1},
]


@requirement("CLI-51", "CLI-55")
@everywhere(*ALL, transports=("memory",))
async def test_malformed_contents_are_told(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    good = {"uri": "doc://a", "text": "good", "mimeType": None}
    answers: dict[str, Any] = {}
    for strict in (False, True):
        async with open_shelf(revision, transport, {"answers": answers}, strict=strict) as (client, _):
            for contents in (None, 7, "x", {}, {"0": good}):
                answers["resources/read"] = {"contents": contents}
                with pytest.raises(InvalidResult, match="no list of contents") as caught:
                    await client.read("doc://a")
                assert caught.value.result["contents"] == contents
            for bad in BAD_CONTENTS:
                answers["resources/read"] = {"contents": [bad]}
                with pytest.raises(InvalidResult, match="contents/0: ") as caught:
                    await client.read("doc://a")
                assert caught.value.result["contents"] == [bad]
                answers["resources/read"] = {"contents": [bad, good]}
                if strict:
                    with pytest.raises(InvalidResult, match="malformed: contents/0: ") as caught:
                        await client.read("doc://a")
                    assert caught.value.result.raw["contents"] == [bad, good]
                else:
                    result = await client.read("doc://a")
                    assert result.text == "good" and [each[:12] for each in result.problems] == ["contents/0: "]
            answers["resources/read"] = {"contents": []}
            assert (await client.read("doc://a")).contents == []


# Prompts


@requirement("CLI-53")
@everywhere(*ALL)
async def test_messages_of_every_kind_arrive(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with open_shelf(revision, transport) as (client, _):
        prompt = await client.prompt("kinds")
        kinds = [Text, Text, Image, Audio, EmbeddedResource, ResourceLink, dict]
        assert [type(each.content) for each in prompt.messages] == kinds
        assert [each.role for each in prompt.messages] == ["user", "assistant"] * 3 + ["user"]
        first, last = prompt.messages[0], prompt.messages[-1]
        assert first == PromptMessage("user", Text("hello", annotations={"priority": 0.5}))
        assert last.content == KINDS[-1]
        assert (prompt.description, prompt.text) == ("All there are", "hello\n")
        assert prompt.problems == [] and [each["content"] for each in prompt.raw["messages"]] == KINDS


@requirement("CLI-53")
@everywhere(*ALL)
async def test_arguments_of_prompts_are_sent_as_texts(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    given = {"code": "true", "flag": True, "count": 3, "share": 0.5, "list": [1, "ü"], "none": None}
    async with open_shelf(revision, transport) as (client, heard):
        prompt = await client.prompt("review", given)
        texts = {"code": "true", "flag": "true", "count": "3", "share": "0.5", "list": '[1,"ü"]'}
        assert json.loads(prompt.text) == texts and prompt.description == ""
        await client.prompt("review")
        (_, second) = heard.asked("prompts/get")
        assert second["params"]["name"] == "review" and second["params"]["arguments"] == {}
        for wrong in ({"code": float("nan")}, {"code": object()}, ["code"]):
            with pytest.raises(LocalProtocolError, match="prompts/get review: not sent"):
                await client.prompt("review", wrong)  # type: ignore[arg-type]
        with pytest.raises(RemoteProtocolError, match="Unknown prompt") as caught:
            await client.prompt("nope")
        assert (caught.value.code, caught.value.phase, caught.value.hint) == (-32602, "prompts/get nope", "")


@requirement("CLI-53", "CLI-55")
@everywhere(*ALL, transports=("memory",))
async def test_malformed_messages_are_told(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    good = {"role": "user", "content": {"type": "text", "text": "good"}}
    answers: dict[str, Any] = {}
    for strict in (False, True):
        async with open_shelf(revision, transport, {"answers": answers}, strict=strict) as (client, _):
            wrong: list[Any] = [None, 7, {}, "x"]
            for messages in wrong:
                answers["prompts/get"] = {"messages": messages}
                with pytest.raises(InvalidResult, match="no list of messages") as caught:
                    await client.prompt("x")
                assert caught.value.result["messages"] == messages
            odd = [{"role": "user", "content": each} for each in ODD_BLOCKS]
            for bad in [*BAD_MESSAGES, *odd]:
                answers["prompts/get"] = {"messages": [good, bad], "description": 7}
                if strict:
                    with pytest.raises(InvalidResult, match="malformed: messages/1") as caught:
                        await client.prompt("x")
                    assert caught.value.result.raw["messages"] == [good, bad]
                    continue
                prompt = await client.prompt("x")
                assert prompt.text == "good" and [each[:10] for each in prompt.problems] == ["messages/1"]
                assert len(prompt.messages) == 1 + (bad in odd) and prompt.description == ""
                if bad in odd:  # kept as it came
                    assert prompt.messages[1].content == bad["content"]
                else:
                    answers["prompts/get"] = {"messages": [bad]}
                    with pytest.raises(InvalidResult, match="messages/0: "):
                        await client.prompt("x")


# Completion


@requirement("CLI-54")
@everywhere(*ALL)
async def test_arguments_are_completed(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with open_shelf(revision, transport) as (client, heard):
        completion = await client.complete("review", "style", "sh", context={"code": "x", "lines": 3})
        assert completion.values[0] == "sh1" and list(completion) == completion.values and len(completion) == 2
        assert (completion.total, completion.has_more) == (250, True)
        await client.complete((await client.prompts())["review"], "style")
        await client.complete("note://{name}/{page}", "page", "1")
        await client.complete((await client.templates())[0], "page", "1")
        sent = [
            {k: v for k, v in each["params"].items() if k != "_meta"} for each in heard.asked("completion/complete")
        ]
        prompt, template = (
            {"type": "ref/prompt", "name": "review"},
            {"type": "ref/resource", "uri": "note://{name}/{page}"},
        )
        context = {"context": {"arguments": {"code": "x", "lines": "3"}}} if revision in (R3, R4, P, R5) else {}
        assert sent == [
            {"ref": prompt, "argument": {"name": "style", "value": "sh"}, **context},
            {"ref": prompt, "argument": {"name": "style", "value": ""}},
            {"ref": template, "argument": {"name": "page", "value": "1"}},
            {"ref": template, "argument": {"name": "page", "value": "1"}},
        ]


@requirement("CLI-54")
@everywhere(*ALL, transports=("memory", "http"))
async def test_a_server_that_completes_nothing_is_not_asked(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    offers = {name: offer for name, offer in capabilities(revision).items() if name != "completions"}
    async with open_shelf(revision, transport, {"capabilities": offers}) as (client, heard):
        completion = await client.complete("review", "style", "sh")
        assert bool(completion.values) is (revision not in COMPLETIONS)
        assert len(heard.asked("completion/complete")) == (revision not in COMPLETIONS)


@requirement("CLI-54", "CLI-55")
@everywhere(*ALL, transports=("memory",))
async def test_malformed_completions_are_errors(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    answers: dict[str, Any] = {}
    async with open_shelf(revision, transport, {"answers": answers}) as (client, _):
        for bad in BAD_COMPLETIONS:
            answers["completion/complete"] = {"completion": bad}
            with pytest.raises(InvalidResult, match="no list of texts") as caught:
                await client.complete("review", "style")
            assert caught.value.result["completion"] == bad and caught.value.phase == "completion/complete review"
        answers["completion/complete"] = {"completion": {"values": ["a"], "total": "7", "hasMore": 1}}
        completion = await client.complete("review", "style")
        assert (completion.values, completion.total, completion.has_more) == (["a"], None, False)


def lists_of(method: str, client: Client) -> Any:
    return listing(client, method)()


@requirement("CLI-55")
@everywhere(*ALL, transports=("stdio", "http"))
async def test_malformed_answers_are_told_with_what_came_also_from_elsewhere(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    good: Object = {"uri": "doc://a", "name": "a", "uriTemplate": "a://{a}", "text": "good"}
    asked: dict[str, tuple[str, Callable[[Client], Any], list[Any]]] = {
        **{method: (LISTS[method], partial(lists_of, method), [7]) for method in NAMES},
        "resources/read": ("contents", lambda client: client.read("doc://a"), [7, [{"uri": "doc://a", "blob": "!"}]]),
        "prompts/get": ("messages", lambda client: client.prompt("a"), [7, [{"role": "user", "content": "x"}]]),
        "completion/complete": ("completion", lambda client: client.complete("a", "b"), [7, {"values": ["a", 7]}]),
    }
    async with open_shelf(revision, transport) as (client, _):
        for method, (key, ask, wrong) in asked.items():
            for each in wrong:
                await client.call("echo", {"answers": {method: {key: each}}})
                with pytest.raises(InvalidResult) as caught:
                    await ask(client)
                assert caught.value.result[key] == each
            if method in NAMES:
                await client.call("echo", {"answers": {method: {key: [good, 7, {}]}}})
                entries = await ask(client)
                assert len(entries) == 1 and len(entries.refused) == 2
        await client.call("echo", {"answers": {"resources/read": {"contents": [good, 7]}}})
        result = await client.read("doc://a")
        assert result.text == "good" and len(result.problems) == 1


async def test_a_server_without_the_method_completes_nothing() -> None:
    def script(rig: Rig, message: Object) -> None:
        if message.get("method") == "completion/complete":
            rig.error(message, rig.state["code"])
        else:
            shelf(rig, message)

    rig = Rig(script, R1)
    async with Client(rig, revision=R1, timeout=PATIENCE) as client:
        rig.state["code"] = -32601
        assert list(await client.complete("review", "style")) == []
        rig.state["code"] = -32602
        with pytest.raises(RemoteProtocolError) as caught:
            await client.complete("nope", "style")
        assert caught.value.phase == "completion/complete nope"


# Subscriptions


def listened(heard: Heard) -> list[Any]:
    """What was subscribed to and unsubscribed from, in the words of the revision."""
    methods = ("resources/subscribe", "resources/unsubscribe", "subscriptions/listen")
    asked = [each for each in heard.messages if each.get("method") in methods]
    calls = [(each["method"].partition("/")[2], params(each)) for each in asked]
    return [each for each in calls if each[1] != BOTH_LISTS]


def params(message: Object) -> Any:
    given = message["params"]
    return given["notifications"] if "notifications" in given else given["uri"]


@requirement("CLI-52")
@everywhere(*ALL)
async def test_updates_arrive_until_the_subscription_ends(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with open_shelf(revision, transport) as (client, heard):
        async with asyncio.timeout(PATIENCE), client.subscribe("doc://text") as updates:
            await client.call("echo", {"updated": ["doc://text"]})
            assert await anext(updates) == "doc://text"
            await client.call("echo", {"updated": ["doc://text/part", "doc://text", "doc://text"]})
            assert [await anext(updates), await anext(updates)] == ["doc://text/part", "doc://text"]
            assert updates._waiting == {}  # what came twice is one update
        await client.call("echo", {"updated": ["doc://text"]})
        if revision == R5:
            assert listened(heard) == [("listen", {"resourceSubscriptions": ["doc://text"]})]
            if transport == "http":
                async with asyncio.timeout(PATIENCE):
                    await heard.rig.closed.wait()  # type: ignore[attr-defined]  # an HttpRig
            else:
                listen, (cancelled,) = heard.asked("subscriptions/listen")[0], heard.asked("notifications/cancelled")
                assert cancelled["params"]["requestId"] == listen["id"]
        else:
            assert listened(heard) == [("subscribe", "doc://text"), ("unsubscribe", "doc://text")]
        assert not client.servers[next(iter(client.servers))].connection.watches


@requirement("CLI-52")
@everywhere(*LEGACY, transports=("memory", "http"))
async def test_a_uri_that_is_subscribed_to_twice_is_one_subscription(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    async with open_shelf(revision, transport) as (client, heard):
        async with (
            asyncio.timeout(PATIENCE),
            client.subscribe("doc://text") as one,
            client.subscribe("doc://b") as other,
        ):
            async with client.subscribe("doc://text") as two:
                await client.call("echo", {"updated": ["doc://text"]})
                assert await anext(one) == await anext(two) == "doc://text"
            await client.call("echo", {"updated": ["doc://text", "doc://b"]})
            assert (await anext(one), await anext(other)) == ("doc://text", "doc://b")
            assert one._waiting == other._waiting == {}
            begins = listened(heard)
            assert begins == [("subscribe", "doc://text"), ("subscribe", "doc://b"), ("subscribe", "doc://text")]
        ends = listened(heard)[3:]
        assert ends == [("unsubscribe", "doc://b"), ("unsubscribe", "doc://text")]


@requirement("CLI-52")
@everywhere(*ALL, transports=("memory",))
async def test_a_subscription_is_renewed_when_the_server_comes_back(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    async with (
        open_shelf(revision, transport) as (client, heard),
        asyncio.timeout(PATIENCE),
        client.subscribe("doc://text") as updates,
    ):
        heard.rig.state.pop("listening", None)
        heard.rig.die()
        assert await anext(updates) == "doc://text"  # there may have been one meanwhile
        await client.call("echo", {"updated": ["doc://text"]})
        assert await anext(updates) == "doc://text"
        again = ("listen", {"resourceSubscriptions": ["doc://text"]}) if revision == R5 else ("subscribe", "doc://text")
        assert listened(heard) == [again, again]
        await client.close()
        with pytest.raises(TransportError, match="closed"):
            await anext(updates)


@requirement("CLI-52")
@everywhere(R1, R5, transports=("memory",))
async def test_a_renewal_is_repeated_until_the_client_closes(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    async with (
        open_shelf(revision, transport) as (client, heard),
        asyncio.timeout(PATIENCE),
        client.subscribe("doc://text") as updates,
    ):
        rig = heard.rig
        assert isinstance(rig, ShelfRig)
        rig.refusals = 2
        rig.die()
        assert await anext(updates) == "doc://text"
        assert len(listened(heard)) == 2 and rig.refusals == 0
        rig.refusals = 1_000
        rig.die()
        waiting = asyncio.ensure_future(anext(updates))
        await until(lambda: rig.refusals < 1_000)
        await client.close()
        with pytest.raises(TransportError):
            await waiting


@requirement("CLI-52")
@everywhere(R2, R3, R4, transports=("http",))
@pytest.mark.parametrize("is_ended", [False, True])
async def test_a_subscription_is_renewed_on_each_new_stream_and_in_each_new_session(
    open_shelf: OpenShelf, revision: str, transport: str, is_ended: bool
) -> None:
    async with (
        open_shelf(revision, transport) as (client, heard),
        asyncio.timeout(PATIENCE),
        client.subscribe("doc://text") as updates,
    ):
        rig = heard.rig
        assert isinstance(rig, HttpShelf)
        if is_ended:  # the server was restarted
            rig.ended.add(rig.session)
            rig.session = "s-2"
        rig.cut_stream()
        assert await anext(updates) == "doc://text"
        subscribes = [each for each in rig.headers if each[""] == "POST"]
        assert subscribes[-1]["mcp-session-id"] == rig.session
        assert listened(heard)[:2] == [("subscribe", "doc://text")] * 2
        assert len(heard.asked("initialize")) == 1 + is_ended


@requirement("CLI-52")
@everywhere(R2, R4, transports=("http",))
async def test_updates_that_could_not_arrive_are_not_subscribed_to(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    async with open_shelf(revision, transport, {"has_stream": False}) as (client, heard):
        with pytest.raises(RemoteProtocolError, match="no stream on which updates could arrive") as caught:
            async with asyncio.timeout(PATIENCE), client.subscribe("doc://text"):
                pass
        assert caught.value.sent is Sent.NO and listened(heard) == []


@requirement("CLI-52")
async def test_two_spellings_are_one_subscription(open_shelf: OpenShelf) -> None:
    async with open_shelf(R4, "memory") as (client, heard), client.subscribe("doc://te%78t") as updates:
        async with client.subscribe("DOC://text"):
            pass
        await client.call("echo", {"updated": ["doc://text"]})
        assert await anext(updates) == "doc://text"
        assert [verb for verb, _ in listened(heard)] == ["subscribe", "subscribe"]


async def test_a_server_that_does_not_answer_holds_no_subscriber_back(
    open_shelf: OpenShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.client.resources.UNSUBSCRIBE_SECONDS", 0.01)
    silent = {"hangs": ["resources/unsubscribe"]}
    async with open_shelf(R4, "memory", silent, timeout=100 * PATIENCE) as (client, heard), asyncio.timeout(PATIENCE):
        async with client.subscribe("doc://text"):
            pass
        async with client.subscribe("doc://text"):
            assert [verb for verb, _ in listened(heard)] == ["subscribe", "unsubscribe", "subscribe"]


@requirement("CLI-52")
@everywhere(R5, transports=("memory", "http"))
async def test_a_subscription_that_the_server_ends_is_renewed(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    async with (
        open_shelf(revision, transport) as (client, heard),
        asyncio.timeout(PATIENCE),
        client.subscribe("doc://text") as updates,
    ):
        (ident,) = heard.rig.state.pop("listening")
        heard.rig.result({"id": ident}, {"resultType": "complete"})
        assert await anext(updates) == "doc://text"
        assert len(heard.asked("subscriptions/listen")) == 2


@requirement("CLI-52")
@everywhere(*ALL, transports=("memory", "http"))
@pytest.mark.parametrize("offer", [{}, {"subscribe": False}, {"subscribe": 1}, None])
async def test_only_declared_subscriptions_are_used(
    open_shelf: OpenShelf, revision: str, transport: str, offer: Any
) -> None:
    async with open_shelf(revision, transport, {"capabilities": {"resources": offer, "tools": {}}}) as (client, heard):
        with pytest.raises(RemoteProtocolError, match="announces no updates") as caught:
            async with client.subscribe("doc://text"):
                pass
        assert caught.value.sent is Sent.NO and caught.value.phase == "subscribe doc://text"
        await client.call("echo", {})
        assert listened(heard) == []


@requirement("CLI-52")
@everywhere(R5, transports=("memory", "http"))
async def test_a_subscription_that_is_not_honoured_is_an_error(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    async with open_shelf(revision, transport, {"unhonoured": ["resourceSubscriptions"]}) as (client, heard):
        with pytest.raises(RemoteProtocolError, match="does not announce updates of doc://text"):
            async with asyncio.timeout(PATIENCE), client.subscribe("doc://text"):
                pass
        assert len(heard.asked("subscriptions/listen")) == 1
        assert client.servers[next(iter(client.servers))].connection._pending.by_id == {}


@requirement("CLI-52")
@everywhere(R4, R5, transports=("memory",))
async def test_a_subscription_that_is_refused_is_an_error(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    method = "subscriptions/listen" if revision == R5 else "resources/subscribe"

    def script(rig: Rig, message: Object) -> None:
        if message.get("method") == method:
            rig.error(message, -32602, "Resource not found", data={"uri": message["params"].get("uri")})
        else:
            shelf(rig, message)

    rig = Rig(script, revision)
    async with Client(rig, revision=revision, timeout=PATIENCE) as client:
        with pytest.raises(RemoteProtocolError, match="not found") as caught:
            async with client.subscribe("doc://text"):
                pass
        assert caught.value.code == -32602
        assert not client.servers["rig"].connection.watches


@requirement("CLI-52")
@everywhere(R4, R5, transports=("memory",))
async def test_updates_that_wait_are_bounded(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with (
        open_shelf(revision, transport) as (client, _),
        asyncio.timeout(PATIENCE),
        client.subscribe("doc://text") as updates,
    ):
        uris = [f"doc://text/{number}" for number in range(1_000)]
        await client.call("echo", {"updated": uris})
        first = [await anext(updates) for _ in range(101)]
        assert first == [*uris[:100], "doc://text"] and updates._waiting == {}


# Questions, rules, confirmation, records


@requirement("CLI-32", "CLI-51", "CLI-53")
@everywhere(R5)
async def test_what_is_read_may_ask_first(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    asked: list[str] = []

    def answer(question: Elicitation) -> Object:
        asked.append(question.message)
        return {"name": "Ada"}

    async with open_shelf(revision, transport, elicit=answer) as (client, heard):
        said = {"who": {"action": "accept", "content": {"name": "Ada"}}}
        assert json.loads((await client.read("doc://asks")).text) == said
        assert json.loads((await client.prompt("asks", {"a": 1})).text) == said
        for method in ("resources/read", "prompts/get"):
            first, second = heard.asked(method)
            assert second["params"]["requestState"] == "s" and "requestState" not in first["params"]
        assert asked == ["Who?", "Who?"]


@everywhere(R4, transports=("memory", "http"))
async def test_a_page_is_visited_before_a_resource_is_read(
    open_shelf: OpenShelf, revision: str, transport: str
) -> None:
    pages: list[str] = []

    def visit(question: Elicitation) -> bool:
        pages.append(question.url)
        return True

    async with open_shelf(revision, transport, elicit_url=visit) as (client, heard):
        assert (await client.read("doc://visit")).text == "null"
        assert pages == ["https://example.org/connect"] and len(heard.asked("resources/read")) == 2


@everywhere(R5, transports=("http",))
async def test_headers_name_what_is_read(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with open_shelf(revision, transport) as (client, heard):
        await client.read("doc://text")
        await client.prompt("review", {"code": "x"})
        with pytest.raises(RemoteProtocolError):
            await client.read("doc://ü")
        named = [each for each in heard.rig.headers if "mcp-name" in each]  # type: ignore[attr-defined]
        assert [(each["mcp-method"], each["mcp-name"]) for each in named] == [
            ("resources/read", "doc://text"),
            ("prompts/get", "review"),
            ("resources/read", "=?base64?ZG9jOi8vw7w=?="),
        ]


RULES = [
    Rule(verdict="deny", uri="doc://binary*"),
    Rule(verdict="hide", kind="resource", uri="doc://several"),
    Rule(verdict="ask", uri="doc://text"),
    Rule(verdict="ask", uri="note://*"),
    Rule(verdict="deny", prompts=["kinds"]),
    Rule(verdict="hide", prompts=["asks"]),
    Rule(verdict="ask", prompts=["review"], arguments={"code": {"is": "secret"}}),
    Rule(verdict="allow"),
]
REFUSED_URIS = [
    "doc://binary",
    "DOC://binary",
    "doc://%62inary",
    "doc://binary?a",
    "doc://several",
    "doc://x/../binary",
]


@everywhere(R0, R4, R5, transports=("memory",))
async def test_rules_hold_for_what_is_read(
    open_shelf: OpenShelf, revision: str, transport: str, tmp_path: Path
) -> None:
    confirmed: list[Confirmation] = []

    def confirm(call: Confirmation) -> bool:
        confirmed.append(call)
        return "no" not in call.arguments

    async with open_shelf(revision, transport, policy=RULES, confirm=confirm) as (client, heard):
        resources, prompts = await client.resources(), await client.prompts()
        assert "doc://several" not in resources and "a rule hides it" in resources.refused["doc://several"]
        assert [each.name for each in prompts] == ["review", "kinds"] and list(prompts.refused) == ["asks"]
        before = len(heard.messages)
        for uri in [*REFUSED_URIS, "doc://%2e%2e/text", "doc://a%2F..%2Fbinary"]:
            with pytest.raises(Denied):
                await client.read(uri)
            with pytest.raises(Denied):
                async with client.subscribe(uri):
                    pass
        for name in ("kinds", "asks"):
            with pytest.raises(Denied):
                await client.prompt(name)
        for what in ("kinds", "asks", "doc://binary{x}", "DOC://binary{x}", "doc://%62inary{x}"):
            with pytest.raises(Denied):
                await client.complete(what, "a")
        assert len(heard.messages) == before and not confirmed
        assert (await client.read("doc://text")).text == "hello ü"
        await client.prompt("review", {"code": "x"})
        await client.prompt("review", {"code": "secret"})
        with pytest.raises(Denied, match="not agreed"):
            await client.prompt("review", {"code": "secret", "no": "1"})
        assert [(each.tool, each.arguments) for each in confirmed] == [
            ("doc://text", {}),
            ("prompt:review", {"code": "secret"}),
            ("prompt:review", {"code": "secret", "no": "1"}),
        ]
    async with open_shelf(revision, transport, policy=RULES) as (client, heard):
        for attempt in (
            client.read("doc://text"),
            client.subscribe("doc://text").__aenter__(),
            client.complete("NOTE://{name}/{page}", "name"),
        ):
            with pytest.raises(ConfirmationRequired):
                await attempt
        methods = ("resources/read", "resources/subscribe", "subscriptions/listen", "completion/complete")
        assert [each for method in methods for each in heard.asked(method) if params(each) != BOTH_LISTS] == []


async def test_without_rules_nothing_that_is_read_is_confirmed(open_shelf: OpenShelf, tmp_path: Path) -> None:
    async with open_shelf(R5, "memory", confirm=lambda _: False, audit=tmp_path / "a.jsonl") as (client, _):
        assert (await client.read("doc://text")).text and (await client.prompt("review", {"code": "x"})).text
    assert '"intent"' in (tmp_path / "a.jsonl").read_text() and '"agreed"' not in (tmp_path / "a.jsonl").read_text()


@everywhere(R4, R5, transports=("memory", "http"))
async def test_what_is_read_is_recorded(open_shelf: OpenShelf, revision: str, transport: str, tmp_path: Path) -> None:
    async with open_shelf(revision, transport, audit=tmp_path / "a.jsonl", policy=RULES, confirm=lambda _: True) as (
        client,
        _,
    ):
        await client.read("doc://text")
        await client.prompt("review", {"code": "x"})
        for attempt in (
            client.read("doc://nowhere"),
            client.read("doc://binary"),
            client.subscribe("doc://binary").__aenter__(),
            client.complete("DOC://binary{x}", "x"),
        ):
            with pytest.raises(PeerError):
                await attempt
        async with client.subscribe("doc://text/x"):
            await client.complete("review", "style")
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    calls = [each for each in records if "call" in each]
    assert [(each["event"], each.get("tool"), each.get("outcome")) for each in calls] == [
        ("intent", "doc://text", None),
        ("outcome", None, "ok"),
        ("intent", "prompt:review", None),
        ("outcome", None, "ok"),
        ("intent", "doc://nowhere", None),
        ("outcome", None, "protocol"),
        *[("refusal", uri, "denied") for uri in ("doc://binary", "doc://binary", "doc://binary{x}")],
        ("intent", "doc://text/x", None),
        ("outcome", None, "ok"),
        ("intent", "prompt:review", None),
        ("outcome", None, "ok"),
    ]
    assert calls[0]["agreed"] == "confirmed" and calls[1]["characters"] == len("hello ü")


# Several servers


@asynccontextmanager
async def two_shelves(
    first: Object, second: Object, third: Object | None = None
) -> AsyncIterator[tuple[Client, list[Rig]]]:
    rigs: list[Rig] = []
    for name, state in (("a", first), ("b", second), ("c", third or {"capabilities": {"tools": {}}})):
        rig = ShelfRig(shelf, R4)
        rig.name = name
        rig.refusals = state.get("refusals", 0)
        rig.state.update(state)
        rigs.append(rig)
    client = Client({"mcpServers": {rig.name: {"command": "true"} for rig in rigs}}, revision=R4, timeout=PATIENCE)
    for target, each in zip(client._targets, rigs, strict=True):
        target.make_transport = partial(MemoryTransport, each)
    async with client:
        yield client, rigs


@requirement("CLI-50", "CLI-51")
async def test_names_and_uris_lead_to_their_servers() -> None:
    only_b: Object = {"resources/list": [{"uri": "doc://text", "name": "t"}, {"uri": "doc://b", "name": "b"}]}
    only_b["resources/templates/list"] = [{"uriTemplate": "note-b://{x}", "name": "b"}]
    async with two_shelves({}, only_b) as (client, (a, b, c)):
        assert [(each.server, each.uri) for each in await client.resources()][-2:] == [
            ("b", "doc://text"),
            ("b", "doc://b"),
        ]
        assert [each.name for each in await client.prompts()][::3] == ["a.review", "b.review"]
        assert {each.server for each in await client.templates()} == {"a", "b"} and client.problems == {}
        assert (await client.read("doc://binary")).contents[0].uri == "doc://binary"
        assert (await client.read("note://a/1")).text == "page 1"
        assert len(a.asked("resources/read")) == 2
        for uri in ("doc://b", "note-b://1"):
            with pytest.raises(RemoteProtocolError, match="not found"):
                await client.read(uri)
        assert len(b.asked("resources/read")) == 2
        with pytest.raises(RemoteProtocolError, match=r"several servers list 'doc://text'.*server=") as caught:
            await client.read("doc://text")
        assert caught.value.sent is Sent.NO
        assert (await client.read("doc://text", server="b")).text == "hello ü"
        with pytest.raises(RemoteProtocolError, match=r"no server lists 'doc://nowhere'.*server="):
            await client.read("doc://nowhere")
        with pytest.raises(RemoteProtocolError, match=r"there is no server 'd'. The servers are a, b, c"):
            await client.read("doc://text", server="d")
        async with client.subscribe("doc://b"):
            assert len(b.asked("resources/subscribe")) == 1 and not a.asked("resources/subscribe")
        assert (await client.prompt("b.review", {"code": "x"})).text == '{"code": "x"}'
        assert b.asked("prompts/get")[0]["params"]["name"] == "review" and not a.asked("prompts/get")
        with pytest.raises(RemoteProtocolError, match="no server for the prompt 'review'"):
            await client.prompt("review")
        await client.complete("b.review", "style")
        await client.complete("note-b://{x}", "x")
        await client.complete((await client.templates())["note-b://{x}"], "x")
        await client.complete((await client.prompts())["b.review"], "style")
        assert len(b.asked("completion/complete")) == 4
        assert not [each for each in c.heard if each["method"].startswith(("resources", "prompts", "completion"))]


async def test_a_list_that_fails_is_a_problem_until_it_is_listed() -> None:
    async with two_shelves({}, {}) as (client, (_, b, _c)):
        answers = b.state["answers"] = {"resources/list": {"resources": 7}}
        assert {each.server for each in await client.resources()} == {"a"} and list(client.problems) == ["b"]
        await client.templates()
        await client.prompts()
        assert "no list" in str(client.problems["b"])
        answers.clear()
        await client.resources()
        assert client.problems == {}


@pytest.mark.parametrize("broken", ["never connected", "its list fails"])
async def test_no_other_server_is_taken_for_one_that_could_not_be_asked(broken: str) -> None:
    only_a: Object = {"resources/templates/list": [{"uriTemplate": "doc://{name}", "name": "all"}]}
    refusals = 1_000 if broken == "never connected" else 0
    b: Object = {"answers": {method: {"none": 1} for method in NAMES}, "refusals": refusals}
    async with two_shelves(only_a, b) as (client, rigs):
        for attempt in (
            client.read("doc://b"),
            client.subscribe("doc://b").__aenter__(),
            client.complete("doc://{name}", "name"),
        ):
            with pytest.raises(RemoteProtocolError, match=r"could not ask b for 'doc.*server=a or b or c") as caught:
                await attempt
            assert caught.value.sent is Sent.NO
        assert not any(listened(Heard(rig, None)) or rig.asked("completion/complete") for rig in rigs)
        assert list(client.problems) == ["b"]
        assert (await client.read("doc://text", server="a")).text == "hello ü"
        assert await client.complete("doc://{name}", "name", server="a")


async def test_servers_are_listed_once_to_find_the_right_one() -> None:
    state: Object = {"capabilities": {"tools": {}, "resources": {}}}  # without notices
    alone: Object = {"resources/list": [], "resources/templates/list": []}
    async with two_shelves(state, {**state, **alone}) as (client, rigs):
        for _ in range(5):
            for uri in ("doc://text", "note://a/1"):
                assert (await client.read(uri)).contents
        lists = [method for rig in rigs for method in NAMES if rig.asked(method)]
        assert lists == [*NAMES][:2] * 2
        assert [len(rig.asked("resources/list")) for rig in rigs] == [3, 1, 0]


async def test_a_timeout_holds_also_while_the_server_is_looked_for() -> None:
    async with two_shelves({}, {"hangs": ["resources/list"]}) as (client, (a, _, _c)):
        with pytest.raises(CallTimeout):
            await client.read("doc://text", timeout=0.01)
        assert not a.asked("resources/read")


async def test_of_two_servers_with_the_same_uri_the_first_is_indexed() -> None:
    async with two_shelves({}, {}) as (client, _):
        resources = await client.resources()
        assert [each.server for each in resources if each.uri == "doc://text"] == ["a", "b"]
        assert resources["doc://text"].server == "a"
        assert (await client.read(resources["doc://text"])).text == "hello ü"


# The client that blocks


@requirement("CLI-50", "CLI-51", "CLI-52", "CLI-53", "CLI-54")
def test_the_same_without_await() -> None:
    rig = Rig(shelf, R4)
    with Client(rig, revision=R4, timeout=PATIENCE) as client:
        assert len(client.resources()) == 5 and len(client.templates()) == 3 and len(client.prompts(fresh=True)) == 3
        assert client.read("doc://text", timeout=PATIENCE).text == "hello ü"
        assert client.prompt("review", {"code": "x"}, timeout=PATIENCE).text == '{"code": "x"}'
        assert client.complete("review", "style", "s", context={"a": 1}).values[0] == "s1"
        with client.subscribe("doc://text") as updates:
            client.call("echo", {"updated": ["doc://text"]})
            for uri in updates:
                assert uri == "doc://text"
                break
        assert [each["method"] for each in rig.heard[-2:]] == ["tools/call", "resources/unsubscribe"]
        with pytest.raises(TypeError, match='use it as "with client'):
            for _ in client.subscribe("doc://text"):
                pass
        with client.subscribe("doc://text") as updates:
            client.close()
            with pytest.raises(TransportError, match="closed"):
                next(updates)


# Mistakes


@everywhere(R4, transports=("memory",))
async def test_mistakes_are_answered_with_what_is_right(open_shelf: OpenShelf, revision: str, transport: str) -> None:
    async with open_shelf(revision, transport) as (client, heard):
        anything: Any = client
        resource, prompt = (await client.resources())[0], (await client.prompts())[0]
        assert (await client.read(resource)).text == "hello ü"
        assert (await client.prompt(prompt, {"code": "x"})).text == '{"code": "x"}'
        before = len(heard.messages)
        mistakes: list[tuple[Callable[[], Any], str]] = [
            (
                lambda: anything.subscribe("doc://text").__aiter__(),
                'use it as "async with client.subscribe(uri) as updates:"',
            ),
            (lambda: anything.subscribe("doc://text").__await__(), 'use it as "async with'),
            (lambda: anything.subscribe(5), "subscribe: not sent: a URI is a text, got 5"),
            (lambda: anything.read(5), "read: not sent: a URI is a text, got 5"),
            (lambda: anything.read("doc://text", timout=3), "read: unknown option 'timout'; did you mean 'timeout'?"),
            (lambda: anything.prompt("review", timout=3), "prompt: unknown option 'timout'; did you mean 'timeout'?"),
            (lambda: anything.prompt("review", code="x"), "arguments go into a dict: prompt('review', {'code': 'x'})"),
            (lambda: anything.complete("review", "style", 5), "not sent: value is a text, got 5"),
            (lambda: anything.list_templates, "write client.templates()"),
            (lambda: anything.get_resource, "write client.read(uri)"),
            (lambda: anything.resource, "write client.read(uri)"),
            (lambda: anything.unsubscribe, "write `async with client.subscribe(uri) as updates:`"),
        ]
        for attempt, text in mistakes:
            with pytest.raises((TypeError, AttributeError, LocalProtocolError)) as caught:
                await attempt()
            assert text in str(caught.value)
        assert len(heard.messages) == before


# What it costs who only calls


def test_a_client_that_only_calls_does_not_load_what_is_beside() -> None:
    code = """
import asyncio, sys
from handrail import Client, Server
server = Server("x")
@server.tool
async def echo(text: str) -> str: return text
async def main():
    async with Client(server) as client:
        assert (await client.call("echo", {"text": "x"})).text == "x"
asyncio.run(main())
print(sorted(each for each in sys.modules if each.startswith("handrail.client.")))
"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "handrail.client.server_tools" in loaded
    assert "handrail.client.resources" not in loaded and "handrail.client.prompts" not in loaded
