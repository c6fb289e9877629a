"""What a token has to say so that it counts, whatever proves that it says so."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Awaitable, Callable, Collection
from hashlib import sha256

from msgspec import Struct

from handrail.errors import TransportError
from handrail.model import Object, Principal

__all__ = ["Claims", "Clock", "JwtClaims", "Rules"]

log = logging.getLogger("handrail")

MAX_TOKEN_CHARS = 16 * 1024
MAX_KNOWN = 4096
MAX_LEEWAY = 300
BEARER = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1

Clock = Callable[[], float]
Words = str | list[str]


class Claims(Struct):
    """What an authorization server says of a token it was asked about (RFC 7662). Times are seconds since 1970."""

    active: bool = False
    iss: str | None = None
    sub: str = ""
    aud: Words = ""
    exp: float = math.inf
    nbf: float = -math.inf
    iat: float = -math.inf
    scope: Words = ""
    scp: Words = ""


class JwtClaims(Claims, kw_only=True):
    """What a JWT says of itself: there these may not be missing."""

    iss: str
    sub: str
    aud: Words
    exp: float


class Rules:
    """Whose tokens count, for whom and when. Those that did are remembered, by their hash and for a while."""

    def __init__(
        self, issuer: str, audience: str | Collection[str], scopes: Collection[str], leeway: float, clock: Clock
    ) -> None:
        self.issuer, self.clock = issuer, clock
        self._audience = frozenset([audience] if isinstance(audience, str) else audience) - {""}
        self._scopes, self._leeway = frozenset(scopes), leeway
        self._known: dict[bytes, tuple[Principal, float]] = {}
        if not issuer or "#" in issuer or not self._audience or not 0 <= leeway <= MAX_LEEWAY:
            raise ValueError(f"issuer (without #), audience and a leeway of 0 to {MAX_LEEWAY} seconds are needed")
        if isinstance(scopes, str):
            raise ValueError("required_scopes: a collection of words is needed, not one text")

    def metadata(self) -> Object:
        said: Object = {"authorization_servers": [self.issuer], "bearer_methods_supported": ["header"]}
        return said | ({"scopes_supported": sorted(self._scopes)} if self._scopes else {})

    async def judge(
        self, token: str, claims_of: Callable[[str, bytes], Awaitable[tuple[Claims, float]]]
    ) -> Principal | None:
        """Whose `token` this is. `claims_of` it and its hash gives the proven claims, and how long they are good."""
        try:
            if len(token) > MAX_TOKEN_CHARS or not BEARER.fullmatch(token):
                raise ValueError("it does not look like one")
            digest = sha256(token.encode()).digest()
            known, until = self._known.get(digest, (None, 0.0))
            if known and self.clock() < until:
                return known
            claims, until = await claims_of(token, digest)
            principal = self._principal(claims)
        except (ValueError, RecursionError, TransportError) as wrong:
            log.debug("token refused: %s", wrong)
            return None
        self._known.pop(digest, None)
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]  # the oldest
        self._known[digest] = (principal, min(until, claims.exp))
        return principal

    def forget(self) -> None:
        self._known.clear()

    def _principal(self, claims: Claims) -> Principal:
        now, scopes = self.clock(), _words(claims.scope) | _words(claims.scp)
        if claims.iss not in (None, self.issuer):
            raise ValueError("the issuer is another")
        if self._audience.isdisjoint([claims.aud] if isinstance(claims.aud, str) else claims.aud):
            raise ValueError("the audience is another")
        if now >= claims.exp + self._leeway:
            raise ValueError("it has expired")
        if max(claims.nbf, claims.iat) > now + self._leeway:
            raise ValueError("it is of the future")
        if not claims.sub or not claims.sub.isprintable():
            raise ValueError("the subject is missing, or has control characters")
        if not self._scopes <= scopes:
            raise ValueError("a required scope is missing")
        return Principal(f"{self.issuer}#{claims.sub}", scopes)


def _words(value: Words) -> frozenset[str]:
    return frozenset(value.split() if isinstance(value, str) else value)
