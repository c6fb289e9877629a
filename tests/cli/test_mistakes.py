"""Mistakes on the command line: each is told in a line that says what is wrong, and none is a bug."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cli_runs import COMMAND, SECONDS, environment, handrail
from handrail import Client
from handrail.errors import EXTRAS, missing_extra
from handrail.model import Object
from paths import ROOT
from requirements import requirement

SHOP = """
from handrail import Image, Server

server = Server("shop")


@server.tool
def picture() -> list[Image | str]:
    return [Image(b"\\x89PNG", "image/png"), "a pear"]


if __name__ == "__main__":
    server.run()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "typo.json").write_text('{"mcpServers": {"a": {"comand": "x"}}}')
    (tmp_path / "many.py").write_text(SHOP.replace("def picture", "def search_orders"))
    (tmp_path / "groups.toml").write_text('[[rules]]\nverdict = "deny"\ngroups = ["staff"]\n')
    (tmp_path / "taken").write_text("a file, where a folder should be")
    return tmp_path


@requirement("APP-18", everywhere=True)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("list shop.py --revision x", "--revision: 'x' is not one of auto, legacy, 2024-10-07"),
        ("doctor shop.py --revision x", "--revision: 'x' is not one of auto, legacy, 2024-10-07"),
        ("list shop.py --timeout nan", "--timeout: 'nan' is not a number of seconds above 0"),
        ("list shop.py --timeout -1", "--timeout: "),
        ("list shop.py --timeout=-1", "--timeout: '-1' is not a number of seconds above 0"),
        ("call shop.py picture --timeout 0", "--timeout: '0' is not a number of seconds above 0"),
        ("list shop.py --timeout soon", "--timeout: 'soon' is not a number of seconds above 0"),
        ("list nope.py", "nope.py: no such file"),
        ("list ./nope.py", "./nope.py: no such file"),
        ("list sub/nope.json", "sub/nope.json: no such file"),
        ("lst shop.py", "unknown: 'lst'; did you mean 'list'?"),
        ("zzzzzz shop.py", "unknown: 'zzzzzz'; choose from "),
        ("call shop.py pictur", "no tool 'pictur'; did you mean picture?"),
        ("show shop.py pictures_of_a", "no tool 'pictures_of_a'; there are picture"),
        ("explain --server shop.py call serch", "no tool 'serch'; there are picture"),
        ("explain --server many.py call serch", "no tool 'serch'; did you mean search_orders?"),
        (
            "check --config groups.toml",
            "rule 1: groups: unknown: 'staff'; there are no groups: a line `staff = [\"ada\"]`",
        ),
        ("list shop.py --key 'a b'", "--key: an API key or a token is one word"),
        ("list shop.py --key @nowhere", "--key: nowhere: "),
        ("list localhost:8000/mcp", "localhost:8000/mcp: an address begins with its scheme: http://localhost:8000/mcp"),
        ("list ftp://a.example/mcp", "ftp://a.example/mcp: a server has an address that begins with https:// or http"),
        ("list shop.py --jsn", "unrecognized arguments: --jsn; did you mean --json?; handrail list --help says more"),
        ("list shop.py --zzz", "unrecognized arguments: --zzz; handrail list --help says more"),
        ("lock", "no server: name one, as `handrail lock server.py`; tools.lock, which would name some, is not there"),
        ("lock --check", "no server: name one, as `handrail lock server.py`; tools.lock, which would name some, is"),
        ("explain call picture", "no server: add --server FILE, or say `target` in the [server] section of handrail"),
        ("serve", "no server: name a FILE, or say `target` in the [server] section of handrail.toml"),
        ("list typo.json", "'comand': did you mean 'command'?"),
        ("list http://[::1", "the address: Invalid IPv6 URL; such as "),
        ("audit --since 999999d", "--since: '999999d' is not a time such as"),
        ("lock shop.py --file taken/x.lock", "--file: taken/x.lock: cannot be written: Not a directory"),
        ("lock shop.py --file nowhere/x.lock", "--file: nowhere/x.lock: cannot be written: No such file"),
        ("install shop.py --host cursor --file taken/x/y.json --yes", "taken/x/y.json: cannot be read: Not a dir"),
        ("install shop.py --host cursor --file /proc/x/y.json --yes", "/proc/x/y.json: cannot be written: "),
    ],
)
def test_a_mistake_is_told_in_a_line(home: Path, line: str, says: str) -> None:
    done = handrail(*shlex.split(line), home=home)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr.splitlines()[-1]


