"""Other people's clients and what our server offers them: resources, templates, prompts and completion.

One walk serves all tests of a client, and one process of a peer takes all its walks: it starts longer than it walks.
Over HTTP one process serves all clients one after the other, so a walk removes what it has added.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.interop.test_http as http
from paths import SUPPORT
from requirements import requirement
from servers_interop_resources import FILES, PAGE
from servers_resources import CITIES, ICON, META, NOTE
from subject import PNG, WAV
from tests.interop.test_http import Client, shown, started
from tests.interop.test_stdio import (
    NEWEST,
    Conversation,
    Ended,
    Inspect,
    InstalledPeer,
    Json,
    Object,
    Ran,
    client_command,
    inspector_config,
    run,
    run_inspector,
    server_command,
    since,
)

pytestmark = pytest.mark.peers

SERVED = [str(SUPPORT / "subject.py"), "servers_interop_resources:served"]

RESOURCES = """
    config://app image://dot data://empty data://no-bytes data://bytes data://object data://settings data://one
    data://several doc://full unfit://nan unfit://nothing unfit://strange unfit://strange-inside unfit://half-a-list
    unfit://picture doc://short-lived file:///docs/gr%C3%B6%C3%9Fe%20x.txt file:///docs/readme.md
    file:///docs/sub/dot.bin
""".split()
TEMPLATES = """
    note://{name} book://{name}/{page} side://{side}/{flag} path:///{+path} search://items{?q,limit} full://{name}
    act://{what}/{mark} quick://{mark} file:///docs/{+path} last://{name}
""".split()
PROMPTS = """
    review plain full typed optional travel act quick talk words picture sound link embedded unfit-number unfit-nothing
    unfit-strange unfit-bytes unfit-object unfit-mixture unfit-content unfit-nan
