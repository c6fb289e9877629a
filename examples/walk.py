"""A walk through everyday.py, and through a gateway: a client of raw JSON lines against the real processes.

    python examples/walk.py

Each step says what it expects. The exit code is 0 only if every answer was as expected.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Json = Any
Object = dict[str, Any]

WIDTH = 100
GIVE_UP_SECONDS = 20.0
HANDSHAKE = ["2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "pocket"]
STATELESS = "2026-07-28"
ME = {"name": "demo", "version": "1"}
ABILITIES: Object = {"elicitation": {}}
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": STATELESS,
    "io.modelcontextprotocol/clientInfo": ME,
    "io.modelcontextprotocol/clientCapabilities": ABILITIES,
}
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class Client:
    """One JSON message a line, to a process and back."""

    def __init__(self, *words: str, folder: str | None = None) -> None:
        command, more = [sys.executable, *words], {} if folder is None else {"XDG_STATE_HOME": folder}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            cwd=folder,
            env={**os.environ, **more},
        )
        self.answer: Callable[[str, Object], Object] = lambda method, params: {"action": "cancel"}
        self.notice: Callable[[Object], None] = lambda message: None
        self._last = 0
        # A server that hangs must not hang the walk: reading ends when the process does.
        self._watchdog = threading.Timer(GIVE_UP_SECONDS, self.process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def initialize(self, revision: str) -> Object:
        welcome = self.request("initialize", {"protocolVersion": revision, "capabilities": ABILITIES, "clientInfo": ME})
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return welcome

    def call(self, name: str, arguments: Object, **more: Json) -> Object:
        return self.request("tools/call", {"name": name, "arguments": arguments, **more})

    def request(self, method: str, params: Object) -> Object:
        """Send a request; give back the whole answer, replying to the server's questions on the way."""
        self._last += 1
        self._send({"jsonrpc": "2.0", "id": self._last, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message and "id" in message:
                result = self.answer(message["method"], message["params"])
                self._send({"jsonrpc": "2.0", "id": message["id"], "result": result})
            elif "method" in message:
                self.notice(message)
            elif message["id"] == self._last:
                return message

    def close(self) -> int:
        """End the server as a client does, by closing its input; its exit code."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):  # it has gone already
            self.process.stdin.close()
        code = self.process.wait()
        self.process.stdout.close()
        self._watchdog.cancel()
        return code

    def _send(self, message: Object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _receive(self) -> Object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError("the server has gone")
        message: Object = json.loads(line)
        return message


class Walk:
    """What is printed, and how many answers were not as expected."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.right = self.wrong = 0

    def title(self, text: str) -> None:
        print("\n" + colour("1", f"== {text} " + "=" * (WIDTH - 4 - len(text))))

    def says(self, sign: str, text: str, code: str = "0") -> None:
        lines = wrapped(text, WIDTH - 6, 3)
        for number, line in enumerate(lines):
            print(colour(code, f"  {sign if number == 0 else '  '}  {line}"))

    def check(self, what: str, ok: bool) -> None:
        self.right += ok
        self.wrong += not ok
        self.says("ok" if ok else "NO", what, "32" if ok else "31;1")

    def call(self, name: str, arguments: Object, **more: Json) -> Object:
        """Call a tool and show both ways; gives the result, or the error as a result."""
        self.says("->", f"{name} {compact(arguments)}", "36")
        message = self.client.call(name, arguments, **more)
        result: Object = message.get("result", message)
        self.says("<-", shown(result))
        return result

    def step(self, part: Callable[[Walk], None]) -> None:
        """One part of the walk; an answer of a quite different shape counts as one that was not expected."""
        try:
            part(self)
        except (AttributeError, LookupError, TypeError, ValueError) as problem:
            self.check(f"an answer that can be read ({problem!r})", False)


def listing(walk: Walk) -> None:
    walk.title("list")
    welcome = walk.client.initialize("2025-11-25")["result"]
    walk.says("<-", f"{compact(welcome['serverInfo'])} speaks {welcome['protocolVersion']}: {welcome['instructions']}")
    tools = walk.client.request("tools/list", {})["result"]["tools"]
    for tool in tools:
        mark = "destructive" if tool["annotations"].get("destructiveHint") else "read-only"
        about = textwrap.shorten(tool["description"], 56, placeholder=" …")
        print(f"      {tool['name']:23}{mark:13}{about}")
    walk.check(
        "twelve tools, cancel_order alone is marked destructive",
        (
            len(tools) == 12
            and [tool["name"] for tool in tools if tool["annotations"].get("destructiveHint")] == ["cancel_order"]
        ),
    )


def calls(walk: Walk) -> None:
    walk.title("call")
    weather = walk.call("get_weather", {"location": "Paris", "units": "imperial"})["structuredContent"]
    walk.check(
        "structured, and it says where it comes from", weather["unit"] == "°F" and "example" in weather["source"]
    )
    found = walk.call("query_database", {"query": "SELECT name, price FROM products", "database": "products"})
    walk.check("rows from a SQLite file", ["kettle", 24.5] in found["structuredContent"]["rows"])
    now = walk.call("get_current_time", {})
    walk.check("UTC", now["content"][0]["text"].endswith("+00:00"))
    sums = [
        walk.call(name, {"a": 2, "b": 3})["structuredContent"] for name in ("calculate_sum", "calculate_sum_draft07")
    ]
    walk.check("the same in both dialects of JSON Schema", sums == [{"result": 5}, {"result": 5}])


def media(walk: Walk) -> None:
    walk.title("pictures, sounds, documents")
    [image] = walk.call("draw_chart", {"values": [3, 1, 4, 1, 5, 9, 2, 6]})["content"]
    walk.check("a PNG", image["mimeType"] == "image/png" and data(image).startswith(b"\x89PNG\r\n"))
    [audio] = walk.call("play_tone", {"frequency": 440, "seconds": 0.25})["content"]
    walk.check("a WAV of a quarter second", audio["mimeType"] == "audio/wav" and len(data(audio)) == 44 + 4000)
    [link] = walk.call("find_document", {"word": "lamps"})["content"]
    [document] = walk.call("read_document", {"name": link["name"]})["content"]
    walk.check("the link leads to the document", link["uri"] == document["resource"]["uri"])


def errors(walk: Walk) -> None:
    walk.title("error")
    bad = walk.call("get_weather", {"location": "Paris", "unit": "kelvin"})
    walk.check("a misspelt argument: the model reads what would be right", bad["isError"] and "units" in text(bad))
    unknown = walk.call("get_weather", {"location": "Atlantis"})
    walk.check("an unknown city: the known ones are named", unknown["isError"] and "Paris" in text(unknown))
    drop = walk.call("query_database", {"query": "DROP TABLE users"})
    walk.check("the database can only be read", drop["isError"] and "SELECT" in text(drop))


def progress(walk: Walk) -> None:
    walk.title("progress")
    steps: list[float] = []

    def notice(message: Object) -> None:
        params = message["params"]
        steps.append(params["progress"])
        print(f"      [{'#' * round(params['progress'] / params['total'] * 40):40}] {params['message']}")

    walk.client.notice = notice
    walk.call("slow_count", {"steps": 4}, _meta={"progressToken": "count"})
    walk.check("four notices, each further than the one before", steps == [1, 2, 3, 4])


def questions(walk: Walk) -> None:
    walk.title("ask")
    replies: list[Object] = []

    def answer(method: str, params: Object) -> Object:
        fields = ", ".join(params["requestedSchema"]["properties"])
        walk.says("??", f"{params['message']} ({fields})", "33")
        walk.says("!!", compact(replies[0]), "33")
        return replies.pop(0)

    walk.client.answer = answer
    replies.append({"action": "accept", "content": {"name": "Ada", "language": "French"}})
    walk.check("greeted by name", text(walk.call("greet", {})) == "Bonjour, Ada.")
    replies.append({"action": "decline"})
    walk.check("a no is a no", "was not approved" in text(walk.call("cancel_order", {"order_id": 1})))
    replies.append({"action": "accept", "content": {"remember": "for an hour"}})
    walk.check("a yes is a yes", text(walk.call("cancel_order", {"order_id": 1})) == "Order 1 is cancelled.")
    again = text(walk.call("cancel_order", {"order_id": 1}))
    walk.check("the yes is remembered for an hour: nobody is asked", "already" in again)


def revisions(walk: Walk) -> None:
    walk.title("one call, every revision, one process")
    good, bad = {"a": 2, "b": 3}, {"a": "two", "b": 3}
    walk.says("->", f"calculate_sum {compact(good)}    and then    {compact(bad)}", "36")
    answers: list[tuple[str, Object, Object]] = []
    for revision in HANDSHAKE:
        walk.client.initialize(revision)
        answers.append((revision, walk.client.call("calculate_sum", good), walk.client.call("calculate_sum", bad)))
    both = [walk.client.call("calculate_sum", each, _meta=ENVELOPE) for each in (good, bad)]
    answers.append((STATELESS, both[0], both[1]))
    for revision, right, wrong in answers:
        for label, message, most in ((revision, right, 4), ("", wrong, 1)):
            kind = "result" if "result" in message else "error"
            for number, line in enumerate(wrapped(compact(message[kind]), WIDTH - 26, most)):
                print(f"      {label if number == 0 else '':12}{kind if number == 0 else '':8}{line}")
    results = {revision: message["result"] for revision, message, _ in answers}
    mistakes = {revision: message for revision, _, message in answers}
    walk.check("2024-10-07: a bare toolResult", results["2024-10-07"] == {"toolResult": 5})
    walk.check(
        "2024-11-05 and 2025-03-26: text, nothing newer",
        all(
            results[each] == {"content": [{"type": "text", "text": "5"}], "isError": False}
            for each in ("2024-11-05", "2025-03-26")
        ),
    )
    walk.check(
        "2025-06-18, 2025-11-25 and pocket: structured too, as an object",
        all(results[each]["structuredContent"] == {"result": 5} for each in ("2025-06-18", "2025-11-25", "pocket")),
    )
    walk.check(
        "2026-07-28: no handshake, the result says its type, and a number may be structured",
        results[STATELESS]["resultType"] == "complete" and results[STATELESS]["structuredContent"] == 5,
    )
    told = {"2025-11-25", STATELESS}
    walk.check(
        "bad arguments: an error up to 2025-06-18 and in pocket, later a result the model can read",
        all(
            mistakes[each]["result"]["isError"] if each in told else mistakes[each]["error"]["code"] == -32602
            for each in mistakes
        ),
    )


def retry(walk: Walk) -> None:
    walk.title("the same question without a session (2026-07-28)")
    first = walk.call("greet", {}, _meta=ENVELOPE)
    replies = {key: {"action": "accept", "content": {"name": "Grace"}} for key in first["inputRequests"]}
    walk.says("!!", compact(replies), "33")
    again: Object = {"_meta": ENVELOPE, "inputResponses": replies, "requestState": first["requestState"]}
    walk.check("asked by answer, answered by calling again", text(walk.call("greet", {}, **again)) == "Hello, Grace.")


# The same server and two others, behind one gateway


UPSTREAMS = {"everyday": "everyday.py", "notes": "notes.py", "stock": "stock.py"}


def upstreams(**urls: str) -> list[str]:
    """Words of `handrail gateway`: the servers behind it, of which some are reached by a URL."""
    folder = Path(__file__).resolve().parent
    commands = {name: shlex.join([sys.executable, str(folder / file)]) for name, file in UPSTREAMS.items()}
    return [f"--server={name}={server}" for name, server in (commands | urls).items()]


def look(walk: Walk, folder: str) -> None:
    walk.title("gateway: three servers in one, one of them of 2024")
    walk.client.initialize("2025-11-25")
    tools = [tool["name"] for tool in walk.client.request("tools/list", {})["result"]["tools"]]
    walk.says("<-", ", ".join(tools))
    ours = [tool for tool in tools if tool.partition("_")[0] in UPSTREAMS]
    walk.check("seventeen tools, each with the name of its server", len(tools) == len(ours) == 17)

    asked: list[str] = []
    replies: list[Object] = []

    def answer(method: str, params: Object) -> Object:
        asked.append(params["message"])
        reply: Object = replies.pop(0) if replies else {"action": "decline"}
        walk.says("??", params["message"], "33")
        walk.says("!!", compact(reply), "33")
        return reply

    walk.client.answer = answer
    refused = walk.call("stock_find_article", {"article": "lamp"})
    walk.check("no person has looked at its tools: the call asks", "handrail trust stock" in asked[0])
    walk.check("a no is a no", refused["isError"] and len(asked) == 1)

    words = ["trust", *UPSTREAMS, "--accept"]
    walk.says("$ ", f"handrail {' '.join(words)}", "36")
    done = subprocess.run(
        [sys.executable, "-m", "handrail", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": folder},
        check=False,
    )
    for line in done.stdout.splitlines():
        print(f"      {textwrap.shorten(line, WIDTH - 6, placeholder=' …') if line[:1].strip() else line[: WIDTH - 6]}")
    time.sleep(1.0)  # a running gateway hears of it within half a second
    found = walk.call("stock_find_article", {"article": "lamp"})
    walk.check("accepted as one that reads: nobody is asked", "lamp" in text(found) and len(asked) == 1)
    replies.append({"action": "accept", "content": {}})
    removed = walk.call("stock_remove_article", {"article": "kettle"})
    walk.check("accepted as one that destroys: it asks", "no longer" in text(removed) and len(asked) == 2)


def legs(walk: Walk) -> None:
    walk.title("gateway: every revision in front, two others behind")
    walk.says("->", "notes_search_notes (it speaks 2026-07-28) and stock_find_article (2024-11-05)", "36")
    notes: dict[str, Object] = {}
    stock: dict[str, Object] = {}
    for revision in [*HANDSHAKE, STATELESS]:
        more: Object = {"_meta": ENVELOPE} if revision == STATELESS else {}
        if not more:
            walk.client.initialize(revision)
        notes[revision] = walk.client.call("notes_search_notes", {"word": "three"}, **more)["result"]
        stock[revision] = walk.client.call("stock_find_article", {"article": "lamp"}, **more)["result"]
        print(f"      {revision:12}{textwrap.shorten(compact(notes[revision]), WIDTH - 18, placeholder=' …')}")
        print(f"      {'':12}{textwrap.shorten(compact(stock[revision]), WIDTH - 18, placeholder=' …')}")
    walk.check(
        "a list stays a list where the caller can take one, else it is an object or a text",
        notes[STATELESS]["structuredContent"] == ["lamps"]
        and notes["2025-11-25"]["structuredContent"] == {"result": ["lamps"]}
        and [text(notes[each]) for each in ("2024-11-05", "2025-03-26")] == ['["lamps"]'] * 2,
    )
    walk.check(
        "what the old server wrote as a text is that text for everybody",
        len({text(result) for revision, result in stock.items() if revision != "2024-10-07"}) == 1,
    )


def through(walk: Walk) -> None:
    walk.title("gateway: progress and questions of the servers behind it")
    walk.client.initialize("2025-11-25")
    tokens: list[Json] = []
    walk.client.notice = lambda message: tokens.append(message["params"].get("progressToken"))
    walk.call("everyday_slow_count", {"steps": 3}, _meta={"progressToken": "count"})
    walk.check("progress comes under the caller's own token", tokens == ["count"] * 3)
    walk.client.answer = lambda method, params: {"action": "accept", "content": {"name": "Ada", "language": "French"}}
    walk.check("its question reaches the caller", text(walk.call("everyday_greet", {})) == "Bonjour, Ada.")
    first = walk.call("everyday_greet", {}, _meta=ENVELOPE)
    answers = {key: {"action": "accept", "content": {"name": "Grace"}} for key in first["inputRequests"]}
    again: Object = {"_meta": ENVELOPE, "inputResponses": answers, "requestState": first["requestState"]}
    walk.check("and one that calls again", text(walk.call("everyday_greet", {}, **again)) == "Hello, Grace.")


def compact(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


def wrapped(text: str, width: int, most: int) -> list[str]:
    return textwrap.wrap(text, width, max_lines=most, placeholder=" …", break_on_hyphens=False) or [""]


def text(result: Object) -> str:
    return "\n".join(block["text"] for block in result["content"] if block["type"] == "text")


def data(block: Object) -> bytes:
    return base64.b64decode(block["data"], validate=True)


def shown(result: Object) -> str:
    """A result for people: the texts as they are, of the rest what it is and how large."""
    if "content" not in result:
        return compact(result)
    parts = []
    for block in result["content"]:
        match block["type"]:
            case "text":
                parts.append(block["text"])
            case "image" | "audio":
                parts.append(f"[{block['mimeType']}, {len(data(block)):,} bytes]")
            case "resource_link":
                parts.append(f"[link to {block['uri']}]")
            case "resource":
                parts.append(f"[{block['resource']['uri']}] {block['resource']['text']}")
    return ("error: " if result.get("isError") else "") + " ".join(parts)


def colour(code: str, line: str) -> str:
    return f"\x1b[{code}m{line}\x1b[0m" if COLOURS and code != "0" else line


def main(server: str) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    print(f"Handrail: {Path(server).name} over stdio, one JSON message a line.")
    walk = Walk(Client(server))
    follow(walk, [listing, calls, media, errors, progress, questions, revisions, retry])
    if not walk.wrong:
        with TemporaryDirectory(prefix="handrail-walk-", ignore_cleanup_errors=True) as folder:
            walk.client = Client("-m", "handrail", "gateway", *upstreams(), folder=folder)
            follow(walk, [partial(look, folder=folder), legs, through])
    print(f"\n{walk.right} of {walk.right + walk.wrong} answers as expected.")
    return 1 if walk.wrong else 0


def follow(walk: Walk, parts: list[Callable[[Walk], None]]) -> None:
    """Some parts of the walk, with one process to its end."""
    try:
        for part in parts:
            walk.step(part)
    except (EOFError, OSError) as problem:
        walk.check(f"the server stays ({problem})", False)
    walk.title("end")
    walk.check("the server leaves when its input ends, with code 0", walk.client.close() == 0)


if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    sys.exit(main(named[0] if named else str(Path(__file__).with_name("everyday.py"))))
