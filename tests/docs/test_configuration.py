"""The reference of `handrail.toml` is what the code says, and every example of such a file can be used."""

from __future__ import annotations

import re
import tomllib

import pytest

from handrail.config import load_config, read
from paths import ROOT
from tools.configuration import PAGE, page

EXAMPLE = ROOT / "examples" / "everyday.toml"
BLOCK = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(found[1], id=f"{each.relative_to(ROOT).as_posix()}-{number}")
    for each in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, found in enumerate(BLOCK.finditer(each.read_text("utf-8")), 1)
]
# A comment in the example that is a key and its default, with what is said of it behind.
DEFAULT = re.compile(r"^# (\w+ = .+?)( *#.*)?$", re.MULTILINE)


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python tools/configuration.py"


@pytest.mark.parametrize("text", BLOCKS)
def test_every_example_can_be_used(text: str) -> None:
    read(tomllib.loads(text))


def test_the_example_can_be_used_as_it_is_and_with_all_of_its_keys() -> None:
    load_config(EXAMPLE)
    everything = DEFAULT.sub(r"\1", EXAMPLE.read_text("utf-8"))
    given = tomllib.loads(everything)
    assert {"keys", "issuer"} <= given["identities"].keys()
    for alternative in ("keys", "scopes"):  # of which one is chosen
        del given["identities"][alternative]
    assert read(given).sanitize != read({}).sanitize


def test_the_example_names_every_section() -> None:
    told = set(re.findall(r"^## `\[+(\w+)\]+`$", page(), re.MULTILINE))
    assert told == {*tomllib.loads(EXAMPLE.read_text("utf-8"))}
