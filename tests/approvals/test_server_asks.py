"""A client that leaves the question about destructive tools to the server: promised by it, and kept."""

from __future__ import annotations

from typing import Any

import pytest

from handrail import Server
from handrail.approvals.queue import Approvals
from handrail.guards.policy import Policy
from handrail.model import Object
from handrail.testing import Peer
from requirements import requirement

LEAVES: Object = {"elicitation": {}, "experimental": {"handrail-server-asks": {}}}
FORMS: Object = {"elicitation": {}}


def shop(ran: list[str], **options: Any) -> Server:
    server = Server("shop", **options)

    @server.tool(annotations={"destructiveHint": True})
    async def wipe() -> str:
        """Wipes."""
        ran.append("wipe")
        return "wiped"

    @server.tool
    async def look() -> str:
        """Looks."""
        ran.append("look")
        return "seen"

    return server


@requirement("CLI-27", everywhere=True)
@pytest.mark.parametrize("revision", ["2025-06-18", "2025-11-25", "2026-07-28"])
@pytest.mark.parametrize(
    ("declared", "by", "promised"),
    [
        (LEAVES, "anyone", True),
        (LEAVES, "caller", True),
        (LEAVES, "operator", False),
        (LEAVES, "another", False),
        (FORMS, "anyone", False),
        ({"experimental": LEAVES["experimental"]}, "anyone", False),
    ],
    ids=["anyone", "caller", "operator", "another", "not left", "cannot be asked"],
)
async def test_what_is_promised_is_asked_and_nothing_else(
    revision: str, declared: Object, by: Any, promised: bool
) -> None:
    ran: list[str] = []
    asked: list[str] = []

    def answers(method: str, params: Object) -> Object:
        asked.append(params["message"])
        return {"action": "decline"}

    server = shop(ran, policy=Policy(destructive="allow"), approvals=Approvals(by=by))
    async with Peer(server, revision=revision, capabilities=declared, answers=answers) as peer:
        method = "server/discover" if revision == "2026-07-28" else "initialize"
        params = {} if method == "server/discover" else _handshake(revision, declared)
        capabilities = (await peer.request(method, params))["result"]["capabilities"]
        assert ("handrail-server-asks" in capabilities.get("experimental", {})) is promised
        assert ("experimental" in capabilities) is promised, "others see no difference"
        wiped = await peer.call("wipe", {})
        assert not (await peer.call("look", {})).is_error
    assert len(asked) == promised and wiped.is_error is promised
    assert ran == (["look"] if promised else ["wipe", "look"])


def _handshake(revision: str, declared: Object) -> Object:
    return {"protocolVersion": revision, "capabilities": declared, "clientInfo": {"name": "x", "version": "1"}}
