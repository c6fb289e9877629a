"""A person decides, in a real browser: yes, no, yes with other arguments, yes for a while; and what is on record of it.

Each test has a caller of its own, so that what one remembers, or approved last, is no matter to another.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from cli_runs import handrail
from consoles import Served, chromium as chromium, fetched, ident, people, serving, signed_context, until, window
from handrail.client.client import BlockingClient
from patience import PATIENCE
from requirements import requirement

CALLERS = [f"caller{number}" for number in range(1, 36)]
SCRIBE = "scribe"
SETTINGS = people(SCRIBE, *CALLERS) + '[approvals]\nby = "operator"\n'
SECRET = "sk_live_abcdefghijklmnop1234"
DECIDE = """async ([id, decision]) => {
    const headers = {"content-type": "application/json", "x-handrail-csrf": localStorage.getItem("handrail-csrf")};
    const body = JSON.stringify(decision);
    const answer = await fetch(`api/approvals/${id}`, {method: "POST", headers, body});
    return [answer.status, (await answer.json()).error];
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("home"), settings=SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def context(chromium: Browser, served: Served) -> Iterator[BrowserContext]:
    with signed_context(chromium, served.link, accept_downloads=True) as made:
        yield made


@pytest.fixture(scope="module")
def looking(context: BrowserContext, served: Served) -> Iterator[Page]:
    with window(context, f"{served.url}/#/now") as page:
        yield page


@pytest.fixture
def page(looking: Page, served: Served) -> Iterator[Page]:
    """The one window of this file, on Approve, with what earlier tests decided put away."""
    looking.goto(f"{served.url}/#/now")
    expect(looking.get_by_test_id("running")).to_be_visible()
    looking.goto(f"{served.url}/#/approve")
    expect(looking.get_by_role("heading", name="Approve", exact=True)).to_be_visible()
    yield looking
    for left in fetched(looking, "api/approvals")["open"]:
        looking.evaluate(DECIDE, [left["id"], {"yes": False}])


class Caller:
    """Somebody who calls tools, and waits for what becomes of it."""

    def __init__(self, served: Served, who: str) -> None:
        self.who = who
        self._served = served
        self._client = served.client(who=who, name=f"{who}s-agent")

    def call(self, tool: str, **arguments: Any) -> Future[Any]:
        return self._served.in_background(self._client.call, tool, arguments)

    def cancels(self, order_id: int, **more: Any) -> Future[Any]:
        return self.call("cancel_order", order_id=order_id, **more)


@pytest.fixture(scope="module")
def free(served: Served) -> list[str]:
    return list(CALLERS)


@pytest.fixture
def caller(served: Served, free: list[str]) -> Caller:
    return Caller(served, free.pop(0))


def card_of(page: Page, who: str, state: str = "pending") -> Locator:
    """The card of a call by them."""
    return page.locator(f'article[data-state="{state}"]', has=page.get_by_text(who, exact=True))


def its(page: Page, what: str, card: Locator) -> Locator:
    return page.get_by_test_id(f"{what}-{ident(card)}")


def kept(page: Page, card: Locator) -> Locator:
    """The same card, whatever becomes of it."""
    expect(card).to_be_visible()
    return page.get_by_test_id(f"card-{ident(card)}")


def press(page: Page, card: Locator, *keys: str) -> None:
    """Keys for the card that is selected, once it has been in view for long enough."""
    expect(card).to_have_attribute("data-ready", "")
    for key in keys:
        page.keyboard.press(key)


def nothing_waits(page: Page, caller: Caller) -> None:
    """On the page, which hears of a decision a moment after the caller: else the last card is taken for the next."""
    expect(card_of(page, caller.who)).to_have_count(0)


# Yes and no


@requirement("APP-03", "APP-04", everywhere=True)
def test_a_card_appears_by_itself_and_says_all_there_is_to_know(page: Page, caller: Caller) -> None:
    expect(page.get_by_text("No call is waiting for approval")).to_be_visible()
    call = caller.cancels(7, reason="a duplicate")
    card = kept(page, card_of(page, caller.who))
    said = [
        "Cancel an order",  # what would happen
        "It cannot be undone",
        "cancel_order",
        "on shop",
        caller.who,
        f"{caller.who}s-agent",
        "destructive",  # why it asks
        "a duplicate",
    ]
    for text in said:
        expect(card).to_contain_text(text)
    expect(card).to_contain_text(re.compile(r"\d+:\d\d left"))
    expect(its(page, "arguments", card).get_by_test_id("given-order_id")).to_contain_text("7")
    expect(page.get_by_test_id("waiting")).to_have_text("1 call waiting for approval")
    expect(page.get_by_test_id("approve-count")).to_have_text("1")
    announced = page.locator('[aria-live="polite"]').filter(has_text="New: cancel_order")
    expect(announced).not_to_contain_text("duplicate")  # a screen reader in an office
    assert not call.done()
    its(page, "no", card).click()
    call.result(PATIENCE)


@requirement("APP-03", everywhere=True)
def test_yes_lets_the_call_run_and_the_card_says_who_said_it(page: Page, caller: Caller) -> None:
    call = caller.cancels(8)
    card = kept(page, card_of(page, caller.who))
    its(page, "yes", card).click()
    assert call.result(PATIENCE).text == "order 8 is cancelled: no reason"
    expect(its(page, "verdict", card)).to_contain_text("Approved by operator local")
    expect(its(page, "yes", card)).to_have_count(0)
    expect(page.get_by_test_id("approve-count")).to_have_count(0)


@requirement("APP-03", everywhere=True)
def test_no_with_a_reason_runs_nothing_and_the_caller_is_told_the_reason(page: Page, caller: Caller) -> None:
    call = caller.cancels(9)
    card = kept(page, card_of(page, caller.who))
    its(page, "note", card).fill("the customer called back")
    its(page, "no", card).click()
    answer = call.result(PATIENCE)
    assert answer.is_error and "the customer called back" in answer.text
    expect(card).to_have_attribute("data-state", "denied")
    expect(its(page, "verdict", card)).to_contain_text("Denied by operator local")
    expect(its(page, "verdict", card)).to_contain_text("the customer called back")


@requirement("APP-03", everywhere=True)
def test_a_reason_can_be_picked(page: Page, caller: Caller) -> None:
    call = caller.cancels(9)
    card = kept(page, card_of(page, caller.who))
    chip = card.get_by_role("button", name="suspicious arguments")
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "true")
    expect(its(page, "note", card)).to_have_value("suspicious arguments")
    its(page, "no", card).click()
    assert "suspicious arguments" in call.result(PATIENCE).text


