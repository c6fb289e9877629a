"""Resources and prompts on the page: browsed, read, filled in, and inert whatever they say."""

from __future__ import annotations

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


def read(see: Watched, uri: str) -> None:
    see.go("resources", uri)
    expect(see("real-name")).to_have_text(uri)
    see("run").click()
    expect(see("outcome")).not_to_have_text("running")


@requirement("APP-31", everywhere=True)
def test_resources_and_prompts_are_found_beside_the_tools(see: Watched) -> None:
    see.go("tools")
    see("part-resources").click()
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
    see("field-name").fill("a")
    expect(see.page.locator("datalist option[value=alan]")).to_have_count(1)
    see("field-name").fill("alan")
    see("field-page").fill("one")
    expect(see("problem-page")).to_be_visible()
    see("field-page").fill("3")
    expect(see("uri")).to_have_text("archive://notes/alan/3")
    expect(see("checked")).to_contain_text("allow")
    see("field-page").press("Enter")
    expect(see("result")).to_contain_text("page 3 of alan")


@requirement("APP-31", everywhere=True)
def test_a_uri_that_is_typed_is_read_and_one_that_is_not_there_is_said_to_be_unknown(see: Watched) -> None:
    see.go("resources")
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
    see("field-lines").fill("3")
    expect(see("problems")).to_contain_text("required")
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
    see("link").click()
    box = see.page.get_by_role("dialog")
    expect(box).to_contain_text("This cannot be opened here")
    expect(box.get_by_test_id("open-url")).to_have_count(0)
    see.page.keyboard.press("Escape")
    see.go("prompts", HOSTILE)
    expect(see("real-name")).to_have_text(HOSTILE)
    see("run").click()
    expect(see("said")).to_have_count(4)
    expect(see("said").nth(0).locator("pre")).to_have_text(HOSTILE)
    expect(see("said").nth(3).locator("pre")).to_have_text(HOSTILE)
    see("said").nth(2).get_by_test_id("link").click()
    expect(box).to_contain_text("This cannot be opened here")
    see.page.keyboard.press("Escape")
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
        see("field-name").fill("ada")
        see("field-page").fill("0")
        expect(see("problem-page")).to_be_visible()
        assert see.page.evaluate(AXE) == []
        see.go("prompts", HOSTILE)
        see("run").click()
        expect(see("said")).to_have_count(4)
        assert see.page.evaluate(AXE) == []
        see.page.set_viewport_size({"width": 380, "height": 800})
        assert see.page.evaluate("document.documentElement.scrollWidth") <= 380
