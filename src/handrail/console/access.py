"""Who may do what at the console: codes that are good once, sessions, and what a request must bring along (P-22, P-23).

A code is in the fragment of a link, which no browser sends: the page posts it, once and within five minutes, and gets a
cookie and a token. A browser sends the cookie to every port of the host, so any web server there can read it. The token
is kept by the page, for its own origin, and goes into a header of every request. Neither is worth anything alone.
The store has only hashes of code and cookie.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from hashlib import sha256
from hmac import compare_digest
from typing import Any, get_args

from msgspec import Struct, ValidationError
from msgspec.json import decode
from msgspec.structs import replace

from handrail.config import ConsoleRole
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.protocol.http_rules import Headers
from handrail.stores import Put, Store

__all__ = ["ROLES", "ApiError", "ApiRequest", "ConsoleSession", "RawResponse", "SessionStore", "new_code"]

ROLES: tuple[str, ...] = get_args(ConsoleRole)
CODE_SECONDS = 300.0
SESSION_IDLE_SECONDS = 12 * 3600.0
MAX_SESSION_SECONDS = 7 * 24 * 3600.0  # however often it is used
SESSION_RENEW_SECONDS = 600.0
_USED = b"used"


class ApiError(Exception):
    """A request that is not done: the status, and in words what was wrong and what would be right."""

    def __init__(self, status: int, text: str, problems: Iterable[Object] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.problems = list(problems)


class ConsoleSession(Struct, frozen=True, kw_only=True):
    """Somebody who has signed in."""

    key: str  # names it, and is no secret
    who: str
    roles: frozenset[str]
    csrf: str  # held by the page, and a header of every request
    server: str
    began: float
    renewed: float
    as_configured: bool = False  # has the roles that the settings have, whatever they are by now


class ApiRequest(Struct, frozen=True, kw_only=True):
    """What a handler is given."""

    session: ConsoleSession
    path: dict[str, str] = {}  # what stands where the route has a {name}
    query: dict[str, str] = {}
    body: Any = None
    headers: Headers = {}
    port: int = 0  # it came in by
    token: str = ""  # of the session

    def body_text(self, name: str, default: str | None = None) -> str:
        """A member of the body that must be a text."""
        value = self.body.get(name, default) if type(self.body) is dict else None
        if type(value) is not str:
            raise ApiError(400, f"{name}: expected a text")
        return value


class RawResponse(Struct, frozen=True):
    """An answer that is no JSON, or more than that; with a name it is to be saved, not shown."""

    body: bytes | AsyncIterator[bytes]
    media_type: str
    filename: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()


async def _no_record(session: ConsoleSession) -> None: ...


class SessionStore:
    """The codes and sessions of one server's console."""

    def __init__(self, store: Store, server: str, clock: Callable[[], float], roles: Iterable[str] = ()) -> None:
        self._store = store
        self._roles = frozenset(roles)  # of those who are signed in as the settings say
        self._server = server
        self._clock = clock

    async def add_code(self, code: str, who: str, roles: Iterable[str] | None, seconds: float = CODE_SECONDS) -> None:
        """Let a code be used once, for roles, or those of the settings. A used one stays used, whoever offers it."""
        value = encode({"who": who, "roles": None if roles is None else sorted(roles), "server": self._server})
        await self._store.put(_code_key(code), value, ttl=seconds, if_absent=True)

    async def redeem(
        self, code: str, record: Callable[[ConsoleSession], Awaitable[None]] = _no_record
    ) -> tuple[str, ConsoleSession]:
        """The token and the session for a code, which is used up by that; if `note` fails, it is not."""
        key = _code_key(code)
        value = await self._store.get(key)
        if value is None or value == _USED:
            raise ApiError(
                403, "This link was used before, or is older than 5 minutes; `handrail console` makes a new one"
            )
        code_record = decode(value)
        if code_record["server"] != self._server:
            raise ApiError(403, "This link is for another server")
        token = secrets.token_urlsafe(32)
        session = ConsoleSession(
            key=secrets.token_hex(8),
            who=code_record["who"],
            roles=self._roles if code_record["roles"] is None else frozenset(code_record["roles"]) & frozenset(ROLES),
            as_configured=code_record["roles"] is None,
            csrf=secrets.token_urlsafe(24),
            server=self._server,
            began=self._clock(),
            renewed=self._clock(),
        )
        await record(session)
        used = Put(key, _USED, CODE_SECONDS, if_equals=value)
        if not await self._store.commit([used, Put(_session_key(token), encode(session), SESSION_IDLE_SECONDS)]):
            raise ApiError(403, "This link has just been used")
        return token, session

    async def find_session(self, token: str) -> ConsoleSession | None:
        """Whose token it is; using it keeps it good for another 12 hours, for a week in all."""
        value = await self._store.get(_session_key(token)) if token else None
        try:
            session = None if value is None else decode(value, type=ConsoleSession)
        except ValidationError:  # of another version
            return None
        now = self._clock()
        if session is None or session.server != self._server:
            return None
        if (
            not -SESSION_RENEW_SECONDS <= now - session.began < MAX_SESSION_SECONDS
        ):  # nor from the future, by a clock set back (P-21)
            return None
        if session.as_configured:
            session = replace(session, roles=self._roles)
        if value is not None and abs(now - session.renewed) > SESSION_RENEW_SECONDS:
            renewed = encode(replace(session, renewed=now))
            await self._store.put(_session_key(token), renewed, ttl=SESSION_IDLE_SECONDS, if_equals=value)
        return session

    async def delete_session(self, token: str) -> None:
        await self._store.delete(_session_key(token))


def new_code() -> str:
    return secrets.token_urlsafe(24)


def cookie_name(port: int) -> str:
    """With the port: all servers of a machine share its cookies."""
    return f"handrail-console-{port}"


def token_from_cookies(headers: Headers, name: str) -> str:
    """Out of the cookies of all servers of this machine, whatever others have put into theirs."""
    pairs = (each.strip().partition("=") for each in headers.get(b"cookie", b"").decode("latin-1").split(";"))
    return {key: value for key, _, value in pairs}.get(name, "")


def check_access(session: ConsoleSession | None, access: str, headers: Headers) -> None:
    """Whether a route with this access may be used like this; a Problem if not."""
    if access == "anyone":
        return
    if session is None:
        raise ApiError(
            401, "Not signed in: open the link that was printed at the start, or make one: `handrail console`"
        )
    if not compare_digest(headers.get(b"x-handrail-csrf", b""), session.csrf.encode()):
        raise ApiError(
            401,
            "The header x-handrail-csrf is missing, or not that of this session; the answer to signing in has the "
            "token, and the cookie alone is not enough",
        )
    if access != "session" and access not in session.roles:
        raise ApiError(403, f"This needs the role {access!r}; yours are: {', '.join(sorted(session.roles)) or 'none'}")


def _code_key(code: str) -> str:
    return f"console-code:{sha256(code.encode()).hexdigest()}"


def _session_key(token: str) -> str:
    return f"console-session:{sha256(token.encode()).hexdigest()}"
