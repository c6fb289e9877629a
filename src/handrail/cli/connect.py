"""Which server a verb talks to, and how: its options as a client, with a person on the terminal behind it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from handrail.cli.arguments import read_text, typed_value
from handrail.cli.exit_codes import UsageError
from handrail.cli.terminal import Screen, json_text, run_in_daemon_thread
from handrail.client.client import Client
from handrail.client.consent import Confirm, allow, needs_confirmation
from handrail.client.input_handlers import Elicitation
from handrail.client.mcp_config import EntryError, ServerEntry, host_config_files, load
from handrail.client.state_dir import Consents, StateDirectory, state_folder
from handrail.client.tools import ListedTool
from handrail.guards.tool_diff import format_changes
from handrail.model import SERVER_ASKS, Object
from handrail.revisions import REVISIONS
from handrail.text.controls import escape, one_line

__all__ = ["changed_lines", "client_for", "confirm_on_terminal", "target_of"]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_ADDRESS = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}(/\S*)?")
_OTHER_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
MAX_DIFFERENCE = 40  # lines of a changed tool before the question: both stay on one screen
CANCEL, DECLINE = "cancel", None
MAX_QUESTION_LINES = 50  # so that a question stays on one screen
_HINTS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")


def client_for(args: Namespace, screen: Screen, **more: Any) -> Client:
    """A client for the server that the words name."""
    if args.revision not in (choices := ("auto", "legacy", *REVISIONS)):
        raise UsageError(f"--revision: {args.revision!r} is not one of {', '.join(choices)}")
    state = StateDirectory(state_folder(os.environ))
    state.prepare()
    forms = TerminalForms(screen)
    target = target_of(args.server)
    pairs = [_pair(each, ":", "--header", "'Name: value'") for each in args.header]
    headers = {name.strip(): value.strip() for name, value in pairs}
    if args.key is not None:
        headers |= _key(args.key, headers)
    url = target.url if isinstance(target, ServerEntry) else str(target)
    trusted = args.trusted or (args.verb == "call" and is_own_file(target))
    try:
        return Client(
            target,
            auth=_authorization(screen, state, url, headers),
            revision=args.revision,
            transport=args.transport,
            timeout=args.timeout,
            headers=headers,
            env=dict(_pair(each, "=", "--env", "NAME=value") for each in args.env),
            trusted=trusted,
            server_asks=trusted and args.verb == "call" and not args.yes and screen.is_attended,
            state=state.folder,
            agree=partial(_consent_to_entry, args, screen, Consents(state)),
            elicit=forms.fill,
            elicit_url=forms.visit,
            **{"on_stderr": screen.server_log(Path(args.server).name)} | more,
        )
    except EntryError:
        raise
    except (ValueError, TypeError, ModuleNotFoundError) as wrong:  # the last: of an extra that is not installed
        raise UsageError(str(wrong)) from wrong


def is_own_file(target: Any) -> bool:
    """Whether the target is a Python file, named on the command line: to run it is to trust it."""
    return isinstance(target, Path) and target.suffix == ".py"


def _key(text: str, headers: dict[str, str]) -> dict[str, str]:
    """The header that an API key or a token is sent in."""
    if "authorization" in map(str.lower, headers):
        raise UsageError("--key and --header Authorization: choose one of them")
    try:
        key = (read_text(text.removeprefix("@")) if text == "-" or text.startswith("@") else text).strip()
    except ValueError as wrong:
        raise UsageError(f"--key: {wrong}") from None
    if not key or not key.isprintable() or " " in key:
        raise UsageError("--key: an API key or a token is one word")  # and is not repeated
    return {"Authorization": f"Bearer {key}"}


def _authorization(screen: Screen, state: StateDirectory, url: str, headers: dict[str, str]) -> Any:
    """A way to log in, at addresses that may want it, unless a token was given (P-26).

    It asks before a browser is opened; without one, the address to visit is shown, and the one that came back taken.
    """
    if not url.startswith(("http://", "https://")) or "authorization" in map(str.lower, headers):
        return None
    from handrail.oauth.client import OAuth, open_browser  # the rest of the command line does without it

    def log_in(url: str, host: str) -> bool | str:
        screen.show_context(f"{escape(host)} wants you to log in:\n  {escape(url, lines=False)}")
        if screen.ask("Open it in your browser?") and open_browser(url):
            return True
        return screen.read("Visit it yourself, and paste the address you were sent back to: ") or False

    async def browser(url: str, host: str) -> bool | str:
        return await run_in_daemon_thread(log_in, url, host)

    return OAuth(browser=browser, folder=state.folder / "credentials")


def confirm_on_terminal(
    tool: ListedTool, arguments: Object, args: Namespace, screen: Screen, welcome: Object
) -> Confirm:
    """Ask on the terminal, after showing all there is; without one nothing is agreed to.

    It is asked here, in the main thread, where Ctrl-C is heard; what is sent has to be what was shown. A trusted server
    that has promised in its welcome to ask about destructive tools is left to do so: it knows more of the call, and one
    question is enough.
    """
    if args.yes:
        return allow
    why, _ = needs_confirmation(tool)
    yes = not why or _server_asks(tool, welcome, screen) or _confirm_call(tool, arguments, why, screen)
    return lambda call: yes and (call.definition.fingerprint, call.arguments) == (tool.fingerprint, arguments)


def _server_asks(tool: ListedTool, welcome: Object, screen: Screen) -> bool:
    """Whether a trusted server asks the person at this terminal before the tool runs."""
    capabilities = welcome.get("capabilities")
    promises = capabilities.get("experimental") if type(capabilities) is dict else None
    is_promised = type(promises) is dict and SERVER_ASKS in promises
    is_plain = tool.trusted and tool.listed and not tool.changed and tool.annotations.get("destructiveHint") is True
    return is_promised and is_plain and screen.is_attended


def _confirm_call(tool: ListedTool, arguments: Object, why: str, screen: Screen) -> bool:
    paint, where = screen.paint, sys.stderr
    lines = [f"{paint('call', 'bold', stream=where)} {one_line(tool.name, 128)} on {one_line(tool.server, 128)}"]
    lines += [f"  {one_line(name, 128)} = {json_text(value)}" for name, value in arguments.items()]
    if not arguments:
        lines.append("  (no arguments)")
    claims = ", ".join(f"{name}: {json_text(tool.annotations[name])}" for name in _HINTS if name in tool.annotations)
    if claims:
        lines.append(paint(f"  declared by the server: {one_line(claims, 200)}", "dim", stream=where))
    lines.append(f"  asked because {why}")
    lines += [f"  {line}" for line in changed_lines(tool, MAX_DIFFERENCE)] if tool.changed else []
    print("\n".join(lines), file=where, flush=True)
    return _ask_yes_no("Send it?", screen)


def changed_lines(tool: ListedTool, most: int) -> list[str]:
    """What has changed in a tool, each place with both sides; what is over `most` lines is counted (APP-20)."""
    lines = (
        format_changes(tool.changes).split("\n") if tool.changes else ["what it was before is not known here any more"]
    )
    if len(lines) > most:
        more = f"… {len(lines) - most:,} more lines: `handrail show` has them all"
        lines = [*lines[:most], more]
    return lines


def _ask_yes_no(question: str, screen: Screen) -> bool:
    if not screen.is_attended:
        screen.note("nobody can be asked here: --yes agrees, for scripts")
    return screen.ask(question)


def target_of(text: str) -> Any:
    """A URL, a file or a command line as the library takes it; else a server of a host's configuration, by name."""
    if not text.strip():
        raise UsageError("the server is an empty text; it is an address, a file, a command or a configured name")
    if text.startswith(("http://", "https://")):
        if "#code=" in text:
            raise UsageError("that is a link to a console, a page for people; the server's own address ends in /mcp")
        try:
            _ = urlsplit(text).port
        except ValueError as wrong:
            raise UsageError(
                f"the address: {wrong}; such as https://example.org/mcp or http://[::1]:8000/mcp"
            ) from None
        return text
    if _ADDRESS.fullmatch(text) and shutil.which(text) is None:
        raise UsageError(f"{text}: an address begins with its scheme: http://{text}")
    if _OTHER_SCHEME.match(text):
        raise UsageError(f"{text}: a server has an address that begins with https:// or http://")
    is_file = Path(text).suffix in (".py", ".json")
    if is_file and Path(text).is_file():
        return Path(text)
    if is_file and not any(map(str.isspace, text)):  # else the end of a command may look so
        raise UsageError(f"{text}: no such file")
    if not _NAME.fullmatch(text):
        return text
    entries = [entry for _, path in host_config_files(os.environ, sys.platform) for entry in _named(path, text)]
    if len(sources := {entry.source for entry in entries}) > 1:
        raise UsageError(f"{text} is in {' and '.join(sorted(sources))}; name the file whose server is meant")
    if not entries and shutil.which(text) is None:
        near = f"; did you mean {text}.py?" if Path(f"{text}.py").is_file() else ""
        raise UsageError(
            f"{text}: no program, and no configured server of that name (handrail config lists them){near}"
        )
    return entries[0] if entries else text


