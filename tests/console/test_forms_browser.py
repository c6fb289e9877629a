"""Try: a form for every shape of schema, what runs and comes back, what a server asks, the same call elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from cli_runs import environment
from consoles import Served, chromium as chromium
from patience import PATIENCE, in_time
from requirements import requirement
from rigs_browser import Watched, window

EVERY_SHAPE_IS_TRIED = 12


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("home"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def shared(chromium: Browser, served: Served) -> Iterator[Watched]:
    with window(chromium, served, served.link, permissions=["clipboard-read", "clipboard-write"]) as opened:
        yield opened


@pytest.fixture
def see(shared: Watched) -> Iterator[Watched]:
    yield shared
    if shared("question").count():  # left by a test that failed: the next one is not to fail for it
        shared("question-cancel").click()
    shared.fine()


def start(see: Watched, tool: str) -> None:
    see.go("try", tool)
    expect(see("pick-tool")).to_have_value(tool)
    see("reset").click()


def document(see: Watched) -> Any:
    return json.loads(see("raw").input_value())


def run(see: Watched) -> None:
    see("run").click()
    expect(see("outcome")).not_to_have_text("running")


# What a person does in the form, what stands in the document then, and, where the form lets one, what would be wrong.

Step = tuple[str, str, str]


def do(see: Watched, steps: list[Step]) -> None:
    for kind, name, value in steps:
        if kind == "fill":
            see(name).fill(value)
        elif kind == "choose":
            see(name).select_option(label=value)
        else:
            see(name).click()


def fill(path: str, value: str) -> Step:
    return "fill", f"field-{path}", value


SHAPES: dict[str, tuple[list[Step], Any]] = {
    "text": ([fill("/value", "abc")], "abc"),
    "pattern": ([fill("/value", "abc")], "abc"),
    "date": ([fill("/value", "2026-07-28")], "2026-07-28"),
    "moment": ([fill("/value", "2026-07-28T09:30:00Z")], "2026-07-28T09:30:00Z"),
    "email": ([fill("/value", "ada@example.org")], "ada@example.org"),
    "uri": ([fill("/value", "https://example.org/a?b=c")], "https://example.org/a?b=c"),
    "whole": ([fill("/value", "7")], 7),
    "number": ([], 1.5),
    "flag": ([("click", "field-/value-false", "")], False),
    "choice": ([("choose", "field-/value", "green")], "green"),
    "titled": ([("choose", "field-/value", "Large (l)")], "l"),
    "list": ([fill("/value/0", "x"), ("click", "add-/value", ""), fill("/value/1", "y")], ["x", "y"]),
    "people": (
        [
            ("click", "add-/value", ""),
            fill("/value/0/name", "Ada"),
            fill("/value/0/age", "36"),
            ("click", "add-/value", ""),
            fill("/value/1/name", "Bob"),
        ],
        [{"name": "Ada", "age": 36}, {"name": "Bob"}],
    ),
    "nested": ([fill("/value/inner/deep", "3")], {"inner": {"deep": 3}}),
    "variant": ([("choose", "variant-/value", "By name"), fill("/value/name", "Ada")], {"name": "Ada"}),
    "nullable": ([fill("/value", "or null")], "or null"),
    "map": ([("fill", "key-/value", "a"), ("click", "add-key-/value", ""), fill("/value/a", "5")], {"a": 5}),
    "constant": ([], 7),
    "referenced": (
        [fill("/value/label", "root"), ("click", "add-/value/children", ""), fill("/value/children/0/label", "leaf")],
        {"label": "root", "children": [{"label": "leaf"}]},
    ),
}
assert len(SHAPES) >= EVERY_SHAPE_IS_TRIED


@requirement("APP-04", everywhere=True)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_form_makes_the_document_and_the_tool_gets_it(see: Watched, served: Served, shape: str) -> None:
    steps, value = SHAPES[shape]
    start(see, f"shape_{shape}")
    do(see, steps)
    assert document(see) == {"value": value}
    expect(see("checked")).to_have_attribute("data-valid", "true")
    run(see)
    expect(see("outcome")).to_have_text("ok")
    expect(see("result")).to_contain_text(repr(value))


WRONG: dict[str, tuple[list[Step], Any, str]] = {
    "text": ([fill("/value", "a")], "a", "/value"),
    "pattern": ([fill("/value", "ABC")], "ABC", "/value"),
    "moment": ([fill("/value", "yesterday")], "yesterday", "/value"),
    "email": ([fill("/value", "nobody")], "nobody", "/value"),
    "whole": ([fill("/value", "12")], 12, "/value"),
    "number": ([fill("/value", "0")], 0, "/value"),
    "choice": ([("raw", "", '"pink"')], "pink", "/value"),
    "people": (
        [("click", "add-/value", ""), fill("/value/0/name", "Ada"), fill("/value/0/age", "old")],
        None,
        "/value/0/age",
    ),
    "nested": ([fill("/value/inner/deep", "1.5")], {"inner": {"deep": 1.5}}, "/value/inner/deep"),
    "map": (
        [("fill", "key-/value", "a"), ("click", "add-key-/value", ""), fill("/value/a", "x")],
        {"a": "x"},
        "/value/a",
    ),
}


@pytest.mark.parametrize("shape", list(WRONG))
def test_what_is_wrong_stands_at_its_field_in_the_words_of_the_server(see: Watched, served: Served, shape: str) -> None:
    steps, value, path = WRONG[shape]
    start(see, f"shape_{shape}")
    for each in steps:
        if each[0] == "raw":
            see("raw").fill('{"value": ' + each[2] + "}")
        else:
            do(see, [each])
    if value is not None:
        assert document(see) == {"value": value}
    problem = see(f"problem-{path}")
    expect(problem).to_be_visible()
    expect(see("checked")).to_have_attribute("data-valid", "false")
    expect(see("run")).to_have_text("Run anyway")
    with served.client() as client:
        said = client.call(f"shape_{shape}", document(see)).text
    words = problem.inner_text().removeprefix("✕").strip()
    assert words in said, (words, said)
    run(see)
    expect(see("result")).to_have_attribute("data-kind", "tool-error")
    expect(see("result")).to_contain_text(words)


def test_form_and_json_are_one_document_both_ways(see: Watched) -> None:
    start(see, "add")
    see("field-/a").fill("4")
    assert document(see) == {"a": 4, "b": 2}
    see("raw").fill('{"a": 40, "c": "what the schema does not know"}')
    expect(see("field-/a")).to_have_value("40")
    expect(see("field-/b")).to_have_value("")  # it is not sent, and the form says so
    expect(see("field-/c")).to_have_value("what the schema does not know")
    see("raw").fill('{"a": 41')
    expect(see("raw-problem")).to_contain_text("This is not JSON")
    expect(see("run")).to_be_disabled()
    expect(see("field-/a")).to_have_value("40")
    see("raw").fill("[1]")
    expect(see("raw-problem")).to_contain_text("has to be an object")
    see("field-/a").fill("5")  # the form has a whole document: it takes over
    assert document(see) == {"a": 5, "c": "what the schema does not know"}
    see("remove-/c").click()
    see("field-/a").press("Control+Enter")
    expect(see("outcome")).to_have_text("ok")
    expect(see("result")).to_contain_text("7")


def test_what_is_missing_is_said_at_the_field_that_misses(see: Watched) -> None:
    start(see, "add")
    expect(see("problem-/a")).to_contain_text("required")
    expect(see("checked")).to_have_attribute("data-valid", "false")
    see("checked").get_by_role("button").first.click()
    expect(see("field-/a")).to_be_focused()


# What comes back


@requirement("APP-08", everywhere=True)
def test_text_is_text_and_structured_content_is_a_tree(see: Watched) -> None:
    start(see, "echo")
    see("field-/text").fill("<b>bold</b> & [a](https://example.com)\nsecond line")
    run(see)
    expect(see("result").locator("pre").first).to_have_text("<b>bold</b> & [a](https://example.com)\nsecond line")
    assert see("result").locator("b, a[href^='https']").count() == 0
    start(see, "add")
    see("revision").select_option("2025-06-18")
    see("field-/a").fill("1")
    run(see)
    tree = see("result").get_by_role("group", name="Structured content")
    expect(tree).to_contain_text("result: 3")
    tree.get_by_role("button").first.click()
    expect(tree).not_to_contain_text("result: 3")


LOADED = """audio => audio.readyState > 0 || new Promise((done, fail) => {
  audio.addEventListener("loadedmetadata", () => done(true));
  setTimeout(() => fail(new Error("no sound")), 20000);
})"""


@requirement("APP-15", everywhere=True)
def test_a_picture_is_drawn_and_a_sound_can_be_played(see: Watched) -> None:
    start(see, "picture")
    run(see)
    picture = see("result").locator("img")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [4, 4]
    start(see, "sound")
    run(see)
    sound = see("result").locator("audio")
    expect(sound).to_be_visible()
    # Not `wait_for_function`: what that asks again and again is a text, which the page must not take for a program.
    sound.evaluate(LOADED)
    assert sound.evaluate("it => [it.autoplay, it.paused, it.duration]") == [False, True, 0.1]


@requirement("APP-08", everywhere=True)
def test_a_link_does_nothing_until_a_person_has_seen_the_whole_of_it_and_agreed(see: Watched) -> None:
    start(see, "links")
    run(see)
    link = see("result").get_by_test_id("link")
    expect(link).to_contain_text("https://example.com/page?x=1")
    link.click()
    box = see.page.get_by_role("dialog")
    expect(box.get_by_test_id("url")).to_have_text("https://example.com/page?x=1")
    expect(box.get_by_test_id("url-host")).to_have_text("example.com")
    box.get_by_role("button", name="Stay here").click()
    expect(box).to_have_count(0)
    assert len(see.page.context.pages) == 1


@requirement("APP-08", everywhere=True)
@pytest.mark.parametrize("uri", ["javascript:window.ran=1", "data:text/html,<script>1</script>", "file:///etc/passwd"])
def test_a_link_to_what_is_no_web_page_cannot_be_opened_at_all(see: Watched, uri: str) -> None:
    start(see, "links")
    see("field-/uri").fill(uri)
    run(see)
    link = see("result").get_by_test_id("link")
    expect(link).to_contain_text(uri)  # and no longer the one before
    link.click()
    box = see.page.get_by_role("dialog")
    expect(box).to_contain_text("This cannot be opened here")
    expect(box.get_by_test_id("url")).to_have_text(uri)
    assert box.get_by_test_id("open-url").count() == 0 and see.page.locator(f'[href="{uri}"]').count() == 0
    see.page.keyboard.press("Escape")
    assert see.page.evaluate("window.ran") is None


def test_a_resource_a_noted_text_and_a_dangerous_one_say_what_they_are(see: Watched) -> None:
    start(see, "document")
    run(see)
    expect(see("result")).to_contain_text("shop://documents/1")
    expect(see("result")).to_contain_text("All of it.")
    start(see, "noted")
    run(see)
    for told in ("for user", "priority 0.5", "last modified 2026-01-02T03:04:05Z"):
        expect(see("result")).to_contain_text(told)
    assert see("risk").count() == 0
    start(see, "dangerous")
    run(see)
    expect(see("risk")).to_contain_text("Handle with care")
    expect(see("risk")).to_contain_text("it is text from strangers")


@requirement("APP-15", everywhere=True)
def test_twenty_megabytes_are_loaded_only_when_somebody_asks_for_them(see: Watched) -> None:
    start(see, "big")
    see("field-/megabytes").fill("20")
    sizes: list[int] = []
    see.page.on("response", lambda response: sizes.append(int(response.headers.get("content-length", "0"))))
    before = len(see.asked)
    see.page.evaluate(
        "window.longest = 0; new PerformanceObserver(list => { for (const each of list.getEntries())"
        " window.longest = Math.max(window.longest, each.duration) }).observe({type: 'longtask'})"
    )
    run(see)
    expect(see("outcome")).to_have_text("ok")
    expect(see("result")).to_contain_text("0123456789abcdef")
    expect(see("result")).to_contain_text("20 MB")
    see("fold").click()
    assert len(see("result").inner_text()) < 100_000
    assert not [each for each in see.asked[before:] if "/blocks/" in each]
    assert max(sizes) < 1_000_000
    in_time(see.page.evaluate("window.longest") / 1000, 0.4, "the longest task of the page")
    with see.page.expect_download() as download:
        see("download").click()
    path = download.value.path()
    assert path.stat().st_size == 20 * 1024 * 1024
    assert len([each for each in see.asked[before:] if "/blocks/" in each]) <= 1


@requirement("APP-07", everywhere=True)
def test_an_error_of_the_tool_looks_different_from_one_of_the_protocol_and_from_a_refusal(
    see: Watched, served: Served
) -> None:
    start(see, "fail")
    run(see)
    expect(see("outcome")).to_have_text("tool error")
    expect(see("result")).to_have_attribute("data-kind", "tool-error")
    expect(see("result")).to_contain_text("Error of the tool.")
    expect(see("result")).to_contain_text("it does not work")
    looks = (
        "it => { const s = getComputedStyle(it); return [s.borderLeftColor, s.backgroundColor, s.borderStyle].join() }"
    )
    tool_error = see("result").evaluate(looks)
    see.go("tools")
    see("switch-noted").click()
    expect(see("switch-noted")).to_have_attribute("aria-checked", "false")
    start(see, "noted")
    expect(see("run")).to_be_enabled()
    run(see)
    expect(see("outcome")).to_have_text("protocol error")
    expect(see("result")).to_have_attribute("data-kind", "protocol")
    expect(see("result")).to_contain_text("JSON-RPC -32602")
    expect(see("result")).to_contain_text("The call was not understood")
    assert see("result").get_by_text("Error of the tool.").count() == 0
    assert see("result").evaluate(looks) != tool_error
    see.go("tools")
    see("switch-noted").click()
    expect(see("switch-noted")).to_have_attribute("aria-checked", "true")


# While it runs


@requirement("APP-02", "APP-12", everywhere=True)
def test_progress_and_log_lines_come_while_it_runs(see: Watched, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    start(see, "hold")
    see("field-/gate").fill(str(gate))
    see("run").click()
    expect(see("outcome")).to_have_text("running")
    expect(see("progress")).to_have_text("1 of 4 begun")
    expect(see("going").get_by_role("progressbar")).to_have_attribute("aria-valuenow", "25")
    expect(see("logs")).to_contain_text("holding on")
    expect(see("run")).to_be_disabled()
    gate.touch()
    expect(see("outcome")).to_have_text("ok")
    expect(see("result")).to_contain_text("let go")


@requirement("APP-12", everywhere=True)
def test_a_try_is_cancelled_and_says_so(see: Watched, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    start(see, "stubborn")
    see("field-/gate").fill(str(gate))
    see("run").click()
    see("cancel-try").click()
    expect(see("cancel-try").or_(see("outcome")).first).to_contain_text("ancel")
    gate.touch()
    expect(see("outcome")).to_have_text("cancelled")
    expect(see("result")).to_have_attribute("data-kind", "cancelled")


# What the server asks


WEB = re.compile("^https:")


def asked(see: Watched, tool: str = "greet") -> None:
    start(see, tool)
    see("run").click()
    expect(see("question")).to_be_visible()


@requirement("APP-10", everywhere=True)
def test_a_question_names_the_server_has_the_defaults_and_is_answered_by_a_form(see: Watched) -> None:
    asked(see)
    expect(see("question").get_by_role("heading")).to_have_text("shop asks you")
    expect(see("question")).to_contain_text("Who are you?")
    expect(see("question")).to_contain_text("What to call you")
    expect(see("question").get_by_test_id("field-/age")).to_have_value("30")
    expect(see("question").get_by_test_id("field-/language").locator("option:checked")).to_have_text("English")
    see("question").get_by_test_id("field-/age").fill("x")
    see("question").get_by_test_id("field-/name").fill("Ada")
    see("question-accept").click()
    expect(see("question").get_by_test_id("problem-/age")).to_be_visible()  # the server takes no wrong answer
    see("question").get_by_test_id("field-/age").fill("36")
    see("question-accept").click()
    expect(see("question")).to_have_count(0)
    expect(see("result")).to_contain_text("Hello, Ada.")


@requirement("APP-10", everywhere=True)
@pytest.mark.parametrize("action", ["decline", "cancel"])
def test_a_question_can_be_declined_or_cancelled(see: Watched, action: str) -> None:
    asked(see)
    see(f"question-{action}").click()
    expect(see("question")).to_have_count(0)
    expect(see("result")).to_contain_text(f"no name: {action}")


def test_a_question_can_be_put_aside_and_answered_later(see: Watched) -> None:
    asked(see)
    see.page.keyboard.press("Escape")
    expect(see("question")).to_have_count(0)
    expect(see("outcome")).to_have_text("running")
    see.go("now")
    expect(see("finished").get_by_role("listitem").first).to_contain_text("asks for input")  # it goes on when answered
    see.go("try", "greet")
    see("question-again").click()
    see("question-decline").click()
    expect(see("result")).to_contain_text("no name: decline")


@requirement("APP-11", "APP-19", everywhere=True)
def test_a_page_to_visit_is_shown_whole_and_opens_only_after_a_yes_then_the_call_goes_on(see: Watched) -> None:
    url = "https://xn--exmple-cua.com/sign-in?next=1"
    asked(see, "visit")
    expect(see("question")).to_contain_text("shop asks you")
    expect(see("question").get_by_test_id("url")).to_have_text(url)
    expect(see("question").get_by_test_id("url-host")).to_have_text("xn--exmple-cua.com")
    expect(see("question")).to_contain_text("exämple.com")  # what the punycode reads like
    weight = "it => Number(getComputedStyle(it).fontWeight)"
    assert see("question").get_by_test_id("url-host").evaluate(weight) > see("question").get_by_test_id("url").evaluate(
        weight
    )
    assert see("question-accept").count() == 0, "one cannot say it is done before it was opened"
    assert len(see.page.context.pages) == 1
    see.page.context.route(WEB, lambda route: route.fulfill(body="signed in", content_type="text/plain"))
    with see.page.context.expect_page() as opened:
        see("open-url").click()
    popup = opened.value
    popup.wait_for_load_state()
    assert popup.url == url
    assert popup.evaluate("window.opener") is None and popup.evaluate("document.referrer") == ""
    popup.close()
    see.page.context.unroute(WEB)
    expect(see("outcome")).to_have_text("running")  # until a person says so
    see("question-accept").click()
    expect(see("result")).to_contain_text("visited: accept")


@requirement("APP-11", everywhere=True)
@pytest.mark.parametrize("action", ["decline", "cancel"])
def test_a_page_to_visit_can_be_refused(see: Watched, action: str) -> None:
    asked(see, "visit")
    see(f"question-{action}").click()
    expect(see("result")).to_contain_text(f"visited: {action}")
    assert len(see.page.context.pages) == 1


# The same call elsewhere


def copied(see: Watched, which: str) -> str:
    see(f"copy-{which}").click()
    expect(see.page.get_by_role("status")).to_have_text("Copied.")
    text: str = see.page.evaluate("navigator.clipboard.readText()")
    return text


TEXT = 'it\'s "here" $HOME `x` \\ ü \u202e end'


def prepared(see: Watched) -> None:
    start(see, "shape_nullable")
    see("raw").fill(json.dumps({"value": TEXT}))
    expect(see("checked")).to_have_attribute("data-valid", "true")


def ran_in_a_shell(command: str, home: Path) -> str:
    """As a person would paste it, with `handrail` on the path."""
    tools = home / "bin"
    tools.mkdir(exist_ok=True)
    script = tools / "handrail"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m handrail "$@"\n', "utf-8")
    script.chmod(0o755)
    env = environment(home)
    env["PATH"] = f"{tools}:{env['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        check=True,
        cwd=home,
        env=env,
    )
    return done.stdout


def test_the_copied_command_does_the_same_call(see: Watched, tmp_path: Path) -> None:
    prepared(see)
    command = copied(see, "cli")
    assert command.startswith("handrail call ") and "\u202e" not in command
    said = json.loads(ran_in_a_shell(f"{command} --yes --json", tmp_path))
    assert said["content"][0]["text"] == repr(TEXT)


def test_the_copied_curl_does_the_same_call(see: Watched, served: Served, tmp_path: Path) -> None:
    prepared(see)
    command = copied(see, "curl")
    assert command.startswith(f"curl -sSN {served.endpoint}") and "\u202e" not in command
    line = next(each for each in reversed(ran_in_a_shell(command, tmp_path).splitlines()) if each.strip())
    answer = json.loads(line.removeprefix("data:"))
    assert answer["result"]["content"][0]["text"] == repr(TEXT)


def test_the_copied_python_does_the_same_call(see: Watched, tmp_path: Path) -> None:
    prepared(see)
    program = copied(see, "python")
    assert program.isascii() or "\u202e" not in program
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        check=True,
        env=environment(tmp_path),
    )
    assert done.stdout == f"{TEXT!r}\n"
