"""Which revision a server speaks, found out without hurting old ones (REVISIONS, section 2)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from handrail.errors import CallTimeout, HttpRefused, RemoteProtocolError, TransportError
from handrail.model import Json, Object
from handrail.revisions import REVISIONS, Revision
from handrail.transports.base import Waiting

if TYPE_CHECKING:
    from handrail.client.connection import Dialog

log = logging.getLogger("handrail")

MAX_KNOWN = 10_000
PROBE_SECONDS = 2.0  # of silence on a pipe, until an old server is thought of
_MODERN = frozenset({-32020, -32021, -32022})
_VERSION = -32022
_OLD_TRANSPORT = frozenset({400, 404, 405})
_NO_VERDICT = frozenset({401, 403, 408, 429})  # about the caller or the moment, not about what is spoken

_OFFERED = [each for each in REVISIONS.values() if each.offered]
_STATELESS = [each for each in _OFFERED if each.stateless]
_HANDSHAKE = [each for each in _OFFERED if not each.stateless]

_old: set[str] = set()  # servers that turned out to shake hands; one that is new asks again by itself


class Era:
    """The opening of a dialog."""

    def __init__(self, dialog: Dialog, wanted: str, key: str) -> None:
        if wanted not in ("auto", "legacy") and wanted not in REVISIONS:
            raise ValueError(f"unknown revision {wanted!r}; known are auto, legacy, {', '.join(REVISIONS)}")
        self._dialog = dialog
        self._wanted = REVISIONS.get(wanted)
        self._probes = wanted == "auto"
        self._key = key  # under which the verdict is remembered
        self._status = 0  # over HTTP, that of the last answer

    async def settle(self) -> None:
        """Agree with the server on a revision; PeerError if there is none."""
        dialog, wanted = self._dialog, self._wanted
        if wanted is not None and wanted.stateless:
            if not await self._discover(wanted):
                raise RemoteProtocolError(f"the server does not speak {wanted.name}", hint='Try revision="auto"')
            return
        if not self._probes or self._key in _old:
            try:
                await self.shake_hands()
                return
            except (RemoteProtocolError, HttpRefused) as refused:
                if not self._probes or _says_nothing(self._status):
                    raise
                log.debug("%s: %s; asked anew what it speaks", dialog.name, refused)
                _old.discard(self._key)
        if not await self._probe():
            await self.shake_hands()
        if dialog.revision is not None and not dialog.revision.stateless and self._key and len(_old) < MAX_KNOWN:
            _old.add(self._key)

    async def _probe(self) -> bool:
        """Agree without a handshake, if the server is of that kind; False if it seems not to be."""
        dialog, link = self._dialog, self._dialog.link
        assert link is not None
        try:
            patience = min(PROBE_SECONDS, dialog.clocks.first / 2)
            return await self._discover(_STATELESS[-1], None if link.disconnect_cancels else patience)
        except TransportError as died:
            if link.disconnect_cancels or isinstance(died, HttpRefused):
                raise
            # Some old servers end when they hear anything before the handshake.
            log.debug("%s: ended when asked what it speaks; started again", dialog.name)
            await dialog.start()
            return False

    async def _discover(self, revision: Revision, patience: float | None = None) -> bool:
        """Agree with a server of the stateless kind; False if it turned out to be of the other kind."""
        dialog = self._dialog
        for _ in range(3):
            flight = dialog.begin("server/discover", {}, dialog.clocks, revision=revision)
            if patience is not None:
                await asyncio.wait({flight.future}, timeout=patience)
                if not flight.future.done():
                    return await self._both(flight, revision)
            try:
                return self._welcomed(await dialog.result(flight), revision)
            except RemoteProtocolError as refused:
                another = self._other_version(refused, flight.status)
                if another is None:
                    return False
                revision = another
            except HttpRefused as refused:
                if 400 <= refused.status < 500 and not _says_nothing(refused.status):
                    return False
                raise
        raise RemoteProtocolError("changes its mind about the versions it supports")

    async def _both(self, probe: Waiting, revision: Revision) -> bool:
        """Nothing was heard yet. An old server may say nothing to what it does not know; a slow one answers both."""
        dialog = self._dialog
        shake = self._begin_handshake()
        await asyncio.wait({probe.future, shake.future}, return_when=asyncio.FIRST_COMPLETED)
        if not probe.future.done() and isinstance(shake.future.exception(), RemoteProtocolError):
            await asyncio.wait({probe.future})  # of the new kind, and quick to say what it does not know
        if probe.future.done():
            try:
                if self._welcomed(await dialog.result(probe), revision):
                    dialog.forget(shake)
                    return True
            except (RemoteProtocolError, CallTimeout) as refused:
                log.debug("%s: %s", dialog.name, refused)
        self._shaken(await dialog.result(shake))
        dialog.forget(probe)
        return True

    def _other_version(self, refused: RemoteProtocolError, status: int) -> Revision | None:
        """What to try instead; None: a handshake. Raises if the refusal says nothing about it."""
        if _says_nothing(status):
            raise refused
        if refused.code not in _MODERN:
            return None
        supported = refused.data.get("supported") if type(refused.data) is dict else None
        if refused.code != _VERSION or type(supported) is not list:
            raise refused
        for each in reversed(_STATELESS):
            if each.name in supported:  # also the one it has just refused: then it has changed its mind
                return each
        if self._probes and any(each.name in supported for each in _HANDSHAKE):
            return None
        refused.hint = f"It supports {', '.join(map(str, supported[:10]))}"
        raise refused

    def _welcomed(self, welcome: Object, revision: Revision) -> bool:
        supported: Json = welcome.get("supportedVersions")
        if type(supported) is not list or type(welcome.get("capabilities")) is not dict:
            return False  # whatever it answers to every question
        self._dialog.agree(revision, welcome)
        return True

    async def shake_hands(self) -> None:
        """The handshake, on the transport there is; over HTTP also on the older one."""
        dialog = self._dialog
        assert dialog.link is not None
        flight = self._begin_handshake()
        try:
            welcome = await dialog.result(flight)
        except (HttpRefused, RemoteProtocolError) as refused:
            self._status = flight.status
            if flight.status not in _OLD_TRANSPORT or not await dialog.link.fall_back():
                raise
            log.debug("%s: the transport of 2024, because of %s", dialog.name, refused)
            welcome = await dialog.result(self._begin_handshake())
        self._shaken(welcome)

    def _begin_handshake(self) -> Waiting:
        dialog, wanted = self._dialog, self._wanted or _HANDSHAKE[-1]
        capabilities = wanted.declare(dialog.host.capabilities)
        params = {"protocolVersion": wanted.name, "capabilities": capabilities, "clientInfo": dialog.me}
        return dialog.begin("initialize", params, dialog.clocks)

    def _shaken(self, welcome: Object) -> None:
        named: Json = welcome.get("protocolVersion")
        revision = REVISIONS.get(named) if type(named) is str else None
        strict = self._wanted is not None
        if revision is None or revision.stateless or (strict and revision is not self._wanted):
            raise RemoteProtocolError(
                f"the server wants to speak {str(named)[:60]!r}",
                hint=f"Asked for was {(self._wanted or _HANDSHAKE[-1]).name}; spoken here are {', '.join(REVISIONS)}",
            )
        if type(welcome.get("capabilities")) is not dict:
            raise RemoteProtocolError("the answer to initialize has no capabilities")
        self._dialog.agree(revision, welcome)
        self._dialog.notify("notifications/initialized")


def _says_nothing(status: int) -> bool:
    """Return whether a refusal with this status tells nothing about the revision."""
    return status in _NO_VERDICT or status >= 500
