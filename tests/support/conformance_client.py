"""Our client as the official suite starts it: the server's address is the argument, the scenario in the environment."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urljoin

import aiohttp

from handrail import Client, Elicitation, allow
from handrail.errors import PeerError
from handrail.oauth.client import OAuth

Object = dict[str, Any]

SCENARIO = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
CONTEXT: Object = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")


def accepts(question: Elicitation) -> Object:
    """Whatever the form proposes, and yes."""
    fields = question.schema.get("properties", {})
    return {name: True for name, field in fields.items() if field.get("type") == "boolean" and "default" not in field}


async def listing(client: Client) -> None:
    if "tools" in client.welcome["capabilities"]:  # without, the suite's server must not be asked for them
        await client.tools()


async def first_tool(client: Client) -> None:
    if "tools" in client.welcome["capabilities"]:
        await client.call((await client.tools())[0].name, {})


async def every_tool(client: Client) -> None:
    for tool in await client.tools():
        await client.call(tool.name, {})


async def adding(client: Client) -> None:
    tools = await client.tools()
    await client.call(tools[0].name, {"a": 2, "b": 3})


async def calling(*names: str, client: Client) -> None:
    await client.tools()
    for name in names:
        await client.call(name, {})


async def keeping_schemas(client: Client) -> None:
    tools = await client.tools()
    await client.call("json_schema_echo", {"schema": tools["json_schema_2020_12_tool"].raw["inputSchema"]})


async def replaying(client: Client) -> None:
    await client.tools()
    for each in CONTEXT["toolCalls"]:
        await client.call(each["name"], each["arguments"])


async def follow(url: str, host: str) -> str:
    """A browser whose user says yes to everything: the address it is sent back to."""
    async with aiohttp.ClientSession() as session, session.get(url, allow_redirects=False) as response:
        return urljoin(url, response.headers["Location"])


def authorization() -> OAuth:
    known: Object = {"client_id": CONTEXT.get("client_id"), "client_secret": CONTEXT.get("client_secret")}
    if SCENARIO == "auth/pre-registration":
        return OAuth(browser=follow, **known)
    if SCENARIO == "auth/client-credentials-basic":
        return OAuth(grant="client_credentials", **known)
    if SCENARIO == "auth/client-credentials-jwt":
        key = {"private_key": CONTEXT["private_key_pem"], "signing_algorithm": CONTEXT["signing_algorithm"]}
        return OAuth(grant="client_credentials", **known, **key)
    return OAuth(browser=follow, client_metadata_url="https://conformance-test.local/client-metadata.json")


MRTR = ("test_mrtr_echo_state", "test_mrtr_unrelated", "test_mrtr_no_state", "test_mrtr_no_result_type")
WALKS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "initialize": listing,
    "json-schema-ref-no-deref": listing,
    "tools_call": adding,
    "elicitation-sep1034-client-defaults": lambda client: calling("test_client_elicitation_defaults", client=client),
    "sse-retry": lambda client: calling("test_reconnection", client=client),
    "json-schema-2020-12-preservation": keeping_schemas,
    "request-metadata": first_tool,
    "http-standard-headers": every_tool,
    "http-custom-headers": replaying,
    "http-invalid-tool-headers": every_tool,
    "sep-2322-client-request-state": lambda client: calling(*MRTR, client=client),
}


async def main(url: str) -> int:
    version = os.environ.get("MCP_CONFORMANCE_PROTOCOL_VERSION", "auto")
    options: Object = {"elicit": accepts, "sample": lambda _: "a text", "roots": [os.getcwd()], "confirm": allow}
    if SCENARIO.startswith("auth/"):
        options = {"auth": authorization(), "confirm": allow}
    try:
        async with Client(url, revision=version, **options) as client:
            await WALKS.get(SCENARIO, first_tool)(client)
    except PeerError as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[-1])))
