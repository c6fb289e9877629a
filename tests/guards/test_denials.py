"""What a caller is told when a rule says no, and which tools are there for a caller at all (PD-6, SRV-314)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from handrail import Client, Principal, Server
from handrail.guards.policy import Policy, Rule
from handrail.model import REFUSED
from handrail.testing import Peer
from requirements import requirement
from servers_http import Client as HttpClient, closed as closed, served
from wires import ALL

Ran = Callable[[str, str], None]
Object = dict[str, Any]

R0, R5 = "2024-10-07", "2026-07-28"
EVERY = [*ALL[:5], R5, "pocket"]
ALICE, BOB = Principal("alice"), Principal("bob")


def shop(rules: Sequence[Rule], *, default: Any = "allow", destructive: Any = "ask") -> Server:
    policy = Policy(rules, groups={"support": ["alice"]}, default=default, destructive=destructive)
    server = Server("shop", policy=policy)

    @server.tool(tags={"money"})
    def refund(amount: int) -> str:
        """Give money back."""
        return f"refunded {amount}"

    @server.tool(annotations={"readOnlyHint": True})
    def status(order: int) -> str:
        """How an order is doing."""
        return "on its way"

    @server.tool(scopes=["orders:write"])
    def close(order: int) -> str:
        """Close an order."""
        return "closed"

    return server


def no_large_sums() -> Server:
    return shop([Rule(verdict="deny", name="internal name", tools=["refund"], arguments={"amount": {"over": 100}})])


def text_of(result: Object) -> str:
    told = result["toolResult"]["error"] if "toolResult" in result else result["content"][0]["text"]
    return str(told)


@requirement("SRV-602")
@pytest.mark.parametrize("revision", EVERY)
async def test_a_rule_that_says_no_is_a_result_that_a_model_can_read(ran: Ran, revision: str) -> None:
    ran(revision, "memory")
    async with Peer(no_large_sums(), revision=revision, principal=ALICE) as peer:
        answer = await peer.request("tools/call", {"name": "refund", "arguments": {"amount": 101}})
        result = answer["result"]
        assert text_of(result) == "refund is not allowed like this for this caller: amount over 100"
        assert "internal name" not in json.dumps(answer)  # whose rule it is stays in the record
        assert result["_meta"][REFUSED] == "forbidden"
        assert revision == R0 or result["isError"] is True
        assert "structuredContent" not in result or result["structuredContent"] == {}
        assert (await peer.call("refund", {"amount": 100})).text == "refunded 100"


@requirement("SRV-602")
@pytest.mark.parametrize("revision", [*ALL[2:5], "pocket", R5])
async def test_over_http_a_rule_that_says_no_is_an_answer_of_200(ran: Ran, revision: str) -> None:
    ran(revision, "http")
    async with served(no_large_sums().asgi()) as url:
        caller = HttpClient(url, revision)
        await caller.open()
        status, answer = await caller.ask(caller.call(1, "refund", {"amount": 101}))
        assert (status, answer["result"]["isError"]) == (200, True)
        assert "is not allowed" in answer["result"]["content"][0]["text"]
        reply = await caller.post(caller.call(2, "close", {"order": 1}))  # a missing scope is another matter
        assert reply.status == 403 and "insufficient_scope" in reply.headers["www-authenticate"]


@requirement("SRV-602")
@pytest.mark.parametrize("revision", EVERY)
async def test_a_missing_scope_is_an_error_of_the_protocol(ran: Ran, revision: str) -> None:
    ran(revision, "memory")
    async with Peer(no_large_sums(), revision=revision, principal=ALICE) as peer:
        answer = await peer.request("tools/call", {"name": "close", "arguments": {"order": 1}})
        assert answer["error"]["code"] == 403 and "orders:write" in answer["error"]["message"]


LITTLE = Rule(verdict="allow", tools=["refund"], groups=["support"], arguments={"amount": {"at_most": 100}})
MORE = Rule(verdict="ask", tools=["refund"], groups=["support"], arguments={"amount": {"at_most": 1000}})
NIGHT = Rule(
    verdict="deny", tools=["refund"], hours="00:00-24:00", days=["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
)
NEVER = Rule(verdict="deny", tools=["refund"], principals=["alice"])
TOLD: list[tuple[list[Rule], str, str]] = [
    ([LITTLE], "deny", "refund is not allowed like this for this caller; allowed is: amount at most 100"),
    (
        [LITTLE, MORE],
        "deny",
        "refund is not allowed like this for this caller; allowed is: amount at most 100"
        " or amount at most 1000 (after approval)",
    ),
    ([NEVER], "allow", "refund is not allowed for this caller"),
    (
        [NIGHT],
        "allow",
        "refund is not allowed like this for this caller: 00:00-24:00 mon, tue, wed, thu, fri, sat, sun",
    ),
]


@requirement("SRV-602")
@pytest.mark.parametrize(("rules", "default", "told"), TOLD)
async def test_a_denial_says_what_would_be_allowed(rules: list[Rule], default: str, told: str) -> None:
    async with Peer(shop(rules, default=default), principal=ALICE) as peer:
        result = await peer.call("refund", {"amount": 5000})
        assert result.is_error and result.text == told


@requirement("SRV-314", "SRV-602")
@pytest.mark.parametrize("revision", EVERY)
async def test_with_default_deny_a_tool_that_no_rule_allows_is_not_there(ran: Ran, revision: str) -> None:
    ran(revision, "memory")
    server = shop([LITTLE, Rule(verdict="allow", annotations={"readOnlyHint": True})], default="deny")
    for who, expected in ((ALICE, ["refund", "status"]), (BOB, ["status"])):
        async with Peer(server, revision=revision, principal=who) as peer:
            assert [tool.name for tool in await peer.tools()] == expected
            page = (await peer.request("tools/list"))["result"]
            assert page.get("cacheScope") == ("private" if revision == R5 else None)
            for name in {"refund", "status", "close", "none"} - {*expected}:
                answer = await peer.request("tools/call", {"name": name, "arguments": {}})
                error = answer["error"]
                assert error["code"] == -32602
                told = error["data"]["reason"] if revision == R0 else error["message"]
                assert told == f"Unknown tool: {name}"
                assert "didYouMean" not in str(error)  # not even its name is


@requirement("SRV-314")
@pytest.mark.parametrize("default", ["allow", "ask"])
async def test_without_default_deny_lists_are_the_same_for_everybody(ran: Ran, default: str) -> None:
    ran(R5, "memory")
    server = shop([NEVER], default=default)
    async with Peer(server, revision=R5, principal=ALICE) as peer:
        page = (await peer.request("tools/list"))["result"]
        assert page["cacheScope"] == "public" and "refund" in [tool["name"] for tool in page["tools"]]


# With the default "deny": a rule, and whether the tool could ever be called by alice.
COULD: list[tuple[list[Rule], bool]] = [
    ([], False),
    ([Rule(verdict="allow", tools=["refund"])], True),
    ([Rule(verdict="ask", tools=["refund"])], True),
    ([Rule(verdict="allow", tools=["refund"], hours="03:00-03:01", days=["mon"])], True),  # but not always
    ([Rule(verdict="allow", tools=["refund"], arguments={"amount": {"under": 0}})], True),
    ([Rule(verdict="allow", tools=["refund"], principals=["bob"])], False),
    ([Rule(verdict="allow", tools=["refund"], scopes=["x"])], False),
    ([Rule(verdict="allow", tools=["refund"], revisions=[R0])], False),
    ([Rule(verdict="allow", tools=["refund"]), NEVER], False),
    ([Rule(verdict="allow", tools=["refund"]), Rule(verdict="hide", tags=["money"])], False),
    ([Rule(verdict="allow", tools=["refund"]), Rule(verdict="deny", arguments={"amount": {"over": 1}})], True),
]


@requirement("SRV-314", "SRV-602")
@pytest.mark.parametrize(("rules", "is_listed"), COULD)
async def test_a_tool_is_listed_if_a_rule_could_ever_allow_it(rules: list[Rule], is_listed: bool) -> None:
    async with Peer(shop(rules, default="deny"), principal=ALICE) as peer:
        assert ("refund" in [tool.name for tool in await peer.tools()]) is is_listed
        answer = await peer.request("tools/call", {"name": "refund", "arguments": {"amount": "no number"}})
        assert (answer.get("error", {}).get("message") == "Unknown tool: refund") is not is_listed


@pytest.mark.parametrize("revision", EVERY)
async def test_a_client_knows_a_refusal_from_a_failure(ran: Ran, revision: str) -> None:
    ran(revision, "memory")
    async with Client(no_large_sums(), revision=revision) as client:
        refused = await client.call("refund", {"amount": 101})
        assert refused.is_error and refused.refused == "forbidden" and refused.problems == []
        done = await client.call("refund", {"amount": 1})
        assert not done.is_error and done.refused == ""
