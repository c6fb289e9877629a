"""The console of a gateway: how its upstreams are, what their tools are taken for, and stops."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from authorized_upstream import Upstream as Authorized, authorized_upstream
from handrail import Principal, Server
from handrail.approvals.queue import Approvals
from handrail.auth import OAuth
from handrail.client.tools import estimated_tokens
from handrail.console import Console, events, upstreams
from handrail.gateway.settings import UpstreamOptions
from handrail.guards import Policy, Rule
from handrail.stores.memory import MemoryStore
from handrail.testing import Peer
from paths import ROOT
from patience import PATIENCE
from requirements import requirement
from rigs_console import Object, Page, Refused, Rig, consoled
from servers_listen import listening

RIG = ROOT / "tests" / "support" / "upstream_console.py"
HOSTILE = "\x1b[31mred\x1b[0m <img src=x onerror=alert(1)> \u202egpj"


def tool(name: str, about: str = "", hints: Object | None = None, **properties: str) -> Object:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"name": name, "description": about or f"To {name}", "inputSchema": schema, "annotations": hints or {}}


TOOLS = [
    tool("read_file", hints={"readOnlyHint": True}, path="string"),
    tool("write_file", path="string", text="string"),
    tool("delete_file", hints={"readOnlyHint": True}, path="string"),
    tool("hold", gate="string"),
]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told once a second is told at once."""
    monkeypatch.setattr(events, "SLOW_TICK_SECONDS", 0.05)


class Upstream:
    """A scripted upstream, whose tools a test can change."""

    def __init__(self, home: Path, tools: list[Object] = TOOLS, stderr: str = "") -> None:
        self.plan = home / "fs.json"
        self.stderr = [stderr] if stderr else []
        self.lists(tools)

    def lists(self, tools: list[Object]) -> None:
        self.plan.write_text(json.dumps({"tools": tools, "stderr": self.stderr}), "utf-8")

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(RIG), str(self.plan)]


def gateway(upstream: Upstream, server_options: Object | None = None, **options: Any) -> Server:
    server = Server("gateway", **(server_options or {}))
    including: UpstreamOptions = {"name": "fs", **options}  # type: ignore[typeddict-item]
    server.include(upstream.command, prefix="fs_", **including)
    return server


async def row(page: Page, **members: Any) -> Object:
    """The upstream as the stream tells of it, once it is so."""
    async with asyncio.timeout(PATIENCE):
        while True:
            (found,) = await page.event("upstreams")
            if all(found[name] == value for name, value in members.items()):
                return dict(found)


async def look(page: Page) -> dict[str, Object]:
    return {each["own_name"]: each for each in (await page.get("upstreams/fs"))["tools"]}


def choices(tools: dict[str, Object], **classes: str) -> Object:
    """What a person accepts: the proposals, but for these."""
    return {
        name: {"class": classes.get(name, each["accepted"] or each["proposal"]), "fingerprint": each["fingerprint"]}
        for name, each in tools.items()
    }


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # another worker does it, and tells nobody
            await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(server: Server, **options: Any) -> AsyncIterator[tuple[Rig, Page, Peer]]:
    """A page that listens, and a client that has asked for the list."""
    async with consoled(server, **options) as rig, Peer(server) as peer:
        page = await rig.page()
        await page.listen()
        await peer.tools()
        yield rig, page, peer


@requirement("GW-20", everywhere=True)
async def test_an_upstream_is_shown_as_it_is_before_it_was_asked_and_after(tmp_path: Path) -> None:
    server = gateway(Upstream(tmp_path))
    async with consoled(server) as rig, Peer(server) as peer:
        page = await rig.page()
        assert (await page.get("me"))["server"]["upstreams"] is True
        (before,) = (await page.listen())["upstreams"]
        assert (before["state"], before["era"], before["since"], before["tools"]) == ("new", "", 0, 0)
        assert before["prefix"] == "fs_" and str(RIG) in before["target"]
        await peer.tools()
        after = await row(page, state="up")
        assert (after["revision"], after["era"], after["tools"], after["unseen"]) == ("2025-06-18", "handshake", 4, 4)
        assert after["since"] > 0 and after["sessions"] == 1
        await page.post("upstreams/fs/accept", tools=choices(await look(page)))
        await peer.call("fs_read_file", {"path": "x"})
        done = await row(page, calls=1)
        assert (done["unseen"], done["errors"]) == (0, 0) and done["latency_ms"] > 0


async def test_a_server_without_upstreams_shows_none() -> None:
    async with consoled(Server("shop")) as rig:
        page = await rig.page()
        assert (await page.get("me"))["server"]["upstreams"] is False
        assert (await page.listen())["upstreams"] == []
        with pytest.raises(Refused, match="There is no upstream 'fs'"):
            await page.get("upstreams/fs")


