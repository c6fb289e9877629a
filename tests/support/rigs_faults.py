"""Servers that misbehave, each in one way, and otherwise do as they should.

A script of `tools/call` misbehaves when it is called with `{"bad": true}`, one of another method the first time it is
asked. What only HTTP can do wrong is written byte by byte (`Wire`), what only a process can do is for stdio.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from rigs import MODERN, SCRIPTS, SUM, HttpRig, Object, Rig, Script, ordinary, script
from rigs_client import OK, completed, is_call

FLOOD = 100_000
LONG = 100 * 1024 * 1024
PIECE = 256 * 1024
PAUSE = 0.02  # between two signs of life of a server that never comes to the point
FINE: Object = {"name": "fine", "inputSchema": {"type": "object"}}


def fault(method: str = "tools/call") -> Callable[[Script], Script]:
    """Register a script that does this instead of answering."""

    def register(bad: Script) -> Script:
        def either(rig: Rig, message: Object) -> None:
            if message.get("method") != method:
                is_bad = False
            elif method == "tools/call":
                is_bad = bool(message["params"]["arguments"].get("bad"))
            else:
                is_bad = rig.state.setdefault("is good", False) is False
                rig.state["is good"] = True
            (bad if is_bad else ordinary)(rig, message)

        SCRIPTS[bad.__name__] = either
        return bad

    return register


def told(rig: Rig, name: str) -> str:
    """What the test wants a script to know, also where that runs in a process."""
    return str(rig.state.get(name) or os.environ[name])


def progress_of(message: Object) -> Object:
    token = message["params"]["_meta"]["progressToken"]
    return {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": token, "progress": 1}}


def answer(message: Object, text: str = "ok") -> bytes:
    result = {"resultType": "complete", "content": [{"type": "text", "text": text}], "isError": False}
    return json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()


# Answers that are none


@fault()
def wrong_id(rig: Rig, message: Object) -> None:
    rig.result({"id": 999_999}, OK)


@fault()
def id_as_text(rig: Rig, message: Object) -> None:
    rig.result({"id": str(message["id"])}, completed(rig, OK))


@fault()
def answers_twice(rig: Rig, message: Object) -> None:
    for text in ("ok", "again"):
        rig.say(answer(message, text))


@fault()
def answers_unasked(rig: Rig, message: Object) -> None:
    """An answer to what was never asked comes first."""
    rig.result({"id": 999_999}, OK)
    rig.say(answer(message))


@fault()
def error_without_id(rig: Rig, message: Object) -> None:
    rig.error({"id": None}, -32700, "cannot read that")


@fault()
def error_not_object(rig: Rig, message: Object) -> None:
    rig.say({"jsonrpc": "2.0", "id": message["id"], "error": "broken"})


@fault()
def result_not_object(rig: Rig, message: Object) -> None:
    rig.result(message, [1, 2])


@fault()
def result_and_error(rig: Rig, message: Object) -> None:
    rig.say({"jsonrpc": "2.0", "id": message["id"], "result": OK, "error": {"code": 1, "message": "no"}})


@fault()
def neither_result_nor_error(rig: Rig, message: Object) -> None:
    rig.say({"jsonrpc": "2.0", "id": message["id"]})


def _bad_json(name: str, member: bytes) -> None:
    def bad(rig: Rig, message: Object) -> None:
        rig.say(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[],%b}}' % (message["id"], member))

    bad.__name__ = name
    fault()(bad)


_bad_json("nan", b'"x":NaN')
_bad_json("duplicate_keys", b'"x":1,"x":2')
_bad_json("invalid_utf8", b'"x":"\xff\xfe"')
_bad_json("long_number", b'"x":' + b"9" * 2_000)
_bad_json("lone_surrogate", b'"x":"\\ud800"')
_bad_json("nested_200_deep", b'"x":' + b"[" * 200 + b"]" * 200)
_bad_json("nested_100000_deep", b'"x":' + b"[" * 100_000 + b"]" * 100_000)
_bad_json("too_many_parts", b'"x":[' + b"{}," * 600_000 + b"{}]")


@fault()
def answer_after_5000(rig: Rig, message: Object) -> None:
    """A batch that is too long, with the answer at its end."""
    notice = {"jsonrpc": "2.0", "method": "notifications/x"}
    rig.say([*[notice] * 5_000, json.loads(answer(message))])


@fault()
def silent(rig: Rig, message: Object) -> None:
    pass


@fault()
def dies(rig: Rig, message: Object) -> None:
    rig.die()


@script
def refuses_handshake_first(rig: Rig, message: Object) -> None:
    """Of the new kind, and slow: it answers the probe some time after it has refused the handshake."""
    if message.get("method") == "server/discover":
        rig.state["probe"] = message
    elif message.get("method") == "initialize":
        ordinary(rig, message)
        later(0.1, lambda: ordinary(rig, rig.state["probe"]))
    else:
        ordinary(rig, message)


# Lists


@fault("tools/list")
def tools_not_list(rig: Rig, message: Object) -> None:
    rig.result(message, completed(rig, {"tools": {"echo": {}}}))


@fault("tools/list")
def tools_missing(rig: Rig, message: Object) -> None:
    rig.result(message, completed(rig, {}))


@fault("tools/list")
def cursor_not_text(rig: Rig, message: Object) -> None:
    rig.result(message, completed(rig, {"tools": [], "nextCursor": 7}))


@fault("tools/list")
def tools_1001(rig: Rig, message: Object) -> None:
    tools = [{"name": f"t{n}", "inputSchema": {"type": "object"}} for n in range(1001)]
    rig.result(message, completed(rig, {"tools": tools}))


@fault("tools/list")
def list_nested_1000_deep(rig: Rig, message: Object) -> None:
    schema = '{"items":' * 1_000 + "{}" + "}" * 1_000
    tools = json.dumps([FINE | {"outputSchema": "SCHEMA"}]).replace('"SCHEMA"', schema)
    rig.say(f'{{"jsonrpc":"2.0","id":{message["id"]},"result":{{"tools":{tools}}}}}'.encode())


@fault("tools/list")
def list_of_10_mb(rig: Rig, message: Object) -> None:
    schema = {"type": "object", "description": "x" * 10_000_000}
    rig.result(message, completed(rig, {"tools": [FINE | {"outputSchema": schema}]}))


@fault("tools/list")
def ttl_of_400_digits(rig: Rig, message: Object) -> None:
    rig.result(message, completed(rig, {"tools": [FINE], "ttlMs": 10**400, "cacheScope": "public"}))


@script
def description_of_1_mb(rig: Rig, message: Object) -> None:
    rig.tools = [FINE, FINE | {"name": "novel", "description": "x" * 1_000_000}]
    ordinary(rig, message)


def _pages(name: str, cursor: Callable[[str], str]) -> None:
    def pages(rig: Rig, message: Object) -> None:
        """The first time it is asked there is no end to it."""
        at = message.get("params", {}).get("cursor")
        if message.get("method") != "tools/list" or (at is None and rig.state.get("lists")):
            ordinary(rig, message)
            return
        rig.state["lists"] = True
        rig.result(message, completed(rig, {"tools": [], "nextCursor": cursor(at or "0")}))

    SCRIPTS[name] = pages


_pages("pages_for_ever", lambda cursor: str(int(cursor) + 1))
_pages("cursor_again", lambda cursor: "again")
_pages("cursors_in_turn", lambda cursor: {"0": "a", "a": "b", "b": "a"}[cursor])


@script
def capability_is_true(rig: Rig, message: Object) -> None:
    rig.state["capabilities"] = {"tools": True}
    ordinary(rig, message)


# Slow ones


@fault("tools/list")
def silent_list(rig: Rig, message: Object) -> None:
    pass


def later(seconds: float, what: Callable[[], None]) -> None:
    if is_process():
        time.sleep(seconds)
        what()
    else:
        asyncio.get_running_loop().call_later(seconds, what)


@script
def slow_pages(rig: Rig, message: Object) -> None:
    """A page comes after a while, and there is always one more."""
    if message.get("method") == "tools/list":
        page = int(message.get("params", {}).get("cursor", "0"))
        later(0.1, lambda: rig.result(message, completed(rig, {"tools": [], "nextCursor": str(page + 1)})))
    else:
        ordinary(rig, message)


@script
def silent_restart(rig: Rig, message: Object) -> None:
    """Dies when told to, and says nothing from then on."""
    flag = Path(told(rig, "FLAG"))
    if flag.exists():
        return
    if is_call(message) and message["params"]["arguments"].get("die"):
        flag.touch()
        rig.die()
    else:
        ordinary(rig, message)


@script
def dies_for_good(rig: Rig, message: Object) -> None:
    """It cannot be started any more, as long as a file is there."""
    flag = Path(told(rig, "FLAG"))
    if flag.exists():
        sys.exit("broken for good")
    if is_call(message) and message["params"]["arguments"].get("bad"):
        flag.touch()
        rig.die()
    else:
        ordinary(rig, message)


@script
def slow_to_open(rig: Rig, message: Object) -> None:
    """Dies when told to, and takes its time for a handshake."""
    if message.get("method") in ("initialize", "server/discover"):
        later(0.3, lambda: ordinary(rig, message))
    elif is_call(message) and message["params"]["arguments"].get("bad"):
        rig.die()
    else:
        ordinary(rig, message)


@script
def asks_and_dies_for_good(rig: Rig, message: Object) -> None:
    """Asks in the way of 2026-07-28, and is not there any more to hear the answer."""
    flag = Path(told(rig, "FLAG"))
    if flag.exists():
        sys.exit("broken for good")
    if is_call(message):
        schema = {"type": "object", "properties": {}}
        question = {"method": "elicitation/create", "params": {"message": "Well?", "requestedSchema": schema}}
        rig.result(message, {"resultType": "input_required", "inputRequests": {"q": question}})
        flag.touch()
        rig.die()
    else:
        ordinary(rig, message)


@script
def forgets_session(rig: Rig, message: Object) -> None:
    """Over HTTP: a bad call is of a session it does not know any more, and the handshake after that goes wrong."""
    assert isinstance(rig, HttpRig)
    if is_call(message) and message["params"]["arguments"].get("bad"):
        rig.state["has forgotten"] = True
        rig.statuses = [404]
        rig.error(message, -32001, "Session not found")
    elif message.get("method") == "initialize" and rig.state.pop("has forgotten", False):
        how = told(rig, "HOW")
        rig.statuses = [500] if how == "broken" else []
        if how == "refused":
            rig.error(message, -32000, "not now")
        elif how == "broken":
            rig.say(b'{"id":%d}' % message["id"])
    else:
        ordinary(rig, message)


@script
def says_later_for_ever(rig: Rig, message: Object) -> None:
    if is_call(message):
        rig.result(message, {"resultType": "input_required", "requestState": "x"})
    else:
        ordinary(rig, message)


# Promises about results


def _promises(name: str, schema: Callable[[Rig], Any], value: Any) -> None:
    """A server with a tool of this `outputSchema`, which gives that value."""

    def promising(rig: Rig, message: Object) -> None:
        if message.get("method") == "tools/list":
            rig.tools = [FINE, SUM | {"outputSchema": schema(rig)}]
        if is_call(message) and message["params"]["name"] == "sum":
            rig.result(message, completed(rig, OK | {"structuredContent": value}))
        else:
            ordinary(rig, message)

    SCRIPTS[name] = promising


def _of(member: Any) -> Callable[[Rig], Any]:
    return lambda rig: {"type": "object", "properties": {"x": member}}


def _nested(depth: int) -> Object:
    made: Object = {}
    for _ in range(depth):
        made = {"not": made}
    return made


def _unfolding() -> Object:
    defs = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    return {"type": "object", "$defs": {**defs, "d40": {}}, "$ref": "#/$defs/d0"}


_AAA = {"x": "a" * 100_000 + "!"}
_promises("promise_broken", lambda rig: SUM["outputSchema"], {"sum": "three"})
_promises("promise_backtracks", _of({"pattern": "^(a+)+$"}), _AAA)
_promises("promise_backtracks_more", _of({"pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}), _AAA)
_promises("promise_looks_around", _of({"pattern": "^(?=(a+)+$)a"}), _AAA)
_promises("promise_refers_back", _of({"pattern": "^(a*)*\\1$"}), _AAA)
_promises("promise_of_3_mb", _of({"enum": ["x" * 3_000_000]}), {"x": "y"})
_promises("promise_nested_90_deep", _of(_nested(90)), {"x": 1})
_promises("promise_in_a_loop", lambda rig: {"$ref": "#"}, {"x": 1})
_promises("promise_unfolds", lambda rig: _unfolding(), {"x": 1})
_promises("promise_is_a_number", lambda rig: 7, {"x": 1})
_promises("promise_elsewhere", lambda rig: {"$ref": told(rig, "CANARY")}, {"x": 1})
_promises("promise_of_dialect_elsewhere", lambda rig: {"$schema": told(rig, "CANARY"), "type": "object"}, {"x": 1})


def _list_of_lists(depth: int) -> Object:
    value: Object = {}
    for _ in range(depth):
        value = {"x": value}
    return value


_promises("promise_is_recursive", _of({"$ref": "#"}), _list_of_lists(100))
_promises("promise_is_recursive_and_broken", _of({"$ref": "#"}), {"x": {"x": {"x": 7}}})


@fault()
def unknown_content(rig: Rig, message: Object) -> None:
    rig.result(message, completed(rig, {"content": [{"type": "hologram", "beams": 3}], "isError": False}))


def _odd(name: str, result: Object) -> None:
    def odd(rig: Rig, message: Object) -> None:
        rig.result(message, completed(rig, result))

    odd.__name__ = name
    fault()(odd)


ODD: dict[str, Object] = {
    "content_not_list": {"content": "text"},
    "content_missing": {},
    "content_of_nulls": {"content": [None, 7, "x", [], {"type": 7}, {"type": ["text"]}, {"type": "text", "text": 7}]},
    "meta_not_object": {"content": [], "_meta": 7},
    "annotations_not_object": {"content": [{"type": "text", "text": "x", "annotations": 7}]},
    "error_flag_is_text": {"content": [{"type": "text", "text": "x"}], "isError": "yes"},
    "both_kinds": {"toolResult": {"error": 7}, "content": [{"type": "text", "text": "x"}]},
    "old_kind_only": {"toolResult": {"error": ["x"]}},
    "resource_of_nothing": {"content": [{"type": "resource", "resource": {"text": 7}}, {"type": "resource"}]},
    "picture_of_nothing": {"content": [{"type": "image", "data": None, "mimeType": None}, {"type": "image"}]},
}
for _name, _result in ODD.items():
    _odd(_name, _result)


# Too much


def is_process() -> bool:
    """Whether the script runs in a process of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


