"""`handrail trust`: what the tools of upstream servers are taken for, which a person accepts once (P-31, GW-21)."""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace

from msgspec import to_builtins

from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.gateway import UpstreamSource, records_of
from handrail.cli.load_server import CommandConfig
from handrail.cli.terminal import Screen, json_text
from handrail.errors import TransportError
from handrail.gateway.questions import ALL_CAPABILITIES
from handrail.gateway.trust import ToolClass
from handrail.gateway.upstream import Upstream, UpstreamTool
from handrail.guards.tool_definitions import format_changes
from handrail.model import Object
from handrail.server import Server
from handrail.text.controls import one_line

__all__ = ["run_trust", "see_upstreams"]

LIST_SECONDS = 60.0  # for a command that is downloaded first
_CLASSES: dict[str, ToolClass] = {"r": "reads", "w": "writes", "d": "destroys"}
_CHOICE = re.compile(r"(\d+)\s*=?\s*([rwd])(?:eads|rites|estroys)?")


def run_trust(args: Namespace, screen: Screen) -> int:
    files = [each for each in args.words if each.endswith(".json")]
    names = [each for each in args.words if each not in files]
    if len(files) > 1:
        raise UsageError(f"several files: {' and '.join(files)}; name one")
    args = Namespace(**{**vars(args), "target": next(iter(files), None), "trust": False})
    source = _source(args, names, screen)
    server = source.load(names, list_seconds=LIST_SECONDS)
    if any(each.sign_in is not None for each in server.upstreams.values()):
        server.guard(store=source.sign_in_store)  # with the sign-in of the user of this machine
    with screen.progress("listing the tools"):
        asyncio.run(see_upstreams(server))
    looks = [_Look(each) for each in server.upstreams.values()]
    is_accepted = args.accept or (not screen.as_json and screen.is_attended)
    for look in looks:
        if not screen.as_json:
            look.show(screen)
        if is_accepted and look.tools and (args.accept or look.ask(screen)):
            look.accept(source, screen)
    if screen.as_json:
        screen.data([look.as_json() for look in looks])
    elif not is_accepted:
        screen.note("nothing was accepted: --accept accepts all as shown")
    if not names:
        source.report(screen)
    needs_sign_in = "this user has not signed in to it; the console shows its tools as callers get them"
    failed = {look.upstream.name: look.upstream.problem or needs_sign_in for look in looks if not look.is_listed}
    if failed:
        raise TransportError("; ".join(f"{name} was not listed: {problem}" for name, problem in failed.items()))
    return ExitCode.OK


def _source(args: Namespace, names: list[str], screen: Screen) -> UpstreamSource:
    """Return where the servers are configured: as the words say, or else as a gateway that has run here was started."""
    screen_to_ask = screen if args.yes or screen.is_attended else None
    command_config = CommandConfig(args, args.target)
    is_there = args.target or args.server or (command_config.config.upstreams and not names)
    if is_there or any(name in command_config.config.upstreams for name in names):
        return UpstreamSource(args, command_config, screen_to_ask)
    records = [each for name in names[:1] for each in records_of(name)]
    if len(records) != 1:
        which = "several gateways that have run here have" if records else "no gateway that has run here has"
        what = f"{which} a server {names[0]!r}: " if names else ""
        raise UsageError(f"{what}name the FILE.json, the --server or the --config of the gateway")
    words = {key: records[0][key] or None for key in ("name", "target", "config")}
    args = Namespace(**{**vars(args), **words, "server": records[0]["server"]})
    return UpstreamSource(args, CommandConfig(args, args.target), screen_to_ask)


async def see_upstreams(server: Server) -> None:
    """Fetch the lists of all upstreams, with all that a client could show more tools for."""
    async with server.serving():
        await asyncio.gather(*(each.lists.load(ALL_CAPABILITIES) for each in server.upstreams.values()))


class _Look:
    """The tools of one upstream, each with the class that would be accepted."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.is_listed = any(view.is_loaded for view in upstream.lists.views.values())
        self.tools = [each for each in upstream.tools if each.state not in ("denied", "refused")]
        self.classes = {each.own_name: each.accepted or each.proposal for each in self.tools}
        self.is_accepted = False

    def show(self, screen: Screen) -> None:
        upstream = self.upstream
        screen.write(f"{screen.paint(one_line(upstream.name), 'bold')}  {one_line(upstream.target.label, 200)}")
        rows = [(f"{number}", *self._row(tool)) for number, tool in enumerate(self.tools, 1)]
        if rows:
            screen.table(rows, indent="  ", styles=("dim", "bold"))
        for tool in self.tools:
            if tool.changes:
                screen.write(f"  {one_line(tool.own_name)} has changed:")
                screen.write("\n".join(f"    {line}" for line in format_changes(tool.changes).split("\n")))
        for tool in upstream.tools:
            if tool.reason and tool not in self.tools:
                screen.note(f"left out: {one_line(tool.own_name, 60)}: {one_line(tool.reason, 200)}")

    def _row(self, tool: UpstreamTool) -> tuple[str, ...]:
        origin = "accepted" if tool.accepted else "proposed"
        if tool.accepted != self.classes[tool.own_name] != tool.proposal:
            origin = "chosen"
        claims = ", ".join(f"{hint}: {json_text(value)}" for hint, value in _hints(tool).items())
        state = {"new": "new", "quarantined": "changed"}.get(tool.state, "")
        claims = f"it says {one_line(claims, 100)}" if claims else "it says nothing"
        return tool.own_name, f"{self.classes[tool.own_name]} ({origin})", claims, state

    def ask(self, screen: Screen) -> bool:
        """Ask until the classes are accepted or not; an answer such as `3 w` changes one."""
        while True:
            answer = screen.read("Accept all of them? [y/N, or 3 r, 3 w, 3 d: tool 3 reads, writes, destroys] ") or ""
            choice = _CHOICE.fullmatch(answer.strip().lower())
            if choice is None or not 0 < int(choice[1]) <= len(self.tools):
                return answer.lower() in ("y", "yes")
            self.classes[self.tools[int(choice[1]) - 1].own_name] = _CLASSES[choice[2]]
            screen.table([(choice[1], *self._row(self.tools[int(choice[1]) - 1]))], indent="  ", styles=("dim", "bold"))

    def accept(self, source: UpstreamSource, screen: Screen) -> None:
        self.upstream.accept(self.classes)
        self.is_accepted = True
        screen.note(f"{self.upstream.name}: accepted, in {source.lock}")

    def as_json(self) -> Object:
        tools = [{**to_builtins(each), "class": self.classes.get(each.own_name)} for each in self.upstream.tools]
        names = {"server": self.upstream.name, "target": self.upstream.target.label, "revision": self.upstream.revision}
        return {**names, "accepted": self.is_accepted, "tools": tools}


def _hints(tool: UpstreamTool) -> Object:
    hints = tool.raw.get("annotations")
    return {name: value for name, value in hints.items() if name.endswith("Hint")} if type(hints) is dict else {}
