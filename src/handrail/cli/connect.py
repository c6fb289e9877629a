"""The client of a verb: its target, its options, and the questions that a person answers at the terminal."""

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
from handrail.client.input_handlers import Elicitation
from handrail.client.mcp_config import EntryError, ServerEntry, host_config_files, load
from handrail.client.state_dir import Confirm, Consents, StateDirectory, allow, needs_confirmation, state_folder
from handrail.client.tools import ListedTool
from handrail.guards.tool_definitions import format_changes
from handrail.model import SERVER_ASKS, Object
from handrail.revisions import REVISIONS
from handrail.text.controls import escape, one_line

__all__ = ["changed_lines", "client_for", "confirm_on_terminal", "consent_to_entry", "target_of"]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_ADDRESS = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}(/\S*)?")
_OTHER_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
MAX_DIFFERENCE = 40  # lines of a changed tool, so that the question stays on the same screen
CANCEL, DECLINE = "cancel", None
MAX_QUESTION_LINES = 50  # so that a question stays on one screen
_USES = ("call", "read", "prompt")  # verbs that run something of the server
_HINTS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")


def client_for(args: Namespace, screen: Screen, **more: Any) -> Client:
    """Return a client for the server on the command line."""
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
    trusted = args.trusted or (args.verb in _USES and is_own_file(target))
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
            server_asks=trusted and args.verb in _USES and not args.yes and screen.is_attended,
            state=state.folder,
            agree=partial(consent_to_entry, args, screen, Consents(state)),
            elicit=forms.fill,
            elicit_url=forms.visit,
            **{"on_stderr": screen.server_log(Path(args.server).name)} | more,
        )
    except EntryError:
        raise
    except (ValueError, TypeError, ModuleNotFoundError) as wrong:  # ModuleNotFoundError: an extra is not installed
        raise UsageError(str(wrong)) from wrong


def is_own_file(target: Any) -> bool:
    """Return True for a Python file on the command line: to run a file is to trust it."""
    return isinstance(target, Path) and target.suffix == ".py"


def _key(text: str, headers: dict[str, str]) -> dict[str, str]:
    """Return the header with the API key or token."""
    if "authorization" in map(str.lower, headers):
        raise UsageError("--key and --header Authorization: choose one of them")
    try:
        key = (read_text(text.removeprefix("@")) if text == "-" or text.startswith("@") else text).strip()
    except ValueError as wrong:
        raise UsageError(f"--key: {wrong}") from None
    if not key or not key.isprintable() or " " in key:
        raise UsageError("--key: an API key or a token is one word")  # the error must not repeat the key
    return {"Authorization": f"Bearer {key}"}


def _authorization(screen: Screen, state: StateDirectory, url: str, headers: dict[str, str]) -> Any:
    """Return OAuth for an HTTP address, unless the headers have a token (P-26).

    It asks before it opens a browser. Without a browser, the person opens the address and pastes the redirect back.
    """
    if not url.startswith(("http://", "https://")) or "authorization" in map(str.lower, headers):
        return None
    from handrail.oauth.client import OAuth, open_browser  # other verbs do not need it

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
    """Print the whole call and ask at the terminal; without a terminal, refuse.

    The question is asked in the main thread, which Ctrl-C interrupts. The confirmation holds for exactly the printed
    call. A trusted server that announces in its initialize result that it asks about destructive tools asks instead: it
    has more information about the call, and one question is enough.
    """
    if args.yes:
        return allow
    why, _ = needs_confirmation(tool)
    yes = not why or _server_asks(tool, welcome, screen) or _confirm_call(tool, arguments, why, screen)
    return lambda call: yes and (call.definition.fingerprint, call.arguments) == (tool.fingerprint, arguments)


def _server_asks(tool: ListedTool, welcome: Object, screen: Screen) -> bool:
    """Return True if a trusted server asks the person at this terminal itself before the tool runs."""
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
    """Return the changes of a tool, before and after for each place, cut to `most` lines (APP-20)."""
    lines = (
        format_changes(tool.changes).split("\n")
        if tool.changes
        else ["its earlier definition is not stored here any more"]
    )
    if len(lines) > most:
        more = f"… {len(lines) - most:,} more lines: `handrail show` has them all"
        lines = [*lines[:most], more]
    return lines


def _ask_yes_no(question: str, screen: Screen) -> bool:
    if not screen.is_attended:
        screen.note("no terminal to ask at: in scripts, --yes agrees")
    return screen.ask(question)


