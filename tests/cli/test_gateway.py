"""`handrail gateway`: which servers are served, which are left out and why, and what edits and stops change."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_runs import COMMAND, Client, Terminal, handrail
from handrail.model import Object
from patience import PATIENCE
from requirements import requirement

# It knows nothing of this package. Its tools stand in a file beside it; `wait` reports that it runs, and never ends.
UPSTREAM = """
import json, os, pathlib, sys
def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked.get("method"), asked.get("params", {})
    if method == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "x", "version": "1"}
    elif method == "tools/list":
        result = {"tools": json.loads(pathlib.Path(__file__).with_name(sys.argv[1]).read_text())}
    elif method == "tools/call" and params["name"] == "wait":
        say(method="notifications/progress", params={"progressToken": params["_meta"]["progressToken"], "progress": 1})
        continue
    elif method == "tools/call":
        text = f"{sys.argv[1]} {params['name']} {os.environ.get('WORD', '')}"
        result = {"content": [{"type": "text", "text": text.strip()}]}
    else:
        continue
    say(id=asked["id"], result=result)
"""
READ: Object = {"name": "read_file", "description": "Reads a file.", "inputSchema": {"type": "object"}}
WAIT: Object = {"name": "wait", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}
DELETE: Object = {"name": "delete_file", "inputSchema": {"type": "object"}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "up.py").write_text(UPSTREAM)
    (tmp_path / "one.tools").write_text(json.dumps([READ, DELETE, WAIT]))
    (tmp_path / "two.tools").write_text(json.dumps([READ]))
    return tmp_path


def entry(name: str, **more: Any) -> Object:
    return {"command": sys.executable, "args": ["up.py", f"{name}.tools"], **more}


def write(home: Path, **servers: Object) -> None:
    (home / "mcp.json").write_text(json.dumps({"mcpServers": servers}))


def agree(home: Path, *words: str) -> None:
    done = handrail("gateway", *words, "--agree", "--yes", home=home)
    assert done.returncode == 0, done.stderr


class Caller(Client):
    def hear(self) -> Object:
        """The next answer; notices are passed over."""
        while "id" not in (message := super().hear()):
            pass
        return message

    def notice(self) -> Object:
        return super().hear()

    def wait(self, ident: int) -> None:
        """Call the tool that never ends until it runs, while it is refused again and again."""
        deadline = time.monotonic() + PATIENCE
        while True:
            params = {"name": "one_wait", "arguments": {}, "_meta": {"progressToken": 1}}
            self.say("tools/call", params, id=ident)
            while "id" not in (message := self.notice()) and message["method"] != "notifications/progress":
                pass
            if "id" not in message:
                return
            assert time.monotonic() < deadline, message

    def list_until(self, *names: str) -> None:
        """Wait for a notice until the tools have these names."""
        deadline = time.monotonic() + PATIENCE
        while (listed := self.names()) != [*names]:
            assert time.monotonic() < deadline, listed
            self.notice()


@contextmanager
def gateway(*words: str, home: Path) -> Iterator[Caller]:
    peer = Caller("gateway", *words, home=home)
    with closing(peer):
        assert peer.open()["serverInfo"]["name"] == "gateway"
        yield peer
        assert peer.end() == 0


# What is served


@requirement("GW-02", "GW-17", everywhere=True)
def test_servers_of_a_file_and_of_words_are_served_and_a_broken_one_hides_no_other(home: Path) -> None:
    write(home, one=entry("one"), broken={"command": "/there/is/none"}, off={"command": "x", "disabled": True})
    agree(home, "mcp.json")
    words = f"my.two={sys.executable} up.py two.tools"
    with gateway("mcp.json", "--server", words, "--trust", home=home) as peer:
        assert peer.names() == ["one_read_file", "one_delete_file", "one_wait", "my_two_read_file"]
        assert peer.call("my_two_read_file") == "two.tools read_file"
        peer.told("broken: not listed")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "no upstream server: name a FILE.json, or add --server NAME='COMMAND', or [upstreams.NAME]"),
        (["gone.json"], "gone.json: no such file"),
        (["--server", "npx -y x"], "not NAME='COMMAND' or NAME=https://…, such as fs='npx -y server'"),
        (["--server", "a=mcp.json"], "mcp.json is a file of servers: handrail gateway mcp.json"),
        (["--server", "a=b c", "--server", "a=d e"], "two servers are called 'a'"),
        (["mcp.json"], "key: the variable NOT_SET is not set"),
        (["mcp.json", "--workers", "2"], "--workers: several processes share an address"),
    ],
)
def test_what_cannot_be_served_has_its_reason(home: Path, words: list[str], reason: str) -> None:
    write(home, key={"url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${NOT_SET}"}})
    done = handrail("gateway", *words, home=home)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr


def test_serve_names_the_verb_for_a_file_of_servers(home: Path) -> None:
    done = handrail("serve", "mcp.json", home=home)
    assert done.returncode == 2
    assert "a file of servers, which `handrail gateway mcp.json` serves" in done.stderr


def test_upstreams_of_handrail_toml_have_their_settings_and_its_guards(home: Path) -> None:
    (home / "work").mkdir()
    (home / "work" / "up.py").write_text(UPSTREAM)
    (home / "work" / "one.tools").write_text(json.dumps([READ, DELETE]))
    (home / "handrail.toml").write_text(
        f"""
