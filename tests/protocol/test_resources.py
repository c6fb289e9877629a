"""Resources and their templates in every dialect: lists, reads, files, subscriptions. Requirements section 11."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import re
import threading
from collections import Counter
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

import pytest
from hypothesis import given, settings, strategies as st

from checks import LISTS
from handrail import Principal, SchemaError, Server
from handrail.testing import Peer
from patience import SOAK, cpu_of
from requirements import requirement
from servers_calling import failure, said
from servers_resources import (
    CANARY,
    FILES,
    ICON,
    MAX_BYTES,
    META,
    NOTE,
    OVERLAPPING,
    SECRET,
    TOO_LARGE,
    UNFIT,
    answering,
    capabilities,
    data_of,
    entries,
    library,
    shelf,
    taking_a,
    taking_both,
    text_of,
)
from subject import PNG
from wires import ALL, LEGACY, Open, Wire
from wires_http import HttpWire
from wires_shared import everywhere, open_wire as open_wire, processes as processes, wire as wire

Json = Any
Object = dict[str, Any]

R0, R1, R2, R3, R4, R5, P = (*ALL[:5], "2026-07-28", "pocket")
SHELF, LIBRARY, PAGED = "servers_resources:shelf", "servers_resources:library", "servers_resources:paged"
NOT_FOUND = dict.fromkeys(ALL, -32002) | {R5: -32602}
UPDATED = "notifications/resources/updated"
CHANGED = {each: f"notifications/{each}s/list_changed" for each in ("tool", "resource", "prompt")}
CANCELLED = "notifications/cancelled"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"


async def read(wire: Wire, uri: Json) -> Object:
    return await wire.request("resources/read", {"uri": uri})


# Whether there is any of it


COMPLETE: Object = {"ref": {"type": "ref/prompt", "name": "bare"}, "argument": {"name": "x", "value": ""}}
METHODS: list[tuple[str, str, Object]] = [
    ("resources", "resources/list", {}),
    ("resources", "resources/templates/list", {}),
    ("resources", "resources/read", {"uri": "no:such"}),
    ("resources", "resources/subscribe", {"uri": "no:such"}),
    ("resources", "resources/unsubscribe", {"uri": "no:such"}),
    ("prompts", "prompts/list", {}),
    ("prompts", "prompts/get", {"name": "no such"}),
    ("completions", "completion/complete", COMPLETE),
]


@requirement("SRV-701")
@everywhere()
@pytest.mark.parametrize(
    ("variant", "offers"),
    [
        ("nothing", "tools"),
        ("resources_only", "resources"),
        ("templates_only", "resources completions"),
        ("prompts_only", "prompts completions"),
        ("bare", "resources prompts completions"),
    ],
)
async def test_what_a_server_has_is_declared_and_what_it_has_not_is_unknown(
    open_wire: Open, variant: str, offers: str
) -> None:
    wire: Wire = await open_wire(f"servers_resources:{variant}")
    whole: Object = {
        "resources": {"subscribe": True, "listChanged": True},
        "prompts": {"listChanged": True},
        "completions": {},
    }
    expected = {name: value for name, value in whole.items() if name in offers.split()}
    if wire.revision in (R0, R1):
        expected.pop("completions", None)
    declared = await capabilities(wire)
    assert {name: value for name, value in declared.items() if name in whole} == expected
    for name, method, params in METHODS:
        is_gone = wire.stateless and method in ("resources/subscribe", "resources/unsubscribe")
        error = (await wire.request(method, params)).get("error", {"code": 0})
        assert (error["code"] == -32601) is (name not in offers or is_gone), method


@requirement("SRV-701")
@everywhere(*LEGACY)
async def test_changes_are_not_declared_where_they_are_not_announced(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_resources:quiet")
    declared = await capabilities(wire)
    changes: Object = {"listChanged": True} if wire.revision == P else {}
    assert declared["prompts"] == changes
    assert declared["resources"] == {"subscribe": True, **changes}


# Lists


OLD_NOTE = {name: value for name, value in NOTE.items() if name != "lastModified"}
ALWAYS = {"name": "full", "description": "Every member there is.", "mimeType": "text/markdown"}
TITLED = {"_meta": META, "annotations": NOTE}
DRESSED: dict[str, Object] = {
    R0: ALWAYS,
    R1: {**ALWAYS, "annotations": OLD_NOTE},
    R2: {**ALWAYS, "annotations": OLD_NOTE},
    R3: {**ALWAYS, **TITLED},
    R4: {**ALWAYS, **TITLED, "icons": [ICON]},
    R5: {**ALWAYS, **TITLED, "icons": [ICON]},
    P: {**ALWAYS, "annotations": NOTE},
}


@requirement("SRV-702")
@everywhere()
async def test_an_entry_has_the_members_its_revision_knows_and_no_other(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    has_title = wire.revision in (R3, R4, R5)
    resources = {each["uri"]: each for each in await entries(wire, "resources/list")}
    title = {"title": "Full dress"} if has_title else {}
    size = {} if wire.revision == R0 else {"size": 4}
    assert resources["doc://full"] == {"uri": "doc://full", **DRESSED[wire.revision], **title, **size}
    templates = {each["uriTemplate"]: each for each in await entries(wire, "resources/templates/list")}
    title = {"title": "Full template"} if has_title else {}
    assert templates["full://{name}"] == {"uriTemplate": "full://{name}", **DRESSED[wire.revision], **title}
    assert resources["config://app"] | {"name": ""} == {
        "uri": "config://app",
        "name": "",
        "description": "The settings in words.",
        "mimeType": "text/plain",
    }
    assert templates["note://{name}"]["description"] == "A note of somebody."


@requirement("SRV-702")
@everywhere()
async def test_an_entry_that_says_nothing_of_itself_has_a_name(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_resources:bare")
    [resource] = await entries(wire, "resources/list")
    [template] = await entries(wire, "resources/templates/list")
    assert (resource.pop("uri"), template.pop("uriTemplate")) == ("a:b", "a:c/{a}")
    for entry in (resource, template):
        assert entry.pop("name")
        assert set(entry) <= {"mimeType"}


@requirement("SRV-702", everywhere=True)
def test_a_server_gives_its_own_code_what_it_lists() -> None:
    server = shelf()
    assert [each.uri for each in server.resources][:2] == ["config://app", "image://dot"]
    assert [each.uri_template for each in server.templates][:2] == ["note://{name}", "book://{name}/{page}"]
    full = next(each for each in server.resources if each.uri == "doc://full")
    assert (full.title, full.mime_type, full.size, full.annotations) == ("Full dress", "text/markdown", 4, NOTE)


# Pages


RESOURCES_AND_PROMPTS = [each for each in LISTS if each != "tools/list"]
FIVE = {
    "resources/list": [f"resource{at}" for at in range(5)],
    "resources/templates/list": [f"template{at}" for at in range(5)],
    "prompts/list": [f"prompt{at}" for at in range(5)],
}


async def page(wire: Wire, method: str, cursor: Json = None) -> Object:
    result: Object = (await wire.request(method, {} if cursor is None else {"cursor": cursor}))["result"]
    return result


def names(method: str, result: Object) -> list[str]:
    return [each["name"] for each in result[LISTS[method]]]


@requirement("SRV-703")
@everywhere()
async def test_pages_hold_every_entry_once_in_their_order_and_come_to_an_end(open_wire: Open) -> None:
    wire: Wire = await open_wire(PAGED)
    for method in RESOURCES_AND_PROMPTS:
        for _ in range(2):
            first = await page(wire, method)
            second = await page(wire, method, first["nextCursor"])
            last = await page(wire, method, second["nextCursor"])
            assert [names(method, each) for each in (first, second, last)] == [
                FIVE[method][:2],
                FIVE[method][2:4],
                FIVE[method][4:],
            ]
            assert last.get("nextCursor", "absent") == ("" if wire.revision == P else "absent")


@requirement("SRV-703")
@everywhere()
async def test_a_change_between_two_pages_neither_hides_nor_repeats_the_others(open_wire: Open) -> None:
    wire: Wire = await open_wire(PAGED, fresh=True)
    for method, kind in (("resources/list", "resource"), ("prompts/list", "prompt")):
        second = (await page(wire, method))["nextCursor"]
        gone = "page://1" if kind == "resource" else "prompt1"
        await wire.call("drop", {"kind": kind, "name": gone})  # the one the cursor stands after
        assert names(method, await page(wire, method, second)) == FIVE[method][2:4]


@requirement("SRV-703", "P-25")
@everywhere()
async def test_a_cursor_of_another_list_or_not_ours_is_refused(open_wire: Open) -> None:
    wire: Wire = await open_wire(PAGED)
    cursors = {method: (await page(wire, method))["nextCursor"] for method in LISTS}
    for method in LISTS:
        foreign: list[Json] = [cursor for other, cursor in cursors.items() if other != method]
        ours = cursors[method]
        foreign += [*("", "x", ours[:-1], ours + "A", ours.swapcase(), f" {ours}"), None, 2, [ours], {"cursor": ours}]
        foreign += [ours[:at] + ("A" if ours[at] != "A" else "B") + ours[at + 1 :] for at in range(0, len(ours), 7)]
        for cursor in foreign:
            answer = await wire.request(method, {"cursor": cursor})
            assert answer["error"]["code"] == -32602, (method, cursor)
        assert names(method, await page(wire, method, ours))


@requirement("SRV-703", "SRV-704")
@everywhere(R5)
async def test_lists_and_contents_say_how_long_and_for_whom_they_may_be_kept(open_wire: Open) -> None:
    wire: Wire = await open_wire(PAGED)
    for method in RESOURCES_AND_PROMPTS:
        first = await page(wire, method)
        second = await page(wire, method, first["nextCursor"])
        assert type(first["ttlMs"]) is int and first["ttlMs"] >= 0
        assert first["cacheScope"] == second["cacheScope"]
        assert first["cacheScope"] in ("public", "private")
    shelf_wire: Wire = await open_wire(SHELF)
    result = (await read(shelf_wire, "doc://short-lived"))["result"]
    assert result["ttlMs"] == 7_000
    assert result["cacheScope"] in ("public", "private")
    assert type((await read(shelf_wire, "config://app"))["result"]["ttlMs"]) is int


# Reads


def part(uri: str, text: str, mime: str = "") -> Object:
    return {"uri": uri, "text": text, **({"mimeType": mime} if mime else {})}


def blob(uri: str, data: bytes, mime: str = "") -> Object:
    return {"uri": uri, "blob": base64.b64encode(data).decode(), **({"mimeType": mime} if mime else {})}


WORDS = "depth 3\nü 🦆 \u2028 dry"
CONTENTS: dict[str, list[Object]] = {
    "config://app": [part("config://app", WORDS, "text/plain")],
    "image://dot": [blob("image://dot", PNG, "image/png")],
    "data://empty": [part("data://empty", "", "text/plain")],
    "data://no-bytes": [blob("data://no-bytes", b"", "application/octet-stream")],
    "data://bytes": [blob("data://bytes", bytes(range(256)))],
    "data://object": [part("data://object", '{"depth":3,"names":["ü"]}', "application/json")],
    "data://settings": [part("data://settings", '{"depth":3,"dry":true}', "application/json")],
    "doc://full": [part("doc://full", "full", "text/markdown")],
    "note://ada": [part("note://ada", "note of ada", "text/markdown")],
    "note://%C3%BC%20%25": [part("note://%C3%BC%20%25", "note of ü %", "text/markdown")],
    "book://ada/3": [part("book://ada/3", "ada 3")],
    "side://front/true": [part("side://front/true", "front True")],
    "side://back/false": [part("side://back/false", "back False")],
    "path:///a/b/c.txt": [part("path:///a/b/c.txt", "path a/b/c.txt")],
    "search://items": [part("search://items", " 10")],
    "search://items?q=x&limit=3": [part("search://items?q=x&limit=3", "x 3")],
    "search://items?q=%C3%BC": [part("search://items?q=%C3%BC", "ü 10")],
}


@requirement("SRV-704")
@everywhere()
async def test_contents_are_text_or_bytes_under_the_uri_that_was_asked_for(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    for uri, expected in CONTENTS.items():
        contents = (await read(wire, uri))["result"]["contents"]
        for each, wanted in zip(contents, expected, strict=True):
            if "mimeType" not in wanted:
                each.pop("mimeType", None)
            if each.get("mimeType") == "application/json":  # the same value, whatever the spaces
                each["text"] = json.dumps(json.loads(each["text"]), separators=(",", ":"), ensure_ascii=False)
        assert contents == expected, uri


@requirement("SRV-704")
@everywhere()
async def test_contents_may_be_several_and_say_what_they_are(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    [one] = (await read(wire, "data://one"))["result"]["contents"]
    meta = {"_meta": META} if wire.revision in (R3, R4, R5) else {}
    assert one == {**part("data://one", "one", "text/x-one"), **meta}
    several = (await read(wire, "data://several"))["result"]["contents"]
    assert several[0] == part("data://several/1", "one", "text/x-one")
    assert [(each["uri"], data_of(each)) for each in several[1:]] == [
        ("data://several", "two"),
        ("data://several", b"\x00"),
    ]
    assert several[1]["mimeType"] == "text/plain"


VALUES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
# What a server takes out of everything that leaves would not come back: control and format characters.
# Of the rest, letters and digits always arrive; a sign may be part of a path.
VISIBLE = st.text(st.characters(codec="utf-8", categories=["L", "Nd"]), min_size=1, max_size=12)


@requirement("SRV-704", "P-06", everywhere=True)
def test_a_variable_arrives_as_it_was_written_whatever_is_in_it() -> None:
    server = Server("echoing")
    arrived: list[str] = []

    @server.resource("one://{a}/end")
    async def one(a: str) -> str:
        arrived.append(a)
        return a

    @server.resource("rest://{+a}")
    async def rest(a: str) -> str:
        arrived.append(a)
        return a

    @server.resource("query://x{?a,b}")
    async def query(a: str = "", b: str = "") -> str:
        arrived.append(a + b)
        return a

    with asyncio.Runner() as runner:
        peer = Peer(server, revision=R4)
        runner.run(peer.__aenter__())

        @settings(max_examples=60)
        @given(VALUES, VISIBLE)
        def arrives(value: str, visible: str) -> None:
            for text in (value, visible):
                for uri in (f"one://{quote(text, safe='')}/end", f"query://x?a={quote(text, safe='')}"):
                    answer = runner.run(peer.request("resources/read", {"uri": uri}))
                    if "error" in answer and text != visible:  # it could leave its folder: nothing runs
                        assert (answer["error"]["code"], arrived) == (-32002, []), uri
                        continue
                    assert arrived.pop() == text, uri
                    if text == visible:
                        assert text_of(answer) == text
                    assert answer["result"]["contents"][0]["uri"] == uri
            runner.run(peer.request("resources/read", {"uri": f"rest://a/{quote(visible, safe='')}/b"}))
            assert arrived.pop() == f"a/{visible}/b"

        arrives()
        runner.run(peer.__aexit__(None, None, None))


# What is not there


ABSENT = [
    *("config://nope", "config://app/", "config:app", "config://app#x", "config://app?x=1", "note://ADA%2Fx"),
    *("note://a/b", "note://ada#x", "book://ada", "book://ada/1/2", "nothing at all", "/etc/passwd"),
    *(
        "",
        " config://app",
        "config://app ",
        "config://app\n",
        "act://absent/x",
        "note://nobody",
        "note://%zz",
        "a" * 5_000,
    ),
]


@requirement("SRV-707")
@everywhere()
async def test_a_uri_that_nothing_has_is_the_same_error_whatever_the_reason(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    errors = set()
    for uri in ABSENT:
        error = (await read(wire, uri))["error"]
        assert (error["code"], error["data"]["uri"]) == (NOT_FOUND[wire.revision], uri)
        errors.add(json.dumps(error).replace(json.dumps(uri)[1:-1] or "\0", "…"))
    assert len(errors) <= 3, (
        "one form for all"
    )  # the empty URI leaves nothing to replace, a long one is in the data only


@requirement("SRV-707")
@everywhere()
async def test_another_spelling_of_a_uri_reads_the_same_under_its_one_name(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    for uri, canonical in (
        ("CONFIG://APP", "config://app"),
        ("config://ap%70", "config://app"),
        ("note://%61da", "note://ada"),
        ("NOTE://ü", "note://%C3%BC"),
        ("search://items?limit=3&q=x", "search://items?q=x&limit=3"),
    ):
        [content] = (await read(wire, uri))["result"]["contents"]
        assert content["uri"] == canonical


@requirement("SRV-707")
@everywhere()
async def test_a_variable_that_breaks_its_type_is_refused_and_nothing_runs(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    before = [said(await wire.call("times_run", {"name": name})) for name in ("book", "side")]
    for uri in (
        *("book://ada/ten", "book://ada/0", "book://ada/10", "book://ada/1.5", "book://ada/%20", "book://ada/1e0"),
        *("book://ada/1.0", "book://ada/01", "book://ada/-0", "book://ada/+1"),  # 1 is written in one way
        *("side://middle/true", "side://FRONT/true", "side://front/yes", "side://front/1"),
    ):
        answer = await read(wire, uri)
        assert answer.get("error", {"code": 0})["code"] == -32602, uri
    assert [said(await wire.call("times_run", {"name": name})) for name in ("book", "side")] == before


@requirement("SRV-707", "SRV-410")
@everywhere()
async def test_malformed_params_are_refused(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    methods = ["resources/read", *([] if wire.stateless else ["resources/subscribe", "resources/unsubscribe"])]
    for method in methods:
        for params in ({}, *({"uri": each} for each in (None, 5, True, ["config://app"], {"uri": "config://app"}))):
            code = (await wire.request(method, params))["error"]["code"]
            mirrored = wire.stateless and wire.transport == "http"  # there the header has no fellow
            assert code == -32602 or (mirrored and code == -32020), (method, params)


@requirement("SRV-708", "P-34")
@everywhere()
async def test_what_cannot_be_read_is_one_error_and_nothing_of_it_leaves(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    error = (await read(wire, "act://fails/Atlantis"))["error"]
    assert (error["code"], "No such city: Atlantis" in error["message"]) == (-32603, True)
    answer = await read(wire, "act://crashes/x")
    assert answer["error"]["code"] == -32603
    assert SECRET not in json.dumps(answer)
    assert (await read(wire, "quick://x"))["error"]["code"] == 408
    for name in UNFIT:
        answer = await read(wire, f"unfit://{name}")
        assert answer.get("error", {"code": 0})["code"] == -32603, name
        assert "object at 0x" not in json.dumps(answer)
    assert text_of(await read(wire, "note://ada")) == "note of ada"


# Files


@requirement("SRV-705")
@everywhere()
async def test_a_folder_is_listed_and_every_file_of_it_can_be_read(open_wire: Open) -> None:
    wire: Wire = await open_wire(LIBRARY)
    listed = {each["uri"]: each for each in await entries(wire, "resources/list")}
    expected = {"file:///docs/" + quote(name): name for name in FILES}
    assert set(expected) <= set(listed)
    assert set(listed) - set(expected) <= {f"file:///docs/{TOO_LARGE}"}
    assert [each["uriTemplate"] for each in await entries(wire, "resources/templates/list")] == ["file:///docs/{+path}"]
    kinds = {"readme.md": "text/markdown", "größe.txt": "text/plain", "dot.png": "image/png"}
    for uri, name in expected.items():
        if wire.revision != R0:
            assert listed[uri]["size"] == len(FILES[name])
        [content] = (await read(wire, uri))["result"]["contents"]
        data = data_of(content)
        assert (data.encode() if isinstance(data, str) else data) == FILES[name], name
        assert content["uri"] == uri
        if name in kinds:
            assert (listed[uri]["mimeType"], content["mimeType"]) == (kinds[name], kinds[name])
        assert ("text" in content) is (name.endswith((".txt", ".md")) and name != "not-utf8.txt"), name


@requirement("SRV-705", "SRV-708")
@everywhere()
async def test_a_file_that_is_too_large_or_gone_is_an_error(open_wire: Open) -> None:
    wire: Wire = await open_wire(LIBRARY)
    error = (await read(wire, f"file:///docs/{TOO_LARGE}"))["error"]
    assert error["code"] == -32603
    name = f"new-{wire.revision}-{wire.transport}.txt"
    assert (await read(wire, f"file:///docs/{name}"))["error"]["code"] == NOT_FOUND[wire.revision]
    await wire.call("write", {"name": name, "text": "new"})
    assert text_of(await read(wire, f"file:///docs/{name}")) == "new"
    await wire.call("write", {"name": name, "text": "x" * (MAX_BYTES + 1)})
    assert (await read(wire, f"file:///docs/{name}"))["error"]["code"] == -32603
    where = Path(said(await wire.call("where")))
    (where / "docs" / name).unlink()
    assert (await read(wire, f"file:///docs/{name}"))["error"]["code"] == NOT_FOUND[wire.revision]


ODD_NAMES = ["plan,secret (v2).txt", "R&D=1", "a+b;c", "it's!$", "a*b", "a@b:", "100%", "ü~", "a?#", "a[1]{2}", "%2C"]


@requirement("SRV-705", "SRV-707", everywhere=True)
@pytest.mark.parametrize("base", ["file:///docs/", "HTTPS://Example.com/docs/"])
async def test_a_file_is_listed_under_the_uri_that_every_spelling_of_it_reads(tmp_path: Path, base: str) -> None:
    server = Server("odd")
    refresh = server.add_files(tmp_path, uri=base)
    for name in ODD_NAMES:
        (tmp_path / name).write_text(name)
    names = set()
    async with Peer(server, revision=R4) as peer:
        for _ in range(2):  # first they are not listed, and the template reads them
            for name in ODD_NAMES:
                for path in (
                    quote(name, safe=""),
                    quote(name, safe="/:@!$&'()*+,;="),
                    quote(name, safe="(,").replace("%2C", "%2c"),
                ):
                    answer = await peer.request("resources/read", {"uri": base.lower() + path})
                    assert text_of(answer) == name
                    names.add((name, answer["result"]["contents"][0]["uri"]))
            refresh()
    assert names == {(each.name, each.uri) for each in server.resources}
    with pytest.raises(SchemaError, match="what all URIs begin with"):  # that would be a host, for which A is a
        server.add_files(tmp_path, uri="docs://")


@requirement("SRV-705", everywhere=True)
def test_one_odd_file_does_not_keep_a_folder_from_being_listed(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    deep = docs.joinpath(*["ü" * 100] * 4)
    deep.mkdir(parents=True)
    (deep / "too-long-for-a-uri.txt").write_text("x")
    count = 500 if SOAK else 150
    for at in range(count):
        (docs / f"{at}.txt").write_text("x")
    stop = threading.Event()

    def exchange() -> None:  # what was there for the scan is gone a moment later
        while not stop.is_set():
            for at in range(count):
                with suppress(OSError):
                    (docs / f"{at}.txt").unlink()
                    (docs / f"{at}.txt").write_text("x")

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for at in range(20):
            Server("busy").add_files(docs, uri=f"file:///{at}/")
    finally:
        stop.set()
        thread.join()
    server = Server("calm")
    server.add_files(docs)
    assert {each.name for each in server.resources} == {f"{at}.txt" for at in range(count)}


@requirement("SRV-707", "SRV-708", everywhere=True)
@pytest.mark.parametrize("number", [errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EMFILE, errno.EIO])
async def test_a_file_that_cannot_be_read_is_not_one_that_is_not_there(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("a")
    server, opens = Server("broken"), os.open
    server.add_files(tmp_path, uri="file:///docs/")

    def fails(path: Any, *flags: Any, **options: Any) -> int:
        if path == "a.txt":
            raise OSError(number, os.strerror(number), str(tmp_path / path))
        return opens(path, *flags, **options)

    async with Peer(server, revision=R4) as peer:
        monkeypatch.setattr(os, "open", fails)
        error = (await peer.request("resources/read", {"uri": "file:///docs/a.txt"}))["error"]
    assert error["code"] == (-32002 if number in (errno.ENOENT, errno.ELOOP) else -32603)
    assert str(tmp_path) not in json.dumps(error) and os.strerror(number) not in json.dumps(error)


@requirement("SRV-708", everywhere=True)
@pytest.mark.parametrize("moment", ["before it is read", "after it is read"])
@pytest.mark.parametrize("later", ["", "other", "new text", "a much longer text than there was"])
async def test_a_file_that_is_changed_while_it_is_read_is_an_error_and_nothing_of_it_leaves(
    tmp_path: Path, later: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old text")
    os.utime(file, (1, 1))  # the clock of a file system is coarse
    server, looks_at, looks = Server("busy"), os.fstat, list[int]()
    server.add_files(tmp_path, uri="file:///docs/")

    def changes(descriptor: int) -> os.stat_result:
        looks.append(descriptor)
        before = looks_at(descriptor)
        if len(looks) == (1 if moment == "before it is read" else 2):
            file.write_text(later)
        return before if len(looks) == 1 else looks_at(descriptor)

    async with Peer(server, revision=R4) as peer:
        monkeypatch.setattr("handrail.engine.files.os.fstat", changes)
        answer = await peer.request("resources/read", {"uri": "file:///docs/a.txt"})
        monkeypatch.undo()
        assert answer["error"]["code"] == -32603 and "changed while" in answer["error"]["message"], answer
        assert len(looks) == 2 and not [each for each in ("old text", later or "old") if each in json.dumps(answer)]
        assert text_of(await peer.request("resources/read", {"uri": "file:///docs/a.txt"})) == later


@requirement("SRV-713", everywhere=True)
def test_the_files_of_a_folder_are_one_change_of_the_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for at in range(50):
        (tmp_path / f"{at}.txt").write_text("x")
    server, changes = Server("many"), Counter[str]()
    server.resource("file:///docs/0.txt")(answering("mine"))
    server.engine.resources.watchers.append(lambda: changes.update(["list"]))
    refresh = server.add_files(tmp_path, uri="file:///docs/")
    assert (len(server.resources), changes["list"]) == (50, 1)
    assert "not listed: resource 'file:///docs/0.txt' exists already" in caplog.text
    server.disable("file:///docs/49.txt", kind="resource")
    changes.clear()
    for at in range(30):
        (tmp_path / f"{at}.txt").unlink()
    (tmp_path / "49.txt").write_text("longer")
    refresh()
    assert changes["list"] == 1
    assert {each.name for each in server.resources} == {"answers", *(f"{at}.txt" for at in range(30, 49))}


def _escapes(where: str) -> list[str]:
    """URIs that mean what is not in the folder, or nothing; `where` is the folder above it."""
    base = "file:///docs/"
    ups = "../ %2e%2e/ .%2e/ %2E%2E%2F ..%2f ..%5c ..\\ %252e%252e%252f %252e%252e/ ....// ..;/ ..%00/ ..%01/ .../"
    ups += " %c0%ae%c0%ae/ %e0%80%ae%e0%80%ae/ %uff0e%uff0e/ ．．/ ‥/ ../docs/../ sub/../../ sub/%2e%2e/%2e%2e/"
    ups += " sub/..%2f..%2f ./../ .//../"
    absolute = f"{where}/canary.txt"
    return [
        *(f"{base}{up}canary.txt" for up in ups.split()),
        *(f"{base}{up * 12}etc/passwd" for up in ("../", "%2e%2e/", "..%2f", "..%5c")),
        *(f"{base}{each}" for each in (absolute, quote(absolute, safe=""), f"/{absolute}", f"%2F{absolute[1:]}")),
        *(f"{base}{each}" for each in ("/etc/passwd", "%2Fetc%2Fpasswd", "//etc/passwd", f"file://{absolute}")),
        *(f"{base}../docs-too/canary.txt", f"{base}..%2Fdocs-too%2Fcanary.txt", "file:///docs-too/canary.txt"),
        *(
            "file:///docs../canary.txt",
            "file:///docs/..",
            "file:///docs/.",
            "file:///docs/sub/..",
            "file:///docs",
            base,
        ),
        *(f"file://{absolute}", f"file://localhost{absolute}", absolute, "file:///etc/passwd", "file:////etc/passwd"),
        *(f"FILE:///docs/{each}" for each in ("../canary.txt", "%2e%2e/canary.txt")),
        *("file://localhost/docs/readme.md", "file:/docs/readme.md", "file:docs/readme.md", "file:///DOCS/readme.md"),
        *(f"{base}link-{each}" for each in ("out.txt", "up.txt", "dangling", "loop", "zero", "folder", "root")),
        *(f"{base}link-folder/canary.txt", f"{base}link-root/etc/passwd", f"{base}link-root{absolute}"),
        *(f"{base}link-folder/../canary.txt", f"{base}link-folder/..%2Fcanary.txt"),
        *(
            f"{base}{each}"
            for each in ("pipe", "sub", "sub/", "sub/deep", "/dev/zero", "/proc/self/environ", "/dev/fd/0")
        ),
        *(
            f"{base}{each}"
            for each in ("README.MD", "Readme.md", "readme.md/", "readme.md/.", "readme.md/../canary.txt")
        ),
        *(
            f"{base}{each}"
            for each in ("readme.md%00", "readme.md%00.png", "%00", "../canary.txt%00.md", "readme.md\x00")
        ),
        *(
            f"{base}{each}"
            for each in ("readme.md%20", "readme.md.", "readme.md::$DATA", "readme.md%0a", "CON", "NUL.txt")
        ),
        *(
            f"{base}{each}"
            for each in ("C:\\Windows\\win.ini", "C:/Windows/win.ini", "\\\\host\\share\\x", "~/x", "~root/x")
        ),
        *(
            f"{base}{each}"
            for each in ("$HOME/x", "%", "%zz", "%2", "readme.md#x", "readme.md?x", "%ff%fe", "*", "**/*.md")
        ),
        *(f"{base}{each}" for each in ("a" * 300, "a/" * 2_000, "../" * 2_000 + "etc/passwd", "%2e" * 2_000)),
    ]


assert len(_escapes("/x")) >= 60


@requirement("SRV-706", "P-25")
@everywhere()
async def test_nothing_beside_the_folder_is_read_whatever_the_uri(open_wire: Open) -> None:
    wire: Wire = await open_wire(LIBRARY)
    where = said(await wire.call("where"))
    read_anyway = []
    for uri in _escapes(where):
        answer = await read(wire, uri)
        if answer.get("error", {"code": 0})["code"] != NOT_FOUND[wire.revision]:
            read_anyway.append((uri, answer))
        written = json.dumps(answer).replace(json.dumps(uri)[1:-1], "")
        assert CANARY not in written and "root:" not in written and where not in written, uri
    assert read_anyway == []
    assert text_of(await read(wire, "file:///docs/sub/deep/one.txt")) == "deep"


PIECES = st.sampled_from(
    [
        *("..", ".", "%2e%2e", "%2e", "/", "//", "%2f", "\\", "%5c", "%00", "docs", "sub", "deep", "one.txt"),
        *(
            "readme.md",
            "canary.txt",
            "link-folder",
            "link-root",
            "link-out.txt",
            "docs-too",
            "pipe",
            "%",
            "~",
            " ",
            "ü",
        ),
        *("a b%20c.txt", "größe.txt", "etc/passwd", "%252e", ";", "?", "#", ":"),
    ]
)


@requirement("SRV-706", everywhere=True)
def test_what_is_read_is_a_file_of_the_folder_and_nothing_else() -> None:
    with asyncio.Runner() as runner:
        peer = Peer(library(), revision=R5)
        runner.run(peer.__aenter__())

        @settings(max_examples=200)
        @given(st.lists(PIECES, max_size=8))
        def reads(pieces: list[str]) -> None:
            uri = "file:///docs/" + "".join(pieces)
            answer = runner.run(peer.request("resources/read", {"uri": uri}))
            if "error" in answer:
                assert answer["error"]["code"] == -32602, uri
                return
            [content] = answer["result"]["contents"]
            data = data_of(content)
            assert (data.encode() if isinstance(data, str) else data) in FILES.values(), uri

        reads()
        runner.run(peer.__aexit__(None, None, None))


# Which of several templates


@requirement("SRV-709")
@everywhere()
async def test_a_static_uri_wins_and_then_the_template_that_says_most(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_resources:overlapping")
    for uri, template in {
        "x://docs/one": "x://docs/one",
        "x://docs/two": "x://docs/{b}",
        "x://docs/two/draft": "x://docs/{b}/draft",
        "x://docs/two/final": "x://{+a}",
        "x://one": "x://{a}",
        "x://one/two": "x://{a}/{b}",
        "x://one/two/three": "x://{+a}",
    }.items():
        assert text_of(await read(wire, uri)) == template, uri


@requirement("SRV-709", everywhere=True)
@pytest.mark.parametrize("static", ["x://a,b", "x://a%2Cb", "X://A%2cB"])
async def test_a_static_uri_wins_however_it_is_written_and_also_when_it_is_off(static: str) -> None:
    server = Server("both")
    server.resource("x://{a}")(taking_a("template"))
    server.resource("x://{+a}")(taking_a("template"))
    server.resource(static)(answering("static"))
    async with Peer(server, revision=R4) as peer:

        async def reads() -> set[Json]:
            uris = ("x://a,b", "x://a%2Cb", "X://a%2cb", "x://%61,b")
            answers = [await peer.request("resources/read", {"uri": uri}) for uri in uris]
            return {answer["error"]["code"] if "error" in answer else text_of(answer) for answer in answers}

        assert await reads() == {"static"}
        server.disable(server.resources[0].uri, kind="resource")
        assert await reads() == {-32002}
        server.enable("x://a,b", kind="resource")
        server.engine.resources.switch("x://a,b", on=False)
        assert await reads() == {-32002}
        server.remove("x://a,b", kind="resource")
        assert await reads() == {-32002}  # an operator's switch outlives the entry
        server.engine.resources.switch("x://a,b", on=True)
        assert await reads() == {"template"}


@requirement("SRV-709", "SRV-713", everywhere=True)
async def test_what_is_off_in_an_included_server_is_not_read_by_a_template(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    inner, outer = Server("inner"), Server("outer")
    inner.add_files(tmp_path, uri="file:///docs/")
    inner.resource("file:///docs/private/{a}")(taking_a("private"))
    outer.include(inner)
    async with Peer(outer, revision=R4) as peer:
        for name, uri in (("file:///docs/a.txt",) * 2, ("file:///docs/private/{a}", "file:///docs/private/x")):
            inner.disable(name, kind="resource")
            assert (await peer.request("resources/read", {"uri": uri}))["error"]["code"] == -32002
            inner.enable(name, kind="resource")
            assert "result" in await peer.request("resources/read", {"uri": uri})


@requirement("SRV-709", everywhere=True)
async def test_a_conflict_with_an_included_server_is_logged_and_hinders_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner, outer, third = Server("inner"), Server("outer"), Server("third")
    outer.resource("n://{a}")(taking_a("outer"))
    third.resource("n://{b}")(answering_b)
    with pytest.raises(SchemaError, match=r"n://\{a\}' matches the same URIs"):
        outer.include(third)
    outer.include(inner)
    other = Server("another")
    other.include(inner)
    outer.resource("c://x")(answering("outer"))
    async with Peer(inner, revision=R4) as peer:
        for uri, function in (("c://x", answering("inner")), ("n://{b}", answering_b), ("c://y", answering("inner"))):
            inner.resource(uri)(function)
        assert await peer.notice(CHANGED["resource"])
    assert "not included: resource 'c://x' exists already" in caplog.text
    assert "not included: resource 'n://{b}': 'n://{a}' matches the same URIs" in caplog.text
    assert ([each.uri for each in outer.resources], len(outer.templates)) == (["c://x", "c://y"], 1)
    assert ([each.uri for each in other.resources], len(other.templates)) == (["c://x", "c://y"], 1)


@requirement("SRV-713", everywhere=True)
def test_watchers_are_called_in_their_order_and_one_that_fails_hinders_no_other() -> None:
    server, order = Server("watched"), list[int]()

    def watch(at: int) -> None:
        order.append(at)
        if at % 2:
            raise OSError("closed")

    server.engine.prompts.watchers += [partial(watch, at) for at in range(20)]
    server.prompt("p")(answering("x"))
    assert order == [*range(20)]


async def answering_b(b: str) -> str:
    return b


@requirement("SRV-709", "P-30", everywhere=True)
def test_a_template_of_another_scheme_costs_next_to_nothing() -> None:
    uri, costs = f"one://{'p/' * 900}x", []
    for others in (0, 400):
        server = Server("large")
        server.resource("one://{+a}")(taking_a("x"))
        for at in range(others):
            server.resource(f"t{at}://{{+a}}")(taking_a("x"))
        before = cpu_of(os.getpid())
        for _ in range(100):
            assert server.engine.find("resource", uri)[0] is not None
        costs.append(cpu_of(os.getpid()) - before)
    assert costs[1] < 10 * costs[0]


@requirement("SRV-709")
@everywhere()
async def test_a_second_template_of_a_shape_is_refused_while_the_server_runs(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_resources:overlapping")
    before = await entries(wire, "resources/templates/list")
    assert [each["uriTemplate"] for each in before] == [each for each in OVERLAPPING if "{" in each]
    for template, variables in (("x://{b}", "b"), ("x://{b}/{a}", "both"), ("x://docs/{a}", "a"), ("x://{+b}", "b")):
        assert template.partition("{")[0] in failure(
            await wire.call("register", {"template": template, "variables": variables})
        )
    assert await entries(wire, "resources/templates/list") == before


WRONG: list[tuple[str, Any]] = [
    ("", answering("x")),
    ("no scheme", answering("x")),
    ("no-scheme/{a}", taking_a("x")),
    ("x://{", taking_a("x")),
    ("x://{a", taking_a("x")),
    ("x://a}", answering("x")),
    ("x://{}", taking_a("x")),
    ("x://{a}/{a}", taking_a("x")),
    ("x://{b}", taking_a("x")),
    ("x://{a}", taking_both("x")),
    ("x://{a}/{b}", taking_a("x")),
    ("x://fixed", taking_a("x")),
    ("x://{a b}", taking_a("x")),
    ("x://a b", answering("x")),
]


@requirement("SRV-709", everywhere=True)
@pytest.mark.parametrize(("uri", "function"), WRONG, ids=[uri or "empty" for uri, _ in WRONG])
def test_a_uri_or_template_that_can_never_be_read_is_refused_at_registration(uri: str, function: Any) -> None:
    server = Server("strict")
    with pytest.raises((SchemaError, ValueError)) as caught:
        server.resource(uri)(function)
    assert uri in str(caught.value)
    assert server.resources == [] and server.templates == []


@requirement("SRV-709", "SRV-602", everywhere=True)
@pytest.mark.parametrize(
    "kind", [UUID, datetime, timedelta, Decimal, bytes, list[int], Object, UUID | None, float | str]
)
def test_a_variable_whose_values_have_several_spellings_is_refused_at_registration(kind: Any) -> None:
    def function(a: Any) -> str:
        return str(a)

    function.__annotations__["a"] = kind
    server = Server("strict")
    with pytest.raises(SchemaError, match=r"'a': a value of its type can be written in several ways.*take a str"):
        server.resource("x://{a}")(function)
    for at, plain in enumerate((str, int, float, bool, date, int | None, date | None)):
        function.__annotations__["a"] = plain
        server.resource(f"x{at}://{{a}}")(function)


@requirement("SRV-702", everywhere=True)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": -7}, "size: -7 is not a number of bytes"),
        ({"size": True}, "size: "),
        ({"annotations": {"priority": 7}}, "annotations.priority: 7 is not a number from 0 to 1"),
        ({"annotations": {"audience": "everyone"}}, "annotations.audience: 'everyone' is not a list of"),
        ({"annotations": {"lastModified": 3}}, "annotations.lastModified: 3 is not an ISO 8601 time"),
        ({"mime_type": 5}, "mime_type: "),
    ],
)
def test_what_no_client_would_accept_in_a_list_is_refused_at_registration(options: Any, text: str) -> None:
    server = Server("strict")
    with pytest.raises((SchemaError, TypeError), match=re.escape(f"resource 'x://a': {text}")):
        server.resource("x://a", **options)(answering("x"))
    assert server.resources == []


@requirement("SRV-709", everywhere=True)
def test_a_uri_can_be_registered_once_and_again_when_it_is_gone() -> None:
    server = Server("strict")
    for uri, function in (("x://one", answering("x")), ("x://{a}", taking_a("x"))):
        server.resource(uri)(function)
        with pytest.raises(SchemaError, match="exists already"):
            server.resource(uri)(function)
        server.disable(uri, kind="resource")  # hidden is not gone
        with pytest.raises(SchemaError, match="exists already"):
            server.resource(uri)(function)
        server.remove(uri, kind="resource")
        server.resource(uri)(function)
    assert [each.uri for each in server.resources] == ["x://one"]
    assert [each.uri_template for each in server.templates] == ["x://{a}"]


# Updates


async def touched(wire: Wire, uri: str, tool: str = "touch") -> list[str]:
    """Change a resource; of which the client is told because of that."""
    assert said(await wire.call(tool, {"uri": uri})) == "touched"
    assert await wire.silent() or wire.others
    updates = [each["params"]["uri"] for each in wire.others if each.get("method") == UPDATED]
    assert len(updates) == len(wire.others)
    wire.others.clear()
    return updates


async def subscribe(wire: Wire, uri: str, verb: str = "subscribe") -> Object:
    return await wire.request(f"resources/{verb}", {"uri": uri})


@requirement("SRV-710")
@everywhere(*LEGACY)
async def test_an_update_goes_to_its_subscribers_until_they_have_enough(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    assert await touched(wire, "config://app") == []
    for uri in ("config://app", "note://ada", "config://app"):  # twice is once
        assert (await subscribe(wire, uri))["result"] == {}
    for tool in ("touch", "touch_from_thread"):
        assert await touched(wire, "config://app", tool) == ["config://app"]
        assert await touched(wire, "note://ada", tool) == ["note://ada"]
        assert await touched(wire, "note://alan", tool) == []
        assert await touched(wire, "image://dot", tool) == []
    for _ in range(2):  # what is not subscribed to can be given up
        assert (await subscribe(wire, "config://app", "unsubscribe"))["result"] == {}
    assert await touched(wire, "config://app") == []
    assert await touched(wire, "note://ada") == ["note://ada"]


@requirement("SRV-710", "SRV-707")
@everywhere(*LEGACY)
async def test_nobody_subscribes_to_what_is_not_there(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    for uri in ("config://nope", "", "note://a/b", "config://app/"):
        error = (await subscribe(wire, uri))["error"]
        assert (error["code"], error["data"]["uri"]) == (NOT_FOUND[wire.revision], uri)
        assert await touched(wire, uri) == []


@requirement("SRV-710")
@everywhere(*LEGACY)
async def test_a_new_handshake_begins_without_subscriptions(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    await subscribe(wire, "config://app")
    await wire.open()
    assert await touched(wire, "config://app") == []


async def test_each_connection_has_its_own_subscriptions() -> None:
    server = shelf()
    async with Peer(server, revision=R0) as one, Peer(server, revision=R4, principal=Principal("two")) as two:
        await one.request("resources/subscribe", {"uri": "config://app"})
        await two.request("resources/subscribe", {"uri": "note://ada"})
        await asyncio.to_thread(server.resource_updated, "config://app")
        await asyncio.to_thread(server.resource_updated, "note://ada")
        for peer, uri in ((one, "config://app"), (two, "note://ada")):
            assert (await peer.notice(UPDATED))["params"] == {"uri": uri}
            await peer.request("ping")
            assert len(peer.notices) == 1


@requirement("SRV-710")
@everywhere(*LEGACY, transports=["http"])
async def test_two_sessions_of_one_server_do_not_share_subscriptions(open_wire: Open) -> None:
    one: HttpWire = await open_wire(SHELF, fresh=True)
    two = HttpWire(one.revision, one.server)
    try:
        await two.open()
        await subscribe(one, "config://app")
        await subscribe(two, "note://ada")
        assert await touched(two, "config://app") == []
        assert (await one.notice(UPDATED))["params"] == {"uri": "config://app"}
        assert await touched(one, "note://ada") == []
        assert (await two.notice(UPDATED))["params"] == {"uri": "note://ada"}
    finally:
        await two.close()


async def listen(wire: Wire, ident: Json, **wanted: Json) -> Object:
    """Open a subscription; what of it is honoured."""
    params = wire.params({"notifications": wanted})
    await wire.send({"jsonrpc": "2.0", "id": ident, "method": "subscriptions/listen", "params": params})
    acknowledged = await wire.notice(ACKNOWLEDGED)
    assert acknowledged["params"]["_meta"][SUBSCRIPTION] == ident
    honoured: Object = acknowledged["params"]["notifications"]
    return honoured


KINDS = {"toolsListChanged": "tool", "promptsListChanged": "prompt", "resourcesListChanged": "resource"}


@requirement("SRV-711", "SRV-713")
@everywhere(R5)
async def test_a_listener_hears_what_it_asked_for_under_its_own_id(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    uris = ["config://app", "note://ada"]
    for at, wanted in enumerate(KINDS):
        assert await listen(wire, f"only {wanted}", **{wanted: True}) == {wanted: True}
        assert await listen(wire, 700 + at, **{wanted: False}) == {}
    assert await listen(wire, "uris", resourceSubscriptions=uris) == {"resourceSubscriptions": uris}
    everything: Object = {**dict.fromkeys(KINDS, True), "resourceSubscriptions": ["config://app"]}
    assert await listen(wire, "all", **everything) == everything

    async def heard(count: int) -> list[tuple[str, Json]]:
        while len(wire.others) < count:
            wire.others.append(await wire.receive())
        assert await wire.silent() or len(wire.others) == count
        notices = [(each["method"], each["params"]["_meta"][SUBSCRIPTION]) for each in wire.others]
        wire.others.clear()
        return sorted(notices)

    for kind, name in (("resource", "new:one"), ("template", "new:two/{a}"), ("prompt", "new")):
        for verb in ("add", "disable", "enable", "remove"):
            await wire.call("change", {"kind": kind, "verb": verb, "name": name})
            what = "prompt" if kind == "prompt" else "resource"
            expected = [(CHANGED[what], each) for each in ("all", f"only {what}sListChanged")]
            assert await heard(2) == expected, (kind, verb)
    await wire.call("touch", {"uri": "config://app"})
    assert await heard(2) == [(UPDATED, "all"), (UPDATED, "uris")]
    await wire.call("touch", {"uri": "note://ada"})
    assert await heard(1) == [(UPDATED, "uris")]
    await wire.call("touch", {"uri": "note://alan"})
    assert await heard(0) == []
    await wire.notify(CANCELLED, {"requestId": "uris"})
    await wire.call("touch", {"uri": "config://app"})
    assert await heard(1) == [(UPDATED, "all")]


@requirement("SRV-711")
@everywhere(R5)
async def test_only_what_can_be_honoured_is_acknowledged(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    uris = ["config://nope", "config://app", "note://ada", "", "config://app"]
    honoured = await listen(wire, "some", resourceSubscriptions=uris)
    assert honoured == {"resourceSubscriptions": ["config://app", "note://ada"]}
    assert await listen(wire, "none", resourceSubscriptions=["config://nope"]) in (
        {},
        {"resourceSubscriptions": []},
    )
    quiet: Wire = await open_wire("servers_resources:quiet", fresh=True)
    wanted = await listen(quiet, "quiet", **dict.fromkeys(KINDS, True), resourceSubscriptions=["config://app"])
    assert wanted == {"resourceSubscriptions": ["config://app"]}
    toolless: Wire = await open_wire("servers_resources:prompts_only", fresh=True)
    wanted = await listen(toolless, "p", **dict.fromkeys(KINDS, True), resourceSubscriptions=["config://app"])
    assert wanted == {"promptsListChanged": True}


@requirement("SRV-711")
@everywhere(R5)
async def test_a_malformed_wish_for_resources_is_refused(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    not_uris: list[Any] = ["config://app", None, 5, {}, [5], [None], [["config://app"]]]
    not_booleans: list[Any] = ["yes", None, 1, []]
    for wanted in (
        *({"resourceSubscriptions": each} for each in not_uris),
        *({name: each} for name in ("promptsListChanged", "resourcesListChanged") for each in not_booleans),
    ):
        answer = await wire.request("subscriptions/listen", {"notifications": wanted})
        assert answer["error"]["code"] == -32602, wanted


FLOOD = 20_000 if SOAK else 1_200
"""More than any client needs."""
LENGTH = 0 if SOAK else 1_900
"""Long URIs come to an end sooner; that short ones do is seen in memory, in test_resource_attacks.py."""


@requirement("SRV-712", "P-35")
@everywhere(*LEGACY)
async def test_a_flood_of_subscriptions_is_refused_and_the_first_ones_stay(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    await subscribe(wire, "config://app")
    refused: Object = {}
    for at in range(0, FLOOD, 50):
        idents = [await wire.ask("resources/subscribe", {"uri": f"note://n{at + n:0{LENGTH}}"}) for n in range(50)]
        answers = [await wire.answer(ident) for ident in idents]
        if failed := [each for each in answers if "error" in each]:
            refused = failed[0]
            break
    assert refused, f"{FLOOD} are taken"
    assert refused["error"]["code"] in (-32602, 429)
    assert (await subscribe(wire, "note://" + "n" * 1_000_000)).get("error", {}).get("code") is not None
    assert await touched(wire, "config://app") == ["config://app"]
    assert (await subscribe(wire, "config://app"))["result"] == {}, "it is subscribed to already"
    await subscribe(wire, f"note://n{1:0{LENGTH}}", "unsubscribe")
    assert (await subscribe(wire, "note://again"))["result"] == {}


@requirement("SRV-712", "P-35")
@everywhere(R5)
async def test_a_flood_of_subscriptions_to_listen_to_is_bounded(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    uris = ["config://app", *(f"note://n{at}" for at in range(FLOOD))]
    params = wire.params({"notifications": {"resourceSubscriptions": uris}})
    await wire.send({"jsonrpc": "2.0", "id": "flood", "method": "subscriptions/listen", "params": params})
    first = await wire.receive()
    if "error" in first:
        assert first["error"]["code"] in (-32602, 429)
    else:
        assert len(first["params"]["notifications"]["resourceSubscriptions"]) < FLOOD
    assert text_of(await read(wire, "note://ada")) == "note of ada"


# Changes of the lists


@requirement("SRV-713")
@everywhere(*LEGACY)
async def test_a_change_of_what_is_listed_is_announced_once(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    lists = {"resource": "resources/list", "template": "resources/templates/list", "prompt": "prompts/list"}
    for kind, name in (("resource", "new:one"), ("template", "new:two/{a}"), ("prompt", "new")):
        before = await entries(wire, lists[kind])
        for verb, is_listed in (("add", True), ("disable", False), ("enable", True), ("remove", False)):
            await wire.call("change", {"kind": kind, "verb": verb, "name": name})
            changed = CHANGED["prompt" if kind == "prompt" else "resource"]
            assert await wire.notice(changed) == {"jsonrpc": "2.0", "method": changed}
            assert await wire.silent(), (kind, verb)
            after = await entries(wire, lists[kind])
            assert (len(after) == len(before) + 1) is is_listed, (kind, verb)
    if wire.transport == "http":
        return
    await wire.call("change", {"kind": "prompt", "verb": "enable", "name": "plain"})  # it is: nothing changed
    assert await wire.silent()


@requirement("SRV-713")
@everywhere(*LEGACY)
async def test_what_is_switched_off_is_not_there_until_it_is_switched_on(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF, fresh=True)
    for name, uri in (("config://app", "config://app"), ("note://{name}", "note://ada")):
        await wire.call("change", {"kind": "resource", "verb": "disable", "name": name})
        assert (await read(wire, uri))["error"]["code"] == NOT_FOUND[wire.revision]
        assert (await subscribe(wire, uri))["error"]["code"] == NOT_FOUND[wire.revision]
        await wire.call("change", {"kind": "resource", "verb": "enable", "name": name})
        assert "result" in await read(wire, uri)


@requirement("SRV-713")
@everywhere(*LEGACY)
async def test_no_change_is_announced_where_that_is_switched_off(open_wire: Open) -> None:
    wire: Wire = await open_wire("servers_resources:quiet", fresh=True)
    await wire.call("change", {"kind": "resource", "verb": "add", "name": "new:one"})
    await wire.call("change", {"kind": "prompt", "verb": "add", "name": "new"})
    if wire.revision == P:  # the dialect always announces
        await wire.notice(CHANGED["resource"])
        await wire.notice(CHANGED["prompt"])
    assert await wire.silent()


# Tools and resources


@requirement("SRV-714", "SRV-419")
@everywhere()
async def test_what_a_tool_links_or_embeds_can_be_read(open_wire: Open) -> None:
    wire: Wire = await open_wire(SHELF)
    answer = json.dumps((await wire.call("links"))["result"])
    linked = sorted(set(re.findall(r"\b(?:config|note|image)://\w+", answer)))
    assert linked == ["config://app", "image://dot", "note://ada"]
    for uri in linked:
        assert (await read(wire, uri))["result"]["contents"][0]["uri"] == uri
