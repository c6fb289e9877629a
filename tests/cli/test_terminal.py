"""The command line on a real terminal, typed at and looked at through tmux: what is asked, and what Ctrl-C does."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paths import ROOT
from patience import PATIENCE
from requirements import requirement

SOURCE = ROOT / "src"
SECONDS = PATIENCE
SERVER = '''
import asyncio
from pathlib import Path

from handrail import Call, Server, ToolError

server = Server("terminal", sanitize=None)  # it may say anything: the terminal obeys nothing
log = Path(__file__).with_name("log")


def note(text: str) -> None:
    with log.open("a") as file:
        file.write(text + "\\n")


@server.tool(annotations={"destructiveHint": True})
async def wipe(folder: str, deep: bool = False) -> str:
    """Throws a folder away."""
    note(f"wiped {folder} {deep}")
    return f"wiped {folder}"


@server.tool
async def waits(call: Call) -> str:
    """Takes for ever."""
    note("began")
    await call.progress(1, 4, "a quarter")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        note("cancelled")
        raise
    return ""


@server.tool
async def asks(call: Call) -> str:
    """Wants to know a name."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "default": 30}}}
    answer = await call.ask("Who are you?\\x1b[31m", {**schema, "required": ["name"]})
    return f"{answer.action} {answer.content}"


@server.tool
async def signs_in(call: Call) -> str:
    """Needs a page to be visited."""
    return (await call.ask_url("Sign in first", "https://xn--exmple-cua.org/in?a=1")).action


