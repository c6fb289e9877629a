"""A scripted server with resources, templates and prompts; over stdio `resource_rig.py REVISION LOG`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import rigs
from rigs import MODERN, HttpRig, Object, Rig, ordinary

META = "io.modelcontextprotocol/"
PICTURE = "iVBORw0KGgo="
LISTS = {
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "prompts/list": "prompts",
}
ENTRIES: dict[str, list[Object]] = {
    "resources/list": [
        {"uri": "doc://text", "name": "text", "title": "A text", "mimeType": "text/plain", "size": 5},
        {"uri": "doc://binary", "name": "binary", "annotations": {"priority": 0.5}},
        {"uri": "doc://several", "name": "several", "description": "More than one."},
        {"uri": "doc://asks", "name": "asks"},
        {"uri": "doc://visit", "name": "visit"},
    ],
    "resources/templates/list": [
        {"uriTemplate": "note://{name}/{page}", "name": "note", "mimeType": "text/markdown"},
        {"uriTemplate": "odd://{name:3}", "name": "odd"},
        {"uriTemplate": "log://{day}", "name": "log"},
    ],
    "prompts/list": [
        {"name": "review", "arguments": [{"name": "code", "required": True}, {"name": "style", "title": "Style"}, 7]},
        {"name": "kinds", "title": "All kinds"},
        {"name": "asks"},
    ],
}
CONTENTS: dict[str, list[Object]] = {
    "doc://text": [{"uri": "doc://text", "mimeType": "text/plain", "text": "hello ü", "_meta": {"a": 1}}],
    "doc://binary": [{"uri": "doc://binary", "mimeType": "image/png", "blob": PICTURE}],
    "doc://several": [
        {"uri": "doc://one", "text": "one"},
        {"uri": "doc://two", "blob": "AAE="},
        {"uri": "x", "text": ""},
    ],
    "note://a/1": [{"uri": "note://a/1", "text": "page 1"}],
}
NOTE = {"uri": "note://1", "mimeType": "text/plain", "text": "hello"}
KINDS: list[Object] = [
    {"type": "text", "text": "hello", "annotations": {"priority": 0.5}},
    {"type": "text", "text": ""},
    {"type": "image", "data": PICTURE, "mimeType": "image/png"},
    {"type": "audio", "data": PICTURE, "mimeType": "audio/wav"},
    {"type": "resource", "resource": NOTE},
    {"type": "resource_link", "uri": "note://2", "name": "second"},
    {"type": "hologram", "beams": 3},
]
FORM = {"mode": "form", "message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {}}}}


def capabilities(revision: str) -> Object:
    offers: Object = {
        "tools": {},
        "resources": {"subscribe": True, "listChanged": True},
        "prompts": {"listChanged": True},
    }
    return offers if revision in ("2024-10-07", "2024-11-05") else {**offers, "completions": {}}


def shelf(rig: Rig, message: Object) -> None:
    """Lists two entries a page, for an hour; a call announces, or sets as answers, what its arguments say."""
    rig.state.setdefault("capabilities", capabilities(rig.revision))
    rig.state.setdefault("ttl", 3_600_000)
    method, params = message.get("method"), message.get("params", {})
    done: Object = {"resultType": "complete"} if rig.revision == MODERN else {}
    if method in rig.state.get("hangs", ()):
        return
    if override := rig.state.get("answers", {}).get(method):  # of a test
        rig.result(message, {**done, **override})
    elif method in LISTS:
        cached: Object = {"ttlMs": rig.state["ttl"], "cacheScope": "public"} if done else {}
        start, entries = int(params.get("cursor") or 0), rig.state.get(method, ENTRIES[method])
        more = str(start + 2) if start + 2 < len(entries) else "" if rig.revision == "pocket" else None
        page = {LISTS[method]: entries[start : start + 2], **({} if more is None else {"nextCursor": more})}
        rig.result(message, {**done, **cached, **page})
    elif method == "resources/read":
        read(rig, message, done)
    elif method == "prompts/get":
        get(rig, message, done)
    elif method == "completion/complete":
        values = [params["argument"]["value"] + "1", json.dumps(params, sort_keys=True)]
        rig.result(message, {**done, "completion": {"values": values, "total": 250, "hasMore": True}})
    elif method in ("resources/subscribe", "resources/unsubscribe"):
        rig.result(message, {})
    elif method == "subscriptions/listen":
        listen(rig, message)
    elif method == "tools/call":
        announce(rig, **params["arguments"])
        ordinary(rig, message)
    else:
        ordinary(rig, message)


def read(rig: Rig, message: Object, done: Object) -> None:
    params = message["params"]
    uri = params["uri"]
    if uri == "doc://asks" and done and "inputResponses" not in params:
        asks(rig, message)
    elif uri == "doc://visit" and not rig.state.get("visited"):
        rig.state["visited"] = True
        page = {"mode": "url", "elicitationId": "e-1", "url": "https://example.org/connect", "message": "Link it first"}
        rig.error(message, -32042, "Sign-in needed", data={"elicitations": [page]})
    elif uri in ("doc://asks", "doc://visit"):
        rig.result(message, {**done, "contents": [{"uri": uri, "text": json.dumps(params.get("inputResponses"))}]})
    elif uri in CONTENTS:
        rig.result(message, {**done, "contents": CONTENTS[uri]})
    else:
        code = -32602 if done else -32002
        rig.error(message, code, "Resource not found", data={"uri": uri})


def get(rig: Rig, message: Object, done: Object) -> None:
    params = message["params"]
    if params["name"] == "asks" and done and "inputResponses" not in params:
        asks(rig, message)
    elif params["name"] == "kinds":
        messages = [{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(KINDS)]
        rig.result(message, {**done, "description": "All there are", "messages": messages})
    elif params["name"] in ("review", "asks"):
        text = json.dumps(params.get("inputResponses", params["arguments"]), sort_keys=True)
        rig.result(message, {**done, "messages": [{"role": "user", "content": {"type": "text", "text": text}}]})
    else:
        rig.error(message, -32602, f"Unknown prompt: {params['name']}")


def asks(rig: Rig, message: Object) -> None:
    question = {"method": "elicitation/create", "params": FORM}
    rig.result(message, {"resultType": "input_required", "inputRequests": {"who": question}, "requestState": "s"})


def listen(rig: Rig, message: Object) -> None:
    asked = message["params"]["notifications"]
    honoured = {name: value for name, value in asked.items() if name not in rig.state.get("unhonoured", ())}
    rig.state.setdefault("listening", {})[message["id"]] = honoured
    meta = {META + "subscriptionId": message["id"]}
    rig.notify("notifications/subscriptions/acknowledged", notifications=honoured, _meta=meta)


def announce(
    rig: Rig, updated: tuple[str, ...] = (), changed: tuple[str, ...] = (), answers: Object | None = None
) -> None:
    rig.state["answers"] = rig.state.get("answers", {}) if answers is None else answers
    modern = rig.revision == MODERN
    for uri in updated:
        if not modern:
            rig.notify("notifications/resources/updated", uri=uri)
        for ident, honoured in rig.state.get("listening", {}).items():
            if any(uri.startswith(each) for each in honoured.get("resourceSubscriptions", ())):
                rig.notify("notifications/resources/updated", uri=uri, _meta={META + "subscriptionId": ident})
    for each in changed:
        if not modern:
            rig.notify(f"notifications/{each}/list_changed")
        for ident, honoured in rig.state.get("listening", {}).items():
            if f"{each}ListChanged" in honoured:
                rig.notify(f"notifications/{each}/list_changed", _meta={META + "subscriptionId": ident})


class ShelfRig(Rig):
    """The shelf in memory; `refusals` are counted down by connections that fail."""

    refusals = 0

    def connect(self) -> Rig:
        from handrail.errors import TransportError

        if self.refusals:
            self.refusals -= 1
            raise TransportError("refused")
        return super().connect()


class HttpShelf(HttpRig):
    """The shelf over HTTP, with a notification stream; with `has_stream` False, without one."""

    def __init__(self, revision: str) -> None:
        super().__init__(shelf, revision)
        self.has_stream = True
        self._cut = asyncio.Event()

    def cut_stream(self) -> None:
        self._cut.set()
        self._cut = asyncio.Event()

    async def other(self, verb: str, writer: asyncio.StreamWriter) -> bool:
        if self.headers[-1].get("mcp-session-id") in self.ended:
            writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
            return True
        if verb != "GET" or not self.has_stream:
            return await super().other(verb, writer)
        writer.write(b"HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\nretry: 1\n\n")
        await self._cut.wait()
        return False


def command(revision: str, log: Path) -> list[str]:
    """How to start it as a process."""
    return [sys.executable, __file__, revision, str(log)]


if __name__ == "__main__":
    rigs.SCRIPTS["shelf"] = shelf
    rigs.main("shelf", *sys.argv[1:3])
