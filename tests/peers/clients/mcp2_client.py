"""The `mcp` 2.x client against a server: plays the plan in argv[1], prints what came as one JSON object.

Run by that peer's own interpreter, see mcp1_client.py. `mode` is `legacy` (shake hands), `auto` (find out) or a
revision without a handshake.
"""

import asyncio
import json
import sys

import mcp_types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.sse import sse_client


def plain(model):
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def place(plan):
    if "url" not in plan:
        return StdioServerParameters(command=plan["command"], args=plan["args"])
    return sse_client(plan["url"]) if plan["transport"] == "sse" else plan["url"]


async def change(client, step, changed):
    """Change the list, and wait until the client was told: on a stream of its own, or just so."""
    if client.protocol_version < "2026":
        await client.call_tool(step["call"], step["arguments"])
        await asyncio.wait_for(changed.wait(), 60)
        return
    async with client.listen(tools_list_changed=True) as news:
        await client.call_tool(step["call"], step["arguments"])
        await asyncio.wait_for(anext(news), 60)


async def play(plan):
    steps, unexpected, changed = [], [], asyncio.Event()
    step = {}

    async def answer(context, params):
        step["asked"].append(plain(params))
        return mcp_types.ElicitResult.model_validate(step["answer"])

    async def progress(done, total, message):
        step["progress"].append([done, total, message])

    async def other(message):
        if isinstance(message, Exception):
            unexpected.append(repr(message))
        elif getattr(message, "method", None) == "notifications/tools/list_changed":
            changed.set()

    async with Client(place(plan), mode=plan["mode"], elicitation_callback=answer, message_handler=other) as client:
        tools = await client.list_tools()
        for each in plan["steps"]:
            step = {"asked": [], "progress": [], "answer": each.get("answer")}
            steps.append(step)
            try:
                step["result"] = plain(
                    await client.call_tool(each["call"], each.get("arguments"), progress_callback=progress)
                )
            except MCPError as problem:
                step["error"] = plain(problem.error)
        relisted = None
        if "change" in plan:
            await change(client, plan["change"], changed)
            relisted = [tool.name for tool in (await client.list_tools()).tools]
        return {
            "revision": client.protocol_version,
            "server": plain(client.server_info) if client.server_info else None,
            "tools": [plain(tool) for tool in tools.tools],
            "relisted": relisted,
            "steps": steps,
            "unexpected": unexpected,
        }


print(json.dumps(asyncio.run(play(json.loads(sys.argv[1])))))
