"""The console's tries: checked, run as whoever is signed in, asked on the way, cancelled; what is shown of results."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from handrail import Audio, Call, EmbeddedResource, Image, ResourceLink, Server, Text, ToolError, ToolResult
from handrail.approvals.queue import Approvals
from handrail.console import playground as trying, redact as shown
from handrail.guards.policy import Policy, Rule
from handrail.guards.sanitize import Sanitize
from handrail.revisions import REVISIONS
from handrail.stores import StoreError
from handrail.stores.memory import MemoryStore
from handrail.text.controls import MASK
from requirements import requirement
from rigs_console import Object, Page, Refused, Rig, consoled

Ran = Callable[[str, str], None]

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
TOKEN = "sk_live_abcdefghijklmnop1234"
FORM: Object = {
    "type": "object",
    "properties": {"name": {"type": "string", "default": "Ann"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}


def shop(**options: Any) -> Server:
    server = Server("shop", **{"sanitize": None, **options})

    @server.tool
    async def add(call: Call, a: int, b: int = 2) -> int:
        await call.progress(1, 2, "half")
        await call.log("warning", {"password": "hunter2", "note": "adding"})
        return a + b

    @server.tool
    async def fail() -> str:
        raise ToolError("no such order")

    @server.tool(annotations={"destructiveHint": True})
    async def wipe() -> str:
        return "wiped"

    @server.tool
    async def hold(call: Call) -> str:
        await asyncio.Event().wait()
        return ""

    @server.tool
    async def who(call: Call) -> str:
        return f"{call.principal.id} from {call.address.split()[0]} with {call.client.name} in {call.revision.name}"

    @server.tool
    async def ask(call: Call) -> str:
        answer = await call.ask("Who are you?", FORM)
        return f"{answer.action} {json.dumps(answer.content, sort_keys=True)}"

    @server.tool
    async def visit(call: Call, url: str) -> str:
        answer = await call.ask_url("Sign in there", url)
        return answer.action

    @server.tool(scopes=["admin"])
    async def admin() -> str:
        return "yes"

    @server.tool(description="long " * 10_000)
    async def wordy() -> str:
        return "short"

    @server.tool
    async def broken() -> str:
        raise RuntimeError("the text of this is nobody's business")

    return server


async def tried(page: Page, tool: str, arguments: Object | None = None, **more: Any) -> Object:
    """What became of a try; every question of it is left unanswered."""
    begun = await page.post("try", tool=tool, arguments=arguments or {}, **more)
    done: Object = await page.event("try", id=begun["id"], kind="done")
    return done


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with consoled(shop()) as rig:
        page = await rig.page()
        await page.listen()
        yield page


@pytest.mark.parametrize("revision", list(REVISIONS))
async def test_a_try_runs_as_whoever_is_signed_in_through_the_same_pipeline(ran: Ran, revision: str) -> None:
    async with consoled(shop()) as rig:
        page = await rig.page("ann")
        await page.listen()
        done = await tried(page, "who", revision=revision)
        ran(revision, "memory")
        assert done["result"]["blocks"][0]["text"] == f"ann from console with handrail console in {revision}"
        story = await page.get(f"calls/{done['call']}")
        assert story["row"]["who"] == "ann" and story["row"]["outcome"] == "ok" and done["seconds"] > 0


async def test_a_tool_of_very_many_words_can_be_tried_and_is_said_to_be_one(page: Page) -> None:
    assert (await tried(page, "wordy"))["result"]["blocks"][0]["text"] == "short"
    wordy = next(each for each in (await page.get("tools"))["tools"] if each["name"] == "wordy")
    assert any("50,000 characters" in each and "16,384" in each for each in wordy["warnings"])


async def test_progress_and_log_lines_come_on_the_way_masked(page: Page) -> None:
    for revision in ("2025-06-18", "2026-07-28"):
        begun = await page.post("try", tool="add", arguments={"a": 1}, revision=revision)
        progress = await page.event("try", id=begun["id"], kind="progress")
        line = await page.event("try", id=begun["id"], kind="log")
        done = await page.event("try", id=begun["id"], kind="done")
        assert (progress["progress"]["done"], progress["progress"]["total"]) == (1, 2)
        assert line["level"] == "warning" and "adding" in line["text"] and "hunter2" not in line["text"]
        assert done["result"]["structured"] in (3, {"result": 3})


@requirement("APP-07", everywhere=True)
async def test_errors_of_the_tool_of_the_guards_and_of_the_protocol_are_told_apart(page: Page) -> None:
    failed = await tried(page, "fail")
    assert failed["result"]["is_error"] and failed["result"]["blocks"][0]["text"] == "no such order"
    unknown = await tried(page, "nothing")
    assert "result" not in unknown and unknown["error"]["kind"] == "protocol" and unknown["error"]["code"] == -32602
    invalid = await tried(page, "add", {"a": "x"}, revision="2025-06-18")
    assert (
        invalid["error"]["kind"] == "protocol"
        and invalid["error"]["code"] == -32602
        and "a" in invalid["error"]["message"]
        and invalid["error"]["data"]
    )
    forbidden = await tried(page, "admin", revision="2025-06-18")
    assert forbidden["error"]["kind"] == "refused" and "admin" in forbidden["error"]["message"]
    broken = await tried(page, "broken")
    assert broken["result"]["is_error"] and "nobody's business" not in str(broken)


async def test_arguments_are_checked_with_the_servers_own_engine_and_rules() -> None:
    rules = [
        Rule(verdict="deny", name="large", tools=["add"], arguments={"a": {"over": 100}}),
        Rule(verdict="hide", name="away", tools=["who"]),
    ]
    async with consoled(shop(policy=Policy(rules))) as rig:
        page = await rig.page()
        good = await page.post("try/check", tool="add", arguments={"a": 1})
        assert good == {"valid": True, "problems": [], "verdict": "allow", "rule": "default"}
        denied = await page.post("try/check", tool="add", arguments={"a": 101})
        assert (denied["verdict"], denied["rule"]) == ("deny", "large")
        bad = await page.post("try/check", tool="add", arguments={"a": "x", "c": 1})
        assert not bad["valid"] and "/a" in [each["path"] for each in bad["problems"]] and bad["verdict"] == ""
        assert (await page.post("try/check", tool="admin"))["verdict"] == "deny"
        assert (await page.post("try/check", tool="wipe"))["verdict"] == "ask"
        for tool in ("who", "nothing"):
            with pytest.raises(Refused) as refused:
                await page.post("try/check", tool=tool)
            assert refused.value.status == 404
        bodies: list[Object] = [
            {"tool": 1},
            {"arguments": {}},
            {"tool": "add", "arguments": []},
            {"tool": "add", "x": 1},
        ]
        for body in bodies:
            with pytest.raises(Refused) as refused:
                await page.post("try/check", **body)
            assert refused.value.status == 400
        with pytest.raises(Refused, match="revision"):
            await page.post("try", tool="add", revision="1999-01-01")


@requirement("P-23", everywhere=True)
async def test_trying_takes_the_role_and_a_try_is_its_sessions_own() -> None:
    async with consoled(shop()) as rig:
        own, other = await rig.page(), await rig.page()
        await own.listen()
        with pytest.raises(Refused, match="call"):
            await (await rig.page(roles="view approve manage")).post("try", tool="add", arguments={"a": 1})
        begun = await own.post("try", tool="ask")
        asked = await own.event("try", id=begun["id"], kind="question")
        for path, body in (("answer", {"key": asked["key"], "action": "decline"}), ("cancel", {})):
            with pytest.raises(Refused) as refused:
                await other.post(f"try/{begun['id']}/{path}", **body)
            assert refused.value.status == 404
        await own.post(f"try/{begun['id']}/cancel")
        await own.event("try", id=begun["id"], kind="done")


@requirement("APP-10")
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])  # before, forms had no defaults
async def test_a_question_names_the_server_has_its_defaults_and_takes_a_fitting_answer_once(
    page: Page, ran: Ran, revision: str
) -> None:
    begun = await page.post("try", tool="ask", revision=revision)
    asked = await page.event("try", id=begun["id"], kind="question")
    ran(revision, "memory")
    question, path = asked["question"], f"try/{begun['id']}/answer"
    assert (question["server"], question["message"]) == ("shop", "Who are you?")
    assert question["defaults"] == {"name": "Ann"} and question["schema"]["properties"]["age"]
    with pytest.raises(Refused) as refused:
        await page.post(path, key=asked["key"], action="accept", content={"age": -1})
    assert refused.value.status == 422 and refused.value.problems[0]["path"] == "/age"
    with pytest.raises(Refused, match="accept, decline or cancel"):
        await page.post(path, key=asked["key"], action="maybe")
    with pytest.raises(Refused, match="expected an object"):
        await page.post(path, key=asked["key"], action="accept")
    said = [page.post(path, key=asked["key"], action="accept", content={"age": 7}) for _ in range(2)]
    answers = await asyncio.gather(*said, return_exceptions=True)
    assert [each for each in answers if each == {}] == [{}]
    assert [each.status for each in answers if isinstance(each, Refused)] == [409]
    done = await page.event("try", id=begun["id"], kind="done")
    assert done["result"]["blocks"][0]["text"] == 'accept {"age": 7, "name": "Ann"}'
    with pytest.raises(Refused):
        await page.post(path, key=asked["key"], action="decline")


@requirement("APP-10")
@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_question_can_be_declined_or_cancelled(page: Page, ran: Ran, action: str) -> None:
    for revision in ("2025-06-18", "2025-11-25", "2026-07-28"):
        begun = await page.post("try", tool="ask", revision=revision)
        asked = await page.event("try", id=begun["id"], kind="question")
        assert asked["question"]["server"] == "shop"
        await page.post(f"try/{begun['id']}/answer", key=asked["key"], action=action)
        done = await page.event("try", id=begun["id"], kind="done")
        ran(revision, "memory")
        assert done["result"]["blocks"][0]["text"].startswith(action)


@requirement("APP-11", "APP-19")
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_a_page_to_visit_is_shown_whole_and_goes_on_when_somebody_says_so(
    page: Page, ran: Ran, revision: str
) -> None:
    url = "https://accounts.example.org/sign-in?state=1"
    begun = await page.post("try", tool="visit", arguments={"url": url}, revision=revision)
    asked = await page.event("try", id=begun["id"], kind="question")
    ran(revision, "memory")
    assert asked["question"]["url"] == url and asked["question"]["host"] == "accounts.example.org"
    assert asked["question"]["warnings"] == [] and "host_shown" not in asked["question"]
    await page.post(f"try/{begun['id']}/answer", key=asked["key"], action="accept")
    done = await page.event("try", id=begun["id"], kind="done")
    assert done["result"]["blocks"][0]["text"] == "accept"


@requirement("APP-11", everywhere=True)
@pytest.mark.parametrize(
    ("url", "warning"),
    [
        ("http://example.org/", "not encrypted"),
        ("https://192.0.2.1/", "number"),
        ("https://[2001:db8::1]/", "number"),
        ("https://example.org:8443/", "port 8443"),
        ("https://xn--pple-43d.com/", "аpple.com looks like apple.com"),
        ("https://xn--mnchen-3ya.de/", "reads münchen.de"),
        ("https://example.org:443/", ""),
    ],
)
def test_what_is_odd_about_an_address_is_said(url: str, warning: str) -> None:
    found = trying.describe_url(url)
    assert found["host"] in url
    assert any(warning in each for each in found["warnings"]) if warning else found["warnings"] == []


@requirement("APP-12", everywhere=True)
async def test_a_try_can_be_cancelled_and_its_call_ends(page: Page) -> None:
    for revision in ("2025-06-18", "2026-07-28"):
        begun = await page.post("try", tool="hold", revision=revision)
        tick = await page.event("tick", running_total=1)
        await page.post(f"try/{begun['id']}/cancel")
        done = await page.event("try", id=begun["id"], kind="done")
        assert done["error"]["kind"] == "refused" and "Cancelled" in done["error"]["message"]
        assert done["call"] == tick["running"][0]["id"]
        story = await page.get(f"calls/{done['call']}")
        assert story["row"]["outcome"] == "cancelled"
        await page.event("tick", running_total=0)


async def test_a_destructive_tool_waits_for_an_approval_like_any_other_call(tmp_path: Path) -> None:
    async with consoled(shop(audit=tmp_path / "audit.db", approvals=Approvals(by="operator"))) as rig:
        page = await rig.page()
        await page.listen()
        for revision in ("2025-11-25", "2026-07-28"):
            begun = await page.post("try", tool="wipe", revision=revision)
            card = await page.event("approval", state="pending")
            assert (card["tool"], card["who"], card["client"]) == ("wipe", "local", "handrail console")
            await page.post(f"approvals/{card['id']}", yes=True)
            done = await page.event("try", id=begun["id"], kind="done")
            assert done["result"]["blocks"][0]["text"] == "wiped"


async def test_so_many_tries_at_once_and_no_more(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = [(await page.post("try", tool="hold"))["id"] for _ in range(trying.MAX_RUNS_PER_SESSION)]
    with pytest.raises(Refused, match="under way") as refused:
        await page.post("try", tool="hold")
    assert refused.value.status == 429
    for ident in begun:
        await page.post(f"try/{ident}/cancel")
        await page.event("try", id=ident, kind="done")
    assert "result" in await tried(page, "fail")
    monkeypatch.setattr(trying, "MAX_RUN_SECONDS", 0.1)
    late = await tried(page, "hold")
    assert late["error"]["kind"] == "timeout"


async def test_tries_end_with_the_session() -> None:
    async with consoled(shop()) as rig:
        leaving, staying = await rig.page("ann"), await rig.page("bob")
        for each in (leaving, staying):
            await each.listen()
            await each.post("try", tool="hold")
        while (await staying.event("tick"))["running_total"] != 2:
            pass
        await leaving.post("sign-out")
        while len(left := (await staying.event("tick"))["running"]) != 1:
            pass
        assert left[0]["who"] == "bob"


async def test_no_try_outlives_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "MAX_SESSION_SECONDS", 0.2)  # of a session that was there for a week already
    async with consoled(shop()) as rig:
        page = await rig.page()
        await page.listen()
        assert (await tried(page, "hold"))["error"]["kind"] == "timeout"


class Unwell(MemoryStore):
    """A store that cannot keep everything, nor forget it."""

    fails: tuple[str, ...] = ()  # with keys that begin so

    async def put(self, key: str, *args: Any, **options: Any) -> bool:
        self._look(key)
        return await super().put(key, *args, **options)

    async def delete(self, key: str) -> bool:
        self._look(key)
        return await super().delete(key)

    def _look(self, key: str) -> None:
        if key.startswith(self.fails):
            raise StoreError("the disk is full: /var/lib/secret")


@pytest.mark.parametrize("revision", ["2025-06-18", "2026-07-28"])
async def test_a_try_that_the_store_fails_ends_with_an_error_that_says_what_to_do(revision: str) -> None:
    store = Unwell()
    async with consoled(shop(store=store)) as rig:
        page = await rig.page()
        await page.listen()
        store.fails = ("console-question:",)
        done = await tried(page, "ask", revision=revision)
        if revision == "2026-07-28":  # in the other the tool hears that it cannot ask, and goes on
            assert done["error"]["kind"] == "internal" and "try again" in done["error"]["message"]
        assert "secret" not in json.dumps(done)
        store.fails = ()
        begun = await page.post("try", tool="hold", revision=revision)
        store.fails = ("console-",)
        await rig.console.context.send_command("untry", {"id": begun["id"]})
        done = await page.event("try", id=begun["id"], kind="done")
        assert "Cancelled" in done["error"]["message"]
        store.fails = ()
        assert (await tried(page, "fail", revision=revision))["result"]["is_error"]


async def test_tries_end_with_the_console() -> None:
    async with consoled(shop()) as rig:
        page = await rig.page()
        await page.post("try", tool="hold")
        feed = rig.console.context.feed
    assert not feed.running and not rig.console.context.runs


# What is shown of results


def block(rig: Rig, result: ToolResult) -> Object:
    found: Object = rig.console.context.redactor.result(result)["blocks"][0]
    return found


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    described = Sanitize(patterns={"badge": "B-[0-9]{6}"})
    async with consoled(Server("shown", secrets=["swordfish-1"], sanitize=described)) as made:
        yield made


@requirement("P-34", everywhere=True)
async def test_secrets_are_masked_wherever_they_stand_also_where_a_text_is_cut(rig: Rig) -> None:
    telling = {
        TOKEN: "live_a",
        "swordfish-1": "sword",
        "B-123456": "B-12",
        b64encode(b"xx swordfish-1").decode(): "3dvc",
    }
    for secret, part in telling.items():
        for at in (
            0,
            shown.MAX_TEXT_CHARS - 10,
            shown.MAX_TEXT_CHARS - 6,
            shown.MAX_TEXT_CHARS + 5,
            2 * shown.MAX_TEXT_CHARS,
        ):
            text = "." * at + f" {secret} " + "." * 2 * shown.MAX_TEXT_CHARS
            told = block(rig, ToolResult([Text(text)]))
            assert told["cut"] and told["bytes"] == len(text) and len(told["text"]) <= shown.MAX_TEXT_CHARS + 100
            assert part not in told["text"], at
            assert part.encode() not in rig.console.context.redactor.block(ToolResult([Text(text)]), 0)
    value = {"password": "hunter2", "list": [{"token": 7}, "swordfish-1"], "plain": "B-123456", "pass B-123456": 1}
    made = rig.console.context.redactor.bounded_value(value)
    assert made == {"password": MASK, "list": [{"token": MASK}, MASK], "plain": MASK, f"pass {MASK}": 1}


async def test_the_wire_is_shown_byte_for_byte_but_for_its_secrets(rig: Rig) -> None:
    plain = b'{"jsonrpc": "2.0",  "id":1.0}'
    assert rig.console.context.redactor.wire_message(plain) == {
        "text": plain.decode(),
        "bytes": len(plain),
        "cut": False,
    }
    odd = rig.console.context.redactor.wire_message(b'{"password":"a\\"b swordfish","x":1}')
    assert odd["text"] == '{"password":"****","x":1}'
    assert "swordfish-1" not in rig.console.context.redactor.wire_message(b"not JSON: swordfish-1")["text"]
    large = rig.console.context.redactor.wire_message(b'["' + b"x" * 100_000 + b'"]')
    assert large["cut"] and large["bytes"] == 100_004 and len(large["text"]) == shown.MAX_TEXT_CHARS


@requirement("APP-08", "P-33")
async def test_a_text_that_is_nested_deeper_than_it_can_be_walked_is_shown_as_text(rig: Rig) -> None:
    for depth in (100, 990, 5_000):
        text = "[" * depth + '"password=hunter22"' + "]" * depth
        told = rig.console.context.redactor.result(ToolResult([Text(text)]))["blocks"][0]["text"]
        assert told.startswith("[[[") and "hunter22" not in told


@requirement("APP-15", everywhere=True)
async def test_large_results_are_cut_and_can_be_had_whole(rig: Rig) -> None:
    picture = PNG + bytes(20 * 1024 * 1024)
    large = ToolResult([Text("x" * 20_000_000), Image(data=picture, mime_type="image/png")], {"x": "y" * 100_000})
    told = rig.console.context.redactor.result(large)
    assert len(json.dumps(told)) < 200_000 and told["bytes"] > 40_000_000
    assert [each["cut"] for each in told["blocks"]] == [True, True] and told["blocks"][1]["data"] == ""
    assert told["structured"] == "100,008 bytes of JSON, too much to be shown here"
    assert rig.console.context.redactor.block(large, 1) == picture
    for index in (2, -1):
        with pytest.raises(LookupError):
            rig.console.context.redactor.block(large, index)


@requirement("APP-15", everywhere=True)
@pytest.mark.parametrize(
    ("given", "playable"),
    [
        (Image(data=PNG, mime_type="image/png"), True),
        (Image(data=b64encode(PNG).decode(), mime_type="image/png"), True),
        (Image(data=PNG, mime_type="image/jpeg"), False),
        (Image(data=b"<svg onload='x'/>", mime_type="image/svg+xml"), False),
        (Image(data=b"<svg onload='x'/>", mime_type="image/png"), False),
        (Image(data=b"II*\0" + bytes(20), mime_type="image/tiff"), False),
        (Audio(data=b"RIFF....WAVEfmt ", mime_type="audio/wav"), True),
        (Audio(data=b"what", mime_type="audio/x-strange"), False),
        (Audio(data=b"MZ program", mime_type="audio/wav"), False),
    ],
)
async def test_only_pictures_and_sounds_that_are_what_they_say_are_played(
    rig: Rig, given: Image | Audio, playable: bool
) -> None:
    told = block(rig, ToolResult([given]))
    assert told["playable"] is playable and bool(told["data"]) is playable and told["cut"] is not playable


@requirement("APP-08", everywhere=True)
async def test_every_kind_of_block_has_a_shape_of_its_own(rig: Rig) -> None:
    notes = {"audience": ["user"], "priority": 0.5, "lastModified": "2026-01-01T00:00:00Z", "other": "x"}
    result = ToolResult(
        [
            Text("hello", annotations=notes),
            ResourceLink(uri="javascript:alert(1)", name="x", size=7),
            EmbeddedResource({"uri": "note://1", "text": "n", "mimeType": "text/plain"}),
            EmbeddedResource({"uri": "note://2", "blob": b"1234"}),
            {"type": "strange", "password": "hunter2"},
        ],
        meta={"io.handrail/risk": {"level": "dangerous", "reason": "from the web"}},
    )
    told = rig.console.context.redactor.result(result)
    kept = {name: value for name, value in notes.items() if name != "other"}
    none: Object = {}
    assert told["risk"] == "from the web" and told["meta"] and not told["is_error"]
    assert told["blocks"] == [
        {"type": "text", "text": "hello", "bytes": 5, "cut": False, "notes": kept},
        {
            "type": "link",
            "uri": "javascript:alert(1)",
            "readable": False,
            "name": "x",
            "title": "",
            "description": "",
            "mime": "",
            "size": 7,
            "notes": none,
        },
        {
            "type": "resource",
            "uri": "note://1",
            "readable": False,
            "mime": "text/plain",
            "text": "n",
            "bytes": 1,
            "cut": False,
            "notes": none,
        },
        {
            "type": "resource",
            "uri": "note://2",
            "readable": False,
            "mime": "",
            "data": "",
            "bytes": 4,
            "cut": True,
            "playable": False,
            "notes": none,
        },
        {"type": "other", "json": {"type": "strange", "password": MASK}, "notes": none},
    ]
    whole = [rig.console.context.redactor.block(result, index) for index in range(5)]
    assert whole[2] == b"n" and whole[3] == b"1234" and b"hunter2" not in whole[4]
