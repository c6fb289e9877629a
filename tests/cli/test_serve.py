"""`handrail serve`: a file's tools over stdio and HTTP, and while the file is edited."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import urllib.request
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from cli_runs import OPENING, SECONDS, Client, client, handrail
from handrail import Client as McpClient
from handrail.cli.load_server import ServerFile, reloading_server
from handrail.model import Object
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement

SERVER = """
from handrail import Server
server = Server("weather", instructions="first")

@server.tool
def forecast(city: str) -> str:
    '''Weather.'''
    return "sun in " + city
"""
TELLS = """
@server.tool
def word() -> str:
    return WORD
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weather.py"
    path.write_text(SERVER)
    return path


# Finding the server


@pytest.mark.parametrize("target", ["weather.py", "weather.py:server", "./weather.py"])
def test_a_file_is_served_over_stdio(file: Path, target: str) -> None:
    with client("serve", target, home=file.parent) as peer:
        assert peer.open()["serverInfo"]["name"] == "weather"
        assert peer.call("forecast", city="Paris") == "sun in Paris"


def test_a_file_may_import_from_beside_and_be_called_anything(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("WORD = 'rain'\n")
    odd = tmp_path / "sub" / "my-server.py"
    odd.write_text(SERVER + "assert __file__ and __name__ != '__main__'\nfrom beside import WORD\n" + TELLS)
    with client("serve", str(odd), home=tmp_path) as peer:
        peer.open()
        assert peer.call("word") == "rain"


TWO = "from handrail import Server\na = Server('a')\nb = c = Server('b')\n"


@pytest.mark.parametrize(
    ("target", "source", "told"),
    [
        ("gone.py", "", "gone.py: no such file"),
        (".", "", ".: a folder; name a Python file in it"),
        ("x.py", "x = 1", 'x.py: no Server in it; `server = Server("name")` at its top level makes one'),
        ("x.py", TWO, "x.py: 2 servers in it; say which one: x.py:a, x.py:b"),
        ("x.py:d", TWO, "x.py: there is no 'd' in it; there are the servers a, b"),
        ("x.py:servr", SERVER, "x.py: there is no 'servr' in it; did you mean 'server'?"),
        ("x.py:forecast", SERVER, "x.py:forecast is a function, not a Server; server would be one"),
        ("x.py", "import nothing_there", "x.py: cannot be imported: ModuleNotFoundError"),
        ("x.py", "def f(:", "x.py: cannot be imported: SyntaxError"),
        ("x.py", "raise SystemExit(0)", "x.py: cannot be imported: SystemExit"),
    ],
)
def test_what_cannot_be_served_is_said_clearly(tmp_path: Path, target: str, source: str, told: str) -> None:
    (tmp_path / "x.py").write_text(source)
    done = handrail("serve", target, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"handrail: {told}" in done.stderr
    assert "cli/load_server.py" not in done.stderr, "a traceback is of the file, not of us"


def test_a_file_that_does_not_import_shows_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("\n\n1 / 0  # here\n")
    told = handrail("serve", "x.py", home=tmp_path).stderr
    assert re.search(r'File ".*x\.py", line 3', told)
    assert "1 / 0  # here" in told
    as_json = handrail("serve", "x.py", "--json", home=tmp_path).stderr
    assert json.loads(as_json)["error"]["message"] == "x.py: cannot be imported: ZeroDivisionError"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", "2"], "--workers: several processes share an address, not a pipe; add --http"),
        (["--workers", "2", "--http", "--reload"], "--reload: works in one process only"),
        (["--workers", "0"], "0 is not a number above 0"),
        (["--http", "weather.py"], "FILE goes before --http"),
        (["--http", "127.0.0.1:99999"], "is not an address with a port from 0 to 65535"),
    ],
)
def test_options_that_do_not_fit_are_refused(file: Path, words: list[str], told: str) -> None:
    done = handrail("serve", "weather.py", *words, home=file.parent)
    assert done.returncode == 2
    assert told in done.stderr


# Over HTTP