@requirement("APP-04", everywhere=True)
def test_secrets_are_masked_long_arguments_fold_and_the_tool_gets_both_as_they_are(page: Page, caller: Caller) -> None:
    path = "/".join(["folder"] * 400)
    call = caller.call("delete_file", path=path, token=SECRET)
    card = kept(page, card_of(page, caller.who))
    expect(card).to_contain_text("Secrets in the arguments are masked here")
    expect(card.get_by_test_id("given-token")).not_to_contain_text(SECRET)
    assert SECRET not in page.content()
    given = card.get_by_test_id("given-path")
    fold = given.get_by_test_id("fold")
    expect(fold).to_have_text(re.compile(r"Show all [\d,]+ characters"))
    fold.click()
    expect(given).to_contain_text(path)
    its(page, "yes", card).click()
    assert call.result(PATIENCE).text == f"{path} is deleted"


# Yes, with other arguments


@requirement("APP-03", "APP-04", everywhere=True)
def test_edit_and_approve_runs_the_call_with_the_edited_arguments(page: Page, caller: Caller) -> None:
    call = caller.cancels(10, reason="a mistake")
    card = kept(page, card_of(page, caller.who))
    its(page, "edit", card).click()
    form = its(page, "edit-form", card)
    form.get_by_test_id("field-/order_id").fill("11")
    expect(its(page, "checked", card)).to_contain_text("Fits the schema")
    its(page, "approve-edited", card).click()
    assert "order 11 is cancelled: a mistake" in call.result(PATIENCE).text
    expect(its(page, "verdict", card)).to_contain_text("Approved with other arguments by operator local")


@requirement("APP-03", everywhere=True)
def test_an_edit_that_does_not_fit_shows_the_problem_at_its_place_and_cannot_be_sent(
    page: Page, caller: Caller
) -> None:
    call = caller.cancels(12)
    card = kept(page, card_of(page, caller.who))
    its(page, "edit", card).click()
    field = its(page, "edit-form", card).get_by_test_id("field-/order_id")
    send = its(page, "approve-edited", card)
    expect(send).to_be_enabled()
    field.fill("5000")
    expect(card.get_by_test_id("problem-/order_id").first).to_contain_text("1000")
    expect(send).to_be_disabled()
    expect(field).to_have_attribute("aria-invalid", "true")
    status, said = page.evaluate(DECIDE, [ident(card), {"yes": True, "edited": {"order_id": 5000}}])
    assert status == 422 and said and not call.done()  # nor past the page
    field.fill("13")
    expect(send).to_be_enabled()
    its(page, "edit-cancel", card).click()
    its(page, "yes", card).click()
    assert call.result(PATIENCE).text == "order 12 is cancelled: no reason"


# Yes, for a while


@requirement("APP-03", everywhere=True)
def test_a_narrow_yes_is_remembered_and_the_next_call_is_not_asked_about_until_it_is_revoked(
    page: Page, caller: Caller
) -> None:
    call = caller.call("delete_file", path="notes/old.txt")
    card = kept(page, card_of(page, caller.who))
    its(page, "remember", card).click()
    narrow = card.get_by_role("button").filter(has_text="path starts with notes/")
    expect(narrow).to_contain_text("for 8 hours")
    narrow.click()
    assert call.result(PATIENCE).text == "notes/old.txt is deleted"
    grant = page.locator('[data-testid^="grant-"]', has_text=caller.who)
    expect(grant).to_contain_text("delete_file")
    assert caller.call("delete_file", path="notes/new.txt").result(PATIENCE).text == "notes/new.txt is deleted"

    nothing_waits(page, caller)
    beside = caller.call("delete_file", path="letters/new.txt")  # which was not meant
    other = kept(page, card_of(page, caller.who))
    assert ident(other) != ident(card)
    its(page, "no", other).click()
    assert beside.result(PATIENCE).is_error

    its(page, "revoke", grant).click()
    expect(grant).to_have_count(0)
    nothing_waits(page, caller)
    again = caller.call("delete_file", path="notes/new.txt")
    third = kept(page, card_of(page, caller.who))
    its(page, "no", third).click()
    assert again.result(PATIENCE).is_error


