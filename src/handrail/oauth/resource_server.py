"""Verification of access tokens: a JWT with the keys of its issuer, any other token by introspection.

A token does not choose how it is checked. A key is loaded once into the checks that its type, curve, `use` and `alg`
permit; a token selects one of them by `kid` and `alg`, or is refused. There is no check without a signature, and none
with a shared secret. A refusal returns None; the reason goes to the log at debug, without the token.
"""

from __future__ import annotations

import logging
import math
import re
import time
from base64 import b64encode, urlsafe_b64decode
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from urllib.parse import quote_plus

from msgspec import UNSET, Struct, convert, json

from handrail.errors import TransportError, missing_extra
from handrail.model import Json, Object, Principal
from handrail.oauth.http import SingleFlight, check_secure_url, fetch_json
from handrail.suggest import mapping, texts

__all__ = ["Introspection", "JwtVerifier"]

log = logging.getLogger("handrail")

ALGORITHMS = ("RS256", "PS256", "ES256", "ES384", "EdDSA", "Ed25519")
PUBLIC_KEY_ALGORITHMS = frozenset("RS256 RS384 RS512 PS256 PS384 PS512 ES256 ES384 ES512 EdDSA Ed25519 Ed448".split())
JWT = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
TYPES = ("jwt", "at+jwt", "application/at+jwt")  # RFC 9068; no other kind of JWT of the same issuer
RSA_CHARS = range(342, 1367)  # of a modulus in base64url: 2048 to 8192 bits
BEARER = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1
MAX_TOKEN_CHARS = 16 * 1024
MAX_CACHED_TOKENS = 4096
MAX_LEEWAY_SECONDS = 300
MAX_KEYS = 100
MIN_SECRET_CHARS = 16

Check = Callable[[bytes, bytes], bool]
Keys = list[tuple[Json, dict[str, Check]]]  # the kid of each, and its checks by algorithm
Clock = Callable[[], float]
Words = str | list[str]


class _Verifier:
    """The checks of issuer, audience, time and scopes, and a cache of valid tokens by their hash."""

    def __init__(
        self, issuer: str, audience: str | Collection[str], scopes: Collection[str], leeway: float, clock: Clock
    ) -> None:
        self._issuer, self._leeway, self._clock = issuer, leeway, clock
        self._audience = frozenset([audience] if isinstance(audience, str) else audience) - {""}
        self._scopes = frozenset(texts("required_scopes", scopes))
        self._cache: dict[bytes, tuple[Principal, float]] = {}
        self._single_flight = SingleFlight()
        if not issuer or "#" in issuer or not self._audience or not 0 <= leeway <= MAX_LEEWAY_SECONDS:
            raise ValueError(
                f"issuer (without #), audience and a leeway of 0 to {MAX_LEEWAY_SECONDS} seconds are needed"
            )
        metadata: Object = {"authorization_servers": [issuer], "bearer_methods_supported": ["header"]}
        self.metadata: Object | None = metadata | ({"scopes_supported": sorted(self._scopes)} if scopes else {})

    async def verify(self, token: str) -> Principal | None:
        try:
            if len(token) > MAX_TOKEN_CHARS or not BEARER.fullmatch(token):
                raise ValueError("it does not look like one")
            digest = sha256(token.encode()).digest()
            cached_principal, until = self._cache.get(digest, (None, 0.0))
            if cached_principal and self._clock() < until:
                return cached_principal
            claims, until = await self._claims(token, digest)
            principal = self._principal(claims)
        except (ValueError, RecursionError, TransportError) as wrong:
            log.debug("token refused: %s", wrong)
            return None
        self._cache.pop(digest, None)
        if len(self._cache) >= MAX_CACHED_TOKENS:
            del self._cache[next(iter(self._cache))]  # the oldest
        self._cache[digest] = (principal, min(until, claims.exp))
        return principal

    async def close(self) -> None:
        await self._single_flight.close()

    async def _claims(self, token: str, digest: bytes) -> tuple[_Claims, float]:
        """Return the verified claims of `token`, and until when they may be cached; ValueError if it is invalid."""
        raise NotImplementedError

    def _principal(self, claims: _Claims) -> Principal:
        now, scopes = self._clock(), _scope_set(claims.scope) | _scope_set(claims.scp)
        if claims.iss not in (None, self._issuer):
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
        return Principal(f"{self._issuer}#{claims.sub}", scopes)


