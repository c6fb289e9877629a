"""The console in a real browser: what runs, one call's story, who is connected, and being let in.

Each test is what a person sees. Calls come from a client of their own; those that have to wait do so for a file.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from consoles import Served, chromium as chromium, fetched, ident, people, serving, signed_context, window
from handrail.client.client import BlockingClient
from patience import PATIENCE
from requirements import requirement

SETTINGS = people("alice", "bob") + '[approvals]\nby = "operator"\n'
SECRET = "sk_live_abcdefghijklmnop1234"
MASKED = "[secret]"
SHAKES_HANDS, STATELESS = "2025-11-25", "2026-07-28"
COUNTS = re.compile(r"([\d,]+)(?= calls| failed| refused)")
FRACTION = re.compile(r"^0\.(0[1-9]|[1-9]\d) ms$")
RING = 500  # calls that are kept whole
MANY = """
    const parse = JSON.parse;
    JSON.parse = text => {
        const it = parse(text);
        if (!it?.running_total) return it;
        const ended = Array.from({length: 40}, (_, n) => (
            {...it.running[0], id: `ended-${n}`, who: `a${n}`, state: "done", outcome: "ok"}));
        return {...it, running_total: 300, finished: ended};
    };
"""  # to the page it looks as if 300 calls ran, and 40 callers had called


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home"), settings=SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def context(chromium: Browser, served: Served) -> Iterator[BrowserContext]:
    with signed_context(chromium, served.link) as made:
        yield made


@pytest.fixture(scope="module")
def looking(context: BrowserContext, served: Served) -> Iterator[Page]:
    with window(context, f"{served.url}/#/now") as page:
        yield page


@pytest.fixture
def page(looking: Page, served: Served) -> Page:
    """The one window of this file, on Now; with nothing under the pointer, and nothing of an earlier test running."""
    looking.mouse.move(0, 0)
    looking.goto(f"{served.url}/#/now")
    expect(looking.get_by_test_id("running")).to_contain_text("Nothing is running")
    return looking


@pytest.fixture(scope="module")
def alice(served: Served) -> BlockingClient:
    return served.client(who="alice", name="helper")


class Gate:
    """Holds tools open, until the test has seen what it wants to see."""

    def __init__(self, served: Served, path: Path) -> None:
        self._served, self._path = served, path
        self.waiting: Future[Any] | None = None

    def hold(self, client: BlockingClient, tool: str = "hold", **more: Any) -> Future[Any]:
        self.waiting = self._served.in_background(client.call, tool, {"gate": str(self._path), **more})
        return self.waiting

    def step(self, number: int) -> None:
        Path(f"{self._path}.{number}").touch()

    def open(self) -> None:
        self._path.touch()


@pytest.fixture
def gate(served: Served, tmp_path: Path) -> Iterator[Gate]:
    made = Gate(served, tmp_path / "gate")
    yield made
    made.open()
    if made.waiting is not None:
        with contextlib.suppress(Exception):
            made.waiting.result(PATIENCE)


def running(page: Page, tool: str) -> Locator:
    return page.get_by_test_id("running").locator("li", has=page.get_by_text(tool, exact=True))


def newest(page: Page, tool: str) -> Locator:
    """The call of this tool that ended last."""
    return page.get_by_test_id("finished").locator("li", has=page.get_by_text(tool, exact=True)).first


def called(page: Page, served: Served, client: BlockingClient, tool: str, state: str = "ok", **arguments: Any) -> str:
    """Make a call, and see it among those that have ended. Its id, which the audit knows."""
    before = served.last_call(tool)
    client.call(tool, arguments)
    call_id = served.last_call(tool, after=before)
    expect(page.get_by_test_id("finished").get_by_test_id(f"row-{call_id}")).to_have_attribute("data-state", state)
    return call_id


def told(page: Page, served: Served, call: str) -> Locator:
    """The story of a call, by its address."""
    page.goto(f"{served.url}/#/calls/{call}")
    expect(page.get_by_test_id("call-id")).to_have_text(call)
    return page.get_by_test_id("story")


# Now


@requirement("APP-02", everywhere=True)
def test_a_call_shows_while_it_runs_and_then_among_those_that_have_ended(
    page: Page, alice: BlockingClient, gate: Gate
) -> None:
    call = gate.hold(alice)
    row = running(page, "hold")
    expect(row).to_have_attribute("data-state", "running")
    for said in ("running", "Hold on", "alice", "helper", "hold", "gate "):
        expect(row).to_contain_text(said)
    expect(page.get_by_test_id("tab-now")).to_contain_text("1")
    call_id = ident(row)
    gate.open()
    assert call.result(PATIENCE).text == "let go"
    ended = page.get_by_test_id("finished").get_by_test_id(f"row-{call_id}")
    expect(ended).to_have_attribute("data-state", "ok")
    expect(ended).to_contain_text("ok")
    expect(page.get_by_test_id("running")).to_contain_text("Nothing is running")
    expect(page.get_by_test_id("tab-now")).to_have_text("Now")


@requirement("APP-02", everywhere=True)
def test_a_call_shows_within_a_fifth_of_a_second_of_its_beginning(
    page: Page, served: Served, alice: BlockingClient, tmp_path: Path
) -> None:
    """The server and the browser have the same clock here. The best of a few: other things run on the machine."""
    page.evaluate(
        """() => {
            window.shown = {};
            window.looker = new MutationObserver(() => {
                for (const row of document.querySelectorAll('[data-testid="running"] li'))
                    window.shown[row.dataset.testid.slice(4)] ??= Date.now() / 1000;
            });
            window.looker.observe(document.body, {childList: true, subtree: true});
        }"""
    )
    late = []
    for number in range(6):
        gate = tmp_path / f"gate{number}"
        call = served.in_background(alice.call, "hold", {"gate": str(gate)})
        row = running(page, "hold")
        expect(row).to_be_visible()
        call_id = ident(row)
        gate.touch()
        call.result(PATIENCE)
        began = fetched(page, f"api/calls/{call_id}")["row"]["began"]
        late.append(page.evaluate("id => window.shown[id]", call_id) - began)
        expect(row).to_have_count(0)
    page.evaluate("window.looker.disconnect()")
    assert min(late) < 0.2, late


@requirement("APP-02", everywhere=True)
def test_progress_is_a_bar_that_grows_and_says_what_the_tool_says(
    page: Page, alice: BlockingClient, gate: Gate
) -> None:
    gate.hold(alice, steps=4)
    row = running(page, "hold")
    bar = row.get_by_role("progressbar")
    expect(bar).to_have_attribute("aria-valuenow", "25")
    expect(row).to_contain_text("begun")
    gate.step(2)
    expect(bar).to_have_attribute("aria-valuenow", "50")
    gate.step(3)
    expect(bar).to_have_attribute("aria-valuenow", "75")
    expect(row).to_contain_text("step 3")
    expect(row).to_contain_text("75 %")


@requirement("APP-02", everywhere=True)
def test_it_shows_whose_calls_are_whose_and_those_of_one_alone(
    page: Page, served: Served, alice: BlockingClient, gate: Gate
) -> None:
    bob = served.client(who="bob", name="robot")
    called(page, served, bob, "echo", text="hi")
    call = gate.hold(alice)
    expect(page.get_by_test_id("caller-alice")).to_contain_text("helper 1 running")
    lane = page.get_by_test_id("caller-bob")
    expect(lane).to_contain_text("robot")
    lane.click()
    expect(lane).to_have_attribute("aria-current", "true")
    expect(page.get_by_test_id("running")).to_contain_text("Nothing is running")
    rows = page.get_by_test_id("finished").locator("li")
    expect(rows.filter(has_text="robot").first).to_be_visible()
    expect(rows.filter(has_not_text="robot")).to_have_count(0)
    page.reload()  # the address keeps it
    expect(page.get_by_test_id("running")).to_contain_text("Nothing is running")
    expect(page.get_by_test_id("caller-alice")).to_contain_text("1 running")
    lane.click()
    expect(running(page, "hold")).to_be_visible()
    gate.open()
    call.result(PATIENCE)


@pytest.mark.parametrize("of", ["x", "null", "5", '"ab"', "[1,2]", '["alice"]'])
def test_an_address_that_names_no_caller_shows_the_calls_of_all(
    page: Page, served: Served, alice: BlockingClient, of: str
) -> None:
    page.goto(f"{served.url}/#/now?of={quote(of)}")
    page.reload()
    called(page, served, alice, "add", a=1)
    expect(page.get_by_test_id("caller-alice").first).to_be_visible()
    expect(page.get_by_test_id("callers").locator("[aria-current]")).to_have_count(0)


def test_who_was_chosen_is_shown_among_many_and_so_is_that_not_all_is_looked_at(
    chromium: Browser, served: Served, alice: BlockingClient, gate: Gate
) -> None:
    with signed_context(chromium, served.link_for("local", "view")) as context:
        context.add_init_script(MANY)
        with window(context, f"{served.url}/#/now") as page:
            gate.hold(alice)
            lanes = page.get_by_test_id("callers").locator("a")
            expect(lanes).to_have_count(30)
            expect(page.get_by_test_id("running")).to_contain_text("1 of 300: the longest running")
            page.goto(f"{served.url}/#/now?of={quote(json.dumps(['alice', 'helper']))}")
            expect(lanes).to_have_count(31)
            expect(page.get_by_test_id("caller-alice")).to_have_attribute("aria-current", "true")
            expect(page.get_by_test_id("running")).to_contain_text("1 among the 1 of 300 that run longest")


@requirement("APP-12", everywhere=True)
def test_cancel_stops_a_call_and_its_caller_hears_of_it(page: Page, alice: BlockingClient, gate: Gate) -> None:
    call = gate.hold(alice)
    row = running(page, "hold")
    expect(row).to_be_visible()
    call_id = ident(row)
    page.get_by_test_id(f"cancel-{call_id}").click()
    answer = call.result(PATIENCE)
    assert answer.is_error and "cancelled by an operator" in answer.text
    page.mouse.move(0, 0)
    ended = page.get_by_test_id("finished").get_by_test_id(f"row-{call_id}")
    expect(ended).to_have_attribute("data-state", "cancelled")
    expect(ended).to_contain_text("cancelled")


@requirement("APP-12", everywhere=True)
def test_a_tool_that_goes_on_shows_that_its_cancellation_was_requested(
    page: Page, alice: BlockingClient, gate: Gate
) -> None:
    call = gate.hold(alice, "stubborn")
    row = running(page, "stubborn")
    expect(row).to_have_attribute("data-state", "running")
    call_id = ident(row)
    button = page.get_by_test_id(f"cancel-{call_id}")
    button.click()
    expect(row).to_have_attribute("data-state", "cancelling")
    expect(row).to_contain_text("cancel requested")
    expect(button).to_be_disabled()
    with window(page.context, page.url) as other:  # not only where it was asked for
        expect(running(other, "stubborn")).to_contain_text("cancel requested")
        assert not call.done() or call.result().is_error
        gate.open()
        expect(newest(other, "stubborn")).to_have_attribute("data-state", "cancelled")
    page.mouse.move(0, 0)
    expect(newest(page, "stubborn")).to_have_attribute("data-state", "cancelled")


@requirement("APP-12", everywhere=True)
def test_a_call_can_be_cancelled_from_its_story_too(
    page: Page, served: Served, alice: BlockingClient, gate: Gate
) -> None:
    call = gate.hold(alice, "stubborn")
    row = running(page, "stubborn")
    expect(row).to_be_visible()
    story = told(page, served, ident(row))
    button = story.get_by_role("button", name="Cancel", exact=True)
    button.click()
    expect(story.get_by_role("button", name="Cancel requested")).to_be_disabled()
    expect(story.get_by_test_id("state")).to_have_text("cancel requested")
    gate.open()
    expect(story.get_by_test_id("state")).to_have_text("cancelled")
    assert call.result(PATIENCE).is_error


@requirement("APP-07", everywhere=True)
def test_what_worked_what_failed_and_what_was_refused_look_different(
    page: Page, served: Served, alice: BlockingClient
) -> None:
    pills = []
    calls: list[tuple[str, dict[str, Any], str, str]] = [
        ("add", {"a": 1}, "ok", "ok"),
        ("fail", {}, "tool_error", "tool error"),
        ("add", {"a": "one"}, "bad_arguments", "wrong arguments"),
    ]
    for tool, arguments, state, word in calls:
        call_id = called(page, served, alice, tool, state, **arguments)
        pills.append(page.get_by_test_id(f"row-{call_id}").locator(".pill"))
        expect(pills[-1]).to_have_text(word)
    assert len({each.evaluate("pill => getComputedStyle(pill).color") for each in pills}) == 3
    assert len({each.locator("path").get_attribute("d") for each in pills}) == 2  # and a cross is no tick


@requirement("APP-02", everywhere=True)
def test_now_says_who_was_refused_and_why_and_shows_calls_by_how_they_ended(
    page: Page, served: Served, alice: BlockingClient
) -> None:
    states: dict[str, tuple[str, dict[str, Any]]] = {
        "ok": ("add", {"a": 4711}),
        "tool_error": ("fail", {}),
        "bad_arguments": ("add", {"a": "one"}),
    }
    calls = {state: called(page, served, alice, tool, state, **given) for state, (tool, given) in states.items()}
    row = page.get_by_test_id(f"row-{calls['ok']}")
    expect(row).to_contain_text("a 4711")
    expect(row).not_to_contain_text(STATELESS)
    expect(page.get_by_test_id("figure-refused")).to_contain_text(re.compile(r"[\d,]+ wrong arguments: .*alice \d+"))
    expect(page.get_by_test_id("health")).to_contain_text(re.compile(r"refused in the last five minutes: .*wrong arg"))
    cells = page.get_by_test_id("by-tool-add").locator("td")
    expect(cells.nth(2)).to_have_text(re.compile(r"^[1-9]\d*$"))
    expect(cells.nth(3)).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    for chosen, state in (("ok", "ok"), ("failed", "tool_error"), ("refused", "bad_arguments"), ("all", "")):
        page.get_by_test_id(f"ended-{chosen}").click()
        page.mouse.move(0, 0)  # a list keeps still under a pointer
        expect(page.get_by_test_id(f"ended-{chosen}")).to_have_attribute("aria-current", "true")
        for each, call_id in calls.items():
            expect(page.get_by_test_id(f"row-{call_id}")).to_have_count(int(not state or each == state))
        if chosen == "refused":
            page.reload()
            expect(page.get_by_test_id("ended-refused")).to_have_attribute("aria-current", "true")


def test_a_story_begins_with_the_arguments_and_says_a_result_once(
    page: Page, served: Served, alice: BlockingClient
) -> None:
    story = told(page, served, called(page, served, alice, "add", a=4711, b=2))
    titles = story.get_by_role("heading", level=2).all_inner_texts()
    assert titles.index("Arguments") < titles.index("Result")
    result = story.get_by_test_id("result")
    expect(result.get_by_role("group", name="Structured content")).to_contain_text("4713")
    assert result.inner_text().count("4713") == 1
    result.get_by_test_id("same-as-text").click()
    expect(result.locator(".result-part").last).to_contain_text("4713")
    assert result.inner_text().count("4713") == 2


@requirement("APP-02", everywhere=True)
def test_after_three_hundred_calls_the_counters_are_exact(page: Page, served: Served, alice: BlockingClient) -> None:
    totals = page.get_by_test_id("totals")

    def shown() -> list[int]:
        return [
            int(each.replace(",", ""))
            for each in re.findall(r"([\d,]+)(?= calls| failed| refused)", totals.inner_text())
        ]

    called(page, served, alice, "echo", text="before")
    before = shown()
    for number in range(300):
        alice.call(*(("add", {"a": number}) if number % 10 else ("fail", {}) if number % 20 else ("add", {"a": "x"})))
    expect(page.get_by_test_id("total-calls")).to_have_text(f"{before[0] + 300:,}")
    assert [after - was for after, was in zip(shown(), before, strict=True)] == [300, 15, 15]


def test_the_page_hears_of_everything_and_never_asks_again(page: Page, served: Served, alice: BlockingClient) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for number in range(3):
        called(page, served, alice, "echo", text=str(number))
    assert asked == []


def test_the_list_keeps_still_while_somebody_points_at_it(page: Page, served: Served, alice: BlockingClient) -> None:
    first = called(page, served, alice, "echo", text="one")
    rows = page.get_by_test_id("finished").locator("li")
    rows.first.hover()
    alice.call("echo", {"text": "two"})
    rows.first.hover(position={"x": 9, "y": 9})  # still there
    expect(page.get_by_test_id("finished")).to_contain_text("newer, held while you point")
    expect(rows.first).to_have_attribute("data-testid", f"row-{first}")
    page.mouse.move(0, 0)
    expect(rows.first).not_to_have_attribute("data-testid", f"row-{first}")


def test_a_call_that_waits_for_a_yes_stands_on_top_and_leads_to_its_card(
    page: Page, served: Served, alice: BlockingClient
) -> None:
    expect(page.get_by_test_id("waiting")).to_contain_text("No call is waiting for approval")
    call = served.in_background(alice.call, "cancel_order", {"order_id": 3})
    ask = page.get_by_test_id("waiting").get_by_role("link")
    expect(ask).to_contain_text("Cancel an order: order_id 3")
    expect(page.get_by_test_id("approve-count")).to_have_text("1")
    expect(page).to_have_title(re.compile(r"^\(1\) "))
    row = running(page, "cancel_order")
    expect(row).to_have_attribute("data-state", "asking")
    expect(row.get_by_role("progressbar")).to_have_count(0)
    ask.click()
    card = page.locator("article")
    expect(page).to_have_url(re.compile(rf"#/approve/{ident(card)}$"))
    page.get_by_test_id(f"no-{ident(card)}").click()
    assert call.result(PATIENCE).is_error


# One call


@requirement("APP-04", everywhere=True)
def test_a_story_tells_the_stages_the_arguments_and_the_result(
    page: Page, served: Served, alice: BlockingClient
) -> None:
    call_id = called(page, served, alice, "add", a=40)
    page.get_by_test_id(f"row-{call_id}").get_by_role("link", name="Add two numbers").click()
    story = page.get_by_test_id("story")
    expect(story.get_by_role("heading", level=1)).to_have_text("Add two numbers")
    expect(story.get_by_test_id("state")).to_have_text("ok")
    for name in ("limit", "validate", "run", "sanitize"):
        expect(story.get_by_test_id(f"stage-{name}")).to_contain_text(re.compile(r"\d m?s"))
    expect(story.locator(".stage-time", has_text=FRACTION).first).to_be_visible()
    expect(story.get_by_role("group", name="Arguments")).to_contain_text("a: 40")
    expect(story.get_by_test_id("result")).to_contain_text("42")
    expect(story.get_by_test_id("records")).to_contain_text(re.compile("intent.*outcome", re.DOTALL))
    for said in ("alice", "helper", STATELESS, "127.0.0.1"):
        expect(story).to_contain_text(said)


@requirement("APP-14", everywhere=True)
@pytest.mark.parametrize("revision", [SHAKES_HANDS, STATELESS])
def test_the_wire_is_shown_in_its_revision_with_the_secret_masked(page: Page, served: Served, revision: str) -> None:
    client = served.client(who="alice", revision=revision)
    story = told(page, served, called(page, served, client, "echo", text=f"the key is {SECRET}"))
    asked, answered = story.get_by_test_id("wire-0"), story.get_by_test_id("wire-1")
    expect(asked).to_contain_text("from the client")
    expect(answered).to_contain_text("to the client")
    page.get_by_test_id("pick-raw").click()
    sent, got = (json.loads(each.locator("pre").inner_text()) for each in (asked, answered))
    assert sent["method"] == "tools/call" and sent["params"]["name"] == "echo"
    assert (revision in json.dumps(sent.get("params", {}).get("_meta", {}))) == (revision == STATELESS)
    assert got["id"] == sent["id"] and ("resultType" in got["result"]) == (revision == STATELESS)
    assert sent["params"]["arguments"]["text"].startswith("the key is ")
    whole = page.content()
    assert SECRET not in whole and SECRET[8:] not in whole


@requirement("APP-02", everywhere=True)
def test_progress_and_log_lines_come_into_the_story_while_the_call_goes_on(
    page: Page, served: Served, gate: Gate
) -> None:
    call = gate.hold(served.client(who="alice", log=lambda *_: None))
    row = running(page, "hold")
    expect(row).to_be_visible()
    story = told(page, served, ident(row))
    expect(story.get_by_test_id("state")).to_have_text("running")
    expect(story).to_contain_text("Not yet: the call is running.")
    bar = story.get_by_test_id("progress").get_by_role("progressbar")
    expect(bar).to_have_attribute("aria-valuenow", "25")
    gate.step(2)
    expect(bar).to_have_attribute("aria-valuenow", "50")
    gate.open()
    expect(story.get_by_test_id("state")).to_have_text("ok")
    expect(story.get_by_test_id("result")).to_contain_text("let go")
    expect(story.get_by_test_id("progress")).to_contain_text("2 of 4")
    expect(story.get_by_test_id("logs")).to_contain_text("info")
    expect(story.get_by_test_id("logs")).to_contain_text("holding on")
    assert call.result(PATIENCE).text == "let go"


def test_the_trace_of_the_caller_is_in_the_story(page: Page, served: Served) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    client = served.client(who="alice", headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    story = told(page, served, called(page, served, client, "add", a=5))
    expect(story.get_by_test_id("trace")).to_contain_text(trace)


@requirement("APP-07", everywhere=True)
def test_in_the_story_a_tools_error_looks_unlike_one_of_the_protocol_and_unlike_a_refusal(
    page: Page, served: Served, alice: BlockingClient
) -> None:
    def panel(call_id: str, name: str) -> Locator:
        story = told(page, served, call_id)
        return story.locator("section", has=page.get_by_role("heading", name=name, exact=True))

    failed = panel(called(page, served, alice, "fail", "tool_error"), "Result")
    expect(failed).to_contain_text("Error of the tool")
    expect(failed).to_contain_text("it does not work")
    page.goto(f"{served.url}/#/now")
    unfit = panel(called(page, served, alice, "add", "bad_arguments", a="x"), "Why not")
    expect(unfit).to_contain_text("it was not run")
    expect(unfit).to_contain_text('a: expected integer, got string "x"')
    before = served.last_call("cancel_order")
    call = served.in_background(alice.call, "cancel_order", {"order_id": 9})
    page.goto(f"{served.url}/#/approve")
    page.get_by_role("button", name="No", exact=True).click()
    call.result(PATIENCE)
    refused = panel(served.last_call("cancel_order", after=before), "Why not")
    expect(refused).to_contain_text("The call was refused")
    expect(page.get_by_test_id("verdict")).to_have_text("ask")


@requirement("APP-14", everywhere=True)
def test_a_storys_address_opens_it_in_another_window(
    page: Page, chromium: Browser, context: BrowserContext, served: Served, alice: BlockingClient
) -> None:
    call_id = called(page, served, alice, "echo", text="for a friend")
    told(page, served, call_id)
    with window(context, page.url) as other:
        expect(other.get_by_test_id("call-id")).to_have_text(call_id)
        expect(other.get_by_test_id("result")).to_contain_text("for a friend")
    stranger = chromium.new_context()
    with window(stranger, page.url) as other:
        expect(other.get_by_test_id("signed-out")).to_be_visible()
        expect(other.locator("body")).not_to_contain_text("for a friend")
    stranger.close()


@requirement("APP-13", everywhere=True)
def test_a_call_that_memory_has_lost_is_told_from_the_audit_and_says_so(
    page: Page, served: Served, alice: BlockingClient
) -> None:
    call_id = called(page, served, alice, "echo", text="soon forgotten")
    for number in range(RING):
        alice.call("add", {"a": number})
    story = told(page, served, call_id)
    expect(story).to_contain_text("Told from the audit")
    expect(story.get_by_test_id("state")).to_have_text("ok")
    expect(story.get_by_test_id("records")).to_contain_text(re.compile("intent.*outcome", re.DOTALL))
    expect(story).to_contain_text("alice")
    expect(story).not_to_contain_text("soon forgotten")
    expect(story.get_by_test_id("wire-0")).to_have_count(0)


def test_a_call_that_never_was_says_so_and_where_to_look(page: Page, served: Served) -> None:
    page.goto(f"{served.url}/#/calls/0123456789abcdef")
    expect(page.get_by_test_id("failure")).to_contain_text("There is no call")
    expect(page.get_by_role("link", name="Look for it in the audit")).to_be_visible()


# Connections


def connection(page: Page, client: str) -> Locator:
    return page.locator('[data-testid^="connection-"]', has=page.get_by_text(client, exact=True))


@requirement("APP-14", everywhere=True)
def test_a_client_shows_with_its_revision_transport_and_principal(page: Page, served: Served) -> None:
    """Five at once: each is told of within a second."""
    page.goto(f"{served.url}/#/connections")
    clients = {}
    for revision in ("2024-11-05", "2025-03-26", "2025-06-18", SHAKES_HANDS, STATELESS):
        expect(connection(page, f"client-of-{revision}")).to_have_count(0)
        clients[revision] = served.client(who="bob", name=f"client-of-{revision}", revision=revision)
        clients[revision].call("add", {"a": 1})
    for revision in clients:
        row = connection(page, f"client-of-{revision}")
        for cell, said in {
            "Revision": revision,
            "Transport": "http",
            "Who": "bob",
            "From": "127.0.0.1",
            "Calls": "1",
        }.items():
            expect(row.locator(f'[data-label="{cell}"]')).to_contain_text(said)
    for client in clients.values():
        client.call("add", {"a": 2})
    for revision in clients:
        row = connection(page, f"client-of-{revision}")
        expect(row.locator('[data-label="Calls"]')).to_have_text("2")


@requirement("APP-14", everywhere=True)
def test_a_client_is_open_while_it_is_there_and_idle_when_it_has_left(page: Page, served: Served) -> None:
    page.goto(f"{served.url}/#/connections")
    client = served.client(who="bob", name="patient")
    client.call("add", {"a": 1})
    row = connection(page, "patient")
    expect(row.locator(".pill")).to_have_text("open")
    for part in ("replicas", "fleet-size"):
        expect(page.get_by_test_id(part)).to_have_count(0)  # this server is no fleet
    client.close()
    expect(row.locator(".pill")).to_have_text("idle")


# Being let in


def signed_out(page: Page) -> Locator:
    """What is shown to nobody in particular: what to do."""
    said = page.get_by_test_id("signed-out")
    expect(said).to_contain_text("You are not signed in")
    expect(said.locator("code").first).to_have_text("handrail console")
    expect(page.get_by_test_id("tab-now")).to_have_count(0)
    return said


@requirement("APP-17", everywhere=True)
def test_without_a_link_nothing_is_shown_but_what_to_do(chromium: Browser, served: Served) -> None:
    context = chromium.new_context()
    with window(context, served.url) as page:
        signed_out(page)
    context.close()


@requirement("APP-17", everywhere=True)
def test_a_link_works_once_and_says_so_the_second_time(chromium: Browser, served: Served) -> None:
    link = served.fresh_link()
    with signed_context(chromium, link):
        thief = chromium.new_context()
        with window(thief, link) as page:
            expect(signed_out(page)).to_contain_text("This link was used before")
            assert "code=" not in page.url
        thief.close()


@requirement("APP-17", everywhere=True)
def test_a_link_older_than_five_minutes_says_so(chromium: Browser, served: Served) -> None:
    link = served.link_for("local", "view")
    with contextlib.closing(sqlite3.connect(served.state)) as database, database:
        database.execute("UPDATE entries SET expires = 1 WHERE key LIKE 'console-code:%'")
    context = chromium.new_context()
    with window(context, link) as page:
        expect(signed_out(page)).to_contain_text("older than 5 minutes")
    context.close()


@requirement("APP-17", everywhere=True)
def test_signing_out_ends_every_window_of_the_session_and_no_other(
    chromium: Browser, page: Page, served: Served
) -> None:
    with (
        signed_context(chromium, served.link_for("local", "view")) as mine,
        window(mine, f"{served.url}/#/now") as one,
        window(mine, f"{served.url}/#/connections") as two,
    ):
        expect(two.get_by_role("heading", name="Connections", exact=True)).to_be_visible()
        one.get_by_test_id("who").click()
        one.get_by_test_id("sign-out").click()
        expect(signed_out(one)).to_contain_text("You have signed out")
        signed_out(two)
        one.reload()
        signed_out(one)
    page.reload()
    expect(page.get_by_test_id("tab-now")).to_be_visible()


@requirement("APP-17", everywhere=True)
def test_somebody_who_may_only_look_sees_calls_and_cannot_stop_them(
    chromium: Browser, served: Served, alice: BlockingClient, gate: Gate
) -> None:
    with (
        signed_context(chromium, served.fresh_link("--as", "grace", "--roles", "view")) as hers,
        window(hers, f"{served.url}/#/now") as page,
    ):
        expect(page.get_by_test_id("who")).to_contain_text("grace")
        gate.hold(alice)
        row = running(page, "hold")
        expect(row).to_be_visible()
        button = page.get_by_test_id(f"cancel-{ident(row)}")
        expect(button).to_be_disabled()
        expect(button).to_have_attribute("title", "You may not cancel calls")
        status = page.evaluate(
            """async id => {
                const csrf = localStorage.getItem("handrail-csrf");
                const headers = {"content-type": "application/json", "x-handrail-csrf": csrf};
                return (await fetch(`api/calls/${id}/cancel`, {method: "POST", headers, body: "{}"})).status;
            }""",
            ident(row),
        )
        assert status == 403
        expect(row).to_have_attribute("data-state", "running")


def test_two_keys_lead_to_each_screen_and_one_to_the_help(page: Page) -> None:
    for key, screen in zip("tyauc", ("tools", "try", "approve", "audit", "connections"), strict=True):
        page.keyboard.press("g")
        page.keyboard.press(key)
        expect(page.get_by_test_id(f"tab-{screen}")).to_have_attribute("aria-current", "page")
        expect(page).to_have_url(re.compile(f"#/{screen}"))
    page.keyboard.press("?")
    expect(page.get_by_test_id("keys")).to_contain_text("go to Audit")
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("keys")).to_have_count(0)


# A server of its own, which is stopped


def test_a_new_server_says_on_each_screen_what_to_do_next_and_tells_how_it_is(
    chromium: Browser, tmp_path: Path
) -> None:
    with (
        serving(tmp_path) as served,
        signed_context(chromium, served.link) as context,
        window(context, f"{served.url}/#/now") as page,
    ):
        health = page.get_by_test_id("health")
        expect(health).to_have_text(re.compile(r"Idle: \d+ tools, no calls in the last five minutes\."))
        expect(page.get_by_test_id("running")).to_contain_text(f"handrail call {served.endpoint}")
        expect(page.get_by_test_id("finished")).to_contain_text("No call has ended yet")
        page.goto(f"{served.url}/#/connections")
        expect(page.get_by_label("Entry for mcpServers")).to_contain_text(served.endpoint)
        page.goto(f"{served.url}/#/approve")
        expect(page.get_by_text("No call is waiting for approval")).to_be_visible()
        page.goto(f"{served.url}/#/now")
        client = served.client()
        client.call("add", {"a": 1})
        expect(health).to_have_text("Healthy: no call failed or was refused in the last five minutes.")
        client.call("fail")
        expect(health).to_have_text("1 of 2 calls failed in the last five minutes.")


def test_a_server_that_is_gone_is_noticed_and_one_that_comes_back_too(chromium: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as served,
        signed_context(chromium, served.link) as context,
        window(context, f"{served.url}/#/now") as page,
    ):
        call_id = called(page, served, served.client(), "echo", text="before")
        lost = page.get_by_test_id("stream-lost")
        expect(lost).to_have_count(0)
        served.end()
        expect(lost).to_contain_text("The server is out of reach")
        expect(lost).to_have_attribute("role", "alert")
        expect(newest(page, "echo")).to_be_visible()  # what was known stays
        served.start_again()
        expect(lost).to_have_count(0)
        expect(page.get_by_test_id("total-calls")).to_have_text("0")
        called(page, served, served.client(), "add", a=1)
        expect(page.get_by_test_id("total-calls")).to_have_text("1")
        story = told(page, served, call_id)  # of a process that is no more
        expect(story).to_contain_text("Told from the audit")
