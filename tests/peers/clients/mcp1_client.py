"""The `mcp` 1.x client against a server: plays the plan in argv[1], prints what came as one JSON object.

Run by that peer's own interpreter, see tests/interop/test_stdio.py and tests/interop/test_http.py. A plan is `{"mode",
"command", "args", "steps"}`, or has `"url"` for the command: of Streamable HTTP, or of the HTTP+SSE of 2024 if
`"transport"` is `sse`. A step is `{"call", "arguments", "answer"}`, the answer being what the person says when the tool
asks. Of a list of plans each is played, one after the other, and a list is printed. With `"change"`, a call that
changes the list, the names listed after the notice of it are printed too.

For resources and prompts a step is `{"list": "resources"}` (or templates, prompts), `{"read": uri}`, `{"get": prompt,
"arguments"}` or `{"complete": reference, "argument", "context"}`. With `"calls"`, each a tool and its arguments,
`{"subscribe": uri}` gives what the client heard until the update of the URI, and `{"change": "resources"}` the list
after its notice.
"""

import asyncio
import contextlib
import json
import sys

import mcp.types
from mcp import ClientSession, McpError, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import AnyUrl


def plain(model):
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def connect(plan):
    if "url" not in plan:
        return stdio_client(StdioServerParameters(command=plan["command"], args=plan["args"]))
    return (sse_client if plan["transport"] == "sse" else streamable_http_client)(plan["url"])


async def pages(session, kind):
    """All entries of a list."""
    method, member = {
        "resources": (session.list_resources, "resources"),
        "templates": (session.list_resource_templates, "resourceTemplates"),
        "prompts": (session.list_prompts, "prompts"),
    }[kind]
    entries, cursor = [], None
    while True:
        page = await method(params=mcp.types.PaginatedRequestParams(cursor=cursor))
        entries += [plain(each) for each in getattr(page, member)]
        if (cursor := page.nextCursor) is None:
            return entries


def reference(ref):
    names = {"ref/prompt": mcp.types.PromptReference, "ref/resource": mcp.types.ResourceTemplateReference}
    return names[ref["type"]](**ref)


async def heard(news, word):
    """What is heard until a word comes, each the URI of an update or the name of a list that has changed."""
    words = []
    while word not in words:
        words.append(await asyncio.wait_for(news(), 60))
    return words


@contextlib.asynccontextmanager
async def hearing(session, news, word):
    """A function that waits for the next that is heard; of a URI, while it is subscribed to."""
    if ":" in word:
        await session.subscribe_resource(AnyUrl(word))
    yield news.get
    if ":" in word:
        await session.unsubscribe_resource(AnyUrl(word))


async def other_step(session, each, news):
    """Do a step that calls no tool; return its result."""
    match each:
        case {"subscribe": uri, "calls": calls}:
            async with hearing(session, news, uri) as following:
                for tool, arguments in calls:
                    await session.call_tool(tool, arguments)
                return await heard(following, uri)
        case {"change": kind, "calls": calls}:
            async with hearing(session, news, kind) as following:
                for tool, arguments in calls:
                    await session.call_tool(tool, arguments)
                await heard(following, kind)
            return await pages(session, kind)
        case {"list": kind}:
            return await pages(session, kind)
        case {"read": uri}:
            return plain(await session.read_resource(AnyUrl(uri)))
        case {"get": name}:
            return plain(await session.get_prompt(name, each.get("arguments")))
        case {"complete": ref, "argument": argument}:
            return plain((await session.complete(reference(ref), argument, each.get("context"))).completion)


async def play(plan):
    mcp.types.LATEST_PROTOCOL_VERSION = plan["mode"]  # what it asks for; it supports all it can be given here
    steps, unexpected, changed, news = [], [], asyncio.Event(), asyncio.Queue()
    step = {}

    async def answer(context, params):
        step["asked"].append(plain(params))
        return mcp.types.ElicitResult.model_validate(step["answer"])

    async def progress(done, total, message):
        step["progress"].append([done, total, message])

    async def other(message):
        if isinstance(message, Exception):
            unexpected.append(repr(message))
            return
        method = getattr(getattr(message, "root", None), "method", "")
        match method.split("/"):
            case ["notifications", "tools", "list_changed"]:
                changed.set()
            case ["notifications", kind, "list_changed"]:
                news.put_nowait(kind)
            case ["notifications", "resources", "updated"]:
                news.put_nowait(str(message.root.params.uri))

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
                if "call" in each:
                    result = await session.call_tool(each["call"], each.get("arguments"), progress_callback=progress)
                    step["result"] = plain(result)
                else:
                    step["result"] = await other_step(session, each, news)
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


plans = json.loads(sys.argv[1])
played = [asyncio.run(play(each)) for each in plans] if isinstance(plans, list) else asyncio.run(play(plans))
print(json.dumps(played))
