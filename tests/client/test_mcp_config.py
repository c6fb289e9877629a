"""`mcpServers` files: what is understood, what is refused and in which words; and what a user has agreed to."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from handrail.client.mcp_config import MAX_BYTES, EntryError, ServerEntry, host_config_files, load, parse, read_entries
from handrail.client.state_dir import Consents, StateDirectory, StateError, state_folder, write_file
from requirements import requirement

posix = pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")


def one(value: Any, **environ: str) -> ServerEntry:
    (entry,) = read_entries({"mcpServers": {"x": value}}, environ)
    return entry


def problems(value: Any, **environ: str) -> list[str]:
    with pytest.raises(EntryError) as caught:
        read_entries(value, environ)
    return caught.value.problems


# What is understood


def test_a_command_and_addresses_are_read() -> None:
    document = {
        "mcpServers": {
            "files": {"command": "npx", "args": ["-y", "files", "/tmp"], "env": {"LEVEL": "2"}, "cwd": "/srv"},
            "web": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer x"}},
            "old": {"type": "sse", "url": "http://localhost:1/sse", "disabled": True},
            "surf": {"serverUrl": "https://example.com/mcp"},
            "stream": {"type": "streamable-http", "url": "https://example.com/mcp", "unknown": {"to": "us"}},
        }
    }
    assert read_entries(document, {}) == [
        ServerEntry(name="files", kind="stdio", command=("npx", "-y", "files", "/tmp"), env={"LEVEL": "2"}, cwd="/srv"),
        ServerEntry(name="web", kind="http", url="https://example.com/mcp", headers={"Authorization": "Bearer x"}),
        ServerEntry(name="old", kind="sse", url="http://localhost:1/sse", disabled=True),
        ServerEntry(name="surf", kind="http", url="https://example.com/mcp"),
        ServerEntry(name="stream", kind="http", url="https://example.com/mcp"),
    ]


def test_the_form_of_vs_code_and_a_bare_entry_are_read() -> None:
    assert [each.name for each in read_entries({"servers": {"a": {"command": "b"}}, "inputs": []}, {})] == ["a"]
    assert read_entries({"command": "b"}, {}) == [ServerEntry(name="server", kind="stdio", command=("b",))]


def test_a_file_is_where_its_commands_start_from(tmp_path: Path) -> None:
    file = tmp_path / "weather.json"
    file.write_text('\ufeff{"command": "./run", "cwd": "sub"}', "utf-8")
    assert read_entries(file, {}) == [
        ServerEntry(name="weather", kind="stdio", command=("./run",), cwd=str(tmp_path / "sub"), source=str(file))
    ]
    (tmp_path / ".vscode").mkdir()
    inside = tmp_path / ".vscode" / "mcp.json"
    inside.write_text('{"servers": {"a": {"command": "b"}}}')
    assert read_entries(str(inside), {})[0].cwd == str(tmp_path)


def test_comments_and_last_commas_are_forgiven(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text("""{
        // servers "of" mine
        "servers": { /* one
            only */ "a": {"command": "x", "args": ["// no, /* text */ ,]", "b",],},
        },
    }""")
    assert read_entries(file, {})[0].command == ("x", "// no, /* text */ ,]", "b")


@given(st.text(st.sampled_from('{}[]",:/*\\\n a1'), max_size=60))
def test_whatever_the_text_it_is_read_as_json_or_refused(text: str) -> None:
    try:
        strict = [json.loads(text)]
    except ValueError:
        strict = []
    try:
        read = [parse(text)]
    except ValueError as problem:
        read = strict if "twice" in str(problem) else []
    assert read == strict or not strict


@pytest.mark.parametrize(("start", "piece"), [("", "/*"), ('"', '\\"'), ("", '"'), ("", ","), ("", "[")])
def test_a_megabyte_of_nonsense_is_refused_in_a_moment(start: str, piece: str) -> None:
    text = start + piece * (MAX_BYTES // len(piece))
    began = time.process_time()
    with pytest.raises(ValueError, match=r"not JSON|too deeply"):
        parse(text)
    assert time.process_time() - began < 10


# Variables


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("${A}", "one"),
        ("x${A}y${B}z", "xoneytwoz"),
        ("${env:A}", "one"),
        ("${A:-other}", "one"),
        ("${NONE:-other}", "other"),
        ("${NONE:-}", ""),
        ("${EMPTY:-other}", "other"),
        ("${EMPTY}", ""),
        ("$A and $ {A} stay", "$A and $ {A} stay"),
        ("${LOOKS}", "${A}"),  # what a variable holds is not read once more
    ],
)
def test_variables_are_filled_in_everywhere(text: str, read: str) -> None:
    environ = {"A": "one", "B": "two", "EMPTY": "", "LOOKS": "${A}"}
    made = one({"command": "c" + text, "args": [text], "env": {"V": text}, "cwd": "/" + text}, **environ)
    assert (made.command, made.env, made.cwd) == (("c" + read, read), {"V": read}, "/" + read)
    web = one({"url": "https://x/" + text, "headers": {"H": text}}, **environ)
    assert (web.url, web.headers) == ("https://x/" + read, {"H": read})


def test_all_that_is_missing_is_named_at_once_with_its_place() -> None:
    document = {
        "mcpServers": {
            "a": {"command": "${PROGRAM}", "args": ["x", "${A/}", "${ONE}"]},
            "b~/c": {"url": "https://x", "headers": {"Key": "${input:key}"}},
            "off": {"command": "${WHATEVER}", "disabled": True},
        }
    }
    assert problems(document, ONE="1") == [
        "/mcpServers/a/command: the variable PROGRAM is not set",
        "/mcpServers/a/args/1: the variable A/ is not set",
        "/mcpServers/b~0~1c/headers/Key: the variable input:key is not set",
    ]
    entries, missing = load(document, {})
    assert [entry.name for entry in entries] == ["a", "b~/c", "off"]
    assert [(each.variable, each.entry) for each in missing][-2:] == [("input:key", "b~/c"), ("WHATEVER", "off")]
    entries, missing = load(document, None)
    assert entries[0].command == ("${PROGRAM}", "x", "${A/}", "${ONE}"), "nothing is filled in"
    assert missing == []


def test_a_variable_inside_another_is_no_half_measure() -> None:
    assert "inside another" in problems({"command": "x", "args": ["${A:-${B}}"]}, B="b")[0]
    assert "inside another" in problems({"command": "x${A"})[0]


# What is refused


WRONG: dict[str, tuple[Any, str]] = {
    "nothing in it": ({"mcp": {}}, 'no servers: {"mcpServers"'),
    "servers in a list": ({"mcpServers": []}, "/mcpServers: [] is not an object with a server under each name"),
    "no servers but null": ({"mcpServers": None}, "/mcpServers: null is not an object with a server under each name"),
    "an entry that is a text": ({"mcpServers": {"x": "npx"}}, '/mcpServers/x: "npx" is not an object such as'),
    "neither": ({"mcpServers": {"x": {}}}, '/mcpServers/x: neither "command" nor "url"'),
    "both": ({"mcpServers": {"x": {"command": "a", "url": "http://b"}}}, '/mcpServers/x: both "command" and "url"'),
    "a type unheard of": ({"mcpServers": {"x": {"type": "ws", "url": "x"}}}, '/type: "ws" is not stdio, http or sse'),
    "http without an address": ({"mcpServers": {"x": {"type": "http", "command": "y"}}}, '"url" is not there'),
    "a command line": ({"mcpServers": {"x": {"command": ["a", "b"]}}}, '/command: ["a", "b"] is not a text'),
    "an empty command": ({"mcpServers": {"x": {"command": " "}}}, "is not the name or the path of a program"),
    "an option as program": ({"mcpServers": {"x": {"command": "--rm"}}}, "is not the name or the path of a program"),
    "args in one text": ({"command": "x", "args": "-y z"}, '/args: "-y z" is not an array of texts'),
    "a number in args": ({"command": "x", "args": ["a", 1]}, "/args/1: 1 is not a text"),
    "a new line in args": ({"command": "x", "args": ["a\nb"]}, "/args/0: has a new line"),
    "a new line from a variable": ({"command": "x", "args": ["${NL}"]}, "/args/0: has a new line"),
    "a NUL": ({"command": "x\0y"}, "/command: has a new line or U+0000"),
    "a NUL in env": ({"command": "x", "env": {"A": "\0"}}, "/env/A: has a character that no variable can have"),
    "a name no variable has": ({"command": "x", "env": {"A=B": ""}}, "'A=B' is not the name of a variable"),
    "env in a list": ({"command": "x", "env": ["A=1"]}, '/env: ["A=1"] is not an object of texts'),
    "another scheme": ({"url": "file:///etc/passwd"}, "/url: \"file:///etc/passwd\" is not an address that begins"),
    "a header in a header": ({"url": "http://x", "headers": {"A": "b\r\nC: d"}}, "/headers/A: has a new line"),
    "no name of a header": ({"url": "http://x", "headers": {"A b": "c"}}, "'A b' is not the name of a header"),
    "a folder of two lines": ({"command": "x", "cwd": "/a\n/b"}, "/cwd: has a new line"),
    "a type that is a list": ({"command": "x", "type": ["x"]}, '/type: ["x"] is not stdio, http or sse'),
    "disabled by a text": ({"command": "x", "disabled": "yes"}, '/disabled: "yes" is not true or false'),
    "a batch file with a meaning": ({"command": "x.CMD", "args": ["a&calc"]}, "a batch file gets no arguments"),
    "a name of two lines": ({"mcpServers": {"a\nb": {"command": "x"}}}, "has only characters that can be seen"),
}  # fmt: skip


@requirement("P-28", everywhere=True)
@pytest.mark.parametrize(("document", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_with_its_place_and_what_would_be_right(document: Any, words: str) -> None:
    assert words in "\n".join(problems(document, NL="a\nb"))


@requirement("P-28", everywhere=True)
@given(st.lists(st.text(st.characters(exclude_characters="\0\r\n$"), max_size=8), max_size=4))
def test_arguments_reach_the_program_as_they_are_written(args: list[str]) -> None:
    assert one({"command": "run", "args": args}).command == ("run", *args)


@requirement("P-34", everywhere=True)
def test_a_value_that_is_wrong_and_secret_is_not_repeated() -> None:
    document = {"command": "x", "env": {"API_KEY": ["canary"]}}
    assert "canary" not in "".join(problems(document))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"command": "a", "command": "b"}', "the name 'command' occurs twice"),
        (b'{"command": "\xff"}', "not a text in UTF-8"),
        (b" " * (MAX_BYTES + 1), "over 1,048,576 bytes"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", r"the document: \[\] is not an object"),
    ],
    ids=["cut", "NaN", "twice", "latin-1", "long", "deep", "list"],
)
def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_bytes(content)
    with pytest.raises(EntryError, match=words) as caught:
        read_entries(file, {})
    assert str(caught.value).startswith(str(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EntryError, match=r"gone\.json: cannot be read: No such file"):
        read_entries(tmp_path / "gone.json", {})


@pytest.mark.parametrize(
    ("platform", "environ", "first"),
    [
        (
            "darwin",
            {"HOME": "/Users/me"},
            ("claude", "/Users/me/Library/Application Support/Claude/claude_desktop_config.json"),
        ),
        (
            "win32",
            {"USERPROFILE": "/me", "APPDATA": "/me/Roaming"},
            ("claude", "/me/Roaming/Claude/claude_desktop_config.json"),
        ),
        ("linux", {"HOME": "/home/me"}, ("claude-code", "/project/.mcp.json")),
    ],
)
def test_the_usual_places(platform: str, environ: dict[str, str], first: tuple[str, str]) -> None:
    places = [(host, path.as_posix()) for host, path in host_config_files(environ, platform, Path("/project"))]
    assert places[0] == first
    assert ("vscode", "/project/.vscode/mcp.json") in places
    assert {host for host, _ in places} >= {"claude-code", "cursor", "vscode", "windsurf"}


# The folder


def test_the_folder_is_where_the_platform_keeps_such_files() -> None:
    assert state_folder({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "linux") == Path("/x/handrail")
    assert state_folder({"XDG_STATE_HOME": "x", "HOME": "/h"}, "linux") == Path("/h/.local/state/handrail")
    assert state_folder({"HOME": "/h"}, "darwin") == Path("/h/Library/Application Support/handrail")
    assert state_folder({"LOCALAPPDATA": "/l"}, "win32") == Path("/l/handrail")


@posix
def test_folder_and_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        state = StateDirectory(tmp_path / "a" / "handrail")
        assert state.read("x.json") is None
        assert not state.folder.exists(), "reading makes nothing"
        state.write("x.json", {"a": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE(state.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in state.folder.iterdir()} == {0o600}
    assert state.read("x.json") == {"a": 1}


@posix
@requirement("P-28", everywhere=True)
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    state = StateDirectory(tmp_path / "handrail")
    state.write("x.json", 1)
    state.folder.chmod(mode)
    for use in (lambda: state.read("x.json"), lambda: state.write("x.json", 2)):
        with pytest.raises(StateError, match="others can write to it; chmod 700"):
            use()


@posix
@requirement("P-28", everywhere=True)
def test_a_folder_of_somebody_else_or_a_link_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDirectory(tmp_path / "handrail")
    state.write("x.json", 1)
    (tmp_path / "link").symlink_to(state.folder)
    with pytest.raises(StateError, match="a link"):
        StateDirectory(tmp_path / "link").read("x.json")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StateError, match="belongs to another user"):
        state.read("x.json")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x"
    sizes, over = set(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            sizes.add(len(file.read_bytes()))

    write_file(file, b"a" * 100_000)
    thread = threading.Thread(target=watch)
    thread.start()
    for i in range(50):
        write_file(file, b"b" * (100_000 + i % 2))
    over.set()
    thread.join()
    assert sizes <= {100_000, 100_001}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_file(tmp_path / "folder", b"x")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "x"], "nothing is left beside them"


def test_a_broken_file_is_as_good_as_none(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "handrail")
    state.write("x.json", 1)
    (state.folder / "x.json").write_bytes(b"{\xff")
    assert state.read("x.json") is None


# Consent


ENTRY = ServerEntry(
    name="files", kind="stdio", command=("npx", "-y", "files"), env={"KEY": "v"}, cwd="/srv", source="/home/me/mcp.json"
)
WEB = ServerEntry(name="web", kind="http", url="https://x", headers={"Authorization": "a"}, source="/home/me/mcp.json")
CHANGES: dict[str, tuple[ServerEntry, dict[str, Any]]] = {
    "program": (ENTRY, {"command": ("npx2", "-y", "files")}),
    "argument": (ENTRY, {"command": ("npx", "-y", "files", "--all")}),
    "border of arguments": (ENTRY, {"command": ("npx", "-y files")}),
    "folder": (ENTRY, {"cwd": "/tmp"}),
    "variable": (ENTRY, {"env": {"KEY": "v", "LD_PRELOAD": "x"}}),
    "value": (ENTRY, {"env": {"KEY": "w"}}),
    "file": (ENTRY, {"source": "/home/me/project/mcp.json"}),
    "address": (WEB, {"url": "https://y"}),
    "header": (WEB, {"headers": {"Authorization": "b"}}),
}


@requirement("P-28", everywhere=True)
@pytest.mark.parametrize(("entry", "change"), CHANGES.values(), ids=CHANGES)
def test_what_was_agreed_to_holds_until_it_changes(tmp_path: Path, entry: ServerEntry, change: dict[str, Any]) -> None:
    consents = Consents(StateDirectory(tmp_path / "handrail"))
    assert not consents.has_consent(entry)
    consents.add(entry)
    assert Consents(StateDirectory(tmp_path / "handrail")).has_consent(entry), "also in the next process"
    other = replace(entry, **change)
    assert not consents.has_consent(other)
    consents.add(other)
    assert consents.has_consent(other)
    assert consents.has_consent(entry) is ("source" in change), "the last that was agreed to counts, for each file"


@requirement("P-28", "P-34", everywhere=True)
def test_a_consent_keeps_no_secret_and_cannot_be_a_path(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "handrail")
    Consents(state).add(replace(ENTRY, name="../../evil", env={"KEY": "canary-1"}, command=("x", "canary-2")))
    (file,) = state.folder.iterdir()
    assert "canary" not in file.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["handrail"]
