"""Which rules are in force: where the file is looked for, what is said at the start, what is not passed over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import SECONDS, environment, handrail
from requirements import requirement

SHOP = """
from handrail import Server

server = Server("shop"{options})


@server.tool(annotations={{"readOnlyHint": True}})
def look() -> str:
    return "seen"


if __name__ == "__main__":
    server.run()
"""
DENY = '[access]\ndefault = "deny"\n'
ALLOW = '[access]\ndefault = "allow"\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "served").mkdir()
    (tmp_path / "served/shop.py").write_text(SHOP.format(options=""))
    return tmp_path


def explained(home: Path, *more: str) -> int:
    return handrail("explain", "--server", "served/shop.py", *more, "call", "look", home=home).returncode


@requirement("P-28", everywhere=True)
def test_the_file_beside_the_server_counts_before_that_of_the_working_folder(home: Path) -> None:
    (home / "handrail.toml").write_text(DENY)
    assert explained(home) == 5
    (home / "served/handrail.toml").write_text(ALLOW)
    assert explained(home) == 0
    shown = handrail("check", "served/shop.py", home=home).stdout
    assert shown.startswith("served/handrail.toml: all right\n")
    (home / "served/handrail.toml").write_text(DENY)
    (home / "handrail.toml").write_text(ALLOW)
    assert explained(home) == 5
    told = handrail("serve", "served/shop.py", home=home).stderr
    assert "guards: served/handrail.toml" in told and "handrail.toml of this folder is not used" in told


@requirement("P-28", everywhere=True)
@pytest.mark.parametrize("verb", ["serve", "check", "explain"])
def test_a_file_beside_the_server_that_is_not_used_is_an_error(home: Path, verb: str) -> None:
    words = ["explain", "--server", "served/shop.py", "call", "look"] if verb == "explain" else [verb, "served/shop.py"]
    (home / "other.toml").write_text(ALLOW)
    (home / "served/handrail.toml").write_text(DENY)
    done = handrail(*words, "--config", "other.toml", home=home)
    assert done.returncode == 2
    assert "served/handrail.toml" in done.stderr and "--config-only" in done.stderr and "not used" in done.stderr
    assert handrail(*words, "--config", "other.toml", "--config-only", home=home).returncode == 0
    same = handrail(*words, "--config", "served/../served/handrail.toml", home=home)
    assert same.returncode == (5 if verb == "explain" else 0), same.stderr


@requirement("P-28", everywhere=True)
def test_a_file_beside_the_server_that_another_file_names_is_not_passed_over(home: Path) -> None:
    (home / "handrail.toml").write_text('[server]\ntarget = "served/shop.py"\n' + ALLOW)
    assert handrail("serve", home=home).returncode == 0
    (home / "served/handrail.toml").write_text(DENY)
    done = handrail("serve", home=home)
    assert done.returncode == 2 and "served/handrail.toml" in done.stderr and "not used" in done.stderr
    assert handrail("serve", "--config", "handrail.toml", "--config-only", home=home).returncode == 0


def test_one_that_cannot_be_read_is_not_passed_over(home: Path) -> None:
    (home / "served/handrail.toml").symlink_to("nowhere")
    done = handrail("serve", "served/shop.py", home=home)
    assert done.returncode == 2 and "served/handrail.toml: No such file" in done.stderr


@requirement("P-28", everywhere=True)
@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (None, "", "guards: built in; there is no handrail.toml beside shop.py or in this folder"),
        ("", "", "guards: served/handrail.toml"),
        (DENY, "", "guards: served/handrail.toml"),
        ('[access]\ndestructive = "allow"\n', "", 'switched off: access.destructive = "allow"'),
        ("[audit]\non = false\n", "", "switched off: audit.on = false"),
        ('[sanitize]\nsecrets = "keep"\n', "", 'switched off: sanitize.secrets = "keep"'),
        ('[limits]\nprincipal = ""\n', "", 'switched off: limits.principal = ""'),
        (
            '[access]\ndestructive = "allow"\n[audit]\non = false\n',
            "",
            'switched off: access.destructive = "allow", audit.on = false',
        ),
        (None, ", sanitize=None, rates=None", "switched off: Server(rates=None), Server(sanitize=None)"),
        ("[sanitize]\n", ", sanitize=None", "guards: served/handrail.toml"),
    ],
)
def test_the_start_says_what_is_in_force_and_what_is_off(home: Path, text: str | None, options: str, says: str) -> None:
    (home / "served/shop.py").write_text(SHOP.format(options=options))
    if text is not None:
        (home / "served/handrail.toml").write_text(text)
    done = handrail("serve", "served/shop.py", home=home)
    assert (done.returncode, done.stderr.count("guards: ")) == (0, 1), done.stderr
    line = next(each for each in done.stderr.splitlines() if "guards: " in each)
    assert line.startswith("handrail: guards: ") and line.endswith(says), line
    assert ("switched off" in line) is ("switched off" in says)


@requirement("P-28", everywhere=True)
def test_a_server_that_is_run_by_python_says_that_the_file_is_not_used(home: Path) -> None:
    """Its guards are those of the code; a file of rules beside it would be taken for what is in force."""

    def run() -> str:
        command = [sys.executable, "served/shop.py"]
        done = subprocess.run(
            command, cwd=home, env=environment(home), stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stderr.decode()

    assert run() == ""
    (home / "served/handrail.toml").write_text(DENY)
    assert "served/handrail.toml is not used" in run() and "handrail serve served/shop.py" in run()
    assert "is not used" in handrail("call", "served/shop.py", "look", home=home).stderr
    loads = "from handrail import load_config\nload_config('served/handrail.toml')\n"
    (home / "served/shop.py").write_text(loads + SHOP.format(options=""))
    assert run() == ""


@pytest.mark.parametrize("where", [".", "served"])
def test_what_is_installed_is_served_with_the_same_file(home: Path, where: str) -> None:
    (home / "handrail.toml").write_text(ALLOW)
    (home / where / "handrail.toml").write_text(DENY)
    done = handrail("install", "served/shop.py", "--host", "cursor", "--file", "x.json", "--yes", home=home)
    assert done.returncode == 0, done.stderr
    [entry] = json.loads((home / "x.json").read_text())["mcpServers"].values()
    assert entry["args"][-2:] == ["--config", str(home / where / "handrail.toml")]


def test_a_file_that_a_debugger_runs_is_served_as_well(home: Path) -> None:
    """`python -m pdb` of Python 3.11 and 3.12 makes a `__main__` without a `__spec__`."""
    text = "import sys\n\ndel sys.modules['__main__'].__spec__\n" + SHOP.format(options="")
    (home / "served/shop.py").write_text(text)
    (home / "served/handrail.toml").write_text(DENY)
    command = [sys.executable, "served/shop.py"]
    done = subprocess.run(
        command, cwd=home, env=environment(home), stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert b"served/handrail.toml is not used" in done.stderr