@requirement("APP-03", everywhere=True)
def test_a_yes_to_exactly_these_arguments_is_remembered_for_as_long_as_was_chosen(page: Page, caller: Caller) -> None:
    call = caller.cancels(20, reason="twice")
    card = kept(page, card_of(page, caller.who))
    its(page, "remember", card).click()
    its(page, "duration", card).select_option("1 day")
    its(page, "exactly", card).click()
    assert not call.result(PATIENCE).is_error
    grant = page.locator('[data-testid^="grant-"]', has_text=caller.who)
    expect(grant).to_contain_text(re.compile(r"23 h 5\d min left"))
    assert not caller.cancels(20, reason="twice").result(PATIENCE).is_error
    nothing_waits(page, caller)
    other = caller.cancels(21, reason="twice")
    second = kept(page, card_of(page, caller.who))
    its(page, "no", second).click()
    assert other.result(PATIENCE).is_error


@requirement("APP-04", everywhere=True)
def test_what_differs_from_the_last_approved_call_is_marked(page: Page, caller: Caller) -> None:
    first = caller.cancels(30, reason="late")
    its(page, "yes", kept(page, card_of(page, caller.who))).click()
    first.result(PATIENCE)
    nothing_waits(page, caller)
    second = caller.cancels(31, reason="late")
    card = kept(page, card_of(page, caller.who))
    expect(card).to_contain_text("unusual differences to earlier approved calls are marked")
    changed = card.get_by_test_id("given-order_id")
    expect(changed).to_contain_text("differs")
    expect(changed).to_contain_text(re.compile(r"last time\D*30"))
    expect(changed).to_contain_text(re.compile(r"now\D*31"))
    expect(card.get_by_test_id("given-reason")).not_to_contain_text("differs")
    its(page, "yes", card).click()
    second.result(PATIENCE)
    nothing_waits(page, caller)
    third = caller.cancels(32, reason="too late")  # an id differs always, which says nothing
    card = kept(page, card_of(page, caller.who))
    expect(card.get_by_test_id("given-reason")).to_contain_text("differs")
    expect(card.get_by_test_id("given-order_id")).not_to_contain_text("differs")
    its(page, "no", card).click()
    third.result(PATIENCE)


# Several windows, and one decision


@requirement("APP-03", everywhere=True)
def test_of_two_windows_that_decide_in_the_same_moment_exactly_one_does_and_the_other_is_told_who(
    page: Page, chromium: Browser, served: Served, caller: Caller
) -> None:
    link = served.link_for("boss", "view", "approve")
    with signed_context(chromium, link) as hers, window(hers, f"{served.url}/#/approve") as other:
        call = caller.cancels(40)
        card = kept(page, card_of(page, caller.who))
        ends = [its(page, "yes", card), other.get_by_test_id(f"no-{ident(card)}")]
        for end in ends:
            expect(end).to_be_enabled()
        moment = time.time() * 1000 + 2_000
        for end in ends:
            end.evaluate("(button, moment) => setTimeout(() => button.click(), moment - Date.now())", moment)
        answer = call.result(PATIENCE)
        winner, loser = (other, page) if answer.is_error else (page, other)
        who = "boss" if winner is other else "local"
        verdict = f"{'Denied' if winner is other else 'Approved'} by operator {who}"
        for each in (page, other):  # both agree
            expect(each.get_by_test_id(f"verdict-{ident(card)}")).to_contain_text(verdict)
            expect(each.get_by_test_id(f"yes-{ident(card)}")).to_have_count(0)
        expect(winner.get_by_test_id(f"failed-{ident(card)}")).to_have_count(0)
        expect(loser.get_by_test_id(f"failed-{ident(card)}")).to_contain_text(f"by operator {who} already")


@requirement("APP-03", everywhere=True)
def test_a_decision_that_comes_late_is_told_who_was_first(
    page: Page, context: BrowserContext, served: Served, caller: Caller
) -> None:
    """The slow window's decision is held back until the other's has been taken."""
    with window(context, f"{served.url}/#/approve") as slow:
        call = caller.cancels(41)
        card = kept(page, card_of(page, caller.who))
        held: list[Any] = []
        slow.route("**/api/approvals/*", lambda route: held.append(route))
        slow.get_by_test_id(f"no-{ident(card)}").click()
        its(page, "yes", card).click()
        assert call.result(PATIENCE).text == "order 41 is cancelled: no reason"
        expect(slow.get_by_test_id(f"verdict-{ident(card)}")).to_contain_text("Approved by operator local")
        [route] = held
        route.continue_()
        expect(slow.get_by_test_id(f"failed-{ident(card)}")).to_contain_text("by operator local already; nothing")
        expect(slow.get_by_test_id(f"verdict-{ident(card)}")).to_contain_text("Approved by operator local")


def test_whoever_leaves_while_a_decision_is_on_its_way_is_not_brought_back(
    page: Page, served: Served, caller: Caller
) -> None:
    calls = [caller.cancels(number) for number in (44, 45)]
    card = kept(page, card_of(page, caller.who).filter(has=page.get_by_text("44", exact=True)))
    expect(card_of(page, caller.who)).to_have_count(2)
    held: list[Any] = []
    page.route("**/api/approvals/*", lambda route: held.append(route))
    its(page, "no", card).click()
    expect(its(page, "no", card)).to_have_attribute("aria-busy", "true")
    page.goto(f"{served.url}/#/connections")
    expect(page.get_by_role("heading", name="Connections", exact=True)).to_be_visible()
    [route] = held
    with page.expect_response("**/api/approvals/*"):
        route.continue_()
    page.unroute("**/api/approvals/*")
    assert calls[0].result(PATIENCE).is_error
    expect(page.get_by_text("Denied.", exact=True).first).to_be_attached()  # it is told all the same
    expect(page).to_have_url(re.compile("#/connections$"))


