"""OAuth for a client: what is sent with a request, and what is done when a server refuses one for want of a token."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from handrail.errors import AuthorizationError, Sent, TransportError
from handrail.oauth.callback import RedirectListener, open_browser
from handrail.oauth.credentials import FileCredentials, MemoryCredentials
from handrail.oauth.discovery import (
    AuthorizationRequest,
    Challenge,
    Discovered,
    Flow,
    discover,
    origin,
    read_challenge,
    unique_scopes,
    validate_url,
)
from handrail.oauth.flow import (
    INSUFFICIENT_SCOPE,
    OFFLINE_ACCESS,
    AuthorizationServerError,
    ClientRegistration,
    OAuthClient,
    Token,
    TokenGrant,
)
from handrail.oauth.http import Outbound, Resolve, SingleFlight, require_aiohttp, resolve_host
from handrail.protocol.http_rules import is_local
from handrail.suggest import texts

__all__ = ["OAuth", "open_browser"]

log = logging.getLogger("handrail")

MAX_FRUITLESS_FLOWS = 3
MAX_FLOWS = 10
WINDOW_SECONDS = 600
MAX_ISSUERS = 8
UNKNOWN_CLIENT_ERRORS = ("invalid_client", "unauthorized_client")

BrowserResult = bool | str | None
Browser = Callable[[str, str], BrowserResult | Awaitable[BrowserResult]]
T = TypeVar("T")


class OAuth:
    """Authorization for `Client(url, auth=OAuth(…))`, at whichever authorization server the server names.

    >>> OAuth(browser=open_browser, folder="~/.config/example/credentials")
    >>> OAuth(grant="client_credentials", client_id="worker", client_secret=os.environ["SECRET"])

    `browser` is called with the URL to open and the host of the authorization server, and says whether it was opened;
    it may return the URL the user was sent back to instead, where there is no browser on this machine. A function that
    is not async runs in a thread. Without `client_id` the client registers itself, or is what the document at
    `client_metadata_url` says. `issuer` is the authorization server that knows `client_id`; otherwise it is the first
    that was met. `scopes` is all that may ever be asked for; otherwise what the server wants. Without `folder` tokens
    are gone with the process. `timeout` is for somebody to log in, in seconds.
    """

    def __init__(
        self,
        *,
        client_id: str | None = None,
        client_secret: str | None = None,
        client_metadata_url: str | None = None,
        issuer: str | None = None,
        scopes: Collection[str] | None = None,
        redirect: str = "http://127.0.0.1:0/callback",
        browser: Browser | None = None,
        folder: str | os.PathLike[str] | None = None,
        private_key: str | None = None,
        signing_algorithm: str | None = None,
        grant: Literal["authorization_code", "client_credentials"] = "authorization_code",
        timeout: float = 300,
        clock: Callable[[], float] = time.time,
        resolve: Resolve = resolve_host,
    ) -> None:
        require_aiohttp("OAuth")
        scope_names = None if scopes is None else texts("OAuth: scopes", scopes)
        if (client_secret or private_key) and not (client_id or client_metadata_url):
            raise ValueError("client_secret and private_key belong to a client_id")
        if (private_key is None) != (signing_algorithm is None):
            raise ValueError("private_key and signing_algorithm (ES256, for example) are given together")
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
            redirect=redirect,
        )
        self._issuer, self._uses_client_credentials = issuer, grant == "client_credentials"
        self._browser, self._timeout, self._clock, self._resolve = browser, timeout, clock, resolve
        self._credentials = MemoryCredentials() if folder is None else FileCredentials(os.path.expanduser(folder))
        self._servers: dict[str, _ServerState] = {}
        self._single_flight = SingleFlight()

    def __repr__(self) -> str:
        return f"OAuth({self._oauth_client.client_id or self._oauth_client.metadata_url!r})"

    async def headers(self, url: str) -> dict[str, str]:
        """What goes with a request to the MCP server at `url`; its token is renewed shortly before it expires."""
        server = self._server(url)
        if (grant := server.grant) and grant.token.renew_at <= self._clock():
            try:
                await self._single_flight.do(server.key, partial(self._renew, server, grant))
            except (AuthorizationError, TransportError) as failed:  # the server will say whether that matters
                log.debug("the token for %s was not renewed: %s", server.url, failed)
        grant = server.grant
        token = grant.token if grant and self._clock() < grant.token.expires_at else None
        LAST_USED.set((server, token))
        return {"Authorization": f"Bearer {token.access}"} if token else {}

    async def challenged(self, url: str, status: int, challenge: str) -> bool:
        """Get what the server wants after it refused a request; whether to try that once more.

        However many requests are refused at once, somebody is asked once. AuthorizationError says why it was in vain.
        """
        bearer_challenge = read_challenge(challenge)
        if status != 401 and not (status == 403 and bearer_challenge.error == INSUFFICIENT_SCOPE):
            return False
        server = self._server(url)
        at, used = LAST_USED.get()
        if at is not server:  # not asked for in this task: then it was the one at hand
            used = server.grant.token if server.grant else None
        was_asked = False  # for this request, and not for what another one needed

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
        """End what is under way; those who wait are told."""
        await self._single_flight.close()

    def _server(self, url: str) -> _ServerState:
        if (server := self._servers.get(url)) is None:
            validate_url(url.partition("#")[0], "the server's URL", local=True)
            client_name = self._oauth_client.client_id or self._oauth_client.metadata_url
            key = "\n".join((url, client_name, str(self._uses_client_credentials)))
            server = self._servers[url] = _ServerState(url, key, next(iter(self._credentials.load(key)), None))
        return server

    def _is_better(self, grant: TokenGrant | None, used: Token | None, challenge: Challenge) -> bool:
        """Whether `grant`, got by another task or process, may be what the refused request lacked."""
        return (
            grant is not None
            and (used is None or grant.token.access != used.access)
            and self._clock() < grant.token.expires_at
            and (challenge.error != INSUFFICIENT_SCOPE or {*challenge.scopes} <= {*grant.token.granted})
        )

    async def _renew(self, server: _ServerState, old: TokenGrant) -> None:
        """Before it expires: without asking anybody, and without asking the server where."""
        async with self._credentials.lock(server.key):
            grants = self._credentials.load(server.key)
            if grants and grants[0].token.access != old.token.access:
                server.grant = grants[0]  # another process was faster
                return
            if old.token.refresh:
                try:
                    await self._store_grant(
                        server, await self._run(server, self._oauth_client.refresh(old)), locked=True
                    )
                except AuthorizationServerError:
                    server.grant = replace(old, token=replace(old.token, refresh=""))  # it is not tried again
                    raise
                return
        if self._uses_client_credentials:
            discovery = await self._run(server, discover(server.url, Challenge(), self._issuer))
            await self._store_grant(
                server, await self._run(server, self._oauth_client.client_credentials(discovery, old.token.asked))
            )

    async def _reauthorize(self, server: _ServerState, used: Token | None, challenge: Challenge) -> None:
        """After a refusal. Its server may have another authorization server by now, so it is asked again."""
        discovery = await self._run(server, discover(server.url, challenge, self._issuer))
        issuer = discovery.server.issuer
        async with self._credentials.lock(server.key):
            grants = self._credentials.load(server.key)
            stored_grant = next((grant for grant in grants if grant.issuer == issuer), None)
            # Not an old one, of an authorization server that was left and is back: better a new one, if that is easy.
            is_current = stored_grant is not None and (stored_grant is grants[0] or not stored_grant.token.refresh)
            if is_current and self._is_better(stored_grant, used, challenge):
                server.grant = stored_grant
                return
            if stored_grant is None and grants and self._oauth_client.client_id and self._issuer is None:
                raise AuthorizationError(
                    f"the server now names another authorization server than that of the client_id: {issuer}",
                    hint="If that is right, give it as `issuer`.",
                )
            scopes = self._oauth_client.scopes_to_request(
                challenge, discovery, stored_grant.token.asked if stored_grant else ()
            )
            if challenge.error == INSUFFICIENT_SCOPE and used and {*scopes} - {OFFLINE_ACCESS} <= {*used.granted}:
                raise AuthorizationError("the server refuses a token that has every scope it asks for")
            # If what a refresh gave was refused, so will be what the next one gives; and none gives more scopes.
            is_in_vain = challenge.error == INSUFFICIENT_SCOPE or (used is not None and used == server.last_refreshed)
            # Whether a refresh gives what asking anew would.
            is_enough = (
                stored_grant
                and stored_grant.resource == discovery.resource
                and {*scopes} <= {*stored_grant.token.asked}
            )
            if stored_grant and stored_grant.token.refresh and is_enough and not is_in_vain:
                try:
                    grant = await self._run(server, self._oauth_client.refresh(stored_grant))
                except AuthorizationServerError as rejected:
                    log.debug("the refresh token for %s is not good any more: %s", server.url, rejected.error)
                    if rejected.error in UNKNOWN_CLIENT_ERRORS:
                        server.clients[issuer] = None
                else:
                    server.last_refreshed = grant.token
                    await self._store_grant(server, grant, locked=True)
                    return
        spent = used or (stored_grant.token if stored_grant else None)
        has_expired = spent is not None and spent.expires_at <= self._clock()
        server.check_flow_limit(self._clock())
        if self._uses_client_credentials:
            grant = await self._run(server, self._oauth_client.client_credentials(discovery, scopes))
        else:
            client = server.clients.get(issuer, stored_grant.client if stored_grant else None)
            grant = await self._authorize_user(server, discovery, scopes, client)
        await self._store_grant(server, grant)
        if not has_expired:  # to get another for one that has is what tokens are for
            server.flows.append((self._clock(), bool(used and {*grant.token.granted} - {*used.granted})))

    async def _authorize_user(
        self,
        server: _ServerState,
        discovery: Discovered,
        scopes: tuple[str, ...],
        registration: ClientRegistration | None,
    ) -> TokenGrant:
        """A token by the consent of somebody who is sent to the authorization server, and back."""
        issuer, redirect = discovery.server.issuer, self._oauth_client.redirect_for(registration)
        receiver = RedirectListener(redirect) if is_local(redirect) else None
        try:
            if receiver is not None:
                await receiver.start(any_port=urlsplit(self._oauth_client.redirect).port == 0)
                redirect = receiver.redirect
            client = await self._run(server, self._oauth_client.register(discovery, redirect, registration))
            # An authorization server that has forgotten a client may tell nobody but the user: it is not tried twice.
            # One that is new is kept for the next try, even if nobody comes back this time.
            server.clients[issuer] = None if client is registration else client
            grant = await self._run(server, self._oauth_client.authorize(discovery, client, redirect, scopes), receiver)
        finally:
            if receiver is not None:
                await receiver.close()
        server.clients[issuer] = client
        return grant

    async def _store_grant(self, server: _ServerState, grant: TokenGrant, *, locked: bool = False) -> None:
        """Use `grant` from now on. `locked`: whoever calls has the lock."""
        server.grant = grant
        try:
            async with nullcontext() if locked else self._credentials.lock(server.key):
                others = [each for each in self._credentials.load(server.key) if each.issuer != grant.issuer]
                await asyncio.to_thread(self._credentials.save, server.key, [grant, *others][:MAX_ISSUERS])
        except AuthorizationError as failed:  # it is good all the same, for as long as this process lives
            log.warning("the token for %s is not kept: %s", origin(server.url), failed)

    async def _run(self, server: _ServerState, flow: Flow[T], receiver: RedirectListener | None = None) -> T:
        """Do what `flow` says, to its end."""
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
        """The URL somebody came back to: at the receiver, or as the browser function says."""
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
        raise AuthorizationError(f"nobody can come back from {host}: the browser function has to say where he was sent")

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
    """What is known of one MCP server."""

    url: str
    key: str
    grant: TokenGrant | None
    clients: dict[str, ClientRegistration | None] = {}  # by issuer; None if the one that is kept is not to be used
    last_refreshed: Token | None = None  # the last that came of a refusal
    flows: list[tuple[float, bool]] = []  # when one came to its end, and whether it brought more scopes

    def check_flow_limit(self, now: float) -> None:
        """A server that refuses every token cannot keep us asking for more."""
        self.flows = [flow for flow in self.flows if now - flow[0] < WINDOW_SECONDS]
        fruitless = sum(not was_fruitful for _, was_fruitful in self.flows)
        if len(self.flows) >= MAX_FLOWS or fruitless >= MAX_FRUITLESS_FLOWS:
            raise AuthorizationError(
                f"the server has refused {len(self.flows)} new tokens in {WINDOW_SECONDS // 60} minutes"
            )


# The server, and the token for it, that a task asked for last: so that a refusal that comes late is known for what it
# is, that of a token which has been replaced since.
LAST_USED: ContextVar[tuple[_ServerState | None, Token | None]] = ContextVar("last_used", default=(None, None))