async def test_an_upstream_that_cannot_be_reached_is_down_with_the_reason_and_health_says_so(tmp_path: Path) -> None:
    server = Server("gateway")
    server.include([sys.executable, "-c", "import sys; sys.exit('no database')"], name="fs")
    async with opened(server) as (_, page, _peer):
        down = await row(page, state="down")
        assert "exited" in down["problem"]
        health = await page.event("health", level="warn")
        assert health["sentence"].startswith("Down: fs. ")
        (said,) = (await page.get("upstreams/fs"))["stderr"]
        assert said["lines"][-1] == "no database"


@requirement("GW-21", everywhere=True)
async def test_the_look_shows_claims_and_proposals_and_one_request_accepts_all(tmp_path: Path) -> None:
    server = gateway(Upstream(tmp_path), {"audit": tmp_path / "audit.db"}, lock=tmp_path / "tools.lock")
    async with opened(server) as (_, page, peer):
        tools = await look(page)
        assert {name: each["proposal"] for name, each in tools.items()} == {
            "read_file": "reads",
            "write_file": "writes",
            "delete_file": "destroys",
            "hold": "destroys",
        }
        assert tools["delete_file"]["hints"] == {"readOnlyHint": True} and tools["read_file"]["accepted"] == ""
        await page.post("upstreams/fs/accept", tools=choices(tools, hold="reads"))
        assert (await look(page))["hold"]["accepted"] == "reads"
        lock = json.loads((tmp_path / "tools.lock").read_text())["servers"]["fs"]["tools"]
        assert (lock["hold"]["class"], lock["delete_file"]["class"]) == ("reads", "destroys")
        assert not (await peer.call("fs_write_file", {"path": "x"})).is_error
        records = (await page.get("audit", event="console", tool="fs_delete_file"))["records"]
        assert [each["outcome"] for each in records] == ["accepted: destroys"]
        assert records[0]["raw"]["fingerprint"] == tools["delete_file"]["fingerprint"]


@pytest.mark.parametrize(
    ("tools", "status", "text"),
    [
        ({}, 400, "there is none to accept"),
        ([], 400, "Expected `object`"),
        ({"read_file": {"class": "sings", "fingerprint": ""}}, 400, "Invalid enum value 'sings'"),
        ({"read_file": {"class": "reads"}}, 400, "missing required field `fingerprint`"),
        ({"read_file": {"class": "reads", "fingerprint": "00"}}, 409, "read_file has changed since you looked"),
        ({"nothing": {"class": "reads", "fingerprint": ""}}, 409, "nothing has changed since you looked"),
    ],
)
async def test_what_cannot_be_accepted_is_refused_with_the_reason(
    tmp_path: Path, tools: Any, status: int, text: str
) -> None:
    async with opened(gateway(Upstream(tmp_path))) as (_, page, _peer):
        with pytest.raises(Refused, match=text) as refused:
            await page.post("upstreams/fs/accept", tools=tools)
        assert refused.value.status == status
        assert {each["accepted"] for each in (await look(page)).values()} == {""}


@requirement("GW-21", "APP-20", everywhere=True)
async def test_a_changed_tool_is_shown_with_its_difference_and_accepted_in_one_step(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path)
    async with opened(gateway(upstream)) as (_, page, peer):
        await page.post("upstreams/fs/accept", tools=choices(await look(page)))
        seen = await look(page)
        upstream.lists([tool("read_file", f"To read, and {HOSTILE}", path="string"), *TOOLS[1:], tool("added")])
        await page.post("upstreams/fs/refresh")
        changed = await row(page, changed=1, new=1)
        assert changed["tools"] == 4, "the changed one is held back"
        tools = await look(page)
        assert tools["read_file"]["state"] == "quarantined" and "has changed" in tools["read_file"]["reason"]
        wording = next(each for each in tools["read_file"]["changes"] if each["path"] == "/description")
        assert wording["before"] == "To read_file" and wording["after"].startswith("To read, and")
        assert tools["added"]["state"] == "new"
        listed = {each["name"]: each for each in (await page.get("tools"))["tools"]}
        assert listed["fs_read_file"]["pin"]["state"] == "changed" and listed["fs_added"]["pin"]["state"] == "new"
        assert "It has changed since it was accepted" in listed["fs_read_file"]["hidden_because"]
        with pytest.raises(Refused, match="on the page of that upstream"):
            await page.post("tools/fs_read_file/accept")
        with pytest.raises(Refused, match="read_file has changed since you looked"):
            await page.post("upstreams/fs/accept", tools=choices({"read_file": seen["read_file"]}))
        await page.post("upstreams/fs/accept", tools=choices({"read_file": tools["read_file"]}))
        assert (await look(page))["read_file"]["state"] == "listed"
        assert "fs_read_file" in [each.name for each in await peer.tools()]
        assert (await row(page, changed=0))["new"] == 1, "the others are as they were"


