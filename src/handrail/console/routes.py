"""Every route of the console, with the access it needs, and every command that workers send each other."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote

from msgspec import Struct

from handrail.console import approvals, audit, calls, events, playground, sign_in, static_files, stops, tools, upstreams
from handrail.console.access import ApiError, ApiRequest
from handrail.console.context import ConsoleContext
from handrail.model import Object

__all__ = ["COMMANDS", "ROUTES", "Route", "find_route"]

Handler = Callable[[ConsoleContext, ApiRequest], Awaitable[Any]]
Command = Callable[[ConsoleContext, Object], Awaitable[None]]


class Route(Struct, frozen=True, dict=True):
    method: Literal["GET", "POST"]
    path: str
    access: Literal["public", "session", "view", "call", "approve", "manage"]  # a session, or one with this role
    handler: Handler

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(self.path)))


ROUTES = [
    Route("GET", "/", "public", static_files.page),
    Route("GET", "/assets/{build}/{name}", "public", static_files.asset),
    Route("POST", "/api/sign-in", "public", sign_in.sign_in),
    Route("POST", "/api/sign-out", "session", sign_in.sign_out),
    Route("GET", "/api/me", "session", sign_in.me),
    Route("GET", "/api/events", "view", events.events),
    Route("GET", "/api/calls/{id}", "view", calls.call_details),
    Route("GET", "/api/calls/{id}/blocks/{index}", "view", calls.block),
    Route("GET", "/api/calls/{id}/wire/{index}", "view", calls.wire),
    Route("POST", "/api/calls/{id}/cancel", "session", calls.cancel),
    Route("GET", "/api/tools", "view", tools.view),
    Route("GET", "/api/tools/wire", "view", tools.wire),
    Route("POST", "/api/tools/{name}/switch", "manage", tools.switch),
    Route("POST", "/api/tools/{name}/accept", "manage", tools.accept),
    Route("POST", "/api/tools/{name}/icon", "manage", tools.icon),
    Route("GET", "/api/catalog/{kind}", "view", tools.view),
    Route("POST", "/api/catalog/{kind}/{name}/switch", "manage", tools.switch),
    Route("POST", "/api/catalog/{kind}/{name}/complete", "call", playground.suggest),
    Route("GET", "/api/stops", "view", stops.view),
    Route("POST", "/api/stops", "manage", stops.change),
    Route("GET", "/api/upstreams/{name}", "view", upstreams.view),
    Route("POST", "/api/upstreams/{name}/refresh", "manage", upstreams.refresh),
    Route("POST", "/api/upstreams/{name}/accept", "manage", upstreams.accept),
    Route("POST", "/api/upstreams/{name}/sign-in", "call", upstreams.sign_in),
    Route("POST", "/api/upstreams/{name}/sign-out", "manage", upstreams.sign_out),
    Route("POST", "/api/try", "call", playground.start),
    Route("POST", "/api/try/check", "call", playground.check),
    Route("POST", "/api/try/{id}/answer", "call", playground.answer),
    Route("POST", "/api/try/{id}/cancel", "call", playground.cancel),
    Route("GET", "/api/approvals", "view", approvals.view),
    Route("POST", "/api/approvals/{id}", "approve", approvals.decide),
    Route("POST", "/api/approvals/{id}/check", "approve", approvals.check),
    Route("POST", "/api/grants/{id}/revoke", "approve", approvals.revoke),
    Route("GET", "/api/audit", "view", audit.view),
    Route("GET", "/api/audit/verify", "view", audit.verify),
    Route("GET", "/api/audit/export", "view", audit.export),
]

COMMANDS: dict[str, Command] = {
    "watch": events.renew_watch,
    "greet": events.send_greeting,
    "cancel": calls.cancel_running,
    "switch": tools.apply_switch,
    "tally": tools.publish_tally,
    "stderr": upstreams.publish_stderr,
    "refresh-upstream": upstreams.apply_refresh,
    "stop": stops.apply,
    "accept-upstream": upstreams.apply_accept,
    "answer": playground.deliver_answer,
    "untry": playground.cancel_runs,
}
"""Functions that run in every worker when one of them sends the command."""


def find_route(method: str, path: str) -> tuple[Route, dict[str, str]]:
    """Return the route of a request and the values of its {name} parts. `path` is still percent-encoded."""
    allowed = []
    for route in ROUTES:
        path_match = route.pattern.fullmatch(path)
        if path_match is not None:
            if route.method == method:
                return route, {name: unquote(value) for name, value in path_match.groupdict().items()}
            allowed.append(route.method)
    if method == "POST" and not path.startswith("/api/"):  # an MCP client
        text = "This is the console of a Handrail server, a page for people"
        raise ApiError(404, f"{text}; the server's own address is another, and ends in /mcp")
    if allowed:
        raise ApiError(405, f"{method} is not for {path[:200]}; {allowed[0]} is")
    raise ApiError(404, f"There is nothing at {path[:200]}")
