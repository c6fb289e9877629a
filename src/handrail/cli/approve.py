"""`handrail approve`: list the calls that wait for approval, and approve or deny them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import Namespace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shutil import get_terminal_size

from msgspec import to_builtins

from handrail.approvals.queue import Approval, ApprovalError, ApprovalQueue
from handrail.audit.log import DATABASES, open_trail
from handrail.cli.arguments import parse_document, parse_seconds
from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.load_server import CommandConfig
from handrail.cli.terminal import Screen, run_in_daemon_thread
from handrail.client.state_dir import StateDirectory, state_folder
from handrail.guards.limits import LOCAL
from handrail.model import Object
from handrail.stores import Store
from handrail.text.controls import escape, one_line

if sys.platform != "win32":
    import pwd

__all__ = ["operator_name", "run_approve"]

MAX_DESCRIPTION_CHARS = 300
ANSWERS = {"y": "yes", "yes": "yes", "n": "no", "no": "no", "e": "edit", "edit": "edit", "s": "", "skip": ""}
STATES = {  # texts, by the state and whether the caller waits
    ("pending", False): "pending; its caller has left: it runs if it calls again",
    ("approved", False): "approved, not used yet: it runs if its caller calls again",
}


def run_approve(args: Namespace, screen: Screen) -> int:
    return asyncio.run(_run(args, screen))


async def _run(args: Namespace, screen: Screen) -> int:
    command_config = CommandConfig(args)
    config = command_config.config
    place, audit = command_config.approval_place(), config.audit_place(state_folder(os.environ))
    own_file = Path(config.audit.file) if args.audit and not config.audit.url else None
    if own_file is not None and (own_file.suffix not in DATABASES or not own_file.is_file()):
        raise UsageError(
            f"--audit: {args.audit}: not the file of an audit in which approvals wait ({', '.join(DATABASES)})"
        )
    if args.where and args.remember is None:
        raise UsageError("--where: a condition on what is remembered; add --remember 2h, or leave it out")
    if isinstance(place, Path) and not place.exists():
        nothing = f"{place}: nothing has been served from here, so nothing can wait"
        if args.id or args.revoke:
            raise UsageError(f"{args.id or args.revoke}: there is no such thing; {nothing}")
        screen.note(nothing)
        if screen.as_json and not args.watch:
            screen.data([])
        return ExitCode.OK
    store, trail = await command_config.open_store(place), None
    if config.audit.on:
        StateDirectory(state_folder(os.environ)).prepare()
        trail = open_trail(store if audit == place else audit, config.audit.kept.unsigned, store=store)
    try:
        return await _ApprovalSession(
            ApprovalQueue(store, command_config.config.approvals, trail=trail), store, args, screen
        ).work()
    finally:
        if trail is not None:
            await trail.close()
        await store.close()


class _ApprovalSession:
    def __init__(self, desk: ApprovalQueue, store: Store, args: Namespace, screen: Screen) -> None:
        self._desk = desk
        self._store = store
        self._args = args
        self._screen = screen
        self._announced_ids = set[str]()  # requests that have rung the bell
        self._operator = operator_name()

    async def work(self) -> int:
        args = self._args
        if args.remembered:
            return await self._remembered()
        if args.revoke:
            if not await self._desk.revoke(args.revoke, by=self._operator):
                raise UsageError(f"{args.revoke}: no remembered approval has this ID; --remembered lists them")
            self._screen.note(f"{args.revoke}: revoked; the next such call asks again")
            return ExitCode.OK
        if args.id is None:
            return await (self._watch() if args.watch else self._all())
        approval = await self._desk.get(args.id)
        if approval is None:
            raise UsageError(f"{args.id}: there is no such approval")
        if args.answer is None:
            await self._show(approval)
            return await self._ask(approval) if approval.state == "pending" else ExitCode.OK
        return await self._decide(approval, args.answer)

    async def _all(self) -> int:
        waiting = await self._desk.open()
        if self._screen.as_json:
            self._screen.data([_approval_json(each, await self._desk.is_caller_waiting(each)) for each in waiting])
        elif not waiting:
            self._screen.write("nothing waits for an approval")
        else:
            for approval in waiting:
                await self._present(approval)
        return ExitCode.OK

    async def _watch(self) -> int:
        presented_ids: set[str] = set()
        if self._can_ask:
            self._screen.note("waiting for calls to approve; Ctrl-C ends")
        while True:
            async with self._store.subscribe("approvals") as notifications:
                new_approvals = [each for each in await self._desk.open() if each.id not in presented_ids]
                if not new_approvals:
                    await anext(notifications)
            for (
                approval
            ) in new_approvals:  # not while subscribed: a person may take longer than notifications are queued
                presented_ids.add(approval.id)
                if self._can_ask and approval.id not in self._announced_ids:
                    self._ring(approval)
                await self._present(approval)

    @property
    def _can_ask(self) -> bool:
        """Return True if a person can answer at the terminal."""
        return not self._screen.as_json and self._screen.is_attended and sys.stdout.isatty()

    def _ring(self, approval: Approval) -> None:
        self._announced_ids.add(approval.id)
        self._screen.ring()

    async def _present(self, approval: Approval) -> None:
        """Print the request, and ask for a decision if a person can answer."""
        current = await self._desk.get(approval.id)
        if current is None or current.state != "pending":
            return  # decided while another request was on the screen
        await self._show(current)
        if self._can_ask:
            await self._ask(current)

    async def _remembered(self) -> int:
        grants = await self._desk.grants()
        if self._screen.as_json:
            self._screen.data(to_builtins(grants))
            return ExitCode.OK
        for each in grants:
            arguments_text = one_line(json.dumps({**each.arguments, **each.matching}, ensure_ascii=False), 100)
            who, tool = one_line(each.principal), one_line(each.tool)
            good = "" if each.allowed_by else "; of an earlier version, and asked about again"
            until = f"until {_time(each.until)}, by {one_line(each.by)}{good}"
            self._screen.write(f"{each.id}  {who}  {tool}  {arguments_text}  {until}")
        return ExitCode.OK

    async def _show(self, approval: Approval) -> None:
        """Print all of the request: a person must have read what they approve."""
        is_attended = await self._desk.is_caller_waiting(approval)
        if self._screen.as_json:
            self._screen.data(_approval_json(approval, is_attended))
            return
        request, paint, say, plain = (
            approval.asked,
            self._screen.paint,
            self._screen.write,
            partial(escape, lines=False),
        )
        tool = paint(plain(request.tool), "bold")
        title = f"{plain(request.title)} ({tool})" if request.title not in ("", request.tool) else tool
        state = STATES.get((approval.state, is_attended), approval.state)
        say(f"{paint(approval.id, 'bold')}  {title} on {plain(request.server)}  {state}")
        if request.description:
            say(f"  {one_line(request.description, MAX_DESCRIPTION_CHARS)}")
        client = (
            f" with {one_line(request.client, 40)}" if request.client else ""
        )  # chosen by the client: cut to a part of the line
        when = f"at {_time(approval.created)}, until {_time(approval.expires)}"
        say(f"  asked by {plain(request.principal)}{client} {when}")
        say(f"  because {plain(request.why)} ({plain(request.rule)})")
        self._quote(json.dumps(request.arguments, indent=2, ensure_ascii=False))
        if approval.preview:
            say("  preview:")
            self._quote(approval.preview)
        for line in approval.before:
            say(f"  since it was last allowed: {plain(line)}")

    def _quote(self, text: str) -> None:
        """Print foreign text with a mark before each line."""
        room = max(20, get_terminal_size().columns - 4)
        for line in escape(text).splitlines():
            step = room if line.isascii() else room // 2
            for at in range(0, len(line), step):  # a line that the terminal wraps could look like a line of ours
                self._screen.write(f"  {'|' if at == 0 else '>'} {line[at : at + step]}")

    async def _ask(self, approval: Approval) -> int:
        self._screen.write("  y allows it, y 2h for two hours; words after y or n are a note to its caller")
        sys.stdout.flush()
        answer, words = "", list[str]()
        while answer not in ANSWERS:
            typed = await self._screen.read_live("Allow it? [y/N/e(dit)/s(kip)] ", partial(self._time_left, approval))
            if typed is None:
                return await self._report_end(approval)
            answer, *words = (typed or "n").split()
            answer = answer.lower()
        if answer in ("s", "skip"):
            return ExitCode.OK
        remember = words.pop(0) if words and ANSWERS[answer] == "yes" and parse_seconds(words[0]) is not None else None
        try:
            return await self._decide(approval, ANSWERS[answer], " ".join(words), remember)
        except (ApprovalError, UsageError) as problem:  # other requests may still wait
            self._screen.note(str(problem))
            return ExitCode.USAGE

    async def _time_left(self, approval: Approval) -> str | None:
        """Return the status line that is drawn each second: the time left to decide; None if the request has ended."""
        current = await self._desk.get(approval.id)
        seconds_left = round(approval.expires - self._desk.now())
        if current is None or current.state != "pending" or seconds_left <= 0:
            return None
        others = [each for each in await self._desk.open() if each.id != approval.id]
        for each in others if self._args.watch else ():
            if each.id not in self._announced_ids:
                self._ring(each)
        more = f", {len(others)} more wait{'s' if len(others) == 1 else ''}" if others else ""
        caller = (
            "" if await self._desk.is_caller_waiting(approval) else "; its caller has left: it runs if it calls again"
        )
        return f"  {seconds_left // 60}:{seconds_left % 60:02} left{more}{caller}"

    async def _report_end(self, approval: Approval) -> int:
        """Report a request that was not decided here: it has ended elsewhere, or the input has."""
        current = await self._desk.get(approval.id)
        if current is not None and current.state != "pending":
            by = f" by {current.by}" if current.by else ""
            self._screen.note(f"{approval.id}: has been {current.state}{by} meanwhile")
        elif current is None or self._desk.now() >= current.expires:
            self._screen.note(f"{approval.id}: expired without a decision")
        return ExitCode.OK

    async def _decide(self, approval: Approval, answer: str, note: str = "", remembered: str | None = None) -> int:
        args, edited = self._args, None
        duration = remembered or args.remember
        if answer == "edit":
            text = args.arguments_json
            if text is None:
                text = await run_in_daemon_thread(self._screen.read, "Arguments to run with, as JSON: ")
            edited = parse_document(text or "")
        if (remember := parse_seconds(duration or "0s")) is None:
            raise UsageError(f"--remember: {duration!r} is not a time such as 30m, 2h or 7d")
        if remember and answer != "yes":
            raise UsageError(f"--remember: only a yes to the original call can be remembered, not {answer!r}")
        outcome = await self._desk.decide(
            approval.id,
            answer != "no",
            by=self._operator,
            who=LOCAL,  # the person at this terminal is the user of this machine
            note=note or args.note or "",
            edited=edited,
            remember=remember,
            matching=_conditions(args.where),
        )
        grants = [each for each in await self._desk.grants() if each.approval == outcome.id] if remember else []
        until = f", and remembered until {_time(grants[0].until)}" if grants else ""  # the server limits the time
        self._screen.note(f"{outcome.id}: {outcome.state}{until}")
        return ExitCode.OK


def _approval_json(approval: Approval, is_attended: bool) -> Object:
    """Return an approval for --json."""
    caller = "waiting" if is_attended else "left"
    return {**to_builtins(approval), "caller": caller, "used": approval.state == "consumed"}


def _conditions(words: list[str]) -> dict[str, Object]:
    conditions: dict[str, Object] = {}
    for word in words:
        name, _, condition = word.partition("=")
        try:
            conditions[name] = json.loads(condition)
        except ValueError:
            conditions[name] = {}
        if not isinstance(conditions[name], dict) or not conditions[name]:
            raise UsageError(
                f"--where: {word!r} is not an argument and its condition, such as 'amount={{\"under\": 100}}'"
            )
    return conditions


def operator_name() -> str:
    """Return who decides here: the user that this process runs as. The environment is not trusted."""
    if sys.platform == "win32":
        return f"operator {os.getlogin()}"
    try:
        return f"operator {pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"operator uid {os.getuid()}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
