"""`handrail gateway --adopt HOST`: what it shows, what it writes, and that `--undo` gives everything back."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from cli_runs import COMMAND, Terminal, handrail
from requirements import requirement

HOST = """{
    "theme" : "dark",
    "mcpServers": {
        "files": {"command": "PYTHON", "args": ["up.py", "--token", "canary-a"], "env": {"KEY": "canary-b", "N": "1"}},
        "page": {"url": "https://example.org/mcp", "headers": {"Authorization": "canary-c"}},
        "asks": {"url": "https://example.org/mcp", "headers": {"Key": "${input:key}"}}
    },
    "numbers": [1,  2]
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / ".cursor").mkdir()
    path = tmp_path / ".cursor" / "mcp.json"
    path.write_text(HOST.replace("PYTHON", sys.executable))
    path.chmod(0o640)
    return path


def run(file: Path, *words: str) -> CompletedProcess[str]:
    return handrail("gateway", *words, home=file.parent.parent)


@requirement("P-28", "P-34", everywhere=True)
def test_p28_the_difference_is_shown_without_secrets_and_nothing_is_written_without_a_yes(file: Path) -> None:
    before = file.read_text()
    done = run(file, "--adopt", "cursor")
    assert done.returncode == 5
    assert '-        "files": ' in done.stderr
    assert '+        "handrail": {' in done.stderr
    assert "canary" not in done.stdout + done.stderr
    assert file.read_text() == before
    assert [each.name for each in file.parent.iterdir()] == ["mcp.json"]


@pytest.mark.parametrize("host", ["cursor", ".cursor/mcp.json"])
def test_the_servers_move_into_a_file_of_their_own_and_undo_restores_every_byte(file: Path, host: str) -> None:
    before = file.read_text()
    done = run(file, "--adopt", host, "--yes")
    assert done.returncode == 0, done.stderr
    assert "asks stays with the host" in done.stderr
    servers, moved = json.loads(file.read_text())["mcpServers"], file.with_name("mcp.handrail.json")
    assert servers == {
        "handrail": {"command": sys.executable, "args": ["-m", "handrail", "gateway", str(moved)]},
        "asks": json.loads(before)["mcpServers"]["asks"],
    }
    assert [*json.loads(moved.read_text())["mcpServers"]] == ["files", "page"]
    assert stat.S_IMODE(moved.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert run(file, str(moved), "--agree").returncode == 0, "what was shown is agreed to"
    again = run(file, "--adopt", host, "--yes")
    assert again.returncode == 2
    assert "were taken over before" in again.stderr
    undone = run(file, "--undo", host, "--yes")
    assert undone.returncode == 0, undone.stderr
    assert "canary" not in undone.stderr
    assert file.read_text() == before
    assert [each.name for each in file.parent.iterdir()] == ["mcp.json"]


def test_undo_keeps_what_the_host_has_written_since_and_edits_of_the_servers(file: Path) -> None:
    run(file, "--adopt", "cursor", "--yes")
    adopted, moved = json.loads(file.read_text()), file.with_name("mcp.handrail.json")
    adopted["theme"] = "light"
    adopted["mcpServers"]["later"] = {"command": "x"}
    file.write_text(json.dumps(adopted))
    moved.write_text(json.dumps({"mcpServers": {"added": {"command": "y"}}}))
    undone = run(file, "--undo", "cursor", "--yes")
    assert undone.returncode == 0, undone.stderr
    assert "has been edited since, and stays" in undone.stderr
    restored = json.loads(file.read_text())
    assert restored["theme"] == "light"
    assert [*restored["mcpServers"]] == ["files", "page", "asks", "later"]
    assert moved.is_file()


def test_on_a_terminal_it_asks(file: Path) -> None:
    terminal = Terminal(*COMMAND, "gateway", "--adopt", "cursor", home=file.parent.parent)
    terminal.until("? [y/N] ")
    terminal.type("y\n")
    assert terminal.end()[0] == 0
    assert file.with_name("mcp.handrail.json").is_file()


@pytest.mark.parametrize(
    ("words", "content", "reason"),
    [
        (["--adopt", "cursr"], "{}", "cursr: no such file, and no host with one; hosts are claude, claude-code"),
        (["--adopt", "cursor"], "{}", "no servers in it"),
        (["--adopt", "cursor"], "5", "no servers in it"),
        (["--adopt", "cursor"], '{"mcpServers": {}, "mcpServers": {}}', "not JSON"),
        (["--adopt", "cursor"], '{"mcpServers": {"a": {"command": "x"}}} // mine', "with comments, which would not"),
        (["--adopt", "cursor"], '{"mcpServers": {"a": {"url": "${input:x}"}}}', "no server that could be taken over"),
        (["--undo", "cursor"], '{"mcpServers": {"a": {"command": "x"}}}', "not taken over"),
    ],
)
def test_what_cannot_be_taken_over_has_its_reason(file: Path, words: list[str], content: str, reason: str) -> None:
    file.write_text(content)
    done = run(file, *words, "--yes")
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert file.read_text() == content