async def test_what_is_accepted_that_cannot_be_written_down_is_not_accepted(tmp_path: Path) -> None:
    (folder := tmp_path / "locks").mkdir()
    async with opened(gateway(Upstream(tmp_path), lock=folder / "tools.lock")) as (_, page, _peer):
        tools = await look(page)
        (folder / "tools.lock").unlink()
        folder.rmdir()
        folder.write_text("not a folder")
        with pytest.raises(Refused, match="They were not accepted") as refused:
            await page.post("upstreams/fs/accept", tools=choices(tools))
        assert refused.value.status == 503


@requirement("GW-17", everywhere=True)
async def test_a_stopped_upstream_refuses_calls_and_loses_those_that_run_until_it_is_started(tmp_path: Path) -> None:
    server = gateway(Upstream(tmp_path), {"audit": tmp_path / "audit.db"})
    async with opened(server) as (_, page, peer):
        await page.post("upstreams/fs/accept", tools=choices(await look(page), hold="reads"))
        held = asyncio.create_task(peer.call("fs_hold", {"gate": str(tmp_path / "never")}))
        async with asyncio.timeout(PATIENCE):
            while not (await page.event("tick"))["running_total"]:
                pass
        await page.post("stops", kind="upstream", name="fs", on=False, reason="its key has leaked")
        assert (await asyncio.wait_for(held, PATIENCE)).is_error
        stopped = await row(page, state="stopped")
        assert stopped["problem"] == "its key has leaked"
        refused = await peer.call("fs_read_file", {"path": "x"})
        assert refused.is_error and "its key has leaked" in refused.text
        assert (await page.get("stops"))["stops"] == [
            {"kind": "upstream", "name": "fs", "reason": "its key has leaked"}
        ]
        with pytest.raises(Refused, match="is stopped; start it first"):
            await page.post("upstreams/fs/refresh")
        for wrong in ({"on": "no"}, {"kind": "planet", "on": True}, {"name": 7, "on": False}):
            with pytest.raises(Refused, match="A stop is of a kind and a name"):
                await page.post("stops", **{"kind": "upstream", "name": "fs", **wrong})
        for kind, name in (("upstream", "gs"), ("tool", "fs_sing")):
            with pytest.raises(Refused, match=f"There is no {kind} '{name}'"):
                await page.post("stops", kind=kind, name=name, on=False)
        await page.post("stops", kind="upstream", name="fs", on=True)
        await row(page, state="up")
        assert (await page.get("stops"))["stops"] == []
        assert not (await peer.call("fs_read_file", {"path": "x"})).is_error
        records = (await page.get("audit", event="console", tool="fs"))["records"]
        assert [each["outcome"] for each in records] == ["started upstream", "stopped upstream"]


@pytest.mark.parametrize(("kind", "name"), [("tool", "fs_hold"), ("caller", "local")])
async def test_a_stopped_tool_or_caller_loses_the_calls_that_run_and_is_refused_until_it_is_started(
    tmp_path: Path, kind: str, name: str
) -> None:
    async with opened(gateway(Upstream(tmp_path))) as (_, page, peer):
        await page.post("upstreams/fs/accept", tools=choices(await look(page), hold="reads"))
        held = asyncio.create_task(peer.call("fs_hold", {"gate": str(tmp_path / "never")}))
        async with asyncio.timeout(PATIENCE):
            while not (await page.event("tick"))["running_total"]:
                pass
        await page.post("stops", kind=kind, name=name, on=False)
        assert (await asyncio.wait_for(held, PATIENCE)).is_error
        assert (await peer.call("fs_hold", {"gate": str(tmp_path)})).is_error
        tools = {each["name"]: each["stopped"] for each in (await page.get("tools"))["tools"]}
        assert tools["fs_hold"] is (kind == "tool") and not tools["fs_read_file"]
        assert (await peer.call("fs_read_file", {"path": "x"})).is_error is (kind == "caller")
        await page.post("stops", kind=kind, name=name, on=True)
        async with asyncio.timeout(PATIENCE):
            while (await page.get("stops"))["stops"]:
                pass
        assert not (await peer.call("fs_hold", {"gate": str(tmp_path)})).is_error


