"""The console's approvals: what a card says, who may decide, once, with which arguments, and what is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cli_runs import handrail
from handrail import Server, ToolResult
from handrail.approvals.queue import ApprovalError, Approvals
from handrail.approvals.request import meets_condition, suggest_conditions, unmask
from handrail.console import approvals as approving, events as streaming
from handrail.console.access import ConsoleSession
from handrail.console.context import ConsoleContext
from handrail.errors import RemoteProtocolError
from handrail.guards.limits import ANONYMOUS
from handrail.guards.policy import Policy, Rule
from handrail.model import Principal
from handrail.testing import Peer
from handrail.text.controls import MASK, mask_secrets
from patience import PATIENCE
from requirements import requirement
from rigs_console import Object, Page, Refused, Rig, consoled

TOKEN = "sk_live_abcdefghijklmnop1234"
Cancelled = Callable[[Rig, Peer], Awaitable[None]]
ASKS = Policy([Rule(verdict="ask", name="everything", tools=["*"])])


def shop(kept: Path, ran: list[Object] | None = None, **options: Any) -> Server:
    options = {"approvals": Approvals(by="operator"), "policy": ASKS, "audit": kept, **options}
    server = Server("shop", **options)
    ran = [] if ran is None else ran

    @server.tool(title="Cancel an order", preview=lambda order_id, token: f"order {order_id} for {token or 'free'}")
    def cancel_order(order_id: int, reason: str = "", token: str = "") -> str:
        """Cancels an order for good."""
        ran.append({"order_id": order_id, "reason": reason, "token": token})
        return f"order {order_id} is cancelled"

    @server.tool
    def push(repo: str, amount: float = 1.0, force: bool = False) -> str:
        ran.append({"repo": repo, "amount": amount})
        return f"pushed {repo}"

    return server


@asynccontextmanager
async def asked(
    rig: Rig, tool: str, arguments: Object, who: str = "alice", page: Page | None = None
) -> AsyncIterator[tuple[Object, asyncio.Task[ToolResult]]]:
    """A call that waits, and its card as the page heard of it."""
    watcher = await rig.page()
    await watcher.listen()
    async with Peer(rig.console.server, principal=Principal(who)) as peer:
        call = asyncio.create_task(peer.call(tool, arguments))
        try:
            heard = await watcher.event("approval", state="pending")
            waiting = (await (page or watcher).get("approvals"))["open"]
            yield next(each for each in waiting if each["id"] == heard["id"]), call
        finally:
            for left in await rig.console.context.guards.approval_queue.open():  # else the server waits for the call
                await rig.console.context.guards.approval_queue.decide(left.id, False, by="the end of the test")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)


@pytest.fixture
async def ran() -> list[Object]:
    return []


@pytest.fixture
async def rig(tmp_path: Path, ran: list[Object]) -> AsyncIterator[Rig]:
    async with consoled(shop(tmp_path / "audit.db", ran)) as made:
        yield made


@requirement("APP-03", "APP-04", everywhere=True)
async def test_a_card_says_what_would_happen_and_yes_lets_it_happen_once(rig: Rig, ran: list[Object]) -> None:
    page = await rig.page()
    hello = await page.listen()
    assert hello["approvals"] == []
    async with asked(rig, "cancel_order", {"order_id": 7, "reason": "late"}) as (card, call):
        heard = await page.event("approval", id=card["id"])
        assert heard["state"] == "pending" and heard["may"]
        assert card["sentence"] == 'Cancel an order: order_id 7, reason "late"'
        assert (card["tool"], card["who"], card["rule"]) == ("cancel_order", "alice", "everything")
        assert card["arguments"] == {"order_id": 7, "reason": "late"} and not card["masked"]
        assert (card["title"], card["description"]) == ("Cancel an order", "Cancels an order for good.")
        assert card["preview"] == "order 7 for free"
        assert (card["caller"], card["used"]) == ("waiting", False)
        assert card["schema"]["required"] == ["order_id"] and card["editable"] and card["expires"] > card["created"]
        assert ran == []
        decided = await page.post(f"approvals/{card['id']}", yes=True, note="fine")
        assert (decided["state"], decided["by"], decided["note"]) == ("approved", "operator local", "fine")
        assert (await call).text == "order 7 is cancelled"
        heard = await page.event("approval", id=card["id"])
        assert heard["by"] == "operator local" and heard["state"] in ("approved", "consumed") and not heard["may"]
    assert ran == [{"order_id": 7, "reason": "late", "token": ""}]
    view = await page.get("approvals")
    assert view["open"] == [] and [(each["state"], each["used"]) for each in view["recent"]] == [("consumed", True)]


@requirement("APP-03", everywhere=True)
async def test_a_yes_that_is_used_is_told_to_every_window(rig: Rig) -> None:
    pages = [await rig.page("ann"), await rig.page("bob")]
    for page in pages:
        await page.listen()
    async with asked(rig, "cancel_order", {"order_id": 7}) as (card, call):
        await pages[0].post(f"approvals/{card['id']}", yes=True)
        await call
        for page in pages:
            heard = await page.event("approval", id=card["id"], state="consumed")
            assert heard["by"] == "operator ann" and not heard["may"]


async def by_its_client(rig: Rig, peer: Peer) -> None:
    await peer.notify("notifications/cancelled", {"requestId": 2})


async def by_an_operator(rig: Rig, peer: Peer) -> None:
    [seen] = rig.console.context.feed.running.values()
    await (await rig.page()).post(f"calls/{seen.id}/cancel")


async def by_a_lost_connection(rig: Rig, peer: Peer) -> None:
    await peer.__aexit__()


@requirement("APP-03", everywhere=True)
@pytest.mark.parametrize("cancelled", [by_its_client, by_an_operator, by_a_lost_connection])
async def test_a_card_goes_with_its_call(rig: Rig, ran: list[Object], cancelled: Cancelled) -> None:
    pages = [await rig.page("ann"), await rig.page("bob")]
    for page in pages:
        await page.listen()
    async with Peer(rig.console.server, principal=Principal("alice")) as peer:
        call = asyncio.create_task(peer.call("cancel_order", {"order_id": 7}))
        card = await pages[0].event("approval", state="pending")
        await cancelled(rig, peer)
        for page in pages:
            over = await page.event("approval", id=card["id"], state="cancelled")
            assert not over["may"] and (await page.get("approvals"))["open"] == []
        with pytest.raises(Refused, match="cancelled already") as late:
            await pages[0].post(f"approvals/{card['id']}", yes=True)
        assert late.value.status == 409 and ran == []
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_whoever_waits_for_the_same_yes_as_one_who_gave_up_is_asked_for_anew(rig: Rig, ran: list[Object]) -> None:
    page = await rig.page()
    await page.listen()
    async with (
        asked(rig, "cancel_order", {"order_id": 7}) as (card, call),
        Peer(rig.console.server, principal=Principal("alice")) as other,
    ):
        second = asyncio.create_task(other.call("cancel_order", {"order_id": 7}))
        while [row["state"] for row in (await page.event("tick"))["running"]] != ["asking", "asking"]:
            pass
        await other.notify("notifications/cancelled", {"requestId": 2})
        await page.event("approval", id=card["id"], state="cancelled")
        again = await page.event("approval", state="pending", who="alice")
        while again["id"] == card["id"]:
            again = await page.event("approval", state="pending", who="alice")
        await page.post(f"approvals/{again['id']}", yes=True)
        assert (await call).text == "order 7 is cancelled"
        second.cancel()
    assert len(ran) == 1


@requirement("APP-03", everywhere=True)
async def test_no_means_that_nothing_runs_the_reason_is_told_and_it_is_on_record(rig: Rig, ran: list[Object]) -> None:
    page = await rig.page()
    async with asked(rig, "cancel_order", {"order_id": 7}) as (card, call):
        await page.post(f"approvals/{card['id']}", yes=False, note="wrong order")
        refused = await call
    assert refused.is_error and "not approved by an operator: wrong order" in refused.text and ran == []
    records = (await page.get("audit", event="approval", outcome="denied"))["records"]
    assert [(each["tool"], each["raw"]["by"]) for each in records] == [("cancel_order", "operator local")]


@requirement("P-19", everywhere=True)
async def test_of_two_windows_one_decides_and_the_other_hears_who_was_first(rig: Rig, ran: list[Object]) -> None:
    pages = [await rig.page("ann"), await rig.page("bob")]
    async with asked(rig, "cancel_order", {"order_id": 7}) as (card, call):
        path = f"approvals/{card['id']}"
        said = await asyncio.gather(*(page.post(path, yes=True) for page in pages), return_exceptions=True)
        assert (await call).text == "order 7 is cancelled"
    [first] = [each for each in said if isinstance(each, dict)]
    [second] = [each for each in said if isinstance(each, Refused)]
    assert second.status == 409 and f"approved by {first['by']} already" in second.error
    for late in ({"yes": False}, {"yes": True, "edited": {"nonsense": 1}}):
        with pytest.raises(Refused, match="consumed by operator"):
            await pages[0].post(path, **late)
    assert len(ran) == 1


@requirement("P-23", everywhere=True)
async def test_deciding_takes_the_role(rig: Rig, ran: list[Object]) -> None:
    page = await rig.page(roles="view call manage")
    async with asked(rig, "cancel_order", {"order_id": 7}, page=page) as (card, _):
        assert not card["may"] and "role approve" in card["why_not"]
        with pytest.raises(Refused, match="approve") as refused:
            await page.post(f"approvals/{card['id']}", yes=True)
        assert refused.value.status == 403
    assert ran == []


@requirement("P-19", everywhere=True)
@pytest.mark.parametrize("yes", [True, False])
async def test_where_another_has_to_decide_the_caller_cannot(tmp_path: Path, ran: list[Object], yes: bool) -> None:
    server = shop(tmp_path / "audit.db", ran, approvals=Approvals(by="another"))
    async with consoled(server) as rig:
        own, other = await rig.page("alice"), await rig.page("bob")
        async with asked(rig, "cancel_order", {"order_id": 7}, page=own) as (card, call):
            assert not card["may"] and "another person" in card["why_not"]
            with pytest.raises(Refused, match="another person") as refused:
                await own.post(f"approvals/{card['id']}", yes=yes)
            assert refused.value.status == 403
            assert (await other.get("approvals"))["open"][0]["may"]
            await other.post(f"approvals/{card['id']}", yes=yes)
            assert (await call).is_error is not yes
    assert len(ran) == yes


async def test_where_another_has_to_decide_nobody_asks_the_caller_nor_takes_their_word_on_a_terminal(
    tmp_path: Path, ran: list[Object]
) -> None:
    (tmp_path / "handrail.toml").write_text('[approvals]\nby = "another"\n[audit]\nfile = "audit.db"\n', "utf-8")
    server = shop(tmp_path / "audit.db", ran, approvals=Approvals(by="another", wait=0.05))
    asked: list[str] = []
    async with Peer(server, capabilities={"elicitation": {}}, answers=lambda method, _: asked.append(method)) as peer:
        pending = await peer.call("cancel_order", {"order_id": 7})
        [waiting] = await server.approvals.open()
        assert pending.is_error and waiting.asked.principal == "local"
        typed = await asyncio.to_thread(handrail, "approve", waiting.id, "yes", home=tmp_path)
        assert typed.returncode != 0 and "somebody else than its caller" in typed.stderr
        for by, who in (("local", ""), ("operator x", "local")):
            with pytest.raises(ApprovalError, match="somebody else"):
                await server.approvals.decide(waiting.id, True, by=by, who=who)
        await server.approvals.decide(waiting.id, True, by="operator x", who="x")
        assert not (await peer.call("cancel_order", {"order_id": 7})).is_error
    assert asked == [] and len(ran) == 1


async def test_where_the_caller_is_to_be_asked_nobody_else_decides(tmp_path: Path) -> None:
    waits = asyncio.Event()

    async def answer(method: str, params: Object) -> Object:
        await waits.wait()
        return {"action": "accept", "content": {}}

    async with consoled(shop(tmp_path / "audit.db", approvals=Approvals(by="caller"))) as rig:
        page = await rig.page()
        await page.listen()
        async with Peer(rig.console.server, capabilities={"elicitation": {}}, answers=answer) as peer:
            call = asyncio.create_task(peer.call("cancel_order", {"order_id": 7}))
            card = await page.event("approval")
            assert not card["may"] and "calling client" in card["why_not"]
            with pytest.raises(Refused, match="calling client"):
                await page.post(f"approvals/{card['id']}", yes=True)
            waits.set()
            assert not (await call).is_error


@requirement("APP-04", "P-34", everywhere=True)
async def test_secrets_are_masked_and_come_back_where_they_stood(rig: Rig, ran: list[Object]) -> None:
    page = await rig.page()
    arguments = {"order_id": 7, "reason": f"use {TOKEN}", "token": "vault/hunter2"}
    async with asked(rig, "cancel_order", arguments) as (card, call):
        assert card["masked"] and TOKEN not in str(card) and "vault" not in str(card)
        path, shown = f"approvals/{card['id']}", card["arguments"]
        moved = {**shown, "reason": shown["token"]}
        with pytest.raises(Refused) as refused:
            await page.post(path, yes=True, edited=moved)
        assert refused.value.status == 422 and refused.value.problems[0]["path"] == "/reason"
        checked = await page.post(f"{path}/check", arguments={**shown, "order_id": "x"})
        assert not checked["valid"] and checked["problems"][0]["path"] == "/order_id"
        assert (await page.post(f"{path}/check", arguments={**shown, "order_id": 8}))["valid"]
        await page.post(path, yes=True, edited={**shown, "order_id": 8})
        assert (await call).text == "order 8 is cancelled"
    assert ran == [{**arguments, "order_id": 8}]
    [recent] = (await page.get("approvals"))["recent"]
    assert recent["edited"]["order_id"] == 8 and "hunter2" not in str(recent)


async def test_edited_arguments_are_validated_and_an_edit_that_changes_nothing_is_none(rig: Rig) -> None:
    page = await rig.page()
    async with asked(rig, "cancel_order", {"order_id": 7}) as (card, call):
        path = f"approvals/{card['id']}"
        with pytest.raises(Refused) as refused:
            await page.post(path, yes=True, edited={"order": 7})
        assert refused.value.status == 422 and refused.value.problems
        with pytest.raises(Refused, match="agreed to once"):
            await page.post(path, yes=True, edited={"order_id": 8}, remember=60)
        with pytest.raises(Refused, match="yes or no"):
            await page.post(path, yes="yes")
        assert "edited" not in await page.post(path, yes=True, edited={"order_id": 7})
        assert not (await call).is_error


async def test_what_is_different_from_the_last_time_is_shown_masked(rig: Rig) -> None:
    page = await rig.page()
    async with asked(rig, "cancel_order", {"order_id": 7, "token": "first-one"}) as (card, call):
        assert card["differences"] == []
        await page.post(f"approvals/{card['id']}", yes=True)
        await call
    async with asked(rig, "cancel_order", {"order_id": 8, "reason": "late", "token": "other-one"}) as (card, _):
        assert card["differences"] == [
            {"name": "order_id", "before": "7", "after": "8"},
            {"name": "reason", "after": '"late"'},
            {"name": "token", "before": f'"{MASK}"', "after": f'"{MASK}"'},
        ]


async def test_a_narrow_yes_is_suggested_remembered_listed_and_revoked(rig: Rig, ran: list[Object]) -> None:
    page = await rig.page()
    await page.listen()
    async with asked(rig, "push", {"repo": "acme/site", "amount": 10}) as (card, call):
        suggested = {each["text"]: each for each in card["suggestions"]}
        assert "allow exactly these values, for 8 hours" in suggested
        chosen = suggested["allow when repo starts with acme/ and goes on plainly, for 8 hours"]
        assert suggested["allow when amount is at most 10, for 8 hours"]["matching"] == {
            "amount": {"at_least": 0, "at_most": 10}
        }
        await page.post(f"approvals/{card['id']}", yes=True, remember=chosen["seconds"], matching=chosen["matching"])
        await call
        await page.event("grants")
    async with Peer(rig.console.server, principal=Principal("alice")) as peer:
        assert (await peer.call("push", {"repo": "acme/shop", "amount": 10})).text == "pushed acme/shop"
    [grant] = (await page.get("approvals"))["grants"]
    assert (grant["who"], grant["tool"], grant["by"]) == ("alice", "push", "operator local")
    await page.post(f"grants/{grant['id']}/revoke")
    await page.event("grants")
    assert (await page.get("approvals"))["grants"] == []
    with pytest.raises(Refused) as refused:
        await page.post(f"grants/{grant['id']}/revoke")
    assert refused.value.status == 404
    async with asked(rig, "push", {"repo": "acme/shop", "amount": 10}):
        pass  # it is asked about again
    assert len(ran) == 2


async def test_a_condition_that_this_call_does_not_meet_is_refused(rig: Rig) -> None:
    page = await rig.page()
    async with asked(rig, "push", {"repo": "acme/site"}) as (card, _):
        path = f"approvals/{card['id']}"
        for matching in ({"repo": {"matches": "^other/"}}, {"repo": {"begins": "acme"}}):
            with pytest.raises(Refused) as refused:
                await page.post(path, yes=True, remember=60, matching=matching)
            assert refused.value.status == 400
        assert (await page.get("approvals"))["open"]


@pytest.mark.parametrize(
    ("value", "others", "not_others"),
    [
        ("acme/site", ["acme/shop", "acme/a/b.txt"], ["acme/../x", "acme/", "acme/%2e%2e/x", "acmeX/site", "acme//x"]),
        ("/srv/data/a.txt", ["/srv/data/b"], ["/srv/data/../../etc/passwd", "/etc/passwd", "/srv/data/.ssh", "/"]),
        ("https://api.acme.org/v1/x", ["https://api.acme.org/v1/y"], ["https://api.acme.org.evil.org/v1/y"]),
        ("ORD-17", ["ORD-18"], ["ORD17", "XORD-17", "ORD-1 or 1=1"]),
    ],
)
def test_a_suggested_beginning_covers_its_like_and_nothing_that_leads_elsewhere(
    value: str, others: list[str], not_others: list[str]
) -> None:
    [(_, matching)] = suggest_conditions({"it": value})
    for each in (value, *others):
        assert meets_condition("it", matching["it"], {"it": each}), each
    for each in not_others:
        assert not meets_condition("it", matching["it"], {"it": each}), each


@pytest.mark.parametrize("value", ["plain", "/x", "../etc/passwd", "https://x", "a b/c", "", True, None, -1, [1], {}])
def test_nothing_narrow_is_suggested_where_nothing_is(value: Any) -> None:
    assert suggest_conditions({"it": value}) == []
    assert suggest_conditions({"order_id": 7, "orderId": 7}) == []


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(st.text(max_size=40), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    )
)
def test_whatever_is_suggested_covers_the_call_it_was_suggested_for(arguments: Object) -> None:
    for _, matching in suggest_conditions(arguments):
        assert all(meets_condition(name, condition, arguments) for name, condition in matching.items())


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=10), st.just(TOKEN)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "password", "token", "b"]), inner, max_size=4),
    ),
    max_leaves=12,
)


@requirement("P-34", everywhere=True)
@given(st.dictionaries(st.sampled_from(["a", "password", "list"]), JSON))
def test_what_was_not_edited_is_what_it_was(real: Object) -> None:
    problems: list[tuple[str, str]] = []
    shown = mask_secrets(real)
    made = unmask(real, shown, shown, "", problems)
    assert made == real and problems == []
    for name in shown:
        if shown[name] == MASK:
            problems = []
            unmask(real, shown, {**shown, "other": [shown[name]]}, "", problems)
            assert [path for path, _ in problems] == ["/other/0"]


async def test_nobody_by_name_does_not_count_as_another_than_nobody_by_name(tmp_path: Path) -> None:
    async with consoled(shop(tmp_path / "audit.db", approvals=Approvals(by="another"))) as rig:
        page = await rig.page(ANONYMOUS)
        async with asked(rig, "cancel_order", {"order_id": 7}, who=ANONYMOUS, page=page) as (card, _):
            assert not card["may"] and "You made this call" in card["why_not"]
            with pytest.raises(Refused, match="another person"):
                await page.post(f"approvals/{card['id']}", yes=True)


@requirement("P-34", everywhere=True)
@pytest.mark.parametrize(
    ("edited", "where"),
    [
        ([{"to": "B", "token": MASK}], "/0/token"),
        ([{"to": "B", "token": MASK}, {"to": "A", "token": MASK}], "/0/token /1/token"),
        ([{"to": "A", "token": MASK}, {"to": "C", "token": "new"}], ""),
    ],
)
def test_a_secret_of_one_item_does_not_go_over_to_another(edited: list[Object], where: str) -> None:
    real = [{"to": "A", "token": "a's own"}, {"to": "B", "token": "b's own"}]
    problems: list[tuple[str, str]] = []
    made: Any = unmask(real, mask_secrets(real), edited, "", problems)
    assert " ".join(path for path, _ in problems) == where
    assert where or made == [real[0], edited[1]]


@requirement("P-34", everywhere=True)
async def test_whoever_tries_a_tool_is_not_told_the_secrets_of_the_last_call(tmp_path: Path) -> None:
    async with consoled(shop(tmp_path / "audit.db", approvals=Approvals(by="anyone"))) as rig:
        page = await rig.page()
        await page.listen()
        async with asked(rig, "cancel_order", {"order_id": 7, "token": "first-one"}, who="local") as (card, call):
            await page.post(f"approvals/{card['id']}", yes=True)
            await call
        await page.post("try", tool="cancel_order", arguments={"order_id": 7, "token": "other-one"})
        question = await page.event("try", kind="question")
        assert f'token: "{MASK}", was "{MASK}"' in question["question"]["message"]
        ident = rig.console.context.feed.recent[-1].id
        assert "first-one" not in str(await page.get(f"calls/{ident}"))
        await page.post(f"try/{question['id']}/cancel")


async def test_a_tool_that_has_changed_can_only_be_said_yes_or_no_to(rig: Rig) -> None:
    page = await rig.page()
    async with asked(rig, "push", {"repo": "acme/site"}) as (card, call):
        rig.console.server.remove("push")
        [card] = (await page.get("approvals"))["open"]
        assert not card["editable"] and "schema" not in card and card["sentence"].startswith("Push: repo")
        with pytest.raises(Refused) as refused:
            await page.post(f"approvals/{card['id']}", yes=True, edited={"repo": "x"})
        assert refused.value.status == 409
        await page.post(f"approvals/{card['id']}", yes=False)
        assert (await call).is_error


async def test_approvals_of_another_server_in_the_same_file_are_neither_shown_nor_decided(tmp_path: Path) -> None:
    kept = tmp_path / "state.db"
    other = Server("other", audit=kept, policy=ASKS, approvals=Approvals(by="operator", wait=0.05))
    other.add(lambda: "", name="thing")
    async with consoled(shop(kept)) as rig, Peer(other) as peer:
        page = await rig.page()
        await page.listen()
        assert (await peer.call("thing")).is_error
        [waiting] = await other.approvals.open()
        assert (await page.get("approvals"))["open"] == []
        with pytest.raises(Refused) as refused:
            await page.post(f"approvals/{waiting.id}", yes=True)
        assert refused.value.status == 404


async def test_what_nobody_decided_in_time_is_shown_as_expired(tmp_path: Path) -> None:
    server = shop(tmp_path / "audit.db", approvals=Approvals(by="operator", wait=0.05, expires=0.1))
    async with consoled(server) as rig, Peer(server) as peer:
        page = await rig.page()
        assert (await peer.call("push", {"repo": "x"})).is_error
        now = server.engine.clock
        server.engine.clock = lambda: now() + 1
        view = await page.get("approvals")
        assert view["open"] == [] and [each["state"] for each in view["recent"]] == ["expired"]
        with pytest.raises(Refused, match="expired"):
            await page.post(f"approvals/{view['recent'][0]['id']}", yes=True)


async def test_a_call_that_nobody_decided_on_in_time_ends(tmp_path: Path) -> None:
    soon = Approvals(by="operator", expires=0.2, wait=5)
    server = shop(tmp_path / "audit.db", approvals=soon)
    async with consoled(server), asyncio.timeout(PATIENCE), Peer(server, principal=Principal("alice")) as peer:
        assert "not approved in time" in (await peer.call("push", {"repo": "acme/web"})).text


async def test_where_nothing_may_be_remembered_nothing_is_suggested(tmp_path: Path) -> None:
    server = shop(tmp_path / "audit.db", approvals=Approvals(by="operator", remember=0))
    async with consoled(server) as rig, asked(rig, "push", {"repo": "acme/site"}) as (card, _):
        assert card["suggestions"] == []
        assert (await (await rig.page()).get("approvals"))["remember_seconds"] == 0


async def test_the_tools_own_error_reaches_the_caller_after_a_yes(rig: Rig) -> None:
    page = await rig.page()
    async with asked(rig, "push", {"repo": "acme/site"}) as (card, call):
        rig.console.server.disable("push")
        await page.post(f"approvals/{card['id']}", yes=True)
        try:
            assert "pushed" in (await call).text  # what was accepted goes on
        except RemoteProtocolError:
            pytest.fail("a call in flight ends as it would")


async def test_a_card_that_takes_long_to_make_is_told_all_the_same(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made, late = approving.card, asyncio.Event()

    async def slow(context: ConsoleContext, session: ConsoleSession, ident: str) -> Object | None:
        if not late.is_set():
            late.set()
            await asyncio.sleep(0.1)  # the stream has had other things to do meanwhile, ten times over
        return await made(context, session, ident)

    monkeypatch.setattr(streaming, "SLOW_TICK_SECONDS", 0.01)
    monkeypatch.setattr(approving, "card", slow)
    page = await rig.page()
    await page.listen()
    async with asked(rig, "cancel_order", {"order_id": 7}) as (card, _):
        assert (await page.event("approval", id=card["id"]))["state"] == "pending"
