"""The door of the console, with a real browser before it: the link that works once, and a page of another origin."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from consoles import SECONDS, Served, chromium as chromium, fetched, ident, people, serving
from handrail.console.routes import ROUTES
from requirements import requirement
from rigs_browser import Watched, window


class Elsewhere(BaseHTTPRequestHandler):
    """A page on another port of the same machine: for cookies that is the same site, for scripts another origin."""

    cookies: Queue[str] = Queue()  # that browsers sent along

    def do_GET(self) -> None:
        self.cookies.put(self.headers.get("cookie", ""))
        body = b"<!doctype html><title>elsewhere</title><body>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="module")
def see(chromium: Browser, served: Served) -> Iterator[Watched]:
    with window(chromium, served, served.link) as opened:
        yield opened


@contextlib.contextmanager
def elsewhere(host: str, see: Watched) -> Iterator[Page]:
    """Somebody else's page in the browser of somebody who is signed in."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    page = see.page.context.new_page()
    try:
        page.goto(f"http://{host}:{server.server_port}/")
        yield page
    finally:
        page.close()
        server.shutdown()
        server.server_close()
        thread.join(SECONDS)


@pytest.fixture(scope="module", params=["127.0.0.1", "localhost"])
def attacker(request: pytest.FixtureRequest, see: Watched) -> Iterator[Page]:
    with elsewhere(request.param, see) as page:
        yield page


@requirement("P-23", everywhere=True)
def test_the_code_leaves_the_address_at_once_and_is_in_no_request(see: Watched, served: Served) -> None:
    code = served.link.partition("#code=")[2]
    assert code not in see.page.url and code not in see.page.title()
    assert not [each for each in see.asked if code in each]
    kept = see.page.evaluate("JSON.stringify([Object.entries(localStorage), Object.entries(sessionStorage)])")
    assert code not in kept
    assert see.page.evaluate("document.cookie") == ""  # a script cannot read it
    cookie = see.page.context.cookies(served.url)[0]
    assert cookie["value"] not in kept  # the page holds one half of the key, the browser the other
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    see.fine()


@requirement("APP-17", "P-23", everywhere=True)
def test_a_link_that_was_used_lets_nobody_in_and_says_what_to_do(
    chromium: Browser, served: Served, see: Watched
) -> None:
    expect(see("tab-now")).to_be_visible()
    with contextlib.closing(chromium.new_context()) as context:
        page = context.new_page()
        page.goto(served.link)
        expect(page.get_by_test_id("signed-out")).to_contain_text("handrail console")
        expect(page.get_by_test_id("signed-out")).to_contain_text("used")
        assert "code=" not in page.url
        assert page.evaluate("async () => (await fetch('api/tools')).status") == 401
        assert context.cookies() == []


def test_a_link_can_be_opened_again_when_signing_in_could_not_be_recorded(chromium: Browser, served: Served) -> None:
    link, error = served.fresh_link(), "It was not done. Open the same link again when it can"
    with contextlib.closing(chromium.new_context()) as context:
        page = context.new_page()
        page.route("**/api/sign-in", lambda route: route.fulfill(status=503, json={"error": error}))
        page.goto(link)
        expect(page.get_by_test_id("signed-out")).to_contain_text(error)
        page.unroute("**/api/sign-in")
        page.goto(link)
        expect(page.get_by_test_id("tab-now")).to_be_visible()


ATTACKS = {
    "read": "async (to) => (await fetch(`${to}/api/me`, {credentials: 'include'})).text()",
    "read a file": "async (to) => (await fetch(`${to}/BUILD/console.js`, {credentials: 'include'})).text()",
    "post json": """async (to) => (await fetch(`${to}/api/tools/add/switch`, {method: 'POST', credentials: 'include',
        headers: {'content-type': 'application/json', 'x-handrail-csrf': 'x'}, body: '{"on": false}'})).text()""",
    "events": """(to) => new Promise((done, fail) => {
        const stream = new EventSource(`${to}/api/events`, {withCredentials: true});
        stream.onerror = () => { stream.close(); fail(new Error('closed')) };
        stream.addEventListener('hello', () => { stream.close(); done('heard') })})""",
    "script": """(to) => new Promise((done, fail) => { const it = document.createElement('script');
        it.onload = () => done('loaded'); it.onerror = () => fail(new Error('refused'));
        it.src = `${to}/api/me`; document.head.append(it) })""",
    "picture": """(to) => new Promise((done, fail) => { const it = new Image();
        it.onload = () => done('loaded'); it.onerror = () => fail(new Error('refused'));
        it.src = `${to}/BUILD/icon.svg` })""",
}


@requirement("APP-17", "P-22", everywhere=True)
@pytest.mark.parametrize("attack", list(ATTACKS))
def test_a_page_of_another_origin_can_read_nothing(attacker: Page, see: Watched, served: Served, attack: str) -> None:
    build = see.page.locator("script").get_attribute("src")
    assert build and build.endswith("/console.js")
    folder = build.removeprefix("./").removesuffix("/console.js")  # where its files are, which anybody may ask for
    said = attacker.evaluate(
        """async ([attack, to]) => {
          try { return ['did', await (0, eval)(attack)(to)] } catch (it) { return ['no', String(it)] }
        }""",
        [ATTACKS[attack].replace("BUILD", folder), served.url],
    )
    assert said[0] == "no", said


