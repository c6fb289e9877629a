"""Files of earlier versions, as they were written by commit 849159d: read, and gone on with."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import pytest

from handrail.approvals.queue import ApprovalError, ApprovalQueue, ApprovalRequest
from handrail.audit.format import verify
from handrail.audit.log import TrailSettings, open_trail
from handrail.audit.reader import TrailFile
from handrail.guards.limits import Rates, StoreLimiter, Throttled, ToolRate
from handrail.guards.tool_definitions import LockedServer, lock_text, read_lock
from handrail.model import Object
from handrail.oauth.credentials import FileCredentials
from handrail.oauth.flow import ClientRegistration, Token, TokenGrant
from handrail.stores.sqlite import SqliteStore
from paths import TESTS
from requirements import requirement

KEPT = TESTS / "stores" / "kept"
NOW = 1_800_000_000.0
SCHEMA: Object = {"type": "object", "properties": {"order": {"type": "string"}, "sum": {"type": "integer"}}}
KEY = "https://mcp.example/mcp\nclient"
GRANTS = [
    TokenGrant(
        "https://id.example",
        "https://mcp.example/mcp",
        "https://id.example/token",
        ClientRegistration("client", "canary-secret", "client_secret_basic", "http://127.0.0.1:1/callback", NOW),
        Token("canary-access", "canary-refresh", ("a",), ("a", "b"), NOW + 1, NOW + 2),
    ),
    TokenGrant(
        "https://id.example",
        "https://mcp.example/mcp",
        "https://id.example/token",
        ClientRegistration("client"),
        Token("canary-access"),
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the kept files, for their owner only."""
    shutil.copytree(KEPT, tmp_path / "kept")
    (tmp_path / "kept").chmod(0o700)
    for each in (tmp_path / "kept").iterdir():
        each.chmod(0o600)
    return tmp_path / "kept"


def refund(order: str, total: int) -> ApprovalRequest:
    return ApprovalRequest(
        "shop",
        "ada",
        "refund",
        "f" * 64,
        {"order": order, "sum": total},
        "0123456789abcdef",
        schema=SCHEMA,
        by="anyone",
        remember=86400.0,
    )


async def test_values_counters_and_logs_of_an_earlier_state_file_are_read_and_gone_on_with(folder: Path) -> None:
    store = SqliteStore(folder / "state.db", clock=lambda: NOW + 60)
    assert await store.get("note:1") == b"kept"
    assert await store.get("note:2") == b"kept for an hour"
    assert await store.add("count:1") == 42
    assert await store.read("log") == [(1, b"0"), (2, b"1"), (3, b"2")]
    assert await store.append("log", b"3", keep=10) == 4
    await store.close()
    later = SqliteStore(folder / "state.db", clock=lambda: NOW + 3601)
    assert await later.get("note:2") is None
    await later.close()


@requirement("P-19")
async def test_approvals_of_an_earlier_state_file_are_decided_used_and_remembered(folder: Path) -> None:
    store = SqliteStore(folder / "state.db", clock=lambda: NOW + 60)
    trail = open_trail(store, TrailSettings(keep_days=0))
    queue = ApprovalQueue(store, trail=trail, clock=lambda: NOW + 60)
    [pending] = await queue.open("shop")
    assert pending.asked.arguments == {"order": "o-1", "sum": 5} and pending.asked.title == "Refund"
    assert pending.digest == refund("o-1", 5).digest(), "a request has the digest it had"
    assert (await queue.find_or_create(refund("o-1", 5))).id == pending.id
    assert sorted(each.state for each in await queue.recent()) == ["approved", "denied"]
    [allowed] = await queue.recently_allowed(refund("o-2", 8))
    assert allowed.arguments == {"order": "o-2", "sum": 7}
    [grant] = await queue.grants()
    assert await queue.find_grant(refund("o-2", 7)) == grant and await queue.find_grant(refund("o-2", 8)) is None
    decided = await queue.decide(pending.id, True, by="bob")
    approved = await queue.find_or_create(refund("o-2", 7))
    assert {decided.state, approved.state} == {"approved"} and approved.note == "fine"
    for each in (decided, approved):
        assert await trail.write({"event": "intent", "call": each.id}, [queue.consume_op(each)])
    with pytest.raises(ApprovalError, match="has been consumed"):
        await queue.decide(approved.id, False, by="bob")
    assert await queue.revoke(grant.id, by="bob")
    await store.close()


async def test_a_limit_of_an_earlier_state_file_is_still_used_up(folder: Path) -> None:
    store = SqliteStore(folder / "state.db", clock=lambda: NOW + 60)
    for hours, is_throttled in ((1, True), (24, False)):
        rates = Rates(tool=ToolRate(rate="1/day"))
        moment = int((NOW + hours * 3600) * 1e9)
        limiter = StoreLimiter(store, rates, name="shop", clock=partial(int, moment))
        pending = limiter.take("ada", "refund")
        assert isinstance(pending, Awaitable)
        assert isinstance(await pending, Throttled) is is_throttled
        await limiter.close()
    await store.close()


@requirement("P-16")
@pytest.mark.parametrize(("name", "count"), [("state.db", 9), ("audit.jsonl", 3)])
async def test_the_chain_of_an_earlier_audit_log_is_good_and_goes_on(folder: Path, name: str, count: int) -> None:
    path = folder / name
    old = [*TrailFile(path).lines()]
    report = verify(old)
    assert (report.flaw, report.records, report.first, report.last) == (None, count, 1, count)
    store = SqliteStore(path, clock=lambda: NOW + 60) if path.suffix == ".db" else None
    trail = open_trail(store or path, TrailSettings(keep_days=0), clock=lambda: NOW + 60)
    assert await trail.write({"event": "intent", "call": "c2"})
    await trail.close()
    if store is not None:
        await store.close()
    lines = [*TrailFile(path).lines()]
    assert lines[:count] == old
    report = verify(lines, head=report.noted)
    assert (report.flaw, report.last, report.unfinished) == (None, count + 2, ("c2",)), "`opened`, and the record"


def test_an_earlier_lock_file_is_read_and_written_byte_for_byte(folder: Path) -> None:
    servers = read_lock(folder / "tools.lock")
    assert servers["files"] == LockedServer("", "2025-06-18", {})
    assert servers["shop"].tools["refund"]["description"] == "Give money back.\nAsks first."
    assert lock_text(servers).encode() == (KEPT / "tools.lock").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions are the promise")
def test_earlier_credentials_are_loaded_and_written_byte_for_byte(folder: Path) -> None:
    credentials = FileCredentials(folder)
    assert asyncio.run(credentials.load(KEY)) == GRANTS
    asyncio.run(credentials.save(KEY, GRANTS))
    [path] = folder.glob("*.json")
    assert path.read_bytes() == (KEPT / path.name).read_bytes()
