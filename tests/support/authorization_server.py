"""An authorization server (Authlib's) and an MCP server it guards, over real sockets on this machine.

Authlib judges what it has rules for: clients and their secrets, redirects, PKCE, refresh tokens. What MCP adds is here:
the metadata, the `resource` of each request, and tokens that are good for one resource only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp import web
from authlib.oauth2 import JsonRequest, OAuth2Request
from authlib.oauth2.rfc6749 import AuthorizationServer, ClientMixin, JsonPayload, OAuth2Error, TokenMixin, grants
from authlib.oauth2.rfc6749.requests import BasicOAuth2Payload
from authlib.oauth2.rfc7523 import JWTBearerClientAssertion
from authlib.oauth2.rfc7591 import ClientRegistrationEndpoint
from authlib.oauth2.rfc7636 import CodeChallenge
from authlib.oauth2.rfc9207 import IssuerParameter
from joserfc.jwk import ECKey

from handrail.model import Object

METHODS = ["none", "client_secret_basic", "client_secret_post", "private_key_jwt"]
GRANTS = ["authorization_code", "refresh_token", "client_credentials"]


class Client(ClientMixin):
    """As registered; `public_key` is for one that signs."""

    def __init__(self, ident: str, secret: str, about: Mapping[str, Any], public_key: str = "") -> None:
        self.client_id, self.client_secret, self.about, self.public_key = ident, secret, about, public_key

    def get_client_id(self) -> str:
        return self.client_id

    def get_default_redirect_uri(self) -> str:
        return ""

    def get_allowed_scope(self, scope: Any) -> str:
        return str(scope or "")

    def check_redirect_uri(self, redirect_uri: str) -> bool:
        return redirect_uri in [*self.about["redirect_uris"]]

    def check_client_secret(self, client_secret: str) -> bool:
        return self.client_secret == client_secret

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return method == str(self.about["token_endpoint_auth_method"])

    def check_response_type(self, response_type: str) -> bool:
        return response_type == "code"

    def check_grant_type(self, grant_type: str) -> bool:
        return grant_type in [*self.about["grant_types"]]


class Code:
    """An authorization code, which counts once."""

    def __init__(self, client: str, asked: Mapping[str, str]) -> None:
        self.client, self.asked = client, asked
        self.code_challenge, self.code_challenge_method = asked["code_challenge"], asked["code_challenge_method"]

    def get_redirect_uri(self) -> str:
        return self.asked["redirect_uri"]

    def get_scope(self) -> str:
        return self.asked.get("scope", "")


class Issued(TokenMixin):
    """What one answer of the token endpoint gave."""

    def __init__(self, client: str, scope: str, resource: str, refresh: str, expires_at: float) -> None:
        self.client, self.scope, self.resource = client, scope, resource
        self.refresh, self.expires_at = refresh, expires_at
        self.is_withdrawn = False

    def check_client(self, client: ClientMixin) -> bool:
        return client.get_client_id() == self.client

    def get_scope(self) -> str:
        return self.scope


class Judge(AuthorizationServer):
    """Authlib's authorization server, as wide as this test needs it."""

    def __init__(self, home: Home) -> None:
        super().__init__()
        self.home = home
        self.register_grant(CodeGrant, [CodeChallenge(required=True)])
        self.register_grant(RefreshGrant)
        self.register_grant(ClientGrant)
        self.register_client_auth_method("private_key_jwt", Assertion(home))
        self.register_extension(Issuer(home))
        loose: Any = self  # what follows is right, but not by the stubs
        loose.register_endpoint(Registration)
        loose.register_token_generator("default", self.token)

    def token(self, include_refresh_token: bool = True, scope: str | None = None, **_: object) -> Object:
        number = next(self.home.numbers)
        token: Object = {"token_type": "Bearer", "access_token": f"access-{number}"}
        if self.home.lifetime is not None:
            token["expires_in"] = self.home.lifetime
        if scope:
            token["scope"] = " ".join(word for word in scope.split() if word not in self.home.withholds)
        if include_refresh_token and self.home.gives_refresh:
            token["refresh_token"] = f"refresh-{number}"
        return token

    def query_client(self, client_id: str) -> Any:
        return self.home.clients.get(client_id)

    def save_token(self, token: Mapping[str, Any], request: OAuth2Request) -> None:
        assert request.client is not None
        expires_at = self.home.clock() + (self.home.lifetime or 10**9)
        refresh, scope = token.get("refresh_token", ""), token.get("scope", "")
        ident, resource = request.client.get_client_id(), request.form["resource"]
        self.home.issued[token["access_token"]] = Issued(ident, scope, resource, refresh, expires_at)

    def send_signal(self, name: str, *args: object, **kwargs: object) -> None:
        pass

    def create_oauth2_request(self, request: Any) -> OAuth2Request:
        return request if isinstance(request, OAuth2Request) else Asked(*request)

    def create_json_request(self, request: Any) -> JsonRequest:
        return JsonAsked(*request)

    def handle_response(self, status: int, body: Any, headers: Any) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return Answered(status=status, text=text, headers=dict(headers))


