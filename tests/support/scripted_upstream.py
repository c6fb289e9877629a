"""A scripted upstream server: seven dialects written out as plain JSON, with nothing of this package in it.

`Upstream` answers messages through a `Session`. This file run by itself speaks over standard input and output, as
`scripted_upstream.py DIALECT SOCKET`; HTTP is in `rigs_gateway.py`. Everything that is received, and what becomes of
each call, is noted; over stdio the notes go to the socket, and commands come from it.
"""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import sys
from collections.abc import Callable
from typing import Any

Json = Any
Object = dict[str, Any]

R0, R1, R2, R3, R4, R5 = "2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"
P = "pocket"
DATED = (R0, R1, R2, R3, R4, R5)
DIALECTS = (*DATED, P)

ENVELOPE = "io.modelcontextprotocol/"
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
PNG = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
        "0000000a49444154789c6360000002000154a24f5f0000000049454e44ae426082"
    )
).decode()
WAV = base64.b64encode(
    bytes.fromhex("524946462400000057415645666d74201000000001000100401f0000401f0000010008006461746100000000")
).decode()
MODIFIED = "2025-05-03T14:30:00Z"
ICONS = [{"src": "https://example.org/i.png", "mimeType": "image/png"}]
COMPLETED = "notifications/elicitation/complete"
CURSOR = "page-2"  # of the second page; R5 says "", which is a cursor there
INSTRUCTIONS = "Ask the rig kindly."
PROGRESS = (1, 3, 2, 3, 4)  # what `steps` reports; it may only grow
ERROR_DATA: dict[int, Object] = {
    -32042: {
        "elicitations": [
            {
                "mode": "url",
                "elicitationId": "e-51",
                "url": "https://bank.example/connect/e-51?code=canary-url",
                "message": "Link your bank first",
            }
        ]
    },
    -32021: {"requiredCapabilities": {"elicitation": {"form": {}}}},
    -32022: {"supported": [R5], "requested": R5},
}


def since(dialect: str, first: str) -> bool:
    """Whether a dialect has what this revision brought; pocket stands on 2025-06-18."""
    return DATED.index(R3 if dialect == P else dialect) >= DATED.index(first)


def state_of(mark: str, turn: int) -> str:
    """A `requestState` that suffers from every kind of carelessness: blanks, quotes, Unicode, controls."""
    return f' {mark}/{turn} "ü€😀\\u0041\t\n=== '


# Tools


def _schema(required: str = "", **properties: Json) -> Object:
    schema: Object = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required.split()} if required else schema


_TEXT: Object = {"type": "string"}
_YES: Object = {"type": "boolean"}
_NUMBERS: Object = {"type": "array", "items": {"type": "integer"}}
TOOLS: list[Object] = [
    {"name": "echo", "description": "Give the text back", "inputSchema": _schema("text", text=_TEXT)},
    {
        "name": "add",
        "title": "Adder",
        "description": "Add two numbers",
        "inputSchema": _schema("a b", a={"type": "number"}, b={"type": "number"}),
        "outputSchema": {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]},
        "annotations": {"readOnlyHint": True, "openWorldHint": False},
        "icons": ICONS,
        "_meta": {"example.org/x": 1},
    },
    {"name": "numbers", "description": "A list", "inputSchema": _schema(), "outputSchema": _NUMBERS},
    {"name": "null", "description": "Nothing as a value", "inputSchema": _schema()},
    {"name": "empty", "description": "An object", "inputSchema": _schema(), "outputSchema": {"type": "object"}},
    {"name": "raw", "description": "Answer with this", "inputSchema": _schema("result", result={"type": "object"})},
    {"name": "bare", "title": "Without a description", "inputSchema": _schema()},
    {
        "name": "region",
        "description": "Argument in a header",
        "inputSchema": _schema("place", place={"type": "string", "x-mcp-header": "Region"}, any=True),
    },
    {"name": "fail", "description": "Fail as a tool", "inputSchema": _schema()},
    {
        "name": "error",
        "description": "Answer with an error",
        "inputSchema": _schema("code", code={"type": "integer"}, mark=_TEXT),
    },
    {"name": "blocks", "description": "Every kind of content", "inputSchema": _schema()},
    {"name": "strange", "description": "Content of no known kind", "inputSchema": _schema()},
    {"name": "steps", "description": "Report progress", "inputSchema": _schema(mark=_TEXT)},
    {
        "name": "slow",
        "description": "Wait to be released",
        "inputSchema": _schema("mark", mark=_TEXT, at={"type": "integer"}),
    },
    {
        "name": "ask",
        "description": "Ask the client",
        "inputSchema": _schema("kind mark", kind=_TEXT, mark=_TEXT, state=_TEXT, waits=_YES, names=_YES),
    },
    {"name": "visit", "description": "A page first", "inputSchema": _schema("mark", mark=_TEXT)},
    {"name": "later", "description": "Not now", "inputSchema": _schema("mark", mark=_TEXT)},
    {"name": "change", "description": "Add a tool", "inputSchema": _schema("name", name=_TEXT)},
    {"name": "log", "description": "Log at three levels", "inputSchema": _schema("mark", mark=_TEXT)},
    {"name": "die", "description": "End without an answer", "inputSchema": _schema("mark", mark=_TEXT)},
    {"name": "who", "description": "What the client declared", "inputSchema": _schema("mark", mark=_TEXT)},
]


