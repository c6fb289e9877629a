"""Every route of the console, and who may use it. There is no other way in."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote

from msgspec import Struct

from handrail.console import (
    approvals as approving,
    audit as auditing,
    calls,
    events as streaming,
    playground as trying,
    sign_in as signing,
    static_files as pages,
    tools,
)
from handrail.console.access import ApiError, ApiRequest
from handrail.console.context import ConsoleContext
from handrail.model import Object

__all__ = ["COMMANDS", "ROUTES", "Route", "find_route"]

Handler = Callable[[ConsoleContext, ApiRequest], Awaitable[Any]]
Command = Callable[[ConsoleContext, Object], Awaitable[None]]


class Route(Struct, frozen=True, dict=True):
    method: Literal["GET", "POST"]
    path: str
    access: Literal["anyone", "session", "view", "call", "approve", "manage"]  # a session, or one with this role
    handler: Handler

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(self.path)))


ROUTES = [
    Route("GET", "/", "anyone", pages.page),
    Route("GET", "/assets/{build}/{name}", "anyone", pages.asset),
    Route("POST", "/api/sign-in", "anyone", signing.sign_in),
    Route("POST", "/api/sign-out", "session", signing.sign_out),
    Route("GET", "/api/me", "session", signing.me),
    Route("GET", "/api/events", "view", streaming.events),
    Route("GET", "/api/calls/{id}", "view", calls.call_details),
    Route("GET", "/api/calls/{id}/blocks/{index}", "view", calls.block),
    Route("GET", "/api/calls/{id}/wire/{index}", "view", calls.wire),
    Route("POST", "/api/calls/{id}/cancel", "session", calls.cancel),
    Route("GET", "/api/tools", "view", tools.view),
    Route("GET", "/api/tools/wire", "view", tools.wire),
    Route("POST", "/api/tools/{name}/switch", "manage", tools.switch),
    Route("POST", "/api/tools/{name}/accept", "manage", tools.accept),
    Route("POST", "/api/tools/{name}/icon", "manage", tools.icon),
    Route("POST", "/api/try", "call", trying.start),
    Route("POST", "/api/try/check", "call", trying.check),
    Route("POST", "/api/try/{id}/answer", "call", trying.answer),
    Route("POST", "/api/try/{id}/cancel", "call", trying.cancel),
    Route("GET", "/api/approvals", "view", approving.view),
    Route("POST", "/api/approvals/{id}", "approve", approving.decide),
    Route("POST", "/api/approvals/{id}/check", "approve", approving.check),
    Route("POST", "/api/grants/{id}/revoke", "approve", approving.revoke),
    Route("GET", "/api/audit", "view", auditing.view),
    Route("GET", "/api/audit/verify", "view", auditing.verify),
    Route("GET", "/api/audit/export", "view", auditing.export),
]

COMMANDS: dict[str, Command] = {
    "watch": streaming.renew_watch,
    "greet": streaming.send_greeting,
    "cancel": calls.cancel_running,
    "switch": tools.apply_switch,
    "tally": tools.publish_tally,
    "answer": trying.deliver_answer,
    "untry": trying.cancel_runs,
}
"""What every worker does when one of them is asked to."""


def find_route(method: str, path: str) -> tuple[Route, dict[str, str]]:
    """The route of a request, and what stands where it has a {name}; `path` as it came, with its escapes."""
    allowed = []
    for route in ROUTES:
        path_match = route.pattern.fullmatch(path)
        if path_match is not None:
            if route.method == method:
                return route, {name: unquote(value) for name, value in path_match.groupdict().items()}
            allowed.append(route.method)
    if method == "POST" and not path.startswith("/api/"):  # a client of the protocol
        text = "This is the console of a Handrail server, a page for people"
        raise ApiError(404, f"{text}; the server's own address is another, and ends in /mcp")
    if allowed:
        raise ApiError(405, f"{method} is not for {path[:200]}; {allowed[0]} is")
    raise ApiError(404, f"There is nothing at {path[:200]}")
