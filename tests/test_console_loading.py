"""What a browser loads of the page, and when; what it says where it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from consoles import Served, chromium as chromium, serving, signed_context, window

MAX_BYTES = 60_000  # of a first visit: page, style sheet and every script until Now is there, compressed
SCREENS = {  # the scripts of each, beside the one of the frame
    "now": {"now"},
    "tools": {"tools", "result", "diff"},
    "try": {"try", "result", "form"},
    "approve": {"approve", "result", "form", "diff"},
    "calls/none": {"call", "result"},
    "audit": {"audit"},
    "connections": {"connections"},
}
LOADED = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .filter(({ name }) => !name.includes("/api/"))
    .map(({ name, encodedBodySize }) => [new URL(name).pathname.split("/").pop() || "index.html", encodedBodySize])"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture
def context(chromium: Browser, served: Served) -> Iterator[BrowserContext]:
    """A browser that has nothing yet but a session."""
    with signed_context(chromium, served.link_for("ada", "view", "call")) as made:
        yield made


def loaded(page: Page) -> dict[str, int]:
    """Every file of ours that came over the wire, with its bytes there."""
    return dict(page.evaluate(LOADED))


def there(page: Page, screen: str) -> None:
    """The screen is drawn."""
    named = {"now": "finished", "audit": "badge", "calls/none": "failure", "try": "pick-tool"}
    heading = page.get_by_role("heading", name=re.compile(screen, re.IGNORECASE), level=1)
    expect(page.get_by_test_id(named[screen]) if screen in named else heading).to_be_visible()


# What is loaded


def test_a_first_visit_loads_the_frame_and_now_and_no_more(
    chromium: Browser, served: Served, record_property: Callable[[str, object], None]
) -> None:
    context = chromium.new_context()
    with window(context, served.link_for("ada", "view")) as page:
        there(page, "now")
        sizes = loaded(page)
        record_property("bytes", sizes)
        assert set(sizes) - {"icon.svg"} == {"index.html", "console.css", "console.js", "now.js"}
        assert all(sizes.values()) and sum(sizes.values()) < MAX_BYTES, sizes
    context.close()


@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_loads_what_it_needs_and_no_other_screen(context: BrowserContext, served: Served, screen: str) -> None:
    with window(context, f"{served.url}/#/{screen}") as page:
        there(page, screen)
        scripts = {name.removesuffix(".js") for name in loaded(page) if name.endswith(".js")}
        assert scripts == {"console", *SCREENS[screen]}


def test_a_screen_is_loaded_when_it_is_first_looked_at_and_then_no_more(
    context: BrowserContext, served: Served
) -> None:
    with window(context, f"{served.url}/#/now") as page:
        there(page, "now")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for _ in range(2):
            for screen in ("connections", "now"):
                page.get_by_test_id(f"tab-{screen}").click()
                there(page, screen)
        assert [each.rpartition("/")[2] for each in asked if each.endswith(".js")] == ["connections.js"]


# What cannot be loaded


def failed(page: Page) -> Locator:
    """The screen says that it could not be loaded, in the frame, which goes on."""
    said = page.get_by_test_id("screen-failed")
    expect(said).to_contain_text("This screen could not be loaded")
    expect(said).to_have_attribute("role", "alert")
    expect(page.get_by_test_id("tab-now")).to_be_visible()
    return said


def go(page: Page, screen: str) -> None:
    """By its keys: a pointer that comes near a tab asks for the screen too."""
    page.keyboard.press("g")
    page.keyboard.press({"connections": "c", "tools": "t"}[screen])


@pytest.mark.parametrize("part", ["tools", "result"])  # of its own, and one that it shares with others
def test_a_screen_that_cannot_be_loaded_says_so_and_its_button_brings_it(
    context: BrowserContext, served: Served, part: str
) -> None:
    with window(context, f"{served.url}/#/now") as page:
        there(page, "now")
        page.route(f"**/{part}.js", lambda route: route.abort())
        go(page, "tools")
        expect(failed(page)).to_contain_text("may have been updated since this page was opened. Reload the page")
        go(page, "connections")  # the other screens can be had
        there(page, "connections")
        go(page, "tools")
        failed(page)
        page.unroute(f"**/{part}.js")
        page.get_by_test_id("reload").click()
        there(page, "tools")
        expect(page.get_by_test_id("screen-failed")).to_have_count(0)


def test_a_first_screen_that_cannot_be_loaded_says_so_too(context: BrowserContext, served: Served) -> None:
    context.route("**/now.js", lambda route: route.fulfill(status=404, json={"error": "reload it"}))
    with window(context, served.url) as page:
        failed(page)
        context.unroute("**/now.js")
        page.get_by_test_id("reload").focus()
        page.keyboard.press("Enter")
        there(page, "now")


def test_a_server_that_is_gone_leaves_no_empty_page_and_the_screen_comes_with_it_with_nothing_lost(
    chromium: Browser, tmp_path: Path
) -> None:
    with (
        serving(tmp_path) as served,
        signed_context(chromium, served.link) as context,
        window(context, f"{served.url}/#/try/echo") as page,
    ):
        page.get_by_test_id("field-/text").fill("half a thought")
        served.end()
        expect(page.get_by_test_id("stream-lost")).to_be_visible()
        page.get_by_test_id("tab-connections").click()
        expect(failed(page)).to_contain_text("comes by itself when the server is back")
        page.get_by_test_id("reload").click()
        expect(page.get_by_role("status").filter(has_text="The server does not answer")).to_be_visible()
        failed(page)  # and not what a browser shows for an address where nobody is
        served.start_again()
        there(page, "connections")
        page.goto(f"{served.url}/#/try/echo")
        expect(page.get_by_test_id("field-/text")).to_have_value("half a thought")
