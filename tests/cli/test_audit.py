"""`handrail audit`: which tools were called; filtered, followed, exported."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cli_runs import COMMAND, SECONDS, environment, handrail
from handrail.client.state_dir import CALLS_FILE, StateDirectory
from handrail.model import Object
from handrail.stores.sqlite import connect
from requirements import requirement


def record(tool: str, **more: Any) -> Object:
    made: Object = {"time": "2026-07-28T09:30:00+00:00", "event": "outcome", "server": "weather", "tool": tool}
    made |= {"agreed": "confirmed", "outcome": "ok", "seconds": 0.25, "revision": "2026-07-28"}
    return {**made, "arguments_digest": "ab12", **more}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def state(home: Path) -> StateDirectory:
    return StateDirectory(home / "state" / "handrail")


def append(state: StateDirectory, *lines: Object | bytes) -> None:
    """Put lines in, whatever they are: what a trail would not write can still be found in one."""
    state.prepare()
    with closing(connect(str(state.folder / CALLS_FILE), durable=False)) as db:
        (last,) = db.execute("SELECT count(*) FROM audit").fetchone()
        for number, line in enumerate(lines, last + 1):
            text = line if isinstance(line, bytes) else json.dumps({**line, "number": number}).encode()
            db.execute("INSERT INTO audit VALUES (?, 0, ?)", (number, text))


def audit(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return handrail("audit", *words, home=home, env={"XDG_STATE_HOME": str(home / "state")})


def tools(home: Path, *words: str) -> list[str]:
    done = audit(home, "--json", *words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["tool"] for line in done.stdout.splitlines()]


@requirement("APP-13", everywhere=True)
def test_calls_are_shown_one_a_line(home: Path, state: StateDirectory) -> None:
    assert audit(home).stdout == ""
    append(state, record("forecast", arguments={"city": "Paris", "api_key": "canary"}))
    append(state, record("delete", event="refusal", outcome="denied", agreed="", seconds=None))
    done = audit(home)
    assert done.stdout.splitlines() == [
        "2026-07-28T09:30:00+00:00  weather  forecast  ok  0.250 s  confirmed",
        '    {"city": "Paris", "api_key": "****"}',
        "2026-07-28T09:30:00+00:00  weather  delete  denied  -",
    ]


@requirement("APP-13", everywhere=True)
def test_calls_are_filtered(home: Path, state: StateDirectory) -> None:
    now = datetime.now(UTC)
    append(state, record("old_a"))
    append(state, record("old_b", server="files", outcome="error"))
    append(state, record("hour", time=(now - timedelta(minutes=90)).isoformat()))
    append(state, record("now", time=now.isoformat()))
    append(state, record("never", time="no time"))
    assert tools(home) == ["old_a", "old_b", "hour", "now", "never"]
    assert tools(home, "--tail", "2") == ["now", "never"]
    assert tools(home, "--tool", "old_*") == ["old_a", "old_b"]
    assert tools(home, "--server", "files") == ["old_b"]
    assert tools(home, "--outcome", "error") == ["old_b"]
    assert tools(home, "--since", "2h") == ["hour", "now"]
    assert tools(home, "--since", "30m") == ["now"]
    assert tools(home, "--since", "2026-07-28T09:30:00Z")[:2] == ["old_a", "old_b"]
    assert tools(home, "--since", "2026-07-28T09:30:01Z") == ["hour", "now"]
    assert tools(home, "--tool", "old_*", "--tail", "1") == ["old_b"]
    assert audit(home, "--since", "yesterday").returncode == 2


def test_the_last_twenty_are_shown_unless_told_otherwise(home: Path, state: StateDirectory) -> None:
    append(state, *(record(f"t{i}") for i in range(25)))
    assert len(tools(home)) == 20
    assert len(tools(home, "--tail", "0")) == 25


def test_an_intent_and_an_outcome_are_one_call(home: Path, state: StateDirectory) -> None:
    intents = [record("first", event="intent", call="1"), record("killed", event="intent", call="2", agreed="allowed")]
    append(state, {"event": "opened"}, *intents, {"event": "outcome", "call": "1", "outcome": "tool_error"})
    done = audit(home, "--json")
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["tool"], each["confirmed"]) for each in shown] == [("first", "confirmed"), ("killed", "allowed")]
    assert shown[0]["outcome"] == "tool_error" and shown[1]["outcome"].startswith("unknown")


def test_lines_that_are_no_records_are_skipped(home: Path, state: StateDirectory) -> None:
    append(state, record("first"), b"nonsense", b"[1]", b"\xff\xfe", b"[" * 100_000, record("second"))
    done = audit(home, "--json")
    assert [json.loads(line)["tool"] for line in done.stdout.splitlines()] == ["first", "second"]
    assert "4 lines are not records" in done.stderr


@requirement("P-16", everywhere=True)
@pytest.mark.parametrize("words", [[], ["--json"], ["--export", "json"], ["--export", "csv"], ["-f"]], ids=" ".join)
def test_p16_a_damaged_trail_is_shown_as_far_as_it_can_be_read_and_said_to_be_damaged(
    home: Path, state: StateDirectory, words: list[str]
) -> None:
    append(state, *(record(f"tool{i}", arguments={"text": "x" * 5_000}) for i in range(50)))
    calls = state.folder / CALLS_FILE
    data = calls.read_bytes()
    calls.write_bytes(data[: len(data) // 2] + bytes(8192) + data[len(data) // 2 + 8192 :])
    for target in ([], ["served", str(calls)]) if words != ["-f"] else ([],):
        done = audit(home, *target, "--tail", "0", *words)
        assert done.returncode == 2 and "tool1" in done.stdout
        assert str(calls) in done.stderr and "`handrail audit export --salvage` may find more" in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("served folder", "a folder"),
        ("verify folder", "a folder"),
        ("export --salvage folder", "a folder"),
        ("served notes.db", "not a database"),
        ("verify notes.db", "not a database"),
        ("export notes.db", "not a database"),
    ],
)
def test_what_is_no_trail_is_not_taken_for_an_empty_one(home: Path, line: str, says: str) -> None:
    (home / "folder").mkdir()
    (home / "notes.db").write_text("Dear diary, " * 100)
    done = audit(home, *line.split())
    assert done.returncode == 2 and says in done.stdout + done.stderr


@requirement("P-16", everywhere=True)
def test_p16_what_was_called_from_here_can_be_verified(home: Path) -> None:
    (home / "shop.py").write_text(SHOP)
    assert handrail("call", "shop.py", "price", "item=pear", "--yes", home=home).returncode == 0
    assert handrail("call", "shop.py", "price", "item=plum", home=home).returncode == 5
    calls = home / ".local/state/handrail" / CALLS_FILE
    good = handrail("audit", "verify", home=home)
    assert (good.returncode, good.stderr) == (0, "") and "good: 5 records" in good.stdout
    exported = handrail("audit", "export", str(calls), home=home).stdout
    told = [json.loads(line) for line in exported.splitlines() if '"side":"client"' in line]
    assert [each["event"] for each in told] == ["intent", "refusal"] and "pear" not in exported
    shown = [json.loads(line) for line in handrail("audit", "--json", home=home).stdout.splitlines()]
    assert [(each["outcome"], each["confirmed"]) for each in shown] == [("ok", "allowed"), ("denied", "")]
    with closing(connect(str(calls), durable=False)) as db:
        db.execute("UPDATE audit SET line = CAST(replace(line, 'denied', 'okayed') AS BLOB)")
    bad = handrail("audit", "verify", home=home)
    assert bad.returncode == 2 and "record 5" in bad.stdout


SHOP = """
from handrail import Server