[upstreams.fs]
command = [{sys.executable!r}, "up.py", "one.tools"]
cwd = "work"
env = {{ WORD = "${{USER_WORD:-hello}}" }}
prefix = ""
deny = ["delete_*"]
rename = {{ read_file = "look" }}

[[rules]]
verdict = "allow"
tools = ["look"]
"""
    )
    agree(home)
    with gateway(home=home) as peer:
        assert peer.names() == ["look"]
        assert peer.call("look") == "one.tools read_file hello"
    assert (home / "tools.lock").is_file(), "beside the configuration"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prefx = 'a'", "upstreams.fs.prefx: unknown key; did you mean 'prefix'?"),
        ("", 'upstreams.fs: neither "command" nor "url" is there'),
        ("command = 'x'\nurl = 'https://x'", 'upstreams.fs: both "command" and "url" are there'),
        ("url = 'ftp://x'", "upstreams.fs/url:"),
        ('command = "\'"', "upstreams.fs.command: No closing quotation"),
    ],
)
def test_a_wrong_section_says_what_is_wrong(home: Path, text: str, reason: str) -> None:
    (home / "handrail.toml").write_text(f"[upstreams.fs]\n{text}\n")
    done = handrail("gateway", home=home)
    assert done.returncode == 2
    assert reason in done.stderr


# Consent


@requirement("P-28", everywhere=True)
def test_p28_a_command_of_a_file_is_not_started_until_a_person_has_agreed(home: Path) -> None:
    write(home, one=entry("one"))
    done = handrail("gateway", "mcp.json", home=home)
    assert done.returncode == 2
    assert "one: nobody has agreed to what the file starts here" in done.stderr
    assert "handrail gateway mcp.json --agree" in done.stderr
    assert handrail("gateway", "mcp.json", "--agree", home=home).returncode == 5
    terminal = Terminal(*COMMAND, "gateway", "mcp.json", "--agree", home=home)
    assert "one.tools" in terminal.until("now and from now on? [y/N] ")
    terminal.type("y\n")
    assert terminal.end()[0] == 0
    write(home, one=entry("one", env={"WORD": "x"}), two=entry("two"))
    agree(home, "mcp.json")
    with gateway("mcp.json", home=home) as peer:
        peer.list_until("one_read_file", "one_delete_file", "one_wait", "two_read_file")
    write(home, one=entry("one", env={"WORD": "y"}), two=entry("two"))
    with gateway("mcp.json", home=home) as peer:  # the other one is served
        peer.told("one: left out: nobody has agreed")
        peer.list_until("two_read_file")


# While it runs


@requirement("P-28", everywhere=True)
def test_an_edit_of_the_file_touches_only_the_upstream_that_it_is_about(home: Path) -> None:
    write(home, one=entry("one", env={"WORD": "old"}), two=entry("two"))
    agree(home, "mcp.json")
    with gateway("mcp.json", "--trust", home=home) as peer:
        peer.list_until("one_read_file", "one_delete_file", "one_wait", "two_read_file")
        assert peer.call("one_read_file") == "one.tools read_file old"
        (home / "mcp.json").write_text("{")
        peer.told("the upstream servers stay as they were")
        write(home, one=entry("two"), two=entry("two"), three=entry("two"))  # nobody has agreed to these
        peer.told("three: left out: nobody has agreed")
        assert peer.call("one_read_file") == "one.tools read_file old"
        agree(home, "mcp.json")
        write(home, one=entry("two"), three=entry("two"))
        peer.list_until("one_read_file", "three_read_file")
        assert peer.call("one_read_file") == "two.tools read_file"


# explain, check, list --cost


def test_explain_says_why_a_tool_of_an_upstream_is_missing(home: Path) -> None:
    (home / "handrail.toml").write_text(
        f"[upstreams.fs]\ncommand = [{sys.executable!r}, 'up.py', 'one.tools']\ndeny = ['delete_*']\n"
        "[upstreams.broken]\nurl = 'http://127.0.0.1:9/mcp'\n"
    )
    agree(home)
    listed = handrail("explain", "call", "fs_read_file", home=home)
    assert "untrusted tools ask" in listed.stdout
    denied = handrail("explain", "call", "fs_delete_file", home=home)
    assert denied.returncode == 5
    assert "delete_file of fs: the configuration does not offer it" in denied.stdout
    assert "broken lists nothing" in handrail("explain", "call", "broken_x", home=home).stdout
    assert not (home / "tools.lock").exists(), "it writes nothing"
    checked = handrail("check", "--json", home=home)
    assert json.loads(checked.stdout)["config"]["upstreams"]["fs"]["deny"] == ["delete_*"]


@requirement("P-34", everywhere=True)
def test_check_starts_nothing_and_prints_no_secret(home: Path) -> None:
    section = "[upstreams.fs]\ncommand = ['x', '--token', 'canary-a']\nenv = { KEY = 'canary-b' }\n"
    (home / "handrail.toml").write_text(section)
    for words in ("check", "--json"), ("check",):
        done = handrail(*words, home=home)
        assert done.returncode == 0
        assert "canary" not in done.stdout + done.stderr


def test_list_estimates_the_tokens_of_each_definition(home: Path) -> None:
    (home / "two.tools").write_text(json.dumps([{**READ, "description": "é" * 80, "title": "Not passed on"}]))
    words = ("list", f"{sys.executable} up.py two.tools", "--cost")
    text = json.dumps({**READ, "description": "é" * 80}, separators=(",", ":"), ensure_ascii=False)
    tokens = -(-len(text) // 4)
    done = handrail(*words, home=home)
    assert f"read_file  {tokens}  " in done.stdout
    assert f"about {tokens} tokens in all" in done.stderr
    assert json.loads(handrail(*words, "--json", home=home).stdout)["tools"][0]["tokens"] == tokens


# Stop


@requirement("GW-16", everywhere=True)
@pytest.mark.parametrize("what", [("one",), ("--tool", "one_wait"), ("--caller", "local")])
def test_a_stop_cancels_what_is_in_flight_and_refuses_what_comes_until_it_is_undone(
    home: Path, what: tuple[str, ...]
) -> None:
    words = f"one={sys.executable} up.py one.tools"
    with gateway("--server", words, "--trust", home=home) as peer:
        peer.list_until("one_read_file", "one_delete_file", "one_wait")
        peer.wait(50)
        stopped = handrail("stop", *what, "--note", "Ask Grace", home=home)
        assert stopped.returncode == 0, stopped.stderr
        answer = peer.hear()
        assert answer["id"] == 50
        assert "cancelled by an operator" in json.dumps(answer)
        peer.say("tools/call", {"name": "one_wait", "arguments": {}}, id=51)
        assert "Ask Grace" in json.dumps(peer.hear())
        assert "Ask Grace" in handrail("stop", home=home).stdout
        assert handrail("stop", "--undo", *what, home=home).returncode == 0
        peer.wait(52)
        peer.say("notifications/cancelled", {"requestId": 52})
    records = [json.loads(line) for line in handrail("audit", "export", home=home).stdout.splitlines()]
    steps = [each["step"] for each in records if each["event"] == "console"]
    assert [each.split()[0] for each in steps] == ["stopped", "started"]


@requirement("GW-16", everywhere=True)
def test_a_stop_holds_in_all_processes_of_a_gateway_over_http(home: Path) -> None:
    server = f"one={sys.executable} up.py one.tools"
    peer = Caller(
        "gateway", "--server", server, "--http", "127.0.0.1:0", "--workers", "2", "--trust", "--json", home=home
    )
    with closing(peer):
        url = peer.notice()["url"]
        words = ("call", url, "one_read_file", "--yes")
        assert "one.tools read_file" in handrail(*words, home=home).stdout
        assert handrail("stop", "--tool", "one_read_file", "--note", "Ask Grace", home=home).returncode == 0
        deadline, refusals = time.monotonic() + PATIENCE, 0
        while refusals < 5:  # in a row: connections go to both processes
            done = handrail(*words, home=home)
            refusals = refusals + 1 if "Ask Grace" in done.stderr + done.stdout else 0
            assert time.monotonic() < deadline, done
        peer.process.terminate()
        assert peer.process.wait(PATIENCE) == 0


def test_a_stop_of_a_server_that_nobody_knows_says_so(home: Path) -> None:
    done = handrail("stop", "onee", home=home)
    assert done.returncode == 0
    assert "careful: no gateway that has run here has a server 'onee'" in done.stderr
    assert json.loads(handrail("stop", "--json", home=home).stdout) == [
        {"kind": "upstream", "name": "onee", "reason": ""}
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["a", "--tool", "b"], "name one of them"),
        (["--undo"], "name one of them"),
        (["--undo", "a"], "a: no upstream of this name is stopped"),
    ],
)
def test_a_wrong_stop_says_what_is_wrong(home: Path, words: list[str], reason: str) -> None:
    done = handrail("stop", *words, home=home)
    assert done.returncode == 2
    assert reason in done.stderr
