"""Every Python example of README.md and docs/ runs: the blocks of one page in order, as one module.

A block is left out when an HTML comment above it says why: `<!-- not run: reason -->`. Functions called `test_…` are
called after the last block, as pytest would. A page that says `<!-- shell: run -->` is run in a folder of its own, its
blocks for a shell too, in their place; a block of it below `<!-- file: NAME -->`, in whichever language, is written to
that file instead.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from paths import ROOT, SUPPORT
from patience import PATIENCE

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->")


FILE = re.compile(r"<!-- file: (?P<name>[\w.]+) -->")
SHELL = "<!-- shell: run -->"


@dataclass(frozen=True)
class Block:
    line: int
    code: str
    not_run: str | None
    file: str = ""
    shell: bool = False


def python_blocks(text: str) -> list[Block]:
    """The Python blocks of a page, with the line of their first code line."""
    blocks: list[Block] = []
    lines = text.splitlines()
    shells = SHELL in lines
    number, before = 0, ""
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if not opening:
            before = lines[number].strip() or before
            number += 1
            continue
        start = number + 1
        number = next(i for i in range(start, len(lines)) if lines[i].strip() == "```")
        shell = shells and opening["language"] == "sh"
        reason, file = NOT_RUN.fullmatch(before), FILE.fullmatch(before) if shells else None
        if opening["language"] in ("python", "py") or shell or file:
            code = "\n".join(line.removeprefix(opening["indent"]) for line in lines[start:number])
            why, name = reason["reason"] if reason else None, file["name"] if file else ""
            blocks.append(Block(start + 1, code, why, name, shell))
        before = ""
        number += 1
    return blocks


def run_page(page: Path) -> None:
    """Run a page in this process; done in a process of its own, so that pages do not meet."""
    name = "page_" + re.sub(r"\W", "_", page.stem)
    module = sys.modules[name] = ModuleType(name)
    for block in python_blocks(page.read_text("utf-8")):
        if block.shell and block.not_run is None:
            subprocess.run(["sh", "-eu", "-c", block.code], check=True, timeout=PATIENCE)
        elif block.file:
            Path(block.file).write_text(block.code + "\n", "utf-8")
        elif block.not_run is None:
            # Empty lines in front: a traceback then names the line of the page.
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), module.__dict__)
    for test in [value for key, value in vars(module).items() if key.startswith("test_")]:
        if inspect.iscoroutinefunction(test):
            asyncio.run(test())
        else:
            test()


def _relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


with_code = [page for page in PAGES if any(block.not_run is None for block in python_blocks(page.read_text("utf-8")))]


@pytest.mark.parametrize("page", with_code, ids=_relative)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    shells = SHELL in page.read_text("utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    home = {"HOME": str(tmp_path), "PATH": path, "XDG_STATE_HOME": ""} if shells else {}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, str(page)],
        cwd=tmp_path if shells else ROOT,
        env={**os.environ, **home, "PYTHONPATH": str(SUPPORT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,  # a page may have dozens of commands
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_blocks_are_found_with_their_lines_and_reasons() -> None:
    page = "# Page\n\n```python\na = 1\n```\n\n<!-- not run: needs a screen -->\n```python\nb\n```\n```sh\nls\n```\n"
    assert python_blocks(page) == [Block(4, "a = 1", None), Block(9, "b", "needs a screen")]


@pytest.mark.parametrize("page", PAGES, ids=_relative)
def test_links_inside_the_documentation_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!\w+:)([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=_relative)
def test_lines_of_prose_have_at_most_120_characters(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []


# What README.md calls a figure, and the row of docs/benchmarks.md it is taken from.
FIGURES = {
    "CPU of a call over stdio, µs": "echo, 64 in flight: CPU, µs",
    "CPU of a call over HTTP, µs": "http echo, session, 32 at once: CPU, µs",
    "start to first answer, ms": "spawn to first answer, ms",
    "memory after start, MB": "resident memory after start, MB",
}


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_of_the_readme_is_that_of_the_benchmarks(figure: str) -> None:
    readme, benchmarks = ((ROOT / each).read_text("utf-8") for each in ("README.md", "docs/benchmarks.md"))
    [ours] = [line for line in readme.splitlines() if line.startswith(f"| {figure} |")]
    [row] = [line for line in benchmarks.splitlines() if line.startswith(f"| {FIGURES[figure]} | 2 |")]
    measured = [cell.split()[0] for cell in row.split("|")[4:7]]  # handrail, mcp, fastmcp
    assert [cell.strip() for cell in ours.split("|")[2:5]] == measured


def test_the_extras_of_the_readme_are_the_same_everywhere_and_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    [extras] = set(re.findall(r"'(?:\.|handrail)\[([\w,]+)\]'", text))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    assert {"http", "console"} <= set(extras.split(","))  # for `--http` and `--console`, which come after


@pytest.mark.parametrize(
    "page", ["SECURITY.md", "docs/explanation/threat-model.md", "docs/architecture.md", "README.md"]
)
def test_no_page_says_of_a_part_that_is_there_that_it_is_not(page: str) -> None:
    parts = [path.stem for path in (ROOT / "src" / "handrail").iterdir() if not path.stem.startswith("_")]
    for sentence in re.split(r"(?<=[.!])\s|\n\n|\n-", (ROOT / page).read_text("utf-8")):
        if re.search(r"\b(do|does) not exist (yet|in this version)", sentence):
            assert [part for part in parts if re.search(rf"\b{part}s?\b", sentence)] == []


if __name__ == "__main__":
    del os.environ["PYTHONPATH"]  # commands of a page do without the helpers of tests
    run_page(Path(sys.argv[1]))
