"""The token flows of a client: registration, authorization code with PKCE, refresh, client credentials.

Without I/O, like discovery: every response is checked here, so a flow in a test with canned responses is the flow of
production.

An authorization code goes to a token endpoint only if it arrived at the redirect URL of the request, with its `state`
and the `iss` of its authorization server (RFC 9207): a code that belongs to another request, or to another server, is
never sent anywhere.

Discovery of the authorization server: from the challenge of an MCP server to the metadata of its issuer.

Without I/O: the flows here are generators that yield requests and are sent the responses. All responses are untrusted:
every URL passes `validate_url` before it is yielded, and every document has to name its subject, the resource metadata
the server and the server metadata the issuer (RFC 9728, section 3.3; RFC 8414, section 3.3).
"""

from __future__ import annotations

import hmac
import math
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from hashlib import sha256
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from msgspec import Struct, ValidationError, convert, json
from msgspec.structs import replace

from handrail.errors import GIVE_KEY, AuthorizationError, missing_extra
from handrail.model import Json
from handrail.protocol.http_rules import is_local

__all__ = [
    "AuthorizationServerError",
    "Challenge",
    "ClientRegistration",
    "Discovered",
    "FlowRequest",
    "FlowResponse",
    "OAuthClient",
    "PendingAuthorization",
    "RegisteredAt",
    "ServerMetadata",
    "Token",
    "TokenGrant",
    "discover",
    "origin",
    "read_challenge",
    "validate_url",
]

MAX_URL_CHARS = 8192
MAX_CHALLENGE_CHARS = 8192
MAX_SCOPES = 100
RESOURCE_METADATA_PATH = "/.well-known/oauth-protected-resource"
SERVER_METADATA_PATH = "/.well-known/oauth-authorization-server"
OPENID_CONFIGURATION_PATH = "/.well-known/openid-configuration"

# Only characters on which all URL parsers agree (RFC 3986, section 2).
PLAIN_URL = re.compile(r"(?i:https?)://[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")
HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9a-f:.]+")
SCOPE = re.compile(r"[!#-\[\]-~]+")  # RFC 6749, section 3.3
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
PART = re.compile(  # a parameter, or a scheme with or without its one value (RFC 9110, section 11)
    rf'[\s,]*(?:(?P<name>{_TOKEN})\s*=\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s,"=][^\s,"]*))'
    rf"|(?P<scheme>{_TOKEN})(?:\s+[A-Za-z0-9._~+/-]+=*(?=\s*(?:,|$)))?(?=[\s,]|$))"
)

T = TypeVar("T")
D = TypeVar("D", bound=Struct)


