"""The callers' own grants for one upstream: each caller signs in for itself, and its token is used for no other.

A browser finishes what a call, or a person at the console, has begun, perhaps in another process. So all of it is in
the store of the server, sealed, each value for its upstream, its address and its caller:

| key | value | until |
|---|---|---|
| `sign-in-request:` | the authorization request, whose `state` the browser brings back | it comes back, or 10 minutes |
| `sign-in-code:` | the token, and the code that the page has shown | the caller repeats the code, or 10 minutes |
| `sign-in:` | the token in use | it is revoked, or was not renewed for 90 days |

A page to sign in at can be sent to somebody else, whose account the sender would then use. So a token counts only when
its caller has repeated the code of the page over its own connection. A redirect to the caller's own machine needs none.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from html import escape
from typing import TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from msgspec import Struct, ValidationError, json
from msgspec.structs import replace

from handrail.audit.format import ConsoleRecord, TrailError
from handrail.engine.core import Engine
from handrail.errors import AuthorizationError
from handrail.oauth.client import OAuth, SignInRequired
from handrail.oauth.flow import Challenge, PendingAuthorization, Redacted, RegisteredAt, TokenGrant
from handrail.protocol.http_rules import CONNECT_PATH, is_local
from handrail.stores import Delete, Put, Store, StoreError
from handrail.text.controls import mask, one_line

__all__ = ["SignInRequest", "UserGrants", "delete_sign_in", "read_sign_ins"]

log = logging.getLogger("handrail")

T = TypeVar("T")

SIGN_IN_SECONDS = 600  # for a person in a browser
LEAST_SECONDS = 60  # that a page is still good for when it is used again
FINISH_SECONDS = 30  # from a redirect to its token
GRANT_SECONDS = 90 * 24 * 3600
LOCK_SECONDS, LOCK_PAUSE_SECONDS = 60.0, 0.05
MAX_TRIES = 5  # to repeat a code
MAX_CHALLENGES = 1_000
CODE_CHARS = "23456789ABCDEFGHJKLMNPQRSTUVWXYZ"  # none looks like another
GRANT, REQUEST, CODE, TRIES, LOCK, CLIENT = (
    f"{each}:" for each in ("sign-in", "sign-in-request", "sign-in-code", "sign-in-tries", "sign-in-lock", "sign-in-as")
)
GONE = "This sign-in has expired, was finished before, or does not belong here. Begin again where you began it."


class SignInRequest(Struct, frozen=True):
    """A sign-in under way."""

    pending: PendingAuthorization
    number: str
    ends: float
    needs_code: bool
    came_back_at: float = 0.0  # when a browser brought the state, which counts once

    @property
    def host(self) -> str:
        """The host of the page to open."""
        return urlsplit(self.pending.url).netloc


class _CodePage(Redacted, frozen=True):
    """A sign-in that a browser has finished, and the code on its page."""

    number: str
    code: str
    grant: TokenGrant


def _pair(name: str, principal: str) -> str:
    """Return what the keys of an upstream and a caller end in: no other pair has the same."""
    return json.encode([name, principal]).decode()


async def read_sign_ins(store: Store) -> list[tuple[str, str]]:
    """Return the upstreams and the callers that have signed in to them."""
    pairs: list[tuple[str, str]] = []
    after = ""
    while rows := await store.scan(GRANT, after=after):
        pairs += [json.decode(key.removeprefix(GRANT), type=tuple[str, str]) for key, _ in rows]
        after = rows[-1][0]
    return pairs


async def delete_sign_in(store: Store, name: str, principal: str) -> bool:
    """Revoke the grant of a caller, and what it has begun; return whether there was one."""
    pair = _pair(name, principal)
    was_there = await store.delete(GRANT + pair)
    await store.commit([Delete(kind + pair) for kind in (REQUEST, CODE)])
    return was_there


class _StoredGrant:
    """The grant of one caller in the store of the server, as the OAuth client uses it."""

    is_live = True

    def __init__(self, grants: UserGrants, principal: str) -> None:
        self._grants = grants
        self._principal = principal
        self._pair = _pair(grants.name, principal)
        self._locked_with: bytes | None = None  # what was there when the lock was taken

    async def load(self, key: str = "") -> list[TokenGrant]:
        grant, _ = await self._grants.load(GRANT, self._principal, TokenGrant)
        return [] if grant is None else [grant]

    async def save(self, key: str, grants: list[TokenGrant]) -> None:
        """Replace the grant that was there when the lock was taken; one that was revoked stays so."""
        put = self._grants.put(GRANT, self._principal, grants[0], GRANT_SECONDS, self._locked_with)
        if self._locked_with is None or not await _stored(self._grants.store.commit([put])):
            raise SignInRequired("the grant was revoked while it was renewed")

    @asynccontextmanager
    async def lock(self, key: str) -> AsyncIterator[None]:
        store, holder, name = self._grants.store, secrets.token_hex(16).encode(), LOCK + self._pair
        try:
            async with asyncio.timeout(LOCK_SECONDS):
                while True:
                    if await _stored(store.put(name, holder, ttl=LOCK_SECONDS, if_absent=True)):
                        break
                    await asyncio.sleep(LOCK_PAUSE_SECONDS)
        except TimeoutError:
            raise AuthorizationError("another process did not come to an end with the renewal of a token") from None
        try:
            _, self._locked_with = await self._grants.load(GRANT, self._principal, TokenGrant)
            yield
        finally:
            await _stored(store.commit([Delete(name, if_equals=holder)]))


class UserGrants:
    """The sign-ins of the callers of one upstream at `url`: begun, finished, confirmed, used and revoked.

    `on_change` is called with the caller whose grant has come or gone.
    """

    def __init__(
        self, engine: Engine, name: str, url: str, oauth: OAuth, on_change: Callable[[str], Awaitable[None]]
    ) -> None:
        self.engine = engine
        self.name = name
        self.on_change = on_change
        self._url = url
        self._oauth = oauth
        own, path = oauth.redirect, f"{CONNECT_PATH}{quote(name, safe='')}"
        if own.startswith("https:") and not own.endswith(path):
            raise ValueError(f"include {name!r}: auth: redirect: {own!r} does not end in {path}, where it is received")
        self._challenges: dict[str, Challenge] = {}  # by caller: what the upstream has said last

    @property
    def store(self) -> Store:
        return self.engine.guard_set.store

    def of(self, principal: str) -> OAuth:
        """Return the authorization of one caller."""
        return self._oauth.of_user(_StoredGrant(self, principal), partial(self._on_required, principal))

    def _on_required(self, principal: str, challenge: Challenge) -> None:
        if len(self._challenges) >= MAX_CHALLENGES:
            self._challenges.clear()
        self._challenges[principal] = challenge

    async def is_signed_in(self, principal: str) -> bool:
        """Return whether a caller has a grant; whether the upstream still takes it is known when it is used."""
        return bool(await _StoredGrant(self, principal).load())

    async def begin(self, principal: str, redirect: str, *, needs_code: bool) -> SignInRequest:
        """Return the sign-in that a caller is to finish in a browser: the one under way, or a new one."""
        if not redirect.startswith("https:") and not is_local(redirect):
            origin = redirect.partition(CONNECT_PATH)[0]
            log.error("gateway: %s: no sign-in: browsers would come back to %s in the clear", self.name, origin)
            raise AuthorizationError("browsers can only come back over https; `redirect` says where, behind a proxy")
        now, challenge = self.engine.clock(), self._challenges.get(principal, Challenge())
        current, _ = await self.load(REQUEST, principal, SignInRequest)
        if current is not None and current.pending.redirect == redirect and current.needs_code == needs_code:
            until = current.came_back_at + FINISH_SECONDS if current.came_back_at else current.ends - LEAST_SECONDS
            if now < until and {*challenge.scopes} <= {*current.pending.scopes}:
                return current
        number, ends = secrets.token_urlsafe(12), int(now) + SIGN_IN_SECONDS
        state = self.engine.seal.seal("sign-in state", self.name, [principal, number], ends)
        earlier, _ = await self.load(CLIENT, "", RegisteredAt)
        pending = await self.of(principal).begin_sign_in(self._url, challenge, redirect, state, earlier)
        if earlier is not None:  # a client that the authorization server has forgotten is not tried twice
            forgotten = self.put(CLIENT, "", RegisteredAt(earlier.issuer), GRANT_SECONDS)
            await _stored(self.store.commit([forgotten]))
        request = SignInRequest(pending, number, ends, needs_code)
        await _stored(
            self.store.commit(
                [
                    self.put(REQUEST, principal, request, SIGN_IN_SECONDS),
                    Delete(CODE + _pair(self.name, principal)),
                ]
            )
        )
        return request

    def redirect_at(self, endpoint: str) -> str:
        """Return where browsers come back to, at an endpoint of this server, or as the options say."""
        own = self._oauth.redirect
        return own if own.startswith("https:") else f"{endpoint}{CONNECT_PATH}{quote(self.name, safe='')}"

    async def loopback_redirect(self) -> str:
        """Return where browsers come back to on this machine; a registered client has a port."""
        if (own := self._oauth.redirect).startswith("https:"):
            raise AuthorizationError(f"browsers come back to {own}, and this caller has not come over HTTP")
        earlier, _ = await self.load(CLIENT, "", RegisteredAt)
        return self._oauth.loopback_redirect(None if earlier is None else earlier.client)

    async def finish(self, query: str) -> tuple[int, str]:
        """Take the redirect of a browser, which counts once; return the status and the text of its page, as HTML."""
        try:
            [state] = parse_qs(query, max_num_fields=32).get("state", [])
        except ValueError:
            return 400, GONE
        opened = self.engine.seal.open("sign-in state", self.name, state, self.engine.clock())
        if type(opened) is not list:
            return 400, GONE
        principal, number = opened
        request, raw = await self.load(REQUEST, principal, SignInRequest)
        if request is None or request.number != number or request.came_back_at:
            return 400, GONE
        came_back = replace(request, came_back_at=self.engine.clock())
        if not await _stored(self.store.commit([self.put(REQUEST, principal, came_back, SIGN_IN_SECONDS, raw)])):
            return 400, GONE
        finished = Delete(REQUEST + _pair(self.name, principal))
        try:
            back = f"{request.pending.redirect}?{query}"
            grant = await self.of(principal).finish_sign_in(self._url, request.pending, back)
        except AuthorizationError as failed:
            reason = one_line(mask(failed.text), 300)
            await _stored(self.store.commit([finished]))
            log.warning("gateway: %s: sign-in of %.200s failed: %s", self.name, principal, reason)
            return 400, f"You are not signed in: {escape(reason)}. Begin again where you began it."
        registered = self.put(CLIENT, "", RegisteredAt(grant.issuer, grant.client), GRANT_SECONDS)
        self._challenges.pop(principal, None)
        about = f"to {escape(self.name)}, for the caller {escape(principal)} of {escape(self.engine.identity.name)}"
        if not request.needs_code:
            await self._record(principal)
            used = self.put(GRANT, principal, grant, GRANT_SECONDS)
            await _stored(self.store.commit([finished, registered, used]))
            await self.on_change(principal)
            return 200, f"You are signed in {about}. You can close this window."
        code = "".join(secrets.choice(CODE_CHARS) for _ in range(8))
        page = self.put(CODE, principal, _CodePage(number, code, grant), SIGN_IN_SECONDS)
        await _stored(self.store.commit([finished, registered, page]))
        return 200, (
            f"You have signed in {about}. To finish, enter this code there:</p><h1>{code[:4]}-{code[4:]}</h1>"
            "<p>If you did not ask for this yourself, close this window and give the code to nobody."
        )

    async def number_with_code(self, principal: str) -> str:
        """Return the number of the sign-in whose page shows a code now; empty if there is none."""
        page, _ = await self.load(CODE, principal, _CodePage)
        return "" if page is None else page.number

    async def confirm(self, principal: str, code: str) -> bool:
        """Use the token of a finished sign-in, if its caller knows the code of the page."""
        page, raw = await self.load(CODE, principal, _CodePage)
        if page is None:
            return False
        pair = _pair(self.name, principal)
        if await _stored(self.store.add(TRIES + page.number, ttl=SIGN_IN_SECONDS)) > MAX_TRIES:
            await _stored(self.store.delete(CODE + pair))
            return False
        plain = "".join(each for each in code[:100].upper() if each.isalnum())
        if not hmac.compare_digest(plain.encode(), page.code.encode()):
            return False
        await self._record(principal)
        done = Delete(CODE + pair, if_equals=raw)
        if not await _stored(self.store.commit([done, self.put(GRANT, principal, page.grant, GRANT_SECONDS)])):
            return False
        await self.on_change(principal)
        return True

    async def revoke(self, principal: str) -> bool:
        """Forget the grant of a caller in all processes; return whether there was one."""
        was_there = await delete_sign_in(self.store, self.name, principal)
        await self.on_change(principal)
        return was_there

    async def callers(self) -> list[str]:
        """Return who has signed in."""
        return [principal for name, principal in await read_sign_ins(self.store) if name == self.name]

    async def _record(self, principal: str) -> None:
        """Record in the audit log that a caller signs in."""
        log.info("gateway: %s: %.200s signs in", self.name, principal)
        guards = self.engine.guard_set
        if guards.trail is None:
            return
        step = f"signed in to upstream {one_line(self.name, 100)}"
        try:
            await guards.trail.write(ConsoleRecord("console", step=step, by=principal, server=guards.name))
        except TrailError as problem:
            log.error("gateway: %s: sign-in of %.200s not recorded: %s", self.name, principal, problem)
            raise AuthorizationError("it cannot be recorded now") from None

    # Values in the store

    def _holder(self, kind: str, principal: str) -> str:
        return json.encode([kind, self.name, self._url, principal]).decode()

    def put(self, kind: str, principal: str, value: Struct, seconds: float, if_equals: bytes | None = None) -> Put:
        """Return the change that keeps a value, sealed for this upstream, its address and the caller."""
        ends = int(self.engine.clock() + seconds)
        text = self.engine.seal.seal("sign-in", self._holder(kind, principal), json.encode(value).decode(), ends)
        return Put(kind + _pair(self.name, principal), text.encode(), ttl=seconds, if_equals=if_equals)

    async def load(self, kind: str, principal: str, value_type: type[T]) -> tuple[T | None, bytes | None]:
        """Return a value, and as it is in the store; None if it is not there, or was sealed for another."""
        raw = await _stored(self.store.get(kind + _pair(self.name, principal)))
        if raw is None:
            return None, None
        text = raw.decode("ascii", "replace")
        opened = self.engine.seal.open("sign-in", self._holder(kind, principal), text, self.engine.clock())
        try:
            return (json.decode(opened, type=value_type), raw) if type(opened) is str else (None, raw)
        except ValidationError:
            return None, raw


async def _stored(work: Awaitable[T]) -> T:
    """Return what the store returns; AuthorizationError if it is not there."""
    try:
        return await work
    except StoreError as problem:
        log.error("gateway: sign-ins not read or written: %s", problem)
        raise AuthorizationError("sign-ins cannot be read or kept now") from None
