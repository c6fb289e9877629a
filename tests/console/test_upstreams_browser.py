"""Upstreams in a browser: their states, the look, differences, stops; text of theirs that cannot act."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import pytest
from playwright.sync_api import Browser, Locator, expect

from authorized_upstream import authorized_upstream
from consoles import Served, chromium as chromium, serving
from paths import ROOT
from patience import PATIENCE
from requirements import requirement
from rigs_browser import Watched, axe as axe, scan, window

T = TypeVar("T")

RIG = ROOT / "tests" / "support" / "upstream_console.py"
HOSTILE = '<img src=x onerror="window.ran=1"> \x1b[31mred\x1b[0m \u202egpj.exe'
GATEWAY = f"""
import sys
from handrail import Server
from handrail.guards import Policy, Rule

trial = Rule(verdict="deny", tools=["who*"], name="no <b>whoami</b>", mode="audit")
server = Server("gateway", title="Our gateway", policy=Policy([trial]))
for name, revision in (("files", "2025-11-25"), ("issues", "2025-06-18")):
    command = [sys.executable, {str(RIG)!r}, f"{{name}}.json", revision]
    server.include(command, name=name, prefix=f"{{name}}_", lock="tools.lock")
server.include([sys.executable, "-c", "import sys; sys.exit('no database')"], name="base")


@server.tool(annotations={{"readOnlyHint": True}})
def whoami() -> str:
    \"\"\"Who calls.\"\"\"
    return "you"