class Redacted(Struct, frozen=True):
    """A struct without its members in its repr: they may be secret."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


class FlowRequest(Redacted, frozen=True):
    """GET `url`, or POST the secret `data` to it; the flow is sent a FlowResponse."""

    url: str
    data: dict[str, str] | bytes | None = None  # fields of a form, or JSON
    headers: dict[str, str] = {}


class AuthorizationRequest(Redacted, frozen=True):
    """Have the user open `url` and consent; the flow is sent the whole URL of the redirect."""

    url: str
    state: str
    issuer: str


Flow = Generator[FlowRequest | AuthorizationRequest, Any, T]
"""Yields its steps and is sent the result of each."""


class FlowResponse(Redacted, frozen=True):
    """A response; `body` is its JSON, None if it is not JSON."""

    status: int
    body: Json = None


class Challenge(Struct, frozen=True):
    """The Bearer challenge of a server."""

    metadata_url: str = ""
    scopes: tuple[str, ...] = ()
    error: str = ""


class ResourceMetadata(Struct):
    """RFC 9728."""

    resource: str
    authorization_servers: list[str] | None = None
    scopes_supported: list[str] | None = None


class ServerMetadata(Struct):
    """RFC 8414, and the members of OpenID Connect Discovery that are the same."""

    issuer: str
    authorization_endpoint: str | None = None
    token_endpoint: str | None = None
    registration_endpoint: str | None = None
    code_challenge_methods_supported: list[str] | None = None
    token_endpoint_auth_methods_supported: list[str] | None = None
    scopes_supported: list[str] | None = None
    client_id_metadata_document_supported: bool | None = None
    authorization_response_iss_parameter_supported: bool | None = None


class Discovered(Struct, frozen=True):
    """The authorization server of a resource; every URL in it is validated."""

    resource: str
    scopes: tuple[str, ...]
    server: ServerMetadata
    is_guess: bool = False  # no metadata: the default endpoints of 2025-03-26


def read_challenge(header: str) -> Challenge:
    """Return the Bearer challenges of a `WWW-Authenticate` as one; malformed parts are ignored."""
    params: dict[str, str] = {}
    scheme, at = "", 0
    while (part := PART.match(header, at, MAX_CHALLENGE_CHARS)) is not None:
        at = part.end()
        if part["scheme"]:
            scheme = part["scheme"].lower()
        elif scheme == "bearer":
            value = part["bare"] if part["quoted"] is None else re.sub(r"\\(.)", r"\1", part["quoted"])
            params.setdefault(part["name"].lower(), value)
    return Challenge(
        params.get("resource_metadata", ""), unique_scopes(params.get("scope", "").split()), params.get("error", "")
    )


def unique_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    """Return the valid scopes, each once."""
    return tuple(dict.fromkeys(filter(SCOPE.fullmatch, scopes)))[:MAX_SCOPES]


def validate_url(url: str, what: str, *, local: bool) -> str:
    """Return `url` if it is https, or with `local` http to this machine; AuthorizationError if not."""
    try:
        parts = urlsplit(url) if len(url) <= MAX_URL_CHARS and PLAIN_URL.fullmatch(url) else SplitResult(*[""] * 5)
        is_good = HOST.fullmatch(parts.hostname or "") and parts.port != 0 and not {"@", "#"} & {*url}
        is_good = is_good and (parts.scheme == "https" or (local and is_local(url)))
    except ValueError:  # an invalid port, or unmatched brackets
        is_good = False
    if not is_good:
        raise AuthorizationError(
            f"{what} is {url[:100]!a}: https is needed, or http to this machine if the server is on it too"
        )
    return url


def origin(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    default = {"https": 443, "http": 80}.get(parts.scheme)
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port not in (None, default) else "")


def discover(url: str, challenge: Challenge, issuer: str | None = None) -> Flow[Discovered]:
    """Return the authorization server of the MCP server at `url`: `issuer`, by default the first it names.

    A server without resource metadata is one of 2025-03-26 and its own authorization server.
    """
    local = is_local(url)
    validate_url(url, "the server's URL", local=local)
    home, path = origin(url), urlsplit(url).path.rstrip("/")
    places = [validate_url(challenge.metadata_url, "resource_metadata", local=local)] if challenge.metadata_url else []
    places += [home + RESOURCE_METADATA_PATH + path, home + RESOURCE_METADATA_PATH]
    resource = yield from _fetch_first(places, ResourceMetadata)
    name, scopes, servers = home + path, unique_scopes(()), [home]
    if resource is not None:
        name, scopes = _own_resource(resource.resource, url), unique_scopes(resource.scopes_supported or ())
        servers = resource.authorization_servers or []
    if not servers or (issuer is not None and issuer not in servers):
        raise AuthorizationError(
            "the server does not name the authorization server of the client_id"
            if servers
            else "the server names no authorization server"
        )
    chosen = validate_url(issuer or servers[0], "the authorization server", local=local)
    server = yield from _fetch_first(_metadata_urls(chosen), ServerMetadata)
    is_guess = server is None and resource is None
    if server is None and resource is None:
        server = ServerMetadata(home, f"{home}/authorize", f"{home}/token", f"{home}/register", ["S256"])
    if server is None:
        raise AuthorizationError(f"there is no metadata of the authorization server {chosen}")
    # For a server of 2025-03-26 the issuer may end with a slash or not: both have the same metadata URL.
    if server.issuer != chosen and not (resource is None and server.issuer == chosen + "/"):
        raise AuthorizationError(f"the metadata of {chosen} is that of another issuer, {server.issuer[:100]!a}")
    for field in ("authorization_endpoint", "token_endpoint", "registration_endpoint"):
        if (endpoint := getattr(server, field)) is not None:
            validate_url(endpoint, field, local=local)
    return Discovered(name, scopes, server, is_guess)


def _metadata_urls(issuer: str) -> list[str]:
    home, path = origin(issuer), urlsplit(issuer).path.rstrip("/")
    if urlsplit(issuer).query:
        raise AuthorizationError("the authorization server has a query in its name")
    return [
        home + SERVER_METADATA_PATH + path,
        home + OPENID_CONFIGURATION_PATH + path,
        *([home + path + OPENID_CONFIGURATION_PATH] if path else []),
    ]


def _fetch_first(places: list[str], kind: type[D]) -> Flow[D | None]:
    """Return the document at the first of `places` that has one; a status of 500 or more is an error, not absence."""
    for url in dict.fromkeys(places):
        answer: FlowResponse = yield FlowRequest(url)
        if answer.status >= 500:
            raise AuthorizationError(f"{url} answers with status {answer.status}", hint="Try again later.")
        if answer.status == 200 and isinstance(answer.body, dict):
            try:
                return convert(answer.body, kind)
            except ValidationError as wrong:
                raise AuthorizationError(f"the metadata at {url} cannot be read: {wrong}") from None
    return None


def _own_resource(resource: str, url: str) -> str:
    """Return `resource` if the server at `url` is the resource, or a part of it (RFC 8707, section 2)."""
    own, named = urlsplit(url), urlsplit(resource if PLAIN_URL.fullmatch(resource) else "")
    path = named.path.rstrip("/")
    try:
        is_own = origin(resource) == origin(url) and f"{own.path.rstrip('/')}/".startswith(f"{path}/")
    except ValueError:
        is_own = False
    if not is_own or "#" in resource or named.query not in ("", own.query) or "@" in named.netloc:
        raise AuthorizationError(f"the server's metadata is that of another resource, {resource[:100]!a}")
    return resource


MAX_TOKEN_CHARS = 16 * 1024
MAX_DESCRIPTION_CHARS = 200
MAX_FIELDS = 32
ASSERTION_SECONDS = 60
RENEW_EARLY_SECONDS = 30
VISIBLE = re.compile(r"[!-~]+")
ERROR = re.compile(r"[a-z_]{1,64}")
JWT_BEARER_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
KEY_TYPES = {"ES": "EC", "RS": "RSA", "PS": "RSA", "Ed": "OKP"}
OFFLINE_ACCESS = "offline_access"
INSUFFICIENT_SCOPE = "insufficient_scope"
JSON = {"Content-Type": "application/json"}
SECRET_FIELDS = ("code", "code_verifier", "refresh_token")


class ClientRegistration(Redacted, frozen=True):
    """A client registered at an authorization server; a secret from the user's options is not part of it."""

    id: str
    secret: str = ""
    method: str = "none"
    redirect: str = ""
    secret_expires_at: float = 0  # 0: never