async def test_the_cost_of_a_tool_is_that_of_its_definition_on_the_wire_and_of_an_upstream_their_sum(
    tmp_path: Path,
) -> None:
    async with opened(gateway(Upstream(tmp_path))) as (_, page, _peer):
        view = await page.get("tools")
        wire = json.loads(await page.raw("tools/wire"))["result"]["tools"]
        costs = {each["name"]: estimated_tokens(each) for each in wire}
        assert {each["name"]: each["tokens"] for each in view["tools"]} == costs
        assert view["tokens"] == sum(costs.values())
        assert (await row(page, state="up"))["tokens"] == sum(costs.values())
        assert {each["name"]: each["tokens"] for each in (await look(page)).values()} == costs
        assert {each["upstream"] for each in view["tools"]} == {"fs"}


@requirement("GW-04", everywhere=True)
async def test_a_call_tells_which_upstream_served_it_both_revisions_and_what_was_lost(tmp_path: Path) -> None:
    server = gateway(Upstream(tmp_path), {"policy": Policy([Rule(verdict="allow")]), "audit": tmp_path / "audit.db"})
    async with consoled(server) as rig, Peer(server, revision="2025-03-26") as peer:
        page = await rig.page()
        await page.listen()
        await peer.call("fs_read_file", {"path": "x"})
        tick = await page.event("tick")
        while not tick["finished"]:
            tick = await page.event("tick")
        story = await page.get(f"calls/{tick['finished'][0]['id']}")
        assert story["row"]["revision"] == "2025-03-26"
        assert story["upstream"] == {"name": "fs", "revision": "2025-06-18", "lossy": ["LOSSY-08"]}
        rig.console.context.feed._ring.clear()  # as after 500 other calls
        later = await page.get(f"calls/{story['row']['id']}")
        assert later["source"] == "audit" and later["upstream"] == story["upstream"]
        assert (await row(page, calls=1))["lossy"]["LOSSY-08"] == 1


async def test_a_question_about_a_tool_that_nobody_has_looked_at_offers_the_look(tmp_path: Path) -> None:
    approvals = Approvals(by="operator", wait=0.05)
    async with opened(gateway(Upstream(tmp_path), {"approvals": approvals})) as (_, page, peer):
        first = await peer.call("fs_read_file", {"path": "x"})
        assert first.is_error
        assert (await page.event("approval"))["unseen_upstream"] == "fs"
        await page.post("upstreams/fs/accept", tools=choices(await look(page)))
        await peer.call("fs_delete_file", {"path": "x"})
        assert (await page.event("approval", tool="fs_delete_file"))["unseen_upstream"] == ""


async def test_text_of_an_upstream_is_masked_and_cannot_act(tmp_path: Path) -> None:
    secret = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCD"
    upstream = Upstream(tmp_path, tools=[tool("read", f"{HOSTILE} {secret}")], stderr=f"{HOSTILE} token={secret}")
    async with opened(gateway(upstream)) as (rig, page, _):
        await until(lambda: bool(rig.console.server.upstreams["fs"].stderr))  # it comes over another pipe
        found = await page.get("upstreams/fs")
        (said,) = found["stderr"]
        assert said["worker"] == "" and "\x1b" not in said["lines"][0] and "\\x1b[31mred" in said["lines"][0]
        assert secret not in json.dumps(found)


async def test_stops_and_what_is_accepted_hold_in_every_worker_also_in_one_that_begins_later(tmp_path: Path) -> None:
    store, upstream = MemoryStore(), Upstream(tmp_path)
    one, two = (gateway(upstream, {"store": store}) for _ in range(2))
    shared = tmp_path / "console.sqlite"
    async with consoled(one, workers=2, shared=shared) as rig, Peer(one) as here:
        page = await rig.page()
        await here.tools()
        await page.post("stops", kind="upstream", name="fs", on=False)
        second = Console(two, workers=2, shared=shared)
        second.context.channel = rig.console.context.channel
        async with two.serving(), second.serving(), Peer(two) as there:
            second.context.worker = "second"
            far = two.upstreams["fs"]
            await until(lambda: far.is_stopped)
            await page.listen()
            await page.post("stops", kind="upstream", name="fs", on=True)
            await until(lambda: one.upstreams["fs"].state == far.state == "up")
            await there.tools()
            await page.post("upstreams/fs/accept", tools=choices(await look(page)))
            await until(lambda: all(each.accepted for each in far.tools))
            for peer in (here, there):
                assert not (await peer.call("fs_read_file", {"path": "x"})).is_error
            assert (await row(page, calls=2))["sessions"] >= 2


