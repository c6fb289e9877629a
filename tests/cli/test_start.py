"""The command line as a whole: help, exit codes, start-up, completion."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli_runs import environment, handrail
from handrail import __version__, errors
from handrail.cli import main
from handrail.cli.exit_codes import ExitCode, UsageError, exit_code_for
from handrail.cli.parser import build_parser
from paths import ROOT
from patience import PATIENCE
from requirements import requirement

VERBS = tuple("serve list show call inspect doctor config install audit check explain approve lock completion".split())


def test_the_version_is_told_to_people_and_programs(tmp_path: Path) -> None:
    assert handrail("--version", home=tmp_path).stdout.startswith(f"handrail {__version__} (Python 3.")
    assert json.loads(handrail("--version", "--json", home=tmp_path).stdout)["handrail"] == __version__


def test_the_help_names_every_verb_and_every_exit_code(tmp_path: Path) -> None:
    done = handrail("--help", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for word in (*VERBS, *(f"  {code.value} " for code in ExitCode), *(code.description for code in ExitCode)):
        assert word in done.stdout


def test_without_a_verb_the_help_is_an_error(tmp_path: Path) -> None:
    done = handrail(home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: handrail" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_examples_that_parse(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    lines = [line.split("   ")[0].strip() for line in (each.strip() for each in examples)]
    commands = [
        shlex.split(line.removeprefix("handrail ").split(" > ")[0]) for line in lines if line.startswith("handrail ")
    ]
    assert commands or verb == "completion"
    for words in commands:
        assert build_parser().parse_args(words).verb == verb


@requirement("APP-18", everywhere=True)
@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["list"], ["config", "--nonsense"], ["audit", "--tail", "x"], ["serve", "--http", "x.py"]],
    ids=" ".join,
)
def test_a_wrong_command_line_ends_with_its_own_code_and_words(tmp_path: Path, words: list[str]) -> None:
    done = handrail(*words, home=tmp_path)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert done.stderr.startswith("usage: handrail")
    assert "--help says more" in done.stderr
    told = handrail(*words, "--json", home=tmp_path)
    assert (told.returncode, told.stdout) == (ExitCode.USAGE, "")
    assert json.loads(told.stderr)["error"]["kind"] == "usage"


@requirement("APP-18", everywhere=True)
@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("call F T --yes a=1 b=2", {"server": "F", "tool": "T", "words": ["a=1", "b=2"], "yes": True}),
        ("call F --yes T a=1 --timeout 3 b=2", {"tool": "T", "words": ["a=1", "b=2"], "timeout": 3.0}),
        ("explain call T --server F a=1", {"name": "T", "words": ["a=1"], "server": "F"}),
        ("lock A --file F B", {"servers": ["A", "B"], "file": "F"}),
        ("lock A --env X=1 B --env Y=2", {"servers": ["A", "B"], "env": ["X=1", "Y=2"]}),
        ("approve ID --note x yes", {"id": "ID", "answer": "yes", "note": "x"}),
        ("audit verify --json FILE", {"what": "verify", "files": ["FILE"], "json": True}),
        ("--json audit export --salvage FILE", {"what": "export", "files": ["FILE"], "salvage": True, "json": True}),
    ],
)
def test_values_can_come_after_options(line: str, values: dict[str, object]) -> None:
    found = vars(build_parser().parse_args(line.split()))
    assert {name: found[name] for name in values} == values


@requirement("APP-18", everywhere=True)
@pytest.mark.parametrize("line", ["call F T --yess a=1", "list F G", "audit --jsn", "lock A --file F --chek B"])
def test_a_mistake_is_told_with_the_usage_of_its_verb(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb = line.split()[0]
    assert main(line.split()) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert told.startswith(f"usage: handrail {verb} ") and f"handrail {verb} --help says more" in told


@requirement("APP-18", everywhere=True)
def test_every_way_to_end_has_a_code_of_its_own() -> None:
    codes = {
        errors.CallFailed("x", result=SimpleNamespace(refused="")): 1,
        errors.CallFailed("x", result=SimpleNamespace(refused="forbidden")): 5,
        UsageError("x"): 2,
        errors.SchemaError("x"): 2,
        errors.RemoteProtocolError("x"): 3,
        errors.InvalidResult("x", result={}): 3,
        errors.LocalProtocolError("x"): 3,
        errors.TransportError("x"): 4,
        errors.HttpRefused("x", status=500): 4,
        errors.Denied("x"): 5,
        errors.ConfirmationRequired("x"): 5,
        errors.CallTimeout("x", clock="idle"): 6,
        errors.AuthorizationError("x"): 7,
        errors.Unrecorded("x"): 2,
        errors.Unrecorded("x", sent=errors.Sent.UNKNOWN): 8,
        ZeroDivisionError(): 70,
        KeyboardInterrupt(): 130,
    }
    assert {each: exit_code_for(each).value for each in codes} == codes
    assert {*codes.values(), 0} == {code.value for code in ExitCode}, "and each code is used"


@pytest.mark.parametrize(
    ("problem", "code", "words"),
    [
        (
            errors.TransportError("no\x1b[2J", server="s", phase="connect"),
            4,
            r"handrail: s: connect: no\x1b[2J (not sent)",
        ),
        (KeyboardInterrupt(), 130, "handrail: Ctrl-C"),
        (ZeroDivisionError("oh"), 70, "ZeroDivisionError: oh"),
    ],
    ids=["transport", "interrupt", "bug"],
)
def test_what_a_verb_raises_is_told_and_is_the_exit_code(
    problem: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise problem

    monkeypatch.setattr("handrail.cli.host_config.run_config", fails)
    assert main(["config"]) == code
    assert words in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    source, sink = os.pipe()
    os.close(source)
    done = subprocess.run(
        [sys.executable, "-m", "handrail", "completion", "fish"],
        stdout=sink,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
        timeout=PATIENCE,
        check=False,
    )
    os.close(sink)
    assert (done.returncode, done.stderr) == (0, b"")


# Start-up


HEAVY = (
    "asyncio",
    "msgspec",
    "jsonschema_rs",
    "shutil",
    "ssl",
    "socket",
    "traceback",
    "inspect",
    "handrail.server",
    "handrail.guards",
)


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS), ["nonsense"]], ids=" ".join
)
def test_no_more_is_loaded_than_a_help_text_needs(tmp_path: Path, words: list[str]) -> None:
    probe = f"""
