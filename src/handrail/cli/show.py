"""`handrail show`: one tool as a function would be shown."""

from __future__ import annotations

from argparse import Namespace

from handrail.cli.codes import Code, Usage
from handrail.cli.reach import client
from handrail.cli.screen import Screen
from handrail.client.listing import ListedTool, Tools
from handrail.client.signature import describe
from handrail.guards.inert import one_line
from handrail.schema.explain import closest

__all__ = ["find", "run"]


def run(args: Namespace, screen: Screen) -> int:
    with client(args, screen) as it, screen.progress(f"asking {args.server}"):
        tool = find(it.tools(), args.tool)
    if screen.as_json:
        screen.data({**tool.raw, "name": tool.name, "server": tool.server, "changed": tool.changed})
        return Code.OK
    screen.say(describe({**tool.raw, "name": tool.name}, screen.paint))
    if tool.changed:
        screen.note("the tool has changed since it was first seen here")
    return Code.OK


def find(tools: Tools, name: str) -> ListedTool:
    tool = tools.get(name)
    if tool is None:
        near = closest(name, [each.name for each in tools])
        hint = f"; did you mean {near}?" if near else ""
        raise Usage(f"no tool {one_line(name, 100)!r}{hint}")
    return tool
