"""The `fastmcp` client against a server: plays the plan in argv[1], prints what came as one JSON object.

Run by that peer's own interpreter, see mcp1_client.py. `mode` is as for mcp2_client.py.
"""

import asyncio
import contextlib
import json
import sys
import warnings

import mcp_types
from fastmcp import Client
from fastmcp.client.elicitation import ElicitResult
from fastmcp.client.transports import SSETransport, StdioTransport, StreamableHttpTransport
from mcp import MCPDeprecationWarning, MCPError
from mcp.client.subscriptions import PromptsListChanged, ResourcesListChanged, listen
from pydantic_core import to_jsonable_python

# The newest revision subscribes in another way.
warnings.filterwarnings("ignore", category=MCPDeprecationWarning)

KINDS = {PromptsListChanged: "prompts", ResourcesListChanged: "resources"}


def plain(model):
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def transport(plan):
    if "url" not in plan:
        return StdioTransport(plan["command"], plan["args"], keep_alive=False)
    return (SSETransport if plan["transport"] == "sse" else StreamableHttpTransport)(plan["url"])


async def pages(client, kind):
    """All entries of a list."""
    methods = {
        "resources": client.list_resources,
        "templates": client.list_resource_templates,
        "prompts": client.list_prompts,
    }
    return [plain(each) for each in await methods[kind]()]


def reference(ref):
    names = {"ref/prompt": mcp_types.PromptReference, "ref/resource": mcp_types.ResourceTemplateReference}
    return names[ref["type"]](**ref)


async def heard(news, word):
    """What is heard until a word comes, each the URI of an update or the name of a list that has changed."""
    words = []
    while word not in words:
        words.append(await asyncio.wait_for(news(), 60))
    return words


@contextlib.asynccontextmanager
async def hearing(client, news, word):
    """A function that waits for the next that is heard: on a stream of its own, or among all that comes.

    It has no words of its own to subscribe, so its session of `mcp` is asked.
    """
    if client.session.protocol_version < "2026":
        if ":" in word:
            await client.session.subscribe_resource(word)
        yield news.get
        if ":" in word:
            await client.session.unsubscribe_resource(word)
        return
    wanted = {"resource_subscriptions": [word]} if ":" in word else {f"{word}_list_changed": True}
    async with listen(client.session, **wanted) as stream:

        async def following():
            event = await anext(stream)
            return KINDS.get(type(event)) or event.uri

        yield following


async def other_step(client, each, news):
    """Do a step that calls no tool; return its result."""
    match each:
        case {"subscribe": uri, "calls": calls}:
            async with hearing(client, news, uri) as following:
                for tool, arguments in calls:
                    await client.call_tool(tool, arguments)
                return await heard(following, uri)
        case {"change": kind, "calls": calls}:
            async with hearing(client, news, kind) as following:
                for tool, arguments in calls:
                    await client.call_tool(tool, arguments)
                await heard(following, kind)
            return await pages(client, kind)
        case {"list": kind}:
            return await pages(client, kind)
        case {"read": uri}:
            return plain(await client.read_resource_mcp(uri))
        case {"get": name}:
            return plain(await client.get_prompt(name, each.get("arguments")))
        case {"complete": ref, "argument": argument}:
            return plain(await client.complete(reference(ref), argument, each.get("context")))


async def play(plan):
    steps, unexpected, changed, news = [], [], asyncio.Event(), asyncio.Queue()
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
            return
        method = getattr(message, "method", "")
        match method.split("/"):
            case ["notifications", "tools", "list_changed"]:
                changed.set()
            case ["notifications", kind, "list_changed"]:
                news.put_nowait(kind)
            case ["notifications", "resources", "updated"]:
                news.put_nowait(message.params.uri)

    async with Client(transport(plan), mode=plan["mode"], elicitation_handler=answer, message_handler=other) as client:
        tools = await client.list_tools()
        for each in plan["steps"]:
            step = {"asked": [], "progress": [], "answer": each.get("answer")}
            steps.append(step)
            try:
                if "call" not in each:
                    step["result"] = await other_step(client, each, news)
                    continue
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


plans = json.loads(sys.argv[1])
played = [asyncio.run(play(each)) for each in plans] if isinstance(plans, list) else asyncio.run(play(plans))
print(json.dumps(played))
