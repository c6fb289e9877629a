"""Resources and prompts on the page: browsed, read, filled in, and inert whatever they say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from consoles import Served, chromium as chromium, serving
from paths import ROOT
from requirements import requirement
from rigs_browser import Watched, window
from servers_archive import HOSTILE, JAVASCRIPT, SECRET, TEMPLATE

SETTINGS = """
[[rules]]
name = "guests only look"
verdict = "hide"
principals = ["guest"]
uri = ["archive://page", "archive://notes/*"]

[[rules]]
name = "no moods"
verdict = "hide"
principals = ["guest"]
prompts = ["mood"]
"""


@pytest.fixture
def alone(chromium: Browser, tmp_path: Path) -> Iterator[Watched]:
    """A page of a server that no other test uses, and that asks."""
    target = ROOT / "tests" / "support" / "servers_archive.py"
    with serving(tmp_path, target=target, settings=ASKS) as made, window(chromium, made, made.link) as opened:
        yield opened
        opened.fine()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target = ROOT / "tests" / "support" / "servers_archive.py"
    with serving(tmp_path_factory.mktemp("home"), target=target, settings=SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def shared(chromium: Browser, served: Served) -> Iterator[Watched]:
    with window(chromium, served, served.link) as opened:
        yield opened


@pytest.fixture
def see(shared: Watched) -> Iterator[Watched]:
    yield shared
    assert shared.page.evaluate("window.ran") is None
    made = "[...document.querySelectorAll('main script, main iframe, main img[onerror], main svg[onload]')].length"
    assert shared.page.evaluate(made) == 0
    assert shared.page.evaluate("document.querySelectorAll('[href^=javascript]').length") == 0
    shared.fine()


ASKS = """
[[rules]]
name = "ask first"
verdict = "ask"
uri = ["archive://seal"]
"""


def read(see: Watched, uri: str) -> None:
    see.go("resources", uri)
    expect(see("real-name")).to_have_text(uri)
    see("run").click()
    expect(see("outcome")).not_to_have_text("running")


@requirement("APP-31", everywhere=True)
def test_resources_and_prompts_are_found_beside_the_tools(see: Watched) -> None:
    see.go("tools")
    offered = see.page.get_by_role("navigation", name="What the server offers")
    expect(offered.get_by_role("link")).to_have_text(["Tools", "Resources", "Prompts"])
    see("part-tools").focus()
    see.page.keyboard.press("Tab")
    see.page.keyboard.press("Enter")
    expect(see("part-resources")).to_have_attribute("aria-current", "page")
    expect(see.page.get_by_role("heading", level=1)).to_have_text("Resources")
    expect(see("tab-tools")).to_have_attribute("aria-current", "page")
    expect(see("summary")).to_contain_text("local sees 10 of 11 resources")
    expect(see("entry-archive://readme")).to_contain_text("text/markdown · 12 bytes")
    expect(see(f"entry-{TEMPLATE}")).to_contain_text("template")
    see("entry-archive://readme").get_by_role("link").click()
    facts = see("detail").locator("dl.facts")
    for said in ("text/markdown", "user", "2026-01-02T03:04:05Z", "shelf"):
        expect(facts).to_contain_text(said)
    see.page.keyboard.press("g")
    see.page.keyboard.press("p")
    expect(see.page.get_by_role("heading", level=1)).to_have_text("Prompts")
    assert "Prompts" in see.page.title()
    see.page.keyboard.press("/")
    see.page.keyboard.type("review")
    expect(see.page.locator(".tool-list > li")).to_have_count(1)


@requirement("APP-31", everywhere=True)
def test_a_text_is_read_and_its_story_is_one_of_a_call(see: Watched) -> None:
    read(see, "archive://readme")
    expect(see("outcome")).to_have_text("ok")
    expect(see("result")).to_contain_text("# Read me")
    assert SECRET not in see.page.content()
    see.page.get_by_test_id("story").click()
    expect(see.page.get_by_role("heading", level=1)).to_have_text("Read me")
    see.page.get_by_role("link", name="Resource", exact=True).click()
    expect(see("real-name")).to_have_text("archive://readme")


@requirement("APP-31", "APP-08", everywhere=True)
def test_a_picture_and_a_sound_are_shown_and_all_else_only_by_its_size(see: Watched) -> None:
    read(see, "archive://seal")
    expect(see("result").locator("img.picture")).to_have_js_property("naturalWidth", 4)
    assert str(see("result").locator("img").get_attribute("src")).startswith("data:image/png;base64,")
    read(see, "archive://bell")
    expect(see("result").locator("audio")).to_have_attribute("aria-label", "A sound that was returned")
    read(see, "archive://blob")
    expect(see("result")).to_contain_text("Binary: not shown.")
    expect(see("result")).to_contain_text("256 bytes")
    for name in ("fake", "drawing"):
        read(see, f"archive://{name}")
        expect(see("result")).to_be_visible()
        assert see("result").locator("img").count() == 0


@requirement("APP-31", everywhere=True)
def test_a_template_is_filled_in_with_suggestions_and_a_preview_of_its_uri(see: Watched) -> None:
    see.go("resources", TEMPLATE)
    expect(see("run")).to_be_disabled()
    expect(see("missing")).to_have_text("Needs name, page.")
    see("field-page").fill("0")
    see("field-name").fill("a")
    expect(see.page.locator("datalist option[value=alan]")).to_have_count(1)
    see("field-name").fill("alan")
    expect(see("problem-page")).to_contain_text("0 is less than the minimum 1")
    expect(see("fill").get_by_text("less than the minimum")).to_have_count(1)
    expect(see("run")).to_have_text("Read anyway")
    see("field-page").fill("3")
    expect(see("uri")).to_have_text("archive://notes/alan/3")
    expect(see("checked")).to_contain_text("allow")
    see("field-page").press("Enter")
    expect(see("result")).to_contain_text("page 3 of alan")
    see("link").click()  # to the page of that URI
    expect(see("unlisted")).to_contain_text(f"archive://notes/alan/3 is read by the template {TEMPLATE}")
    expect(see("checked")).to_contain_text("allow")
    see("run").click()
    expect(see("result")).to_contain_text("page 3 of alan")


@requirement("APP-31", everywhere=True)
def test_numbers_of_reads_and_uses_are_right_once_a_run_is_done(alone: Watched) -> None:
    for screen, name, never, once in (
        ("resources", "archive://blob", "never read", "1 read"),
        ("prompts", HOSTILE, "never used", "1 use"),
        ("resources", "archive://broken", "never read", "1 failed"),
    ):
        alone.go(screen, name)
        row, facts = alone(f"entry-{name}"), alone("detail").locator("dl.facts")
        expect(row).to_contain_text(never)
        alone("run").click()
        expect(row).to_contain_text(once)
        expect(facts).to_contain_text(once)
    alone.go("now")
    expect(alone("by-tool-archive://blob").get_by_role("rowheader")).to_have_text("archive://blob resource")
    expect(alone("by-tool")).to_contain_text("Most used")
    ended = alone("finished").get_by_role("listitem").filter(has_text="archive://broken")
    expect(ended.locator(".pill")).to_have_text("failed")
    expect(ended.locator(".call-first")).to_have_text("")


@requirement("APP-31", "APP-16", everywhere=True)
def test_a_phone_shows_the_list_or_what_was_chosen(see: Watched) -> None:
    size = see.page.viewport_size
    assert size is not None
    see.page.set_viewport_size({"width": 380, "height": 800})
    for screen, name in (("resources", TEMPLATE), ("prompts", "mood"), ("prompts", "gone")):
        see.go(screen)
        listed = see.page.locator(".tool-list")
        expect(listed).to_be_visible()
        see.go(screen, name)
        expect(listed).to_be_hidden()
        expect(see.page.locator(".tool-detail")).to_be_in_viewport()
        assert see.page.evaluate("document.documentElement.scrollWidth") <= 380
        see("back").click()
        expect(listed).to_be_visible()
    see.page.set_viewport_size(size)


@requirement("APP-31", "P-23", everywhere=True)
def test_the_question_and_the_card_of_a_read_say_what_is_read(alone: Watched) -> None:
    alone.go("resources", "archive://seal")
    alone("run").click()
    expect(alone("question")).to_contain_text("Read archive://seal on archive?")
    expect(alone("question")).not_to_contain_text("{}")
    alone.page.keyboard.press("Escape")
    alone.go("approve")
    card = alone.page.locator("article.card.open")
    expect(card.get_by_role("heading", level=2)).to_have_text("Read archive://seal")
    for absent in ("Without arguments", "Tool version", "Archive:"):
        expect(card).not_to_contain_text(absent)
    expect(card.get_by_role("button", name="Edit")).to_have_count(0)
    card.get_by_role("button", name="Remember").click()
    card.get_by_role("button", name="Yes, and the same again").click()
    expect(alone.page.locator(".grant")).to_contain_text("local may read archive://seal")


@requirement("APP-31", everywhere=True)
def test_a_uri_that_is_typed_is_read_and_one_that_is_not_there_is_said_to_be_unknown(see: Watched) -> None:
    see.go("resources", "archive://nothing")
    expect(see("unlisted")).to_contain_text("There is no such resource")
    expect(see("unlisted")).to_contain_text("archive://nothing is not in the list")
    expect(see("problem-uri")).to_have_count(0)  # it is shown once
    see.go("resources")
    expect(see("unlisted")).to_have_count(0)
    expect(see("run")).to_be_disabled()
    see("field-uri").fill("archive://notes/ada/1")
    see("run").click()
    expect(see("result")).to_contain_text("page 1 of ada")
    see("field-uri").fill("archive://vault")
    see("run").click()
    expect(see("result")).to_contain_text("Resource not found: archive://vault")
    see("field-uri").fill("archive://broken")
    see("run").click()
    expect(see("outcome")).to_have_text("failed")
    expect(see("result")).to_contain_text("The shelf is empty")


@requirement("APP-31", everywhere=True)
def test_a_prompt_is_filled_in_and_its_messages_say_whose_they_are(see: Watched) -> None:
    see.go("prompts", "review")
    see("field-lines").fill("0")
    expect(see("problem-lines")).to_contain_text("0 is less than the minimum 1")
    expect(see("missing")).to_have_text("Needs code.")
    expect(see("run")).to_be_disabled()
    see("field-lines").fill("3")
    see("field-code").fill("x = 1\ny = 2")
    see("field-style").select_option("long")
    expect(see("checked")).to_have_attribute("data-valid", "true")
    see("field-code").press("Control+Enter")
    said = see("said")
    expect(said).to_have_count(2)
    expect(said.nth(0)).to_contain_text("user")
    expect(said.nth(0)).to_contain_text("Review 3 lines of , long: x = 1")
    expect(said.nth(1)).to_contain_text("assistant")
    see.go("prompts", "mood")
    see("run").click()
    see("question").get_by_role("textbox").fill("fine")
    see("question-accept").click()
    expect(see("result")).to_contain_text("accept {'mood': 'fine'}")


@requirement("APP-31", everywhere=True)
def test_seen_as_somebody_else_they_are_hidden_with_the_reason(see: Watched) -> None:
    see.go("resources", query="as=guest")
    expect(see("summary")).to_contain_text("guest sees 8 of 11")
    expect(see("hidden-archive://page")).to_contain_text("guests only look")
    expect(see(f"entry-{TEMPLATE}")).to_have_attribute("data-exposed", "false")
    expect(see("hidden-archive://vault")).to_contain_text("scope vault")
    see("scopes").fill("vault")
    see("scopes").press("Enter")
    expect(see("entry-archive://vault")).to_have_attribute("data-exposed", "true")
    see("part-prompts").click()  # as the same caller
    expect(see("hidden-mood")).to_contain_text("no moods")


@requirement("APP-31", everywhere=True)
def test_they_are_switched_off_and_on(see: Watched) -> None:
    for screen, name in (("resources", "archive://readme"), ("prompts", "review")):
        see.go(screen)
        for state, shown in (("false", "false"), ("true", "true")):
            see(f"switch-{name}").click()
            expect(see(f"switch-{name}")).to_have_attribute("aria-checked", state)
            expect(see(f"entry-{name}")).to_have_attribute("data-exposed", shown)


@requirement("APP-31", "APP-08", everywhere=True)
def test_what_they_say_of_themselves_and_hold_stays_text(see: Watched) -> None:
    read(see, "archive://page")
    expect(see("detail").get_by_role("heading", level=2).first).to_have_text(HOSTILE)
    expect(see("result").locator("pre")).to_have_text(HOSTILE)
    read(see, JAVASCRIPT)
    expect(see("link")).to_have_attribute("href", re.compile("^#/resources/javascript%3A"))
    see.go("prompts", HOSTILE)
    expect(see("real-name")).to_have_text(HOSTILE)
    see("run").click()
    expect(see("said")).to_have_count(4)
    expect(see("said").nth(0).locator("pre")).to_have_text(HOSTILE)
    expect(see("said").nth(3).locator("pre")).to_have_text(HOSTILE)
    see("said").nth(2).get_by_test_id("link").click()
    expect(see("real-name")).to_have_text(JAVASCRIPT)
    see.page.go_back()
    see.page.get_by_test_id("story").click()
    expect(see.page.get_by_role("heading", level=1)).to_contain_text("<script>")
    see.go("now")
    expect(see("finished")).to_contain_text("<img src=x")


def test_who_may_only_look_reads_and_switches_nothing(chromium: Browser, served: Served) -> None:
    with window(chromium, served, served.link_for("eve", "view", server="archive")) as eve:
        eve.go("prompts", "review")
        expect(eve("run")).to_be_disabled()
        expect(eve("switch-review")).to_be_disabled()
        eve("field-author").fill("a")
        expect(eve.page.get_by_text("You may look, not read")).to_be_visible()
        eve.fine()


AXE = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .filter(({ impact }) => impact === "serious" || impact === "critical")
  .map(({ id, nodes }) => `${id}: ${nodes[0].target}`)"""


@requirement("APP-31", "APP-16", everywhere=True)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_scan_finds_nothing_grave(
    chromium: Browser, served: Served, installed_peer: Callable[[str], Path], theme: Any
) -> None:
    axe = installed_peer("web") / "node_modules" / "axe-core" / "axe.min.js"
    link = served.link_for("ada", "view", "call", "manage", server="archive")
    options: Any = {"bypass_csp": True, "color_scheme": theme, "reduced_motion": "reduce"}
    with window(chromium, served, link, **options) as see:
        see.page.add_script_tag(content=axe.read_text("utf-8"))
        see.go("resources", TEMPLATE)
        see("field-page").fill("0")
        see("field-name").fill("ada")
        expect(see("problem-page")).to_be_visible()
        assert see.page.evaluate(AXE) == []
        see.go("prompts", HOSTILE)
        see("run").click()
        expect(see("said")).to_have_count(4)
        assert see.page.evaluate(AXE) == []
        see.page.set_viewport_size({"width": 380, "height": 800})
        assert see.page.evaluate("document.documentElement.scrollWidth") <= 380
