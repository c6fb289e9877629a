"""The replicas of a fleet in a browser: the list, a rolling update, a silent one; and calls of another replica."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.json import encode
from playwright.sync_api import Browser, Locator, expect

from consoles import Served, chromium as chromium, ident
from fleets import Fleet, fleet
from handrail import stores
from handrail.engine.fleet import PREFIX, Replica
from patience import PATIENCE
from redis_servers import shared_server
from requirements import requirement
from rigs_browser import Watched, axe as axe, scan, window

NARROW, WIDE = {"width": 380, "height": 800}, {"width": 1280, "height": 800}
SILENT = Replica(
    id="silent",
    host="old.example",
    process=7,
    version="0.0.1",
    server_version="0.9",
    started=time.time() - 7200,
    calls=4,
    beat=1,
)


async def put_silent(url: str, there: bool) -> None:
    """Put a replica that tells nothing more into the store, or take it away."""
    store = stores.open(url, name="fleet")
    try:
        if there:
            await store.put(PREFIX + SILENT.id, encode(SILENT), ttl=60 * PATIENCE)
        else:
            await store.delete(PREFIX + SILENT.id)
    finally:
        await store.close()


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    url = shared_server().url(database=7)
    asyncio.run(put_silent(url, True))
    with fleet(tmp_path_factory.mktemp("fleet"), url, count=2) as made:
        yield made


@pytest.fixture(scope="module")
def here(replicas: Fleet) -> Served:
    """The replica whose console is open."""
    return replicas.replicas[0]


@pytest.fixture(scope="module")
def shared(here: Served, chromium: Browser) -> Iterator[Watched]:
    # The scanner has to be let in.
    with window(chromium, here, here.link, bypass_csp=True, viewport=WIDE) as opened:
        yield opened


@pytest.fixture
def see(shared: Watched) -> Iterator[Watched]:
    yield shared
    shared.page.set_viewport_size(WIDE)  # type: ignore[arg-type]
    shared.page.emulate_media(color_scheme="light")
    shared.fine()


def rows(see: Watched) -> Locator:
    return see("replicas").locator("tbody tr")


def cell(row: Locator, name: str) -> Locator:
    return row.locator(f'[data-label="{name}"]')


def pid(replica: Served) -> str:
    return replica.client().call("pid").text


def test_the_header_counts_the_replicas_and_leads_to_their_list(see: Watched, replicas: Fleet) -> None:
    expect(see("fleet-size")).to_have_text("3 replicas")
    see("fleet-size").click()
    expect(rows(see)).to_have_count(3)
    assert see("replicas").get_by_role("columnheader").all_inner_texts() == [
        *("Host", "Process", "Version", "Calls in flight", "Up since", "Last seen"),
    ]
    for replica in replicas.replicas:
        row = rows(see).filter(has=see.page.get_by_role("cell", name=pid(replica), exact=True))
        expect(cell(row, "Version")).to_contain_text("Handrail")
        expect(cell(row, "Calls in flight")).to_have_text("0")
    expect(see("replica-silent")).to_contain_text("old.example")
    expect(cell(see("replica-silent"), "Calls in flight")).to_have_text("4")
    expect(cell(see("replica-silent"), "Up since")).to_have_text("2 h ago")


def test_other_versions_than_that_of_the_newest_replica_are_marked(see: Watched) -> None:
    see.go("connections")
    expect(see("replicas-mixed")).to_have_text("2 versions: a rolling update")
    expect(see("replicas").get_by_text("differs", exact=True)).to_have_count(1)
    expect(cell(see("replica-silent"), "Version")).to_contain_text("0.9 Handrail 0.0.1 differs")


@requirement("APP-02", "APP-03", everywhere=True)
def test_a_call_of_another_replica_is_shown_and_approved_here(see: Watched, replicas: Fleet, here: Served) -> None:
    other = replicas.replicas[1]
    before, process = len(replicas.runs), pid(other)
    assert process != pid(here)
    see.go("now")
    call = other.in_background(other.client().call, "pay", {"to": "Ada"})
    ask = see("waiting").get_by_role("link")
    expect(ask).to_contain_text("Ada")
    expect(see("running").get_by_role("listitem")).to_have_attribute("data-state", "asking")
    ask.click()
    card = see.page.locator('article[data-state="pending"]')
    approval = ident(card)
    see(f"yes-{approval}").click()
    assert call.result(PATIENCE).text == "paid Ada"
    expect(see(f"verdict-{approval}")).to_contain_text("Approved by operator local")
    assert replicas.runs[before:] == [f"Ada {process}"]
    see.go("now")
    expect(see("finished").get_by_role("listitem").first).to_contain_text("pay")


@requirement("APP-16", everywhere=True)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_scan_of_the_list_finds_nothing_grave(see: Watched, axe: str, theme: Any) -> None:
    see.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    see.go("connections")
    expect(rows(see)).to_have_count(3)
    scan(see.page, axe)


@requirement("APP-16", everywhere=True)
def test_a_phone_is_wide_enough_for_the_list(see: Watched) -> None:
    see.page.set_viewport_size(NARROW)  # type: ignore[arg-type]
    see.go("connections")
    expect(rows(see)).to_have_count(3)
    expect(see("fleet-size")).to_be_in_viewport(ratio=1)
    assert see.page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


def test_a_silent_replica_is_late_after_ten_seconds_and_leaves_without_a_reload(see: Watched, replicas: Fleet) -> None:
    see.go("connections")
    expect(see("replica-silent").get_by_test_id("replica-late")).to_have_text(
        re.compile(r"^late: ([1-9]\d s|\d+ min|\d h) ago$")  # never after less than ten seconds
    )
    expect(see("replica-late")).to_have_count(1)
    replicas.replicas[0].in_background(asyncio.run, put_silent(replicas.store, False)).result(PATIENCE)
    expect(rows(see)).to_have_count(2)
    expect(see("fleet-size")).to_have_text("2 replicas")
    expect(see("replicas-mixed")).to_have_count(0)