@requirement("APP-03", everywhere=True)
def test_a_decided_card_cannot_be_decided_again(page: Page, caller: Caller) -> None:
    call = caller.cancels(42)
    card = kept(page, card_of(page, caller.who))
    its(page, "no", card).click()
    assert call.result(PATIENCE).is_error
    expect(card).to_have_attribute("data-state", "denied")
    for what in ("yes", "no", "edit", "remember", "note"):
        expect(its(page, what, card)).to_have_count(0)
    status, said = page.evaluate(DECIDE, [ident(card), {"yes": True}])
    assert status == 409 and "denied by operator local already" in said
    page.keyboard.press("a")
    page.keyboard.press("Enter")
    past = page.get_by_test_id(f"past-{ident(card)}")
    page.reload()
    expect(past).to_contain_text("denied")


@requirement("APP-03", everywhere=True)
def test_a_card_goes_with_a_caller_who_gives_up_in_every_window(
    page: Page, context: BrowserContext, served: Served, caller: Caller
) -> None:
    hasty = served.client(who=caller.who, timeout=8.0)
    with window(context, f"{served.url}/#/approve") as other:
        call = served.in_background(hasty.call, "cancel_order", {"order_id": 43})
        card = kept(page, card_of(page, caller.who))
        assert "not done within 8 s" in str(call.exception(PATIENCE))
        for each in (page, other):
            gone = each.get_by_test_id(f"card-{ident(card)}")
            expect(gone).to_have_attribute("data-state", "cancelled")
            expect(gone).to_contain_text("there is nothing left to decide")
            expect(each.get_by_test_id(f"yes-{ident(card)}")).to_have_count(0)
            expect(each.get_by_test_id("approve-count")).to_have_count(0)
    status, said = page.evaluate(DECIDE, [ident(card), {"yes": True}])
    assert status == 409 and "cancelled already" in said


@requirement("APP-03", "APP-12", everywhere=True)
def test_cancelling_a_call_that_waits_takes_its_card_away(
    page: Page, context: BrowserContext, served: Served, caller: Caller
) -> None:
    call = caller.cancels(44)
    card = kept(page, card_of(page, caller.who))
    with window(context, f"{served.url}/#/now") as now:
        expect(now.get_by_test_id("waiting")).to_contain_text(caller.who)
        now.locator('[data-testid^="cancel-"]').click()
        assert "cancelled by an operator" in call.result(PATIENCE).text
        expect(now.get_by_test_id("waiting")).to_contain_text("No call is waiting")
    expect(card).to_have_attribute("data-state", "cancelled")
    expect(its(page, "yes", card)).to_have_count(0)


@requirement("APP-03", everywhere=True)
def test_a_yes_that_is_used_says_so_on_every_open_card(
    page: Page, context: BrowserContext, served: Served, caller: Caller
) -> None:
    with window(context, f"{served.url}/#/approve") as other:
        call = caller.cancels(45)
        card = kept(page, card_of(page, caller.who))
        its(page, "yes", card).click()
        assert not call.result(PATIENCE).is_error
        for each in (page, other):
            expect(each.get_by_test_id(f"state-{ident(card)}")).to_have_text("approved, used")


@requirement("APP-03", everywhere=True)
def test_a_yes_to_a_caller_who_was_told_to_come_back_is_good_when_they_do(chromium: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path, settings=people("ada") + '[approvals]\nby = "operator"\nwait = 1\n') as served,
        signed_context(chromium, served.link) as context,
        window(context, f"{served.url}/#/approve") as page,
    ):
        ada = served.client(who="ada", revision="2025-11-25")
        first = served.in_background(ada.call, "cancel_order", {"order_id": 43})
        card = kept(page, card_of(page, "ada"))
        assert "Call it again with the same arguments" in first.result(PATIENCE).text
        expect(its(page, "left", card)).to_have_text("The caller has left; the call runs if the caller calls again.")
        its(page, "yes", card).click()
        expect(its(page, "verdict", card)).to_contain_text("Approved by operator local")
        expect(its(page, "verdict", card)).to_contain_text("Not used yet: the call runs if the caller calls again.")
        expect(its(page, "state", card)).to_have_text("approved, not used yet")
        past = its(page, "past", card)
        page.get_by_test_id("tidy").click()
        expect(past).to_contain_text("approved, not used yet")
        assert ada.call("cancel_order", {"order_id": 43}).text == "order 43 is cancelled: no reason"
        expect(past).to_contain_text("approved, used")
        expect(card).to_have_count(0)  # it does not come back as a card


# Who may


@requirement("APP-03", everywhere=True)
def test_somebody_without_the_role_sees_the_card_cannot_decide_and_is_told_why(
    page: Page, chromium: Browser, served: Served, caller: Caller
) -> None:
    link = served.link_for("viewer", "view")
    with signed_context(chromium, link) as theirs, window(theirs, f"{served.url}/#/approve") as other:
        call = caller.cancels(50)
        card = kept(other, card_of(other, caller.who))
        expect(card).to_contain_text("You cannot decide this one")
        expect(card).to_contain_text("it has not the role approve")
        for what in ("yes", "no", "edit", "remember"):
            expect(its(other, what, card)).to_have_count(0)
        status, _ = other.evaluate(DECIDE, [ident(card), {"yes": True}])
        assert status == 403 and not call.done()
        page.get_by_test_id(f"no-{ident(card)}").click()  # somebody who may
        assert call.result(PATIENCE).is_error
        expect(other.get_by_test_id(f"verdict-{ident(card)}")).to_contain_text("Denied by operator local")


