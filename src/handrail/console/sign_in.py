"""Signing in and out, and who one is."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from handrail.console.access import Download, Problem, Request, Session, cookie_name
from handrail.jsonrpc import encode
from handrail.model import UNSET, Object
from handrail.stores import StoreError

if TYPE_CHECKING:
    from handrail.console import Console

WRONG_SECONDS = 0.5  # nobody guesses a code of 24 bytes; nor shall anybody make us look for many


async def sign_in(console: Console, request: Request) -> Download:
    async def note(session: Session) -> None:
        try:
            await console.note(session, "signed in", roles=sorted(session.roles))
        except Problem as problem:
            again = "You are not signed in. Open the same link again when it can; it is good for 5 minutes"
            raise Problem(problem.status, f"{problem.text}. {again}") from None
        recorded.append(session)

    recorded: list[Session] = []
    try:
        token, session = await console.access.redeem(request.text("code"), note)
    except Exception:
        for session in recorded:
            await console.note(session, "not signed in")  # another was first
        await asyncio.sleep(WRONG_SECONDS)
        raise
    cookie = f"{cookie_name(request.port)}={token}; HttpOnly; SameSite=Strict; Path=/"
    answer = encode({**_me(console, session), "csrf": session.csrf})  # told here, and nowhere else
    return Download(answer, "application/json", fields=((b"set-cookie", cookie.encode()),))


async def sign_out(console: Console, request: Request) -> Download:
    await console.access.end(request.token)
    with contextlib.suppress(StoreError):  # streams and tries find out by themselves
        await console.publish("signed-out", {}, to=request.session.key)
    with contextlib.suppress(StoreError):
        await console.command("untry", {"session": request.session.key})
    with contextlib.suppress(Problem):  # it is done, and the server's log says that it is not on record
        await console.note(request.session, "signed out")
    cookie = f"{cookie_name(request.port)}=; HttpOnly; SameSite=Strict; Path=/; Max-Age=0"
    return Download(b"{}", "application/json", fields=((b"set-cookie", cookie.encode()),))


async def me(console: Console, request: Request) -> Object:
    return _me(console, request.session)


def _me(console: Console, session: Session) -> Object:
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