class Answered(web.Response):
    """With the one thing in reach that an extension of Authlib wants to change."""

    @property
    def location(self) -> str | None:
        return self.headers.get("Location")

    @location.setter
    def location(self, value: str) -> None:
        self.headers["Location"] = value


class Asked(OAuth2Request):
    def __init__(self, method: str, uri: str, fields: dict[str, str], headers: Mapping[str, str]) -> None:
        super().__init__(method, uri, None, headers)
        self.payload = BasicOAuth2Payload(fields)
        self._fields = fields

    @property
    def form(self) -> dict[str, str]:
        return self._fields

    @property
    def args(self) -> dict[str, str | None]:
        return dict(self._fields)


class JsonAsked(JsonRequest):
    def __init__(self, method: str, uri: str, data: Object, headers: Mapping[str, str]) -> None:
        super().__init__(method, uri, headers)
        self.payload = JsonData(data)


class JsonData(JsonPayload):
    def __init__(self, data: Object) -> None:
        self._data = data

    @property
    def data(self) -> Object:
        return self._data


class CodeGrant(grants.AuthorizationCodeGrant):
    TOKEN_ENDPOINT_AUTH_METHODS = METHODS
    server: Judge

    def save_authorization_code(self, code: str, request: OAuth2Request) -> None:
        assert request.client is not None
        self.server.home.codes[code] = Code(request.client.get_client_id(), request.form)

    def query_authorization_code(self, code: str, client: ClientMixin) -> Code | None:
        found = self.server.home.codes.get(code)
        return found if found and found.client == client.get_client_id() else None

    def delete_authorization_code(self, authorization_code: Code) -> None:
        codes = self.server.home.codes
        del codes[next(code for code, about in codes.items() if about is authorization_code)]

    def authenticate_user(self, authorization_code: Code) -> str:
        return "alice"


class RefreshGrant(grants.RefreshTokenGrant):
    TOKEN_ENDPOINT_AUTH_METHODS = METHODS
    INCLUDE_NEW_REFRESH_TOKEN = True
    server: Judge

    def authenticate_refresh_token(self, refresh_token: str) -> Any:
        issued = self.server.home.issued.values()
        return next((each for each in issued if each.refresh == refresh_token and not each.is_withdrawn), None)

    def authenticate_user(self, refresh_token: object) -> str:
        return "alice"

    def revoke_old_credential(self, refresh_token: TokenMixin) -> None:
        assert isinstance(refresh_token, Issued)
        refresh_token.is_withdrawn = True


class ClientGrant(grants.ClientCredentialsGrant):
    TOKEN_ENDPOINT_AUTH_METHODS = METHODS[1:]


class Assertion(JWTBearerClientAssertion):
    def __init__(self, home: Home) -> None:
        super().__init__()
        self.home, self.seen = home, set[str]()

    def verify_claims(self, claims: dict[str, Any]) -> None:
        """As Authlib does, but by the clock of the test."""
        is_good = claims["iss"] == claims["sub"] and claims["aud"] == self.home.issuer
        if not is_good or not claims["iat"] <= self.home.clock() < claims["exp"] or claims["jti"] in self.seen:
            raise OAuth2Error("the assertion is not good")
        self.seen.add(claims["jti"])

    def authenticate_client(self, client: Client) -> Client:
        return client  # Authlib has a name of its own for the method, which no client is registered for

    def resolve_client_public_key(self, client: Client) -> ECKey:
        return ECKey.import_key(client.public_key)


class Registration(ClientRegistrationEndpoint):
    server: Judge

    def authenticate_token(self, request: object) -> bool:
        return True

    def get_server_metadata(self) -> Object:
        return self.server.home.metadata()

    def generate_client_id(self, request: object) -> str:
        return f"client-{next(self.server.home.numbers)}"

    def save_client(self, client_info: Object, client_metadata: Object, request: object) -> Client:
        client = Client(client_info["client_id"], client_info["client_secret"], client_metadata)
        self.server.home.clients[client.client_id] = client
        return client


class Issuer(IssuerParameter):
    def __init__(self, home: Home) -> None:
        self.home = home

    def get_issuer(self) -> str | None:
        return self.home.issuer