@requirement("APP-03", everywhere=True)
def test_where_the_caller_must_not_decide_somebody_else_has_to(chromium: Browser, tmp_path: Path) -> None:
    settings = people("ada") + '[approvals]\nby = "another"\n[console]\nprincipal = "ada"\n'
    with (
        serving(tmp_path, settings=settings) as served,
        signed_context(chromium, served.link) as hers,
        window(hers, f"{served.url}/#/approve") as page,
    ):
        call = Caller(served, "ada").cancels(51)
        card = kept(page, card_of(page, "ada"))
        expect(card).to_contain_text("You made this call: another person has to decide")
        expect(its(page, "yes", card)).to_have_count(0)
        status, said = page.evaluate(DECIDE, [ident(card), {"yes": True}])
        assert status == 403 and "another person" in said and not call.done()
        link = served.link_for("grace", "view", "approve")
        with signed_context(chromium, link) as others, window(others, f"{served.url}/#/approve") as other:
            other.get_by_test_id(f"yes-{ident(card)}").click()
            assert call.result(PATIENCE).text == "order 51 is cancelled: no reason"
        expect(its(page, "verdict", card)).to_contain_text("Approved by operator grace")


# A stream that was busy hears of a yes when it has been used: it is told the state of then, twice.
HEARS_LATE = """
const real = window.fetch;
window.fetch = async (path, options) => {
  const answer = await real(path, options);
  if (path !== "api/events") return answer;
  let rest = "";
  const heard = new TransformStream({
    transform(text, to) {
      const events = (rest + text).split("\\n\\n");
      rest = events.pop();
      for (const event of events)
        if (!event.startsWith("event: approval") || JSON.parse(event.split("data: ")[1]).state !== "approved")
          to.enqueue(event + "\\n\\n");
    }
  });
  const text = answer.body.pipeThrough(new TextDecoderStream()).pipeThrough(heard);
  return new Response(text.pipeThrough(new TextEncoderStream()), answer);
};
"""


@requirement("APP-03", everywhere=True)
def test_a_card_that_was_decided_and_used_at_once_keeps_its_verdict(served: Served, caller: Caller, page: Page) -> None:
    call = caller.cancels(52)
    name = ident(card_of(page, caller.who))
    late = page.context.new_page()
    late.add_init_script(HEARS_LATE)
    late.goto(f"{served.url}/#/approve")
    expect(late.get_by_test_id(f"yes-{name}")).to_be_visible()
    page.get_by_test_id(f"yes-{name}").click()
    assert call.result(PATIENCE).text == "order 52 is cancelled: no reason"
    expect(late.get_by_test_id(f"verdict-{name}")).to_contain_text("Approved by operator local")
    late.close()


@requirement("APP-03", everywhere=True)
def test_a_card_nobody_decides_in_time_expires_before_ones_eyes(chromium: Browser, tmp_path: Path) -> None:
    settings = people("ada") + '[approvals]\nby = "operator"\nexpires = 2\nwait = 2\n'
    with (
        serving(tmp_path, settings=settings) as served,
        signed_context(chromium, served.link) as context,
        window(context, f"{served.url}/#/approve") as page,
    ):
        call = Caller(served, "ada").cancels(52)
        card = kept(page, card_of(page, "ada"))
        expect(card).to_have_attribute("data-state", "expired")
        expect(card).to_contain_text("expired")
        expect(its(page, "verdict", card)).to_have_text(re.compile(r"It ended at \d\d:\d\d:\d\d$"))
        expect(its(page, "yes", card)).to_have_count(0)
        expect(page.get_by_test_id("approve-count")).to_have_count(0)
        assert call.result(PATIENCE).is_error
        status, said = page.evaluate(DECIDE, [ident(card), {"yes": True}])
        assert status in (400, 409) and "expired" in said


# By keyboard


@requirement("APP-16", "APP-03", everywhere=True)
def test_two_keys_are_a_decision_and_one_is_none(page: Page, caller: Caller) -> None:
    call = caller.cancels(60)
    card = kept(page, card_of(page, caller.who))
    press(page, card, "a")
    yes = its(page, "yes", card)
    expect(yes).to_be_focused()
    shown = "button => button.matches(':focus-visible') && getComputedStyle(button).outlineStyle !== 'none'"
    assert yes.evaluate(shown)
    page.keyboard.press("d")
    expect(its(page, "no", card)).to_be_focused()
    page.keyboard.press("Escape")
    expect(card).to_be_focused()
    assert not call.done()
    page.keyboard.press("a")
    page.keyboard.press("Enter")
    assert call.result(PATIENCE).text == "order 60 is cancelled: no reason"
    expect(its(page, "verdict", card)).to_be_visible()
    expect(card).to_be_focused()
    page.evaluate("id => { location.hash = `#/approve/${id}` }", ident(card))

    call = caller.cancels(61)  # while one is still at the one that was decided
    card = kept(page, card_of(page, caller.who))
    page.keyboard.press("d")  # which decides no other card than the one one is at: it leads to the next
    expect(card).to_be_focused()
    press(page, card, "d")
    expect(its(page, "no", card)).to_be_focused()
    page.keyboard.press("Enter")
    assert call.result(PATIENCE).is_error
    expect(card).to_have_attribute("data-state", "denied")