def again_and_again(rig: Rig, say: Callable[[], None]) -> None:
    """Until the rig is done with, which goes on answering."""
    if is_process():

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    say()
                    time.sleep(PAUSE)

        threading.Thread(target=run, daemon=True).start()
        return

    async def repeating() -> None:
        while True:
            say()
            await asyncio.sleep(PAUSE)

    rig.state.setdefault("tasks", []).append(asyncio.create_task(repeating()))


@fault()
def progress_for_ever(rig: Rig, message: Object) -> None:
    again_and_again(rig, lambda: rig.say(progress_of(message)))


@fault()
def logs_for_ever(rig: Rig, message: Object) -> None:
    again_and_again(rig, lambda: rig.notify("notifications/message", level="debug", data="x"))


@fault()
def progress_of_900_digits(rig: Rig, message: Object) -> None:
    """A number that no float can hold; and nothing more."""
    said = progress_of(message)
    said["params"] |= {"progress": 10**900, "total": 10**901}
    rig.say(said)


def _flood(name: str, made: Callable[[Object], Iterable[bytes]], *, answered: bool = True) -> None:
    """Many messages at once, and then perhaps the answer."""

    def floods(rig: Rig, message: Object) -> None:
        said = [*made(message), *[answer(message)] * answered]
        if isinstance(rig, HttpRig):
            rig.raw = _writing(partial(write, said), rig, message)
        elif is_process():
            _print(b"\n".join(said) + b"\n")
        else:
            for each in said:
                rig.write(each)

    async def write(said: list[bytes], wire: Wire) -> None:
        await wire.events()
        for at in range(0, len(said), 500):
            await wire.send(b"".join(b"data: %b\n\n" % each for each in said[at : at + 500]))
        if not answered or wire.is_old:
            await asyncio.sleep(3600)

    floods.__name__ = name
    fault()(floods)


