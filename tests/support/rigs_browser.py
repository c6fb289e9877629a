"""A page of the console that looks for trouble by itself: errors of scripts, refusals of the policy, other hosts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Locator, Page, Request

from consoles import Served, signed_in
from paths import ROOT
from patience import PATIENCE

PATIENCE_MS = 1000 * PATIENCE

# What Chromium writes for each answer that is not 2xx: the page shows those itself.
ANSWERED = "Failed to load resource: the server responded with a status of"


class Watched:
    """A window that keeps what must not happen."""

    def __init__(self, page: Page, served: Served) -> None:
        self.page = page
        self.served = served
        self.trouble: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", lambda problem: self.trouble.append(f"error: {problem}"))
        page.on("console", self._said)
        page.on("dialog", self._dialog)
        page.on("request", self._request)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(ANSWERED):
            self.trouble.append(f"console: {message.text}")

    def _dialog(self, dialog: Dialog) -> None:
        self.trouble.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        self.asked.append(request.url)
        if not request.url.startswith((self.served.url + "/", "data:", "blob:")):
            self.trouble.append(f"asks {request.url}")

    def __call__(self, testid: str) -> Locator:
        return self.page.get_by_test_id(testid)

    def go(self, *parts: str, query: str = "") -> None:
        """To a screen, as a link in the page would."""
        place = "#/" + "/".join(quote(part, safe="") for part in parts) + (f"?{query}" if query else "")
        self.page.evaluate("place => { location.hash = place }", place)

    def fine(self) -> None:
        assert not self.trouble, self.trouble


@contextlib.contextmanager
def window(browser: Browser, served: Served, link: str = "", **options: Any) -> Iterator[Watched]:
    """Somebody who has just signed in, in a browser of their own."""
    context: BrowserContext = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    try:
        page = signed_in(context, link or served.fresh_link())
        yield Watched(page, served)
    finally:
        context.close()


AXE = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.map(({ id, impact, help, nodes }) =>
    ({ id, impact, help, at: nodes.slice(0, 5).map((it) => `${it.target.join(" ")}: ${it.failureSummary}`) }));
}"""


@pytest.fixture(scope="module")
def axe(installed_peer: Callable[[str], Path]) -> str:
    near = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
    return (near if near.exists() else installed_peer("web") / "node_modules" / "axe-core" / "axe.min.js").read_text(
        "utf-8"
    )


def scan(page: Page, axe: str) -> None:
    """Nothing that keeps somebody from using the page."""
    if page.evaluate("typeof axe") == "undefined":
        page.add_script_tag(content=axe)
    found = page.evaluate(AXE)
    grave = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not grave, json.dumps(grave, indent=1)