class Token(Redacted, frozen=True, omit_defaults=True):
    """An access token with its refresh token, scopes and times, in seconds since 1970; infinity: good until refused."""

    access: str
    refresh: str = ""
    asked: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()
    renew_at: float = math.inf
    expires_at: float = math.inf


class TokenGrant(Struct, frozen=True):
    """A token of one authorization server for one resource, with the client it was issued to."""

    issuer: str
    resource: str
    token_endpoint: str
    client: ClientRegistration
    token: Token


class RegisteredAt(Redacted, frozen=True):
    """The authorization server of the last sign-in, with the client there, unless that may be unknown by now."""

    issuer: str
    client: ClientRegistration | None = None


class PendingAuthorization(Redacted, frozen=True):
    """An authorization request whose user has not come back yet, with what redeems the code."""

    url: str  # the page to open
    state: str
    verifier: str
    redirect: str
    scopes: tuple[str, ...]
    client: ClientRegistration
    discovery: Discovered


class AuthorizationServerError(AuthorizationError):
    """The authorization server refused; `error` is its error code."""

    def __init__(self, text: str, *, error: str = "", hint: str = "") -> None:
        super().__init__(text, hint=hint)
        self.error = error


class OAuthClient(Redacted, frozen=True, kw_only=True):
    """The options of an OAuth client, and its flows. Time and randomness come in as functions."""

    clock: Callable[[], float]
    random: Callable[[], str]  # at least 43 letters, digits, - and _ (RFC 7636, section 4.1)
    client_id: str = ""
    client_secret: str = ""
    metadata_url: str = ""
    private_key: str = ""
    signing_algorithm: str = ""
    scopes: tuple[str, ...] | None = None
    audience: str = ""  # the resource, for authorization servers that know it by another name than its URL
    redirect: str = "http://127.0.0.1:0/callback"

    def scopes_to_request(self, challenge: Challenge, discovery: Discovered, held: Collection[str]) -> tuple[str, ...]:
        """Return the scopes to request: those the user allows, else those held and those required."""
        if self.scopes is not None:
            beyond = [word for word in challenge.scopes if word not in self.scopes]
            if beyond and challenge.error == INSUFFICIENT_SCOPE:
                raise AuthorizationError(
                    f"the server wants the scope {' '.join(beyond)!r}", hint="Add it to `scopes`, if it may have it."
                )
            return self.scopes
        is_too_little = not held or challenge.error == INSUFFICIENT_SCOPE
        requested = [*held, *(challenge.scopes or (discovery.scopes if is_too_little else ()))]
        offered = discovery.server.scopes_supported or ()
        # Not alone: without a scope the authorization server grants its default ones.
        if requested and OFFLINE_ACCESS in offered:
            requested.append(OFFLINE_ACCESS)
        return unique_scopes(word for word in requested if word != OFFLINE_ACCESS or word in offered)

    def redirect_for(self, registration: ClientRegistration | None) -> str:
        """Return the redirect URL: with any port allowed, the registered one if there is one."""
        parts = urlsplit(registration.redirect if registration else "")
        with_any_port = parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:0").geturl()
        return registration.redirect if registration and with_any_port == self.redirect else self.redirect

    def register(
        self, discovery: Discovered, redirect: str, registration: ClientRegistration | None
    ) -> Flow[ClientRegistration]:
        """Return the client for this authorization server; `registration` is the stored one."""
        _check_code_flow(discovery.server)
        if (static_registration := self._static_registration(discovery)) is not None:
            return static_registration
        is_over = registration and 0 < registration.secret_expires_at <= self.clock()
        if registration and registration.redirect == redirect and not is_over:
            return registration
        return (yield from self._register_client(discovery, redirect))

    def authorize(
        self, discovery: Discovered, client: ClientRegistration, redirect: str, scopes: tuple[str, ...]
    ) -> Flow[TokenGrant]:
        """Get a token by the consent of the user."""
        pending = self.authorization_request(discovery, client, redirect, scopes, self.random())
        back: str = yield AuthorizationRequest(pending.url, pending.state, discovery.server.issuer)
        return (yield from self.redeem(pending, back))

    def authorization_request(
        self, discovery: Discovered, client: ClientRegistration, redirect: str, scopes: tuple[str, ...], state: str
    ) -> PendingAuthorization:
        """Return the request for the consent of the user; `state` cannot be guessed, and is used once."""
        endpoint = _check_code_flow(discovery.server)
        verifier = self.random()
        challenge = urlsafe_b64encode(sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": client.id,
            "redirect_uri": redirect,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
            "state": state,
            "resource": discovery.resource,
        }
        if scopes:
            query["scope"] = " ".join(scopes)
        if self.audience:
            query["audience"] = self.audience
        if OFFLINE_ACCESS in scopes:
            query["prompt"] = "consent"  # OpenID Connect Core, section 11
        url = _with_query(endpoint, query)
        return PendingAuthorization(url, state, verifier, redirect, scopes, client, discovery)

    def redeem(self, pending: PendingAuthorization, back: str) -> Flow[TokenGrant]:
        """Get the token for which the user came back to the URL `back`."""
        discovery = pending.discovery
        fields = {
            "grant_type": "authorization_code",
            "code": _authorization_code(back, pending.redirect, pending.state, discovery.server),
            "redirect_uri": pending.redirect,
            "code_verifier": pending.verifier,
            "resource": discovery.resource,
        }
        return (yield from self._request_grant(discovery, pending.client, fields, pending.scopes))

    def client_credentials(self, discovery: Discovered, scopes: tuple[str, ...]) -> Flow[TokenGrant]:
        """Get a token for the client itself."""
        if (client := self._static_registration(discovery)) is None or client.method == "none":
            raise AuthorizationError("client credentials need a client_id, and a client_secret or private_key")
        fields = {"grant_type": "client_credentials", "resource": discovery.resource}
        if scopes:
            fields["scope"] = " ".join(scopes)
        if self.audience:
            fields["audience"] = self.audience
        return (yield from self._request_grant(discovery, client, fields, scopes))

    def refresh(self, grant: TokenGrant) -> Flow[TokenGrant]:
        """Get the next token by the refresh token; AuthorizationServerError if that is not valid any more."""
        fields = {"grant_type": "refresh_token", "refresh_token": grant.token.refresh, "resource": grant.resource}
        answer = yield from self._token_response(grant.token_endpoint, grant.issuer, grant.client, fields)
        token = self._parse_token(answer, grant.token.asked, grant.token.granted)
        # A refresh token that is not replaced stays valid (RFC 6749, section 6).
        return replace(grant, token=token if token.refresh else replace(token, refresh=grant.token.refresh))

    def _static_registration(self, discovery: Discovered) -> ClientRegistration | None:
        """Return the client that needs no registration: of `client_id`, or of the document at `metadata_url`."""
        methods = discovery.server.token_endpoint_auth_methods_supported or ["client_secret_basic"]
        if self.client_id or (self.metadata_url and discovery.server.client_id_metadata_document_supported):
            if self.private_key:
                method = "private_key_jwt"
            elif not self.client_secret or not self.client_id:
                method = "none"
            else:
                method = _choose_method(methods, ("client_secret_basic", "client_secret_post"))
            return ClientRegistration(self.client_id or self.metadata_url, method=method)
        return None

    def _register_client(self, discovery: Discovered, redirect: str) -> Flow[ClientRegistration]:
        """RFC 7591."""
        server = discovery.server
        if server.registration_endpoint is None:
            raise AuthorizationError(
                f"the authorization server {server.issuer} does not register clients",
                hint="Register one there by hand and give its client_id.",
            )
        methods = server.token_endpoint_auth_methods_supported or ["none"]
        client_metadata = {
            "client_name": "Handrail",
            "redirect_uris": [redirect],
            "application_type": "native" if is_local(redirect) else "web",
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "token_endpoint_auth_method": _choose_method(
                methods, ("none", "client_secret_basic", "client_secret_post")
            ),
        }
        answer: FlowResponse = yield FlowRequest(server.registration_endpoint, json.encode(client_metadata), JSON)
        if discovery.is_guess and answer.status in (404, 405):
            raise AuthorizationError(
                "the server wants an API key or a token, and has no place to log in", hint=GIVE_KEY
            )
        try:
            if answer.status not in (200, 201):
                raise _rejection("register us", answer)
            registration = convert(answer.body, _Registration)
        except ValidationError as wrong:
            raise AuthorizationError(f"what the authorization server registered cannot be read: {wrong}") from None
        method, secret = (
            registration.token_endpoint_auth_method or str(client_metadata["token_endpoint_auth_method"]),
            registration.client_secret,
        )
        if secret and not registration.token_endpoint_auth_method and not server.token_endpoint_auth_methods_supported:
            method = "client_secret_basic"  # the default of RFC 7591, if the server names no method
        if method.startswith("client_secret_") and not secret:
            raise AuthorizationError(f"the authorization server registered us for {method!a} without a secret")
        return ClientRegistration(
            registration.client_id, secret or "", method, redirect, registration.client_secret_expires_at or 0
        )

    def _request_grant(
        self, discovery: Discovered, client: ClientRegistration, fields: dict[str, str], scopes: tuple[str, ...]
    ) -> Flow[TokenGrant]:
        if (endpoint := discovery.server.token_endpoint) is None:
            raise AuthorizationError(f"the authorization server {discovery.server.issuer} has no token endpoint")
        answer = yield from self._token_response(endpoint, discovery.server.issuer, client, fields)
        return TokenGrant(
            discovery.server.issuer, discovery.resource, endpoint, client, self._parse_token(answer, scopes, scopes)
        )

    def _token_response(
        self, endpoint: str, issuer: str, client: ClientRegistration, fields: dict[str, str]
    ) -> Flow[FlowResponse]:
        """Send a token request and return the response; AuthorizationError unless its status is 200."""
        form, headers = dict(fields), {}
        secret = client.secret or self.client_secret
        match client.method:
            case "client_secret_basic":
                # RFC 6749, section 2.3.1; a space is not a plus, which some servers do not decode.
                pair = f"{quote(client.id, safe='')}:{quote(secret, safe='')}"
                headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
            case "client_secret_post":
                form |= {"client_id": client.id, "client_secret": secret}
            case "private_key_jwt":
                assertion = self._assertion(client.id, issuer)
                form |= {
                    "client_id": client.id,
                    "client_assertion_type": JWT_BEARER_ASSERTION,
                    "client_assertion": assertion,
                }
            case "none":
                form["client_id"] = client.id
            case other:
                raise AuthorizationError(f"the authorization server wants {other!a} of us, which we cannot do")
        answer: FlowResponse = yield FlowRequest(endpoint, form, headers)
        if answer.status != 200:
            refusal = _rejection("give a token", answer, secret, *(fields.get(name, "") for name in SECRET_FIELDS))
            # A response that is not the token endpoint's own, such as a proxy's, is no verdict on the credentials.
            raise refusal if refusal.error or answer.status in (400, 401) else AuthorizationError(refusal.text)
        return answer

    def _assertion(self, client_id: str, issuer: str) -> str:
        """Return the JWT that authenticates the client (RFC 7523); its audience is the issuer (RFC 7523bis)."""
        try:
            from joserfc import jwt
            from joserfc.errors import JoseError
            from joserfc.jwk import JWKRegistry
        except ModuleNotFoundError:
            raise missing_extra("auth", "a private_key needs joserfc") from None
        now, algorithm = int(self.clock()), self.signing_algorithm
        claims = {"iss": client_id, "sub": client_id, "aud": issuer, "jti": self.random(), "iat": now}
        try:
            key = JWKRegistry.import_key(self.private_key, KEY_TYPES[algorithm[:2]])
            claims["exp"] = now + ASSERTION_SECONDS
            return jwt.encode({"alg": algorithm}, claims, key, algorithms=[algorithm])
        except (JoseError, ValueError, TypeError, KeyError) as wrong:
            # Without its text, which may quote the key.
            raise AuthorizationError(f"private_key cannot sign with {algorithm!a} ({type(wrong).__name__})") from None

    def _parse_token(self, answer: FlowResponse, asked: tuple[str, ...], usual: tuple[str, ...]) -> Token:
        try:
            response = convert(answer.body, _TokenResponse, strict=False)
        except ValidationError as wrong:
            raise AuthorizationError(f"the authorization server's token cannot be read: {wrong}") from None
        if response.token_type.lower() != "bearer":
            raise AuthorizationError("the authorization server's token is not a bearer token, which we asked for")
        for text in (response.access_token, response.refresh_token or "-"):
            if len(text) > MAX_TOKEN_CHARS or not VISIBLE.fullmatch(text):
                raise AuthorizationError("the authorization server's token is too long, or does not look like one")
        granted = usual if response.scope is None else unique_scopes(response.scope.split())
        token = Token(response.access_token, response.refresh_token or "", asked, granted)
        if response.expires_in is None or not 0 <= response.expires_in < math.inf:
            return token
        now, early = self.clock(), min(RENEW_EARLY_SECONDS, response.expires_in / 10)
        return replace(token, renew_at=now + response.expires_in - early, expires_at=now + response.expires_in)


