"""The checks every received message goes through can fail."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from checks import check_message, strict_json
from paths import TESTS
from shared_texts import NO_SCHEMAS, NO_SEEDS, SCHEMAS, folder

REVISIONS = ("2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "pocket", "2026-07-28")


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_answer_the_official_schema_does_not_allow_is_noticed(revision: str) -> None:
    if SCHEMAS is None:
        pytest.skip(NO_SCHEMAS)
    wrong: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "result": {"tools": "none"}}
    with pytest.raises(AssertionError, match="ListToolsResult"):
        check_message(wrong, revision, "tools/list")


@pytest.mark.parametrize("text", [b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":\n1}'])
def test_json_that_is_not_strict_is_noticed(text: bytes) -> None:
    with pytest.raises(AssertionError):
        strict_json(text)


# Where texts that are not ours are looked for


def test_a_setting_names_the_folder_before_the_one_beside_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, beside = tmp_path / "named", tmp_path / "beside"
    named.mkdir()
    monkeypatch.delenv("HANDRAIL_SCHEMAS", raising=False)
    assert folder("HANDRAIL_SCHEMAS", beside) is None
    beside.mkdir()
    assert folder("HANDRAIL_SCHEMAS", beside) == beside
    monkeypatch.setenv("HANDRAIL_SCHEMAS", str(named))
    assert folder("HANDRAIL_SCHEMAS", beside) == named
    monkeypatch.setenv("HANDRAIL_SCHEMAS", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"HANDRAIL_SCHEMAS=.*nowhere: there is no such folder"):
        folder("HANDRAIL_SCHEMAS", beside)


def test_a_skip_reason_names_a_setting_and_no_folder_that_a_stranger_does_not_have() -> None:
    assert "HANDRAIL_SCHEMAS=folder" in NO_SCHEMAS and "HANDRAIL_SEEDS=folder" in NO_SEEDS
    wrong = [
        f"{path.name}:{node.lineno}: {word.value}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.skip", "pytest.mark.skipif")
        for word in ast.walk(node)
        if isinstance(word, ast.Constant) and isinstance(word.value, str) and "shared" in word.value
    ]
    assert wrong == []