class JwtVerifier(_Verifier):
    """Verifier of the JWTs of one issuer by its public keys, from `jwks_url` or from the JWK set `keys`.

    >>> JwtVerifier(issuer="https://id.example", audience="https://api.example/mcp", jwks_url="https://id.example/jwks")

    Keys are fetched again when they are older than `max_age`, and when a token names an unknown key, but not within
    `refresh_floor` of the last attempt. If that fails, the present keys stay in use. Times are in seconds.
    """

    def __init__(
        self,
        *,
        issuer: str,
        audience: str | Collection[str],
        jwks_url: str | None = None,
        keys: Object | None = None,
        algorithms: Sequence[str] = ALGORITHMS,
        required_scopes: Collection[str] = (),
        leeway: float = 30,
        max_age: float = 600,
        refresh_floor: float = 30,
        deadline: float = 5,
        clock: Clock = time.time,
    ) -> None:
        if (jwks_url is None) == (keys is None):
            raise ValueError("the keys of the issuer are needed: jwks_url or keys")
        algorithms = texts("algorithms", algorithms)
        if keys is not None:
            mapping("keys", keys, "a JWK set")
        if not algorithms or not PUBLIC_KEY_ALGORITHMS.issuperset(algorithms):
            raise ValueError(
                f"algorithms: only signatures by public keys are safe, {', '.join(sorted(PUBLIC_KEY_ALGORITHMS))}"
            )
        super().__init__(issuer, audience, required_scopes, leeway, clock)
        self._algorithms = algorithms
        self._keys = _load_keys(convert(keys or {"keys": []}, _KeySet), algorithms)
        if keys is not None and not self._keys:
            raise ValueError("keys: no public key among them fits the algorithms")
        self._url = None if jwks_url is None else check_secure_url(jwks_url)
        self._max_age, self._refresh_floor, self._deadline = max_age, refresh_floor, deadline
        self._fetched_at = self._attempted_at = -math.inf

    async def _claims(self, token: str, digest: bytes) -> tuple[_Claims, float]:
        if (parts := JWT.fullmatch(token)) is None:
            raise ValueError("it is not a signed JWT")
        check = await self._check(json.decode(_decode_base64(parts[1]), type=_Header))
        if not check(f"{parts[1]}.{parts[2]}".encode(), _decode_base64(parts[3])):
            raise ValueError("the signature is wrong")
        # No longer than the keys are fresh: the tokens of a withdrawn key must not outlive it.
        until = math.inf if self._url is None else self._fetched_at + self._max_age
        return json.decode(_decode_base64(parts[2]), type=_JwtClaims), until

    async def _check(self, header: _Header) -> Check:
        if header.alg not in self._algorithms or header.typ.lower() not in TYPES or header.crit is not UNSET:
            raise ValueError("its alg is not allowed, its typ is not an access token's, or it has a crit")
        if not 0 <= self._clock() - self._fetched_at < self._max_age:
            await self._refresh()
        if (check := _matching_check(self._keys, header)) is None and header.kid is not None:
            await self._refresh()
            check = _matching_check(self._keys, header)
        if check is None:
            raise ValueError("no key, or more than one, fits its kid and alg")
        return check

    async def _refresh(self) -> None:
        # Anyone can choose the kid, so it must not decide how often the issuer is asked.
        if self._url and (self._single_flight or not 0 <= self._clock() - self._attempted_at < self._refresh_floor):
            await self._single_flight.do(b"keys", partial(self._fetch, self._url))

    async def _fetch(self, url: str) -> None:
        self._attempted_at = self._clock()
        try:
            self._keys = _load_keys(await fetch_json(url, _KeySet, self._deadline), self._algorithms)
        except (TransportError, ValueError) as failed:
            log.warning("oauth: keys of %s not fetched: %s", self._issuer, failed)
        else:
            self._fetched_at = self._attempted_at
            self._cache.clear()