def test_rows_of_several_workers_become_one() -> None:
    base = {"name": "fs", "problem": "", "latency_ms": 1.0, "calls": 1, "errors": 0, "restarts": 0, "sessions": 1}
    base |= {
        "lossy": {"LOSSY-01": 1},
        "left_out": {"2024-11-05": {"LOSSY-02": 3}},
        "since": 5.0,
        "revision": "2025-06-18",
        **dict.fromkeys(upstreams._TOOL_COUNTS, 0),
    }
    one = {**base, "state": "up", "tools": 3}
    base = {**base, "left_out": {"2024-11-05": {"LOSSY-02": 3, "LOSSY-04": 1}, "2025-03-26": {"LOSSY-02": 3}}}
    other = {**base, "state": "down", "problem": "gone", "since": 9.0, "revision": "2026-07-28", "latency_ms": 4.0}
    (merged,) = upstreams.merge_rows([[one], [other]])
    assert (merged["state"], merged["problem"], merged["revision"]) == ("down", "gone", "2026-07-28")
    assert (merged["calls"], merged["sessions"], merged["latency_ms"], merged["tools"]) == (2, 2, 4.0, 3)
    assert merged["lossy"] == {"LOSSY-01": 2}
    assert merged["left_out"] == base["left_out"]
    assert upstreams.merge_rows([]) == []


# Sign-ins of callers


async def open_page(upstream: Authorized, url: str) -> str:
    """Sign in with a browser; what its last page shows."""
    back = await upstream.home.paste(url, urlsplit(url).netloc)
    async with aiohttp.ClientSession() as session, session.get(back) as response:
        assert response.status == 200
        return await response.text()


@requirement("GW-08", "P-24", "APP-17", everywhere=True)
async def test_a_person_signs_in_at_the_console_and_revokes_what_callers_have(tmp_path: Path) -> None:
    async with authorized_upstream() as upstream:
        server = Server("gateway", audit=tmp_path / "state.db")
        server.include(upstream.url, name="box", prefix="box_", trusted=True, auth=OAuth(grant="user"))
        endpoint = server.asgi()
        async with consoled(server) as rig, listening(endpoint) as url:
            rig.console.set_endpoint(url + endpoint.path)
            page, other = await rig.page("grace"), await rig.page("bob", "view call")
            texts = [json.dumps(await page.listen())]
            assert (await page.get("upstreams/box"))["sign_ins"] == {"is_signed_in": False, "callers": [], "count": 0}
            begun = await page.post("upstreams/box/sign-in")
            assert begun["needs_code"] and begun["host"] == urlsplit(upstream.home.issuer).netloc
            shown = await open_page(upstream, begun["url"])
            with pytest.raises(Refused, match="That is not the code on the page"):
                await page.post("upstreams/box/sign-in", code="AAAAAAAA")
            [code] = re.findall("<h1>(.*)</h1>", shown)
            with pytest.raises(Refused, match="That is not the code on the page"):
                await other.post("upstreams/box/sign-in", code=code)
            assert await page.post("upstreams/box/sign-in", code=code) == {}
            signed_in = {"is_signed_in": True, "callers": ["grace"], "count": 1}
            assert (await page.get("upstreams/box"))["sign_ins"] == signed_in
            assert (await other.get("upstreams/box"))["sign_ins"] == {**signed_in, "is_signed_in": False}
            async with Peer(server, principal=Principal("grace")) as peer:
                assert (await peer.call("box_whoami", {})).text.startswith("user-")
            texts += [json.dumps(await page.get("upstreams/box")), json.dumps(await page.get("audit")), shown]
            with pytest.raises(Refused, match="manage"):
                await other.post("upstreams/box/sign-out", caller="grace")
            with pytest.raises(Refused, match="'eve' has not signed in to box"):
                await page.post("upstreams/box/sign-out", caller="eve")
            assert await page.post("upstreams/box/sign-out", caller="grace") == {}
            assert (await page.get("upstreams/box"))["sign_ins"]["callers"] == []
            records = json.dumps(await page.get("audit"))
            assert "signed in to upstream box" in records and "revoked sign-in of grace to upstream box" in records
        assert not [text for text in (*texts, records) for token in upstream.tokens if token in text]


async def test_an_upstream_with_credentials_of_the_gateway_has_no_sign_ins(tmp_path: Path) -> None:
    async with consoled(gateway(Upstream(tmp_path))) as rig:
        page = await rig.page()
        assert (await page.get("upstreams/fs"))["sign_ins"] is None
        with pytest.raises(Refused, match="Callers do not sign in to fs"):
            await page.post("upstreams/fs/sign-in")
