"""`handrail approve`: the calls that wait for a person, and yes or no to them."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import signal
import sys
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path
from shutil import get_terminal_size

from msgspec import to_builtins

from handrail.cli.codes import Code, Usage
from handrail.cli.guarded import Guarded
from handrail.cli.screen import Screen
from handrail.client.state import state_folder
from handrail.guards.approval import Approval, ApprovalError, Desk
from handrail.guards.inert import inert, one_line
from handrail.guards.limits import LOCAL
from handrail.guards.trail import DATABASES, open_trail
from handrail.model import Object
from handrail.stores.sqlite import SqliteStore

__all__ = ["run"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def run(args: Namespace, screen: Screen) -> int:
    try:
        return asyncio.run(_run(args, screen))
    except asyncio.CancelledError:  # by a request to end
        return Code.INTERRUPTED


async def _run(args: Namespace, screen: Screen) -> int:
    task = asyncio.current_task()
    assert task is not None
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            asyncio.get_running_loop().add_signal_handler(getattr(signal, name), task.cancel)
    config = Guarded(args).config
    kept = config.guards(state_folder(os.environ))
    audit = kept.get("audit")
    file = kept.get("store", audit)
    if args.audit:
        audit = file = Path(args.audit)
        if file.suffix not in DATABASES or not file.is_file():
            raise Usage(f"--audit: {file}: not the file of an audit in which approvals wait ({', '.join(DATABASES)})")
    assert isinstance(file, Path)
    if not file.exists():
        screen.note(f"{file}: nothing has been served from here, so nothing can wait")
        return Code.OK
    store = SqliteStore(file, durable=config.audit.kept.sync == "every-call")
    trail = None
    if isinstance(audit, Path):
        trail = open_trail(store if audit == file else audit, config.audit.kept, store=store)
    try:
        return await _Clerk(Desk(store, config.approvals, trail=trail), store, args, screen).work()
    finally:
        if trail is not None:
            await trail.close()
        await store.close()


class _Clerk:
    def __init__(self, desk: Desk, store: SqliteStore, args: Namespace, screen: Screen) -> None:
        self._desk = desk
        self._store = store
        self._args = args
        self._screen = screen
        self._who = f"operator {getpass.getuser()}"

    async def work(self) -> int:
        args = self._args
        if args.remembered:
            return await self._remembered()
        if args.revoke:
            if not await self._desk.revoke(args.revoke, by=self._who):
                raise Usage(f"{args.revoke}: nothing of that name is remembered")
            self._screen.note(f"{args.revoke}: forgotten; the next such call asks again")
            return Code.OK
        if args.id is None:
            return await (self._watch() if args.watch else self._all())
        approval = await self._desk.get(args.id)
        if approval is None:
            raise Usage(f"{args.id}: there is no such approval")
        if args.answer is None:
            self._show(approval)
            return await self._ask(approval) if approval.state == "pending" else Code.OK
        return await self._decide(approval, args.answer)

    async def _all(self) -> int:
        waiting = await self._desk.open()
        if self._screen.as_json:
            self._screen.data([to_builtins(each) for each in waiting])
        elif not waiting:
            self._screen.say("nothing waits for an approval")
        elif self._screen.is_attended and sys.stdout.isatty():
            for approval in waiting:
                self._show(approval)
                await self._ask(approval)
        else:
            for approval in waiting:
                self._show(approval)
        return Code.OK

    async def _watch(self) -> int:
        seen: set[str] = set()
        while True:
            async with self._store.subscribe("approvals") as news:
                fresh = [each for each in await self._desk.open() if each.id not in seen]
                if not fresh:
                    await anext(news)
            for approval in fresh:  # not while listening: a person may take longer than news are kept
                seen.add(approval.id)
                self._show(approval)
                if not self._screen.as_json and self._screen.is_attended and sys.stdout.isatty():
                    await self._ask(approval)

    async def _remembered(self) -> int:
        grants = await self._desk.grants()
        if self._screen.as_json:
            self._screen.data([to_builtins(each) for each in grants])
            return Code.OK
        for each in grants:
            shown = one_line(json.dumps({**each.arguments, **each.matching}, ensure_ascii=False), 100)
            who, tool = one_line(each.principal), one_line(each.tool)
            self._screen.say(f"{each.id}  {who}  {tool}  {shown}  until {_time(each.until)}, by {one_line(each.by)}")
        return Code.OK

    def _show(self, approval: Approval) -> None:
        """All of it: what is agreed to must have been seen."""
        if self._screen.as_json:
            self._screen.data(to_builtins(approval))
            return
        asked, paint = approval.asked, self._screen.paint
        say = self._screen.say
        tool, server = inert(asked.tool, lines=False), inert(asked.server, lines=False)
        say(f"{paint(approval.id, 'bold')}  {paint(tool, 'bold')} on {server}  {approval.state}")
        client = f" with {one_line(asked.client, 40)}" if asked.client else ""  # its own words: not a line of them
        when = f"at {_time(approval.created)}, until {_time(approval.expires)}"
        say(f"  asked by {inert(asked.principal, lines=False)}{client} {when}")
        say(f"  because {inert(asked.why, lines=False)} ({inert(asked.rule, lines=False)})")
        room = max(20, get_terminal_size().columns - 4)
        for line in inert(json.dumps(asked.arguments, indent=2, ensure_ascii=False)).splitlines():
            step = room if line.isascii() else room // 2
            for at in range(0, len(line), step):  # a line the terminal breaks could pass for two of ours
                say(f"  {'|' if at == 0 else '>'} {line[at : at + step]}")
        for line in approval.before:
            say(f"  since it was last allowed: {inert(line, lines=False)}")

    async def _ask(self, approval: Approval) -> int:
        answer = self._read("Allow it? [y/N/e(dit)/s(kip)] ")
        word = (answer or "").lower()
        if answer is None or word in ("s", "skip"):
            return Code.OK
        try:
            return await self._decide(approval, {"y": "yes", "yes": "yes", "e": "edit", "edit": "edit"}.get(word, "no"))
        except (ApprovalError, Usage) as problem:  # others may still wait
            self._screen.note(str(problem))
            return Code.USAGE

    def _read(self, prompt: str) -> str | None:
        """Nothing else goes on meanwhile, so that Ctrl-C ends it at once."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return self._screen.read(prompt)
        finally:
            signal.signal(signal.SIGINT, before)

    async def _decide(self, approval: Approval, answer: str) -> int:
        edited: Object | None = None
        if answer == "edit":
            edited = await self._edited(approval)
        made = await self._desk.decide(
            approval.id,
            answer != "no",
            by=self._who,
            who=LOCAL,  # whoever types here is the user of this machine
            note=self._args.note or "",
            edited=edited,
            remember=_seconds(self._args.remember) if self._args.remember else 0.0,
            matching=_conditions(self._args.where),
        )
        self._screen.note(f"{made.id}: {made.state}")
        return Code.OK

    async def _edited(self, approval: Approval) -> Object:
        text = self._args.arguments_json
        if text is None:
            text = self._read("Arguments to run with, as JSON: ")
        try:
            value = json.loads(text or "", parse_constant=_no_number)
        except ValueError as problem:
            raise Usage(f"the arguments: not JSON: {problem}") from None
        if not isinstance(value, dict):
            raise Usage("the arguments: not a JSON object")
        return value


def _conditions(words: list[str]) -> dict[str, Object]:
    found: dict[str, Object] = {}
    for word in words:
        name, _, condition = word.partition("=")
        try:
            found[name] = json.loads(condition)
        except ValueError:
            found[name] = {}
        if not isinstance(found[name], dict) or not found[name]:
            raise Usage(f"--where: {word!r} is not an argument and its condition, such as 'amount={{\"under\": 100}}'")
    return found


def _seconds(text: str) -> float:
    if text[:-1].isdecimal() and text[-1:] in _UNITS:
        return float(int(text[:-1]) * _UNITS[text[-1]])
    raise Usage(f"--remember: {text!r} is not a time such as 30m, 2h or 7d")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number in JSON")