"""
NARROW = {"width": 380, "height": 800}
WIDE = {"width": 1280, "height": 800}


def tool(name: str, about: str, hints: dict[str, bool] | None = None, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"name": name, "description": about, "inputSchema": schema, "annotations": hints or {}}


FILES = [
    tool("read_file", "Read a file.", {"readOnlyHint": True}, path="string"),
    tool("write_file", "Write a file.", {"idempotentHint": True}, path="string", text="string"),
    tool("delete_file", f"Delete a file. {HOSTILE}", {"readOnlyHint": True}, path="string"),
]
ISSUES = [
    tool("search", "Search issues.", {"readOnlyHint": True}, query="string"),
    tool("hold", "Wait.", {"readOnlyHint": True}, gate="string"),
]


def plan(home: Path, name: str, tools: list[dict[str, Any]]) -> None:
    lines = ["listening", f"{HOSTILE} token=sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCD"]
    (home / f"{name}.json").write_text(json.dumps({"tools": tools, "stderr": lines}), "utf-8")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    plan(home, "files", FILES)
    plan(home, "issues", ISSUES)
    (home / "gateway.py").write_text(GATEWAY, "utf-8")
    with serving(home, target=home / "gateway.py") as made:
        made.client().tools()  # from here on they have been asked
        yield made


@pytest.fixture(scope="module")
def shared(chromium: Browser, served: Served) -> Iterator[Watched]:
    # The scanner has to be let in; what the page itself does under its policy is looked at everywhere else.
    with window(chromium, served, served.link, bypass_csp=True, viewport=WIDE) as opened:
        yield opened


@pytest.fixture
def see(shared: Watched) -> Iterator[Watched]:
    yield shared
    assert shared.page.evaluate("window.ran") is None
    shared.page.set_viewport_size(WIDE)  # type: ignore[arg-type]
    shared.fine()


def open_upstream(see: Watched, name: str) -> Locator:
    see.go("upstreams", name)
    detail = see("upstream-detail")
    expect(detail.get_by_role("heading", name=name)).to_be_visible()
    expect(see("tab-upstreams")).to_have_attribute("aria-current", "page")
    return detail


def test_each_upstream_says_how_it_is_and_the_one_that_is_down_says_why(see: Watched) -> None:
    see.page.keyboard.press("g")
    see.page.keyboard.press("s")
    for name, state in {"files": "up", "issues": "up", "base": "down"}.items():
        expect(see(f"upstream-{name}")).to_have_attribute("data-state", state)
        expect(see(f"upstream-{name}")).to_contain_text(state)
    expect(see("upstreams-count")).to_have_text("1")
    expect(see("summary")).to_contain_text(re.compile(r"2 servers up of 3 · 5 tools, about \d+ tokens"))
    expect(see("upstream-detail")).to_contain_text("base")  # what needs somebody is open
    expect(see("problem")).to_contain_text("exited with code 1")
    expect(see("stderr-lines")).to_contain_text("no database")
    see.page.set_viewport_size(NARROW)  # type: ignore[arg-type]
    see.go("upstreams")
    expect(see("upstream-detail")).to_have_count(0)
    see("upstream-files").get_by_role("link").click()
    expect(see("speaks")).to_contain_text(re.compile(r"2025-11-25, with sessions, since \d"))
    assert see.page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    see("back").click()
    expect(see("upstream-base")).to_be_visible()


@requirement("GW-21", everywhere=True)
def test_a_look_shows_claims_and_proposals_and_one_button_accepts_them_as_they_are_set(see: Watched) -> None:
    open_upstream(see, "files")
    group = see("group-unseen")
    expect(group).to_contain_text("Not looked at yet (3)")
    expect(see("look-delete_file")).to_contain_text("claims“only reads”")
    expect(see("look-delete_file")).to_contain_text("doubtful")
    for name, proposal in {"read_file": "reads", "write_file": "writes", "delete_file": "destroys"}.items():
        expect(see(f"class-{name}-{proposal}")).to_be_checked()
        expect(see(f"origin-{name}")).to_have_text("proposed")
    see("class-write_file-destroys").check()
    expect(see("origin-write_file")).to_have_text("your choice; proposed: writes")
    see("look-write_file").get_by_role("button").click()
    expect(see("about-write_file")).to_contain_text("write_file(path?: str, text?: str)")
    expect(group).to_contain_text("1 reads, 2 destroy")
    see("accept-all-unseen").click()
    expect(see("group-accepted")).to_contain_text("Accepted (3)")
    expect(group).to_have_count(0)
    expect(see("origin-write_file")).to_have_text("accepted")
    expect(see("upstream-files")).not_to_contain_text("not looked at")
    see("class-write_file-writes").check()  # a second thought
    see("accept-all-accepted").click()
    expect(see("origin-write_file")).to_have_text("accepted")
    expect(see("accept-all-accepted")).to_have_count(0)
    expect(see("class-write_file-writes")).to_be_checked()


@requirement("GW-21", "APP-20", everywhere=True)
def test_a_changed_tool_is_held_back_with_its_difference_until_one_click_accepts_it(
    see: Watched, served: Served
) -> None:
    open_upstream(see, "issues")
    see("accept-all-unseen").click()
    expect(see("group-accepted")).to_be_visible()
    plan(
        served.home,
        "issues",
        [tool("search", f"Search all. {HOSTILE}", query="string"), ISSUES[1], tool("add", "Add.")],
    )
    see("refresh").click()
    expect(see("group-changed")).to_contain_text("Changed, and held back (1)")
    expect(see("diff-search")).to_contain_text("Search issues.")
    expect(see("diff-search")).to_contain_text("U+202E")
    expect(see("upstream-issues")).to_contain_text("1 changed")
    expect(see("look-add")).to_contain_text("claims nothing")
    see.go("tools", "issues_search")
    expect(see("diff-issues_search")).to_contain_text("/description")
    expect(see("hidden-issues_search")).to_contain_text("has changed since it was accepted")
    see("to-upstream").click()
    see("accept-search").click()
    expect(see("group-changed")).to_have_count(0)
    expect(see("look-search").get_by_text("accepted", exact=True)).to_be_visible()
    see("accept-add").click()
    expect(see("group-accepted")).to_contain_text("Accepted (3)")


def test_text_of_an_upstream_stays_text(see: Watched) -> None:
    open_upstream(see, "files")
    see("look-delete_file").get_by_role("button").first.click()
    for shown in ("about-delete_file", "stderr-lines"):
        expect(see(shown)).to_contain_text('<img src=x onerror="window.ran=1">')
        expect(see(shown)).to_contain_text("\\x1b")
    expect(see("about-delete_file")).to_contain_text("U+202E")
    expect(see("stderr-lines")).not_to_contain_text("sk-proj")
    assert see.page.locator("#main img").count() == 0


def test_tools_say_whose_they_are_and_what_they_cost(see: Watched) -> None:
    see.go("tools")
    expect(see("from-all")).to_contain_text(re.compile(r"^All7 · \d+ tokens"))
    see("from-files").click()
    expect(see("tool-files_read_file")).to_contain_text("from files")
    expect(see("tool-files_read_file").locator(".cost")).to_contain_text(re.compile(r"^\d+ tokens"))
    expect(see("tool-whoami")).to_have_count(0)
    see("from-.").click()
    expect(see("tool-whoami")).to_be_visible()
    expect(see("tool-files_read_file")).to_have_count(0)


@requirement("GW-04", everywhere=True)
def test_a_call_shows_its_way_and_a_running_one_can_be_stopped_with_all_of_its_upstream(
    see: Watched, served: Served
) -> None:
    client = served.client(revision="2025-03-26", name="old-desk")
    client.call("files_read_file", {"path": "notes"})
    see.go("calls", served.last_call("files_read_file"))
    for part in ("old-desk", "2025-03-26", "gateway", "2025-11-25", "files", "Structured content: sent as JSON"):
        expect(see("legs")).to_contain_text(part)
    waits = served.in_background(client.call, "issues_hold", {"gate": str(served.home / "never")})
    see.go("now")
    see("running").get_by_role("link").first.click()
    expect(see("legs")).to_contain_text("issues")
    see("stop").click()
    expect(see("stop-dialog")).to_contain_text("Stop issues_hold?")
    see("stop-upstream").check()
    expect(see("stop-dialog")).to_contain_text("Stop issues?")
    see("stop-reason").fill("its key has leaked")
    see("stop-yes").click()
    assert waits.result(PATIENCE).is_error
    see("served-by").click()
    expect(see("upstream-state")).to_have_text("stopped")
    expect(see("problem")).to_contain_text("its key has leaked")
    see("start-upstream").click()
    expect(see("upstream-state")).to_have_text("up")
    assert not client.call("issues_search", {"query": "x"}).is_error


def test_a_tool_and_a_caller_are_stopped_where_they_are_looked_at(see: Watched, served: Served) -> None:
    see.go("tools", "files_read_file")
    see("stop").click()
    see("stop-yes").click()
    expect(see("tool-stopped")).to_be_visible()
    expect(see("tool-files_read_file")).to_contain_text("stopped")
    client = served.client()
    assert client.call("files_read_file", {"path": "x"}).is_error
    see("start-tool").click()
    expect(see("stop")).to_be_visible()
    see.go("connections")
    see("stop").first.click()
    expect(see("stop-dialog")).to_contain_text("Stop anonymous?")
    see("stop-yes").click()
    expect(see("stopped-anonymous")).to_contain_text("caller")
    assert client.call("files_read_file", {"path": "x"}).is_error
    see("start-caller").click()
    expect(see("stops")).to_have_count(0)
    assert not client.call("files_read_file", {"path": "x"}).is_error


def test_somebody_who_only_looks_can_do_none_of_it(chromium: Browser, served: Served) -> None:
    with window(chromium, served, served.link_for("ada", "view", server="gateway")) as looks:
        open_upstream(looks, "files")
        for testid in ("refresh", "stop", "class-read_file-writes"):
            expect(looks(testid)).to_be_disabled()
        looks.fine()


@requirement("APP-16", everywhere=True)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_scan_of_the_screen_finds_nothing_grave(see: Watched, served: Served, axe: str, theme: Any) -> None:
    plan(served.home, "files", [*FILES[1:], tool("read_file", f"Read {theme}.", path="string"), tool(theme, "New.")])
    see.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    open_upstream(see, "files")
    see("refresh").click()
    expect(see(f"look-{theme}")).to_be_visible()
    scan(see.page, axe)
    see("stop").click()
    scan(see.page, axe)
    see.page.keyboard.press("Escape")


@requirement("GW-04", everywhere=True)
def test_what_definitions_lose_is_named_for_each_revision(see: Watched, served: Served, axe: str) -> None:
    served.client(revision="2024-11-05").tools()
    detail = open_upstream(see, "files")
    left_out = detail.get_by_test_id("left-out")
    expect(left_out).to_contain_text("For clients of 2024-11-05")
    expect(left_out).to_contain_text(re.compile(r"Hints of tools: .* in \d"))
    scan(see.page, axe)


def test_a_rule_on_trial_is_shown_with_its_counts_and_on_each_call_that_it_would_have_decided(
    see: Watched, served: Served, axe: str
) -> None:
    see.go("now")
    row = see("trial-no <b>whoami</b>")
    expect(row.locator("td")).to_have_text(["deny", "0", "0", "–"])
    client = served.client()
    for _ in range(2):
        assert client.call("whoami").text == "you"
    expect(row.locator("td").nth(1)).to_have_text("2")
    expect(row.locator("td").nth(2)).to_have_text("2")
    see("finished").get_by_text("whoami").first.click()
    expect(see("would-decide")).to_have_text("no <b>whoami</b> would say deny")
    scan(see.page, axe)


# Sign-ins


class Authorization:
    """The authorization server and its upstream, in a loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self.upstream = self._run(self._stack.enter_async_context(authorized_upstream()))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def last_page(self, url: str) -> str:
        return self._run(self._last_page(url))

    async def _last_page(self, url: str) -> str:
        back = await self.upstream.home.paste(url, urlsplit(url).netloc)
        async with aiohttp.ClientSession() as session, session.get(back) as response:
            return await response.text()

    def close(self) -> None:
        self._run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)


