"""Signing in and out, and who one is."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from handrail.console.access import ApiError, ApiRequest, ConsoleSession, RawResponse, cookie_name
from handrail.jsonrpc import encode
from handrail.model import UNSET, Object
from handrail.stores import StoreError

if TYPE_CHECKING:
    from handrail.console import Console

FAILED_SIGN_IN_SECONDS = 0.5  # nobody guesses a code of 24 bytes; nor shall anybody make us look for many


async def sign_in(console: Console, request: ApiRequest) -> RawResponse:
    async def record_sign_in(session: ConsoleSession) -> None:
        try:
            await console.write_audit_record(session, "signed in", roles=sorted(session.roles))
        except ApiError as problem:
            advice = "You are not signed in. Open the same link again when it can; it is good for 5 minutes"
            raise ApiError(problem.status, f"{problem.text}. {advice}") from None
        recorded.append(session)

    recorded: list[ConsoleSession] = []
    try:
        token, session = await console.sessions.redeem(request.body_text("code"), record_sign_in)
    except Exception:
        for session in recorded:
            await console.write_audit_record(session, "not signed in")  # another was first
        await asyncio.sleep(FAILED_SIGN_IN_SECONDS)
        raise
    cookie = f"{cookie_name(request.port)}={token}; HttpOnly; SameSite=Strict; Path=/"
    body = encode({**_session_info(console, session), "csrf": session.csrf})  # told here, and nowhere else
    return RawResponse(body, "application/json", headers=((b"set-cookie", cookie.encode()),))


async def sign_out(console: Console, request: ApiRequest) -> RawResponse:
    await console.sessions.delete_session(request.token)
    with contextlib.suppress(StoreError):  # streams and tries find out by themselves
        await console.publish("signed-out", {}, to=request.session.key)
    with contextlib.suppress(StoreError):
        await console.send_command("untry", {"session": request.session.key})
    with contextlib.suppress(ApiError):  # it is done, and the server's log says that it is not on record
        await console.write_audit_record(request.session, "signed out")
    cookie = f"{cookie_name(request.port)}=; HttpOnly; SameSite=Strict; Path=/; Max-Age=0"
    return RawResponse(b"{}", "application/json", headers=((b"set-cookie", cookie.encode()),))


async def me(console: Console, request: ApiRequest) -> Object:
    return _session_info(console, request.session)


def _session_info(console: Console, session: ConsoleSession) -> Object:
    identity = console.engine.identity
    return {
        "who": session.who,
        "roles": sorted(session.roles),
        "now": console.clock(),
        "server": {
            "name": identity.name,
            "title": identity.name if identity.title is UNSET else identity.title,
            "version": identity.version,
            "started": console.started,
            "transport": console.transport,
            "endpoint": console.endpoint,
            "target": console.target,
            "revisions": console.engine.offer.supported,
            "audit": console.gate.trail is not None,
            "workers": console.workers,
        },
    }
