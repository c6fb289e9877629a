"""Tools: what is exposed to whom and why not, what a tool says of itself and what it is, switched, changed, drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect

from consoles import Served, chromium as chromium, serving
from requirements import requirement
from rigs_browser import Watched, window

SETTINGS = """
[[rules]]
name = "guests only look"
verdict = "hide"
principals = ["guest"]
tools = ["cancel_*", "delete_*"]

[[rules]]
name = "late orders stay"
verdict = "deny"
tools = ["cancel_order"]
arguments = { order_id = { over = 100 } }

[limits.tools.echo]
rate = "50/minute"
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home"), settings=SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def shared(chromium: Browser, served: Served) -> Iterator[Watched]:
    with window(chromium, served, served.link) as opened:
        yield opened


@pytest.fixture
def see(shared: Watched) -> Iterator[Watched]:
    shared.go("tools")
    expect(shared("as")).to_have_value("local")
    yield shared
    shared.fine()


def listed(served: Served, **options: Any) -> list[str]:
    with served.client(**options) as client:
        return [each.name for each in client.tools()]


def exposed(see: Watched) -> list[str]:
    rows = see.page.locator('[data-testid^="tool-"][data-exposed="true"]')
    return [str(each).removeprefix("tool-") for each in rows.evaluate_all("all => all.map(it => it.dataset.testid)")]


@requirement("APP-01", everywhere=True)
def test_what_is_exposed_is_what_the_wire_lists_each_with_a_switch(see: Watched, served: Served) -> None:
    names = listed(served)
    expect(see("tool-add")).to_be_visible()
    assert exposed(see) == names
    expect(see("summary")).to_contain_text(re.compile(rf"sees {len(names)} of \d+ tools"))
    for name in ("add", "cancel_order"):
        switch = see(f"switch-{name}")
        expect(switch).to_have_role("switch")
        expect(switch).to_have_attribute("aria-checked", "true")
        expect(switch).to_have_text("on")  # in words too


@requirement("APP-01", everywhere=True)
def test_a_tool_that_is_switched_off_is_gone_at_once_for_every_caller(see: Watched, served: Served) -> None:
    see("switch-echo").click()
    expect(see("switch-echo")).to_have_attribute("aria-checked", "false")
    expect(see("switch-echo")).to_have_text("off")
    expect(see("hidden-echo")).to_contain_text("It is switched off")
    expect(see("tool-echo")).to_have_attribute("data-exposed", "false")
    assert "echo" not in listed(served)
    see("switch-echo").click()
    expect(see("tool-echo")).to_have_attribute("data-exposed", "true")
    assert "echo" in listed(served)


@requirement("APP-01", everywhere=True)
def test_seen_as_somebody_else_tools_are_hidden_with_the_reason(see: Watched) -> None:
    see("as").fill("guest")
    see("as").press("Enter")
    expect(see("summary")).to_contain_text("guest sees")
    expect(see("hidden-cancel_order")).to_contain_text("guests only look")
    expect(see("verdict-cancel_order")).to_contain_text("hide")
    expect(see("tool-add")).to_have_attribute("data-exposed", "true")
    expect(see("hidden-figures")).to_contain_text("scope reports")
    see("scopes").fill("reports, other")
    see("scopes").press("Enter")
    expect(see("tool-figures")).to_have_attribute("data-exposed", "true")
    assert "as=guest" in see.page.url and "scopes=reports" in see.page.url  # a link that can be sent to somebody
    see.page.reload()
    expect(see("tool-figures")).to_have_attribute("data-exposed", "true")
    expect(see("as")).to_have_value("guest")


@requirement("APP-14", everywhere=True)
def test_the_list_can_be_read_as_each_revision_has_it_on_the_wire(see: Watched, served: Served) -> None:
    see("revision").select_option("2024-11-05")
    expect(see("revision")).to_have_value("2024-11-05")
    see("wire").click()
    old = see("wire-text").inner_text()
    assert '"annotations"' not in old and '"name":"add"' in old  # they came later
    see.page.keyboard.press("Escape")
    see("revision").select_option("2025-11-25")
    see("wire").click()
    expect(see("wire-text")).to_contain_text('"annotations"')
    tools = json.loads(see("wire-text").inner_text())["result"]["tools"]
    assert [each["name"] for each in tools] == listed(served, revision="2025-11-25")
    see.page.keyboard.press("Escape")