@requirement("APP-16", everywhere=True)
def test_j_and_k_move_between_cards_and_keys_typed_into_a_field_are_text(page: Page, caller: Caller) -> None:
    calls = []
    cards = []
    for number in (70, 71, 72):
        calls.append(caller.cancels(number))
        cards.append(kept(page, card_of(page, caller.who).filter(has=page.get_by_text(str(number), exact=True))))
    page.keyboard.press("k")
    for here in (1, 2, 2):
        page.keyboard.press("j")
        expect(cards[here]).to_be_focused()
        expect(cards[here]).to_have_class(re.compile("current"))
    page.keyboard.press("k")
    expect(cards[1]).to_be_focused()
    expect(page).to_have_url(re.compile(f"#/approve/{ident(cards[1])}$"))
    note = its(page, "note", cards[1])
    note.click()
    page.keyboard.type("a good day")
    expect(note).to_have_value("a good day")
    expect(note).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("e")
    expect(its(page, "edit-form", cards[1])).to_be_visible()
    page.keyboard.press("Escape")
    press(page, cards[1], "d", "Enter")
    assert "a good day" in calls[1].result(PATIENCE).text
    assert not calls[0].done() and not calls[2].done()
    for card, call in ((cards[0], calls[0]), (cards[2], calls[2])):
        its(page, "no", card).click()
        call.result(PATIENCE)


# Every selection of a card, and every decision that leaves the page: when, and for which card.
RHYTHM = """() => {
  window.selected = {};
  window.decided = [];
  const look = () => {
    const card = document.querySelector("article.card.current");
    if (card && window.last !== card.id) window.selected[card.id.slice(5)] = performance.now();
    window.last = card?.id;
  };
  look();
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true, attributes: true});
  const real = window.fetch;
  window.fetch = (path, options) => {
    const id = /^api\\/approvals\\/(\\w+)$/.exec(path)?.[1];
    if (id) {
      const box = document.getElementById(`card-${id}`).getBoundingClientRect();
      const inView = box.bottom > 0 && box.top < innerHeight;
      window.decided.push([id, performance.now() - window.selected[id], inView]);
    }
    return real(path, options);
  };
}"""


@requirement("APP-16", "APP-03", everywhere=True)
def test_in_a_rhythm_of_keys_no_card_is_decided_that_was_not_looked_at(
    page: Page, context: BrowserContext, served: Served, caller: Caller
) -> None:
    """Cards arrive and are decided elsewhere meanwhile; a key is held down, too."""
    other = context.new_page()
    other.goto(f"{served.url}/#/now")
    calls = {number: caller.cancels(number) for number in range(80, 84)}
    for number in calls:
        kept(page, card_of(page, caller.who).filter(has=page.get_by_text(str(number), exact=True)))
    first = page.locator("article.card.open").first
    name = ident(first)
    expect(first).to_have_attribute("data-ready", "")
    page.evaluate(RHYTHM)

    def rhythm() -> None:
        for key in ("a", "Enter"):
            page.keyboard.down(key)
            page.keyboard.down(key)  # which is how a key that is held down repeats
            page.keyboard.up(key)

    while page.locator("article.card.current").count() == 0 or ident(page.locator("article.card.current")) == name:
        rhythm()
    for number in range(84, 104):
        rhythm()
        if number % 4 == 0:
            calls[number] = caller.cancels(number)
        if number == 90:
            card = page.locator("article.card.current")
            other.evaluate(DECIDE, [ident(card), {"yes": False}])  # as somebody else would
    decided = page.evaluate("window.decided")
    assert decided[0][0] == name and decided[0][2]
    hasty = [each for each in decided[1:] if each[1] < 500 or not each[2]]
    assert not hasty, hasty
    for call in calls.values():
        while not call.done():
            for left in fetched(other, "api/approvals")["open"]:
                other.evaluate(DECIDE, [left["id"], {"yes": False}])
    other.close()
    page.reload()  # with a fetch of its own


@requirement("APP-16", everywhere=True)
def test_after_a_decision_the_next_card_below_is_selected(page: Page, caller: Caller) -> None:
    cards = []
    for number in (91, 92, 93):
        caller.cancels(number)
        cards.append(kept(page, card_of(page, caller.who).filter(has=page.get_by_text(str(number), exact=True))))
    current = re.compile("current")
    page.keyboard.press("j")
    expect(cards[1]).to_have_class(current)
    for here, then in ((1, 2), (2, 0)):
        press(page, cards[here], "d", "Enter")
        expect(cards[here]).to_have_attribute("data-state", "denied")
        expect(cards[then]).to_have_class(current)
        expect(cards[then]).to_be_focused()
    assert cards[0].get_attribute("data-state") == "pending"


# Told elsewhere

NOTIFICATIONS = """
  window.shown = []; window.asked = 0;
  window.Notification = class {
    static permission = "default";
    static requestPermission() {
      window.asked += 1;
      Notification.permission = "granted";
      return Promise.resolve("granted");
    }
    constructor(title, options) { window.shown.push([title, options.body]); window.latest = this; }
    close() {}
  };
  Document.prototype.hasFocus = () => false;
"""


@requirement("APP-03", everywhere=True)
def test_a_call_that_waits_is_notified_without_its_arguments_once_somebody_has_asked_for_that(
    context: BrowserContext, served: Served, caller: Caller, page: Page
) -> None:
    other = context.new_page()
    other.add_init_script(NOTIFICATIONS)
    try:
        other.goto(f"{served.url}/#/approve")
        expect(other.get_by_test_id("notify")).to_be_visible()
        assert other.evaluate("[asked, shown.length]") == [0, 0]
        first = caller.cancels(94)
        expect(card_of(other, caller.who)).to_be_visible()
        assert other.evaluate("[asked, shown.length]") == [0, 0]
        other.get_by_test_id("notify").click()
        expect(other.get_by_test_id("notify")).to_have_count(0)
        other.goto(f"{served.url}/#/now")
        second = caller.call("delete_file", path="/etc/passwd", token=SECRET)
        until(other, "shown.length")
        assert other.evaluate("shown") == [["shop: a call is waiting for approval", f"Delete a file for {caller.who}"]]
        expect(other).to_have_title(re.compile(r"^\(2\) Now"))
        other.evaluate("latest.onclick()")
        expect(other).to_have_url(re.compile(r"#/approve/\w+$"))
    finally:
        other.close()
    for left in fetched(page, "api/approvals")["open"]:
        page.evaluate(DECIDE, [left["id"], {"yes": False}])
    assert first.result(PATIENCE).is_error and second.result(PATIENCE).is_error


