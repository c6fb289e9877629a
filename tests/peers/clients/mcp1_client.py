"""The `mcp` 1.x client against a server: plays the plan in argv[1], prints what came as one JSON object.

Run by that peer's own interpreter, see tests/interop/test_stdio.py and tests/interop/test_http.py. A plan is `{"mode",
"command", "args", "steps"}`, or has `"url"` for the command: of Streamable HTTP, or of the HTTP+SSE of 2024 if
`"transport"` is `sse`. A step is `{"call", "arguments", "answer"}`, the answer being what the person says when the tool
asks. With `"change"`, a call that changes the list, the names listed after the notice of it are printed too.
"""

import asyncio
import json
import sys

import mcp.types
from mcp import ClientSession, McpError, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client


def plain(model):
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def connect(plan):
    if "url" not in plan:
        return stdio_client(StdioServerParameters(command=plan["command"], args=plan["args"]))
    return (sse_client if plan["transport"] == "sse" else streamable_http_client)(plan["url"])


async def play(plan):
    mcp.types.LATEST_PROTOCOL_VERSION = plan["mode"]  # what it asks for; it supports all it can be given here
    steps, unexpected, changed = [], [], asyncio.Event()
    step = {}

    async def answer(context, params):
        step["asked"].append(plain(params))
        return mcp.types.ElicitResult.model_validate(step["answer"])

    async def progress(done, total, message):
        step["progress"].append([done, total, message])

    async def other(message):
        if isinstance(message, Exception):
            unexpected.append(repr(message))
        elif getattr(getattr(message, "root", None), "method", None) == "notifications/tools/list_changed":
            changed.set()

    async with (
        connect(plan) as (reading, writing, *_),
        ClientSession(reading, writing, elicitation_callback=answer, message_handler=other) as session,
    ):
        welcome = await session.initialize()
        tools = await session.list_tools()
        for each in plan["steps"]:
            step = {"asked": [], "progress": [], "answer": each.get("answer")}
            steps.append(step)
            try:
                step["result"] = plain(
                    await session.call_tool(each["call"], each.get("arguments"), progress_callback=progress)
                )
            except McpError as problem:
                step["error"] = plain(problem.error)
        relisted = None
        if "change" in plan:
            await session.call_tool(plan["change"]["call"], plan["change"]["arguments"])
            await asyncio.wait_for(changed.wait(), 60)
            relisted = [tool.name for tool in (await session.list_tools()).tools]
    return {
        "revision": welcome.protocolVersion,
        "server": plain(welcome.serverInfo),
        "tools": [plain(tool) for tool in tools.tools],
        "relisted": relisted,
        "steps": steps,
        "unexpected": unexpected,
    }


print(json.dumps(asyncio.run(play(json.loads(sys.argv[1])))))
