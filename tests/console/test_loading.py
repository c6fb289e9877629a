"""What a browser loads of the page, and when; what it says where it cannot; and the charts of the first screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from consoles import Served, chromium as chromium, serving, signed_context, window
from requirements import requirement

MAX_BYTES = 60_000  # of a first visit: page, style sheet and every script until Now is there, compressed
FRAMES = 200
SCREENS = {  # the scripts of each, beside the one of the frame
    "now": {"now"},
    "tools": {"tools", "listing", "result", "diff", "stop"},
    "resources": {"resources", "listing", "attempt", "result", "form"},
    "prompts": {"resources", "listing", "attempt", "result", "form"},
    "try": {"try", "attempt", "result", "form"},
    "approve": {"approve", "result", "form", "diff"},
    "calls/none": {"call", "result", "losses", "stop"},
    "audit": {"audit"},
    "upstreams": {"upstreams", "result", "diff", "losses", "stop"},
    "connections": {"connections", "stop"},
}
LOADED = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .filter(({ name }) => !name.includes("/api/"))
    .map(({ name, encodedBodySize }) => [new URL(name).pathname.split("/").pop() || "index.html", encodedBodySize])"""

# To the page it looks as if there had been an hour of calls: 10 in each minute but in two, and 5 minutes ago a bad one.
HOUR = """
    const parse = JSON.parse;
    JSON.parse = text => {
        const it = parse(text);
        const last = it?.figures?.last ?? it?.last;
        if (last) Object.assign(last, {calls: 10, errors: 0, refused: 0, p95_ms: 20});
        if (!it?.minute) return it;
        const minute = ago => ({at: it.minute.at - 60 * ago, ...(
            ago === 5 ? {calls: 40, errors: 7, p95_ms: 1500} :
            ago === 19 || ago === 21 ? {calls: 0, errors: 0, p95_ms: 0} : {calls: 10, errors: 0, p95_ms: 20})});
        it.minute = minute(0);
        if (it.minutes) it.minutes = Array.from({length: 60}, (_, n) => minute(60 - n));
        return it;
    };
"""
# The columns of a canvas in which something is drawn: place from the left (0 to 1), height (0 to 1), full colour.
DRAWN = """canvas => {
    const { width, height } = canvas;
    const seen = canvas.getContext("2d").getImageData(0, 0, width, height).data;
    const columns = [];
    for (let x = 0; x < width; x++) {
        let most = 0, colour = "";
        for (let y = 0; y < height; y++) {
            const at = 4 * (y * width + x), [r, g, b, alpha] = seen.slice(at, at + 4);
            if (alpha) most ||= height - y;
            if (alpha === 255) colour = `rgb(${r}, ${g}, ${b})`;
        }
        if (most) columns.push([x / width, most / height, colour]);
    }
    return columns;
}"""
SHIFTS = """
    window.shifts = [];
    new PerformanceObserver(list => {
        for (const { value, sources } of list.getEntries())
            shifts.push([value, ...sources.map(({ node }) => node?.outerHTML?.slice(0, 120))]);
    }).observe({ type: "layout-shift", buffered: true });
"""
TONE = "it => getComputedStyle(it).color"


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


def test_a_first_visit_loads_the_frame_and_now_with_its_charts_and_no_more(
    chromium: Browser, served: Served, record_property: Callable[[str, object], None]
) -> None:
    context = chromium.new_context()
    with window(context, served.link_for("ada", "view")) as page:
        expect(page.locator(".chart canvas")).to_have_count(3)
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


def test_only_a_gateway_has_a_tab_for_upstreams(context: BrowserContext, served: Served) -> None:
    with window(context, f"{served.url}/#/upstreams") as page:
        expect(page.get_by_text("This server has no upstreams")).to_be_visible()
        expect(page.get_by_test_id("tab-upstreams")).to_have_count(0)


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
        assert [each.rpartition("/")[2] for each in asked if each.endswith(".js")] == ["connections.js", "stop.js"]


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
        expect(failed(page)).to_contain_text("loads when the server is back")
        page.get_by_test_id("reload").click()
        expect(page.get_by_role("status").filter(has_text="The server does not answer")).to_be_visible()
        failed(page)  # and not what a browser shows for an address where nobody is
        served.start_again()
        there(page, "connections")
        page.goto(f"{served.url}/#/try/echo")
        expect(page.get_by_test_id("field-/text")).to_have_value("half a thought")


