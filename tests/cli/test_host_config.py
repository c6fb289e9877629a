"""`handrail config` reads what hosts are configured with; `handrail install` adds to it, and changes nothing else."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cli_runs import COMMAND, Terminal, handrail
from handrail.cli.host_config import _with_entry
from handrail.client.mcp_config import read_entries
from handrail.model import Object
from requirements import requirement

SERVER = "from handrail import Server\nserver = Server('weather')\n"

CONFIG = {
    "mcpServers": {
        "files": {
            "command": "npx",
            "args": ["-y", "files", "--token", "canary-a", "a b"],
            "env": {"API_KEY": "canary-b"},
        },
        "web": {"url": "https://u:canary-c@x/mcp?api_key=canary-d", "headers": {"Authorization": "Bearer ${HOOK}"}},
        "off": {"command": "x${NEVER}", "disabled": True},
        "given": {"command": "run", "env": {"TOKEN": "${GIVEN}", "LEVEL": "3"}},
    }
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "weather.py").write_text(SERVER)
    return tmp_path


@pytest.fixture
def project(home: Path) -> Path:
    (home / "project").mkdir()
    return home / "project"


# config


@requirement("P-34", everywhere=True)
def test_servers_of_a_file_are_listed_without_their_secrets(home: Path) -> None:
    (home / "mcp.json").write_text(json.dumps(CONFIG))
    done = handrail("config", "mcp.json", home=home, env={"GIVEN": "canary-e"})
    assert done.returncode == 2, "something is missing"
    assert "files  stdio     npx -y files --token **** 'a b'" in done.stdout
    assert "missing: HOOK is not set (/mcpServers/web/headers/Authorization)" in done.stdout
    assert "NEVER" not in done.stdout.replace("x${NEVER}", ""), "what is disabled misses nothing"
    told = handrail("config", "mcp.json", "--json", home=home, env={"GIVEN": "canary-e"})
    (file,) = json.loads(told.stdout)["files"]
    servers = {each["name"]: each for each in file["servers"]}
    assert servers["files"]["env"] == {"API_KEY": "****"}
    assert servers["web"]["url"] == "https://u:****@x/mcp?api_key=****"
    assert servers["web"]["missing"] == [{"variable": "HOOK", "where": "/mcpServers/web/headers/Authorization"}]
    assert servers["given"]["env"] == {"TOKEN": "${GIVEN}", "LEVEL": "****"}, "where a value comes from, not the value"
    assert "canary" not in done.stdout + done.stderr + told.stdout + told.stderr
    assert handrail("config", "mcp.json", home=home, env={"GIVEN": "x", "HOOK": "y"}).returncode == 0


def test_the_files_of_the_usual_hosts_are_found(project: Path, home: Path) -> None:
    (home / ".cursor").mkdir()
    (home / ".cursor" / "mcp.json").write_text(json.dumps({"mcpServers": {"one": {"command": "a"}}}))
    (project / ".vscode").mkdir()
    (project / ".vscode" / "mcp.json").write_text('{"servers": {"two": {"command": "b"}}, /* mine */ "inputs": [],}')
    (home / ".claude.json").write_text('{"other": "things"}')
    (project / ".mcp.json").write_text('{"mcpServers": {"x": {"command": 5}}}')
    done = handrail("config", "--json", home=home, cwd=project)
    assert done.returncode == 2
    files = {
        (each["host"], Path(each["path"]).relative_to(home).as_posix()): each
        for each in json.loads(done.stdout)["files"]
    }
    names = {key: [server["name"] for server in each["servers"]] for key, each in files.items()}
    assert names == {
        ("claude-code", "project/.mcp.json"): [],
        ("claude-code", ".claude.json"): [],
        ("cursor", ".cursor/mcp.json"): ["one"],
        ("vscode", "project/.vscode/mcp.json"): ["two"],
    }
    assert files["claude-code", "project/.mcp.json"]["problems"] == ["/mcpServers/x/command: 5 is not a text"]
    shown = handrail("config", home=home, cwd=project).stdout
    assert "wrong: /mcpServers/x/command: 5 is not a text" in shown
    assert "no servers" in shown


def test_nothing_to_list_is_said(home: Path) -> None:
    done = handrail("config", home=home)
    assert (done.returncode, done.stdout) == (0, "")
    assert "no host is configured on this machine" in done.stderr
    assert handrail("config", "gone.json", home=home).returncode == 2


@requirement("P-33", "APP-08", everywhere=True)
def test_names_and_commands_of_a_file_cannot_act_on_the_terminal(home: Path) -> None:
    evil = "\x1b[2J\u202e\x9b"
    (home / "mcp.json").write_text(
        json.dumps({"mcpServers": {evil: {"command": evil, "env": {evil: evil}}, "b" + evil: {"command": 1}}})
    )
    (home / "fine.json").write_text(
        json.dumps({"mcpServers": {evil: {"command": evil, "args": [evil, "${X" + evil + "}"]}}})
    )
    for words in (["config", "mcp.json"], ["config", "fine.json"], ["config", "fine.json", "--json"]):
        done = handrail(*words, home=home)
        assert not {"\x1b", "\u202e", "\x9b"} & set(done.stdout + done.stderr)


# install


def entry_of(file: Path, name: str = "weather", table: str = "mcpServers") -> Object:
    found: Object = json.loads(file.read_text("utf-8"))[table][name]
    return found


@requirement("P-28", everywhere=True)
def test_an_entry_is_an_argument_vector_that_starts_the_server(home: Path) -> None:
    done = handrail("install", "weather.py", "--host", "cursor", "--yes", home=home)
    assert done.returncode == 0, done.stderr
    file = home / ".cursor" / "mcp.json"
    assert entry_of(file) == {"command": sys.executable, "args": ["-m", "handrail", "serve", str(home / "weather.py")]}
    assert '+    "weather": {' in done.stderr, "the difference is shown, whoever agreed to it"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (entry,) = read_entries(file, {})
    assert entry.command == (sys.executable, "-m", "handrail", "serve", str(home / "weather.py"))
    again = handrail("install", "weather.py", "--host", "cursor", home=home)
    assert (again.returncode, again.stdout) == (0, f"weather was already in {file}\n")


@pytest.mark.parametrize(
    ("host", "place", "table"),
    [
        ("claude-code", "project/.mcp.json", "mcpServers"),
        ("vscode", "project/.vscode/mcp.json", "servers"),
        ("windsurf", ".codeium/windsurf/mcp_config.json", "mcpServers"),
    ],
)
def test_each_host_has_its_place_and_form(home: Path, project: Path, host: str, place: str, table: str) -> None:
    target = str(home / "weather.py") + ":server"
    done = handrail(
        "install", target, "--host", host, "--name", "my weather", "--yes", "--json", home=home, cwd=project
    )
    told = json.loads(done.stdout)
    assert (told["file"], told["written"], told["backup"]) == (str(home / place), True, "")
    assert entry_of(home / place, "my weather", table)["args"][-1] == target
    assert told["entry"] == entry_of(home / place, "my weather", table)


@pytest.mark.skipif(sys.platform != "linux", reason="there it has no place")
def test_a_host_without_a_known_place_needs_a_file(home: Path) -> None:
    done = handrail("install", "weather.py", "--host", "claude", home=home)
    assert (done.returncode, "name it with --file" in done.stderr) == (2, True)
    assert handrail("install", "weather.py", "--host", "claude", "--file", "c.json", "--yes", home=home).returncode == 0
    assert "weather" in (home / "c.json").read_text()


def test_the_rest_of_the_file_stays_as_it_was_and_is_kept_beside(home: Path) -> None:
    before = '{\r\n\t"theme" : "dark",  "mcpServers":{ "other": {"command":"x",   "args":[1,2]} }\r\n}'
    file = home / "real.json"
    file.write_bytes(before.encode())
    file.chmod(0o640)
    (home / "link.json").symlink_to(file)
    done = handrail("install", "weather.py", "--host", "cursor", "--file", "link.json", "--yes", home=home)
    assert done.returncode == 0, done.stderr
    after = file.read_bytes().decode()
    start, end = before.split(" }\r\n}")[0], " }\r\n}"
    assert after.startswith(start + ',\r\n\t\t"weather": {\r\n\t\t\t"command": ')
    assert after.endswith(end)
    assert (home / "link.json").is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    backup = home / "real.json.before-handrail"
    assert backup.read_bytes().decode() == before
    assert stat.S_IMODE(backup.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"mcpServers": {} // mine\n}', "has comments or a comma too many, which would not survive; add by hand to"),
        ('{"mcpServers": {},}', "has comments or a comma too many"),
        ('{"mcpServers": ', "not JSON: Expecting value"),
        ("[]", "not an object with one under 'mcpServers'"),
        ('{"mcpServers": []}', "not an object with one under 'mcpServers'"),
        ('{"a": 1, "a": 2, "mcpServers": {}}', "the name 'a' occurs twice in one object; mend it first"),
    ],
)
def test_a_file_that_cannot_be_changed_safely_is_not_touched(home: Path, content: str, told: str) -> None:
    file = home / "x.json"
    file.write_text(content)
    done = handrail("install", "weather.py", "--host", "cursor", "--file", "x.json", "--yes", home=home)
    assert done.returncode == 2
    assert told in done.stderr
    assert file.read_text() == content
    assert {each.name for each in home.iterdir()} <= {"weather.py", "x.json", "__pycache__"}


@requirement("P-28", everywhere=True)
def test_without_a_terminal_and_without_yes_nothing_is_written(home: Path) -> None:
    done = handrail("install", "weather.py", "--host", "cursor", home=home, stdin="y\n")
    assert done.returncode == 5
    assert "nothing was written" in done.stderr
    assert not (home / ".cursor").exists()


@requirement("P-28", everywhere=True)
@pytest.mark.parametrize("name", ["a;rm -rf /", "-x", "$(id)", "a\nb", " ", "x" * 65, "a&b"], ids=ascii)
def test_a_name_that_could_mean_something_else_is_refused(home: Path, name: str) -> None:
    done = handrail("install", "weather.py", "--host", "cursor", f"--name={name}", "--yes", home=home)
    assert done.returncode == 2
    assert "is not a name of letters" in done.stderr
    assert not (home / ".cursor").exists()


@requirement("P-34", everywhere=True)
def test_the_difference_shows_no_secret_of_a_neighbour(home: Path) -> None:
    file = home / "x.json"
    file.write_text('{\n  "mcpServers": {\n    "a": {\n      "env": {"API_KEY": "canary"}\n    }\n  }\n}\n')
    done = handrail("install", "weather.py", "--host", "cursor", "--file", "x.json", "--yes", home=home)
    assert '"API_KEY": "****"' in done.stderr
    assert "canary" not in done.stdout + done.stderr
    assert "canary" in file.read_text()


def test_a_server_is_installed_with_its_guards(home: Path) -> None:
    (home / "handrail.toml").write_text('[access]\ndefault = "deny"\n')
    done = handrail("install", "weather.py", "--host", "cursor", "--file", "x.json", "--yes", home=home)
    assert done.returncode == 0, done.stderr
    [entry] = json.loads((home / "x.json").read_text())["mcpServers"].values()
    assert entry["args"][-2:] == ["--config", str((home / "handrail.toml").resolve())]


def test_what_cannot_be_served_is_not_installed(home: Path) -> None:
    (home / "bad.py").write_text("1/0")
    done = handrail("install", "bad.py", "--host", "cursor", "--yes", home=home)
    assert done.returncode == 2
    assert not (home / ".cursor").exists()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    st.none() | st.dictionaries(st.text(max_size=5) | st.just("new"), json_values, max_size=3),
    st.sampled_from([None, 0, 2, "\t"]),
    st.booleans(),
)
def test_whatever_the_file_only_the_entry_changes(document: Object, servers: Any, indent: Any, first: bool) -> None:
    document.pop("mcpServers", None)
    if servers is not None:
        document = {"mcpServers": servers, **document} if first else {**document, "mcpServers": servers}
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    made = _with_entry(text, "mcpServers", "new", {"command": "x", "args": []}, Path("f"))
    assert json.loads(made) == {**document, "mcpServers": {**(servers or {}), "new": {"command": "x", "args": []}}}
    if "new" not in (servers or {}):  # and every other character is where it was
        position = 0
        for char in text.rstrip("}\n \t"):
            position = made.index(char, position) + 1


# On a terminal


@requirement("P-28", everywhere=True)
@pytest.mark.parametrize(
    ("typed", "code"), [("y\n", 0), ("YES\n", 0), ("n\n", 5), ("\n", 5), ("yep\n", 5), ("\x04", 5)], ids=ascii
)
def test_on_a_terminal_it_asks_and_no_is_the_default(home: Path, typed: str, code: int) -> None:
    terminal = Terminal(*COMMAND, "install", "weather.py", "--host", "cursor", home=home)
    shown = terminal.until("[y/N] ")
    assert '\x1b[32m+    "weather": {\x1b[0m' in shown
    assert f"Write this to {home / '.cursor' / 'mcp.json'}?" in shown
    terminal.type(typed)
    ended, rest = terminal.end()
    assert ended == code, rest
    assert (home / ".cursor" / "mcp.json").exists() is (code == 0)


@requirement("P-28", everywhere=True)
def test_what_was_typed_before_the_question_is_no_answer(home: Path) -> None:
    (home / "slow.py").write_text(SERVER + "import sys\nprint('loading', file=sys.stderr)\nopen('gate').read()\n")
    os.mkfifo(home / "gate")
    terminal = Terminal(*COMMAND, "install", "slow.py", "--host", "cursor", home=home)
    terminal.until("loading")
    terminal.type("y\n")
    (home / "gate").write_text("")
    terminal.until("[y/N] ")
    terminal.type("\n")
    assert terminal.end()[0] == 5


def test_ctrl_c_is_an_end_of_its_own(home: Path) -> None:
    terminal = Terminal(*COMMAND, "install", "weather.py", "--host", "cursor", home=home)
    terminal.until("[y/N] ")
    terminal.type("\x03")
    assert terminal.end()[0] == 130
    assert not (home / ".cursor").exists()