@requirement("APP-04", everywhere=True)
def test_a_card_says_what_would_happen_in_the_words_of_the_author(page: Page, caller: Caller) -> None:
    call = caller.call("refund", order_id=7, amount=12.5)
    card = kept(page, card_of(page, caller.who))
    expect(its(page, "preview", card)).to_contain_text("Order 7 of Ada Lovelace, paid 40.00:")
    assert its(page, "preview", card).inner_text().splitlines()[-1] == "12.50 would be refunded."
    for text in ("Refund an order", "Pay money back to the customer."):
        expect(card).to_contain_text(text)
    expect(its(page, "fingerprint", card)).to_have_count(0)  # nobody reads it
    card.get_by_role("button", name="Tool version").click()
    expect(its(page, "fingerprint", card)).to_have_text(re.compile(r"[0-9a-f]{64}"))
    its(page, "no", card).click()
    call.result(PATIENCE)
    call = caller.call("refund", order_id=13, amount=12.5)
    card = kept(page, card_of(page, caller.who))
    expect(its(page, "preview", card)).to_contain_text("The preview failed")
    expect(its(page, "preview", card)).to_contain_text("no such order")
    its(page, "no", card).click()
    call.result(PATIENCE)


# What is on record


def rows(page: Page) -> Locator:
    return page.locator('[data-testid^="audit-row-"]')


@pytest.fixture(scope="module")
def recorded(served: Served) -> BlockingClient:
    """Some calls, so that there is something to look for."""
    client = served.client(who=SCRIBE, name="recorder")
    client.call("echo", {"text": "for the record"})
    client.call("fail")
    client.call("add", {"a": "x"})
    return client


@requirement("APP-13", everywhere=True)
@pytest.mark.parametrize(
    ("name", "value", "column", "said"),
    [
        ("event", "intent", 2, "intent"),
        ("outcome", "tool_error", 5, "tool error"),
        ("tool", "echo", 3, "echo"),
        ("who", SCRIBE, 4, SCRIBE),
    ],
)
def test_the_audit_is_filtered_and_its_address_carries_the_filter(
    page: Page,
    served: Served,
    recorded: BlockingClient,
    name: str,
    value: str,
    column: int,
    said: str,
) -> None:
    page.goto(f"{served.url}/#/audit")
    field = page.get_by_test_id(f"audit-filter-{name}")
    expect(rows(page).first).to_be_visible()
    if name in ("event", "outcome"):
        field.select_option(value)
    else:
        field.fill(value)
    expect(page).to_have_url(re.compile(rf"#/audit\?{name}={value}$"))
    cells = rows(page).locator(f"td:nth-child({column + 1})")
    expect(cells.filter(has_not_text=said)).to_have_count(0)
    expect(cells.first).to_have_text(said)
    shown = rows(page).count()
    address = page.url
    page.get_by_test_id("audit-clear").click()
    expect(page).to_have_url(re.compile(r"#/audit$"))
    expect(cells.filter(has_not_text=said).first).to_be_visible()
    page.goto(address)  # whoever gets the link sees the same
    expect(field).to_have_value(value)
    expect(cells.filter(has_not_text=said)).to_have_count(0)
    expect(rows(page)).to_have_count(shown)


@requirement("APP-13", everywhere=True)
def test_the_audit_is_filtered_by_time(page: Page, served: Served, recorded: BlockingClient) -> None:
    page.goto(f"{served.url}/#/audit?until={int(time.time()) - 86400}")
    expect(page.get_by_text("No record fits")).to_be_visible()
    page.goto(f"{served.url}/#/audit?since={int(time.time()) - 86400}")
    expect(rows(page).first).to_be_visible()
    since = page.get_by_test_id("audit-filter-since")
    since.fill("2999-12-31T12:00:00")
    expect(page.get_by_text("No record fits")).to_be_visible()
    expect(page).to_have_url(re.compile(r"since=325\d{8}"))


@requirement("APP-13", everywhere=True)
def test_the_audit_is_searched_for_a_text_and_a_record_opens_to_all_that_is_in_it(
    page: Page, served: Served, recorded: BlockingClient
) -> None:
    call_id = served.last_call("echo")
    page.goto(f"{served.url}/#/audit")
    expect(rows(page).first).to_be_visible()
    page.keyboard.press("/")
    search = page.get_by_test_id("audit-filter-text")
    expect(search).to_be_focused()
    page.keyboard.type(call_id)
    expect(rows(page)).to_have_count(1)  # one line a call
    for said in ("call", "echo", SCRIBE, "ok"):
        expect(rows(page)).to_contain_text(said)
    expect(rows(page).locator("td").nth(6)).to_have_text(re.compile(r"^[<\d.]+ m?s$"))
    toggle = rows(page).get_by_role("button", name=re.compile(r"^Records \d+ to \d+$"))
    expect(page.get_by_role("group", name=re.compile("^Record"))).to_have_count(0)
    toggle.click()
    both = page.locator('[data-testid^="audit-record-"]')
    expect(both).to_have_count(2)
    expect(both.last).to_contain_text("outcome")
    for said in ("intent", "principal", SCRIBE, "recorder", "arguments_digest", "prev", call_id):
        expect(both.first).to_contain_text(said)
    expect(page.locator("main")).not_to_contain_text("for the record")  # what was said is nobody's business
    rows(page).first.get_by_role("link").click()
    expect(page.get_by_test_id("call-id")).to_have_text(call_id)
    expect(page.get_by_test_id("story")).to_contain_text("for the record")


