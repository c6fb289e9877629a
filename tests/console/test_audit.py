"""The console's audit: pages from the newest on, filters, search, the badge that turns red, files to take away."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from handrail import Server, ToolError
from handrail.audit import reader as trail_reading
from handrail.audit.format import verify
from handrail.audit.log import TrailSettings, open_trail
from handrail.audit.reader import TrailFile
from handrail.console import audit as auditing
from handrail.testing import Peer
from requirements import requirement
from rigs_console import Object, Page, Refused, Rig, consoled

Ran = Callable[[str, str], None]


def shop(audit: Path) -> Server:
    server = Server("shop", audit=audit)

    @server.tool
    async def add(a: int, b: int = 2) -> int:
        return a + b

    @server.tool
    async def fail() -> str:
        raise ToolError("no")

    return server


@pytest.fixture(params=["audit.db", "audit.jsonl"])
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return tmp_path / str(request.param)


@pytest.fixture
async def rig(file: Path) -> AsyncIterator[Rig]:
    async with consoled(shop(file)) as made, Peer(made.console.server) as peer:
        for number in range(4):
            await peer.call("add", {"a": number})
        await peer.call("fail")
        with pytest.raises(Exception, match="Unknown tool"):
            await peer.call("=cmd|' /C calc'!A0")
        yield made


async def whole(page: Page, **query: object) -> list[Object]:
    """All pages, newest first."""
    found: list[Object] = []
    view = await page.get("audit", **query)
    while True:
        found += view["records"]
        if not view["next"]:
            return found
        view = await page.get("audit", **{**query, "before": view["next"]})


@requirement("APP-13", everywhere=True)
async def test_records_come_newest_first_page_by_page_and_each_once(rig: Rig, file: Path) -> None:
    page = await rig.page()
    view = await page.get("audit", limit=3)
    assert view["on"] and view["file"] == str(file) and view["total"] == len(await whole(page))
    assert len(view["records"]) == 3
    for limit in (1, 2, 5, 500):
        numbers = [each["number"] for each in await whole(page, limit=limit)]
        assert numbers == list(range(view["total"], 0, -1)), limit
    written = [line for _, line in TrailFile(file).lines()]
    assert [each["raw"]["hash"] for each in reversed(await whole(page))] == [
        json.loads(each)["hash"] for each in written
    ]


@requirement("APP-13", everywhere=True)
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"tool": "add"}, {"intent", "outcome"}),
        ({"tool": "fail", "event": "outcome"}, {"outcome"}),
        ({"outcome": "tool_error"}, {"outcome"}),
        ({"event": "refusal"}, {"refusal"}),
        ({"text": "UNKNOWN_tool"}, {"refusal"}),
        ({"who": "local", "event": "intent"}, {"intent"}),
        ({"event": "nothing"}, set()),
        ({"until": "1"}, set()),
        ({"since": "99999999999"}, set()),
    ],
)
async def test_filters_and_search(rig: Rig, query: dict[str, str], expected: set[str]) -> None:
    page = await rig.page()
    found = await whole(page, limit=2, **query)
    assert {each["event"] for each in found} == expected
    every = await whole(page)
    for name, wanted in query.items():
        if name in ("tool", "event", "outcome", "who"):
            assert all(each[name] == wanted for each in found)
    if "tool" in query:  # the end of a call does not repeat whose it was; here it is known
        assert len(found) == len([each for each in every if all(each[name] == query[name] for name in query)])


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e30"])
@pytest.mark.parametrize("name", ["before", "limit", "since"])
async def test_a_number_that_is_none_is_refused(name: str, value: str, rig: Rig) -> None:
    with pytest.raises(Refused, match="is not a number"):
        await (await rig.page()).get("audit", **{name: value})


async def test_a_filter_that_is_no_number_is_refused(rig: Rig) -> None:
    with pytest.raises(Refused, match="since: 'soon' is not a number"):
        await (await rig.page()).get("audit", since="soon")


async def test_a_request_reads_only_so_much_and_says_where_to_go_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "MAX_READ_RECORDS", 3)
    monkeypatch.setattr(auditing, "READ_AHEAD_RECORDS", 1)
    page = await rig.page()
    first = await page.get("audit", event="opened")
    assert first["records"] == [] and first["next"]
    assert [each["event"] for each in await whole(page, event="opened")] == ["opened"]


@requirement("APP-13", "P-16", everywhere=True)
async def test_the_badge_is_green_until_somebody_changes_a_byte_and_then_says_where(rig: Rig, file: Path) -> None:
    page = await rig.page()
    total = (await page.get("audit"))["total"]
    good = await page.get("audit/verify")
    assert good["ok"] and good["records"] == total and good["head"] and "flaw" not in good
    assert (await page.get("audit/verify"))["at"] == good["at"]  # the file is as it was: it is not read again
    tamper(file, 4)
    bad = await page.get("audit/verify")
    assert not bad["ok"] and bad["flaw"]["number"] == 4 and "changed" in bad["flaw"]["text"]


def tamper(file: Path, number: int) -> None:
    rewrite(file, number, lambda line: line.replace(b"local", b"lokal").replace(b'"ok"', b'"no"'))


def rewrite(file: Path, number: int, change: Callable[[bytes], bytes]) -> None:
    if file.suffix == ".db":
        with closing(sqlite3.connect(file)) as db:
            (line,) = db.execute("SELECT line FROM audit WHERE number = ?", (number,)).fetchone()
            db.execute("UPDATE audit SET line = ? WHERE number = ?", (change(line), number))
            db.commit()
        return
    lines = file.read_bytes().split(b"\n")
    lines[number - 1] = change(lines[number - 1])
    file.write_bytes(b"\n".join(lines))


async def test_a_line_that_is_no_record_is_shown_as_damaged(rig: Rig, file: Path) -> None:
    rewrite(file, 3, lambda _: b"<script>alert(1)</script>")
    page = await rig.page()
    for limit in (1, 2, 3, 4, 500):
        total = (await page.get("audit"))["total"]
        assert [each["number"] for each in await whole(page, limit=limit)] == list(range(total, 0, -1)), limit
    found = {each["number"]: each for each in await whole(page)}
    assert found[3]["event"] == "damaged" and found[3]["raw"] == {"line": "<script>alert(1)</script>"}
    assert not (await page.get("audit/verify"))["ok"]


@requirement("APP-13", "P-16", everywhere=True)
async def test_what_is_exported_can_be_verified_elsewhere(rig: Rig, file: Path) -> None:
    page = await rig.page()
    lines = (await page.raw("audit/export", format="jsonl")).splitlines(keepends=True)
    verdict = verify([("", line) for line in lines])
    assert verdict.flaw is None and verdict.records == len(lines) > 8
    some = (await page.raw("audit/export", format="jsonl", tool="fail")).splitlines()
    assert [json.loads(each)["event"] for each in some] == ["intent", "outcome"]
    assert all(each + b"\n" in lines for each in some)
    [last, *_] = (await page.get("audit", event="console", text="exported"))["records"]
    assert last["raw"]["by"] == "local"


@requirement("APP-13", "P-33", everywhere=True)
async def test_no_cell_of_the_table_is_a_formula(rig: Rig) -> None:
    page = await rig.page()
    body = (await page.raw("audit/export", format="csv")).decode()
    rows = list(csv.DictReader(io.StringIO(body)))
    assert len(rows) == (await page.get("audit"))["total"]  # that it was exported is in it
    cells = [cell for row in rows for cell in row.values()]
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "-", "@", "\t", "\r")]
    assert "'=cmd|' /C calc'!A0" in cells
    outcomes = [row["tool"] for row in rows if row["event"] == "outcome"]
    assert outcomes == ["add"] * 4 + ["fail"]
    with pytest.raises(Refused, match="neither jsonl nor csv"):
        await page.raw("audit/export", format="xml")


async def test_a_call_is_found_on_record_by_its_id(rig: Rig) -> None:
    page = await rig.page()
    [outcome, *_] = await whole(page, outcome="tool_error")
    found = await auditing.records_of(rig.console.context, outcome["call"])
    assert [(each["event"], each["tool"]) for each in found] == [("intent", "fail"), ("outcome", "fail")]
    assert await auditing.records_of(rig.console.context, "ffff") == []
    assert await auditing.records_of(rig.console.context, '","x":"') == []
    story = await page.get(f"calls/{outcome['call']}")
    assert [each["event"] for each in story["records"]] == ["intent", "outcome"]


async def test_without_an_audit_the_page_is_told_so() -> None:
    async with consoled(Server("bare")) as rig:
        page = await rig.page()
        assert await page.get("audit") == {"on": False, "file": "", "records": [], "next": "", "total": 0}
        for path in ("audit/verify", "audit/export"):
            with pytest.raises(Refused, match="give the server an audit"):
                await page.raw(path)


async def test_files_that_followed_each_other_are_read_as_one_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trail_reading, "STEP", 700)
    path = tmp_path / "audit.jsonl"
    for part in range(3):
        trail = open_trail(path, TrailSettings())
        for number in range(10):
            await trail.write({"event": "thing", "text": "x" * (number * 300), "part": part})
        await trail.close()
        if part < 2:
            path.rename(tmp_path / f"audit.{part + 1}.jsonl")
    with path.open("ab") as file:
        file.write(b'{"length": 999,"hash":"torn')
    trail_file = TrailFile(path)
    forwards = [line.rstrip(b"\n") for _, line in trail_file.lines() if line.endswith(b"\n")]
    first, last = trail_file.span
    assert (first, last) == (1, len(forwards))
    assert [line for _, line in trail_file.newest_first()] == forwards[::-1]
    for before in range(1, last + 2):
        numbers = [number for number, _ in trail_file.newest_first(before)]
        assert numbers == list(range(before - 1, 0, -1)), before