@requirement("APP-17", "P-22", "P-23", everywhere=True)
def test_a_page_of_another_origin_can_change_nothing(attacker: Page, see: Watched, served: Served) -> None:
    attacker.evaluate(
        """async (to) => {
          const paths = ['tools/add/switch', 'sign-out', 'try', 'approvals/x'];
          const body = '{"on": false, "tool": "add", "arguments": {"a": 1}}';
          for (const path of paths) {
            for (const type of ['text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data'])
              await fetch(`${to}/api/${path}`, {method: 'POST', mode: 'no-cors', credentials: 'include',
                headers: {'content-type': type}, body}).catch(() => 0);
            navigator.sendBeacon(`${to}/api/${path}`, new Blob(['{"on": false}'], {type: 'text/plain'}));
          }
        }""",
        served.url,
    )
    popup = attacker.context.new_page()  # a form goes there as a navigation, with whatever cookies go along
    popup.goto(attacker.url)
    popup.evaluate(
        """(to) => { const form = document.createElement('form'); form.method = 'POST'; form.enctype = 'text/plain';
          form.action = `${to}/api/tools/add/switch`; const it = document.createElement('input');
          it.name = '{"on": false, "x": "'; it.value = '"}'; form.append(it);
          document.body.append(form); form.submit() }""",
        served.url,
    )
    popup.wait_for_url(f"{served.url}/**")
    expect(popup.locator("body")).to_contain_text("error")
    popup.close()
    see.go("tools")
    expect(see("switch-add")).to_have_attribute("aria-checked", "true")
    see.page.reload()
    expect(see("switch-add")).to_have_attribute("aria-checked", "true")  # and nobody was signed out
    expect(see("tool-add")).to_contain_text("never called")
    see.fine()


@requirement("APP-17", everywhere=True)
def test_the_page_cannot_be_put_into_a_frame_nor_be_held_by_who_opened_it(attacker: Page, served: Served) -> None:
    attacker.evaluate(
        "to => { const it = document.createElement('iframe'); it.src = to; document.body.append(it) }", served.url
    )
    with attacker.context.expect_page() as opened:
        attacker.evaluate("to => { window.held = window.open(to) }", f"{served.url}/#/now")
    opened.value.wait_for_load_state()
    attacker.wait_for_function("window.held.closed")  # to its opener it looks closed: there is no way to it
    assert opened.value.evaluate("window.opener") is None
    opened.value.close()
    frame = next(each for each in attacker.frames if each != attacker.main_frame)
    frame.wait_for_load_state()
    assert frame.url.startswith("chrome-error:")


@requirement("APP-17", "P-23", everywhere=True)
def test_a_cookie_that_another_port_was_sent_opens_nothing(chromium: Browser, tmp_path: Path) -> None:
    """Cookies know no ports: any web server of this machine that the browser visits is sent the console's."""
    settings = people("ada") + '[approvals]\nby = "operator"\n'
    with serving(tmp_path, settings=settings) as served, window(chromium, served, served.link) as see:
        call = served.in_background(served.client(who="ada").call, "cancel_order", {"order_id": 7})
        see.go("approve")
        card = see.page.locator("article.card.open")
        expect(card).to_have_count(1)
        name = ident(card)
        with elsewhere("127.0.0.1", see) as other:
            cookies = {Elsewhere.cookies.get(timeout=SECONDS)}
            while not Elsewhere.cookies.empty():
                cookies.add(Elsewhere.cookies.get())
            cookie = next(each for each in cookies if "handrail-console-" in each)  # which is why this test is here
            assert other.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        place = urlsplit(served.url).netloc
        page = {"host": place, "origin": served.url, "cookie": cookie, "content-type": "application/json"}
        for route in ROUTES:
            if route.access == "public":
                continue
            for more in ({}, {"x-handrail-csrf": ""}, {"x-handrail-csrf": cookie.partition("=")[2]}):
                with contextlib.closing(HTTPConnection(place, timeout=SECONDS)) as thief:
                    body = '{"yes": true}' if route.method == "POST" else None
                    thief.request(route.method, re.sub(r"\{\w+\}", name, route.path), body, page | more)
                    answer = thief.getresponse()
                    assert answer.status == 401, (route.method, route.path)
                    assert "shop" not in answer.read().decode()
        assert not call.done()
        see.page.reload()
        see("tab-now").wait_for()
        tab = see.page.context.new_page()
        tab.goto(f"{served.url}/#/approve/{name}")
        tab.get_by_test_id(f"yes-{name}").click()
        assert call.result(SECONDS).text == "order 7 is cancelled: no reason"
        expect(see(f"verdict-{name}")).to_contain_text("Approved by operator local")
        see.fine()


def test_what_one_window_signs_in_or_out_all_windows_are(chromium: Browser, served: Served) -> None:
    with window(chromium, served, served.link_for("grace", "view")) as see:
        other = see.page.context.new_page()
        other.goto(f"{served.url}/#/now")
        expect(other.get_by_test_id("who")).to_contain_text("grace")
        other.goto(served.link_for("alan", "view"))
        expect(other.get_by_test_id("who")).to_contain_text("alan")
        expect(see("who")).to_contain_text("alan")
        assert fetched(see.page, "api/me")["who"] == "alan"
        other.get_by_test_id("who").click()
        other.get_by_test_id("sign-out").click()
        for page in (other, see.page):
            expect(page.get_by_test_id("signed-out")).to_be_visible()
            assert page.evaluate("localStorage.getItem('handrail-csrf')") is None
