"""The server the official conformance suite talks to: its fixtures but those of tasks, written with our library.

Run it: it prints its URL and serves until it is told to stop. With `stdio` behind it, it serves there.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from handrail import (
    Audio,
    Call,
    EmbeddedResource,
    Form,
    Image,
    PromptMessage,
    Roots,
    Sample,
    Server,
    Text,
    ToolError,
)
from handrail.engine.input_requests import Question
from subject import PNG, WAV

Object = dict[str, Any]

STEP_SECONDS = 0.05  # between notices, as the suite's own fixtures have it

server = Server("conformance", version="1.0.0", title="What the conformance suite asks for")


@dataclass
class Name:
    name: str


@dataclass
class Color:
    color: str


@dataclass
class Confirmation:
    ok: bool


@dataclass
class Context:
    context: str


@dataclass
class Contact:
    username: str
    email: str


# Every revision


@server.tool
async def test_simple_text() -> str:
    """A text."""
    return "This is a simple text response for testing."


@server.tool
async def test_image_content() -> Image:
    """A picture."""
    return Image(data=PNG, mime_type="image/png")


@server.tool
async def test_audio_content() -> Audio:
    """A sound."""
    return Audio(data=WAV, mime_type="audio/wav")


@server.tool
async def test_embedded_resource() -> EmbeddedResource:
    """A document."""
    text = "This is an embedded resource content."
    return EmbeddedResource({"uri": "test://embedded-resource", "mimeType": "text/plain", "text": text})


@server.tool
async def test_multiple_content_types() -> list[Text | Image | EmbeddedResource]:
    """A text, a picture and a document."""
    mixed = {"uri": "test://mixed-content-resource", "mimeType": "application/json"}
    return [
        Text("Multiple content types test:"),
        Image(data=PNG, mime_type="image/png"),
        EmbeddedResource({**mixed, "text": '{"test":"data","value":123}'}),
    ]


@server.tool
async def test_error_handling() -> str:
    """Fails."""
    raise ToolError("This tool intentionally returns an error for testing")


@server.tool
async def test_tool_with_progress(call: Call) -> str:
    """Tells how far it is, three times."""
    for done in (0, 50, 100):
        await call.progress(done, 100)
        await asyncio.sleep(STEP_SECONDS)
    return "Done."


@server.tool(
    input_schema={
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            }
        },
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    }
)
async def json_schema_2020_12_tool(**arguments: Any) -> str:
    """Has a schema with the words of 2020-12."""
    return f"Called with {', '.join(arguments)}."


# Revisions with a handshake


@server.tool
async def test_tool_with_logging(call: Call) -> str:
    """Logs what it does."""
    for text in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await call.log("info", text)
        await asyncio.sleep(STEP_SECONDS)
    return "Logged."


@server.tool
async def test_sampling(prompt: str, call: Call) -> str:
    """Has the client's model answer."""
    answer = await call.sample(prompt, max_tokens=100)
    return f"LLM response: {answer['content']['text']}"


@server.tool
async def test_elicitation(message: str, call: Call) -> str:
    """Asks the user."""
    answer = await call.ask(message, Contact)
    return f"User response: {answer.action} {answer.content}"


@server.tool
async def test_elicitation_sep1034_defaults(call: Call) -> str:
    """Asks with a default for every kind of field."""
    fields: Object = {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": True},
    }
    answer = await call.ask("Please look at these.", {"type": "object", "properties": fields})
    return f"Elicitation completed: {answer.action} {answer.content}"


@server.tool
async def test_elicitation_sep1330_enums(call: Call) -> str:
    """Asks with every kind of choice."""
    plain = ["option1", "option2", "option3"]
    titled = [{"const": f"value{at}", "title": f"Option {at}"} for at in (1, 2, 3)]
    fields: Object = {
        "untitledSingle": {"type": "string", "enum": plain},
        "titledSingle": {"type": "string", "oneOf": titled},
        "legacyEnum": {"type": "string", "enum": ["opt1", "opt2"], "enumNames": ["Option One", "Option Two"]},
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": plain}},
        "titledMulti": {"type": "array", "items": {"anyOf": titled}},
    }
    answer = await call.ask("Please choose.", {"type": "object", "properties": fields})
    return f"Elicitation completed: {answer.action} {answer.content}"


@server.tool
async def test_reconnection(call: Call) -> str:
    """Lets go of the stream it is to be answered on."""
    await call.close_stream()
    await asyncio.sleep(STEP_SECONDS)
    return "Reconnection test completed."


# 2026-07-28

fleeting: set[str] = set()  # what is here now


def come_or_go(kind: Literal["tool", "prompt"], function: Callable[[], Awaitable[str]]) -> None:
    """Really change a list: of one that is the same in the end a gateway has nothing to tell."""
    name = function.__name__
    if name in fleeting:
        server.remove(name, kind=kind)
    else:
        (server.tool if kind == "tool" else server.prompt)(function)
    fleeting.symmetric_difference_update([name])


@server.tool
async def test_missing_capability(call: Call) -> str:
    """Cannot do without sampling."""
    call.require("sampling")
    return "The client can sample."


@server.tool
async def test_streaming_elicitation(call: Call) -> str:
    """Has more to say than its answer, but asks nothing."""
    await call.progress(1, 1)
    return "Nothing was asked."


