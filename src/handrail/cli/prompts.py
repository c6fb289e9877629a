"""A server's questions on the terminal: who asks, the whole form or address, and a way out (CLI-32, APP-10, APP-11)."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from handrail.cli.arguments import typed_value
from handrail.cli.terminal import Screen, json_text
from handrail.client.input_handlers import Elicitation
from handrail.model import Object
from handrail.text.controls import escape, one_line

__all__ = ["TerminalForms", "run_in_daemon_thread"]

CANCEL, DECLINE = "cancel", None
MAX_LINES = 50  # of a question, which stays on one screen

P = ParamSpec("P")
T = TypeVar("T")

_prompt_lock = threading.Lock()  # at a time: an answer must not go to another question


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
        for line in lines[:MAX_LINES]:
            self._screen.show_context(f"  | {line}")
        if len(lines) > MAX_LINES:
            self._screen.show_context(f"  | … {len(lines) - MAX_LINES:,} more lines are not shown")
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


async def run_in_daemon_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread that ends with the process: whoever types may never come to an end, and Ctrl-C has to be heard."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from here on nobody can take it back, and it may be set

    def run() -> None:
        try:
            with _prompt_lock:
                done.set_result(work(*args, **kwargs))
        except Exception as problem:
            done.set_exception(problem)

    threading.Thread(target=run, name="handrail-form", daemon=True).start()
    return await asyncio.wrap_future(done)
