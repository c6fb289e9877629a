"""Replicas of a gateway: a command runs in one of them for each caller, and the others pass its calls on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from consoles import serving
from fleets import Fleet, fleet
from handrail import Client, Elicitation
from patience import PATIENCE
from redis_servers import shared_server
from requirements import requirement

HERE = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three gateways in front of a command, and of a server over HTTP."""
    upstream = serving(tmp_path_factory.mktemp("upstream"), target=HERE / "servers_fleet_upstream.py")
    folder, store = tmp_path_factory.mktemp("gateways"), shared_server().url(database=5)
    with upstream as web, fleet(folder, store, count=0, target=HERE / "servers_fleet_gateway.py") as made:
        for _ in range(3):
            made.add(FLEET_UPSTREAM=web.endpoint)
        yield made


@pytest.fixture(scope="module")
def url(three: Fleet) -> str:
    return three.balanced()


async def steps(url: str, times: int, revision: str = "auto", tool: str = "step") -> list[tuple[int, int]]:
    """Call the counter; return what it counted, and in which process."""
    async with Client(url, revision=revision) as client:
        texts = [(await client.call(tool)).text for _ in range(times)]
    return [(int(count), int(pid)) for count, pid in map(str.split, texts)]


@requirement("GW-14")
@pytest.mark.parametrize("revision", ["2025-03-26", "2025-11-25", "2026-07-28", "pocket"])
async def test_one_process_counts_the_calls_of_all_replicas(url: str, revision: str) -> None:
    before, after = await steps(url, 3, revision=revision), await steps(url, 6, revision=revision)
    assert [count for count, _ in before + after] == list(range(before[0][0], before[0][0] + 9))
    assert len({pid for _, pid in before + after}) == 1


@requirement("GW-01")
@pytest.mark.parametrize("revision", ["2025-03-26", "2025-11-25", "2026-07-28", "pocket"])
async def test_a_server_over_http_is_reached_by_each_replica(url: str, revision: str) -> None:
    counted = await steps(url, 9, revision=revision, tool="web_step")
    assert [count for count, _ in counted] == list(range(counted[0][0], counted[0][0] + 9))
    assert len({pid for _, pid in counted}) == 1


async def test_a_forged_mark_of_another_replica_changes_nothing(three: Fleet) -> None:
    async def at(endpoint: str) -> int:
        async with Client(endpoint, headers={"Handrail-Forwarded": "A" * 100}) as client:
            return int((await client.call("step")).text.split()[1])

    assert len({await at(replica.endpoint) for replica in three.replicas}) == 1


@requirement("GW-10")
@pytest.mark.parametrize("tool", ["name", "web_name"])
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_a_question_of_an_upstream_is_answered_through_any_replica(url: str, revision: str, tool: str) -> None:
    async def answer(question: Elicitation) -> dict[str, str]:
        return {"name": "Ada"}

    async with Client(url, revision=revision, elicit=answer) as client:
        texts = [(await client.call(tool)).text for _ in range(6)]
    assert all("Ada" in text for text in texts)
    assert len({text.split()[-1] for text in texts}) == 1


async def test_when_the_replica_with_the_process_is_killed_another_one_starts_it(tmp_path: Path) -> None:
    target = HERE / "servers_fleet_gateway.py"
    with fleet(tmp_path, shared_server().url(database=2), target=target) as doomed:
        first, *others = doomed.replicas
        await steps(first.endpoint, 2)
        [(count, _)] = await steps(others[0].endpoint, 1)
        assert count == 3
        await asyncio.to_thread(first.kill)
        async with asyncio.timeout(PATIENCE):
            [(count, pid)] = await steps(others[0].endpoint, 1)
            assert count == 1
            assert await steps(others[1].endpoint, 1) == [(2, pid)]