class _Registration(Struct):
    client_id: str
    client_secret: str | None = None
    client_secret_expires_at: float | None = None
    token_endpoint_auth_method: str | None = None


class _TokenResponse(Struct):
    access_token: str
    token_type: str
    expires_in: float | None = None
    refresh_token: str | None = None
    scope: str | None = None


def _check_code_flow(server: ServerMetadata) -> str:
    """Return the authorization endpoint; AuthorizationError without PKCE."""
    if "S256" not in (server.code_challenge_methods_supported or ()):
        raise AuthorizationError(f"the authorization server {server.issuer} does not offer PKCE with S256")
    if server.authorization_endpoint is None:
        raise AuthorizationError(f"the authorization server {server.issuer} has no authorization endpoint")
    return server.authorization_endpoint


def _choose_method(offered: Collection[str], preferred: tuple[str, ...]) -> str:
    return next((method for method in preferred if method in offered), preferred[0])


def _with_query(url: str, query: Mapping[str, str]) -> str:
    """Return `url` with `query`, which replaces parameters of the same name."""
    base, _, own = url.partition("?")
    own_pairs = [(name, value) for name, value in parse_qsl(own, keep_blank_values=True) if name not in query]
    return f"{base}?{urlencode([*own_pairs, *query.items()])}"