def _notices(method: str, count: int = FLOOD, **params: Any) -> Callable[[Object], Iterable[bytes]]:
    said = json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode()
    return lambda message: repeat(said, count)


def _numbered(count: int, rest: bytes) -> Callable[[Object], Iterable[bytes]]:
    return lambda message: (b'{"jsonrpc":"2.0","id":%d,%b}' % (-number, rest) for number in range(1, count + 1))


_flood("flood_of_notifications", _notices("notifications/x", data="x" * 20))
_flood("flood_of_changes", _notices("notifications/tools/list_changed", 20_000))
_flood("flood_of_logs", _notices("notifications/message", level="debug", data="x" * 20))
_flood("flood_of_progress", lambda message: repeat(json.dumps(progress_of(message)).encode(), 20_000))
_flood("flood_of_acknowledgements", _notices("notifications/subscriptions/acknowledged", 10_000))
_flood("flood_of_answers", _numbered(20_000, b'"result":{}'))
_flood("flood_of_pings", _numbered(20_000, b'"method":"ping"'))
# Whoever is asked takes for ever, and so does the server.
_ASKING = b'"method":"sampling/createMessage","params":{"messages":[],"maxTokens":1}'
_flood("flood_of_questions", _numbered(5_000, _ASKING), answered=False)


