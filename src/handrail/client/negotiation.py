"""Negotiation of the revision, without breaking old servers (REVISIONS, section 2)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from handrail import jsonrpc
from handrail.errors import CallTimeout, HttpRefused, RemoteProtocolError, TransportError
from handrail.model import Json, Object
from handrail.revisions import REVISIONS, Revision
from handrail.transports.base import PendingRequest

if TYPE_CHECKING:
    from handrail.client.connection import ClientConnection

log = logging.getLogger("handrail")

MAX_REMEMBERED_SERVERS = 10_000
PROBE_SECONDS = 2.0  # of silence on a pipe before `initialize` is sent too, for an old server
_STATELESS_ERRORS = frozenset({-32020, -32021, -32022})
_UNSUPPORTED_VERSION = -32022
_SSE_FALLBACK_STATUSES = frozenset({400, 404, 405})
_INCONCLUSIVE_STATUSES = frozenset({401, 403, 408, 429})  # about the caller or the moment, not about the revision

_OFFERED = [each for each in REVISIONS.values() if each.offered]
_STATELESS = [each for each in _OFFERED if each.stateless]
_HANDSHAKE = [each for each in _OFFERED if not each.stateless]

VERDICT_SECONDS = 3600.0  # for so long, a server that needed `initialize` is not probed for a newer revision
_handshake_servers: dict[str, float] = {}  # when servers, by their keys, were found to need `initialize`


class Negotiation:
    """The negotiation of the revision of one connection."""

    def __init__(self, connection: ClientConnection, revision_name: str, key: str) -> None:
        if revision_name not in ("auto", "legacy") and revision_name not in REVISIONS:
            raise ValueError(f"unknown revision {revision_name!r}; use one of auto, legacy, {', '.join(REVISIONS)}")
        self._connection = connection
        self._pinned_revision = REVISIONS.get(revision_name)
        self._is_auto = revision_name == "auto"
        self._key = key  # of the server in _handshake_servers
        self._status = 0  # HTTP status of the last response

    async def run(self) -> None:
        """Agree with the server on a revision; PeerError if none fits."""
        connection, pinned_revision = self._connection, self._pinned_revision
        if pinned_revision is not None and pinned_revision.stateless:
            if not await self._discover(pinned_revision):
                raise RemoteProtocolError(
                    f"the server does not speak {pinned_revision.name}", hint='Try revision="auto"'
                )
            return
        verdict_at = _handshake_servers.get(self._key, float("-inf"))
        if not self._is_auto or connection.now() - verdict_at < VERDICT_SECONDS:
            try:
                await self.initialize()
                return
            except (RemoteProtocolError, HttpRefused) as refused:
                if not self._is_auto or _is_inconclusive(self._status):
                    raise
                log.debug("client: %s: initialize refused: %s; probing again", connection.name, refused)
                _handshake_servers.pop(self._key, None)
        if not await self._probe():
            await self.initialize()
        if (
            connection.revision is not None
            and not connection.revision.stateless
            and self._key
            and len(_handshake_servers) < MAX_REMEMBERED_SERVERS
        ):
            _handshake_servers[self._key] = connection.now()

    async def _probe(self) -> bool:
        """Try `server/discover`; return False if the server seems to need `initialize`."""
        connection, transport = self._connection, self._connection.transport
        assert transport is not None
        try:
            wait_seconds = min(PROBE_SECONDS, connection.clocks.first / 2)
            return await self._discover(_STATELESS[-1], None if transport.disconnect_cancels else wait_seconds)
        except TransportError as error:
            if transport.disconnect_cancels or isinstance(error, HttpRefused):
                raise
            # Some old servers exit when a message comes before `initialize`.
            log.debug("client: %s: server exited on server/discover; restarting it", connection.name)
            await connection.start()
            return False

    async def _discover(self, revision: Revision, wait_seconds: float | None = None) -> bool:
        """Agree on a stateless revision; return False if the server has none."""
        connection = self._connection
        for _ in range(3):
            pending = connection.start_request("server/discover", {}, connection.clocks, revision=revision)
            if wait_seconds is not None:
                await asyncio.wait({pending.future}, timeout=wait_seconds)
                if not pending.future.done():
                    return await self._probe_and_initialize(pending, revision)
            try:
                return self._accept_discovery(await connection.result(pending), revision)
            except RemoteProtocolError as refused:
                other_revision = self._other_version(refused, pending.status)
                if other_revision is None:
                    return False
                revision = other_revision
            except HttpRefused as refused:
                if 400 <= refused.status < 500 and not _is_inconclusive(refused.status):
                    return False
                raise
        raise RemoteProtocolError("changes its mind about the versions it supports")

    async def _probe_and_initialize(self, probe: PendingRequest, revision: Revision) -> bool:
        """Send `initialize` beside the probe: an old server may ignore the probe, a slow one answers both."""
        connection = self._connection
        handshake = self._send_initialize()
        await asyncio.wait({probe.future, handshake.future}, return_when=asyncio.FIRST_COMPLETED)
        if not probe.future.done() and isinstance(handshake.future.exception(), RemoteProtocolError):
            await asyncio.wait(
                {probe.future}
            )  # a stateless server, which refuses `initialize` before it answers the probe
        if probe.future.done():
            try:
                if self._accept_discovery(await connection.result(probe), revision):
                    connection.discard(handshake)
                    return True
            except (RemoteProtocolError, CallTimeout) as refused:
                log.debug("client: %s: probe refused: %s", connection.name, refused)
        self._accept_initialize(await connection.result(handshake))
        connection.discard(probe)
        return True

    def _other_version(self, refused: RemoteProtocolError, status: int) -> Revision | None:
        """Return the revision to try next, None for `initialize`. Raise if the refusal does not tell."""
        if _is_inconclusive(status):
            raise refused
        if refused.code not in _STATELESS_ERRORS:
            return None
        supported = refused.data.get("supported") if type(refused.data) is dict else None
        if refused.code != _UNSUPPORTED_VERSION or type(supported) is not list:
            raise refused
        for each in reversed(_STATELESS):
            if each.name in supported:  # also the revision it has just refused: it may accept that now
                return each
        if self._is_auto and any(each.name in supported for each in _HANDSHAKE):
            return None
        refused.hint = f"It supports {', '.join(map(str, supported[:10]))}"
        raise refused

    def _accept_discovery(self, result: Object, revision: Revision) -> bool:
        supported: Json = result.get("supportedVersions")
        if type(supported) is not list or type(result.get("capabilities")) is not dict:
            return False  # perhaps its response to every method
        self._connection.use_revision(revision, result)
        return True

    async def initialize(self) -> None:
        """Send `initialize`; over HTTP also on the transport of 2024 if the first is refused."""
        connection = self._connection
        assert connection.transport is not None
        pending = self._send_initialize()
        try:
            result = await connection.result(pending)
        except (HttpRefused, RemoteProtocolError) as refused:
            self._status = pending.status
            if pending.status not in _SSE_FALLBACK_STATUSES or not await connection.transport.fall_back():
                raise
            log.debug("client: %s: falling back to the transport of 2024: %s", connection.name, refused)
            result = await connection.result(self._send_initialize())
        self._accept_initialize(result)

    def _send_initialize(self) -> PendingRequest:
        connection, offered_revision = self._connection, self._pinned_revision or _HANDSHAKE[-1]
        capabilities = offered_revision.declare(connection.handler.capabilities)
        params = {
            "protocolVersion": offered_revision.name,
            "capabilities": capabilities,
            "clientInfo": connection.client_info,
        }
        return connection.start_request("initialize", params, connection.clocks)

    def _accept_initialize(self, result: Object) -> None:
        version: Json = result.get("protocolVersion")
        revision = REVISIONS.get(version) if type(version) is str else None
        strict = self._pinned_revision is not None
        if revision is None or revision.stateless or (strict and revision is not self._pinned_revision):
            raise RemoteProtocolError(
                f"the server wants to speak {str(version)[:60]!r}",
                hint=f"Asked for was {(self._pinned_revision or _HANDSHAKE[-1]).name}; "
                f"spoken here are {', '.join(REVISIONS)}",
            )
        if type(result.get("capabilities")) is not dict:
            raise RemoteProtocolError("the answer to initialize has no capabilities")
        self._connection.use_revision(revision, result)
        self._connection.send_message(jsonrpc.notification("notifications/initialized"))


def _is_inconclusive(status: int) -> bool:
    """Return whether a refusal with this status says nothing about the revision."""
    return status in _INCONCLUSIVE_STATUSES or status >= 500