def definition(dialect: str, tool: Object) -> Object:
    """A tool in the words that a server of this dialect has."""
    names = {"name", "description", "inputSchema"}
    if since(dialect, R2):
        names |= {"annotations"}
    if since(dialect, R3):
        names |= {"outputSchema"}
        names |= {"title", "_meta"} if dialect != P else set()
    if since(dialect, R4):
        names |= {"icons"}
    out = {name: json.loads(json.dumps(value)) for name, value in tool.items() if name in names}
    if dialect == P:
        out.setdefault("description", "A tool of pocket")
    if dialect == R4:
        out["execution"] = {"taskSupport": "optional"}
    if dialect != R5:
        for name, schema in out["inputSchema"]["properties"].items():
            plain = {} if schema is True else {k: v for k, v in schema.items() if k != "x-mcp-header"}
            out["inputSchema"]["properties"][name] = plain
        if out.get("outputSchema", {"type": "object"})["type"] != "object":
            wrapped = {"result": out["outputSchema"]}
            out["outputSchema"] = {"type": "object", "properties": wrapped, "required": ["result"]}
    return out


# Sessions


class Held:
    """A call that has no answer yet."""

    def __init__(self, ident: Json, arguments: Object, token: Json = None) -> None:
        self.id = ident
        self.arguments = arguments
        self.token = token  # of its progress
        self.answers: Object = {}
        self.missing: set[str] = set()

    @property
    def mark(self) -> str:
        return str(self.arguments.get("mark", ""))