class Home:
    """One server with both roles. What a test changes is an attribute; what came is in `asked`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.numbers = iter(range(1, 10**6))
        self.clients: dict[str, Client] = {}
        self.codes: dict[str, Code] = {}
        self.issued: dict[str, Issued] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.lifetime: int | None = 3600
        self.gives_refresh = True
        self.needs: tuple[str, ...] = ()
        self.says_no = False
        self.refuses = False  # every token
        self.is_down = False
        self.withholds: tuple[str, ...] = ()  # scopes
        self.more_metadata: Object = {}
        self.servers: list[str] = []
        self.holds = "refresh_token"  # requests of this grant wait for `held`
        self.held = asyncio.Event()
        self.held.set()
        self.refresh_came = asyncio.Event()
        self.judge: Any = Judge(self)
        self.issuer = self.url = ""

    def metadata(self) -> Object:
        said = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "registration_endpoint": f"{self.issuer}/register",
            "response_types_supported": ["code"],
            "grant_types_supported": GRANTS,
            "token_endpoint_auth_methods_supported": METHODS,
            "code_challenge_methods_supported": ["S256"],
            "authorization_response_iss_parameter_supported": True,
        }
        return said | self.more_metadata

    def knows(
        self, ident: str, secret: str, method: str, *, public_key: str = "", redirects: tuple[str, ...] = ()
    ) -> None:
        """Register a client by hand."""
        about = {"redirect_uris": redirects, "token_endpoint_auth_method": method, "grant_types": GRANTS}
        self.clients[ident] = Client(ident, secret, about, public_key)

    def count(self, path: str, **fields: str) -> int:
        """How many requests came to `path` with `fields`."""
        return sum(at == path and fields.items() <= had.items() for at, had in self.asked)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Home]:
        app = web.Application(middlewares=[self._noted])
        app.router.add_get("/.well-known/oauth-protected-resource/mcp", self._resource)
        app.router.add_get("/.well-known/oauth-authorization-server", self._server)
        app.router.add_get("/authorize", self._authorize)
        app.router.add_post("/token", self._token)
        app.router.add_post("/register", self._register)
        app.router.add_post("/mcp", self._mcp)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.issuer = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.url, self.servers = f"{self.issuer}/mcp", [self.issuer]
        try:
            yield self
        finally:
            self.held.set()
            await runner.cleanup()

    async def agree(self, url: str, host: str) -> bool:
        """A browser whose user agrees, or as `says_no` has it; it goes where it is sent."""
        assert host == urlsplit(self.servers[0]).netloc
        async with aiohttp.ClientSession() as session, session.get(await self.paste(url, host)) as response:
            return response.status == 200

    async def paste(self, url: str, host: str) -> str:
        """Where such a browser would be sent."""
        async with aiohttp.ClientSession() as session, session.get(url, allow_redirects=False) as response:
            assert response.status == 302, await response.text()
            return urljoin(url, response.headers["Location"])

    @web.middleware
    async def _noted(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if request.path == "/register":
            fields = {name: str(value) for name, value in (await request.json()).items()}
        else:
            fields = {**request.query, **{name: str(value) for name, value in (await request.post()).items()}}
        for name in ("Authorization", "Cookie"):
            if name in request.headers:
                fields[name] = request.headers[name]
        self.asked.append((request.path, fields))
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _resource(self, request: web.Request) -> web.Response:
        return web.json_response({"resource": self.url, "authorization_servers": self.servers})

    async def _server(self, request: web.Request) -> web.Response:
        return web.json_response(self.metadata())

    async def _authorize(self, request: web.Request) -> web.Response:
        assert request.query["resource"] == self.url
        asked = Asked("GET", str(request.url), dict(request.query), request.headers)
        try:
            grant = self.judge.get_consent_grant(asked, end_user="alice")
        except OAuth2Error as wrong:
            return web.Response(status=400, text=str(wrong))
        user = None if self.says_no else "alice"
        answer = self.judge.create_authorization_response(asked, grant_user=user, grant=grant)
        assert isinstance(answer, web.Response)
        return answer

    async def _token(self, request: web.Request) -> web.Response:
        fields = {name: str(value) for name, value in (await request.post()).items()}
        if self.is_down:
            return web.Response(status=503)
        if fields["grant_type"] == self.holds:
            self.refresh_came.set()
            await self.held.wait()
        code = self.codes.get(fields.get("code", ""))
        if code is not None and code.asked["resource"] != fields.get("resource"):
            return web.json_response({"error": "invalid_target"}, status=400)
        answer = self.judge.create_token_response(("POST", str(request.url), fields, request.headers))
        assert isinstance(answer, web.Response)
        return answer

    async def _register(self, request: web.Request) -> web.Response:
        asked = ("POST", str(request.url), await request.json(), request.headers)
        answer = self.judge.create_endpoint_response("client_registration", asked)
        assert isinstance(answer, web.Response)
        return answer

    async def _mcp(self, request: web.Request) -> web.Response:
        where = f'resource_metadata="{self.issuer}/.well-known/oauth-protected-resource/mcp"'
        scope = f', scope="{" ".join(self.needs)}"' if self.needs else ""
        token = self.issued.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if token is None or token.resource != self.url or self.clock() >= token.expires_at or self.refuses:
            return web.Response(status=401, headers={"WWW-Authenticate": f"Bearer {where}{scope}"})
        if not {*self.needs} <= {*token.scope.split()}:
            told = f'Bearer error="insufficient_scope", {where}{scope}'
            return web.Response(status=403, headers={"WWW-Authenticate": told})
        return web.json_response({"token": request.headers["Authorization"]})