def target_of(text: str) -> Any:
    """Return the URL, file, command line, or server of a host's configuration that the text stands for."""
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
    if is_file and not any(map(str.isspace, text)):  # with spaces it may be a command that ends so
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
    """Return the entries of that name in a file. Problems with other entries do not matter."""
    try:
        entries, missing = load(path, os.environ) if path.is_file() else ([], [])
    except EntryError:
        return []
    matches = [each for each in entries if each.name == name]
    problems = [f"{each.where}: the variable {each.variable} is not set" for each in missing if each.entry == name]
    if matches and problems:
        raise EntryError(str(path), problems)
    return matches


def consent_to_entry(
    args: Namespace, screen: Screen, consents: Consents, entry: ServerEntry, written: ServerEntry | None = None
) -> bool:
    """Return whether a person agrees to an entry of a file (P-28). `written` is the entry without its variables."""
    if consents.has_consent(entry) or args.yes:
        return True
    _introduce(entry, written, screen)
    what = "Connect to it" if entry.url else f"Start {one_line(entry.command[0], 100)}"
    if not _ask_yes_no(f"{what}, now and from now on?", screen):
        return False
    consents.add(entry)
    return True


def _introduce(entry: ServerEntry, written: ServerEntry | None, screen: Screen) -> None:
    """Print the entry as it stands in the file: nothing is masked, and every word has its own line."""
    if written is None:
        written = next((each for each in load(entry.source, None)[0] if each.name == entry.name), entry)
    screen.note(f"{one_line(entry.source, 300)} has the server {one_line(entry.name, 100)}:")
    rows = [("at", written.url)] if written.url else [("run", word) for word in written.command]
    if not written.url:
        path = entry.env.get("PATH", os.environ.get("PATH"))
        rows.append(("which is", shutil.which(entry.command[0], path=path) or "not on PATH"))
        rows.append(("in", entry.cwd or "this folder"))
    rows += [("with", f"{name}={value}") for name, value in written.env.items()]
    rows += [("sending", f"{name}: {value}") for name, value in written.headers.items()]
    rows += [("auth", f"{name} = {value}") for name, value in written.auth.items()]
    for what, text in rows:
        print(f"  {what:8} {one_line(text, 2_000)}", file=sys.stderr, flush=True)


def _pair(text: str, sign: str, option: str, form: str) -> tuple[str, str]:
    name, separator, value = text.partition(sign)
    if not separator or not name.strip():
        raise UsageError(f"{option} {text!r}: not {form}")
    return name, value


# Questions of a server (CLI-32, APP-10, APP-11)


class TerminalForms:
    """Asks a server's questions at the terminal; without a terminal, every question is declined."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    async def fill(self, question: Elicitation) -> Any:
        """Return the content of a form, None if it is declined, or "cancel" if the person stops."""
        return await run_in_daemon_thread(self._fill, question)

    async def visit(self, question: Elicitation) -> bool:
        """Return True if the person says that they have opened the page. Nothing is fetched or started here."""
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
        elif not question.schema.get("required") and fields.keys() <= answers.keys():  # only accept or decline is asked
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
                return True  # the default, or left out
            try:
                answers[name] = typed_value(text, field, schema)
                return True
            except ValueError as wrong:
                self._screen.show_context(f"  {escape(str(wrong))}")

    def _introduce(self, question: Elicitation) -> None:
        """Print the name of the server and its message, with a mark before each line of the message."""
        self._screen.show_context(f"{escape(question.server, lines=False)} asks:")
        lines = escape(question.message).splitlines()
        for line in lines[:MAX_QUESTION_LINES]:
            self._screen.show_context(f"  | {line}")
        if len(lines) > MAX_QUESTION_LINES:
            self._screen.show_context(f"  | … {len(lines) - MAX_QUESTION_LINES:,} more lines are left out")
        if question.warning:
            self._screen.show_context(f"Careful: {escape(question.warning, lines=False)}")
        if not self._screen.is_attended:
            self._screen.note("declined: no terminal to ask at, and --yes does not answer a server's questions")


def _sole_boolean_field(required: Any, fields: Object) -> str:
    """Return the name of the only required field of a form, if it is a boolean and all others have defaults."""
    if type(required) is not list or len(required) != 1:
        return ""
    others = {name: field for name, field in fields.items() if name != required[0]}
    sole_field = fields.get(required[0]) if type(required[0]) is str else None
    is_one = type(sole_field) is dict and sole_field.get("type") == "boolean"
    return required[0] if is_one and all(type(each) is dict and "default" in each for each in others.values()) else ""