@requirement("APP-18", everywhere=True)
def test_what_a_program_printed_that_is_no_server_is_told(home: Path) -> None:
    done = handrail("list", "echo hello there", home=home)
    assert done.returncode == 4
    assert "the server exited with code 0" in done.stderr
    assert "It printed what is no message: hello there" in done.stderr


def test_a_file_of_settings_may_begin_with_a_byte_order_mark(home: Path) -> None:
    (home / "handrail.toml").write_bytes(b'\xef\xbb\xbf[server]\ntarget = "shop.py"\n')
    done = handrail("explain", "call", "picture", home=home)
    assert done.returncode == 0, done.stderr


@requirement("APP-18", everywhere=True)
def test_what_a_rule_of_the_server_denies_has_the_code_of_a_no(home: Path) -> None:
    (home / "handrail.toml").write_text('[[rules]]\nverdict = "deny"\ntools = ["picture"]\n')
    served = f"{sys.executable} -m handrail serve shop.py"
    done = handrail("call", served, "picture", "--yes", home=home)
    assert done.returncode == 5 and "the server refused it: picture is not allowed for this caller" in done.stderr


def test_a_port_in_use_is_told_with_what_to_do(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = handrail("serve", "shop.py", "--http", str(taken.getsockname()[1]), home=home)
    assert done.returncode == 4
    assert done.stderr.endswith("; end what listens there, or choose another port\n")


def test_a_web_server_that_takes_no_posts_is_told_from_a_server_of_tools(home: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever).start()
        try:
            done = handrail("list", f"http://127.0.0.1:{web.server_port}/mcp", home=home)
        finally:
            web.shutdown()
    assert done.returncode == 4
    assert "HTTP 501" in done.stderr and "Is this the address of an MCP server?" in done.stderr


def test_a_yes_for_scripts_is_told_from_an_answer_to_the_server(home: Path) -> None:
    (home / "shop.py").write_text(SHOP.replace("@server.tool", "@server.tool(destructive=True)"))
    done = handrail("call", "shop.py", "picture", "--yes", home=home)
    assert done.returncode == 1
    assert "declined: no terminal to ask at, and --yes does not answer a server's questions" in done.stderr


def test_one_tool_is_one_tool(home: Path) -> None:
    assert handrail("lock", "shop.py", home=home).stdout == "1 tool in tools.lock\n"
    assert handrail("lock", "--check", "shop.py", home=home).stdout == "1 tool, all as tools.lock has them\n"


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_server_is_said_to_be_one(home: Path, text: str) -> None:
    done = handrail("list", text, home=home)
    assert done.returncode == 2 and "the server is an empty text" in done.stderr
    done = handrail("doctor", text, home=home)
    assert done.returncode == 2 and "the name: the server is an empty text" in done.stdout


def test_a_doctor_knows_a_file_and_gives_no_advice_that_does_not_help(home: Path) -> None:
    assert "the name: a file\n" in handrail("doctor", "shop.py", home=home).stdout
    for wrong in ("./nope.py", "http://[::1", "http://h:99999/mcp", "[::1]:80"):
        done = handrail("doctor", wrong, home=home)
        assert done.returncode == 2 and "failed   the name: " in done.stdout and "try:" not in done.stdout


@requirement("APP-18", everywhere=True)
@pytest.mark.parametrize("verb", ["list", "lock", "doctor"])
@pytest.mark.parametrize(
    ("servers", "says"),
    [({}, "no servers in it"), ({"x": {"command": "y", "disabled": True}}, "all its servers are disabled")],
    ids=["none", "disabled"],
)
def test_a_configuration_without_servers_is_told(home: Path, verb: str, servers: Object, says: str) -> None:
    (home / "c.json").write_text(json.dumps({"mcpServers": servers}))
    done = handrail(verb, "c.json", home=home)
    assert done.returncode == 2, done.stderr
    told = done.stdout if verb == "doctor" else done.stderr
    assert f"c.json: {says}; there is nothing to connect to" in told
    with pytest.raises(ValueError, match=says):
        Client({"mcpServers": servers})


@requirement("APP-18", everywhere=True)
@pytest.mark.parametrize("line", ["list shop.py", "call shop.py picture --yes", "serve shop.py"])
def test_a_state_folder_that_cannot_be_made_is_told(home: Path, line: str) -> None:
    done = handrail(*line.split(), home=home, env={"XDG_STATE_HOME": str(home / "taken")})
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"{home / 'taken'}" in done.stderr


@pytest.mark.parametrize("line", ["list bare.py", "call bare.py picture --yes", "doctor bare.py"])
def test_a_file_that_does_not_serve_is_told_how(home: Path, line: str) -> None:
    (home / "bare.py").write_text(SHOP.partition("if __name__")[0])
    done = handrail(*line.split(), home=home)
    assert done.returncode == 4
    assert "Does it call server.run()? If not, the command `handrail serve bare.py` serves it" in (
        done.stdout + done.stderr
    )


@requirement("APP-15", everywhere=True)
def test_what_cannot_be_saved_does_not_hide_the_rest(home: Path) -> None:
    done = handrail("call", "shop.py", "picture", "--yes", "--save", "taken/out", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["image/png, not saved: taken/out: Not a directory; --json shows it", "a pear"]


def test_records_of_another_make_are_no_records(home: Path) -> None:
    good = {"event": "outcome", "call": "1", "tool": "price", "outcome": "ok", "seconds": 10**400, "number": 1}
    lines = [{**good, "call": []}, {**good, "call": {}, "event": "intent"}, {**good, "number": "x"}, good]
    (home / "x.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    done = handrail("audit", "served", "x.jsonl", home=home)
    assert done.returncode == 0, done.stderr
    assert "price  ok  -" in done.stdout and "3 lines are not records" in done.stderr


@requirement("APP-18", everywhere=True)
@pytest.mark.parametrize(("where", "code", "says"), [("/dev/full", 2, "standard output: No space left"), ("-", 0, "")])
def test_a_standard_output_that_takes_nothing_is_no_bug(home: Path, where: str, code: int, says: str) -> None:
    line = f"{shlex.join([*COMMAND, 'list', 'shop.py'])} >{'&-' if where == '-' else where}"
    ended = subprocess.run(
        ["sh", "-c", line], capture_output=True, encoding="utf-8", cwd=home, env=environment(home), timeout=SECONDS
    )
    assert ended.returncode == code and says in ended.stderr and "Traceback" not in ended.stderr


@requirement("P-28", everywhere=True)
@pytest.mark.parametrize("verb", ["check", "serve shop.py"])
def test_settings_that_cannot_be_read_are_not_taken_for_none(home: Path, verb: str) -> None:
    (home / "handrail.toml").symlink_to("nowhere")
    ended = handrail(*verb.split(), home=home)
    assert ended.returncode == 2 and "handrail.toml: No such file or directory" in ended.stderr


def test_the_command_for_a_missing_extra_installs_what_the_extra_has() -> None:
    """Named one by one, they can be installed beside a checkout as well as beside a release."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, packages in EXTRAS.items():
        assert packages == extras["optional-dependencies"][extra]
        told = str(missing_extra(extra, "this needs it"))
        assert shlex.split(told.partition(": ")[2].partition(" (")[0])[4:] == packages and "handrail[" not in told
