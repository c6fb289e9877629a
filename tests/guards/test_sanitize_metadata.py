"""What a server says of itself or asks for, and where secrets would go in the clear: cleaned, refused or warned of."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from clients import ALL
from handrail import Call, Client, EmbeddedResource, Server
from handrail.client.input_handlers import Elicitation
from handrail.errors import LocalProtocolError
from handrail.testing import Peer
from requirements import requirement
from rigs import Rig

HIDDEN = "be kind\U000e0041\u202e\u200b\x1b[31m"
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>'
ACTIVE = {
    "script": '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    "handler": '<?xml version="1.0"?><svg onload="alert(1)"/>',
    "address": '<svg><a href="javascript:alert(1)">x</a></svg>',
    "written out": '<svg><a href="&#106;avascript:alert(1)">x</a></svg>',
    "page": "<svg><foreignObject><b>x</b></foreignObject></svg>",
}


@requirement("P-33")
@pytest.mark.parametrize("revision", [each for each in ALL if each != "2024-10-07"])
async def test_instructions_and_title_of_a_server_leave_without_what_hides(revision: str, ran: Any) -> None:
    server = Server("kind", title=HIDDEN, instructions=HIDDEN)
    server.add(lambda: "x", name="any")
    async with Peer(server, revision=revision) as peer:
        ran(revision, "memory")
        await peer.call("any")
        if revision == ALL[-1]:
            await peer.request("server/discover")
        wire = b"".join(peer.wire).decode()
    assert "be kind" in wire
    assert not [char for char in "\U000e0041\u202e\u200b\x1b" if char in wire] and "\\u001b" not in wire


async def test_what_a_foreign_server_says_of_itself_is_cleaned_and_limited() -> None:
    server = Server("foreign", title=HIDDEN * 5_000, instructions=HIDDEN * 5_000, sanitize=None)  # a foreign one

    @server.tool(title=HIDDEN * 500)
    async def echo(text: str) -> str:
        return text

    async with Client(server) as client:
        titles = [each.title for each in await client.tools()]
        for text in (client.instructions, client.identity["title"], *titles):
            assert text.startswith("be kindbe kind") and len(text) <= 16_384
            assert not set("\U000e0041\u202e\u200b\x1b") & set(text)
        assert client.welcome["instructions"] == HIDDEN * 5_000, "as it came"


@requirement("P-33", everywhere=True)
@pytest.mark.parametrize("mime", ["image/svg+xml", "IMAGE/SVG+XML; charset=utf-8", "text/xml", ""])
@pytest.mark.parametrize("text", ACTIVE.values(), ids=ACTIVE)
async def test_svg_with_scripts_as_the_text_of_a_resource_is_withheld(mime: str, text: str) -> None:
    server = Server("drawing")

    @server.tool
    async def draws(text: str) -> EmbeddedResource:
        return EmbeddedResource({"uri": "file:///a.svg", "text": text, **({"mimeType": mime} if mime else {})})

    async with Peer(server) as peer:
        result = await peer.call("draws", {"text": text})
        assert "withheld" in result.text and "holds scripts" in result.text
        assert result.meta["io.handrail/sanitized"] == {"withheld media": 1}  # type: ignore[index]  # it has one
        [block] = (await peer.call("draws", {"text": SVG})).content
        assert isinstance(block, EmbeddedResource) and block.resource["text"] == SVG


async def test_markup_that_is_declared_as_text_is_read_and_stays() -> None:
    server = Server("reading")

    @server.tool
    async def reads() -> EmbeddedResource:
        return EmbeddedResource({"uri": "file:///a.svg", "text": ACTIVE["script"], "mimeType": "text/plain"})

    async with Peer(server) as peer:
        [block] = (await peer.call("reads")).content
        assert isinstance(block, EmbeddedResource) and block.resource["text"] == ACTIVE["script"]


def form(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields}


TEXT = {"type": "string"}
SECRETS = {
    "password": form(password=TEXT),
    "in camel case": form(userPassword=TEXT),
    "api key": form(api_key=TEXT),
    "by its title": form(field={"type": "string", "title": "Your password"}),
    "by its description": form(field={"type": "string", "description": "the access token of your account"}),
    "token": form(token=TEXT),
    "card": form(card_number=TEXT),
    "pin": form(pin_code=TEXT),
}
HARMLESS = {
    "name": form(name=TEXT),
    "pinned": form(pinned={"type": "boolean"}, opinion=TEXT, shipping=TEXT),
    "passenger": form(passenger=TEXT, compass=TEXT),
    "choice": form(reset_password={"type": "boolean"}),
    "tokens": form(max_tokens={"type": "integer"}),
}


@requirement("P-34")
@pytest.mark.parametrize("schema", SECRETS.values(), ids=SECRETS)
async def test_a_tool_cannot_ask_for_a_secret_by_a_form(
    schema: dict[str, Any], ran: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server, problems = Server("asking"), list[LocalProtocolError]()

    @server.tool
    async def asks(call: Call) -> str:
        try:
            await call.ask("Please", schema)
        except LocalProtocolError as problem:
            problems.append(problem)
            raise
        return "asked"

    async with Peer(
        server, capabilities={"elicitation": {"form": {}}}, answers=lambda *_: {"action": "cancel"}
    ) as peer:
        ran("2025-11-25", "memory")
        assert (await peer.call("asks")).is_error
    assert "asks for a secret" in str(problems[0]) and "ask_url" in str(problems[0])


@pytest.mark.parametrize("schema", HARMLESS.values(), ids=HARMLESS)
def test_other_forms_are_not_warned_of(schema: dict[str, Any]) -> None:
    assert Elicitation("s", "How are you?", schema).warning == ""


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize("schema", [*SECRETS.values(), form(text=TEXT)], ids=[*SECRETS, "by its message"])
async def test_a_client_is_warned_of_a_question_for_a_secret(
    schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    warnings: list[str] = []

    def script(rig: Rig, message: dict[str, Any]) -> None:
        if message.get("method") == "initialize":
            info = {"name": "rig", "version": "1"}
            rig.result(message, {"protocolVersion": rig.revision, "serverInfo": info, "capabilities": {"tools": {}}})
        elif message.get("method") == "tools/list":
            rig.result(message, {"tools": rig.tools})
        elif message.get("method") == "tools/call":
            rig.state["call"] = message
            rig.ask("q", "elicitation/create", message="Type in your account password", requestedSchema=schema)
        elif message.get("id") == "q":
            rig.result(rig.state["call"], {"content": []})
        elif "id" in message and "method" in message:
            rig.error(message, -32601)

    def declines(question: Elicitation) -> None:
        warnings.append(question.warning)

    rig: Any = Rig(script)
    with caplog.at_level(logging.WARNING, "handrail"):
        async with Client(rig, elicit=declines) as client:
            await client.call("echo", {})
    assert len(warnings) == 1 and "asks for a secret" in warnings[0]
    assert [each for each in caplog.messages if "asks for a secret" in each]


@pytest.mark.parametrize(
    ("url", "headers", "warned"),
    [
        ("http://tools.example/mcp", {"Authorization": "Bearer abcdef"}, True),
        ("http://192.0.2.7:8000/mcp", {"X-Api-Key": "abcdef"}, True),
        ("http://tools.example/mcp", {"Accept-Language": "de"}, False),
        ("https://tools.example/mcp", {"Authorization": "Bearer abcdef"}, False),
        ("http://127.0.0.1:8000/mcp", {"Authorization": "Bearer abcdef"}, False),
        ("http://localhost:8000/mcp", {"Authorization": "Bearer abcdef"}, False),
    ],
)
def test_a_secret_to_another_machine_in_the_clear_is_warned_of_before_it_is_sent(
    url: str, headers: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "handrail"):
        Client(url, headers=headers)
    told = [each for each in caplog.messages if "in the clear" in each]
    assert bool(told) == warned and not any("abcdef" in each for each in told)
    assert len(told) <= 1