class Introspection(_Verifier):
    """Verifier of tokens of any form by introspection at the authorization server (RFC 7662).

    A positive response is cached for `remember` seconds: so much longer a revoked token may be accepted. `exp` may be
    missing in it, since an active token has not expired; `aud` may not. Without `issuer` the ids of principals begin
    with `url`.
    """

    def __init__(
        self,
        url: str,
        client_id: str,
        client_secret: str,
        *,
        audience: str | Collection[str],
        issuer: str | None = None,
        required_scopes: Collection[str] = (),
        leeway: float = 30,
        remember: float = 10,
        deadline: float = 5,
        clock: Clock = time.time,
    ) -> None:
        if len(client_secret) < MIN_SECRET_CHARS:
            raise ValueError(f"client_secret: weak or a default; it needs {MIN_SECRET_CHARS} random characters")
        super().__init__(issuer or url, audience, required_scopes, leeway, clock)
        if not issuer:
            self.metadata = None
        secret = f"{quote_plus(client_id)}:{quote_plus(client_secret)}"  # RFC 6749, section 2.3.1
        self._headers = {"Authorization": f"Basic {b64encode(secret.encode()).decode()}"}
        self._url, self._deadline, self._remember = check_secure_url(url), deadline, remember

    async def _claims(self, token: str, digest: bytes) -> tuple[_Claims, float]:
        form = {"token": token, "token_type_hint": "access_token"}
        fetch = partial(fetch_json, self._url, _Claims, self._deadline, form=form, headers=self._headers)
        claims = await self._single_flight.do(digest, fetch)
        if not claims.active:
            raise ValueError("it is not active")
        return claims, self._clock() + self._remember


class _Claims(Struct):
    """The introspection response (RFC 7662). Times are seconds since 1970."""

    active: bool = False
    iss: str | None = None
    sub: str = ""
    aud: Words = ""
    exp: float = math.inf
    nbf: float = -math.inf
    iat: float = -math.inf
    scope: Words = ""
    scp: Words = ""


class _JwtClaims(_Claims, kw_only=True):
    """The claims of a JWT, where these are required."""

    iss: str
    sub: str
    aud: Words
    exp: float


def _scope_set(value: Words) -> frozenset[str]:
    return frozenset(value.split() if isinstance(value, str) else value)


class _Header(Struct):
    alg: str
    typ: str = "JWT"
    kid: str | None = None
    crit: Json = UNSET


class _KeySet(Struct):
    keys: list[Object]


def _load_keys(key_set: _KeySet, algorithms: Sequence[str]) -> Keys:
    """Return the keys that can check a signature by one of `algorithms`; others are ignored (RFC 7517, section 5)."""
    try:
        from joserfc.errors import JoseError
        from joserfc.jwk import JWKRegistry
        from joserfc.jws import JWSRegistry
    except ModuleNotFoundError:
        raise missing_extra("auth", "verifying a JWT needs joserfc") from None
    if len(key_set.keys) > MAX_KEYS:
        raise ValueError(f"more than {MAX_KEYS} keys")
    keys: Keys = []
    for jwk in filter(_is_good, key_set.keys):
        checks: dict[str, Check] = {}
        with suppress(JoseError, ValueError, TypeError, KeyError):
            key = JWKRegistry.import_key(jwk)
            key.check_key_op("verify")
            for name in algorithms:
                # By name and not through the registry, which warns at each use of EdDSA.
                model = JWSRegistry.algorithms[name]
                with suppress(JoseError):
                    model.check_key(key)
                    checks[name] = partial(model.verify, key=key)
        if checks:
            keys.append((jwk.get("kid"), checks))
    return keys


def _is_good(jwk: Object) -> bool:
    """Return whether a JWK is acceptable: no secret or private key; an RSA key neither weak nor oversized."""
    match jwk:
        case {"kty": "RSA", "n": str(n)}:
            return len(n) in RSA_CHARS and "d" not in jwk
        case {"kty": "EC"} | {"kty": "OKP", "crv": "Ed25519" | "Ed448"}:
            return "d" not in jwk
    return False


def _matching_check(keys: Keys, header: _Header) -> Check | None:
    """Return the check for a token with `header`; without a kid only if exactly one key fits."""
    fits = [checks[header.alg] for kid, checks in keys if header.alg in checks and header.kid in (None, kid)]
    return fits[0] if len(fits) == 1 else None


def _decode_base64(part: str) -> bytes:
    return urlsafe_b64decode(part + "=" * (-len(part) % 4))
