"""An MCP server over HTTP that takes tokens of the authorization server of the tests, and of no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from hashlib import sha256

from authorization_server import Home
from handrail import Call, Principal, Server
from handrail.model import Object
from servers_listen import listening


def name_of(token: str) -> str:
    """What the upstream calls the holder of a token: no test sees the token itself in a result."""
    return f"user-{sha256(token.encode()).hexdigest()[:12]}"


class Upstream:
    """The server, the tokens that came with its calls, and a switch that lists tools to strangers too."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.url = ""
        self.seen: list[tuple[str, str]] = []  # the token of each call, and the mark in its arguments
        self.offered: set[str] = set()  # all tokens that came, good or not
        self.metadata: Object | None = None
        self.begun, self.gate = asyncio.Event(), asyncio.Event()  # of a call of `hold`

    async def verify(self, token: str) -> Principal | None:
        self.offered.add(token)
        issued = self.home.issued.get(token)
        is_good = issued is not None and issued.resource == self.url and not self.home.refuses
        if not is_good or issued is None or self.home.clock() >= issued.expires_at:
            return None
        return Principal(token, frozenset(issued.scope.split()))

    async def close(self) -> None:
        pass

    @property
    def tokens(self) -> set[str]:
        """All tokens that were ever issued, and the refresh tokens."""
        refresh = {each.refresh for each in self.home.issued.values() if each.refresh}
        return {*self.home.issued, *refresh}


@asynccontextmanager
async def authorized_upstream(
    revisions: Iterable[str] = ("2025-06-18",), lifetime: int = 3600
) -> AsyncIterator[Upstream]:
    """An authorization server, and the MCP server that it issues tokens for."""
    async with Home(time.time).running() as home:
        home.lifetime = lifetime
        upstream = Upstream(home)
        # rates: a test may make more calls than any caller
        server = Server("upstream", revisions=revisions, rates=None, instructions="canary-instructions")

        @server.tool(read_only=True)
        async def whoami(call: Call, mark: str = "") -> str:
            """Return who calls."""
            upstream.seen.append((call.principal.id, mark))
            return name_of(call.principal.id)

        @server.tool(destructive=False)
        async def hold(call: Call) -> str:
            """Return who calls, when the gate is opened."""
            upstream.begun.set()
            await upstream.gate.wait()
            return name_of(call.principal.id)

        @server.tool(read_only=True, scopes=["write"])
        async def write(call: Call) -> str:
            """Return who calls, if the token has the scope."""
            return name_of(call.principal.id)

        upstream.metadata = {"authorization_servers": [home.issuer]}
        endpoint = server.asgi(auth=upstream)
        async with server.serving(), listening(endpoint) as url:
            home.url = upstream.url = url + endpoint.path
            yield upstream