@requirement("APP-06", everywhere=True)
def test_two_tools_with_one_title_are_told_apart_by_their_real_names(see: Watched) -> None:
    for name in ("add", "plus"):
        expect(see(f"tool-{name}").get_by_role("link")).to_have_text(f"Add two numbers {name}")
        see(f"tool-{name}").get_by_role("link").click()
        expect(see("tool-detail").get_by_role("heading", name="Add two numbers")).to_be_visible()
        expect(see("real-name")).to_have_text(name)


def detail(see: Watched, name: str) -> Locator:
    see(f"tool-{name}").get_by_role("link").click()
    expect(see("real-name")).to_have_text(name)
    return see("tool-detail")


@requirement("APP-05", everywhere=True)
def test_hints_are_shown_as_what_the_server_declares(see: Watched) -> None:
    shown = detail(see, "cancel_order")
    expect(shown.get_by_role("heading", name="Declared by the server")).to_be_visible()
    expect(see("annotations")).to_contain_text("They are not facts")
    expect(see("annotations")).to_contain_text("destructiveHint")
    expect(see("annotations")).to_contain_text("It may destroy or overwrite.")


def test_one_tool_with_signature_schemas_verdict_limits_and_cost(see: Watched) -> None:
    shown = detail(see, "cancel_order")
    expect(shown).to_contain_text("It cannot be undone.")
    expect(shown.get_by_role("region", name="Signature")).to_contain_text("cancel_order(order_id: int, reason: str")
    table = shown.get_by_role("table").first
    expect(table).to_contain_text("order_id")
    expect(table).to_contain_text("integer")
    expect(table).to_contain_text("≥ 1 · ≤ 1000")
    shown.get_by_role("button", name="As JSON").first.click()
    expect(shown.get_by_role("region", name="Input schema as JSON")).to_contain_text('"maximum": 1000')
    facts = shown.locator("dl.facts")
    expect(facts).to_contain_text("depends on the arguments")
    expect(facts).to_contain_text("deny by late orders stay")
    expect(facts).to_contain_text("else ask by built in: destructive tools ask")
    expect(facts).to_contain_text(re.compile(r"about \d+ tokens"))
    expect(detail(see, "echo")).to_contain_text("50 a minute")
    expect(detail(see, "add").get_by_role("heading", name="Output")).to_be_visible()


def test_calls_that_ran_failed_and_were_refused_are_counted_apart(see: Watched, served: Served) -> None:
    with served.client() as client:
        client.call("fail", {})
        client.call("fail", {})
        client.call("fail", {"text": 5})
    see.page.reload()
    said = re.compile(r"2 run · 2 failed \(100 %\) · 1 refused · p95 [\d.]+ m?s")
    expect(see("tool-fail")).to_contain_text(said)
    expect(detail(see, "fail")).to_contain_text(said)
    expect(detail(see, "fail")).to_contain_text("last seen")
    expect(see("tool-sound")).to_contain_text("never called")


def test_tools_that_destroy_and_tools_that_only_read_are_marked(see: Watched) -> None:
    expect(see("tool-cancel_order")).to_contain_text("destructive")
    expect(see("tool-add")).to_contain_text("read-only")
    expect(see("tool-add")).not_to_contain_text("destructive")


def test_tools_are_found_by_what_they_say_and_the_address_keeps_it(see: Watched) -> None:
    see.page.keyboard.press("/")
    see.page.keyboard.type("cannot be undone")
    expect(see.page.locator(".tool-list > li")).to_have_count(1)
    expect(see("tool-cancel_order")).to_be_visible()
    see.page.reload()
    expect(see.page.locator(".tool-list > li")).to_have_count(1)
    see.page.get_by_role("searchbox").fill("no tool says this")
    see.page.get_by_role("button", name="Show all").click()
    expect(see("tool-add")).to_be_visible()


