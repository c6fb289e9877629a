"""The checks every received message goes through can fail."""

from __future__ import annotations

from typing import Any

import pytest

from checks import SCHEMAS, check_message, strict_json

REVISIONS = ("2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "pocket", "2026-07-28")


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_answer_the_official_schema_does_not_allow_is_noticed(revision: str) -> None:
    if not SCHEMAS.exists():
        pytest.skip("no ../shared/spec/schema: answers are checked against the lists of members only")
    wrong: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "result": {"tools": "none"}}
    with pytest.raises(AssertionError, match="ListToolsResult"):
        check_message(wrong, revision, "tools/list")


@pytest.mark.parametrize("text", [b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":\n1}'])
def test_json_that_is_not_strict_is_noticed(text: bytes) -> None:
    with pytest.raises(AssertionError):
        strict_json(text)