# The charts of Now


@pytest.fixture
def hour(context: BrowserContext, served: Served) -> Iterator[Page]:
    context.add_init_script(HOUR)
    with window(context, f"{served.url}/#/now") as page:
        expect(page.locator(".chart canvas")).to_have_count(3)
        yield page


def chart(page: Page, word: str) -> Locator:
    return page.get_by_test_id(f"figure-{word}").get_by_role("img")


def columns(page: Page, word: str) -> list[tuple[float, float, str]]:
    found = chart(page, word).locator("canvas").evaluate(DRAWN)
    return [(x, height, colour) for x, height, colour in found]


@requirement("APP-16", everywhere=True)
def test_the_charts_say_their_numbers_to_who_does_not_see_them(hour: Page) -> None:
    for word, said in {
        "calls": "Calls a minute in the last hour: 10 in the last 60 s, peak 40",
        "failed": "Failed calls a minute in the last hour: 0 in the last 60 s, peak 7",
        "p95": "Time in which 95 % of the calls ended, by minute of the last hour: 20 ms in the last 60 s, peak 1.5 s",
    }.items():
        expect(chart(hour, word)).to_have_attribute("aria-label", said)


def test_calls_failures_and_times_are_drawn_minute_by_minute(hour: Page) -> None:
    bad = (61 - 5 - 0.5) / 61  # where the middle of that minute is
    calls, failures, times = (columns(hour, word) for word in ("calls", "failed", "p95"))
    tallest = [x for x, height, _ in calls if height > 0.9]
    assert tallest and all(abs(x - bad) < 1 / 61 for x in tallest)
    assert {x for x, height, _ in calls if 0.2 < height < 0.3}, "a quarter of that, in the other minutes"
    assert failures and all(abs(x - bad) < 1 / 61 for x, _, _ in failures), "no other minute has any"
    assert max(times, key=lambda each: each[1])[0] == pytest.approx(bad, abs=1 / 61)
    for ago in (19, 21):
        empty = [x for x, _, _ in (*calls, *times) if abs(x - (61 - ago - 0.5) / 61) < 0.3 / 61]
        assert not empty, "a minute without calls has no time, not a short one"
    dot = [x for x, _, _ in times if abs(x - (61 - 20 - 0.5) / 61) < 0.5 / 61]
    assert len(dot) > 2, "one alone, to which no line leads"


def test_the_charts_have_the_colours_of_the_theme_also_when_that_changes(hour: Page) -> None:
    def tones() -> list[str]:
        """Of the text that stands for each, once the charts are drawn in them and in no other."""
        wanted = [str(chart(hour, word).evaluate(TONE)) for word in ("calls", "failed")]
        drawn: list[set[str]] = []
        for _ in range(FRAMES):
            drawn = [{colour for _, _, colour in columns(hour, word) if colour} for word in ("calls", "failed")]
            if drawn == [{each} for each in wanted]:
                break
            hour.evaluate("new Promise(requestAnimationFrame)")
        else:
            pytest.fail(f"drawn in {drawn}, not in {wanted}")
        return wanted

    hour.emulate_media(color_scheme="light")
    bright = tones()
    hour.emulate_media(color_scheme="dark")
    assert not set(tones()) & set(bright)
    hour.get_by_test_id("theme").click()  # to light, whatever the system says
    expect(hour.get_by_test_id("theme")).to_have_attribute("aria-label", "Theme: light. Switch to dark")
    assert tones() == bright