def _named(path: Path, name: str) -> list[ServerEntry]:
    """The entry of that name in a file; what is wrong with others there is no matter."""
    try:
        entries, missing = load(path, os.environ) if path.is_file() else ([], [])
    except EntryError:
        return []
    matches = [each for each in entries if each.name == name]
    problems = [f"{each.where}: the variable {each.variable} is not set" for each in missing if each.entry == name]
    if matches and problems:
        raise EntryError(str(path), problems)
    return matches


def _consent_to_entry(args: Namespace, screen: Screen, consents: Consents, entry: ServerEntry) -> bool:
    if consents.has_consent(entry) or args.yes:
        return True
    _introduce(entry, screen)
    what = "Connect to it" if entry.url else f"Start {one_line(entry.command[0], 100)}"
    if not _ask_yes_no(f"{what}, now and from now on?", screen):
        return False
    consents.add(entry)
    return True


def _introduce(entry: ServerEntry, screen: Screen) -> None:
    """All that decides what happens, as it is written in the file: nothing is masked, every word has its own line."""
    written = next((each for each in load(entry.source, None)[0] if each.name == entry.name), entry)
    screen.note(f"{one_line(entry.source, 300)} has the server {one_line(entry.name, 100)}:")
    rows = [("at", written.url)] if written.url else [("run", word) for word in written.command]
    if not written.url:
        path = entry.env.get("PATH", os.environ.get("PATH"))
        rows.append(("which is", shutil.which(entry.command[0], path=path) or "not to be found"))
        rows.append(("in", entry.cwd or "this folder"))
    rows += [("with", f"{name}={value}") for name, value in written.env.items()]
    rows += [("sending", f"{name}: {value}") for name, value in written.headers.items()]
    for what, text in rows:
        print(f"  {what:8} {one_line(text, 2_000)}", file=sys.stderr, flush=True)


