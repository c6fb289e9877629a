"""Whether the page keeps up, in a real browser: `python benchmarks/console.py --page`.

A page is opened in Chromium, and calls are made while it shows them: how long do its tasks take, how soon does it show
a call that runs, does it hold on to memory? And how soon does it paint anything, on a server that does nothing else?

While calls are made, server and load get one core and the browser the other, where there are two: what is to be
measured is how long the page's own work takes, not how long it waits for a core. For the first paint nothing is pinned.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from benchmarks.console_cost import Served

__all__ = ["Looked", "look"]

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
LOADS = 9
HOLDS = 8
LONG_MS, PAINT_MS, VISIBLE_MS = 100.0, 200.0, 200.0  # at most
HEAP_MB, RSS_MB = 20.0, 30.0  # that may be there more after it all than before

# Tasks over 50 ms are what a browser calls long; frames tell of shorter ones too.
OBSERVE = """
window.__long = []; window.__shown = {}; window.__paint = 0; window.__shift = 0;
new PerformanceObserver((list) => { for (const each of list.getEntries()) window.__long.push(each.duration); })
  .observe({ type: "longtask", buffered: true });
new PerformanceObserver((list) => { for (const each of list.getEntries())
  if (each.name === "first-contentful-paint") window.__paint = each.startTime; })
  .observe({ type: "paint", buffered: true });
new PerformanceObserver((list) => { for (const each of list.getEntries())
  if (!each.hadRecentInput) window.__shift += each.value; })
  .observe({ type: "layout-shift", buffered: true });
"""

# When a row of the tool `hold` first stands among the calls that run.
WATCH = """
() => {
  const see = () => {
    for (const row of document.querySelectorAll('[data-testid="running"] [data-testid^="row-"]'))
      if (row.textContent.includes("hold")) window.__shown[row.dataset.testid] ??= Date.now() / 1000;
  };
  new MutationObserver(see).observe(document.body, { childList: true, subtree: true, characterData: true });
  see();
}
"""


class Looked(Struct):
    """What a page did while calls were made."""

    pinned: str
    long_ms: list[float]
    task_share: float  # of the time, spent in tasks
    visible_ms: list[float]
    made: int
    counted: int
    heap_mb: tuple[float, float]
    rss_mb: tuple[float, float]
    nodes: tuple[int, int]
    shift: float  # of the layout, in all of it
    paint_ms: list[float] = []
    start_ms: float = 0.0  # first paint by the start link

    @property
    def problems(self) -> list[str]:
        found = []
        if self.long_ms and max(self.long_ms) > LONG_MS:
            found.append(f"a task of the page took {max(self.long_ms):.0f} ms; {LONG_MS:.0f} is the most")
        if self.counted != self.made:
            found.append(f"the page counted {self.counted:,} of {self.made:,} calls")
        if max(self.visible_ms) > VISIBLE_MS:
            found.append(f"a running call stood on the page after {max(self.visible_ms):.0f} ms")
        for what, (before, after), most in (("heap", self.heap_mb, HEAP_MB), ("server", self.rss_mb, RSS_MB)):
            if after - before > most:
                found.append(f"{what}: {before:.1f} MB before, {after:.1f} after; {most:.0f} more is the most")
        if statistics.median(self.paint_ms) > PAINT_MS:
            found.append(f"first paint after {statistics.median(self.paint_ms):.0f} ms; {PAINT_MS:.0f} is the most")
        return found


async def look(seconds: float, rate: float) -> Looked:
    cores = sorted(os.sched_getaffinity(0))
    pinned = "server and load on one core, the browser on the other" if len(cores) > 1 else "nothing pinned"
    with TemporaryDirectory(prefix="handrail-bench-") as folder:
        os.sched_setaffinity(0, cores[:1])  # which the server inherits
        served = Served(Path(folder))
        try:
            os.sched_setaffinity(0, cores)
            await served.open()
            await served.calls(rate, 1.0)
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                context, page, start_ms = await _opened(browser, served)
                paints = [await _first_paint(context, served) for _ in range(LOADS)]
                await page.close()
                state = await context.storage_state()
                await browser.close()
            os.sched_setaffinity(0, cores[-1:])  # which the browser inherits
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                os.sched_setaffinity(0, cores[:1])
                context = await browser.new_context(storage_state=state)
                found = await _looked(served, context, seconds, rate, pinned)
                found.paint_ms, found.start_ms = paints, start_ms
                return found
        finally:
            os.sched_setaffinity(0, cores)
            served.close()


async def _opened(browser: Browser, served: Served) -> tuple[BrowserContext, Page, float]:
    """By the start link; when something was painted first."""
    context = await browser.new_context()
    await context.add_init_script(OBSERVE)
    page = await context.new_page()
    await page.goto(f"http://127.0.0.1:{served.page}/#code={served.code}")
    await page.get_by_test_id("total-calls").wait_for()
    return context, page, float(await page.evaluate("window.__paint"))


async def _looked(served: Served, context: BrowserContext, seconds: float, rate: float, pinned: str) -> Looked:
    await context.add_init_script(OBSERVE)
    page = await context.new_page()
    await page.goto(f"http://127.0.0.1:{served.page}/")
    await page.get_by_test_id("total-calls").wait_for()
    await page.evaluate(WATCH)
    session = await context.new_cdp_session(page)
    await session.send("Performance.enable")
    await served.calls(rate, 3.0)  # until the lists are full
    heap, nodes = await _held(session)
    rss = served.rss_mb()
    await page.evaluate("window.__long.length = 0")
    busy, begun = await _busy(session), time.monotonic()
    visible: list[float] = []
    load = asyncio.create_task(served.calls(rate, seconds))
    for _ in range(HOLDS):
        await asyncio.sleep(seconds / (HOLDS + 1))
        known, at = set(await page.evaluate("window.__shown")), time.time()
        await served.hold()
        shown: dict[str, float] = await page.evaluate("window.__shown")
        visible += [(when - at) * 1000 for ident, when in shown.items() if ident not in known] or [float("inf")]
    await load
    share = (await _busy(session) - busy) / (time.monotonic() - begun)
    long = [float(each) for each in await page.evaluate("window.__long")]
    total = served.sent
    counted = 0
    for _ in range(50):
        text = await page.get_by_test_id("total-calls").inner_text()
        counted = int("".join(each for each in text if each.isdigit()) or 0)
        if counted == total:
            break
        await asyncio.sleep(0.1)
    heap_after, nodes_after = await _held(session)
    shift = float(await page.evaluate("window.__shift"))
    return Looked(
        pinned, long, share, visible, total, counted, (heap, heap_after), (rss, served.rss_mb()),
        (nodes, nodes_after), shift,
    )  # fmt: skip


async def _first_paint(context: BrowserContext, served: Served) -> float:
    """Of a load that finds nothing in the browser's cache."""
    page = await context.new_page()
    session = await context.new_cdp_session(page)
    await session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    await page.goto(f"http://127.0.0.1:{served.page}/")
    await page.get_by_test_id("total-calls").wait_for()
    found = float(await page.evaluate("window.__paint"))
    await page.close()
    return found


