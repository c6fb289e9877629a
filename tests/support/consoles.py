"""The console as a person meets it: a real server process, its start link, a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, expect, sync_playwright

from cli_runs import COMMAND, environment
from handrail.client.client import BlockingClient, Client
from handrail.console.access import SessionStore, new_code
from handrail.guards.identity import ApiKeys
from handrail.stores.sqlite import SqliteStore
from patience import PATIENCE

PATIENCE_MS = 1000 * PATIENCE
expect.set_options(timeout=PATIENCE_MS)

HERE = Path(__file__).parent
SERVER = HERE / "servers_console.py"
SECONDS = PATIENCE
ANY_PORT = "127.0.0.1:0"
NEWEST_FIRST = "SELECT line FROM audit ORDER BY number DESC"
LINK = re.compile(r"(http://[^\s/]+)/#code=(\S+)")
ENDPOINT = re.compile(r"on (http://\S+)")


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser")  # the first takes a third of the others' time


def _path() -> str:
    """The browser; without one the test is skipped, or fails where none may be missing."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        reason = "no Chromium: apt-get install chromium, or name it in CHROMIUM"
        if os.environ.get("HANDRAIL_REQUIRE_PEERS") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """For files whose tests are not `async`: Playwright brings its own loop, one a file."""
    path = _path()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


def key_of(who: str) -> str:
    return f"{who}-has-this-key-for-the-tests-of-the-console"


def people(*names: str) -> str:
    """Settings by which these may call over HTTP, each with a key: `Served.client(who=…)`."""
    return "[identities.keys]\n" + "".join(f'{name} = "{ApiKeys.hashed(key_of(name))}"\n' for name in names)