@requirement("APP-13", everywhere=True)
def test_the_audit_exported_as_jsonl_verifies(
    page: Page, served: Served, recorded: BlockingClient, tmp_path: Path
) -> None:
    page.goto(f"{served.url}/#/audit")
    with page.expect_download() as began:
        page.get_by_test_id("export-jsonl").click()
    file = tmp_path / began.value.suggested_filename
    began.value.save_as(file)
    assert file.name == "audit.jsonl"
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [each["number"] for each in records] == list(range(1, len(records) + 1))
    assert {"console", "intent", "outcome"} <= {each["event"] for each in records}
    assert records[-1]["step"] == "exported the audit"  # itself on record
    verified = handrail("audit", "verify", str(file), home=tmp_path)
    assert verified.returncode == 0, verified
    file.write_text(file.read_text("utf-8").replace('"tool":"echo"', '"tool":"ecko"', 1), "utf-8")
    assert handrail("audit", "verify", str(file), home=tmp_path).returncode != 0


@requirement("APP-13", everywhere=True)
def test_the_audit_exported_as_csv_has_what_the_filter_shows(
    page: Page, served: Served, recorded: BlockingClient
) -> None:
    page.goto(f"{served.url}/#/audit?tool=fail&event=outcome")
    expect(rows(page).first).to_contain_text("fail")
    shown = rows(page).count()
    with page.expect_download() as began:
        page.get_by_test_id("export-csv").click()
    assert began.value.suggested_filename == "audit.csv"
    table = list(csv.DictReader(io.StringIO(Path(began.value.path()).read_text("utf-8"))))
    assert len(table) == shown
    assert {(each["event"], each["outcome"], each["who"]) for each in table} == {("outcome", "tool_error", SCRIBE)}


@requirement("APP-13", everywhere=True)
def test_older_records_come_on_demand(page: Page, served: Served, recorded: BlockingClient) -> None:
    for number in range(60):
        recorded.call("add", {"a": number})
    page.goto(f"{served.url}/#/audit")
    expect(rows(page)).to_have_count(50)  # calls, of 100 records
    page.get_by_test_id("audit-older").click()
    expect(rows(page).nth(60)).to_be_visible()
    numbers = [int(ident(each).removeprefix("row-")) for each in rows(page).all()]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == len(numbers)


@requirement("APP-13", everywhere=True)
def test_what_people_did_here_is_on_record_too(page: Page, served: Served, caller: Caller) -> None:
    call = caller.cancels(80)
    card = kept(page, card_of(page, caller.who))
    approval = ident(card)
    its(page, "no", card).click()
    call.result(PATIENCE)
    nothing_waits(page, caller)
    call = caller.cancels(81)
    its(page, "yes", kept(page, card_of(page, caller.who))).click()
    call.result(PATIENCE)
    page.goto(f"{served.url}/#/audit?event=console")
    expect(rows(page).filter(has_text="local").filter(has_text="signed in")).to_have_count(1)
    page.goto(f"{served.url}/#/audit?event=approval&text={approval}")
    expect(rows(page).filter(has_text="denied")).to_have_count(1)
    rows(page).filter(has_text="denied").get_by_role("button", name=re.compile("^Record")).click()
    expect(page.get_by_role("group", name=re.compile("^Record")).last).to_contain_text("operator local")
    page.goto(f"{served.url}/#/audit?tool=cancel_order&who={caller.who}")
    line = rows(page).filter(has_text="ok")
    expect(line).to_have_count(1)  # question, yes, intent and outcome of one call
    line.get_by_role("button", name=re.compile("^Record")).click()
    events = page.locator('[data-testid^="audit-record-"] .entry-what')
    expect(events).to_have_text([re.compile(each) for each in ("approval", "approval", "intent", "outcome")])


@requirement("APP-13", everywhere=True)
def test_the_badge_is_green_until_somebody_tampers_and_then_names_the_record(chromium: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as served,
        signed_context(chromium, served.link) as context,
        window(context, f"{served.url}/#/audit") as page,
    ):
        client = served.client()
        for number in range(5):
            client.call("add", {"a": number})
        badge = page.get_by_test_id("badge")
        page.get_by_test_id("verify").click()
        expect(badge).to_have_attribute("data-ok", "true")
        expect(badge).to_have_text("Chain verified")
        good = badge.locator(".pill").evaluate("pill => getComputedStyle(pill).color")
        with contextlib.closing(sqlite3.connect(served.state)) as database, database:
            changed = "UPDATE audit SET line = replace(CAST(line AS TEXT), '\"add\"', '\"sub\"') WHERE number = 5"
            database.execute(changed.replace("replace(", "CAST(replace(").replace(") WHERE", ") AS BLOB) WHERE"))
        page.get_by_test_id("verify").click()
        expect(badge).to_have_attribute("data-ok", "false")
        expect(badge).to_have_text("Chain broken")
        expect(page.locator(".integrity")).to_contain_text("Record 5")
        assert badge.locator(".pill").evaluate("pill => getComputedStyle(pill).color") != good
        page.reload()
        expect(badge).to_have_text("Chain broken")