def _authorization_code(back: str, redirect: str, state: str, server: ServerMetadata) -> str:
    """Return the authorization code in the URL of the redirect, if it belongs to this request."""
    parts = urlsplit(back)
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        pairs = []
    params = dict(pairs)
    if not pairs or back.partition("?")[0] != redirect or parts.fragment or len(params) != len(pairs):
        raise AuthorizationError("what came back is not what an authorization server sends, or came to another address")
    if not hmac.compare_digest(params.get("state", "").encode(), state.encode()):
        raise AuthorizationError("what came back does not belong to this request: its `state` is another")
    # Before anything else is used, even an error: with another issuer it belongs to another request (RFC 9207).
    if params.get("iss", server.issuer) != server.issuer:
        raise AuthorizationError("what came back is from another authorization server than was asked")
    if server.authorization_response_iss_parameter_supported and "iss" not in params:
        raise AuthorizationError("what came back does not say which authorization server it is from, as promised")
    if "error" in params:
        raise _rejection("authorize us", FlowResponse(0, params), state)
    if not 0 < len(params.get("code", "")) <= MAX_TOKEN_CHARS:
        raise AuthorizationError("what came back has no authorization code in it")
    return params["code"]


def _rejection(what: str, answer: FlowResponse, *secrets: str) -> AuthorizationServerError:
    """Return the error for a refusal, with those parts of its text that are safe to show."""
    error = about = ""
    match answer.body:
        case {"error": str(text)} if ERROR.fullmatch(text):
            error = text
    match answer.body:
        case {"error_description": str(text)} if text.isprintable() and not any(s and s in text for s in secrets):
            about = f" ({text[:MAX_DESCRIPTION_CHARS]})"
    reason = error or (f"status {answer.status}" if answer.status else "no printable reason")
    return AuthorizationServerError(f"the authorization server does not {what}: {reason}{about}", error=error)
