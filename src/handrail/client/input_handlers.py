"""Handlers of input requests, which a server sends in the middle of a call: elicitation, sampling, roots."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from handrail.errors import RemoteProtocolError, SchemaError
from handrail.model import SERVER_ASKS, Json, Object
from handrail.revisions import Revision
from handrail.schema.compile import compile_schema
from handrail.suggest import collection
from handrail.text.controls import one_line, secret_field

log = logging.getLogger("handrail")

_PAGE = re.compile(r"https?://[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")
_BAD_PARAMS, _UNKNOWN_METHOD, _REJECTED = -32602, -32601, -1


class Elicitation(Struct, frozen=True):
    """A server asks the user to fill in a form (`schema`), or to visit a page (`url`).

    Show the name of the server and the whole request, and let the user decline. Return the form's content, True for a
    page that was opened, None to decline, or "cancel".
    """

    server: str
    message: str
    schema: Object = {}
    url: str = ""

    @property
    def warning(self) -> str:
        """Why not to answer: a server must not ask for a password or another secret by a form. Else empty."""
        field = secret_field(self.schema, self.message)
        return f"{field!r} asks for a secret; servers must not ask for one by a form" if field else ""

    @property
    def defaults(self) -> Object:
        """The default values of the form."""
        fields = self.schema.get("properties")
        properties = fields.items() if type(fields) is dict else ()
        return {name: field["default"] for name, field in properties if type(field) is dict and "default" in field}


class Sampling(Struct, frozen=True):
    """A server asks for a model's response; `params` is unchanged. Return a text, a whole result, or None to refuse."""

    server: str
    params: Object


class InputHandlers:
    """The input handlers of a client, and the capabilities that it declares for them.

    A handler runs with the context variables of the call that asks, so that a gateway can route it to its own caller.
    Over stdio that is unknown while several calls are pending; then the handler has none.
    """

    def __init__(
        self,
        elicit: Callable[[Elicitation], Any] | None,
        elicit_url: Callable[[Elicitation], Any] | None,
        sample: Callable[[Sampling], Any] | None,
        roots: Iterable[str | Path] | Callable[[], Any] | None,
        server_asks: bool = False,
    ) -> None:
        self._elicit = {"form": elicit, "url": elicit_url}
        self._sample = sample
        self._roots = roots if roots is None or callable(roots) else collection("Client: roots", roots, "folders")
        modes: Object = {mode: {} for mode, handler in self._elicit.items() if handler is not None}
        self.capabilities: Object = {"elicitation": modes} if modes else {}
        if server_asks:
            self.capabilities["experimental"] = {SERVER_ASKS: {}}
        if sample is not None:
            self.capabilities["sampling"] = {}
        if roots is not None:
            self.capabilities["roots"] = {}

    async def respond(self, server: str, method: str, params: Object, revision: Revision) -> Object:
        """Return the result for an input request; RemoteProtocolError becomes the error response."""
        if method == "elicitation/create" and "elicitation" in self.capabilities:
            return await self._handle_elicitation(server, params, revision)
        if method == "sampling/createMessage" and self._sample is not None:
            return _sampling_result(await call_handler(self._sample, Sampling(server, params)))
        if method == "roots/list" and self._roots is not None:
            roots = await call_handler(self._roots) if callable(self._roots) else self._roots
            return {"roots": [_root(each) for each in roots]}
        raise RemoteProtocolError(f"No handler for {method[:100]}", code=_UNKNOWN_METHOD)

    async def _handle_elicitation(self, server: str, params: Object, revision: Revision) -> Object:
        mode, message = params.get("mode", "form"), params.get("message")
        handler = self._elicit.get(mode) if type(mode) is str else None
        modes = revision.declare(self.capabilities).get("elicitation")
        if handler is None or type(message) is not str or modes is None or (mode == "url" and "url" not in modes):
            raise RemoteProtocolError(f"Elicitation by {str(mode)[:60]!r} was not declared", code=_BAD_PARAMS)
        if mode == "url":
            url: Json = params.get("url")
            if type(url) is not str or not _is_page(url):
                raise RemoteProtocolError("Only plain https and http addresses are allowed", code=_BAD_PARAMS)
            return _elicit_result(await call_handler(handler, Elicitation(server, message, url=url)))
        schema: Json = params.get("requestedSchema")
        try:
            check = compile_schema(schema, "requestedSchema")
        except SchemaError as unusable:
            raise RemoteProtocolError(str(unusable), code=_BAD_PARAMS) from None
        elicitation = Elicitation(server, message, schema)
        if elicitation.warning:
            log.warning("server %s: elicitation: %s", one_line(server), one_line(elicitation.warning, 200))
        response = _elicit_result(await call_handler(handler, elicitation))
        if response["action"] == "accept":
            response["content"] = {**elicitation.defaults, **response.get("content", {})}
            problems = check.problems(response["content"])
            if problems:
                raise SchemaError("the answer to a form: " + "; ".join(each.text for each in problems))
        return response


def _is_page(url: str) -> bool:
    """Return whether all URL parsers agree on the address: no backslashes, no user before the host."""
    try:
        parts = urlsplit(url)
        return bool(_PAGE.fullmatch(url) and parts.hostname and parts.port != 0) and "@" not in parts.netloc
    except ValueError:
        return False


def _elicit_result(reply: Any) -> Object:
    if reply is None or reply is False or reply == "decline":
        return {"action": "decline"}
    if reply == "cancel":
        return {"action": "cancel"}
    if reply is True:
        return {"action": "accept"}
    if isinstance(reply, dict):
        return {"action": "accept", "content": reply}
    raise TypeError(f"an elicitation handler gave {type(reply).__name__}, not a dict, True, None or 'cancel'")


def _sampling_result(reply: Any) -> Object:
    if reply is None or reply is False:
        raise RemoteProtocolError("User rejected sampling request", code=_REJECTED)
    if isinstance(reply, str):
        return {"role": "assistant", "content": {"type": "text", "text": reply}, "model": "unknown"}
    if isinstance(reply, dict):
        return reply
    raise TypeError(f"a sampling handler gave {type(reply).__name__}, not a text, a dict or None")


def _root(root: Any) -> Object:
    if isinstance(root, dict):
        return root
    if isinstance(root, str) and "://" in root:
        return {"uri": root}
    path = Path(root).absolute()
    return {"uri": path.as_uri(), "name": path.name}


async def call_handler(handler: Callable[..., Any], *args: Any) -> Any:
    """Call a handler, which is a function or a coroutine function, and return its result."""
    result = handler(*args)
    return await result if inspect.isawaitable(result) else result
