"""OAuth for a client: the token of each request, and authorization when a server refuses a request.

Login in the browser: open the page, and receive the redirect on a local listener, once.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import os
import re
import secrets
import time
import webbrowser
from collections.abc import Awaitable, Callable, Collection
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from copy import copy
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar
from urllib.parse import parse_qs, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from handrail.errors import AuthorizationError, Sent, TransportError
from handrail.oauth.credentials import Credentials, FileCredentials, MemoryCredentials
from handrail.oauth.flow import (
    INSUFFICIENT_SCOPE,
    OFFLINE_ACCESS,
    AuthorizationRequest,
    AuthorizationServerError,
    Challenge,
    ClientRegistration,
    Discovered,
    Flow,
    OAuthClient,
    PendingAuthorization,
    RegisteredAt,
    Token,
    TokenGrant,
    discover,
    origin,
    read_challenge,
    unique_scopes,
    validate_url,
)
from handrail.oauth.http import Outbound, Resolve, SingleFlight, require_aiohttp, resolve_host
from handrail.protocol.http_rules import PAGE, PAGE_FIELDS, is_local
from handrail.suggest import texts

log = logging.getLogger("handrail")

__all__ = ["OAuth", "RedirectListener", "SignInRequired", "open_browser"]

MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 16
READ_SECONDS = 10
HEADERS = "".join(f"{name.decode().title()}: {value.decode()}\r\n" for name, value in PAGE_FIELDS)
HEADERS += "Connection: close\r\n"
RESPONSES = {
    200: ("OK", "The answer has arrived. You can close this window."),
    400: ("Bad Request", "This is not the answer to a question that was asked."),
    404: ("Not Found", "There is nothing here."),
}


def open_browser(url: str, host: str = "") -> bool:
    """Open `url` in the user's browser, if it is https, or http to this machine; for `OAuth(browser=…)`.

    With this function every server may have a page of its authorization server opened without a question.
    """
    validate_url(url, "the page to open", local=True)
    return webbrowser.open(url)


class RedirectListener:
    """HTTP listener on this machine for the redirect of the browser to `redirect` (http, an address or localhost).

    A request without the right path, host and `state` is refused, and the listener continues to wait.
    """

    def __init__(self, redirect: str) -> None:
        self.redirect = redirect
        self._state = ""
        self._redirect_url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}

    async def start(self, *, any_port: bool) -> None:
        """Listen; with `any_port` on another port if that of `redirect` is in use. `redirect` gets the port."""
        parts = urlsplit(self.redirect)
        address = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
        listen = partial(asyncio.start_server, self._serve, address, limit=MAX_HEAD_BYTES)
        try:
            try:
                self._server = await listen(port=parts.port or 0)
            except OSError:
                if not any_port:
                    raise
                self._server = await listen(port=0)
        except OSError as failed:
            raise AuthorizationError(
                f"the browser cannot come back to {parts.netloc}: {failed.strerror}", hint="Give another `redirect`."
            ) from failed
        port = self._server.sockets[0].getsockname()[1]
        name = parts.netloc.removesuffix(f":{parts.port}")
        self.redirect = parts._replace(netloc=f"{name}:{port}").geturl()

    async def wait(self, state: str) -> str:
        """Return the URL of the first request with `state`."""
        self._state = state
        return await self._redirect_url

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._connections:
                writer.transport.abort()
            await asyncio.gather(*filter(None, self._connections.values()), return_exceptions=True)
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back = ""
        self._connections[writer] = asyncio.current_task()
        try:
            if len(self._connections) <= MAX_CONNECTIONS:
                async with asyncio.timeout(READ_SECONDS):
                    status, back = self._check_request(await reader.readuntil(b"\r\n\r\n"))
                    words, page = RESPONSES[status]
                    body = PAGE.format(page).encode()
                    head = f"HTTP/1.1 {status} {words}\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n"
                    writer.write(head.encode() + body)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # TimeoutError is an OSError
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            del self._connections[writer]
            if back and not self._redirect_url.done():
                self._redirect_url.set_result(back)

    def _check_request(self, head: bytes) -> tuple[int, str]:
        """Return the status to respond with, and the URL if it is the expected redirect."""
        first, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        target, _, version = rest.partition(" ")
        redirect_parts = urlsplit(self.redirect)
        path, _, query = target.partition("?")
        hosts = [line[5:].strip().lower() for line in lines if line[:5].lower() == "host:"]
        if (
            method != "GET"
            or not version.startswith("HTTP/1.")
            or path != redirect_parts.path
            or hosts != [redirect_parts.netloc]
        ):
            return 404, ""
        try:
            states = parse_qs(query, max_num_fields=32).get("state", [])
        except ValueError:
            states = []
        is_ours = len(states) == 1 and self._state and hmac.compare_digest(states[0].encode(), self._state.encode())
        if not is_ours:
            return 400, ""
        self._state = ""  # valid once
        return 200, f"{self.redirect}?{query}"


MAX_FRUITLESS_FLOWS = 3
MAX_FLOWS = 10
WINDOW_SECONDS = 600
MAX_ISSUERS = 8
UNKNOWN_CLIENT_ERRORS = ("invalid_client", "unauthorized_client")

BrowserResult = bool | str | None
Browser = Callable[[str, str], BrowserResult | Awaitable[BrowserResult]]
T = TypeVar("T")


class SignInRequired(AuthorizationError):
    """A caller of a gateway has to sign in at the authorization server first."""


class OAuth:
    """Authorization for `Client(url, auth=OAuth(…))`, at the authorization server that the MCP server names.

    >>> OAuth(browser=open_browser, folder="~/.config/example/credentials")
    >>> OAuth(grant="client_credentials", client_id="worker", client_secret=os.environ["SECRET"])

    `browser` is called with the URL to open and the host of the authorization server, and returns whether it was
    opened. Where there is no browser on this machine, it may return the URL of the redirect instead. A function that is
    not async runs in a thread. Without `client_id` the client registers itself, or uses the document at
    `client_metadata_url`. `issuer` is the authorization server of `client_id`; by default the first one that the server
    names. `scopes` limits the requested scopes; by default they are those the server requires. `audience` is what the
    token is for, at an authorization server that knows the MCP server by another name than its URL. Without `folder`
    tokens last as long as the process. `timeout` is the time for the login, in seconds.
    """

    def __init__(
        self,
        *,
        client_id: str | None = None,
        client_secret: str | None = None,
        client_metadata_url: str | None = None,
        issuer: str | None = None,
        scopes: Collection[str] | None = None,
        audience: str | None = None,
        redirect: str = "http://127.0.0.1:0/callback",
        browser: Browser | None = None,
        folder: str | os.PathLike[str] | None = None,
        private_key: str | None = None,
        signing_algorithm: str | None = None,
        grant: Literal["authorization_code", "client_credentials", "user"] = "authorization_code",
        timeout: float = 300,
        clock: Callable[[], float] = time.time,
        resolve: Resolve = resolve_host,
    ) -> None:
        require_aiohttp("OAuth")
        scope_names = None if scopes is None else texts("OAuth: scopes", scopes)
        if (client_secret or private_key) and not (client_id or client_metadata_url):
            raise ValueError("client_secret and private_key belong to a client_id")
        if (private_key is None) != (signing_algorithm is None):
            raise ValueError("private_key and signing_algorithm (ES256, for example) belong together")
        if grant == "client_credentials" and not (client_id and (client_secret or private_key)):
            raise ValueError("client_credentials needs a client_id, and a client_secret or private_key")
        if not re.fullmatch(r"|https://[!-~]+/[!-~]+", client_metadata_url or ""):
            raise ValueError("client_metadata_url: an https URL with a path is needed")
        parts = urlsplit(redirect)
        if not (parts.scheme == "https" or (parts.scheme == "http" and is_local(redirect) and parts.port is not None)):
            raise ValueError("redirect: http to 127.0.0.1 with a port (0 for any) is needed, or https")
        if parts.query or parts.fragment or not parts.path:
            raise ValueError("redirect: a path is needed, and nothing after it")
        self._oauth_client = OAuthClient(
            clock=clock,
            random=partial(secrets.token_urlsafe, 32),
            client_id=client_id or "",
            client_secret=client_secret or "",
            metadata_url=validate_url(client_metadata_url, "client_metadata_url", local=False)
            if client_metadata_url
            else "",
            private_key=private_key or "",
            signing_algorithm=signing_algorithm or "",
            scopes=None if scope_names is None else unique_scopes(scope_names),
            audience=audience or "",
            redirect=redirect,
        )
        self._issuer, self._uses_client_credentials = issuer, grant == "client_credentials"
        self.is_of_users = grant == "user"
        if self.is_of_users and (browser is not None or folder is not None):
            raise ValueError("grant='user': each caller of a gateway signs in; leave browser and folder out")
        self._browser, self._timeout, self._clock, self._resolve = browser, timeout, clock, resolve
        self._credentials: Credentials = MemoryCredentials()
        if folder is not None:
            self._credentials = FileCredentials(os.path.expanduser(folder))
        self._on_sign_in_required: Callable[[Challenge], None] | None = None
        self._servers: dict[str, _ServerState] = {}
        self._single_flight = SingleFlight()

    def __repr__(self) -> str:
        return f"OAuth({self._oauth_client.client_id or self._oauth_client.metadata_url!r})"

    def of_user(self, credentials: Credentials, on_sign_in_required: Callable[[Challenge], None]) -> OAuth:
        """Return the same for one caller of a gateway, who is never asked here: SignInRequired says that it has to be.

        `begin_sign_in` returns the page to open, and `finish_sign_in` takes the URL of the redirect, perhaps in another
        process.
        """
        of_user = copy(self)
        of_user.is_of_users, of_user._credentials, of_user._servers = False, credentials, {}
        of_user._single_flight, of_user._on_sign_in_required = SingleFlight(), on_sign_in_required
        return of_user

    async def begin_sign_in(
        self, url: str, challenge: Challenge, redirect: str, state: str, earlier: RegisteredAt | None
    ) -> PendingAuthorization:
        """Return the request for the user of the MCP server at `url`; `earlier` is of its last sign-in."""
        server = await self._server(url)
        discovery = await self._run(server, discover(url, challenge, self._issuer))
        if earlier is not None and earlier.issuer != discovery.server.issuer:  # whose client is none of the new one
            self._check_same_issuer(discovery.server.issuer)
            earlier = None
        registration = None if earlier is None else earlier.client
        client = await self._run(server, self._oauth_client.register(discovery, redirect, registration))
        held = server.grant.token.asked if server.grant else ()
        scopes = self._oauth_client.scopes_to_request(challenge, discovery, held)
        return self._oauth_client.authorization_request(discovery, client, redirect, scopes, state)

    async def finish_sign_in(self, url: str, pending: PendingAuthorization, back: str) -> TokenGrant:
        """Return the grant of a user who came back to the URL `back`; it is not stored yet."""
        return await self._run(await self._server(url), self._oauth_client.redeem(pending, back))

    def loopback_redirect(self, registration: ClientRegistration | None) -> str:
        """Return the redirect URL on this machine, with the port of a registration if there is one."""
        return self._oauth_client.redirect_for(registration)

    @property
    def redirect(self) -> str:
        """The redirect URL of the options."""
        return self._oauth_client.redirect

    async def headers(self, url: str) -> dict[str, str]:
        """Return the headers of a request to the MCP server at `url`; the token is renewed before it expires."""
        if self.is_of_users:
            raise AuthorizationError(
                "grant='user' is for the callers of a gateway; a client has one user: leave it out"
            )
        server = await self._server(url)
        if (grant := server.grant) and grant.token.renew_at <= self._clock():
            try:
                await self._single_flight.do(server.key, partial(self._renew, server, grant))
            except (
                AuthorizationError,
                TransportError,
            ) as failed:  # if the token is still needed, the server refuses the request
                log.debug("oauth: token for %s not renewed: %s", server.url, failed)
        grant = server.grant
        token = grant.token if grant and self._clock() < grant.token.expires_at else None
        LAST_USED.set((server, token))
        return {"Authorization": f"Bearer {token.access}"} if token else {}

    async def challenged(self, url: str, status: int, challenge: str) -> bool:
        """Get a token after the server refused a request; return whether to repeat the request.

        The user is asked once for all requests that are refused at once. AuthorizationError: there is no token.
        """
        bearer_challenge = read_challenge(challenge)
        if status != 401 and not (status == 403 and bearer_challenge.error == INSUFFICIENT_SCOPE):
            return False
        server = await self._server(url)
        at, used = LAST_USED.get()
        if at is not server:  # this task has asked for no headers: assume the current token
            used = server.grant.token if server.grant else None
        was_asked = False  # authorized for this request, not for another one

        async def authorize_once() -> None:
            nonlocal was_asked
            was_asked = True
            await self._reauthorize(server, used, bearer_challenge)

        try:
            while not was_asked and not self._is_better(server.grant, used, bearer_challenge):
                await self._single_flight.do(server.key, authorize_once)
        except AuthorizationError as failed:
            failed.server, failed.phase, failed.sent = origin(url), "authorization", Sent.FAILED
            raise
        except TransportError as failed:
            raise AuthorizationError(f"no token for {origin(url)}: {failed.text}") from failed
        return True

    async def close(self) -> None:
        """Cancel all authorizations under way; requests that wait for one fail."""
        await self._single_flight.close()

    async def _server(self, url: str) -> _ServerState:
        if (server := self._servers.get(url)) is None:
            validate_url(url.partition("#")[0], "the server's URL", local=True)
            client_name = self._oauth_client.client_id or self._oauth_client.metadata_url
            key = "\n".join((url, client_name, str(self._uses_client_credentials)))
            loaded = await self._credentials.load(key)
            server = self._servers.setdefault(url, _ServerState(url, key, next(iter(loaded), None)))
        elif self._credentials.is_live:
            server.grant = next(iter(await self._credentials.load(server.key)), None)
        return server

    def _is_better(self, grant: TokenGrant | None, used: Token | None, challenge: Challenge) -> bool:
        """Return whether `grant`, of another task or process, may satisfy the refused request."""
        return (
            grant is not None
            and (used is None or grant.token.access != used.access)
            and self._clock() < grant.token.expires_at
            and (challenge.error != INSUFFICIENT_SCOPE or {*challenge.scopes} <= {*grant.token.granted})
        )

    async def _renew(self, server: _ServerState, old: TokenGrant) -> None:
        """Renew the token before it expires, without the user and without discovery at the server."""
        async with self._credentials.lock(server.key):
            grants = await self._credentials.load(server.key)
            if grants and grants[0].token.access != old.token.access:
                server.grant = grants[0]  # another process was faster
                return
            if self._credentials.is_live and not grants:
                server.grant = None  # it was revoked
                return
            if old.token.refresh:
                try:
                    await self._store_grant(
                        server, await self._run(server, self._oauth_client.refresh(old)), locked=True
                    )
                except AuthorizationServerError:
                    server.grant = replace(old, token=replace(old.token, refresh=""))  # not tried again
                    raise
                return
        if self._uses_client_credentials:
            discovery = await self._run(server, discover(server.url, Challenge(), self._issuer))
            await self._store_grant(
                server, await self._run(server, self._oauth_client.client_credentials(discovery, old.token.asked))
            )

    async def _reauthorize(self, server: _ServerState, used: Token | None, challenge: Challenge) -> None:
        """Get a token after a refusal. The server may name another authorization server by now: discover it again."""
        if self._on_sign_in_required is not None and server.grant is None:
            self._raise_sign_in_required(server, challenge)
        discovery = await self._run(server, discover(server.url, challenge, self._issuer))
        issuer = discovery.server.issuer
        async with self._credentials.lock(server.key):
            grants = await self._credentials.load(server.key)
            stored_grant = next((grant for grant in grants if grant.issuer == issuer), None)
            # Not the old grant of an authorization server that was replaced and is back, if it can be refreshed.
            is_current = stored_grant is not None and (stored_grant is grants[0] or not stored_grant.token.refresh)
            if is_current and self._is_better(stored_grant, used, challenge):
                server.grant = stored_grant
                return
            if stored_grant is None and grants:
                self._check_same_issuer(issuer)
            scopes = self._oauth_client.scopes_to_request(
                challenge, discovery, stored_grant.token.asked if stored_grant else ()
            )
            if challenge.error == INSUFFICIENT_SCOPE and used and {*scopes} - {OFFLINE_ACCESS} <= {*used.granted}:
                raise AuthorizationError("the server refuses a token that has every scope it asks for")
            # If a refreshed token was refused, the next one will be too; and a refresh never adds scopes.
            is_in_vain = challenge.error == INSUFFICIENT_SCOPE or (used is not None and used == server.last_refreshed)
            # Whether a refresh gives the same as a new authorization.
            is_enough = (
                stored_grant
                and stored_grant.resource == discovery.resource
                and {*scopes} <= {*stored_grant.token.asked}
            )
            if stored_grant and stored_grant.token.refresh and is_enough and not is_in_vain:
                try:
                    grant = await self._run(server, self._oauth_client.refresh(stored_grant))
                except AuthorizationServerError as rejected:
                    log.debug("oauth: refresh token for %s rejected: %s", server.url, rejected.error)
                    if rejected.error in UNKNOWN_CLIENT_ERRORS:
                        server.clients[issuer] = None
                else:
                    server.last_refreshed = grant.token
                    await self._store_grant(server, grant, locked=True)
                    return
        if self._on_sign_in_required is not None:
            self._raise_sign_in_required(server, challenge)
        spent = used or (stored_grant.token if stored_grant else None)
        has_expired = spent is not None and spent.expires_at <= self._clock()
        server.check_flow_limit(self._clock())
        if self._uses_client_credentials:
            grant = await self._run(server, self._oauth_client.client_credentials(discovery, scopes))
        else:
            client = server.clients.get(issuer, stored_grant.client if stored_grant else None)
            grant = await self._authorize_user(server, discovery, scopes, client)
        await self._store_grant(server, grant)
        if not has_expired:  # replacing an expired token is normal and does not count
            server.flows.append((self._clock(), bool(used and {*grant.token.granted} - {*used.granted})))

    def _check_same_issuer(self, issuer: str) -> None:
        """Refuse an authorization server that the MCP server has not named before: it would get a client's secret."""
        if self._oauth_client.client_id and self._issuer is None:
            raise AuthorizationError(
                f"the server now names another authorization server than that of the client_id: {issuer}",
                hint="If that is right, give it as `issuer`.",
            )

    def _raise_sign_in_required(self, server: _ServerState, challenge: Challenge) -> NoReturn:
        assert self._on_sign_in_required is not None
        self._on_sign_in_required(challenge)
        raise SignInRequired(f"{origin(server.url)} wants its user to sign in")

    async def _authorize_user(
        self,
        server: _ServerState,
        discovery: Discovered,
        scopes: tuple[str, ...],
        registration: ClientRegistration | None,
    ) -> TokenGrant:
        """Get a token by the consent of the user, who is sent to the authorization server and back."""
        issuer, redirect = discovery.server.issuer, self._oauth_client.redirect_for(registration)
        receiver = RedirectListener(redirect) if is_local(redirect) else None
        try:
            if receiver is not None:
                await receiver.start(any_port=urlsplit(self._oauth_client.redirect).port == 0)
                redirect = receiver.redirect
            client = await self._run(server, self._oauth_client.register(discovery, redirect, registration))
            # An authorization server that does not know a client any more may show that only to the user, so an old
            # registration is not tried twice. A new one is stored for the next try, even without a redirect this time.
            server.clients[issuer] = None if client is registration else client
            grant = await self._run(server, self._oauth_client.authorize(discovery, client, redirect, scopes), receiver)
        finally:
            if receiver is not None:
                await receiver.close()
        server.clients[issuer] = client
        return grant

    async def _store_grant(self, server: _ServerState, grant: TokenGrant, *, locked: bool = False) -> None:
        """Use and store `grant`. `locked`: the caller holds the lock."""
        server.grant = grant
        try:
            async with nullcontext() if locked else self._credentials.lock(server.key):
                others = [each for each in await self._credentials.load(server.key) if each.issuer != grant.issuer]
                await self._credentials.save(server.key, [grant, *others][:MAX_ISSUERS])
        except SignInRequired:
            server.grant = None  # it was revoked meanwhile
            raise
        except AuthorizationError as failed:  # it is usable all the same, for the lifetime of this process
            log.warning("oauth: token for %s not stored: %s", origin(server.url), failed)

    async def _run(self, server: _ServerState, flow: Flow[T], receiver: RedirectListener | None = None) -> T:
        """Run the steps of `flow` and return its result."""
        reply: Any = None
        outbound = Outbound(server.url, resolve=self._resolve)
        try:
            while True:
                match flow.send(reply):
                    case AuthorizationRequest() as step:
                        reply = await self._open_and_wait(step, receiver)
                    case step:
                        reply = await outbound.send(step)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()

    async def _open_and_wait(self, step: AuthorizationRequest, receiver: RedirectListener | None) -> str:
        """Return the URL of the redirect, from the receiver or from the browser function."""
        validate_url(step.url.partition("?")[0], "the page to open", local=True)
        host = urlsplit(step.issuer).netloc
        tasks = {asyncio.create_task(self._open_page(step.url, host))}
        if receiver is not None:
            tasks.add(asyncio.create_task(receiver.wait(step.state)))
        try:
            async with asyncio.timeout(self._timeout):
                while tasks:
                    done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        if back := task.result():
                            return back
        except TimeoutError:
            raise AuthorizationError(f"nobody came back from {host} in {self._timeout:g} s") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise AuthorizationError(f"no redirect can come back from {host}: the browser function has to return its URL")

    async def _open_page(self, url: str, host: str) -> str:
        if self._browser is None:
            raise AuthorizationError(
                f"somebody has to log in at {host}, and nobody is there to be asked",
                hint="Give OAuth(browser=…): `open_browser`, or a function that shows the URL to the user.",
            )
        if inspect.iscoroutinefunction(self._browser):
            opened: BrowserResult | Awaitable[BrowserResult] = self._browser(url, host)
        else:
            opened = await asyncio.to_thread(self._browser, url, host)
        if inspect.isawaitable(opened):
            opened = await opened
        if not opened:
            raise AuthorizationError(f"the page of {host} was not opened: the user, or the browser function, said no")
        return opened.strip() if isinstance(opened, str) else ""


class _ServerState(Struct):
    """The authorization state of one MCP server."""

    url: str
    key: str
    grant: TokenGrant | None
    clients: dict[str, ClientRegistration | None] = {}  # by issuer; None: do not use the stored one
    last_refreshed: Token | None = None  # the last refresh after a refusal
    flows: list[tuple[float, bool]] = []  # when each ended, and whether it added scopes

    def check_flow_limit(self, now: float) -> None:
        """Raise if the server has refused too many new tokens: it must not cause endless logins."""
        self.flows = [flow for flow in self.flows if now - flow[0] < WINDOW_SECONDS]
        fruitless = sum(not was_fruitful for _, was_fruitful in self.flows)
        if len(self.flows) >= MAX_FLOWS or fruitless >= MAX_FRUITLESS_FLOWS:
            raise AuthorizationError(
                f"the server has refused {len(self.flows)} new tokens in {WINDOW_SECONDS // 60} minutes"
            )


# The server and token of the last `headers` of a task: a late refusal may be about a token that was replaced since.
LAST_USED: ContextVar[tuple[_ServerState | None, Token | None]] = ContextVar("last_used", default=(None, None))