@fault()
def questions_in_one(rig: Rig, message: Object) -> None:
    """The same in the way of 2026-07-28."""
    question = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}
    asked = {str(number): question for number in range(5_000)}
    rig.result(message, {"resultType": "input_required", "inputRequests": asked, "requestState": "s"})


BOMB: Object = {"type": "object", "properties": {"x": _nested(90)}}


@script
def form_is_a_bomb(rig: Rig, message: Object) -> None:
    """A form whose schema is too much; the result is what the client said to it."""
    bad = is_call(message) and message["params"]["arguments"].get("bad")
    params = {"mode": "form", "message": "Who?", "requestedSchema": BOMB}
    if bad and rig.revision == MODERN:
        question = {"method": "elicitation/create", "params": params}
        rig.result(message, {"resultType": "input_required", "inputRequests": {"q": question}})
    elif bad:
        rig.state["call"] = message
        rig.ask("q", "elicitation/create", **params)
    elif "method" not in message:
        rig.say(answer(rig.state["call"], json.dumps(message)))
    else:
        ordinary(rig, message)


# Processes


def _print(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@fault()
def half_a_line(rig: Rig, message: Object) -> None:
    _print(answer(message)[:40])
    os._exit(3)


@fault()
def half_a_line_that_looks_whole(rig: Rig, message: Object) -> None:
    """It ends with a bracket, but not with the last one."""
    _print(answer(message)[:-1])
    os._exit(3)


@fault()
def whole_line_without_newline(rig: Rig, message: Object) -> None:
    _print(answer(message))
    os._exit(3)


@fault()
def line_without_end(rig: Rig, message: Object) -> None:
    """The answer, and no newline; it goes on living."""
    _print(answer(message))


@fault()
def line_of_100_mb(rig: Rig, message: Object) -> None:
    for _ in range(LONG // PIECE):
        _print(b"x" * PIECE)
    _print(b"\n")


@fault()
def answer_of_100_mb(rig: Rig, message: Object) -> None:
    begun, end = answer(message, "TEXT").split(b"TEXT")
    _print(begun)
    for _ in range(LONG // PIECE):
        _print(b"x" * PIECE)
    _print(end + b"\n")


@script
def noise(rig: Rig, message: Object) -> None:
    """A banner, colours, bars, JSON that is no message, bytes that are no text: before and after every answer."""
    _print(b"  Welcome to my server v1.0\r\n\n\x1b[32mINFO\x1b[0m ready\n")
    _print(b"\r[#---] 25%\r[##--] 50%\r[####] 100%\n\xff\xfe\x00\n{not json}\n[]\n{}\nnull\n7\n")
    _print(b'{"level":30,"id":%d,"msg":"a line of a log"}\n' % message.get("id", 1))
    ordinary(rig, message)
    _print(b"Done.\n[1, 2]\n")


@fault()
def bar_before_answer(rig: Rig, message: Object) -> None:
    """A progress bar without a newline stands before the answer."""
    _print(b"\r[####] 100%" + answer(message) + b"\n")


@fault()
def closes_output(rig: Rig, message: Object) -> None:
    """And lives on."""
    os.close(1)


@fault()
def closes_input(rig: Rig, message: Object) -> None:
    """And lives on, without an answer."""
    os.close(0)
    threading.Event().wait()


@fault()
def fills_stderr(rig: Rig, message: Object) -> None:
    for _ in range(64):
        sys.stderr.write("x" * (PIECE - 1) + "\n")
    rig.say(answer(message))


@fault()
def freezes(rig: Rig, message: Object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@fault()
def reads_nothing(rig: Rig, message: Object) -> None:
    threading.Event().wait()


@script
def forks(rig: Rig, message: Object) -> None:
    """Starts processes that end for nobody; one holds the pipes. Their numbers are the text of an answer."""
    if not is_call(message):
        ordinary(rig, message)
        return
    code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 13, 15)]; time.sleep(3600)"
    quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen([sys.executable, "-ISc", code], **more) for more in (quiet, dict[str, Any]())]
    rig.say(answer(message, json.dumps([process.pid for process in started])))


@script
def never_ends(rig: Rig, message: Object) -> None:
    """Neither the end of its input nor a polite signal ends it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if "stays" not in rig.state:
        rig.state["stays"] = True
        threading.Thread(target=threading.Event().wait).start()
    if is_call(message):
        rig.say(answer(message, str(os.getpid())))
    else:
        ordinary(rig, message)


# HTTP, byte by byte


class Wire:
    """The answer to one call, as the bytes of a response; or, on the older transport, of the only stream."""

    def __init__(self, rig: HttpRig, message: Object, writer: asyncio.StreamWriter) -> None:
        self.rig = rig
        self.message = message
        self.is_old = isinstance(rig, SseRig)
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, kind: str, *lines: str, status: int = 200) -> None:
        if not self.is_old:
            await self.send("\r\n".join([f"HTTP/1.1 {status} x", f"Content-Type: {kind}", *lines, "", ""]).encode())

    async def events(self) -> None:
        """From now on the body is an event stream."""
        await self.head("text/event-stream", "Connection: close")

    async def event(self, message: bytes | Object) -> None:
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        await self.send(b"data: " + data + b"\n\n")


Raw = Callable[[Wire], Awaitable[None]]


def raw(function: Raw) -> Raw:
    """Register a script that writes the answer to a bad call itself."""

    def bad(rig: Rig, message: Object) -> None:
        assert isinstance(rig, HttpRig)
        rig.raw = _writing(function, rig, message)

    bad.__name__ = function.__name__
    fault()(bad)
    return function


def _writing(function: Raw, rig: HttpRig, message: Object) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def write(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await function(Wire(rig, message, writer))

    return write


class SseRig(HttpRig):
    """A scripted server of the transport of 2024: everything it says comes on one stream."""

    def __init__(self, script: Script | str, revision: str = "2025-11-25") -> None:
        super().__init__(script, revision)
        self._stream: asyncio.StreamWriter | None = None

    def write(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream.write(b"event: message\ndata: " + data + b"\n\n")

    def die(self) -> None:
        assert self._stream is not None
        self._stream.close()
        self._stream = None

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            self._stream = writer
            start = "HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
            writer.write(start.encode() + b"event: endpoint\ndata: /messages\n\n")
            await reader.read(1)
            self.closed.set()
            return False
        (length,) = (line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        body = await reader.readexactly(int(length))
        writer.write(b"HTTP/1.1 202 x\r\nContent-Length: 0\r\n\r\n")
        self.took(json.loads(body))
        if self.raw is not None and self._stream is not None:
            task = asyncio.create_task(self._raw(self.raw, self._stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self.raw = None
        return True

    async def _raw(
        self, write: Callable[[asyncio.StreamWriter], Awaitable[None]], stream: asyncio.StreamWriter
    ) -> None:
        await write(stream)
        stream.close()


def _pieces(size: int) -> Iterable[bytes]:
    for _ in range(size // PIECE):
        yield b"x" * PIECE


@raw
async def half_a_body(wire: Wire) -> None:
    body = answer(wire.message)
    await wire.head("application/json", f"Content-Length: {len(body)}")
    await wire.send(body[:40])


@raw
async def half_a_chunk(wire: Wire) -> None:
    body = answer(wire.message)
    await wire.head("application/json", "Transfer-Encoding: chunked")
    await wire.send(b"%x\r\n" % len(body) + body[:40])


@raw
async def no_last_chunk(wire: Wire) -> None:
    """All of the answer has come, and the end of the response has not."""
    body = answer(wire.message)
    await wire.head("application/json", "Transfer-Encoding: chunked")
    await wire.send(b"%x\r\n" % len(body) + body + b"\r\n")


@raw
async def half_a_head(wire: Wire) -> None:
    await wire.send(b"HTTP/1.1 200 x\r\nContent-Ty")


@raw
async def head_for_ever(wire: Wire) -> None:
    await wire.send(b"HTTP/1.1 200 x\r\n")
    while True:
        await wire.send(b"X-More: " + b"x" * 1000 + b"\r\n")


@raw
async def not_http(wire: Wire) -> None:
    await wire.send(b"+OK POP3 ready\r\n")


@raw
async def half_an_event(wire: Wire) -> None:
    await wire.events()
    await wire.send(b"data: " + answer(wire.message)[:40])


@raw
async def event_without_end(wire: Wire) -> None:
    """A whole answer in an event that does not end before its stream does: no event (WHATWG)."""
    await wire.events()
    await wire.send(b"data: " + answer(wire.message) + b"\n")


@raw
async def half_a_chunk_of_events(wire: Wire) -> None:
    await wire.head("text/event-stream", "Transfer-Encoding: chunked")
    await wire.send(b"fff\r\ndata: " + answer(wire.message)[:40])


@raw
async def junk_after_events(wire: Wire) -> None:
    """What a proxy may write into a stream when its server has gone away."""
    await wire.head("text/event-stream", "Transfer-Encoding: chunked")
    await wire.send(b"e\r\n: keep-alive\n\n\r\nHTTP/1.1 502 Bad Gateway\r\n\r\n")
    await asyncio.sleep(3600)


@raw
async def body_of_100_mb(wire: Wire) -> None:
    await wire.head("application/json", f"Content-Length: {LONG}")
    for piece in _pieces(LONG):
        await wire.send(piece)


@raw
async def chunks_of_100_mb(wire: Wire) -> None:
    await wire.head("application/json", "Transfer-Encoding: chunked")
    for piece in _pieces(LONG):
        await wire.send(b"%x\r\n" % len(piece) + piece + b"\r\n")


@raw
async def event_of_100_mb(wire: Wire) -> None:
    await wire.events()
    await wire.send(b"data: ")
    for piece in _pieces(LONG // 10 if wire.is_old else LONG):  # which does not end when nobody waits for it
        await wire.send(piece)


@raw
async def refusal_of_100_mb(wire: Wire) -> None:
    await wire.head("text/plain", f"Content-Length: {LONG}", status=400)
    for piece in _pieces(LONG):
        await wire.send(piece)


@raw
async def page_of_100_mb(wire: Wire) -> None:
    await wire.head("text/html", f"Content-Length: {LONG}")
    for piece in _pieces(LONG):
        await wire.send(piece)


@raw
async def event_for_ever(wire: Wire) -> None:
    """Lines of one event, a few at a time, that never ends."""
    await wire.events()
    while True:
        await wire.send(b"data: x\n")
        await asyncio.sleep(PAUSE)


@raw
async def comments_for_ever(wire: Wire) -> None:
    await wire.events()
    while True:
        await wire.send(b": keep-alive\n\n")
        await asyncio.sleep(PAUSE)


@raw
async def progress_events_for_ever(wire: Wire) -> None:
    await wire.events()
    while True:
        await wire.event(progress_of(wire.message))
        await asyncio.sleep(PAUSE)


@raw
async def trickle(wire: Wire) -> None:
    """The answer, byte by byte, and never the last one."""
    body = answer(wire.message, "x" * 10_000)
    if wire.is_old:
        body = b"data: " + body
    await wire.head("application/json", f"Content-Length: {len(body)}")
    for at in range(len(body) - 1):
        await wire.send(body[at : at + 1])
        await asyncio.sleep(PAUSE)


@raw
async def trickle_of_head(wire: Wire) -> None:
    for letter in "HTTP/1.1 200 x\r\n" + "X-More: x\r\n" * 1000:
        await wire.send(letter.encode())
        await asyncio.sleep(PAUSE)


@raw
async def html_page(wire: Wire) -> None:
    page = b"<html><title>Sign in</title></html>"
    await wire.head("text/html; charset=utf-8", f"Content-Length: {len(page)}")
    await wire.send(page)


@raw
async def answer_as_text(wire: Wire) -> None:
    body = answer(wire.message)
    await wire.head("text/plain", f"Content-Length: {len(body)}")
    await wire.send(body)


@raw
async def redirects(wire: Wire) -> None:
    await wire.head("text/plain", f"Location: {told(wire.rig, 'CANARY')}", "Content-Length: 0", status=307)


@raw
async def redirects_to_itself(wire: Wire) -> None:
    await wire.head("text/plain", "Location: /mcp", "Content-Length: 0", "Connection: close", status=308)


@raw
async def status_500(wire: Wire) -> None:
    await wire.head("text/plain", "Content-Length: 4", status=500)
    await wire.send(b"oops")


@raw
async def status_429(wire: Wire) -> None:
    await wire.head("text/plain", "Retry-After: 7", "Content-Length: 9", status=429)
    await wire.send(b"slow down")


@raw
async def status_202(wire: Wire) -> None:
    await wire.head("text/plain", "Content-Length: 0", status=202)


@raw
async def no_answer_in_events(wire: Wire) -> None:
    await wire.events()
    await wire.event({"jsonrpc": "2.0", "method": "notifications/x"})


def bomb(message: Object) -> bytes:
    """A short body that is a long one."""
    begun, end = answer(message, "TEXT").split(b"TEXT")
    return gzip.compress(begun + b"x" * LONG + end, compresslevel=1)


BOMBS: dict[int, bytes] = {}


@raw
async def gzip_bomb(wire: Wire) -> None:
    await wire.head("application/json", "Content-Encoding: gzip", f"Content-Length: {len(BOMBS[0])}")
    await wire.send(BOMBS[0])


@raw
async def gzip_events(wire: Wire) -> None:
    await wire.head("text/event-stream", "Content-Encoding: gzip", f"Content-Length: {len(BOMBS[0])}")
    await wire.send(BOMBS[0])
