"""Questions that a tool can ask the client during a call, and their answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from msgspec import Struct

from handrail.errors import LocalProtocolError, Refused, ToolError
from handrail.model import InputRequest, Json, Object
from handrail.schema.compile import compile_schema
from handrail.schema.derive import form_for
from handrail.suggest import describe_value
from handrail.text.controls import secret_field

Action = Literal["accept", "decline", "cancel"]
_PRIMITIVES = ("string", "number", "integer", "boolean")


class Answer(Struct, frozen=True):
    """A person's answer: `action` is accept, decline or cancel; `content` comes only with accept."""

    action: Action
    content: Any = None


class InputRequired(BaseException):
    """Ends a try of a call: the client is to answer these questions and to call again.

    Not an `Exception`, so that a tool's own `except Exception` does not swallow it.
    """

    def __init__(self, requests: dict[str, InputRequest]) -> None:
        super().__init__(f"input needed: {', '.join(requests)}")
        self.requests = requests


class RetryLater(InputRequired):
    """Ends a try of a call without a question: the client is to call again."""

    def __init__(self) -> None:
        super().__init__({})


def questions_in(problem: BaseException) -> dict[str, InputRequest] | None:
    """Return the questions that ended a try, also those of a task group; None if another error ended the call."""
    if isinstance(problem, InputRequired):
        return problem.requests
    inner = problem.exceptions if isinstance(problem, BaseExceptionGroup) else ()
    groups = [requests for each in inner if (requests := questions_in(each)) is not None]
    return {key: request for requests in groups for key, request in requests.items()} if groups else None


class Form:
    """A form for the user: a message, and a flat JSON Schema or a type (dataclass, TypedDict, model) to fill in."""

    def __init__(self, message: str, form: type | Mapping[str, Json], *, as_is: bool = False) -> None:
        self.capability = "elicitation.form"
        self.as_is = as_is  # not sanitized: a mask would hide what the person agrees to
        self._convert: Callable[[Object], Any] | None = None
        if isinstance(form, Mapping):
            schema = dict(form)
        elif not isinstance(form, type):
            raise LocalProtocolError(f"form: expected a class, or a JSON Schema as a dict, got {describe_value(form)}")
        else:
            schema, self._convert = form_for(form)
        _check_flat(schema)
        if field := secret_field(schema):
            raise LocalProtocolError(
                f"form: {field!r} asks for a secret, which must not pass through a client and its model; send the user"
                " to a page of yours with `call.ask_url(…)`"
            )
        self._checker = compile_schema(schema, "the form of a question")
        self.request = InputRequest(
            "elicitation/create", {"mode": "form", "message": message, "requestedSchema": schema}
        )

    def read(self, answer: Object) -> Answer:
        action = _action(answer)
        if action != "accept":
            return Answer(action)
        content = answer.get("content", {})
        problems = self._checker.problems(content)
        if problems:
            raise ToolError("The answer does not fit the form: " + "; ".join(each.text for each in problems))
        try:
            return Answer("accept", self._convert(content) if self._convert else content)
        except Refused as refused:  # a class or model can check more than its schema says
            raise ToolError(f"The answer does not fit the form: {refused.text}") from None


class Url:
    """A page for the user to visit: for input that must not pass through the client, such as secrets."""

    def __init__(self, message: str, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise LocalProtocolError(f"ask_url: {url!r} is not an http(s) address")
        self.capability = "elicitation.url"
        self.request = InputRequest(
            "elicitation/create",
            {"mode": "url", "message": message, "url": url, "elicitationId": secrets.token_urlsafe(9)},
        )

    def read(self, answer: Object) -> Answer:
        return Answer(_action(answer))


class Sample:
    """A question to the client's model.

    >>> question = Sample("What is the capital of France?", max_tokens=100)

    Further keyword arguments are members of `sampling/createMessage` in its own spelling.
    """

    def __init__(self, messages: str | Sequence[Object], *, max_tokens: int = 1000, **more: Json) -> None:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": {"type": "text", "text": messages}}]
        self.capability = "sampling.tools" if "tools" in more else "sampling"
        self.request = InputRequest(
            "sampling/createMessage", {"messages": list(messages), "maxTokens": max_tokens, **more}
        )

    def read(self, answer: Object) -> Object:
        if not isinstance(answer.get("role"), str) or not isinstance(answer.get("content"), dict | list):
            raise ToolError("The client's answer to sampling/createMessage has no role and content")
        return answer


class Roots:
    """A question for the folders that the client works in."""

    def __init__(self) -> None:
        self.capability = "roots"
        self.request = InputRequest("roots/list", {})

    def read(self, answer: Object) -> list[Object]:
        roots = answer.get("roots")
        if type(roots) is not list or not all(type(root) is dict and type(root.get("uri")) is str for root in roots):
            raise ToolError("The client's answer to roots/list has no list of roots")
        return roots


class Relay:
    """A question of another server, passed on with the answer as they are."""

    as_is = False

    def __init__(self, capability: str, request: InputRequest) -> None:
        self.capability = capability
        self.request = request

    def read(self, answer: Object) -> Object:
        return answer


Question = Form | Url | Sample | Roots | Relay


def _action(answer: Object) -> Action:
    action = answer.get("action")
    if action not in get_args(Action):
        raise ToolError(f"The client's answer has no action of {', '.join(get_args(Action))}")
    return cast(Action, action)


def _check_flat(schema: Object) -> None:
    properties = schema.get("properties")
    if schema.get("type") != "object" or type(properties) is not dict:
        raise LocalProtocolError("a form is an object schema with properties")
    for name, field in properties.items():
        if type(field) is not dict or not (
            field.get("type") in _PRIMITIVES or "enum" in field or "oneOf" in field or field.get("type") == "array"
        ):
            raise LocalProtocolError(f"form field {name!r}: only texts, numbers, booleans and choices, not nested")
        if field.get("type") == "array" and not {"enum", "anyOf"} & set(field.get("items", {})):
            raise LocalProtocolError(f"form field {name!r}: a list needs items with a choice (enum or anyOf)")
