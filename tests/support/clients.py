"""A client and a scripted server, over every transport: what tests of the client open."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import rigs_client  # noqa: F401  # its scripts
from handrail import Client
from requirements import record_ran
from rigs import HttpRig, Object, Rig, Script, command

R0, R1, R2, R3, R4, R5 = "2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"
P = "pocket"
LEGACY = (R0, R1, R2, R3, R4, P)
ALL = (*LEGACY, R5)


class Heard:
    """What a scripted server was asked, wherever it ran."""

    def __init__(self, rig: Rig, log: Path | None) -> None:
        self.rig = rig
        self._log = log

    @property
    def messages(self) -> list[Object]:
        if self._log is None:
            return self.rig.heard
        return [json.loads(line) for line in self._log.read_bytes().splitlines()] if self._log.exists() else []

    def asked(self, method: str) -> list[Object]:
        return [each for each in self.messages if each.get("method") == method]


OpenRig = Callable[..., AbstractAsyncContextManager[tuple[Client, Heard]]]


@pytest.fixture
def open_rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenRig:
    """`async with open_rig(script, revision, transport, **options of Client) as (client, heard)`.

    The script must be one of `rigs.SCRIPTS` to run over stdio. `prepare` may set up the rig beforehand, except there.
    """

    monkeypatch.setattr(
        "handrail.client.negotiation._handshake_servers", {}
    )  # a port may have been another rig's before

    @asynccontextmanager
    async def opened(
        script: Script | str,
        spoken: str,
        transport: str,
        /,
        *,
        prepare: Callable[[Any], None] | None = None,
        **options: Any,
    ) -> AsyncIterator[tuple[Client, Heard]]:
        options.setdefault("revision", spoken)
        options.setdefault("timeout", 10.0)
        record_ran(request, spoken, transport)
        rig = HttpRig(script, spoken) if transport == "http" else Rig(script, spoken)
        if prepare is not None:
            assert transport != "stdio", "a process cannot be prepared: write a script"
            prepare(rig)
        if transport == "memory":
            async with Client(rig, **options) as client:
                yield client, Heard(rig, None)
        elif isinstance(rig, HttpRig):
            async with rig.listening() as url, Client(url, **options) as client:
                yield client, Heard(rig, None)
        else:
            assert isinstance(script, str), "over stdio a script is named"
            log = tmp_path / f"{script}.log"
            async with Client(command(script, log, spoken), **options) as client:
                yield client, Heard(rig, log)

    return opened