server.run()
'''


FOREIGN = f"{sys.executable} server.py"  # a command is nobody's file


class Terminal:
    """A shell in tmux: type into it, and wait for what it shows."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux")
        env = {"HOME": str(folder), "PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        env |= {"PYTHONPATH": str(SOURCE), "PS1": "$ "}
        command = ["new-session", "-d", "-x", "120", "-y", "50", "-c", str(folder), "sh"]
        subprocess.run(["tmux", "-S", self._socket, "-f", "/dev/null", *command], env=env, check=True)
        self._wait(lambda shown: bool(shown.strip()), "a prompt")

    def run(self, *words: str) -> None:
        """`handrail` with these words on an empty screen, and its exit code after it."""
        self._tmux("send-keys", "-R")
        line = shlex.join([sys.executable, "-m", "handrail", *words])
        self.type(f"{line}; echo EXIT=$?")
        self._wait(lambda shown: "EXIT=$?" in shown, line)

    def type(self, text: str, enter: bool = True) -> None:
        self._tmux("send-keys", "-l", text)
        if enter:
            self._tmux("send-keys", "Enter")

    def interrupt(self) -> None:
        self._tmux("send-keys", "C-c")

    def until(self, text: str, question: str = "") -> str:
        """What is on the screen, once this is on it and the question, if any, is put: what is typed before is lost."""
        return self._wait(
            lambda shown: text in shown.replace("EXIT=$?", "") and shown.rstrip().endswith(question), repr(text)
        )

    def _wait(self, fits: Callable[[str], bool], what: str) -> str:
        end, shown = time.monotonic() + SECONDS, ""
        pause = threading.Event()
        while time.monotonic() < end:
            shown = self._tmux("capture-pane", "-p", "-J")
            if fits(shown):
                return shown
            pause.wait(0.05)
        raise AssertionError(f"{what} was not shown:\n{shown}")

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], check=False, capture_output=True)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-S", self._socket, *words], check=True, capture_output=True)
        return done.stdout.decode()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        reason = "tmux is not installed: make peers installs it where it may"
        if os.environ.get("HANDRAIL_REQUIRE_PEERS") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    (tmp_path / "server.py").write_text(SERVER)
    made = Terminal(tmp_path)
    yield made
    made.close()


def log_of(folder: Path) -> list[str]:
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


@requirement("APP-03", "APP-04", "APP-18", everywhere=True)
def test_a_destructive_call_is_shown_and_asked_for(terminal: Terminal, tmp_path: Path) -> None:
    terminal.run("call", FOREIGN, "wipe", "folder=/srv/data", "deep=true")
    shown = terminal.until("Send it? [y/N]")
    assert 'folder = "/srv/data"' in shown and "deep = true" in shown
    assert "declared by the server" in shown and "destroys" in shown
    terminal.type("n")
    assert "EXIT=5" in terminal.until("EXIT=")
    assert log_of(tmp_path) == []
    terminal.run("call", FOREIGN, "wipe", "folder=/srv/data")
    terminal.until("Send it? [y/N]")
    terminal.type("y")
    shown = terminal.until("Accept? [y/N/more]")  # a foreign server's own question is not answered by our yes
    assert "| Allow wipe on terminal?" in shown and '| {"folder":"/srv/data"}' in shown
    assert log_of(tmp_path) == []
    terminal.type("y")
    assert "wiped /srv/data" in terminal.until("EXIT=0")
    assert log_of(tmp_path) == ["wiped /srv/data False"]
    terminal.run("audit")
    shown = terminal.until("EXIT=0")
    assert "denied" in shown and "confirmed" in shown


@requirement("APP-03", "P-19", everywhere=True)
@pytest.mark.parametrize("answer", ["n", "", "more"])
def test_what_the_server_asks_can_be_refused_after_all(terminal: Terminal, tmp_path: Path, answer: str) -> None:
    terminal.run("call", "server.py", "wipe", "folder=/srv/data")
    terminal.until("Accept? [y/N/more]")
    terminal.type(answer)
    if answer == "more":
        terminal.until("remember (")
        terminal.type("for an hour")
        terminal.until("Send it? [y/N/again]")
        terminal.type("n")
    assert "was not approved" in terminal.until("EXIT=1")
    assert log_of(tmp_path) == []


@requirement("CLI-27", "CLI-32", everywhere=True)
@pytest.mark.parametrize("options", ["", ', policy=Policy(destructive="allow")'], ids=["asks", "allows"])
@pytest.mark.parametrize("revision", ["2026-07-28", "2025-11-25"])
@pytest.mark.parametrize("trusted", [False, True], ids=["file", "trusted"])
def test_one_s_own_server_asks_once(
    terminal: Terminal, tmp_path: Path, options: str, revision: str, trusted: bool
) -> None:
    """Its question is the one that is shown, whole, on one screen; also where its author would not have it asked."""
    imports = "from handrail.guards.policy import Policy\n"
    (tmp_path / "server.py").write_text(imports + SERVER.replace("sanitize=None", f"sanitize=None{options}"))
    reached = [FOREIGN, "--trusted"] if trusted else ["server.py"]
    terminal.run("call", *reached, "wipe", "folder=/srv/data", "--revision", revision)
    shown = terminal.until("Accept? [y/N/more]", "[y/N/more]")
    assert "Send it?" not in shown
    assert "| Allow wipe on terminal?" in shown and "| Throws a folder away." in shown
    assert '| {"folder":"/srv/data"}' in shown and log_of(tmp_path) == []
    terminal.type("y")
    shown = terminal.until("EXIT=0")
    assert "wiped /srv/data" in shown and shown.count("[y/N") == 1
    assert log_of(tmp_path) == ["wiped /srv/data False"]


@requirement("CLI-27", "APP-03", everywhere=True)
@pytest.mark.parametrize(
    ("options", "more"),
    [
        (', policy=Policy(destructive="allow"), approvals=Approvals(by="operator")', []),
        (', policy=Policy(destructive="allow")', ["--revision", "2024-11-05"]),
    ],
    ids=["by an operator", "a revision without questions"],
)
def test_what_the_server_does_not_ask_is_asked_here(
    terminal: Terminal, tmp_path: Path, options: str, more: list[str]
) -> None:
    imports = "from handrail.approvals.queue import Approvals\nfrom handrail.guards.policy import Policy\n"
    (tmp_path / "server.py").write_text(imports + SERVER.replace("sanitize=None", f"sanitize=None{options}"))
    terminal.run("call", "server.py", "wipe", "folder=/srv/data", *more)
    assert 'folder = "/srv/data"' in terminal.until("Send it? [y/N]", "[y/N]")
    assert log_of(tmp_path) == []
    terminal.type("y")
    shown = terminal.until("EXIT=0")
    assert "wiped /srv/data" in shown and shown.count("[y/N") == 1


@requirement("APP-02", "APP-12", everywhere=True)
def test_interrupting_cancels_the_call_on_the_server(terminal: Terminal, tmp_path: Path) -> None:
    terminal.run("call", "server.py", "waits", "--yes")
    terminal.until("25%")  # the bar
    terminal.interrupt()
    assert "EXIT=130" in terminal.until("EXIT=")
    assert log_of(tmp_path) == ["began", "cancelled"]


@requirement("APP-10", "CLI-32", everywhere=True)
def test_a_question_is_answered_on_the_terminal(terminal: Terminal) -> None:
    terminal.run("call", "server.py", "asks", "--yes")
    shown = terminal.until("Answer it? [y/N]")
    assert "\nserver asks:\n  | Who are you?\\x1b[31m\n" in f"\n{shown}"
    terminal.type("y")
    terminal.until("name (string)")
    terminal.type("Ada")
    assert "[30]" in terminal.until("age (integer)")
    terminal.type("")
    terminal.until("Send it?")
    terminal.type("y")
    assert "accept {'age': 30, 'name': 'Ada'}" in terminal.until("EXIT=0")
    terminal.run("call", "server.py", "asks", "--yes")
    terminal.until("Answer it? [y/N]")
    terminal.type("n")
    assert "decline None" in terminal.until("EXIT=0")
    terminal.run("call", "server.py", "asks", "--yes")
    terminal.until("Answer it? [y/N]")
    terminal.interrupt()
    assert "EXIT=130" in terminal.until("EXIT=")


@requirement("APP-11", everywhere=True)
def test_a_page_is_shown_whole_and_never_opened(terminal: Terminal) -> None:
    terminal.run("call", "server.py", "signs_in", "--yes")
    shown = terminal.until("[y/N]")
    assert "https://xn--exmple-cua.org/in?a=1" in shown and "at xn--exmple-cua.org" in shown
    assert "look like others" in shown
    terminal.type("n")
    assert "decline" in terminal.until("EXIT=0")