class Session:
    """One client of an `Upstream`. `write(message, about)`: `about` is the id of the request it belongs to."""

    def __init__(
        self, upstream: Upstream, write: Callable[[Object, Json], None], die: Callable[[], None], number: int
    ) -> None:
        self.upstream = upstream
        self.write = write
        self.die = die
        self.number = number
        self.capabilities: Object = {}
        self.level = ""
        self.held: dict[Json, Held] = {}
        self.subscriptions: list[Json] = []
        self.watched: dict[str, Json] = {}  # URIs of resources, and the request that listens

    def reply(self, ident: Json, result: Object) -> None:
        if self.upstream.dialect == R5:
            meta = {**result.get("_meta", {}), ENVELOPE + "serverInfo": {"name": "upstream", "version": "1"}}
            result = {"resultType": "complete", **result, "_meta": meta}
        self.write({"jsonrpc": "2.0", "id": ident, "result": result}, ident)

    def error(self, ident: Json, code: int, text: str, data: Json = None) -> None:
        more = {} if data is None else {"data": data}
        self.write({"jsonrpc": "2.0", "id": ident, "error": {"code": code, "message": text, **more}}, ident)

    def notify(self, method: str, about: Json, **params: Json) -> None:
        self.write({"jsonrpc": "2.0", "method": method, "params": params}, about)

    def result(
        self, ident: Json, content: list[Object], structured: Json = ..., *, bare: Json = ..., error: bool = False
    ) -> None:
        """The result of a call: `bare` is what the first draft says instead of content."""
        dialect = self.upstream.dialect
        if dialect == R0:
            if bare is ...:
                bare = content[0]["text"] if structured is ... else structured
            self.reply(ident, {"toolResult": bare})
            return
        out: Object = {"content": content, "isError": error}
        if dialect == P:
            out["structuredContent"] = {}
        if structured is not ... and since(dialect, R3):
            is_whole = dialect == R5 or isinstance(structured, dict)
            out["structuredContent"] = structured if is_whole else {"result": structured}
        self.reply(ident, out)

    def text(self, ident: Json, text: str) -> None:
        self.result(ident, [{"type": "text", "text": text}])

    def update(self, uri: str) -> None:
        """Say that a resource has changed, if the client wants to know."""
        if uri in self.watched:
            ident = self.watched[uri]
            more = {} if ident is None else {"_meta": {ENVELOPE + "subscriptionId": ident}}
            self.notify("notifications/resources/updated", ident, uri=uri, **more)

    def unwatch(self, uri: str) -> None:
        if uri in self.watched:
            del self.watched[uri]
            self.upstream.note(kind="unwatched", mark=uri, session=self.number)

    def announce(self) -> None:
        """Say that the list of tools has changed, to those who want to know."""
        method = "notifications/tools/list_changed"
        if self.upstream.dialect == R5:
            for ident in self.subscriptions:
                self.notify(method, ident, _meta={ENVELOPE + "subscriptionId": ident})
        else:
            self.write({"jsonrpc": "2.0", "method": method}, None)

    def cancel(self, ident: Json, how: str) -> None:
        """The client gives a request up."""
        if ident in self.subscriptions:
            self.subscriptions.remove(ident)
            for uri in [uri for uri, watcher in self.watched.items() if watcher == ident]:
                self.unwatch(uri)
            return
        held = self.held.pop(ident, None)
        self.upstream.note(kind="cancelled", how=how, mark=held.mark if held else "", session=self.number)


