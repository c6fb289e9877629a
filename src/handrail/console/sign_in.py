"""Handlers for signing in and out, and for the session's own data."""

from __future__ import annotations

import asyncio
import contextlib

from handrail.console.access import ApiError, ApiRequest, ConsoleSession, RawResponse, cookie_name
from handrail.console.context import ConsoleContext
from handrail.jsonrpc import encode
from handrail.model import UNSET, Object
from handrail.stores import StoreError

FAILED_SIGN_IN_SECONDS = 0.5  # delay: a code of 24 bytes cannot be guessed, but many attempts cost us lookups


async def sign_in(context: ConsoleContext, request: ApiRequest) -> RawResponse:
    async def record_sign_in(session: ConsoleSession) -> None:
        try:
            await context.write_audit_record(session, "signed in", roles=sorted(session.roles))
        except ApiError as problem:
            advice = "You are not signed in. Open the same link again when it can; it is good for 5 minutes"
            raise ApiError(problem.status, f"{problem.text}. {advice}") from None
        recorded.append(session)

    recorded: list[ConsoleSession] = []
    try:
        token, session = await context.sessions.redeem(request.body_text("code"), record_sign_in)
    except Exception:
        for session in recorded:
            await context.write_audit_record(session, "not signed in")  # another request used the code first
        await asyncio.sleep(FAILED_SIGN_IN_SECONDS)
        raise
    cookie = f"{cookie_name(request.port)}={token}; HttpOnly; SameSite=Strict; Path=/"
    body = encode({**_session_info(context, session), "csrf": session.csrf})  # the only response with the CSRF token
    return RawResponse(body, "application/json", headers=((b"set-cookie", cookie.encode()),))


async def sign_out(context: ConsoleContext, request: ApiRequest) -> RawResponse:
    await context.sessions.delete_session(request.token)
    with contextlib.suppress(StoreError):  # streams and runs check the session themselves
        await context.publish("signed-out", {}, to=request.session.key)
    with contextlib.suppress(StoreError):
        await context.send_command("untry", {"session": request.session.key})
    with contextlib.suppress(ApiError):  # the sign-out is done; the server's log says that it is not recorded
        await context.write_audit_record(request.session, "signed out")
    cookie = f"{cookie_name(request.port)}=; HttpOnly; SameSite=Strict; Path=/; Max-Age=0"
    return RawResponse(b"{}", "application/json", headers=((b"set-cookie", cookie.encode()),))


async def me(context: ConsoleContext, request: ApiRequest) -> Object:
    return _session_info(context, request.session)


def _session_info(context: ConsoleContext, session: ConsoleSession) -> Object:
    identity = context.engine.identity
    return {
        "who": session.who,
        "roles": sorted(session.roles),
        "now": context.clock(),
        "server": {
            "name": identity.name,
            "title": identity.name if identity.title is UNSET else identity.title,
            "version": identity.version,
            "started": context.started,
            "transport": context.transport,
            "endpoint": context.endpoint,
            "target": context.target,
            "revisions": context.engine.offer.supported,
            "audit": context.guards.trail is not None,
            "workers": context.workers,
            "upstreams": bool(context.server.upstreams),
        },
    }
