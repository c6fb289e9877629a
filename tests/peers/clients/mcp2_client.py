"""The `mcp` 2.x client against a server: plays the plan in argv[1], prints what came as one JSON object.

Run by that peer's own interpreter, see mcp1_client.py. `mode` is `legacy` (shake hands), `auto` (find out) or a
revision without a handshake.
"""

import asyncio
import contextlib
import json
import sys
import warnings

import mcp_types
from mcp import Client, MCPDeprecationWarning, MCPError, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.subscriptions import PromptsListChanged, ResourcesListChanged

# The newest revision subscribes in another way.
warnings.filterwarnings("ignore", category=MCPDeprecationWarning)

KINDS = {PromptsListChanged: "prompts", ResourcesListChanged: "resources"}


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


async def pages(client, kind):
    """All entries of a list."""
    method, member = {
        "resources": (client.list_resources, "resources"),
        "templates": (client.list_resource_templates, "resource_templates"),
        "prompts": (client.list_prompts, "prompts"),
    }[kind]
    entries, cursor = [], None
    while True:
        page = await method(cursor=cursor)
        entries += [plain(each) for each in getattr(page, member)]
        if (cursor := page.next_cursor) is None:
            return entries


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
    """A function that waits for the next that is heard: on a stream of its own, or among all that comes."""
    if client.protocol_version < "2026":
        if ":" in word:
            await client.subscribe_resource(word)
        yield news.get
        if ":" in word:
            await client.unsubscribe_resource(word)
        return
    wanted = {"resource_subscriptions": [word]} if ":" in word else {f"{word}_list_changed": True}
    async with client.listen(**wanted) as stream:

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
            return plain(await client.read_resource(uri))
        case {"get": name}:
            return plain(await client.get_prompt(name, each.get("arguments")))
        case {"complete": ref, "argument": argument}:
            return plain((await client.complete(reference(ref), argument, each.get("context"))).completion)


async def play(plan):
    steps, unexpected, changed, news = [], [], asyncio.Event(), asyncio.Queue()
    step = {}

    async def answer(context, params):
        step["asked"].append(plain(params))
        return mcp_types.ElicitResult.model_validate(step["answer"])

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

    async with Client(place(plan), mode=plan["mode"], elicitation_callback=answer, message_handler=other) as client:
        tools = await client.list_tools()
        for each in plan["steps"]:
            step = {"asked": [], "progress": [], "answer": each.get("answer")}
            steps.append(step)
            try:
                if "call" in each:
                    result = await client.call_tool(each["call"], each.get("arguments"), progress_callback=progress)
                    step["result"] = plain(result)
                else:
                    step["result"] = await other_step(client, each, news)
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


plans = json.loads(sys.argv[1])
played = [asyncio.run(play(each)) for each in plans] if isinstance(plans, list) else asyncio.run(play(plans))
print(json.dumps(played))
