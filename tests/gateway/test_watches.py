"""Updates of resources: subscribed to at an upstream as long as a client of the gateway is, and told to its owner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from gateways_operated import Place, behind, operated, place, upstream_of
from handrail import Principal
from handrail.gateway import upstreams as gateway_upstreams
from handrail.testing import Peer
from patience import PATIENCE
from requirements import requirement
from rigs_gateway import Rig, running
from scripted_upstream import R1, R4, R5
from wires import Wire
from wires_gateway import LegWire

Ran = Callable[[str, str], None]

BOTH, ONE = "notes://both", "notes://one"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
UPDATED = "notifications/resources/updated"


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_upstreams, "CHECK_SECONDS", 0.01)


@asynccontextmanager
async def announcing(dialect: str) -> AsyncIterator[Rig]:
    """An upstream with two resources."""
    async with running(dialect, "http") as rig:
        upstream_of(rig).resources = [BOTH, ONE]
        yield rig


def update(rig: Rig, uri: str) -> None:
    for session in upstream_of(rig).sessions:
        session.update(uri)


def count(rig: Rig, kind: str, uri: str) -> int:
    return sum(event["kind"] == kind and event["mark"] == uri for event in rig.events if "mark" in event)


class Subscribed:
    """A client of the gateway that is subscribed to resources."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.listen = 0

    @classmethod
    async def to(cls, gateway: Place, revision: str, uris: Sequence[str]) -> Subscribed:
        client = cls(await gateway.client(revision))
        listed = (await client.wire.request("resources/list"))["result"]["resources"]
        assert [each["uri"] for each in listed] == [BOTH, ONE]
        if client.wire.stateless:
            asked = {"notifications": {"resourceSubscriptions": list(uris)}}
            client.listen = await client.wire.ask("subscriptions/listen", asked)
            await client.wire.notice(ACKNOWLEDGED)
        else:
            for uri in uris:
                assert "result" in await client.wire.request("resources/subscribe", {"uri": uri})
        return client

    async def leave(self, how: str, uris: Sequence[str]) -> None:
        if how == "ends":
            await self.wire.close()
        elif not self.listen:
            for uri in uris:
                assert "result" in await self.wire.request("resources/unsubscribe", {"uri": uri})
        elif isinstance(self.wire, LegWire):
            await self.wire.hang_up(self.listen)
        else:
            await self.wire.notify("notifications/cancelled", {"requestId": self.listen})

    async def told(self) -> str:
        return str((await self.wire.notice(UPDATED))["params"]["uri"])


@requirement("GW-11")
@pytest.mark.parametrize("how", ["unsubscribes", "ends"])
@pytest.mark.parametrize("leg", ["memory", "http"])
@pytest.mark.parametrize("revision", [R1, R4, R5])
@pytest.mark.parametrize("dialect", [R4, R5])
async def test_a_subscription_ends_with_its_last_subscriber(
    dialect: str, revision: str, leg: str, how: str, ran: Ran
) -> None:
    async with announcing(dialect) as rig, place(leg, [behind(rig, name="up")]) as gateway:
        ran(revision, leg)
        first = await Subscribed.to(gateway, revision, [BOTH, ONE])
        second = await Subscribed.to(gateway, revision, [BOTH])
        for uri in (BOTH, ONE):
            await rig.became("watched", uri)
            assert count(rig, "watched", uri) == 1
        update(rig, BOTH)
        assert [await first.told(), await second.told()] == [BOTH, BOTH]
        await first.leave(how, [BOTH, ONE])
        await rig.became("unwatched", ONE)
        assert not count(rig, "unwatched", BOTH)
        update(rig, BOTH)
        assert await second.told() == BOTH
        await second.leave(how, [BOTH])
        await rig.became("unwatched", BOTH)
        third = await Subscribed.to(gateway, revision, [BOTH])  # and begins again with the next one
        await rig.wait(lambda event: event["kind"] == "watched" and event["mark"] == BOTH, 2)
        update(rig, BOTH)
        assert await third.told() == BOTH


@requirement("GW-11")
async def test_what_comes_over_the_session_of_one_owner_is_told_to_that_owner(ran: Ran) -> None:
    async with announcing(R4) as rig:
        server = operated([behind(rig, name="up")])

        def caller(name: str) -> Peer:
            return Peer(server, revision=R4, principal=Principal(name), timeout=PATIENCE)

        async with server.serving(), caller("alice") as alice, caller("bob") as bob:
            ran(R4, "memory")
            for peer in (alice, bob):
                await peer.request("resources/list")
                await peer.request("resources/subscribe", {"uri": BOTH})
            await rig.wait(lambda event: event["kind"] == "watched", 2)
            sessions = [each["session"] for each in rig.events if each["kind"] == "watched"]
            assert len(set(sessions)) == 2
            for session in upstream_of(rig).sessions:
                if session.number == sessions[0]:
                    session.update(BOTH)
            told = await alice.notice(UPDATED)
            assert told["params"] == {"uri": BOTH}
            await bob.request("ping")
            assert not [each for each in bob.notices if each["method"] == UPDATED]


async def test_a_subscription_is_there_again_when_its_upstream_is(ran: Ran) -> None:
    async with announcing(R4) as rig, place("memory", [behind(rig, name="up")]) as gateway:
        ran(R4, "memory")
        client = await Subscribed.to(gateway, R4, [BOTH])
        await rig.became("watched", BOTH)
        upstream = gateway.server.upstreams["up"]
        await upstream.stop()
        upstream.start()
        await rig.wait(lambda event: event["kind"] == "watched", 2)
        update(rig, BOTH)
        assert await client.told() == BOTH
