"""`handrail audit`: which tools were called; filtered, followed, exported."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cli_runs import COMMAND, SECONDS, environment, handrail
from handrail.cli.audit import FILE
from handrail.client.state import State
from handrail.model import Object
from requirements import requirement


def record(tool: str, **more: Any) -> Object:
    made: Object = {"time": "2026-07-28T09:30:00+00:00", "server": "weather", "tool": tool, "arguments_digest": "ab12"}
    return {**made, "confirmed": "confirmed", "outcome": "ok", "seconds": 0.25, "revision": "2026-07-28", **more}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def state(home: Path) -> State:
    return State(home / "state" / "handrail")


def append(state: State, line: Object) -> None:
    state.prepare()
    with (state.folder / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def audit(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return handrail("audit", *words, home=home, env={"XDG_STATE_HOME": str(home / "state")})


def tools(home: Path, *words: str) -> list[str]:
    done = audit(home, "--json", *words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["tool"] for line in done.stdout.splitlines()]


@requirement("APP-13", everywhere=True)
def test_calls_are_shown_one_a_line(home: Path, state: State) -> None:
    assert audit(home).stdout == ""
    append(state, record("forecast", arguments={"city": "Paris", "api_key": "canary"}))
    append(state, record("delete", outcome="denied", confirmed="", seconds=None))
    done = audit(home)
    assert done.stdout.splitlines() == [
        "2026-07-28T09:30:00+00:00  weather  forecast  ok  0.250 s  confirmed",
        '    {"city": "Paris", "api_key": "****"}',
        "2026-07-28T09:30:00+00:00  weather  delete  denied  -",
    ]


@requirement("APP-13", everywhere=True)
def test_calls_are_filtered(home: Path, state: State) -> None:
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


def test_the_last_twenty_are_shown_unless_told_otherwise(home: Path, state: State) -> None:
    for i in range(25):
        append(state, record(f"t{i}"))
    assert len(tools(home)) == 20
    assert len(tools(home, "--tail", "0")) == 25


def test_lines_that_are_no_records_are_skipped_and_a_torn_one_waited_for(home: Path, state: State) -> None:
    append(state, record("first"))
    with (state.folder / FILE).open("ab") as file:
        file.write(b"nonsense\n[1]\n\xff\xfe\n" + b"[" * 100_000 + b"\n")
    append(state, record("second"))
    with (state.folder / FILE).open("ab") as file:
        file.write(b'{"tool": "torn')
    done = audit(home, "--json")
    assert [json.loads(line)["tool"] for line in done.stdout.splitlines()] == ["first", "second"]
    assert "4 lines are not records" in done.stderr


@requirement("APP-13", everywhere=True)
def test_calls_are_exported(home: Path, state: State) -> None:
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
def test_what_was_recorded_cannot_act(home: Path, state: State) -> None:
    evil = "\x1b[2J\u202e\x9b\x7f\n"
    names = ("time", "server", "tool", "outcome", "revision", "arguments_digest")
    append(state, {**dict.fromkeys(names, evil), "arguments": {evil: evil}, "seconds": evil})
    for words in ([], ["--json"], ["--export", "json"], ["--export", "csv"]):
        done = audit(home, *words)
        assert not {"\x1b", "\u202e", "\x9b", "\x7f"} & set(done.stdout + done.stderr)
    assert len(audit(home).stdout.splitlines()) == 2


def test_calls_are_followed_as_they_are_made_also_into_a_new_file(home: Path, state: State) -> None:
    append(state, record("before"))
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

            assert tool() == "before"
            append(state, record("x: not wanted"))
            append(state, record("after"))
            assert tool() == "after"
            line = json.dumps(record("in two parts")).encode()
            with (state.folder / FILE).open("ab", buffering=0) as file:
                file.write(line[:20])
                file.write(line[20:] + b"\n")
            assert tool() == "in two parts"
            (state.folder / FILE).rename(state.folder / "audit.old")
            append(state, record("rotated"))
            assert tool() == "rotated"
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 130
        finally:
            process.kill()