def test_the_charts_are_as_wide_as_their_place(hour: Page) -> None:
    for width in (1280, 380, 900):
        hour.set_viewport_size({"width": width, "height": 800})
        for word in ("calls", "failed", "p95"):
            place, canvas = chart(hour, word), chart(hour, word).locator("canvas")
            expect(canvas).to_have_js_property("width", place.evaluate("it => it.clientWidth"))
            reserved, drawn = place.bounding_box(), canvas.bounding_box()
            assert reserved and drawn
            assert drawn == pytest.approx({**reserved, "height": 51.0}, abs=0.5)  # 52 with the line below


def test_nothing_moves_when_the_charts_come(context: BrowserContext, served: Served) -> None:
    context.add_init_script(SHIFTS)
    for width in (1280, 380):
        with window(context, "about:blank") as page:
            page.set_viewport_size({"width": width, "height": 800})
            page.goto(f"{served.url}/#/now")
            expect(page.locator(".chart canvas")).to_have_count(3)
            there(page, "now")
            for _ in range(3):
                page.evaluate("new Promise(requestAnimationFrame)")
            moved = page.evaluate("shifts")
            assert sum(each[0] for each in moved) < 0.01, moved


def numbers(page: Page) -> list[str]:
    words = [page.get_by_test_id(f"figure-{word}").locator(".figure-value") for word in ("calls", "failed", "p95")]
    return [re.sub(r"peak .*", "", each.inner_text()).strip() for each in words]


def test_a_pointer_shows_the_numbers_of_a_minute_in_all_charts(hour: Page) -> None:
    box = chart(hour, "failed").bounding_box()
    assert box
    hour.mouse.move(box["x"] + box["width"] * (61 - 5 - 0.5) / 61, box["y"] + 20)
    expect(hour.get_by_test_id("figure-calls")).to_contain_text(re.compile(r"Calls at \d\d:\d\d"))
    assert numbers(hour) == ["40", "7", "1.5 s"]
    assert hour.locator(".chart .u-cursor-x:visible").count() == 3
    hour.mouse.move(0, 0)
    expect(hour.get_by_test_id("figure-calls")).to_contain_text("Calls in the last 60 s")
    assert numbers(hour) == ["10", "0", "20 ms"]
    expect(hour.locator(".chart .u-cursor-x:visible")).to_have_count(0)


@requirement("APP-16", everywhere=True)
def test_the_arrow_keys_do_so_too_and_a_screen_reader_says_them(hour: Page) -> None:
    minute = hour.get_by_role("slider", name="Minute of the last hour")
    minute.focus()
    expect(minute).to_have_attribute("aria-valuetext", "in the last 60 s: 10 calls, 0 failed, 95 % took at most 20 ms")
    for _ in range(5):
        hour.keyboard.press("ArrowLeft")
    expect(minute).to_have_attribute(
        "aria-valuetext", re.compile(r"^at \d\d:\d\d: 40 calls, 7 failed, 95 % took at most 1\.5 s$")
    )
    assert numbers(hour) == ["40", "7", "1.5 s"]
    for _ in range(14):
        hour.keyboard.press("ArrowLeft")
    expect(minute).to_have_attribute("aria-valuetext", re.compile(r": 0 calls, 0 failed$"))
    assert numbers(hour) == ["0", "0", "–"]
    ring = hour.get_by_test_id("sparkline").evaluate("it => getComputedStyle(it).outlineStyle")
    assert ring == "solid", "where the focus is, is seen"
    hour.keyboard.press("Tab")
    expect(hour.get_by_test_id("figure-calls")).to_contain_text("Calls in the last 60 s")


def test_the_charts_follow_what_happens(context: BrowserContext, served: Served) -> None:
    """Without an hour that was made up: calls, of which one fails."""
    with window(context, f"{served.url}/#/now") as page, served.client() as client:
        for number in range(3):
            client.call("add", {"a": number})
        client.call("fail")
        label = re.compile(r"^Failed calls a minute in the last hour: 1 in the last 60 s, peak 1$")
        expect(chart(page, "failed")).to_have_attribute("aria-label", label)
        assert {colour for _, _, colour in columns(page, "failed") if colour} == {chart(page, "failed").evaluate(TONE)}