def test_a_person_signs_in_with_the_code_of_the_page_and_revokes_it(
    chromium: Browser, tmp_path: Path, axe: str
) -> None:
    authorization = Authorization()
    try:
        lines = ["from handrail import Server", "from handrail.auth import OAuth", 'server = Server("gateway")']
        url = authorization.upstream.url
        lines.append(f'server.include({url!r}, name="box", prefix="box_", auth=OAuth(grant="user"))')
        (tmp_path / "gateway.py").write_text("\n".join(lines), "utf-8")
        with (
            serving(tmp_path, target=tmp_path / "gateway.py") as made,
            window(chromium, made, made.link, bypass_csp=True, viewport=NARROW) as see,
        ):
            open_upstream(see, "box")
            expect(see("own-sign-in")).to_have_text("You are not signed in.")
            see("sign-in").click()
            href = see("sign-in-page").get_attribute("href")
            assert href is not None
            assert see("sign-in-page").get_attribute("rel") == "noopener noreferrer"
            [code] = re.findall("<h1>(.*)</h1>", authorization.last_page(href))
            expect(see("sign-in-done")).to_be_disabled()
            see("sign-in-code").fill(code)
            scan(see.page, axe)
            see("sign-in-done").click()
            expect(see("own-sign-in")).to_have_text("You are signed in.")
            assert see.page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
            see("revoke-local").click()
            expect(see("own-sign-in")).to_have_text("You are not signed in.")
            expect(see("signed-in-local")).to_have_count(0)
            see.fine()
    finally:
        authorization.close()