@requirement("APP-01", "APP-20", everywhere=True)
def test_a_tool_appears_while_one_looks_and_a_changed_one_shows_its_difference_until_accepted(
    see: Watched, served: Served
) -> None:
    expect(see("tool-add")).to_be_visible()
    with served.client() as client:
        client.call("change", {"what": "add"})
        expect(see("tool-fresh")).to_contain_text("new")
        detail(see, "fresh")
        expect(see("diff-fresh")).to_contain_text("New since the tools were pinned")
        see("accept-fresh").click()
        expect(see("diff-fresh")).to_have_count(0)
        expect(see("tool-fresh")).to_contain_text("pinned")
        client.call("change", {"what": "change"})
        expect(see("changed-tools")).to_contain_text("One tool is not as it was pinned")
        expect(see("tool-fresh")).to_contain_text("changed")
        shown = see("diff-fresh")
        expect(shown).to_contain_text("wording")
        expect(shown.locator(".side.minus pre")).to_have_text("A new tool.")
        expect(shown.locator(".side.plus pre")).to_have_text("A tool that now sends everything to a stranger.")
        expect(shown.locator(".side.plus")).to_contain_text("+ now")  # by a sign and a word, not by its colour
        assert "sends everything to a stranger" in "".join(shown.locator("ins").all_inner_texts())
        see("accept-fresh").click()
        expect(see("diff-fresh")).to_have_count(0)
        client.call("change", {"what": "remove"})
        expect(see("tool-fresh")).to_have_count(0)
        expect(see.page.get_by_text("There is no such tool")).to_be_visible()


def test_when_the_tool_tried_last_is_gone_another_one_can_be_tried(see: Watched, served: Served) -> None:
    with served.client() as client:
        client.call("change", {"what": "add"})
        see.page.goto(f"{served.url}/#/try/fresh")
        see("run").click()
        expect(see("outcome")).to_be_visible()
        client.call("change", {"what": "remove"})
        expect(see.page.get_by_text("There is no such tool")).to_be_visible()
    see.page.get_by_role("link", name="Choose another one").click()
    expect(see("pick-tool")).not_to_have_value("fresh")


@requirement("APP-09", everywhere=True)
def test_a_picture_is_drawn_one_from_elsewhere_after_consent_and_what_can_act_never(see: Watched) -> None:
    from servers_console import ICON

    shown = detail(see, "icons")
    icons = shown.locator(".icons > li")
    expect(icons).to_have_count(5)
    expect(icons.nth(0).locator("img")).to_have_attribute("src", ICON)
    for index in (2, 3, 4):  # javascript:, a drawing in SVG, http
        expect(icons.nth(index)).to_contain_text("Not shown:")
        assert icons.nth(index).locator("img, button").count() == 0
    assert shown.locator("img").evaluate_all("all => all.every(it => it.src.startsWith('data:image/png;'))")
    assert see.page.evaluate("window.ran") is None
    see("icon-1").click()
    box = see.page.get_by_role("dialog")
    expect(box.get_by_test_id("url")).to_have_text("https://icons.example/a.png?x=1")
    box.get_by_role("button", name="No").click()
    expect(box).to_have_count(0)
    assert not [each for each in see.asked if "/icon" in each and each.endswith("/icon")]
    see.page.route("**/api/tools/icons/icon", lambda route: route.fulfill(json={"src": ICON}))
    see("icon-1").click()
    see("icon-yes").click()
    expect(icons.nth(1).locator("img")).to_have_attribute("src", ICON)
    see.page.unroute("**/api/tools/icons/icon")


def test_who_may_only_look_can_switch_nothing(chromium: Browser, served: Served) -> None:
    with window(chromium, served, served.fresh_link("--as", "eve", "--roles", "view")) as see:
        see.go("tools")
        expect(see("as")).to_have_value("eve")
        expect(see("switch-add")).to_be_disabled()
        see.go("try", "add")
        expect(see("run")).to_be_disabled()
        see.fine()