server = Server("shop")


@server.tool
def price(item: str) -> int:
    return 1


server.run()
"""


@pytest.mark.parametrize("words", [["list", "shop.py"], ["show", "shop.py", "price"], ["audit"]], ids=" ".join)
def test_who_calls_nothing_opens_no_record(home: Path, words: list[str]) -> None:
    (home / "shop.py").write_text(SHOP)
    probe = f"import sys; from handrail.cli import main; main({words!r})"
    probe += "; sys.exit('handrail.audit.log' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=home, env=environment(home), timeout=SECONDS, stdout=subprocess.DEVNULL
    )
    assert done.returncode == 0
    assert not [*home.rglob(CALLS_FILE)]


@requirement("APP-13", everywhere=True)
def test_calls_are_exported(home: Path, state: StateDirectory) -> None:
    append(state, record("=cmd|'/c calc'!A1", arguments={"token": "canary", "n": 1}))
    append(state, record('"quoted", and\nmore'))
    found = json.loads(audit(home, "--export", "json").stdout)
    assert found[0]["arguments"] == {"token": "****", "n": 1}
    rows = [*csv.DictReader(io.StringIO(audit(home, "--export", "csv").stdout))]
    assert rows[0]["tool"] == "'=cmd|'/c calc'!A1", "no formula"
    assert rows[1]["tool"] == '"quoted", and\\nmore'
    assert json.loads(rows[0]["arguments"]) == {"token": "****", "n": 1}
    assert (rows[0]["confirmed"], rows[1]["arguments"]) == ("confirmed", "")
    assert audit(home, "--export", "csv", "-f").returncode == 2


@requirement("P-33", "APP-08", everywhere=True)
def test_what_was_recorded_cannot_act(home: Path, state: StateDirectory) -> None:
    evil = "\x1b[2J\u202e\x9b\x7f\n"
    names = ("time", "server", "tool", "outcome", "revision", "arguments_digest")
    append(state, {**dict.fromkeys(names, evil), "event": "outcome", "arguments": {evil: evil}, "seconds": evil})
    for words in ([], ["--json"], ["--export", "json"], ["--export", "csv"]):
        done = audit(home, *words)
        assert not {"\x1b", "\u202e", "\x9b", "\x7f"} & set(done.stdout + done.stderr)
    assert len(audit(home).stdout.splitlines()) == 2


def test_calls_are_followed_as_they_are_made(home: Path, state: StateDirectory) -> None:
    process = subprocess.Popen(
        [*COMMAND, "audit", "-f", "--json", "--tool", "[!x]*"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(home, XDG_STATE_HOME=str(home / "state")),
    )
    with process:
        try:
            assert process.stdout is not None

            def tool() -> str:
                name: str = json.loads(process.stdout.readline() if process.stdout else "")["tool"]
                return name

            append(state, record("first"))
            assert tool() == "first"
            append(state, record("x: not wanted"), record("in two parts", event="intent", call="1"))
            append(state, record("after"))
            assert tool() == "after"
            append(state, {"event": "outcome", "call": "1", "outcome": "ok"})
            assert tool() == "in two parts"
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 130
        finally:
            process.kill()
