"""The verbs about resources and prompts: what they print, as people read it and as JSON, and how they end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cli_runs import handrail
from requirements import requirement

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000a49444154789c6360000002"
    "000154a24f5f0000000049454e44ae426082"
)
SERVER = f'''
from typing import Literal
from handrail import Image, PromptMessage, Server, ToolError
from handrail.guards import Policy, Rule

server = Server("notes", sanitize=None, policy=Policy([Rule(verdict="deny", uri="note://secret/*")]))
NAMES = ["ada", "alan", "grace\\x1b[31m"]


@server.resource("note://today", title="Today", mime_type="text/markdown", size=11)
def today() -> str:
    """What is on.\\x1b[31m"""
    return "# Today\\x1b[2J"


@server.resource("image://dot", mime_type="image/png")
def dot() -> bytes:
    return bytes.fromhex("{PNG.hex()}")


@server.resource("note://both")
def both() -> list[str | bytes]:
    return ["one", b"\\x00\\x01"]


def names(value):
    return [each for each in NAMES if each.startswith(value)]


@server.resource("note://{{folder}}/{{name}}", complete={{"name": names}})
def note(folder: str, name: str) -> str:
    """A note."""
    if name == "broken":
        raise ToolError("It is torn.")
    return f"{{name}} in {{folder}}"


@server.prompt(complete={{"author": lambda value, context: [f"{{context.get('style', '-')}} {{value}}"]}})
def review(code: str, style: Literal["short", "long"] = "short", author: str = "") -> list[PromptMessage]:
    """Ask for a review."""
    return [PromptMessage("user", f"Review, {{style}}: {{code}}\\x1b[2J"), PromptMessage("assistant", "Gladly.")]


@server.prompt
def chart() -> Image:
    return Image(bytes.fromhex("{PNG.hex()}"), "image/png")


server.run()
'''  # what the terminal is sent may act


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "notes.py").write_text(SERVER, "utf-8")
    return tmp_path


@requirement("APP-30", "APP-08", "P-33", everywhere=True)
def test_lists_are_printed_inert_and_as_json(home: Path) -> None:
    done = handrail("resources", "notes.py", home=home)
    assert done.returncode == 0, done.stderr
    rows = [line.split(None, 1) for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["note://today", "image://dot", "note://both", "note://{folder}/{name}"]
    assert rows[0][1] == "Today: What is on.\\x1b[31m (text/markdown, 11 bytes)"
    listed = json.loads(handrail("resources", "notes.py", "--json", home=home).stdout)
    assert [each["uri"] for each in listed["resources"]] == ["note://today", "image://dot", "note://both"]
    assert [each["uriTemplate"] for each in listed["resourceTemplates"]] == ["note://{folder}/{name}"]

    prompts = handrail("prompts", "notes.py", home=home)
    assert prompts.stdout.splitlines()[0].startswith("review(code, style?, author?)  Ask for a review.")
    shown = json.loads(handrail("prompts", "notes.py", "--json", home=home).stdout)
    assert [each["name"] for each in shown["prompts"]] == ["review", "chart"]
    assert "\x1b" not in done.stdout + done.stderr + prompts.stdout + prompts.stderr


@requirement("APP-30", "APP-18", everywhere=True)
@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (["read", "note://today"], 0, "# Today\\x1b[2J\n", ""),
        (["read", "NOTE://today"], 0, "# Today\\x1b[2J\n", ""),
        (["read", "note://home/ada"], 0, "ada in home\n", ""),
        (["read", "note://both"], 0, "note://both:\none\napplication/octet-stream, 2 bytes: ", ""),
        (["read", "no:such"], 3, "", "`handrail resources` lists what there is"),
        (["read", "today"], 2, "", "no resource of the URI 'today'; did you mean note://today?"),
        (["read", ""], 2, "", "the URI is an empty text"),
        (["read", "note://{folder}/{name}"], 2, "", "is a template; put values in place of {folder}, {name}"),
        (["read", "note://both", "--json", "--save", "out"], 2, "", "--json and --save: choose one of them"),
        (["read", "note://home/broken"], 3, "", "It is torn."),
        (["read", "note://home/../x"], 3, "", "Resource not found"),
        (["read", "note://secret/x"], 5, "", "note://secret/x is not allowed"),
        (["prompt", "review", "code=x = 1"], 0, "user:\nReview, short: x = 1\\x1b[2J\nassistant:\nGladly.\n", ""),
        (["prompt", "review", "--arguments", '{"code": "y"}', "style=long"], 0, "user:\nReview, long: y", ""),
        (["prompt", "review"], 2, "", "code"),
        (["prompt", "review", "cod=x"], 2, "", "did you mean code?"),
        (["prompt", "review", "code=x", "style=wide"], 3, "", "style"),
        (["prompt", "revue"], 2, "", "no prompt 'revue'; did you mean review?"),
        (["complete", "review", "style"], 0, "short\nlong\n", ""),
        (["complete", "review", "style", "s"], 0, "short\n", ""),
        (["complete", "review", "author", "a", "--known", "style=long"], 0, "long a\n", ""),
        (["complete", "note://{folder}/{name}", "name", "g"], 0, "grace\\x1b[31m\n", ""),
        (["complete", "note://{folder}/{name}", "folder"], 0, "", "no values"),
        (["complete", "review", "colour"], 3, "", "has no argument"),
        (["complete", "revue", "style"], 2, "", "did you mean review?"),
        (["complete", "note://home/ada", "name"], 2, "", "as `handrail resources` prints it: note://{folder}/{name}"),
    ],
)
def test_every_verb_prints_its_result_and_has_a_code(
    home: Path, words: list[str], code: int, out: str, err: str
) -> None:
    verb, *rest = words
    done = handrail(verb, "notes.py", *rest, home=home)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(out) if out else done.stdout == ""
    assert err in done.stderr and (err or not done.stderr)
    assert "\x1b" not in done.stdout + done.stderr


@requirement("APP-30", "APP-18", everywhere=True)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["read", "note://home/ada"], {"contents": [{"uri": "note://home/ada", "text": "ada in home"}]}),
        (["prompt", "review", "code=x"], {"messages": [{"role": "user"}, {"role": "assistant"}]}),
        (["complete", "review", "style", "l"], {"values": ["long"], "total": 1, "hasMore": False}),
    ],
)
def test_programs_get_json(home: Path, words: list[str], expected: object) -> None:
    verb, *rest = words
    done = handrail(verb, "notes.py", *rest, "--json", home=home)
    assert done.returncode == 0, done.stderr
    assert _has(json.loads(done.stdout), expected), done.stdout
    failed = handrail("read", "notes.py", "no:such", "--json", home=home)
    error = json.loads(failed.stderr.splitlines()[-1])["error"]
    assert (failed.returncode, error["code"], error["kind"]) == (3, 3, "protocol")


def _has(value: object, expected: object) -> bool:
    """Whether a value has all that is expected; it may have more members."""
    if isinstance(expected, dict):
        return isinstance(value, dict) and all(_has(value.get(key), each) for key, each in expected.items())
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_has, value, expected))
    return value == expected


@requirement("APP-30", "APP-15", everywhere=True)
def test_what_is_not_text_goes_to_a_file_that_overwrites_none(home: Path) -> None:
    for name in ("result-0.png", "result-0-1.png"):
        done = handrail("read", "notes.py", "image://dot", "--save", "out", home=home)
        assert done.returncode == 0, done.stderr
        assert name in done.stdout
        assert (home / "out" / name).read_bytes() == PNG
    texts = handrail("read", "notes.py", "note://today", "--save", "texts", home=home)
    assert "result-0.md" in texts.stdout
    assert (home / "texts" / "result-0.md").read_bytes() == b"# Today\x1b[2J"
    chart = handrail("prompt", "notes.py", "chart", "--save", "out", home=home)
    assert chart.stdout.startswith("user:\n") and "result-0-2.png" in chart.stdout


TOOLS_ONLY = """
from handrail import Server
server = Server("tools")
server.run()
"""
ODD = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    answers = {
        "initialize": {"protocolVersion": "2025-11-25", "serverInfo": {"name": "odd", "version": "1"},
                       "capabilities": {"resources": {}}},
        "resources/list": {"resources": 7},
        "resources/templates/list": {"resourceTemplates": [{"uriTemplate": "x://{a}", "name": "x"}]},
        "resources/read": {"contents": [{"uri": "one\\x1b", "text": "1"}, {"uri": "two", "text": "2"}, *[5] * 1000]},
    }
    if "id" in message:
        result = answers.get(message["method"])
        answer = {"error": {"code": -32601, "message": "no"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
"""


@requirement("APP-30", "APP-18", everywhere=True)
@pytest.mark.parametrize("verb", ["resources", "prompts", "list"])
def test_what_a_server_does_not_have_is_an_empty_list(tmp_path: Path, verb: str) -> None:
    (tmp_path / "tools.py").write_text(TOOLS_ONLY, "utf-8")
    done = handrail(verb, "tools.py", home=tmp_path)
    expected = f"no {verb if verb != 'list' else 'tools'}"
    assert done.returncode == 0 and expected in done.stderr and done.stdout == ""


@requirement("APP-30", "P-33", everywhere=True)
def test_contents_with_odd_uris_and_many_problems_are_printed(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD, "utf-8")
    done = handrail("read", f"{sys.executable} odd.py", "x:1", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one\\x1b:\n1\ntwo:\n2\n"
    notes = [line for line in done.stderr.splitlines() if line.startswith("handrail: ")]
    assert len(notes) == 11 and notes[-1] == "handrail: and 990 more problems"


@requirement("APP-30", everywhere=True)
def test_a_server_that_does_not_list_its_resources_is_named(home: Path) -> None:
    (home / "odd.py").write_text(ODD, "utf-8")
    servers = {name: {"command": sys.executable, "args": [str(home / f"{name}.py")]} for name in ("notes", "odd")}
    (home / "servers.json").write_text(json.dumps({"mcpServers": servers}), "utf-8")
    done = handrail("resources", "servers.json", "--yes", home=home)
    assert "note://today" in done.stdout and "x://{a}" in done.stdout
    assert "odd: resources/list: there is no list of resources" in done.stderr
    shown = json.loads(handrail("resources", "servers.json", "--yes", "--json", home=home).stdout)
    assert [*shown["problems"]] == ["odd"]


@requirement("APP-30", everywhere=True)
def test_inspect_counts_all_that_a_server_has(home: Path) -> None:
    shown = json.loads(handrail("inspect", "notes.py", "--json", home=home).stdout)
    counts = {name: shown[name] for name in ("tools", "resources", "templates", "prompts")}
    assert counts == {"tools": 0, "resources": 3, "templates": 1, "prompts": 2}


@requirement("APP-30", everywhere=True)
@pytest.mark.parametrize(
    ("words", "code", "out"),
    [
        (["read", "note://home/ada"], 0, "allow"),
        (["read", "note://secret/x"], 5, "uri"),
        (["prompt", "review", "code=x"], 0, "allow"),
    ],
)
def test_the_decision_about_a_read_or_a_prompt_is_explained(home: Path, words: list[str], code: int, out: str) -> None:
    done = handrail("explain", "--server", "notes.py", *words, home=home)
    assert done.returncode == code, done.stderr
    assert out in done.stderr
