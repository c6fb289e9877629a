"""Questions of an upstream server to the caller of a gateway: forms, pages, sampling and roots, in both directions.

| the upstream | the caller | what happens |
|---|---|---|
| sends a request | takes requests | the request goes to the caller on the stream of its call, the answer comes back |
| sends a request | calls again with answers | the upstream call is parked, the caller gets `input_required` |
| answers `input_required` | takes requests | each question is a request; then the upstream is called anew |
| answers `input_required` | calls again with answers | passed on; its state travels in our sealed one |
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from handrail.engine.call import Call
from handrail.engine.call_state import CallState
from handrail.engine.catalog import ToolEntry
from handrail.engine.inflight import state_purpose
from handrail.engine.input_requests import Answer, InputRequired, Relay
from handrail.errors import LocalProtocolError, Refused, RemoteProtocolError, ToolError
from handrail.model import ClientInfo, InputRequest, Json, Object, Principal
from handrail.revisions import Revision
from handrail.text.controls import secret_field

__all__ = [
    "PARKED",
    "UPSTREAM",
    "CapabilityKey",
    "Parked",
    "ParkedCalls",
    "ask_caller",
    "capabilities_of",
    "capability_key",
    "check_declared",
    "encode_questions",
    "form_losses",
    "to_model",
]

UPSTREAM = "io.handrail/upstream"  # among the sealed answers: the state of the upstream, and the keys it asked for
PARKED = "io.handrail/parked"  # among the sealed answers: the handle of a parked call
COLLECT_SECONDS = 0.05  # in which more questions join the first one
CANCEL_SECONDS = 0.5  # for the upstream call of a caller that has gone
PARKED_SECONDS = 600.0  # until a caller that never comes back is given up
MAX_PARKED, MAX_PARKED_OF_ONE = 1_000, 32
_UNKNOWN_METHOD, _BAD_PARAMS, _REJECTED = -32601, -32602, -1

CapabilityKey = tuple[bool, ...]
NO_CAPABILITIES: CapabilityKey = (False,) * 5
ALL_CAPABILITIES: CapabilityKey = (True,) * 5


def capability_key(revision: Revision, client: ClientInfo) -> CapabilityKey:
    """Return what a caller can be asked: forms, pages, sampling, sampling with tools, roots."""
    if not client.capabilities:
        return NO_CAPABILITIES
    methods, declares = revision.input_methods, client.declares
    elicits = "elicitation/create" in methods
    samples = "sampling/createMessage" in methods and declares("sampling")
    return (
        elicits and "elicitation" in client.capabilities and declares("elicitation.form"),
        elicits and revision.elicitation_modes and declares("elicitation.url"),
        samples,
        samples and declares("sampling.tools"),
        "roots/list" in methods and declares("roots"),
    )


def capabilities_of(key: CapabilityKey) -> Object:
    """Return the capabilities that are declared to an upstream for such callers."""
    form, url, samples, with_tools, roots = key
    modes: Object = ({"form": {}} if form else {}) | ({"url": {}} if url else {})
    out: Object = {"elicitation": modes} if modes else {}
    if samples:
        out["sampling"] = {"tools": {}} if with_tools else {}
    if roots:
        out["roots"] = {}
    return out


def to_model(method: str, params: Object, revision: Revision) -> InputRequest:
    """Return a question in the words of the newest revision; RemoteProtocolError refuses one that is none.

    `revision` is that of the upstream.
    """
    if method == "roots/list":
        return InputRequest(method, {})
    if method == "sampling/createMessage":
        messages = params.get("messages")
        if type(messages) is not list or not all(type(each) is dict and "content" in each for each in messages):
            raise RemoteProtocolError("sampling/createMessage without a list of messages", code=_BAD_PARAMS)
        return InputRequest(method, {name: value for name, value in params.items() if name != "_meta"})
    if method != "elicitation/create":
        raise RemoteProtocolError(f"Unknown method: {method[:100]}", code=_UNKNOWN_METHOD)
    mode, message = params.get("mode", "form"), params.get("message")
    if type(message) is not str or mode not in ("form", "url"):
        raise RemoteProtocolError("elicitation/create without a message, or of an unknown mode", code=_BAD_PARAMS)
    if mode == "url":
        if type(params.get("url")) is not str or not params["url"].startswith(("https://", "http://")):
            raise RemoteProtocolError("only https and http addresses are passed on", code=_BAD_PARAMS)
        identifier = params.get("elicitationId")
        own = identifier if type(identifier) is str else secrets.token_urlsafe(9)
        return InputRequest(method, {"mode": "url", "message": message, "url": params["url"], "elicitationId": own})
    schema = params.get("requestedSchema")
    fields = schema.get("properties") if type(schema) is dict else None
    if type(fields) is not dict or not all(type(each) is dict and _is_flat(each) for each in fields.values()):
        raise RemoteProtocolError("elicitation/create without a form of flat fields", code=_BAD_PARAMS)
    assert type(schema) is dict
    if field := secret_field(schema, message):
        # A form passes through the caller's model: no upstream may ask for a secret by one.
        raise RemoteProtocolError(f"{field[:60]!r} asks for a secret; use a page (mode url)", code=_BAD_PARAMS)
    properties = fields if revision.elicitation_modes else {name: _titled(each) for name, each in fields.items()}
    return InputRequest(
        method, {"mode": "form", "message": message, "requestedSchema": {**schema, "properties": properties}}
    )


def _is_flat(field: Object) -> bool:
    items = field.get("items")
    is_list = field.get("type") == "array" and type(items) is dict and bool({"enum", "anyOf", "oneOf"} & items.keys())
    return (
        is_list
        or field.get("type") in ("string", "number", "integer", "boolean")
        or bool({"enum", "oneOf"} & field.keys())
    )


def _titled(field: Object) -> Object:
    """Return a field with its titled choices as `oneOf`, in place of the `enumNames` before 2025-11-25."""
    names, values = field.get("enumNames"), field.get("enum")
    if type(names) is not list or type(values) is not list or len(names) != len(values):
        return field
    rest = {name: value for name, value in field.items() if name not in ("enum", "enumNames")}
    pairs = zip(values, names, strict=True)
    return {**rest, "oneOf": [{"const": value, "title": title} for value, title in pairs]}


def _capability(request: InputRequest) -> str:
    if request.method == "elicitation/create":
        return f"elicitation.{request.params['mode']}"
    if request.method == "roots/list":
        return "roots"
    return "sampling.tools" if "tools" in request.params else "sampling"


def check_declared(state: CallState, request: InputRequest) -> None:
    """Refuse a question of a kind that the caller has not declared to answer."""
    capability = _capability(request)
    if not state.accepts(request.method, capability):
        raise RemoteProtocolError(f"the client takes no questions of the kind {capability}", code=_BAD_PARAMS)


async def encode_questions(state: CallState, questions: Mapping[str, InputRequest]) -> dict[str, InputRequest]:
    """Return questions for a caller that calls again with the answers: sanitized, and in its own words."""
    call = Call(state)
    return {key: await call._input_request(Relay(_capability(each), each)) for key, each in questions.items()}


def form_losses(request: InputRequest) -> list[str]:
    """Return what a form loses in revisions before 2025-11-25: choices of several, and most defaults."""
    schema = request.params.get("requestedSchema", {})
    fields = [each for each in schema.get("properties", {}).values() if type(each) is dict]
    has_lists = any(each.get("type") == "array" for each in fields)
    has_defaults = any("default" in each and each.get("type") != "boolean" for each in fields)
    return ["LOSSY-28"] * has_lists + ["LOSSY-29"] * has_defaults


async def ask_caller(state: CallState, request: InputRequest, key: str | None = None) -> Object:
    """Send one question to a caller that takes requests, and return its answer."""
    try:
        answer = await Call(state)._ask_one(Relay(_capability(request), request), key)
    except (Refused, LocalProtocolError) as refused:  # not declared, or not reachable, or it has no such form
        raise RemoteProtocolError(str(refused), code=_BAD_PARAMS) from None
    except ToolError as refused:
        raise RemoteProtocolError(refused.text, code=_REJECTED) from None
    return {"action": answer.action} if isinstance(answer, Answer) else answer


class Parked:
    """An upstream call that waits while its caller is asked: the caller calls again with the answers.

    `work` makes the coroutine of the upstream request.
    """

    def __init__(
        self, owner: str, state: CallState, work: Callable[[Parked], Coroutine[Any, Any, Object]], revision: Revision
    ) -> None:
        self.owner = owner
        self.revision = revision  # of the upstream
        self.entry, self.principal = state.entry, state.principal
        self.purpose = ""  # the method, the name and the arguments it is for, once it has a handle
        self.state: CallState | None = state  # of the caller's request in flight, if there is one
        self.questions: dict[str, tuple[InputRequest, asyncio.Future[Object]]] = {}  # not answered yet, by key
        self.arrived = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        self.work = asyncio.get_running_loop().create_task(work(self))
        self.work.add_done_callback(lambda _: self.arrived.set())
        self._count = 0

    async def ask(self, request: InputRequest) -> Object:
        """Have a question answered by the caller's next request."""
        self._count += 1
        answer: asyncio.Future[Object] = asyncio.get_running_loop().create_future()
        key = f"q{self._count}"
        self.questions[key] = request, answer
        self.arrived.set()
        try:
            return await answer
        finally:
            self.questions.pop(key, None)


