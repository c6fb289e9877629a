"""The `fastmcp` client against a server: plays the plan in argv[1], prints what came as one JSON object.

Run by that peer's own interpreter, see mcp1_client.py. `mode` is as for mcp2_client.py.
"""

import asyncio
import json
import sys

from fastmcp import Client
from fastmcp.client.elicitation import ElicitResult
from fastmcp.client.transports import SSETransport, StdioTransport, StreamableHttpTransport
from mcp import MCPError
from pydantic_core import to_jsonable_python


def plain(model):
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def transport(plan):
    if "url" not in plan:
        return StdioTransport(plan["command"], plan["args"], keep_alive=False)
    return (SSETransport if plan["transport"] == "sse" else StreamableHttpTransport)(plan["url"])


async def play(plan):
    steps, unexpected, changed = [], [], asyncio.Event()
    step = {}

    async def answer(message, response_type, params, context):
        step["asked"].append(plain(params))
        said = step["answer"]
        content = said.get("content")
        # The class it made of our schema has to take the answer.
        made = response_type(**content) if content is not None else None
        return ElicitResult(action=said["action"], content=made)

    async def progress(done, total, message):
        step["progress"].append([done, total, message])

    async def other(message):
        if isinstance(message, Exception):
            unexpected.append(repr(message))
        elif getattr(message, "method", None) == "notifications/tools/list_changed":
            changed.set()

    async with Client(transport(plan), mode=plan["mode"], elicitation_handler=answer, message_handler=other) as client:
        tools = await client.list_tools()
        for each in plan["steps"]:
            step = {"asked": [], "progress": [], "answer": each.get("answer")}
            steps.append(step)
            try:
                result = await client.call_tool(
                    each["call"], each.get("arguments"), progress_handler=progress, raise_on_error=False
                )
            except MCPError as problem:
                step["error"] = plain(problem.error)
            else:
                step["result"] = {"content": [plain(block) for block in result.content], "isError": result.is_error}
                if result.structured_content is not None:
                    step["result"]["structuredContent"] = result.structured_content
                    step["data"] = to_jsonable_python(result.data)
        relisted = None
        if "change" in plan:
            await client.call_tool(plan["change"]["call"], plan["change"]["arguments"])
            await asyncio.wait_for(changed.wait(), 60)
            relisted = [tool.name for tool in await client.list_tools()]
        return {
            "revision": client.session.protocol_version,
            "server": plain(client.session.server_info) if client.session.server_info else None,
            "tools": [plain(tool) for tool in tools],
            "relisted": relisted,
            "steps": steps,
            "unexpected": unexpected,
        }


print(json.dumps(asyncio.run(play(json.loads(sys.argv[1])))))