async def _held(session: Any) -> tuple[float, int]:
    """Megabytes of JavaScript's heap and nodes of the document, after what is garbage was taken away."""
    for _ in range(2):
        await session.send("HeapProfiler.collectGarbage")
    found = {each["name"]: each["value"] for each in (await session.send("Performance.getMetrics"))["metrics"]}
    return found["JSHeapUsedSize"] / 1e6, int(found["Nodes"])


async def _busy(session: Any) -> float:
    found = {each["name"]: each["value"] for each in (await session.send("Performance.getMetrics"))["metrics"]}
    return float(found["TaskDuration"])


def told(found: Looked) -> str:
    paints, long = sorted(found.paint_ms), found.long_ms
    visible = sorted(found.visible_ms)
    lines = [
        f"In Chromium ({found.pinned}):",
        f"- tasks over 50 ms: {len(long)}, the longest {max(long, default=0):.0f} ms (at most {LONG_MS:.0f}); "
        f"{found.task_share:.0%} of the time in tasks",
        f"- a running call stood on the page within {visible[-1]:.0f} ms, median {statistics.median(visible):.0f} "
        f"({len(visible)} tries; at most {VISIBLE_MS:.0f})",
        f"- {found.counted:,} of {found.made:,} calls counted on the page",
        f"- heap {found.heap_mb[0]:.1f} → {found.heap_mb[1]:.1f} MB, nodes {found.nodes[0]:,} → {found.nodes[1]:,}; "
        f"server {found.rss_mb[0]:.1f} → {found.rss_mb[1]:.1f} MB",
        f"- first paint, nothing cached: median {statistics.median(paints):.0f} ms, worst {paints[-1]:.0f} "
        f"({len(paints)} loads; at most {PAINT_MS:.0f}); by the start link {found.start_ms:.0f} ms",
        f"- layout shift in all of it: {found.shift:.4f}",
    ]
    return "\n".join(lines)
