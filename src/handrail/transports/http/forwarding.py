"""Requests that one replica passes on to another, which has the upstream process of their caller.

The other replica does all that is to be done with a request: it identifies the caller, guards the call and records it.
A sealed header tells it that the request was passed on, and for which address. It counts for that message only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from handrail.engine.core import Engine, Holder
from handrail.engine.dispatcher import Dispatcher
from handrail.engine.guard_set import owner_of
from handrail.errors import Kind, Refused
from handrail.jsonrpc import Request
from handrail.protocol.http_rules import NAME_PARAMS
from handrail.stores import StoreError

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from handrail.transports.http.exchange import Exchange

__all__ = ["HEADER", "STOPPING", "Forwarder", "digest_of", "origin_in"]

log = logging.getLogger("handrail")

HEADER = b"handrail-forwarded"
STOPPING = b"stopping"  # the value of the header in a response: the other replica stops, and has not begun the request
CONNECT_SECONDS = 2.0
LOOK_SECONDS = 5.0  # between two looks whether the other replica still has its lease
HEADER_SECONDS = 2 * 3600  # the clocks of replicas may differ
MAX_FORWARDED = 1_000  # requests at a time; each has a connection
_PURPOSE = "forwarded"
_HOP_HEADERS = frozenset(
    b"connection content-length date expect keep-alive server te trailer transfer-encoding upgrade".split()
)
"""Headers of one connection, and those that each server writes by itself."""
_KINDS: dict[str, Any] = {"tools/call": "tool", "prompts/get": "prompt", "resources/read": "resource"}


def origin_in(engine: Engine, header: bytes) -> tuple[str, str] | None:
    """Return for which address and which message another replica passed a request on; None if no replica wrote it."""
    payload = engine.seal.open(_PURPOSE, "", header.decode("latin-1"), engine.clock())
    match payload:
        case [str(address), str(digest)]:
            return address, digest
    return None


def digest_of(body: bytes) -> str:
    return blake2b(body, digest_size=16).hexdigest()


class Forwarder:
    """Passes requests on to other replicas, from one endpoint."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._http: ClientSession | None = None
        self.tasks: set[asyncio.Future[bool]] = set()  # requests that other replicas work on

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def holder(self, exchange: Exchange, conversation: Dispatcher, request: Request) -> Holder | None:
        """Return the replica that has to handle a request; None: this one. A request that is wrong is `Refused`."""
        upstreams, params, member = self._engine.upstreams, request.params, NAME_PARAMS.get(request.method)
        name = params.get(member) if member is not None and type(params) is dict else None
        if upstreams is None or type(name) is not str:
            return None
        kind = _KINDS[request.method]
        entry, _ = self._engine.find(kind, name)
        if entry is None:  # not listed here yet, perhaps
            revision = conversation.connection.revision_of(request)
            parsed = conversation.connection.parse_params(request, revision)
            client = conversation.client_of(revision, parsed)
            ready = upstreams.prepare(f"{kind}s/list", conversation, revision, client)
            if ready is not None:
                await ready
                entry, _ = self._engine.find(kind, name)
        if entry is None or not upstreams.is_leased(entry):
            return None
        return await upstreams.other_holder(entry, owner_of(exchange.principal, exchange.peer))

    async def forward(self, exchange: Exchange, holder: Holder) -> bool:
        """Pass a request on, and its response back; return False if the other replica cannot be reached."""
        import aiohttp  # the extra "http" has it; few servers pass anything on

        if len(self.tasks) >= MAX_FORWARDED:
            raise Refused(Kind.OVERLOADED, "Too many requests are passed on to other replicas; wait for some to end")
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        work = asyncio.ensure_future(self._exchange(exchange, holder, self._http))
        self.tasks.add(work)
        work.add_done_callback(self.tasks.discard)
        disconnected = asyncio.ensure_future(exchange.response.wait_disconnected())
        try:
            while not work.done():
                await asyncio.wait([work, disconnected], timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if disconnected.done():
                    return True  # to cancel the other request tells the other replica
                if not work.done() and not await _still_holds(holder):
                    raise aiohttp.ServerDisconnectedError("it does not renew its lease")
            if work.result():
                return True
            log.info("http: replica at %s stops, its caller is served elsewhere", holder.address)
        except aiohttp.ClientConnectorCertificateError as problem:  # to take the lease would not mend that
            log.error("http: replica at %s: certificate refused, see `advertise`: %s", holder.address, problem)
            raise Refused(Kind.INTERNAL, "The replica that handles this cannot be reached; it was not called") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as problem:
            log.warning("http: replica at %s not reachable: %s", holder.address, problem)
        except (aiohttp.ClientError, OSError) as problem:
            if not exchange.response.is_begun:
                raise _lost(holder, problem) from None
            log.warning("http: response of the replica at %s ended early: %s", holder.address, problem)
            await exchange.response.write(b"", more=False)
            return True
        finally:
            for task in (work, disconnected):
                task.cancel()
        with contextlib.suppress(StoreError):
            await holder.give_up()
        return False

    async def _exchange(self, exchange: Exchange, holder: Holder, http: ClientSession) -> bool:
        """Send a request to the other replica, and what it responds to the client; False: it stops, and did nothing."""
        expires = int(self._engine.clock()) + HEADER_SECONDS
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in exchange.headers.items()
            if name not in _HOP_HEADERS
        }
        origin = [exchange.peer, digest_of(exchange.raw)]
        headers[HEADER.decode()] = self._engine.seal.seal(_PURPOSE, "", origin, expires)
        async with http.post(holder.address, data=exchange.raw, headers=headers, allow_redirects=False) as response:
            if response.status == 503 and response.headers.get(HEADER.decode()) == STOPPING.decode():
                return False
            raw_headers = ((name.lower(), value) for name, value in response.raw_headers)
            fields = [(name, value) for name, value in raw_headers if name not in _HOP_HEADERS]
            if response.content_type != "text/event-stream":
                exchange.response.whole = (response.status, fields, await response.read())
                return True
            await exchange.response.begin_with(response.status, fields)
            async for piece in response.content.iter_any():
                await exchange.response.write(piece)
        await exchange.response.write(b"", more=False)
        return True


async def _still_holds(holder: Holder) -> bool:
    try:
        return await holder.still_holds()
    except StoreError:  # not known
        return True


def _lost(holder: Holder, problem: object) -> Refused:
    log.error("http: replica at %s lost during a request: %s", holder.address, problem)
    text = "The replica that handles this went away: it is not known whether it was done"
    return Refused(Kind.INTERNAL, text)
