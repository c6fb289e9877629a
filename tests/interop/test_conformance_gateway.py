"""The official conformance suite through a gateway: what a server has directly, it has behind a gateway.

The upstream is the server of `test_conformance.py`, which passes every scenario. What stays open where the two legs
speak different revisions is in `LOST`, each with the rule that takes it away: no scenario may fail in another way,
none may pass that is said to fail. docs/reference/gateway-conformance.md has the table.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import pytest_asyncio

from paths import ROOT, SUPPORT
from patience import SOAK
from requirements import record_ran, requirement
from tests.interop.test_conformance import SCORED, SERVER, WIRES, Bench, InstalledPeer, Object, running_server

GATEWAY = SUPPORT / "conformance_gateway.py"
PAGE = ROOT / "docs" / "reference" / "gateway-conformance.md"

R1, R2, R3, R4, R5 = "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"


class Legs(NamedTuple):
    """The revisions of the two legs, and how the gateway reaches the upstream."""

    front: str
    upstream: str
    transport: str = "http"

    def __str__(self) -> str:
        return f"{self.front}-to-{self.upstream}" + ("-stdio" if self.transport == "stdio" else "")


NEWEST = [Legs(R4, R4), Legs(R5, R5), Legs(R4, R5), Legs(R5, R4)]
OLDER = [Legs(front, upstream) for front in (R4, R5) for upstream in (R1, R2, R3)]
OLDER += [Legs(front, upstream) for front in (R1, R2, R3) for upstream in (R4, R5)]
OVER_STDIO = [legs._replace(transport="stdio") for legs in NEWEST]
ALL = NEWEST + (OLDER + OVER_STDIO if SOAK else [])


class Lost(NamedTuple):
    """What a scenario cannot find: the checks that stay open, and the rule of TRANSLATION that says why."""

    scenario: str
    front: str
    upstreams: tuple[str, ...]
    checks: frozenset[str]
    rule: str
    transports: tuple[str, ...] = ("http", "stdio")

    def is_between(self, legs: Legs) -> bool:
        return legs.front == self.front and legs.upstream in self.upstreams and legs.transport in self.transports


NOTHING = frozenset({"nothing to look at"})


def some(family: str, names: str) -> frozenset[str]:
    return frozenset(f"{family}-{name}" for name in names.split())


def asks(scenario: str, check: str, upstreams: tuple[str, ...], rule: str) -> Lost:
    return Lost(f"input-required-result-{scenario}", R5, upstreams, some("sep-2322", check), rule)


UNTESTABLE = "no-xmcp-tool decode-base64 validate-param-match reject-invalid-param-chars reject-param-mismatch"
WITHOUT_FORMS = {
    "basic-elicitation": "elicitation-incomplete",
    "request-state": "request-state-incomplete",
    "multiple-input-requests": "multiple-inputs-incomplete",
    "multi-round": "multi-round-r1",
    "missing-input-response": "missing-response-rerequests",
    "non-tool-request": "non-tool-incomplete",
    "result-type": "result-type-included",
    "tampered-state": "reject-tampered-state",
}
LOST = [
    # The newest legs
    Lost("server-sse-polling", R4, (R1, R2, R3, R5), NOTHING, "10"),
    Lost("server-sse-polling", R4, (R4,), NOTHING, "10", ("stdio",)),
    Lost("http-custom-header-server-validation", R5, (R1, R2, R3, R4), some("sep-2243-server", UNTESTABLE), "3 and 11"),
    Lost(
        "server-stateless",
        R5,
        (R1, R2, R3, R4),
        some("sep-2575", "server-rejects-undeclared-capability missing-capability-http-400"),
        "7",
    ),
    asks("basic-elicitation", "elicitation-incomplete", (R3, R4), "8.2"),
    asks("ignore-extra-params", "ignore-unexpected-params", (R3, R4), "8.2"),
    # Older upstreams
    Lost(
        "elicitation-sep1034-defaults",
        R4,
        (R3,),
        some("elicitation-sep1034", "string-default integer-default number-default enum-default"),
        "8.3, LOSSY-29",
    ),
    Lost(
        "elicitation-sep1330-enums",
        R4,
        (R3,),
        some("elicitation-sep1330", "legacy-enumnames untitled-multi titled-multi"),
        "8.3, LOSSY-28",
    ),
    Lost("tools-call-elicitation", R4, (R1, R2), frozenset({"tools-call-elicitation"}), "7"),
    Lost("elicitation-sep1034-defaults", R4, (R1, R2), frozenset({"elicitation-sep1034-general"}), "7"),
    Lost("elicitation-sep1330-enums", R4, (R1, R2), frozenset({"elicitation-sep1330-general"}), "7"),
    *(asks(scenario, check, (R1, R2), "7") for scenario, check in WITHOUT_FORMS.items()),
    *(Lost("tools-call-audio", front, (R1,), frozenset({"tools-call-audio"}), "4.3, LOSSY-12") for front in (R4, R5)),
]


def lost(legs: Legs) -> dict[str, Lost]:
    """What is lost between these legs, by scenario."""
    return {each.scenario: each for each in LOST if each.is_between(legs)}


class Front(Bench):
    """A gateway, as the suite sees it: a server of any revision."""

    def __init__(self, folder: Path, complaints: IO[bytes], revision: str, target: list[str]) -> None:
        super().__init__(folder, complaints)
        self._arguments = [revision, *target]

    async def _url(self, revision: str) -> str:
        if not self._address:
            running = running_server(self._complaints, GATEWAY, self._arguments)
            self._address = await self._stack.enter_async_context(running)
        return await super()._url(revision)


class Fronts:
    """The gateways, one for each revision and transport of an upstream leg; each is started when it is first needed."""

    def __init__(self, folder: Path, complaints: IO[bytes]) -> None:
        self._folder = folder
        self._complaints = complaints
        self._stack = AsyncExitStack()
        self._address = ""
        self._by_leg: dict[tuple[str, str], Front] = {}

    async def get(self, legs: Legs) -> Front:
        leg = legs.upstream, legs.transport
        if leg not in self._by_leg:
            folder = self._folder / "-".join(leg)
            target = [sys.executable, "-B", str(SERVER), "stdio"]
            if legs.transport == "http":
                if not self._address:
                    self._address = await self._stack.enter_async_context(running_server(self._complaints))
                target = [self._address]
            self._by_leg[leg] = Front(folder, self._complaints, legs.upstream, target)
        return self._by_leg[leg]

    async def close(self) -> None:
        for each in self._by_leg.values():
            await each.close()
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fronts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fronts]:
    with tempfile.TemporaryFile() as complaints:
        made = Fronts(tmp_path_factory.mktemp("gateway"), complaints)
        yield made
        await made.close()
        complaints.seek(0)
        assert complaints.read() == b""


@pytest.fixture
def seen(request: pytest.FixtureRequest, legs: Legs) -> None:
    record_ran(request, legs.front, "http")


def open_points(found: list[Object]) -> frozenset[str]:
    """What the suite does not call a success. A scenario that finds nothing to look at says so and passes."""
    wrong = frozenset(check["id"] for check in found if check["status"] not in ("SUCCESS", "INFO"))
    right = {check["id"] for check in found if check["status"] == "SUCCESS"} - {"wire-schema-valid"}
    return wrong or (frozenset() if right else NOTHING)


# What a scenario shows of a gateway, beside GW-01. One that is lost shows nothing.
SHOWS = {
    "tools-call-error": "GW-15",
    "sep-2164-resource-not-found": "GW-15",
    "tools-call-with-progress": "GW-13",
    "http-header-validation": "GW-05",
    "http-custom-header-server-validation": "GW-05",
    "server-stateless": "GW-11",
    "tools-call-elicitation": "GW-10",
    "tools-call-sampling": "GW-10",
    "input-required-result-multi-round": "GW-10",
    "input-required-result-multiple-input-requests": "GW-10",
    "input-required-result-request-state": "GW-22",
    "input-required-result-tampered-state": "GW-22",
}


def tagged(legs: Legs, scenario: str) -> Any:
    shown = {"GW-01", SHOWS.get(scenario, "GW-01")}
    return pytest.param(legs, scenario, marks=() if scenario in lost(legs) else requirement(*sorted(shown)))


@pytest.mark.peers
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("legs", "scenario"), [tagged(legs, scenario) for legs in ALL for scenario in WIRES[legs.front].scenarios], ids=str
)
@pytest.mark.usefixtures("seen")
async def test_scenario(fronts: Fronts, installed_peer: InstalledPeer, legs: Legs, scenario: str) -> None:
    front = await fronts.get(legs)
    found = await front.judge(installed_peer("conformance"), legs.front, scenario)
    told = [f"{check['id']}: {check.get('errorMessage', check['status'])}" for check in found]
    known = lost(legs).get(scenario)
    assert open_points(found) == (known.checks if known else frozenset()), "\n".join(told)


# The page


def rows() -> list[list[str]]:
    """The cells of every row of the page's tables."""
    lines = PAGE.read_text("utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_page_has_the_scores() -> None:
    for legs in NEWEST + OLDER:
        most = len(WIRES[legs.front].scenarios)
        score = [legs.front, legs.upstream, f"{most} of {most}", f"{most - len(lost(legs))} of {most}"]
        assert score in [row[:4] for row in rows()]
        assert legs.front != legs.upstream or not lost(legs)
    assert {legs.front: len(WIRES[legs.front].scenarios) for legs in NEWEST} == SCORED


@pytest.mark.parametrize("each", LOST, ids=lambda each: f"{each.scenario}-{each.upstreams[-1]}")
def test_the_page_says_what_is_lost_and_why(each: Lost) -> None:
    revisions = ", ".join(each.upstreams) + (" over stdio" if each.transports == ("stdio",) else "")
    assert [f"`{each.scenario}`", each.front, revisions, each.rule] in [row[:3] + row[-1:] for row in rows()]