class Served:
    """`handrail serve … --http … --console …`, in a process of its own with a home of its own."""

    def __init__(
        self,
        home: Path,
        *words: str,
        target: Path = SERVER,
        env: dict[str, str] | None = None,
        settings: str = "",
        http: str = ANY_PORT,
        console: str = ANY_PORT,
    ) -> None:
        self.home = home
        self._clients: list[BlockingClient] = []
        self._how = words, target, env
        if settings:
            (home / "handrail.toml").write_text(settings, "utf-8")
        try:
            self._start(http, console)
        except BaseException:
            self.stop()
            raise

    def _start(self, http: str, console: str) -> None:
        words, target, env = self._how
        home = self.home
        self._lines: Queue[str] = Queue()
        self.said: list[str] = []
        self._process = subprocess.Popen(
            [*COMMAND, "serve", str(target), "--http", http, "--console", console, *words],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            cwd=home,
            env=environment(home, **(env or {})),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.link = self.url = self.endpoint = ""
        while not (self.link and self.endpoint):
            line = self._line()
            if found := LINK.search(line):
                self.url, self.link = found[1], found[0]
            elif found := ENDPOINT.search(line):
                self.endpoint = found[1]

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.put(line)

    def _line(self) -> str:
        try:
            line = self._lines.get(timeout=SECONDS)
        except Empty:
            raise AssertionError(f"the server did not say where it is: {''.join(self.said)}") from None
        self.said.append(line)
        return line

    def fresh_link(self, *words: str) -> str:
        """Another single-use link, from the command line."""
        done = subprocess.run(
            [*COMMAND, "console", *words],
            capture_output=True,
            encoding="utf-8",
            timeout=SECONDS,
            cwd=self.home,
            env=environment(self.home),
            check=True,
        )
        found = LINK.search(done.stdout + done.stderr)
        assert found, done
        return found[0]

    def link_for(self, who: str, *roles: str, server: str = "shop") -> str:
        """The same without a command line, which takes a while."""
        code = new_code()

        async def offer() -> None:
            store = SqliteStore(self.state)
            try:
                await SessionStore(store, server, time.time).add_code(code, who, roles)
            finally:
                await store.close()

        self.in_background(asyncio.run, offer()).result(SECONDS)  # Playwright has a loop in this thread
        return f"{self.url}/#code={code}"

    @property
    def state(self) -> Path:
        """The database: audit, approvals, sessions."""
        return self.home / ".local" / "state" / "handrail" / "state.db"

    def last_call(self, tool: str, *, after: str | None = None) -> str:
        """The id of the newest call of this tool on record; "" if there is none. With `after`: once it is another."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with contextlib.closing(sqlite3.connect(self.state)) as database:
                records = (
                    json.loads(line) for (row,) in database.execute(NEWEST_FIRST) for line in reversed(row.split(b"\n"))
                )
                found = next((str(each["call"]) for each in records if each.get("tool") == tool and "call" in each), "")
            if after is None or found != after:
                return found
            time.sleep(0.01)  # a refusal may be written down after the caller has heard of it
        raise AssertionError(f"no call of {tool} after {after} is on record")

    def client(self, *, who: str = "", **options: Any) -> BlockingClient:
        """A client of the server that nobody asks: the calls are the test's own."""
        if who:
            options["headers"] = {"authorization": f"Bearer {key_of(who)}", **options.get("headers", {})}
        made = BlockingClient(Client(self.endpoint, **{"confirm": lambda *_: True, **options}))
        self._clients.append(made)
        return made

    def in_background(self, work: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Something that waits, such as a call that a person has to approve."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args, **options))
            except BaseException as problem:
                future.set_exception(problem)

        threading.Thread(target=run, daemon=True).start()
        return future

    def end(self) -> None:
        """The server is gone, as if somebody had stopped it."""
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join(SECONDS)
            assert self._process.stderr is not None
            self._process.stderr.close()

    def kill(self) -> None:
        """The server is gone, as in a crash."""
        self._process.kill()
        self.end()

    def start_again(self) -> None:
        """At the same addresses, with the same home."""
        self._start(*(urlsplit(each).netloc for each in (self.endpoint, self.url)))

    def stop(self) -> None:
        for each in self._clients:
            each.close()
        if self._process.poll() is None:
            self.end()


@contextlib.contextmanager
def serving(home: Path, *words: str, **options: Any) -> Iterator[Served]:
    served = Served(home, *words, **options)
    try:
        yield served
    finally:
        served.stop()


def signed_in(context: BrowserContext, link: str) -> Page:
    """A page that used the start link."""
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(link)
    page.get_by_test_id("tab-now").wait_for()
    return page


@contextlib.contextmanager
def signed_context(browser: Browser, link: str, **options: Any) -> Iterator[BrowserContext]:
    """Windows of one who has used a link. No page is loaded for that: the request is sent that the page would send."""
    context = browser.new_context(**options)
    address, code = link.split("/#code=")
    try:
        answer = context.request.post(f"{address}/api/sign-in", data={"code": code}, headers={"origin": address})
        assert answer.ok, answer.text()
        token = json.dumps(answer.json()["csrf"])
        hold = f'localStorage.getItem("handrail-csrf") ?? localStorage.setItem("handrail-csrf", {token})'
        context.add_init_script(f"if (origin === {json.dumps(address)}) {hold}")
        yield context
    finally:
        context.close()


@contextlib.contextmanager
def window(context: BrowserContext, address: str) -> Iterator[Page]:
    """A window in which no script fails, and the browser has nothing to complain about."""
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    wrong: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # an answer that is no 200
            wrong.append(message.text)

    page.on("console", heard)
    page.on("pageerror", lambda problem: wrong.append(str(problem)))
    try:
        page.goto(address)
        yield page
    finally:
        page.close()
    assert wrong == []


def fetched(page: Page, path: str) -> Any:
    """What the API says to this window."""
    return page.evaluate(
        """async path => {
          const headers = { "x-handrail-csrf": localStorage.getItem("handrail-csrf") };
          return (await fetch(path, { headers })).json();
        }""",
        path,
    )


def until(page: Page, expression: str) -> Any:
    """What the expression is, once it is something. `wait_for_function` would need an `eval` that the page forbids."""
    return page.evaluate(
        f"""() => new Promise(done => {{
          const look = () => {{ const it = {expression}; it ? done(it) : setTimeout(look, 10) }};
          look();
        }})"""
    )


def ident(found: Locator) -> str:
    """Of a row or a card: what follows the first `-` of its test id."""
    said = found.get_attribute("data-testid")
    assert said
    return said.partition("-")[2]