class Upstream:
    """A server of one dialect, for any number of sessions; `note` gets what happens."""

    def __init__(self, dialect: str, note: Callable[[Object], None]) -> None:
        self.dialect = dialect
        self.tools = [definition(dialect, tool) for tool in TOOLS]
        self.resources: list[str] = []  # URIs
        self.announces = True  # that its lists have changed
        self.sessions: list[Session] = []
        self.tools_of: Callable[[Session], list[Object]] = lambda session: self.tools
        self.visits: dict[str, int] = {}
        self._note = note
        self._last = 0

    def note(self, **event: Json) -> None:
        self._note(event)

    def begin(self, write: Callable[[Object, Json], None], die: Callable[[], None]) -> Session:
        self._last += 1
        session = Session(self, write, die, self._last)
        self.sessions.append(session)
        return session

    def end(self, session: Session) -> None:
        if session in self.sessions:
            self.sessions.remove(session)
            self.note(kind="ended", session=session.number)

    def command(self, order: Object) -> None:
        """What the test wants: `release` a slow call, or one that waits to ask; `offer` or `forget` a tool; `die`;
        `complete` a page; `ask` outside of a call.
        """
        word = order["do"]
        if word == "release":
            for session in self.sessions:
                for held in [each for each in session.held.values() if each.mark == order["mark"]]:
                    if "kind" in held.arguments:
                        self._ask(session, held, questions_of(self.dialect, held.arguments["kind"])[0], 0)
                        continue
                    del session.held[held.id]
                    self.note(kind="released", mark=held.mark, session=session.number)
                    session.text(held.id, "released")
        elif word == "die":
            for session in list(self.sessions):
                session.die()
        elif word == "complete":
            for session in self.sessions:
                session.write(
                    {
                        "jsonrpc": "2.0",
                        "method": COMPLETED,
                        "params": {"elicitationId": order["id"]},
                    },
                    None,
                )
        elif word == "ask":  # outside of a call
            for session in self.sessions:
                for number, question in enumerate(questions_of(self.dialect, order["kind"])):
                    session.write({"jsonrpc": "2.0", "id": f"idle-{number}", **question["q"]}, None)
        elif word == "offer":
            self.tools = [*self.tools, order["tool"]]
        elif word == "forget":
            self.tools = [each for each in self.tools if each["name"] != order["name"]]
        else:
            raise ValueError(word)

    def take(self, session: Session, message: Object, headers: dict[str, str] | None = None) -> None:
        """A message of the client."""
        self.note(kind="message", message=message, headers=headers or {}, session=session.number)
        method, ident = message.get("method"), message.get("id")
        if method is None:
            self._answered(session, message)
        elif ident is None:
            if method == "notifications/cancelled":
                session.cancel(message["params"]["requestId"], "notification")
        elif self.dialect == R5 and (wrong := _envelope_problem(message)):
            session.error(ident, *wrong)
        elif method == "tools/call":
            self._call(session, ident, message.get("params", {}))
        else:
            self._answer(session, ident, method, message.get("params", {}))

    def _answer(self, session: Session, ident: Json, method: str, params: Object) -> None:
        info: Object = {"capabilities": {"tools": {"listChanged": self.announces}, "logging": {}}}
        if self.dialect != R0:
            info["instructions"] = INSTRUCTIONS
        if self.resources:
            info["capabilities"]["resources"] = {"subscribe": True, "listChanged": True}
        if method == "initialize" and self.dialect != R5:
            session.capabilities = params["capabilities"]
            about = {"protocolVersion": self.dialect, "serverInfo": {"name": "upstream", "version": "1"}}
            session.reply(ident, {**info, **about})
        elif method == "server/discover" and self.dialect == R5:
            session.reply(ident, {**info, "supportedVersions": [R5], "ttlMs": 60_000, "cacheScope": "public"})
        elif method == "tools/list":
            session.reply(ident, self._page(self.tools_of(session), params))
        elif method == "ping" and self.dialect != R5:
            session.reply(ident, {})
        elif method == "logging/setLevel" and self.dialect != R5:
            session.level = params["level"]
            session.reply(ident, {})
        elif method == "resources/list" and self.resources:
            session.reply(ident, {"resources": [{"uri": uri, "name": uri} for uri in self.resources]})
        elif method == "resources/templates/list" and self.resources:
            session.reply(ident, {"resourceTemplates": []})
        elif method == "resources/subscribe" and params["uri"] in self.resources and self.dialect != R5:
            session.watched[params["uri"]] = None
            self.note(kind="watched", mark=params["uri"], session=session.number)
            session.reply(ident, {})
        elif method == "resources/unsubscribe" and self.dialect != R5:
            session.unwatch(params["uri"])
            session.reply(ident, {})
        elif method == "subscriptions/listen" and self.dialect == R5:
            session.subscriptions.append(ident)
            honoured: Object = {"toolsListChanged": True} if params["notifications"].get("toolsListChanged") else {}
            if uris := params["notifications"].get("resourceSubscriptions"):
                honoured["resourceSubscriptions"] = uris
                session.watched |= dict.fromkeys(uris, ident)
                for uri in uris:
                    self.note(kind="watched", mark=uri, session=session.number)
            meta = {ENVELOPE + "subscriptionId": ident}
            session.notify("notifications/subscriptions/acknowledged", ident, notifications=honoured, _meta=meta)
        else:
            session.error(ident, -32601, f"Unknown method: {method}")

    def _page(self, tools: list[Object], params: Object) -> Object:
        """Two pages, but one in the first draft. What ends the list, and what the cursor is, is the dialect's own."""
        cursor = "" if self.dialect == R5 else CURSOR
        end = {"nextCursor": ""} if self.dialect == P else {}
        cached = {"ttlMs": 60_000, "cacheScope": "public"} if self.dialect == R5 else {}
        if self.dialect == R0:
            return {"tools": tools}
        if "cursor" not in params:
            return {"tools": tools[:4], "nextCursor": cursor, **cached}
        assert params["cursor"] == cursor
        return {"tools": tools[4:], **end, **cached}

    # Calls

    def _call(self, session: Session, ident: Json, params: Object) -> None:
        name, arguments = params["name"], params.get("arguments", {})
        if name not in [each["name"] for each in self.tools_of(session)]:
            session.error(ident, -32602, f"Unknown tool: {name}")
            return
        run = getattr(self, f"_call_{name}", None)
        held = Held(ident, arguments, params.get("_meta", {}).get("progressToken"))
        if run is None:
            session.text(ident, f"I am {name}")
        else:
            run(session, held, params)

    def _call_echo(self, session: Session, held: Held, params: Object) -> None:
        session.text(held.id, held.arguments["text"])

    def _call_add(self, session: Session, held: Held, params: Object) -> None:
        value = {"sum": held.arguments["a"] + held.arguments["b"]}
        session.result(held.id, [{"type": "text", "text": json.dumps(value)}], value)

    def _call_numbers(self, session: Session, held: Held, params: Object) -> None:
        session.result(held.id, [{"type": "text", "text": "[2,3,5]"}], [2, 3, 5])

    def _call_null(self, session: Session, held: Held, params: Object) -> None:
        session.result(held.id, [{"type": "text", "text": "null"}], None)

    def _call_empty(self, session: Session, held: Held, params: Object) -> None:
        session.result(held.id, [{"type": "text", "text": "{}"}], {})

    def _call_raw(self, session: Session, held: Held, params: Object) -> None:
        """Whatever the arguments say, to the letter."""
        result = held.arguments["result"]
        session.write({"jsonrpc": "2.0", "id": held.id, "result": result}, held.id)

    def _call_fail(self, session: Session, held: Held, params: Object) -> None:
        content = [{"type": "text", "text": "it did not work"}]
        session.result(held.id, content, bare={"error": "it did not work", "status": "failed"}, error=True)

    def _call_error(self, session: Session, held: Held, params: Object) -> None:
        code = held.arguments["code"]
        session.error(held.id, code, f"error {code} of the rig", ERROR_DATA.get(code, {"why": "rig"}))

    def _call_blocks(self, session: Session, held: Held, params: Object) -> None:
        content = blocks_of(self.dialect)
        session.result(held.id, content, bare={"content": content})

    def _call_strange(self, session: Session, held: Held, params: Object) -> None:
        strange: Object = {"type": "hologram", "light": [1, 2]}
        session.result(held.id, [strange], bare={"content": [strange]})

    def _call_steps(self, session: Session, held: Held, params: Object) -> None:
        self._progress(session, held, params, *PROGRESS)
        session.text(held.id, "done")

    def _call_slow(self, session: Session, held: Held, params: Object) -> None:
        session.held[held.id] = held
        self.note(kind="started", mark=held.mark, session=session.number)
        self._progress(session, held, params, held.arguments.get("at", 1))

    def _progress(self, session: Session, held: Held, params: Object, *values: int) -> None:
        token = params.get("_meta", {}).get("progressToken")
        for value in values if token is not None else ():
            more = {"message": f"step {value}"} if since(self.dialect, R2) else {}
            about = {"progressToken": token, "progress": value, "total": 4, **more}
            session.notify("notifications/progress", held.id, **about)

    def _call_change(self, session: Session, held: Held, params: Object) -> None:
        name = held.arguments["name"]
        added = {"name": name, "description": "Was not there before", "inputSchema": {"type": "object"}}
        self.tools.append(added)
        for each in self.sessions:
            each.announce()
        session.text(held.id, "changed")

    def _call_log(self, session: Session, held: Held, params: Object) -> None:
        floor = params.get("_meta", {}).get(ENVELOPE + "logLevel", "") if self.dialect == R5 else session.level
        is_wanted = floor or self.dialect != R5
        for level in ("debug", "info", "error"):
            if is_wanted and (not floor or LEVELS.index(level) >= LEVELS.index(floor)):
                data = {"mark": held.mark, "level": level}
                session.notify("notifications/message", held.id, level=level, logger="rig", data=data)
        session.text(held.id, "logged")

    def _call_die(self, session: Session, held: Held, params: Object) -> None:
        session.die()

    def _call_who(self, session: Session, held: Held, params: Object) -> None:
        meta = params.get("_meta", {})
        capabilities = meta.get(ENVELOPE + "clientCapabilities", {}) if self.dialect == R5 else session.capabilities
        session.text(held.id, json.dumps(capabilities))

    def _call_visit(self, session: Session, held: Held, params: Object) -> None:
        """A page has to be visited before the first call of a mark."""
        visits = self.visits[held.mark] = self.visits.get(held.mark, 0) + 1
        if visits > 1 or not since(self.dialect, R4):
            session.text(held.id, "visited")
        elif self.dialect == R4:
            page = {**ERROR_DATA[-32042]["elicitations"][0], "elicitationId": f"e-{held.mark}"}
            session.error(held.id, -32042, "Sign-in needed", {"elicitations": [page]})
        else:
            page = {k: v for k, v in ERROR_DATA[-32042]["elicitations"][0].items() if k != "elicitationId"}
            self._require(session, held, {"page": {"method": "elicitation/create", "params": page}}, params, 1)

    def _call_later(self, session: Session, held: Held, params: Object) -> None:
        """Be asked again twice, where that can be said."""
        turn = _turn(held, params.get("requestState"))
        if self.dialect != R5 or turn == 2:
            session.text(held.id, "now")
        elif turn < 0 or "inputResponses" in params:
            session.error(held.id, -32602, "This is not the state that was given")
        else:
            session.reply(held.id, {"resultType": "input_required", "requestState": _state(held, turn + 1)})

    # Questions

    def _call_ask(self, session: Session, held: Held, params: Object) -> None:
        kind = held.arguments["kind"]
        rounds = questions_of(self.dialect, kind)
        if self.dialect == R5:
            turn = _turn(held, params.get("requestState"))
            if turn < 0:
                session.error(held.id, -32602, "This is not the state that was given")
            elif kind == "endless":
                self._require(session, held, rounds[0], params, 1)
            elif turn == len(rounds):
                session.text(held.id, json.dumps(params["inputResponses"]))
            else:
                self._require(session, held, rounds[turn], params, turn + 1)
            return
        missing = [each for each in _needed(rounds) if not _declares(session.capabilities, each)]
        if missing:
            self.note(kind="undeclared", mark=held.mark, missing=missing)
            content = [{"type": "text", "text": f"The client has no {missing[0]}"}]
            session.result(held.id, content, bare={"error": f"The client has no {missing[0]}"}, error=True)
        elif len(rounds) == 0:
            session.text(held.id, "{}")
        else:
            session.held[held.id] = held
            self.note(kind="started", mark=held.mark, session=session.number)
            if not held.arguments.get("waits"):
                self._ask(session, held, rounds[0], 0)

    def _require(self, session: Session, held: Held, questions: Object, params: Object, turn: int) -> None:
        """The question as an answer, which the client repeats its call for."""
        capabilities = params["_meta"][ENVELOPE + "clientCapabilities"]
        missing = [each for each in _needed([questions]) if not _declares(capabilities, each)]
        if missing:
            self.note(kind="undeclared", mark=held.mark, missing=missing)
            outer, _, inner = missing[0].partition(".")
            needed: Object = {"requiredCapabilities": {outer: {inner: {}} if inner else {}}}
            session.error(held.id, -32021, f"Client capability required: {missing[0]}", needed)
            return
        asks = {"inputRequests": questions, "requestState": _state(held, turn)}
        session.reply(held.id, {"resultType": "input_required", **asks})

    def _ask(self, session: Session, held: Held, questions: Object, turn: int) -> None:
        for key, question in questions.items():
            held.missing.add(key)
            ident = f"{turn}/{key}/{json.dumps(held.id)}"
            if held.arguments.get("names"):
                question = {**question, "params": {**question["params"], "_meta": {"progressToken": held.token}}}
            session.write({"jsonrpc": "2.0", "id": ident, **question}, held.id)

    def _answered(self, session: Session, message: Object) -> None:
        if "/" not in message["id"]:  # to a question outside of a call
            return
        turn, key, ident = message["id"].split("/", 2)
        held = session.held.get(json.loads(ident))
        if held is None:  # the call was cancelled meanwhile
            return
        held.answers[key] = {name: message[name] for name in ("result", "error") if name in message}
        held.missing.remove(key)
        if held.missing:
            return
        rounds = questions_of(self.dialect, held.arguments["kind"])
        if int(turn) + 1 < len(rounds):
            self._ask(session, held, rounds[int(turn) + 1], int(turn) + 1)
            return
        del session.held[held.id]
        if held.arguments["kind"] == "page" and self.dialect == R4:
            session.notify(COMPLETED, held.id, elicitationId="e-7")
        session.text(held.id, json.dumps({key: answer.get("result", answer) for key, answer in held.answers.items()}))