import sys
before = set(sys.modules)
from handrail.cli import main
main({words!r})
print(*set(sys.modules) - before, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        env=environment(tmp_path),
    )
    loaded = set(done.stderr.splitlines()[-1].split())
    # A mistake in the words is told through the encoder, which loads some more.
    assert set(HEAVY[:3] if words == ["nonsense"] else HEAVY) & loaded == set()
    assert len(loaded) < 60


def test_the_reference_names_every_verb_and_every_end() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8")
    assert [verb for verb in VERBS if f"| `{verb}" not in page] == []
    assert [code for code in ExitCode if f"| {code.value} | {code.description.split(',')[0]}" not in page] == []


# Completion


def complete(script: str, line: str) -> list[str]:
    words = line.split(" ")
    listed = " ".join(f"'{word}'" for word in words)
    asked = (
        f"{script}\nCOMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _handrail; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    return subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, timeout=PATIENCE, check=True
    ).stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("handrail ins", ["inspect", "install"]),
        ("handrail serve --re", ["--reload"]),
        ("handrail install x.py --host c", ["claude", "claude-code", "cursor"]),
        ("handrail --color ", ["auto", "always", "never"]),
        ("handrail completion f", ["fish"]),
        ("handrail --json aud", ["audit"]),
        ("handrail serve x", []),  # and bash completes names of files
    ],
)
def test_bash_completes_what_the_parser_knows(tmp_path: Path, line: str, words: list[str]) -> None:
    assert complete(handrail("completion", "bash", home=tmp_path).stdout, line) == words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_and_option_is_in_every_script(tmp_path: Path, shell: str) -> None:
    script = handrail("completion", shell, home=tmp_path).stdout
    for word in (*VERBS, "reload", "workers", "follow", "windsurf"):
        assert word in script
    assert json.loads(handrail("completion", shell, "--json", home=tmp_path).stdout) == {
        "shell": shell,
        "script": script,
    }
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, timeout=PATIENCE, check=True)