def post(url: str, method: str, params: Object) -> Object:
    request = urllib.request.Request(
        url,
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode(),
        {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        found: Object = json.loads(response.read())
        return found


def test_a_file_is_served_over_http_and_says_where(file: Path) -> None:
    with closing(Client("serve", "weather.py", "--http", "127.0.0.1:0", "--json", home=file.parent)) as peer:
        url = peer.hear()["url"]
        assert post(url, "initialize", OPENING)["result"]["serverInfo"]["name"] == "weather"
        in_use = handrail("serve", "weather.py", "--http", url.split("/")[2], home=file.parent)
        assert in_use.returncode == 4
        assert "cannot listen on 127.0.0.1" in in_use.stderr
        peer.process.send_signal(signal.SIGTERM)
        assert peer.process.wait(SECONDS) == 0


def test_reload_works_over_http_too(file: Path) -> None:
    with closing(Client("serve", "weather.py", "--http", "0", "--reload", home=file.parent)) as peer:
        url = peer.told("Serving weather on ").split()[-1]
        assert post(url, "initialize", OPENING)["result"]["instructions"] == "first"
        file.write_text(SERVER.replace("forecast", "outlook").replace("first", "second"))
        assert "new: outlook; gone: forecast" in peer.told("was read again")
        assert post(url, "initialize", OPENING)["result"]["instructions"] == "second"


WORKS = """
import os, signal
from handrail import Server
server = Server("works")

@server.tool
async def who() -> str:
    return str(os.getpid())

@server.tool
async def fork() -> str:
    child = os.fork()
    while not child:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    return f"{os.getpid()} {os.WTERMSIG(os.waitpid(child, 0)[1])}"
"""


@requirement("P-15", everywhere=True)
def test_calls_of_several_workers_have_names_of_their_own_and_their_children_end_alone(tmp_path: Path) -> None:
    (tmp_path / "works.py").write_text(WORKS)
    with closing(Client("serve", "works.py", "--http", "0", "--workers", "2", "--json", home=tmp_path)) as peer:
        url = json.loads(peer.out.get(timeout=SECONDS))["url"]
        said: dict[str, Counter[str]] = {"who": Counter(), "fork": Counter()}
        for tool, answers in said.items():
            deadline = time.monotonic() + SECONDS
            while len(answers) < 2 and time.monotonic() < deadline:  # the kernel decides who takes a connection
                with McpClient(url, trusted=True) as caller:
                    answers[caller.call(tool).text] += 1
        workers = set(said["who"])
        assert len(workers) == 2
        assert set(said["fork"]) == {f"{each} {signal.SIGTERM:d}" for each in workers}, "no worker was ended by it"
        peer.process.send_signal(signal.SIGTERM)
        assert peer.process.wait(SECONDS) == 0
    done = handrail("audit", "served", "--json", home=tmp_path)
    names = [json.loads(line)["call"] for line in done.stdout.splitlines()]
    assert len(names) == len(set(names)) >= 4


# While it is edited


def test_tools_follow_the_file_and_the_client_is_told(file: Path) -> None:
    with client("serve", "weather.py", "--reload", home=file.parent) as peer:
        assert peer.open()["instructions"] == "first"
        assert peer.names() == ["forecast"]
        file.write_text(SERVER.replace("sun", "rain") + "\n@server.tool\ndef tides() -> str:\n    return 'low'\n")
        peer.changed()
        assert peer.names() == ["forecast", "tides"]
        assert peer.call("forecast", city="Paris") == "rain in Paris"
        assert "2 tools; new: tides" in peer.told("was read again")
        file.write_text(SERVER.replace("city: str", "city: str, days: int = 1"))
        peer.changed()
        assert peer.names() == ["forecast"]
        assert "1 tool; gone: tides; changed: forecast" in peer.told("was read again")


async def test_a_tool_that_an_operator_has_switched_off_stays_off_when_its_file_is_read_again(file: Path) -> None:
    source, read_again = ServerFile(str(file)), asyncio.Event()
    server = reloading_server(source, source.load(), lambda note: read_again.set())
    async with Peer(server) as peer:
        server.engine.catalog.switch("forecast", on=False)
        await asyncio.to_thread(file.write_text, SERVER + "\n@server.tool\ndef tides() -> str:\n    return 'low'\n")
        await asyncio.wait_for(read_again.wait(), PATIENCE)
        assert [tool.name for tool in await peer.tools()] == ["tides"]
        server.engine.catalog.switch("forecast", on=True)
        assert [tool.name for tool in await peer.tools()] == ["forecast", "tides"]


def test_a_file_that_does_not_import_changes_nothing_until_it_does(file: Path) -> None:
    beside = file.parent / "beside.py"
    with client("serve", "weather.py", "--reload", home=file.parent) as peer:
        peer.open()
        file.write_text(SERVER.replace("forecast", "outlook") + "\nimport beside\n")
        assert "No module named 'beside'" in peer.told("ModuleNotFoundError: ")
        assert peer.call("forecast", city="Oslo") == "sun in Oslo", "the old tools stay"
        beside.write_text("broken(")
        peer.told("SyntaxError")
        beside.write_text("mended = True")
        peer.changed()
        assert peer.names() == ["outlook"]
        beside.write_text("raise RuntimeError('again')")
        peer.told("RuntimeError: again")
        assert peer.names() == ["outlook"]


def test_a_file_with_a_tool_that_the_server_has_itself_changes_nothing_until_it_has_not(file: Path) -> None:
    (file.parent / "handrail.toml").write_text("[sanitize]\nmax_text = 2000\n")  # which brings read_more along
    with client("serve", "weather.py", "--reload", home=file.parent) as peer:
        peer.open()
        file.write_text(SERVER.replace("sun", "rain") + "\n@server.tool\ndef read_more() -> str:\n    return 'no'\n")
        assert "'read_more' of its own; the tools stay as they were" in peer.told("the tools stay")
        assert peer.names() == ["forecast", "read_more"]
        assert peer.call("forecast", city="Oslo") == "sun in Oslo"
        file.write_text(SERVER.replace("sun", "snow"))
        peer.changed()
        assert peer.call("forecast", city="Oslo") == "snow in Oslo"


def test_modules_beside_the_file_are_followed(file: Path) -> None:
    package = file.parent / "parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("WORD = 'one'\n")
    file.write_text(SERVER + "from parts.words import WORD\n" + TELLS)
    with client("serve", "weather.py", "--reload", home=file.parent) as peer:
        peer.open()
        assert peer.call("word") == "one"
        (package / "words.py").write_text("WORD = 'two'\n")
        peer.changed()
        assert peer.call("word") == "two"
        (package / "words.py").write_text("broken(")
        peer.told("SyntaxError: ")
        assert peer.call("word") == "two"
        (package / "words.py").write_text("WORD = 'three'\n")
        peer.changed()
        assert peer.call("word") == "three"


LIVES = """
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from handrail import Call, Server

@asynccontextmanager
async def life(server):
    print("enter VERSION", file=sys.stderr)
    yield "VERSION"
    print("leave VERSION", file=sys.stderr)

server = Server("lives", lifespan=life)

@server.middleware
async def marked(call, next):
    print("through VERSION", file=sys.stderr)
    return await next(call)

@server.tool
def version(call: Call) -> str:
    return call.state

@server.tool
def waits(call: Call) -> str:
    print("waiting", file=sys.stderr)
    with open("gate") as gate:
        gate.read()
    return call.state
"""


def test_a_call_under_way_ends_in_the_version_it_began_in(tmp_path: Path) -> None:
    file = tmp_path / "lives.py"
    file.write_text(LIVES.replace("VERSION", "one"))
    os.mkfifo(tmp_path / "gate")
    with client("serve", "lives.py", "--reload", home=tmp_path) as peer:
        peer.open()
        peer.say("tools/call", {"name": "waits", "arguments": {}}, id="slow")
        peer.told("waiting")
        file.write_text(LIVES.replace("VERSION", "two"))
        peer.changed()
        assert peer.call("version") == "two"
        seen = peer.told("through two")
        assert "enter two" in seen
        assert "leave one" not in seen, "its lifespan is still needed"
        assert seen.count("through") == 1, "the old middleware is not around the new tools"
        (tmp_path / "gate").write_text("")
        done = peer.hear()
        assert (done["id"], done["result"]["content"][0]["text"]) == ("slow", "one")
        peer.told("leave one")


def test_a_lifespan_that_fails_keeps_the_old_tools(tmp_path: Path) -> None:
    file = tmp_path / "lives.py"
    file.write_text(LIVES.replace("VERSION", "one"))
    with client("serve", "lives.py", "--reload", home=tmp_path) as peer:
        peer.open()
        file.write_text(LIVES.replace('print("enter VERSION", file=sys.stderr)', "raise RuntimeError('no database')"))
        assert "the tools stay as they were" in peer.told("RuntimeError: no database")
        assert peer.call("version") == "one"
    file.write_text(LIVES.replace('print("enter VERSION", file=sys.stderr)', "raise RuntimeError('no database')"))
    ping = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": OPENING}) + "\n"
    done = handrail("serve", "lives.py", "--reload", home=tmp_path, stdin=ping)
    assert (done.returncode, done.stdout) == (70, ""), "nothing is served that has not begun"
    assert "RuntimeError: no database" in done.stderr


CANCELS = LIVES.replace('print("enter VERSION", file=sys.stderr)', "import asyncio; raise asyncio.CancelledError")


@pytest.mark.parametrize("more", [[], ["--reload"]], ids=["once", "reload"])
def test_a_lifespan_that_cancels_itself_ends_as_one_that_fails(tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "lives.py").write_text(CANCELS)
    done = handrail("serve", "lives.py", *more, home=tmp_path)
    assert (done.returncode, done.stdout) == (70, "")
    assert "cancelled" in done.stderr.lower()


def test_a_lifespan_that_cancels_itself_keeps_the_old_tools(tmp_path: Path) -> None:
    file = tmp_path / "lives.py"
    file.write_text(LIVES.replace("VERSION", "one"))
    with client("serve", "lives.py", "--reload", home=tmp_path) as peer:
        peer.open()
        file.write_text(CANCELS)
        assert "the tools stay as they were" in peer.told("the lifespan was cancelled")
        assert peer.call("version") == "one"