def _envelope_problem(message: Object) -> tuple[int, str] | None:
    meta = message.get("params", {}).get("_meta", {})
    if message["method"] == "initialize":
        return -32601, "Unknown method: initialize"
    if type(meta.get(ENVELOPE + "clientCapabilities")) is not dict:
        return -32602, "no capabilities in _meta"
    if meta.get(ENVELOPE + "protocolVersion") != R5:
        return -32022, "Unsupported protocol version"
    return None


def _state(held: Held, turn: int) -> str:
    """The state that is given with a question: the one in the arguments, if there is one."""
    return str(held.arguments.get("state", state_of(held.mark, turn)))


def _turn(held: Held, state: str | None) -> int:
    """Which round of questions is next; -1 if the state is not what was given for it."""
    if state is None:
        return 0
    return next((turn for turn in (1, 2) if state == _state(held, turn)), -1)


_NAME: Object = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_NEEDED = {"sampling/createMessage": "sampling", "roots/list": "roots"}


def questions_of(dialect: str, kind: str) -> list[Object]:
    """The rounds of questions of a kind, each by its key; none where the dialect has no such question."""
    mode = {"mode": "form"} if since(dialect, R4) else {}
    form = {"method": "elicitation/create", "params": {**mode, "message": "Your name?", "requestedSchema": _NAME}}
    messages = [{"role": "user", "content": {"type": "text", "text": "Capital of France?"}}]
    sample = {"method": "sampling/createMessage", "params": {"messages": messages, "maxTokens": 100}}
    roots: Object = {"method": "roots/list", "params": {}} if dialect == R5 else {"method": "roots/list"}
    page: Object = {"mode": "url", "message": "Sign in", "url": "https://bank.example/connect?code=canary-url"}
    if dialect == R4:
        page["elicitationId"] = "e-7"
    has_forms, has_pages = since(dialect, R3), since(dialect, R4)
    choices = {"method": "elicitation/create", "params": {**mode, **_choices(dialect)}}
    asks_page = [{"q": {"method": "elicitation/create", "params": page}}] if has_pages else []
    table: dict[str, list[Object]] = {
        "form": [{"q": form}] if has_forms else [],
        "url": asks_page,
        "page": asks_page,  # and says when it is completed
        "sampling": [{"q": sample}],
        "roots": [{"q": roots}],
        "both": [{"r": roots, "s": sample}],
        "twice": [{"q": form}, {"again": form}] if has_forms else [],
        "choices": [{"q": choices}] if has_forms else [],
        "endless": [{"q": roots}],
        "single": [{"q": _of_parts(sample, 1)}] if has_pages else [],
        "parts": [{"q": _of_parts(sample, 2)}] if has_pages else [],
    }
    return table[kind]


