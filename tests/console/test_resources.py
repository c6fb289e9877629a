"""The console's resources and prompts: as one caller finds them, and why not; read, filled in, switched."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from handrail import Call, Server
from handrail.approvals.queue import Approvals
from handrail.guards.policy import Policy, Rule
from handrail.model import Principal
from handrail.revisions import REVISIONS
from handrail.revisions.base import LISTS
from handrail.testing import Peer
from requirements import requirement
from rigs_console import Object, Page, Refused, consoled
from servers_archive import HOSTILE, JAVASCRIPT, NOTES, SECRET, TEMPLATE, archive

RULES = [
    Rule(verdict="hide", name="not for guests", principals=["guest"], uri="archive://page"),
    Rule(verdict="hide", name="not her notes", principals=["local"], uri="archive://notes/grace/*"),
    Rule(verdict="deny", name="no bells", uri="archive://bell"),
    Rule(verdict="hide", name="no moods", principals=["guest"], prompts=["mood"]),
]
METHODS = {"resources": ("resources/list", "resources/templates/list"), "prompts": ("prompts/list",)}


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with consoled(archive(policy=Policy(RULES))) as rig:
        page = await rig.page()
        await page.listen()
        yield page


async def catalog(page: Page, kind: str, **query: Any) -> dict[str, Object]:
    view = await page.get(f"catalog/{kind}", **query)
    return {each["name"]: each for each in view[kind]}


async def run(page: Page, **asked: Any) -> Object:
    """What became of a read, or of a prompt."""
    begun = await page.post("try", **asked)
    done: Object = await page.event("try", id=begun["id"], kind="done")
    return done


def path_of(kind: str, name: str, verb: str) -> str:
    return f"catalog/{kind}/{quote(name, safe='')}/{verb}"


@requirement("APP-31", everywhere=True)
@pytest.mark.parametrize("revision", list(REVISIONS))
async def test_what_is_exposed_is_what_the_wire_lists_for_that_caller(revision: str) -> None:
    server = archive(policy=Policy(RULES))
    async with consoled(server) as rig:
        page = await rig.page()
        for kind, methods in METHODS.items():
            found = await catalog(page, kind, revision=revision, **{"as": "guest", "scopes": "vault"})
            listed = []
            async with Peer(server, revision=revision, principal=Principal("guest", frozenset({"vault"}))) as peer:
                for method in methods:
                    if method in REVISIONS[revision].requests:
                        listed += (await peer.request(method))["result"][LISTS[method]]
            names = [each.get("uri", each.get("uriTemplate", each["name"])) for each in listed]
            assert [name for name, each in found.items() if each["exposed"]] == names
            assert all(bool(each["hidden_because"]) != each["exposed"] for each in found.values())


@requirement("APP-31", everywhere=True)
async def test_each_entry_says_what_it_is_and_why_it_is_not_exposed(page: Page) -> None:
    found = await catalog(page, "resources", **{"as": "guest"})
    readme, note = found["archive://readme"], found[TEMPLATE]
    assert (readme["kind"], readme["title"], readme["own_name"]) == ("resource", "Read me", "readme")
    assert (readme["mimeType"], readme["size"], readme["tags"]) == ("text/markdown", 12, ["shelf"])
    assert readme["annotations"] == {"audience": ["user"], "priority": 0.5, "lastModified": "2026-01-02T03:04:05Z"}
    assert (note["kind"], note["completes"]) == ("template", ["name"])
    assert note["input_schema"]["required"] == ["name", "page"]  # a URI has no place for the default of a variable
    assert "scope vault" in found["archive://vault"]["hidden_because"]
    assert "not for guests" in found["archive://page"]["hidden_because"]
    assert (found["archive://bell"]["verdict"], found["archive://bell"]["rule"]) == ("deny", "no bells")
    prompts = await catalog(page, "prompts", **{"as": "guest"})
    assert "no moods" in prompts["mood"]["hidden_because"] and prompts["mood"]["verdict"] == "hide"
    assert list(prompts["review"]["input_schema"]["properties"]) == ["code", "style", "author", "lines"]
    assert prompts["review"]["completes"] == ["author", "style"]


async def test_a_server_without_them_has_empty_lists_and_other_kinds_do_not_exist() -> None:
    async with consoled(Server("empty")) as rig:
        page = await rig.page()
        assert await catalog(page, "resources") == await catalog(page, "prompts") == {}
        for kind in ("tools", "secrets"):
            for request in (
                page.get(f"catalog/{kind}"),
                page.post(path_of(kind, "x", "complete"), argument="", value=""),
            ):
                with pytest.raises(Refused, match="not one of resources, prompts") as refused:
                    await request
                assert refused.value.status == 404


@requirement("APP-31", everywhere=True)
async def test_a_resource_is_read_as_the_signed_in_person_masked_and_is_a_call_like_any(page: Page) -> None:
    done = await run(page, resource="archive://readme")
    [block] = done["result"]["blocks"]
    assert block["type"] == "resource" and block["text"].startswith("# Read me") and SECRET not in str(done)
    story = await page.get(f"calls/{done['call']}")
    row = story["row"]
    assert (row["tool"], row["title"], row["who"], row["outcome"]) == ("archive://readme", "Read me", "local", "ok")
    assert story["arguments"] == {"uri": "archive://readme"} and SECRET not in json.dumps(story)
    assert (await catalog(page, "resources"))["archive://readme"]["calls"] == 1


@requirement("APP-31", "APP-08", everywhere=True)
async def test_only_media_that_are_what_they_say_and_cannot_act_are_shown(page: Page) -> None:
    [block] = (await run(page, resource="archive://seal"))["result"]["blocks"]
    assert block["playable"] and block["data"].startswith("iVBOR") and not block["cut"]
    [block] = (await run(page, resource="archive://blob"))["result"]["blocks"]
    assert (block["playable"], block["data"], block["bytes"]) == (False, "", 256)
    assert "text" not in block
    for name in ("fake", "drawing"):
        done = await run(page, resource=f"archive://{name}")
        assert "onload" not in json.dumps(done) and "onerror" not in json.dumps(done)
        assert all(not each.get("data") for each in done.get("result", {"blocks": []})["blocks"])
    [block] = (await run(page, resource=JAVASCRIPT))["result"]["blocks"]
    assert block["uri"] == block["text"] == JAVASCRIPT and block["readable"]  # by its page here


@requirement("APP-31", everywhere=True)
async def test_progress_and_log_of_reads_and_prompts_come_as_those_of_calls() -> None:
    server = archive()

    @server.resource("archive://slow")
    async def slow(call: Call) -> str:
        await call.log("info", "the first shelf")
        await call.progress(1, 2, "half of it")
        return "done"

    @server.prompt
    async def long(call: Call) -> str:
        return await slow(call)

    async with consoled(server) as rig:
        page = await rig.page()
        await page.listen()
        for revision, begun in product(
            ("2025-11-25", "2026-07-28"), ({"resource": "archive://slow"}, {"prompt": "long"})
        ):
            run_id = (await page.post("try", revision=revision, **begun))["id"]
            assert (await page.event("try", id=run_id, kind="log"))["text"] == "the first shelf"
            progress = (await page.event("try", id=run_id, kind="progress"))["progress"]
            assert (progress["done"], progress["total"], progress["message"]) == (1, 2, "half of it")
            done = await page.event("try", id=run_id, kind="done")
            assert done["result"]["blocks"][0]["text"] == "done"


@requirement("APP-31", everywhere=True)
async def test_rows_figures_and_health_name_resources_and_prompts_once() -> None:
    server = archive()
    async with consoled(server) as rig:
        page = await rig.page()
        hello = await page.listen()
        assert hello["health"]["sentence"] == "Idle: 11 resources, 3 prompts, no calls in the last five minutes."
        done = await run(page, resource="archive://broken")
        row = (await page.get(f"calls/{done['call']}"))["row"]
        assert (row["title"], row["first"]) == ("archive://broken", "")
        begun = await page.post("try", prompt="mood")
        await page.event("try", id=begun["id"], kind="question")
        titles: dict[str, str] = {}
        while len(titles) < 2:
            titles = {each["tool"]: each["title"] for each in (await page.event("figures"))["tools"]}
        assert titles == {"archive://broken": "archive://broken", "prompt:mood": "mood"}


@requirement("APP-31", "P-23", everywhere=True)
async def test_a_card_names_what_would_be_read_or_got_and_a_read_has_no_arguments_to_edit() -> None:
    rules = [Rule(verdict="ask", name="all", uri="archive://*"), Rule(verdict="ask", name="prompts", prompts=["*"])]
    titles = {
        "archive://seal": "Read archive://seal",
        "archive://readme": "Read “Read me”",
        "archive://notes/ada/1": "Read “Notes”",
        "prompt:mood": "Get the prompt mood",
        "prompt:review": "Get the prompt “A review”",
    }
    async with consoled(archive(policy=Policy(rules), approvals=Approvals(by="operator"))) as rig:
        page = await rig.page(roles="view call approve")
        await page.listen()
        for label, title in titles.items():
            arguments = {"code": "x"} if label == "prompt:review" else {}
            name = label.removeprefix("prompt:")
            await page.post("try", arguments=arguments, **{"resource" if name == label else "prompt": name})
            card = await page.event("approval", tool=label)
            values = {"prompt:review": ': code "x"', "archive://notes/ada/1": ': name "ada", page 1'}.get(label, "")
            assert (card["title"], card["sentence"]) == (title, title + values)
            assert card["editable"] is (name != label)
            await page.post(f"approvals/{card['id']}", yes=False)


@requirement("APP-31", everywhere=True)
async def test_a_template_is_filled_in_checked_and_read(page: Page) -> None:
    filled = {"resource": TEMPLATE, "arguments": {"name": "ada l.", "page": "2"}}
    checked = await page.post("try/check", **filled)
    assert checked["valid"] and checked["verdict"] == "allow" and checked["uri"] == "archive://notes/ada%20l./2"
    done = await run(page, **filled)
    assert done["result"]["blocks"][0]["text"] == "page 2 of ada l."
    story = await page.get(f"calls/{done['call']}")
    assert story["row"]["title"] == "Notes" and "ada%20l." in story["row"]["first"]
    wrong = await page.post("try/check", resource=TEMPLATE, arguments={"name": "ada", "page": "x"})
    assert not wrong["valid"] and wrong["problems"][0]["path"] == "/page"
    low = await page.post("try/check", resource=TEMPLATE, arguments={"name": "ada", "page": "0"})
    assert [each["text"] for each in low["problems"]] == ["page: 0 is less than the minimum 1"]
    assert low["entry"] == (await page.post("try/check", resource="archive://notes/ada/1"))["entry"] == TEMPLATE
    wrong_bodies: list[Object] = [{"name": "ada"}, {"name": "ada", "page": 2}]
    for arguments in wrong_bodies:
        with pytest.raises(Refused, match=r"arguments|str") as refused:
            await page.post("try", resource=TEMPLATE, arguments=arguments)
        assert refused.value.status == 400


@requirement("APP-31", everywhere=True)
async def test_a_prompt_is_filled_in_with_texts_and_says_whose_each_message_is(page: Page) -> None:
    filled = {"prompt": "review", "arguments": {"code": "x = 1", "lines": "3"}}
    assert (await page.post("try/check", **filled))["valid"]
    done: Object = {}
    for revision in REVISIONS:
        done = await run(page, **filled, revision=revision)
        told = [(each["role"], each["text"]) for each in done["result"]["blocks"]]
        assert told == [("user", "Review 3 lines of , short: x = 1"), ("assistant", "Gladly.")]
    story = await page.get(f"calls/{done['call']}")
    assert (story["row"]["tool"], story["row"]["title"]) == ("prompt:review", "A review")
    assert [each["role"] for each in story["result"]["blocks"]] == ["user", "assistant"]
    missing = await page.post("try/check", prompt="review", arguments={"lines": "0"})
    assert not missing["valid"] and {each["path"] for each in missing["problems"]} == {"", "/lines"}
    assert "code" in json.dumps(missing["problems"]) and "0 is less than" in json.dumps(missing["problems"])
    with pytest.raises(Refused, match=r"Expected `str`, got `int`"):
        await page.post("try/check", prompt="review", arguments={"code": "x", "lines": 3})
    [text, image, link, resource] = (await run(page, prompt=HOSTILE))["result"]["blocks"]
    assert text["text"] == resource["text"] == HOSTILE and image["playable"] and link["uri"] == JAVASCRIPT


async def test_a_question_of_a_prompt_is_put_to_the_person(page: Page) -> None:
    begun = await page.post("try", prompt="mood")
    asked = await page.event("try", id=begun["id"], kind="question")
    assert asked["question"]["message"] == "How are you?"
    await page.post(f"try/{begun['id']}/answer", key=asked["key"], action="accept", content={"mood": "fine"})
    done = await page.event("try", id=begun["id"], kind="done")
    assert done["result"]["blocks"][0]["text"] == "accept {'mood': 'fine'}"


@requirement("APP-31", "APP-07", everywhere=True)
async def test_failures_refusals_and_protocol_errors_are_told_apart_and_what_is_hidden_is_unknown(page: Page) -> None:
    failed = await run(page, resource="archive://broken")
    assert failed["error"]["kind"] == "failed" and failed["error"]["message"] == "The shelf is empty"
    denied = await run(page, resource="archive://bell")
    assert denied["error"]["kind"] == "refused"
    hidden = await run(page, resource="archive://notes/grace/1")
    unknown = await run(page, resource="archive://nothing")
    vault = await run(page, resource="archive://vault")
    assert hidden["error"]["kind"] == unknown["error"]["kind"] == "protocol"
    for other in (hidden, vault):
        uri = other["error"]["data"]["uri"]
        assert json.loads(json.dumps(other["error"]).replace(uri, "archive://nothing")) == unknown["error"]
    for asked in ("archive://vault", "archive://notes/grace/1", "archive://nothing"):
        with pytest.raises(Refused) as refused:
            await page.post("try/check", resource=asked)
        assert refused.value.status == 404 and refused.value.error == f"There is no {asked!r} for local"


async def test_one_of_three_things_is_run(page: Page) -> None:
    bodies: list[Object] = [{}, {"resource": ""}, {"resource": "archive://readme", "prompt": "review"}, {"resource": 1}]
    for body in bodies:
        with pytest.raises(Refused, match="A run has") as refused:
            await page.post("try", **body)
        assert refused.value.status == 400


@requirement("APP-31", everywhere=True)
async def test_values_are_suggested_for_variables_and_arguments(page: Page) -> None:
    path = path_of("resources", TEMPLATE, "complete")
    others = {"page": "1"}  # without them the URI is not known, nor whether a rule hides it
    assert await page.post(path, argument="name", value="a", context=others) == {"values": ["ada", "alan"]}
    assert await page.post(path, argument="name", value="g", context=others) == {"values": []}
    path = path_of("prompts", "review", "complete")
    assert await page.post(path, argument="author", value="") == {"values": [*NOTES]}
    assert await page.post(path, argument="style", value="l") == {"values": ["long"]}
    with pytest.raises(Refused, match="no argument 'nothing'"):
        await page.post(path, argument="nothing", value="")
    with pytest.raises(Refused, match="expected an object"):
        await page.post(path, argument="author", value="", context=1)
    with pytest.raises(Refused, match="expected a text"):
        await page.post(path, argument="author")


@requirement("APP-31", everywhere=True)
async def test_switched_off_it_is_gone_for_every_caller_and_that_is_on_record(tmp_path: Path) -> None:
    server = archive(audit=tmp_path / "audit.db")
    async with consoled(server) as rig, Peer(server) as peer:
        page = await rig.page()
        await page.listen()
        for kind, name, label in (
            ("resources", "archive://readme", "archive://readme"),
            ("resources", TEMPLATE, TEMPLATE),
            ("prompts", "review", "prompt:review"),
        ):
            await page.post(path_of(kind, name, "switch"), on=False)
            await page.event("tools")
            entry = (await catalog(page, kind))[name]
            assert (entry["on"], entry["exposed"], entry["hidden_because"]) == (False, False, "It is switched off")
            lists = [json.dumps(await peer.request(method)) for method in METHODS[kind]]
            assert all(json.dumps(name) not in each for each in lists)
            await page.post(path_of(kind, name, "switch"), on=True)
            await page.event("tools")
            assert (await catalog(page, kind))[name]["exposed"]
            records = (await page.get("audit", event="console", tool=label))["records"]
            assert [each["outcome"] for each in records] == ["switched on", "switched off"]
        with pytest.raises(Refused, match="no resource 'archive://readm'; did you mean 'archive://readme'"):
            await page.post(path_of("resources", "archive://readm", "switch"), on=False)
        with pytest.raises(Refused, match="no prompt 'archive://readme'"):
            await page.post(path_of("prompts", "archive://readme", "switch"), on=False)


@requirement("APP-31", "P-23", everywhere=True)
async def test_looking_reading_and_switching_each_take_their_role() -> None:
    async with consoled(archive()) as rig:
        looking, calling = await rig.page(roles="view"), await rig.page(roles="call manage")
        assert await catalog(looking, "prompts")
        reading: list[tuple[str, Object]] = [
            ("try", {"resource": "archive://readme"}),
            ("try/check", {"prompt": "review"}),
            (path_of("prompts", "review", "complete"), {"argument": "author", "value": ""}),
        ]
        for path, body in reading:
            with pytest.raises(Refused, match="role 'call'"):
                await looking.post(path, **body)
        with pytest.raises(Refused, match="role 'manage'"):
            await looking.post(path_of("prompts", "review", "switch"), on=False)
        with pytest.raises(Refused, match="role 'view'"):
            await calling.get("catalog/resources")
