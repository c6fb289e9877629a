"""Access to the console: sign-in codes, sessions, and the credentials every request must carry (P-22, P-23).

A code stands in the fragment of a link, which browsers do not send. The page posts it once, within five minutes, and
gets a cookie and a CSRF token. A browser sends the cookie to every port of the host, so any web server there can read
it. The page keeps the CSRF token for its own origin and puts it into a header of every request. A request needs both.
The store has only hashes of the code and of the cookie.
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
MAX_SESSION_SECONDS = 7 * 24 * 3600.0  # even if it is used all the time
SESSION_RENEW_SECONDS = 600.0
_USED = b"used"


class ApiError(Exception):
    """A refused request: the HTTP status, and a text that says what was wrong and what would be right."""

    def __init__(self, status: int, text: str, problems: Iterable[Object] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.problems = list(problems)


class ConsoleSession(Struct, frozen=True, kw_only=True):
    """A session of a person who has signed in."""

    key: str  # its id, which is not secret
    who: str
    roles: frozenset[str]
    csrf: str  # the CSRF token
    server: str
    began: float
    renewed: float
    as_configured: bool = False  # its roles are those of the current settings


class ApiRequest(Struct, frozen=True, kw_only=True):
    """A request, as handlers get it."""

    session: ConsoleSession
    path: dict[str, str] = {}  # the values of the {name} parts of the route
    query: dict[str, str] = {}
    body: Any = None
    headers: Headers = {}
    port: int = 0  # of the socket it arrived at
    token: str = ""  # the session cookie

    def body_text(self, name: str, default: str | None = None) -> str:
        """Return a member of the body that must be a text."""
        value = self.body.get(name, default) if type(self.body) is dict else None
        if type(value) is not str:
            raise ApiError(400, f"{name}: expected a text")
        return value


class RawResponse(Struct, frozen=True):
    """A response that is not plain JSON. With a file name, the browser saves it instead of displaying it."""

    body: bytes | AsyncIterator[bytes]
    media_type: str
    filename: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()


async def _no_record(session: ConsoleSession) -> None: ...


class SessionStore:
    """The codes and sessions of one server's console."""

    def __init__(self, store: Store, server: str, clock: Callable[[], float], roles: Iterable[str] = ()) -> None:
        self._store = store
        self._roles = frozenset(roles)  # of sessions that are `as_configured`
        self._server = server
        self._clock = clock

    async def add_code(self, code: str, who: str, roles: Iterable[str] | None, seconds: float = CODE_SECONDS) -> None:
        """Add a code that works once, with these roles or those of the settings. A used code stays used."""
        value = encode({"who": who, "roles": None if roles is None else sorted(roles), "server": self._server})
        await self._store.put(_code_key(code), value, ttl=seconds, if_absent=True)

    async def redeem(
        self, code: str, record: Callable[[ConsoleSession], Awaitable[None]] = _no_record
    ) -> tuple[str, ConsoleSession]:
        """Use a code up; return a cookie and its session. If `record` fails, the code is not used up."""
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
        """Return the session of a cookie. Each use extends it by 12 hours, up to a week in all."""
        value = await self._store.get(_session_key(token)) if token else None
        try:
            session = None if value is None else decode(value, type=ConsoleSession)
        except ValidationError:  # written by another version
            return None
        now = self._clock()
        if session is None or session.server != self._server:
            return None
        # A session from the future is refused too: the clock was set back (P-21).
        if not -SESSION_RENEW_SECONDS <= now - session.began < MAX_SESSION_SECONDS:
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
    """Return the name of the cookie. It has the port in it: all servers of a host share its cookies."""
    return f"handrail-console-{port}"


def token_from_cookies(headers: Headers, name: str) -> str:
    """Return the value of one cookie. The header also has the cookies of all other servers of the host."""
    pairs = (each.strip().partition("=") for each in headers.get(b"cookie", b"").decode("latin-1").split(";"))
    return {key: value for key, _, value in pairs}.get(name, "")


def check_access(session: ConsoleSession | None, access: str, headers: Headers) -> None:
    """Raise ApiError unless the session and the headers allow the use of a route with this access."""
    if access == "public":
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