def _of_parts(sample: Object, count: int) -> Object:
    """The same with content in several blocks, which 2025-11-25 brought."""
    [message] = sample["params"]["messages"]
    messages = [{**message, "content": [message["content"]] * count}]
    return {**sample, "params": {**sample["params"], "messages": messages}}


def _choices(dialect: str) -> Object:
    """A form with titled choices and defaults; several choices where the dialect has them."""
    titled: Object = {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]}
    properties: Object = {"yes": {"type": "boolean", "default": True}}
    if since(dialect, R4):
        properties["one"] = {"type": "string", **titled}
        properties["many"] = {"type": "array", "items": {"type": "string", "enum": ["x", "y", "z"]}}
        properties["size"] = {"type": "string", "default": "small"}
    else:
        properties["one"] = {"type": "string", "enum": ["a", "b"], "enumNames": ["A", "B"]}
    schema = {"type": "object", "properties": properties, "required": ["one"]}
    return {"message": "Choose", "requestedSchema": schema}


def _needed(rounds: list[Object]) -> list[str]:
    """The capabilities that questions need."""
    questions = [each for asked in rounds for each in asked.values()]
    return [
        _NEEDED.get(each["method"], f"elicitation.{each.get('params', {}).get('mode', 'form')}") for each in questions
    ]