""".split()

READS = [
    "config://app",
    "image://dot",
    "data://empty",
    "data://bytes",
    "data://object",
    "data://one",
    "data://several",
    "note://ada",
    "book://grace/3",
    "search://items?q=a%20b&limit=2",
    *(uri for uri in RESOURCES if uri.startswith("file:")),
]
UNKNOWN = ["nowhere://x", "note://nobody", "file:///docs/absent.md"]
"""No resource, a template that has no such resource, and a folder that has no such file."""

ADA: Object = {"action": "accept", "content": {"name": "Ada"}}
CITY: Object = {"type": "ref/prompt", "name": "travel"}
BOOK: Object = {"type": "ref/resource", "uri": "book://{name}/{page}"}
COMPLETIONS: dict[str, Object] = {
    "ten": {"complete": CITY, "argument": {"name": "city", "value": "city 24"}},
    "many": {"complete": CITY, "argument": {"name": "city", "value": ""}},
    "none": {"complete": CITY, "argument": {"name": "city", "value": "Atlantis"}},
    "literal": {"complete": CITY, "argument": {"name": "season", "value": "su"}},
    "context": {
        "complete": CITY,
        "argument": {"name": "street", "value": "Main"},
        "context": {"city": "Rome"},
    },
    "variable": {"complete": BOOK, "argument": {"name": "name", "value": "a"}},
    "second variable": {"complete": BOOK, "argument": {"name": "page", "value": "3"}, "context": {"name": "ada"}},
}
UNKNOWN_REFERENCES: dict[str, Object] = {
    "unknown prompt": {"complete": {"type": "ref/prompt", "name": "nobody"}, "argument": {"name": "a", "value": ""}},
    "unknown template": {
        "complete": {"type": "ref/resource", "uri": "no://{a}"},
        "argument": {"name": "a", "value": ""},
    },
    "unknown argument": {"complete": CITY, "argument": {"name": "country", "value": ""}},
}


def changing(listed: str, kind: str, verb: str, name: str) -> Object:
    return {"change": listed, "calls": [["change", {"kind": kind, "verb": verb, "name": name}]]}


def touching(uri: str, *calls: list[str]) -> Object:
    return {"subscribe": uri, "calls": [[tool, {"uri": touched}] for tool, touched in calls]}


STEPS: dict[str, Object] = {
    "resources": {"list": "resources"},
    "templates": {"list": "templates"},
    "prompts": {"list": "prompts"},
    **{uri: {"read": uri} for uri in READS + UNKNOWN},
    "plain": {"get": "plain"},
    "review": {"get": "review", "arguments": {"code": "x = 1 # ü 🦆", "style": "long"}},
    "typed": {"get": "typed", "arguments": {"count": "3", "share": "0.5", "flag": "true", "side": "back"}},
    "missing": {"get": "review", "arguments": {}},
    "extra": {"get": "review", "arguments": {"code": "x", "colour": "red"}},
    "invalid": {"get": "review", "arguments": {"code": "x", "style": "endless"}},
    "unknown": {"get": "nobody"},
    **{name: {"get": name} for name in ("talk", "words", "picture", "sound", "link", "embedded")},
    "asking prompt": {"get": "act", "arguments": {"what": "asks", "mark": "x"}, "answer": ADA},
    "asking resource": {"read": "act://asks/x", "answer": ADA},
    **COMPLETIONS,
    **UNKNOWN_REFERENCES,
    # What is touched first is not subscribed to, or not any more.
    "update": touching("config://app", ["touch", "image://dot"], ["touch", "config://app"]),
    "next update": touching("note://ada", ["touch", "config://app"], ["touch_from_thread", "note://ada"]),
    "added": changing("resources", "resource", "add", "new://x"),
    "removed": changing("resources", "resource", "remove", "new://x"),
    # The notice of a template is that of resources.
    "added template": changing("resources", "template", "add", "new://{a}/x"),
    "more templates": {"list": "templates"},
    "removed template": changing("resources", "template", "remove", "new://{a}/x"),
    "templates again": {"list": "templates"},
    "added prompt": changing("prompts", "prompt", "add", "newcomer"),
    "removed prompt": changing("prompts", "prompt", "remove", "newcomer"),
    "links": {"call": "links"},
}

EVERYBODY = [
    Client("mcp1", "2024-11-05", "stdio", "2024-11-05"),
    Client("mcp1", "2025-03-26", "stdio", "2025-03-26"),
    Client("mcp1", "2025-06-18", "stdio", "2025-06-18"),
    Client("mcp1", "2025-11-25", "stdio", "2025-11-25"),
    Client("mcp2", "legacy", "stdio", "2025-11-25"),
    Client("mcp2", "auto", "stdio", "2026-07-28"),
    Client("fastmcp", "legacy", "stdio", "2025-11-25"),
    Client("fastmcp", "auto", "stdio", "2026-07-28"),
    Client("typescript", "legacy", "stdio", "2025-11-25"),
    Client("typescript", "auto", "stdio", "2026-07-28"),
    Client("mcp1", "2024-11-05", "http", "2024-11-05"),
    Client("mcp1", "2025-03-26", "http", "2025-03-26"),
    Client("mcp1", "2025-06-18", "http", "2025-06-18"),
    Client("mcp1", "2025-11-25", "http", "2025-11-25"),
    Client("mcp1", "2024-11-05", "sse", "2024-11-05"),
    Client("mcp2", "legacy", "http", "2025-11-25"),
    Client("mcp2", "auto", "http", "2026-07-28"),
    Client("mcp2", "legacy", "sse", "2025-11-25"),
    Client("fastmcp", "legacy", "http", "2025-11-25"),
    Client("fastmcp", "auto", "http", "2026-07-28"),
    Client("fastmcp", "auto", "sse", "2025-11-25"),
    Client("typescript", "legacy", "http", "2025-11-25"),
    Client("typescript", "auto", "http", "2026-07-28"),
    Client("typescript", "legacy", "sse", "2025-11-25"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started([*SERVED, "http"], tmp_path_factory.mktemp("served")) as running:
        yield running.url


@pytest.fixture(scope="module")
def walks() -> dict[Client, Ended]:
    return {}


@pytest.fixture(params=EVERYBODY, ids=str)
def talk(
    request: pytest.FixtureRequest,
    installed_peer: InstalledPeer,
    bytecode: str,
    url: str,
    walks: dict[Client, Ended],
    ran: Ran,
) -> Conversation:
    """A walk through the server by each client in each of its ways to connect."""
    client: Client = request.param
    if client not in walks:
        args, mark = server_command(SERVED)
        is_process = client.transport == "stdio"
        clients = [each for each in EVERYBODY if (each.peer, each.transport == "stdio") == (client.peer, is_process)]
        plans: list[Object] = [
            {
                "mode": each.mode,
                "steps": list(STEPS.values()),
                **({"command": sys.executable, "args": args} if is_process else {"url": url}),
                "transport": each.transport,
            }
            for each in clients
        ]
        command = [*client_command(client.peer, installed_peer(client.peer)), json.dumps(plans)]
        ended = run(command, mark, FASTMCP_CHECK_FOR_UPDATES="off", PYTHONPYCACHEPREFIX=bytecode)
        played = json.loads(ended.out) if ended.code == 0 else [None] * len(clients)
        for each, seen in zip(clients, played, strict=True):
            walks[each] = Ended(ended.code, json.dumps(seen), ended.err)
    conversation = Conversation(walks[client], list(STEPS))
    assert conversation.revision == client.revision
    assert conversation.seen["unexpected"] == []
    if client.transport == "stdio":
        ran(client.revision, "stdio")
    else:
        http.record(ran, client)
    return conversation


# What a revision has of an entry.

NEWER = {"title": "2025-06-18", "_meta": "2025-06-18", "lastModified": "2025-06-18", "icons": "2025-11-25"}


def in_revision(entry: Object, revision: str) -> Object:
    """An entry without the members that are newer than a revision."""
    return {
        name: in_revision(value, revision) if name == "annotations" else value
        for name, value in entry.items()
        if since(revision, NEWER.get(name, "2024-11-05"))
    }


def named(entries: list[Object], name: str) -> Object:
    [entry] = [each for each in entries if each["name"] == name]
    return entry


FULL: Object = {
    "name": "full",
    "description": "Every member there is.",
    "mimeType": "text/markdown",
    "icons": [ICON],
    "annotations": NOTE,
    "_meta": META,
}


# Lists


@requirement("SRV-702", "SRV-703", "SRV-705")
def test_a_client_lists_resources_on_every_page(talk: Conversation) -> None:
    resources = talk.result("resources")
    assert [each["uri"] for each in resources] == RESOURCES
    assert len(RESOURCES) > 2 * PAGE
    full = {**FULL, "uri": "doc://full", "title": "Full dress", "size": 4}
    assert named(resources, "full") == in_revision(full, talk.revision)
    file = {"name": "sub/dot.bin", "uri": "file:///docs/sub/dot.bin", "mimeType": "application/octet-stream"}
    assert resources[-1] == {**file, "size": 256}


@requirement("SRV-702", "SRV-703")
def test_a_client_lists_templates_on_every_page(talk: Conversation) -> None:
    templates = talk.result("templates")
    assert [each["uriTemplate"] for each in templates] == TEMPLATES
    assert len(TEMPLATES) > PAGE
    full = {**FULL, "uriTemplate": "full://{name}", "title": "Full template"}
    assert named(templates, "full") == in_revision(full, talk.revision)
    assert named(templates, "docs")["uriTemplate"] == "file:///docs/{+path}"


@requirement("SRV-721", "SRV-703")
def test_a_client_lists_prompts_on_every_page(talk: Conversation, request: pytest.FixtureRequest) -> None:
    prompts = talk.result("prompts")
    assert [each["name"] for each in prompts] == PROMPTS
    assert len(PROMPTS) > 2 * PAGE
    full = named(prompts, "full")
    one, two = full.pop("arguments")
    description = {"title": "Full prompt", "description": "Every member there is.", "icons": [ICON], "_meta": META}
    assert full == in_revision({"name": "full", **description}, talk.revision)
    assert one == {"name": "one", "description": "The first.", "required": True}
    titled = {"name": "two", "title": "Second", "description": "The second.", "required": False}
    if talk_peer(request) == "typescript":
        del titled["title"]  # which this client leaves out
    assert two == in_revision(titled, talk.revision)


def talk_peer(request: pytest.FixtureRequest) -> str:
    """Whose client the test is about."""
    client: Client = request.node.callspec.params["talk"]
    return client.peer


# Resources


@requirement("SRV-704")
def test_a_client_reads_text_and_bytes(talk: Conversation) -> None:
    def contents(uri: str) -> Json:
        return talk.result(uri)["contents"]

    app = {"uri": "config://app", "mimeType": "text/plain", "text": "depth 3\nü 🦆 \u2028 dry"}
    assert contents("config://app") == [app]
    dot = {"uri": "image://dot", "mimeType": "image/png", "blob": base64.b64encode(PNG).decode()}
    assert contents("image://dot") == [dot]
    assert contents("data://empty") == [{"uri": "data://empty", "mimeType": "text/plain", "text": ""}]
    [raw] = contents("data://bytes")
    assert base64.b64decode(raw["blob"], validate=True) == bytes(range(256)) and "text" not in raw
    [data] = contents("data://object")
    assert data["mimeType"] == "application/json"
    assert json.loads(data["text"]) == {"depth": 3, "names": ["ü"]}
    one = {"uri": "data://one", "mimeType": "text/x-one", "text": "one", "_meta": META}
    assert contents("data://one") == [in_revision(one, talk.revision)]
    assert contents("data://several") == [
        {"uri": "data://several/1", "mimeType": "text/x-one", "text": "one"},
        {"uri": "data://several", "mimeType": "text/plain", "text": "two"},
        {"uri": "data://several", "mimeType": "text/plain", "blob": "AA=="},
    ]


@requirement("SRV-704")
def test_a_client_reads_what_a_template_describes(talk: Conversation) -> None:
    note = {"uri": "note://ada", "mimeType": "text/markdown", "text": "note of ada"}
    assert talk.result("note://ada")["contents"] == [note]
    [page] = talk.result("book://grace/3")["contents"]
    assert page["text"] == "grace 3"
    [items] = talk.result("search://items?q=a%20b&limit=2")["contents"]
    assert items["text"] == "a b 2"


@requirement("SRV-705")
def test_a_client_reads_files(talk: Conversation) -> None:
    odd, readme, dot = (talk.result(uri)["contents"] for uri in READS[-3:])
    assert odd == [{"uri": "file:///docs/gr%C3%B6%C3%9Fe%20x.txt", "mimeType": "text/plain", "text": "ü"}]
    assert readme == [{"uri": "file:///docs/readme.md", "mimeType": "text/markdown", "text": "# Read me\n"}]
    assert base64.b64decode(dot[0]["blob"], validate=True) == FILES["sub/dot.bin"]


@pytest.mark.parametrize("uri", UNKNOWN)
@requirement("SRV-707")
def test_a_client_is_told_that_a_resource_is_unknown(
    uri: str, talk: Conversation, request: pytest.FixtureRequest
) -> None:
    error = talk.steps[uri]["error"]
    # The TypeScript client makes the newer code of the older one.
    newer = since(talk.revision, "2026-07-28") or talk_peer(request) == "typescript"
    assert error["code"] == (-32602 if newer else -32002)
    assert error["message"] == f"Resource not found: {uri}"
    assert error["data"] == {"uri": uri}


@requirement("SRV-714")
def test_what_a_tool_links_and_embeds_can_be_read(talk: Conversation) -> None:
    app, ada, dot = talk.result("links")["content"]
    if since(talk.revision, "2025-06-18"):
        assert (app["uri"], ada["uri"]) == ("config://app", "note://ada")
    else:
        assert "config://app" in app["text"] and "note://ada" in ada["text"]
    assert [dot["resource"]] == talk.result("image://dot")["contents"]


# Prompts


@requirement("SRV-722", "SRV-723")
def test_a_client_gets_a_prompt_with_its_arguments(talk: Conversation) -> None:
    review = talk.result("review")
    assert review["description"] == "Ask for a review."
    assert review["messages"] == [said("Review in long: x = 1 # ü 🦆")]
    assert talk.result("typed")["messages"] == [said("3 0.5 True back -")]
    assert talk.result("plain")["messages"] == [said("Go on.")]


def said(text: str, role: str = "user") -> Object:
    return {"role": role, "content": {"type": "text", "text": text}}


@pytest.mark.parametrize(
    ("step", "word"), [("missing", "code"), ("extra", "colour"), ("invalid", "endless"), ("unknown", "nobody")]
)
@requirement("SRV-723")
def test_a_client_is_told_what_is_wrong_with_a_prompt(step: str, word: str, talk: Conversation) -> None:
    error = talk.steps[step]["error"]
    assert error["code"] == -32602
    assert word in error["message"]


@requirement("SRV-722")
def test_a_client_gets_every_kind_of_content(talk: Conversation) -> None:
    def messages(prompt: str) -> Json:
        return talk.result(prompt)["messages"]

    assert messages("talk") == [said("What is the capital?"), said("Paris.", "assistant"), said("Thanks.")]
    [words] = messages("words")
    note = {"audience": ["user"], "priority": 0.5, "lastModified": NOTE["lastModified"]}
    text = {"type": "text", "text": "annotated", "annotations": note, "_meta": META}
    assert words == {"role": "user", "content": in_revision(text, talk.revision)}
    [picture] = messages("picture")
    image = {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}
    assert picture == {"role": "user", "content": image}
    sound, *explained = messages("sound")
    assert sound["role"] == "assistant"
    data = base64.b64encode(WAV).decode()
    if since(talk.revision, "2025-03-26"):
        assert sound["content"] == {"type": "audio", "data": data, "mimeType": "audio/wav"} and explained == []
    else:
        assert sound["content"]["resource"]["blob"] == data
        assert [each["content"]["type"] for each in explained] == ["text"]
    [link] = messages("link")
    if since(talk.revision, "2025-06-18"):
        about = {"name": "app", "title": "App", "description": "Settings", "mimeType": "text/plain", "size": 7}
        whole = {"type": "resource_link", "uri": "config://app", **about, "icons": [ICON]}
        assert link["content"] == in_revision(whole, talk.revision)
    else:
        assert link["content"]["type"] == "text" and "config://app" in link["content"]["text"]
    look, embedded = messages("embedded")
    assert look == said("Look:")
    inner = embedded["content"]["resource"]
    assert (inner["uri"], inner["mimeType"], inner["text"]) == ("config://app", "text/plain", "hello")
    assert embedded["content"]["annotations"] == in_revision(note, talk.revision)


@requirement("SRV-724")
def test_a_prompt_and_a_resource_ask_the_client(talk: Conversation) -> None:
    steps = ("asking prompt", "asking resource")
    if not since(talk.revision, "2025-06-18"):
        for step in steps:
            assert talk.steps[step]["asked"] == []
            assert "elicitation" in talk.steps[step]["error"]["message"]
        return
    for step in steps:
        [asked] = talk.steps[step]["asked"]
        assert asked["message"] == "Your name?"
    assert talk.result("asking prompt")["messages"] == [said("accept Ada")]
    [content] = talk.result("asking resource")["contents"]
    assert content["text"] == "accept Ada"


# Completion


@requirement("SRV-731", "SRV-732")
def test_a_client_completes_arguments_and_variables(talk: Conversation) -> None:
    def completion(step: str) -> tuple[list[str], int, bool]:
        result = talk.result(step)
        return result["values"], result["total"], result["hasMore"]

    hears = since(talk.revision, "2025-06-18")  # of what else is filled in
    assert completion("ten") == (CITIES[240:], 10, False)
    assert completion("many") == (CITIES[:100], 250, True)
    assert completion("none") == ([], 0, False)
    assert completion("literal") == (["summer"], 1, False)
    assert completion("context") == (["Rome: Main" if hears else "-: Main"], 1, False)
    assert completion("variable") == (["ada", "alan"], 2, False)
    assert completion("second variable") == (["ada 3" if hears else "- 3"], 1, False)


@pytest.mark.parametrize("step", UNKNOWN_REFERENCES)
@requirement("SRV-733")
def test_a_client_is_told_that_there_is_nothing_to_complete(step: str, talk: Conversation) -> None:
    assert talk.steps[step]["error"]["code"] == -32602


# Notifications


@requirement("SRV-710", "SRV-711")
def test_a_client_hears_of_updates_of_what_it_subscribes_to_and_of_nothing_else(talk: Conversation) -> None:
    assert talk.result("update") == ["config://app"]
    assert talk.result("next update") == ["note://ada"]


@requirement("SRV-711", "SRV-713")
def test_a_client_hears_of_changed_lists(talk: Conversation) -> None:
    assert [each["uri"] for each in talk.result("added")] == [*RESOURCES, "new://x"]
    assert talk.result("removed") == talk.result("resources")
    assert [each["uriTemplate"] for each in talk.result("more templates")] == [*TEMPLATES, "new://{a}/x"]
    assert talk.result("templates again") == talk.result("templates")
    assert [each["name"] for each in talk.result("added prompt")] == [*PROMPTS, "newcomer"]
    assert [each["name"] for each in talk.result("removed prompt")] == PROMPTS


# The MCP Inspector on the command line, which has no method for completion and subscriptions.

# A start of it takes a second or two, so each test has one place.
modern_stdio = pytest.mark.parametrize(("era", "transport"), [("modern", "stdio")])
legacy_http = pytest.mark.parametrize(("era", "transport"), [("legacy", "http")])


@pytest.fixture
def inspect(era: str, transport: str, installed_peer: InstalledPeer, url: str, tmp_path: Path, ran: Ran) -> Inspect:
    """Run the inspector against the server: `inspect(method, *options)`."""

    def inspected(method: str, *options: str) -> Ended:
        place, mark = ([url], None) if transport == "http" else inspector_config(tmp_path, SERVED)
        options = ("--protocol-era", era, "--method", method, *options)
        ended = run_inspector(installed_peer("inspector"), tmp_path, place, mark, *options)
        ran(NEWEST[era], transport)
        return ended

    return inspected


@modern_stdio
@requirement("SRV-702", "SRV-703", "SRV-721")
def test_the_inspector_lists_every_page(inspect: Inspect) -> None:
    resources = shown(inspect("resources/list"))["resources"]
    assert [each["uri"] for each in resources] == RESOURCES
    assert named(resources, "full") == {**FULL, "uri": "doc://full", "title": "Full dress", "size": 4}
    templates = shown(inspect("resources/templates/list"))["resourceTemplates"]
    assert [each["uriTemplate"] for each in templates] == TEMPLATES
    prompts = shown(inspect("prompts/list"))["prompts"]
    assert [each["name"] for each in prompts] == PROMPTS


@legacy_http
@requirement("SRV-704", "SRV-705")
def test_the_inspector_reads(inspect: Inspect, tmp_path: Path) -> None:
    note = {"uri": "note://ada", "mimeType": "text/markdown", "text": "note of ada"}
    assert shown(inspect("resources/read", "--uri", "note://ada"))["contents"] == [note]
    path = tmp_path / "dot.bin"
    options = ["--uri", "file:///docs/sub/dot.bin", "--output", str(path), "--output-format", "raw"]
    ended = inspect("resources/read", *options)
    assert ended.code == 0, ended.err
    assert path.read_bytes() == FILES["sub/dot.bin"]


@modern_stdio
@requirement("SRV-722", "SRV-723")
def test_the_inspector_gets_a_prompt(inspect: Inspect) -> None:
    review = ["--prompt-name", "review", "--prompt-args"]
    prompt = shown(inspect("prompts/get", *review, "code=x", "style=long"))
    assert prompt["description"] == "Ask for a review."
    assert prompt["messages"] == [said("Review in long: x")]


@legacy_http
@requirement("SRV-707")
def test_the_inspector_is_told_that_a_resource_is_unknown(inspect: Inspect) -> None:
    ended = inspect("resources/read", "--uri", "nowhere://x", "-q")
    assert ended.code != 0
    assert json.loads(ended.err)["error"]["message"] == "Resource not found: nowhere://x"