@server.tool
async def test_logging_tool(call: Call) -> str:
    """Logs, if the request wants it."""
    await call.log("info", "Tool execution started")
    return "Logged."


@server.tool
async def test_trigger_tool_change() -> str:
    """Makes a tool come, and go the next time."""

    async def test_fleeting() -> str:
        """Is soon gone."""
        return "Still here."

    come_or_go("tool", test_fleeting)
    return "The tools have changed."


@server.tool
async def test_trigger_prompt_change() -> str:
    """Makes a prompt come, and go the next time."""

    async def test_fleeting_prompt() -> str:
        """Is soon gone."""
        return "Still here."

    come_or_go("prompt", test_fleeting_prompt)
    return "The prompts have changed."


@server.tool(
    input_schema={
        "type": "object",
        "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
        "required": ["region"],
    }
)
async def test_x_mcp_header(region: str) -> str:
    """Has an argument that is repeated in a header."""
    return f"Served in {region}."


@server.tool
async def test_input_required_result_elicitation(call: Call) -> str:
    """Asks for a name."""
    answer = await call.ask("What is your name?", Name, key="user_name")
    return f"Hello, {answer.content.name}!" if answer.action == "accept" else "Hello!"


@server.tool
async def test_input_required_result_sampling(call: Call) -> str:
    """Asks the client's model."""
    answer = await call.sample("What is the capital of France?", max_tokens=100, key="capital_question")
    return str(answer["content"]["text"])


@server.tool
async def test_input_required_result_list_roots(call: Call) -> str:
    """Asks for the client's folders."""
    roots = await call.roots(key="client_roots")
    return ", ".join(root["uri"] for root in roots)


@server.tool
async def test_input_required_result_request_state(call: Call) -> str:
    """Asks for a confirmation, and gets its state back."""
    await call.ask("Please confirm.", Confirmation, key="confirm")
    return "state-ok"


@server.tool
async def test_input_required_result_multiple_inputs(call: Call) -> str:
    """Asks for three things at once."""
    answers = await call.ask_all(
        {
            "user_name": Form("What is your name?", Name),
            "greeting": Sample("Generate a greeting", max_tokens=50),
            "client_roots": Roots(),
        }
    )
    return f"Got {', '.join(answers)}."


@server.tool
async def test_input_required_result_multi_round(call: Call) -> str:
    """Asks for one thing after the other."""
    name = await call.ask("Step 1: what is your name?", Name, key="step1")
    color = await call.ask("Step 2: what is your favourite colour?", Color, key="step2")
    return f"{name.content} likes {color.content}."


@server.tool
async def test_input_required_result_tampered_state(call: Call) -> str:
    """Asks for a confirmation, and does not take a changed state for its own."""
    await call.ask("Please confirm.", Confirmation, key="confirm")
    return "state-ok"


@server.tool
async def test_input_required_result_capabilities(call: Call) -> str:
    """Asks only what this client can answer."""
    able: dict[str, Question] = {
        "capital_question": Sample("What is the capital of France?", max_tokens=100),
        "user_name": Form("What is your name?", Name),
    }
    answers = await call.ask_all({key: it for key, it in able.items() if call.client.declares(it.capability)})
    return f"Got {', '.join(answers) or 'nothing'}."


# Resources


@server.resource("test://static-text", mime_type="text/plain")
async def static_text() -> str:
    """A text that stays as it is."""
    return "This is the content of the static text resource."


@server.resource("test://static-binary", mime_type="image/png")
async def static_binary() -> bytes:
    """A picture that stays as it is."""
    return PNG


@server.resource("test://watched-resource", mime_type="text/plain")
async def watched_resource() -> str:
    """A text to subscribe to."""
    return "This is the content of the watched resource."


@server.resource("test://template/{id}/data", mime_type="application/json", complete={"id": lambda value: [value]})
async def template_data(id: str) -> Object:
    """The data of an id."""
    return {"id": id, "templateTest": True, "data": f"Data for ID: {id}"}


# Prompts


@server.prompt
async def test_simple_prompt() -> str:
    """A prompt without arguments."""
    return "This is a simple prompt for testing."


@server.prompt(complete={"arg1": lambda value: [f"{value}{end}" for end in ("", "er", "ing")]})
async def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """A prompt with two arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.prompt
async def test_prompt_with_embedded_resource(resourceUri: str) -> list[str | EmbeddedResource]:  # noqa: N803
    """A prompt with a document."""
    document = {"uri": resourceUri, "mimeType": "text/plain", "text": "Embedded resource content for testing."}
    return [EmbeddedResource(document), "Please process the embedded resource above."]


@server.prompt
async def test_prompt_with_image() -> list[PromptMessage]:
    """A prompt with a picture."""
    picture = Image(data=PNG, mime_type="image/png")
    return [PromptMessage("user", picture), PromptMessage("user", "Please analyze the image above.")]


@server.prompt
async def test_input_required_result_prompt(call: Call) -> str:
    """Asks for the context."""
    answer = await call.ask("What is the context?", Context, key="user_context")
    return f"Go on from here: {answer.content.context if answer.action == 'accept' else 'nothing'}."


if __name__ == "__main__":
    if sys.argv[1:] == ["stdio"]:
        server.run()
    else:
        server.run(http="127.0.0.1:0", ready=lambda url: print(url, flush=True))
