"""`handrail list`: the tools of a server (APP-01)."""

from __future__ import annotations

from argparse import Namespace

from handrail.cli.codes import Code
from handrail.cli.reach import client
from handrail.cli.screen import Screen
from handrail.guards.inert import one_line

__all__ = ["run"]


def run(args: Namespace, screen: Screen) -> int:
    with client(args, screen) as it:
        with screen.progress(f"listing the tools of {args.server}"):
            tools = it.tools()
        revision, problems = it.revision, dict(it.problems)
    if screen.as_json:
        listed = [{**tool.raw, "name": tool.name, "server": tool.server, "changed": tool.changed} for tool in tools]
        refused = [{"name": name, "why": why} for name, why in tools.refused.items()]
        failed = {name: str(problem) for name, problem in problems.items()}
        screen.data({"revision": revision, "tools": listed, "refused": refused, "problems": failed})
        return Code.OK
    rows = []
    for tool in tools:
        first = tool.description.strip().split("\n")[0]
        mark = "changed: " if tool.changed else ""
        title = f"{tool.title}: " if tool.title != tool.name else ""
        rows.append((tool.name, one_line(mark + title + first, 100)))
    if rows:
        screen.table(rows, styles=("bold",))
    else:
        screen.note("no tools")
    for name, why in tools.refused.items():
        screen.note(f"left out: {one_line(name, 60)}: {one_line(why, 200)}")
    for problem in problems.values():
        screen.note(str(problem))
    return Code.OK