def _declares(capabilities: Object, needed: str) -> bool:
    outer, _, inner = needed.partition(".")
    if outer not in capabilities:
        return False
    modes = capabilities[outer]
    return not inner or inner in modes or (inner == "form" and "url" not in modes)


def blocks_of(dialect: str) -> list[Object]:
    """One block of every kind that the dialect has."""
    notes: Object = {"audience": ["user"], "priority": 0.5}
    if since(dialect, R3):
        notes["lastModified"] = MODIFIED
    meta = {"_meta": {"example.org/y": 2}} if since(dialect, R3) and dialect != P else {}
    blocks: list[Object] = [
        {"type": "text", "text": "one", "annotations": notes, **meta},
        {"type": "image", "data": PNG, "mimeType": "image/png"},
    ]
    if since(dialect, R2):
        blocks.append({"type": "audio", "data": WAV, "mimeType": "audio/wav", "annotations": notes})
    blocks.append({"type": "resource", "resource": {"uri": "note://a", "mimeType": "text/plain", "text": "hello"}})
    blocks.append({"type": "resource", "resource": {"uri": "note://b", "blob": "AAEC"}})
    if since(dialect, R3):
        link = {"type": "resource_link", "uri": "note://c", "name": "c", "description": "Entry", "mimeType": "text/x-c"}
        blocks.append({**link, **({"icons": ICONS} if since(dialect, R4) else {}), **meta})
    return blocks


# Standard input and output


def main(dialect: str, path: str) -> None:
    control = socket.socket(socket.AF_UNIX)
    control.connect(path)

    def note(event: Object) -> None:
        control.sendall(json.dumps(event).encode() + b"\n")

    def write(message: Object, about: Json) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(1, data) :]

    upstream = Upstream(dialect, note)
    session = upstream.begin(write, lambda: os._exit(3))
    note({"kind": "process", "pid": os.getpid(), "arguments": sys.argv, "environ": dict(os.environ)})
    rest = {0: b"", control.fileno(): b""}
    while True:
        for descriptor in select.select([*rest], [], [])[0]:
            data = os.read(descriptor, 1 << 16)
            if not data:
                return
            *lines, rest[descriptor] = (rest[descriptor] + data).split(b"\n")
            for line in lines:
                if descriptor:
                    upstream.command(json.loads(line))
                else:
                    upstream.take(session, json.loads(line))


if __name__ == "__main__":
    main(*sys.argv[1:3])
