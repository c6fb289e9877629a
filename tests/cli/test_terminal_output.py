"""What a terminal shows: colours where they are wanted, tables that line up, a sign of life that goes away."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from cli_runs import COMMAND, Terminal, handrail
from handrail.cli.terminal import Screen, Spinner, json_text
from requirements import requirement

COLOR = "\x1b[1m"
CONFIG = '{"mcpServers": {"one": {"command": "a"}}}'


@pytest.mark.parametrize(
    ("words", "env", "colored"),
    [
        ([], {}, True),
        (["--color", "never"], {}, False),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"NO_COLOR": ""}, True),
        ([], {"TERM": "dumb"}, False),
        (["--json"], {}, False),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else str(each),
)
def test_colours_are_for_terminals_that_want_them(
    tmp_path: Path, words: list[str], env: dict[str, str], colored: bool
) -> None:
    (tmp_path / "x.json").write_text(CONFIG)
    code, shown = Terminal(*COMMAND, "config", "x.json", *words, home=tmp_path, env=env).end()
    assert code == 0
    assert (COLOR in shown) is colored, shown


def test_a_pipe_gets_colours_only_if_told_so(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(CONFIG)
    assert COLOR not in handrail("config", "x.json", home=tmp_path).stdout
    assert COLOR in handrail("--color", "always", "config", "x.json", home=tmp_path).stdout


def test_without_colours_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"mcpServers": {"one": {"command": "${NO}"}}}')
    plain = handrail("config", "x.json", home=tmp_path).stdout
    painted = handrail("config", "x.json", "--color", "always", home=tmp_path).stdout
    for code in range(100):
        painted = painted.replace(f"\x1b[{code}m", "")
    assert plain == painted
    assert "missing: NO" in plain


def test_a_table_lines_up_whatever_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(color="never").table([("a", "1"), ("日本", "2"), ("e\u0301é", "3"), ("x\ny", "4")], indent=" ")
    assert capsys.readouterr().out.splitlines() == [" a     1", " 日本  2", " e\u0301é    3", " x\\ny  4"]


@requirement("P-33", everywhere=True)
def test_json_is_ascii_alone() -> None:
    assert json_text({"a": "é\x7f\x9b\u202e"}) == '{"a": "\\u00e9\\u007f\\u009b\\u202e"}'


# A sign of life


def test_progress_says_how_far_it_is() -> None:
    progress = Spinner("forecast\x1b[2J", None)
    assert progress.line(0) == r"⠋ forecast\x1b[2J 0 s"
    assert progress.line(12.3)[2:] == r"forecast\x1b[2J 12 s"
    progress.update(3)
    assert progress.line(0)[2:] == r"forecast\x1b[2J 3"
    progress.update(1, 4, "looking\nup \u202e")
    assert progress.line(0)[2:] == r"forecast\x1b[2J [######------------------]  25% looking up <U+202E>"
    progress.update(9, 4)
    assert "100%" in progress.line(0)
    progress.update(5, 0)
    assert progress.line(0).endswith(" 5")
    progress = Spinner("x" * 200, None)
    progress.update(1, 3, "y" * 200)
    assert len(progress.line(99999)) < 80


def test_a_sign_of_life_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen().progress("x") as progress:
        progress.update(1, 2)
    assert capsys.readouterr() == ("", "")
    seen = io.StringIO()
    with Spinner("x", seen):
        pass
    assert seen.getvalue().endswith("\r\x1b[2K"), "and it goes away"


SPINS = """
import sys
from handrail.cli.terminal import Screen
with Screen().progress("forecast") as progress:
    input()
    progress.update(1, 2, "half")
    input()
print("done")
"""


def test_a_terminal_shows_that_something_runs(tmp_path: Path) -> None:
    terminal = Terminal(sys.executable, "-c", SPINS, home=tmp_path)
    terminal.until("forecast 0 s")
    terminal.type("\n")
    terminal.until("[############------------]  50% half")
    terminal.type("\n")
    code, rest = terminal.end()
    assert code == 0
    assert rest.rpartition("\x1b[2K")[2].strip() == "done", "nothing of it is left on the line"


@pytest.mark.parametrize(("typed", "answer"), [("y\n", True), ("\n", False), ("\x04", False)], ids=ascii)
def test_the_question_is_put_to_the_terminal_whatever_the_streams_are(tmp_path: Path, typed: str, answer: bool) -> None:
    asks = "from handrail.cli.terminal import Screen; open('answer', 'w').write(str(Screen().ask('Delete \\x1b[2J?')))"
    terminal = Terminal("/bin/sh", "-c", f'echo y | {sys.executable} -c "{asks}" > out 2> err', home=tmp_path)
    assert r"Delete \x1b[2J? [y/N] " in terminal.until("[y/N] ")
    terminal.type(typed)
    assert terminal.end()[0] == 0
    assert (tmp_path / "answer").read_text() == str(answer)