def _pair(text: str, sign: str, option: str, form: str) -> tuple[str, str]:
    name, separator, value = text.partition(sign)
    if not separator or not name.strip():
        raise UsageError(f"{option} {text!r}: not {form}")
    return name, value


# Questions of a server (CLI-32, APP-10, APP-11)


class TerminalForms:
    """Fills in forms with the person in front of the terminal; without one every question is declined."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    async def fill(self, question: Elicitation) -> Any:
        """The content of a form, None if it is declined, "cancel" if the person goes away."""
        return await run_in_daemon_thread(self._fill, question)

    async def visit(self, question: Elicitation) -> bool:
        """Whether the person has opened a page. They do it: nothing is fetched, nothing started here."""
        return await run_in_daemon_thread(self._visit, question)

    def _fill(self, question: Elicitation) -> Any:
        self._introduce(question)
        fields = question.schema.get("properties")
        fields = fields if type(fields) is dict else {}
        answers = dict(question.defaults)
        only = _sole_boolean_field(question.schema.get("required"), fields)
        if only:
            reply = self._screen.read(f"{one_line(str(fields[only].get('title') or only), 60)}? [y/N/more] ")
            if reply is None:
                return DECLINE
            if reply.lower() not in ("m", "more"):
                return {**answers, only: reply.lower() in ("y", "yes")}
        elif not question.schema.get("required") and fields.keys() <= answers.keys():  # to accept is the answer
            reply = self._screen.read(f"Accept? [y/N{'/more' if fields else ''}] ")
            if reply is None or reply.lower() not in ("m", "more"):
                return answers if reply is not None and reply.lower() in ("y", "yes") else DECLINE
        elif not self._screen.ask("Answer it?"):
            return DECLINE
        while True:
            for name, field in fields.items():
                if not self._field(name, field if type(field) is dict else {}, question.schema, answers):
                    return CANCEL
            self._screen.show_context("to be sent: " + json_text(answers))
            reply = self._screen.read("Send it? [y/N/again] ")
            if reply is None or reply.lower() in ("", "n", "no"):
                return CANCEL
            if reply.lower() in ("y", "yes"):
                return answers

    def _visit(self, question: Elicitation) -> bool:
        self._introduce(question)
        host = urlsplit(question.url).hostname or "?"
        self._screen.show_context(f"  {escape(question.url, lines=False)}")
        self._screen.show_context(f"  at {self._screen.paint(escape(host), 'bold', stream=sys.stderr)}")
        if any(label.startswith("xn--") for label in host.split(".")) or not host.isascii():
            self._screen.show_context("  careful: the name is written in characters that look like others")
        return self._screen.ask("Open it in your browser yourself; did you?")

    def _field(self, name: str, field: Object, schema: Object, answers: Object) -> bool:
        kind = "/".join(map(str, field["enum"])) if type(field.get("enum")) is list else str(field.get("type", "any"))
        about = one_line(str(field.get("title") or field.get("description") or ""), 60)
        proposed = f" [{json_text(answers[name])}]" if name in answers else ""
        while True:
            text = self._screen.read(f"  {one_line(name, 40)} ({one_line(kind, 60)}) {about}{proposed}: ")
            if text is None:
                return False
            if not text:
                return True  # as proposed, or left out
            try:
                answers[name] = typed_value(text, field, schema)
                return True
            except ValueError as wrong:
                self._screen.show_context(f"  {escape(str(wrong))}")

    def _introduce(self, question: Elicitation) -> None:
        """Who asks, and every line of what it says marked as its words."""
        self._screen.show_context(f"{escape(question.server, lines=False)} asks:")
        lines = escape(question.message).splitlines()
        for line in lines[:MAX_QUESTION_LINES]:
            self._screen.show_context(f"  | {line}")
        if len(lines) > MAX_QUESTION_LINES:
            self._screen.show_context(f"  | … {len(lines) - MAX_QUESTION_LINES:,} more lines are not shown")
        if question.warning:
            self._screen.show_context(f"Careful: {escape(question.warning, lines=False)}")
        if not self._screen.is_attended:
            self._screen.note(
                "nobody can be asked here: declined; a server's question is answered at a terminal, not by --yes"
            )


def _sole_boolean_field(required: Any, fields: Object) -> str:
    """The name of the one thing a form wants to know, if a yes or a no says it and the rest need not be said."""
    if type(required) is not list or len(required) != 1:
        return ""
    others = {name: field for name, field in fields.items() if name != required[0]}
    sole_field = fields.get(required[0]) if type(required[0]) is str else None
    is_one = type(sole_field) is dict and sole_field.get("type") == "boolean"
    return required[0] if is_one and all(type(each) is dict and "default" in each for each in others.values()) else ""
