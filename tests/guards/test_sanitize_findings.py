"""What the sanitizer changes in a text is told: in `_meta`, by class, in every revision, and in the audit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from clients import ALL
from handrail import Call, Client, Image, Server, Text, ToolError, ToolResult
from handrail.guards.sanitize import Sanitize
from handrail.model import UNSET
from handrail.testing import Peer
from paths import SUPPORT
from requirements import requirement

SANITIZED = "io.handrail/sanitized"

KEPT = {
    "line and paragraph separators": "a\u2028b\u2029c",
    "form feed": "def f(): ...\n\x0c\ndef g(): ...",
    "private use": "\ue0b0 main \uf8ff \U000f0001 \U0010fffd",
    "white space": "a\tb\r\nc\n\u00a0d",
    "emoji": "👩‍💻 ❤️ 🏳️‍🌈",
}

CHANGED: dict[str, tuple[str, str, dict[str, int]]] = {
    "byte order mark": ("\ufeffname,age", "name,age", {"byte order mark": 1}),
    "soft hyphens": ("co\xadop\xad", "coop", {"soft hyphen": 2}),
    "lone return": ("10 %\r20 %\r\n", "10 %\n20 %\r\n", {"line break": 1}),
    "vertical tab and next line": ("a\vb\x85c", "a\nb\nc", {"line break": 2}),
    "control characters": ("a\0b\bc", "abc", {"control character": 2}),
    "colours": ("\x1b[31mred\x1b[0m", "red", {"colour": 2}),
    "escape sequences": ("\x1b]0;title\x07x\x1b[2J", "x", {"escape sequence": 2}),
    "tags": ("x\U000e0041\U000e0042", "x", {"tag character": 2}),
    "bidirectional": ("a\u202eb\u202c\u2066", "ab", {"bidirectional control": 3}),
    "zero width": ("a\u200bb\u2060\u200d", "ab", {"invisible character": 3}),
    "selectors": ("x\U000e0101\ufe01", "x", {"invisible character": 2}),
    "secrets": ("ghp_" + "Z9y8X7w6V5" * 4 + " and AKIAQWERTYUIOPASDFG2", "ghp_**** and AKIA****", {"secret": 2}),
    "several": (
        "\ufeffa\u200b\x1b[1mb\rc",
        "ab\nc",
        {"byte order mark": 1, "invisible character": 1, "colour": 1, "line break": 1},
    ),
}


def echoing(**guards: Any) -> Server:
    server = Server("echoing", **guards)

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def structured(text: str) -> dict[str, str]:
        return {"text": text}

    @server.tool
    async def fails(text: str) -> str:
        raise ToolError(text)

    @server.tool
    async def tells(text: str, call: Call) -> str:
        await call.progress(1, message=text)
        await call.log("error", {"said": text})
        return "told"

    return server


def told(result: ToolResult) -> Any:
    return {} if result.meta is UNSET else result.meta.get(SANITIZED, {})


@requirement("SRV-126")
@pytest.mark.parametrize("revision", ALL)
@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
async def test_what_is_data_survives_and_nothing_is_told(revision: str, text: str, ran: Any) -> None:
    async with Peer(echoing(), revision=revision) as peer:
        ran(revision, "memory")
        for tool in ("echo", "fails"):
            result = await peer.call(tool, {"text": text})
            assert result.text == text and told(result) == {}
        result = await peer.call("structured", {"text": text})
        assert json.loads(result.text) == {"text": text} and told(result) == {}
        await peer.call("echo", {"text": text * 5_000})
        assert SANITIZED.encode() not in b"".join(peer.wire)


@requirement("SRV-604")
@pytest.mark.parametrize("revision", ALL)
@pytest.mark.parametrize(("text", "left", "counts"), CHANGED.values(), ids=CHANGED)
async def test_what_is_changed_is_told_by_class(
    revision: str, text: str, left: str, counts: dict[str, int], ran: Any
) -> None:
    async with Peer(echoing(), revision=revision) as peer:
        ran(revision, "memory")
        for tool in ("echo", "fails"):
            result = await peer.call(tool, {"text": text})
            assert (left in result.text, told(result)) == (True, counts), tool  # pocket has a caution before it
        result = await peer.call("structured", {"text": text})
        assert told(result).keys() == counts.keys()
        assert left in str(result.structured) or json.dumps(left)[1:-1] in result.text


@requirement("SRV-604")
async def test_progress_and_log_messages_tell_it_too(ran: Any) -> None:
    async with Peer(echoing(), revision="2025-11-25", capabilities={}) as peer:
        ran("2025-11-25", "memory")
        params = {"name": "tells", "arguments": {"text": "a\u200bb"}, "_meta": {"progressToken": "t\u200b"}}
        answer = await peer.request("tools/call", params)
        progress, message = [each["params"] for each in peer.notices]
        assert SANITIZED not in answer.get("_meta", {})
    assert progress["message"] == "ab" and progress["_meta"] == {SANITIZED: {"invisible character": 1}}
    assert progress["progressToken"] == "t\u200b"
    assert message["data"] == {"said": "ab"} and message["_meta"] == {SANITIZED: {"invisible character": 1}}


@requirement("SRV-604")
async def test_what_is_cut_or_withheld_is_told(ran: Any) -> None:
    server = echoing(sanitize=Sanitize(max_text=1_000))

    @server.tool
    async def picture() -> Image:
        return Image(b"%PDF-1.7", "image/png")

    async with Peer(server) as peer:
        ran("2025-11-25", "memory")
        assert told(await peer.call("echo", {"text": "long " * 500})) == {"cut text": 1}
        assert told(await peer.call("picture")) == {"withheld media": 1}


@requirement("SRV-604")
async def test_what_is_only_reported_is_not_told_as_changed(ran: Any) -> None:
    async with Peer(echoing(sanitize=Sanitize(controls="report", secrets="report"))) as peer:
        ran("2025-11-25", "memory")
        text, _, _ = CHANGED["several"]
        result = await peer.call("echo", {"text": text})
        assert result.text == text and told(result) == {}


@requirement("SRV-604")
async def test_middleware_that_adds_more_adds_to_the_counts(ran: Any) -> None:
    server = echoing()

    @server.middleware
    async def adds(call: Call, inner: Any) -> ToolResult:
        result: ToolResult = await inner(call)
        return ToolResult([*result.content, Text("\u200b")], meta=result.meta)

    async with Peer(server) as peer:
        ran("2025-11-25", "memory")
        assert told(await peer.call("echo", {"text": "a\u200bb\xad"})) == {"invisible character": 2, "soft hyphen": 1}


@requirement("SRV-604")
async def test_the_audit_has_the_counts(tmp_path: Path, ran: Any) -> None:
    text, _, counts = CHANGED["several"]
    async with Peer(echoing(audit=tmp_path / "calls.jsonl")) as peer:
        ran("2025-11-25", "memory")
        await peer.call("echo", {"text": text})
        await peer.call("echo", {"text": "plain"})
        await peer.call("tells", {"text": "a\xadb"}, progressToken=1)
    records = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    outcomes = [each for each in records if each.get("event") == "outcome"]
    assert [each.get("sanitized") for each in outcomes] == [counts, None, {"soft hyphen": 2}]
    assert outcomes[0]["findings"] == sorted(f"control: {name}" for name in counts)


async def test_a_client_shows_what_the_server_changed() -> None:
    text, left, counts = CHANGED["several"]
    async with Client(echoing()) as client:
        result = await client.call("echo", {"text": text})
        assert (result.text, result.sanitized) == (left, counts)
        assert (await client.call("echo", {"text": "plain"})).sanitized == {}
        separators = KEPT["line and paragraph separators"]
        assert (await client.call("echo", {"text": separators})).for_model() == separators


RIGS = sorted(SUPPORT.glob("*.py"))


@pytest.mark.parametrize("path", RIGS, ids=lambda path: path.name)
def test_a_rig_without_guards_says_why(path: Path) -> None:
    """What is found right without the defaults says nothing of the defaults."""
    lines = ["", *path.read_text(encoding="utf-8").splitlines()]
    off = [at for at, line in enumerate(lines) if re.search(r"\b(sanitize|rates)=None[,)]", line)]
    bare = [f"{path.name}:{at}" for at in off if "#" not in lines[at] and not lines[at - 1].lstrip().startswith("#")]
    assert bare == []