def _purpose(state: CallState) -> str:
    arguments = state.arguments if state.sent is None else state.sent
    return state_purpose(state.entry.method, state.name, arguments)


class ParkedCalls:
    """The parked calls of a gateway in this process. A handle alone is no right: owner and arguments must fit."""

    def __init__(self) -> None:
        self._by_handle: dict[str, Parked] = {}

    def __len__(self) -> int:
        return len(self._by_handle)

    def resume(self, owner: str, state: CallState) -> Parked | None:
        """Return the parked call that a retry names, with its answers delivered; None if it is a new call."""
        named = state.answers.get(PARKED)
        handle = named.get("handle") if type(named) is dict else None
        if handle is None:
            return None
        parked = self._by_handle.get(handle) if type(handle) is str else None
        if parked is None or parked.owner != owner or parked.purpose != _purpose(state) or parked.state is not None:
            raise ToolError("The interaction has expired, or went to another process of the gateway. Start again.")
        del self._by_handle[handle]
        if parked.timer is not None:
            parked.timer.cancel()
        parked.state = state
        for key in [each for each in parked.questions if each in state.answers]:
            request, answer = parked.questions[key]
            value = state.answers[key]
            if not answer.done() and _is_answer(request, value):
                del parked.questions[key]
                state.answered = {**state.answered, key: value}
                answer.set_result(value)
        return parked

    async def run(self, parked: Parked) -> Object:
        """Return the upstream's result, or end this request of the caller with the questions that came."""
        state = parked.state
        assert state is not None
        try:
            while True:
                if parked.questions:
                    if any(name not in state.answers for name in parked.questions):
                        await asyncio.wait({parked.work}, timeout=COLLECT_SECONDS)
                    if not parked.work.done():
                        await self._end_round(parked, state)
                if parked.work.done():
                    return await parked.work
                parked.arrived.clear()
                await parked.arrived.wait()
        except asyncio.CancelledError:  # the caller gave up this request
            parked.work.cancel()
            await asyncio.wait({parked.work}, timeout=CANCEL_SECONDS)
            raise
        finally:
            parked.state = None

    async def _end_round(self, parked: Parked, state: CallState) -> None:
        of_owner = sum(each.owner == parked.owner for each in self._by_handle.values())
        if len(self._by_handle) >= MAX_PARKED or of_owner >= MAX_PARKED_OF_ONE:
            parked.work.cancel()
            raise ToolError("Too many calls wait for answers of their callers; finish one of them first.")
        handle = secrets.token_urlsafe(24)
        self._by_handle[handle] = parked
        parked.purpose = _purpose(state)
        loop = asyncio.get_running_loop()
        parked.timer = loop.call_later(PARKED_SECONDS, self._expire, handle)
        state.answered = {**state.answered, PARKED: {"handle": handle}}
        questions = {key: request for key, (request, _) in parked.questions.items()}
        raise InputRequired(await encode_questions(state, questions))

    def _expire(self, handle: str) -> None:
        parked = self._by_handle.pop(handle, None)
        if parked is not None:
            parked.work.cancel()

    def cancel_stopped(self, is_stopped: Callable[[ToolEntry, Principal], object]) -> None:
        """Cancel the parked calls of what an operator has stopped."""
        for handle, parked in list(self._by_handle.items()):
            if is_stopped(parked.entry, parked.principal):
                self._expire(handle)

    def close(self) -> None:
        for handle, parked in list(self._by_handle.items()):
            if parked.timer is not None:
                parked.timer.cancel()
            self._expire(handle)


def _is_answer(request: InputRequest, value: Json) -> bool:
    """Return whether a value can be the answer to a question at all; the upstream checks the rest."""
    if type(value) is not dict:
        return False
    if request.method == "elicitation/create":
        return value.get("action") in ("accept", "decline", "cancel")
    return "roots" in value if request.method == "roots/list" else "content" in value
