"""Servers with resources and prompts beside tools; run by `subject.py servers_resources:name`."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from checks import LISTS
from handrail import (
    Audio,
    Call,
    EmbeddedResource,
    Image,
    PromptMessage,
    ResourceLink,
    ResourceNotFound,
    SchemaError,
    Server,
    Text,
    ToolError,
)
from handrail.guards import Approvals, Policy, Rates, Rule, Sanitize, ToolRate, TrailSettings
from servers_guards import ACTS
from subject import PNG, WAV

if TYPE_CHECKING:
    from wires import Wire

Json = Any
Object = dict[str, Any]

ICON = {"src": "https://example.org/icon.png", "mimeType": "image/png", "sizes": ["48x48"]}
MODIFIED = "2025-05-03T14:30:00Z"
NOTE: Object = {"audience": ["user", "assistant"], "priority": 0.7, "lastModified": MODIFIED}
META: Object = {"example.org/x": 1}
SECRET = "s3cr3t-hunter2"
FORM: Object = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
NAMES = ["ada", "alan", "barbara", "grace"]
CITIES = [f"city {at:03}" for at in range(250)]
GOLDEN_TIME = 1_700_000_000.0


def answering(answer: str) -> Callable[[], Awaitable[str]]:
    async def answers() -> str:
        return answer

    return answers


def taking_a(answer: str) -> Callable[[str], Awaitable[str]]:
    async def takes(a: str) -> str:
        return answer

    return takes


def taking_b(answer: str) -> Callable[[str], Awaitable[str]]:
    async def takes(b: str) -> str:
        return answer

    return takes


def taking_both(answer: str) -> Callable[[str, str], Awaitable[str]]:
    async def takes(a: str, b: str) -> str:
        return answer

    return takes


def giving(value: Any) -> Callable[[], Awaitable[Any]]:
    async def gives() -> Any:
        return value

    return gives


UNFIT: dict[str, Any] = {
    "nan": {"x": float("nan")},
    "nothing": None,
    "strange": object(),
    "strange-inside": {"x": object()},
    "half-a-list": [b"x", None],
    "picture": Image(PNG, "image/png"),
}
"""What no resource may answer."""


@dataclass
class Settings:
    depth: int
    dry: bool


UNFIT_MESSAGES: dict[str, Any] = {
    "number": 5,
    "nothing": None,
    "strange": object(),
    "bytes": b"x",
    "object": {"role": "user", "content": "x"},
    "mixture": ["a", 5],
    "content": [PromptMessage("user", 5)],  # type: ignore[arg-type]  # as code without types does it
    "nan": [Text("x", meta={"x": float("nan")})],
}
"""What no prompt may answer."""


def shelf(**options: Any) -> Server:
    """Every kind of resource, template and prompt, and tools that change and link them."""
    server = Server("shelf", **{"version": "1.2.3", "rates": None, **options})
    ran: Counter[str] = Counter()
    stopped: list[str] = []
    _tools(server, ran, stopped)
    _resources(server, ran)
    _templates(server, ran, stopped)
    _prompts(server, ran, stopped)
    _contents(server)
    return server


def _tools(server: Server, ran: Counter[str], stopped: list[str]) -> None:
    @server.tool
    async def times_run(name: str) -> int:
        """How often a resource or a prompt ran."""
        return ran[name]

    @server.tool
    async def was_stopped(mark: str) -> bool:
        """Whether what waited was cancelled."""
        return mark in stopped

    @server.tool
    async def has_begun(mark: str) -> bool:
        """Whether what waits has begun."""
        return ran[mark] > 0

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    @server.tool
    async def asks(call: Call) -> str:
        """Ask for a name."""
        answer = await call.ask("Your name?", FORM, key="name")
        return f"{answer.action} {answer.content}"

    @server.tool
    async def links() -> list[ResourceLink | EmbeddedResource]:
        """Link what is registered, and embed it."""
        return [
            ResourceLink("config://app", "app"),
            ResourceLink("note://ada", "ada"),
            EmbeddedResource({"uri": "image://dot", "mimeType": "image/png", "blob": PNG}),
        ]

    @server.tool
    async def touch(uri: str) -> str:
        """Say that a resource has changed."""
        server.resource_updated(uri)
        return "touched"

    @server.tool
    def touch_from_thread(uri: str) -> str:
        """Say it from a worker thread."""
        server.resource_updated(uri)
        return "touched"

    @server.tool
    async def change(kind: Literal["resource", "template", "prompt"], verb: str, name: str) -> str:
        """Add, remove, disable or enable a resource, a template or a prompt."""
        if verb == "add":
            if kind == "prompt":
                server.prompt(name)(answering("new"))
            else:
                server.resource(name)(answering("new") if kind == "resource" else taking_a("new"))
        else:
            getattr(server, verb)(name, kind="prompt" if kind == "prompt" else "resource")
        return verb


def _resources(server: Server, ran: Counter[str]) -> None:
    @server.resource("config://app", mime_type="text/plain")
    async def app() -> str:
        """The settings in words."""
        ran["config://app"] += 1
        return "depth 3\nü 🦆 \u2028 dry"

    @server.resource("image://dot", mime_type="image/png")
    def dot() -> bytes:
        """One point."""
        return PNG

    @server.resource("data://empty", mime_type="text/plain")
    async def empty() -> str:
        return ""

    @server.resource("data://no-bytes", mime_type="application/octet-stream")
    async def no_bytes() -> bytes:
        return b""

    @server.resource("data://bytes")
    async def all_bytes() -> bytes:
        return bytes(range(256))

    @server.resource("data://object", mime_type="application/json")
    async def as_object() -> dict[str, Any]:
        """An object."""
        return {"depth": 3, "names": ["ü"]}

    @server.resource("data://settings", mime_type="application/json")
    async def settings() -> Settings:
        """A dataclass."""
        return Settings(3, True)

    @server.resource("data://one")
    async def one() -> EmbeddedResource:
        """Said whole."""
        return EmbeddedResource({"uri": "data://one", "mimeType": "text/x-one", "text": "one", "_meta": META})

    @server.resource("data://several", mime_type="text/plain")
    async def several() -> list[EmbeddedResource | str | bytes]:
        """More than one."""
        return [EmbeddedResource({"uri": "data://several/1", "mimeType": "text/x-one", "text": "one"}), "two", b"\x00"]

    @server.resource(
        "doc://full",
        name="full",
        title="Full dress",
        description="Every member there is.",
        mime_type="text/markdown",
        size=4,
        icons=[ICON],
        annotations=NOTE,
        meta=META,
    )
    async def full() -> str:
        return "full"

    for name, value in UNFIT.items():
        server.resource(f"unfit://{name}")(giving(value))

    @server.resource("doc://short-lived", cache_seconds=7)
    async def short_lived() -> str:
        return "short"


def _templates(server: Server, ran: Counter[str], stopped: list[str]) -> None:
    def names(value: str) -> Iterable[str]:
        return [name for name in NAMES if name.startswith(value)]

    async def pages(value: str, context: dict[str, str]) -> list[str]:
        return [f"{context.get('name', '-')} {value}"]

    @server.resource("note://{name}", mime_type="text/markdown", complete={"name": names})
    async def note(name: str) -> str:
        """A note of somebody."""
        ran["note"] += 1
        if name == "nobody":
            raise ResourceNotFound()
        return f"note of {name}"

    @server.resource("book://{name}/{page}", complete={"name": names, "page": pages})
    async def book(name: str, page: Annotated[int, Meta(ge=1, le=9)]) -> str:
        ran["book"] += 1
        return f"{name} {page + 0}"

    @server.resource("side://{side}/{flag}")
    def side(side: Literal["front", "back"], flag: bool) -> str:
        ran["side"] += 1
        return f"{side} {flag is True}"

    @server.resource("path:///{+path}")
    async def path(path: str) -> str:
        return f"path {path}"

    @server.resource("search://items{?q,limit}")
    async def search(q: str = "", limit: int = 10) -> str:
        return f"{q} {limit}"

    @server.resource(
        "full://{name}",
        name="full",
        title="Full template",
        description="Every member there is.",
        mime_type="text/markdown",
        icons=[ICON],
        annotations=NOTE,
        meta=META,
    )
    async def full_template(name: str) -> str:
        return name

    @server.resource("act://{what}/{mark}", timeout=(20.0, 30.0))
    async def act(what: str, mark: str, call: Call) -> str:
        """Do something with the client, or fail in some way."""
        ran[f"act {what}"] += 1
        return await _act(server, call, what, mark, ran, stopped)

    @server.resource("quick://{mark}", timeout=0.05)
    async def quick(mark: str) -> str:
        """Takes longer than it may."""
        await asyncio.Event().wait()
        return mark


async def _act(server: Server, call: Call, what: str, mark: str, ran: Counter[str], stopped: list[str]) -> str:
    """What resources and prompts do beside answering."""
    if what == "asks":
        answer = await call.ask("Your name?", FORM, key="name")
        return f"{answer.action} {answer.content['name'] if answer.content else '-'}"
    if what == "asks-twice":
        first = await call.ask("Your name?", FORM, key="one")
        second = await call.ask(f"Surname, {first.content['name']}?", FORM, key="two")
        return f"{first.content['name']} {second.content['name']}"
    if what == "samples":
        return str((await call.sample("What is the capital of France?", max_tokens=100))["content"])
    if what == "roots":
        return ", ".join(root["uri"] for root in await call.roots())
    if what == "requires":
        call.require("sampling")
    if what == "logs":
        await call.log("debug", "small")
        await call.log("error", {"step": 1}, logger="shelf")
    if what == "progresses":
        for done in (0, 50, 40, 100):
            await call.progress(done, 100, f"at {done}")
    if what == "fails":
        raise ToolError(f"No such city: {mark}")
    if what == "crashes":
        raise RuntimeError(f"the password is {SECRET}")
    if what == "absent":
        raise ResourceNotFound()
    if what == "waits":
        ran[mark] += 1
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(mark)
    return f"{what} {mark} {call.method} {call.principal.id != ''}"


def _prompts(server: Server, ran: Counter[str], stopped: list[str]) -> None:
    def cities(value: str) -> list[str]:
        return [city for city in CITIES if value in city]

    async def streets(value: str, context: dict[str, str]) -> list[str]:
        return [f"{context.get('city', '-')}: {value}"]

    @server.prompt
    def review(code: str, style: Literal["short", "long"] = "short") -> str:
        """Ask for a review."""
        ran["review"] += 1
        return f"Review in {style}: {code}"

    @server.prompt("plain")
    async def nothing_to_say() -> str:
        return "Go on."

    @server.prompt(title="Full prompt", description="Every member there is.", icons=[ICON], meta=META)
    async def full(
        one: Annotated[str, "The first."], two: Annotated[str, Meta(title="Second", description="The second.")] = ""
    ) -> str:
        return f"{one} {two}"

    @server.prompt
    async def typed(
        count: Annotated[int, Meta(ge=1)], share: float, flag: bool, side: Literal["front", "back"], text: str = "-"
    ) -> str:
        ran["typed"] += 1
        return f"{count + 0} {share / 1} {flag is True} {side} {text}"

    @server.prompt
    async def optional(text: str | None = None, count: int | None = None) -> str:
        return f"{text!r} {count!r}"

    @server.prompt(complete={"city": cities, "street": streets})
    async def travel(
        city: str, street: str = "", season: Literal["spring", "summer"] = "spring", dry: bool = True
    ) -> str:
        return f"{city} {street} {season} {dry}"

    @server.prompt("act", timeout=(20.0, 30.0))
    async def act(what: str, mark: str, call: Call) -> str:
        """Do something with the client, or fail in some way."""
        ran[f"act {what}"] += 1
        return await _act(server, call, what, mark, ran, stopped)

    @server.prompt("quick", timeout=0.05)
    async def quick(mark: str) -> str:
        await asyncio.Event().wait()
        return mark


def _contents(server: Server) -> None:
    """Prompts that answer with every kind of content."""
    note = {"audience": ["user"], "priority": 0.5, "lastModified": MODIFIED}

    @server.prompt
    async def talk() -> list[str | PromptMessage]:
        """Two sides."""
        return ["What is the capital?", PromptMessage("assistant", "Paris."), PromptMessage("user", Text("Thanks."))]

    @server.prompt
    async def words() -> list[Text]:
        return [Text("annotated", annotations=note, meta=META)]

    @server.prompt
    async def picture() -> list[Image]:
        return [Image(PNG, "image/png")]

    @server.prompt
    async def sound() -> PromptMessage:
        return PromptMessage("assistant", Audio(WAV, "audio/wav"))

    @server.prompt
    async def link() -> list[ResourceLink]:
        return [
            ResourceLink(
                "config://app", "app", title="App", description="Settings", mime_type="text/plain", size=7, icons=[ICON]
            )
        ]

    @server.prompt
    async def embedded() -> list[str | EmbeddedResource]:
        inner = {"uri": "config://app", "mimeType": "text/plain", "text": "hello", "title": "App"}
        return ["Look:", EmbeddedResource(inner, annotations=note)]

    for name, value in UNFIT_MESSAGES.items():
        server.prompt(f"unfit-{name}")(giving(value))


def completing() -> Server:
    """Completion functions of every kind: as many values as are asked for, without end, slow, broken."""
    server = Server("completing", rates=None)  # a test asks more often than the limits allow
    ran: Counter[str] = Counter()

    def count(value: str) -> list[str]:
        ran["count"] += 1
        return [f"value {at:05}" for at in range(int(value or 0))]

    def endless(value: str) -> Iterator[str]:
        return (f"{value}{at}" for at in itertools.count())

    def crashes(value: str) -> list[str]:
        raise RuntimeError(f"the password is {SECRET}")

    def fails(value: str) -> list[str]:
        raise ToolError("No such city")

    async def context(value: str, context: dict[str, str]) -> list[str]:
        return [f"{name}={context[name]}" for name in sorted(context)] or ["none"]

    functions: dict[str, Any] = {
        "count": count,
        "endless": endless,
        "crashes": crashes,
        "fails": fails,
        "context": context,
        "one-text": lambda value: "text",
        "numbers": lambda value: [1, 2],
        "nothing": lambda value: None,
        "dirty": lambda value: [f"a{ACTS}b", f"c {SECRET} d"],
    }

    def add(name: str, function: Any) -> None:
        complete = {"a": function}
        server.prompt(name, complete=complete)(taking_a("done"))
        server.resource(f"{name}://{{a}}", name=name, complete=complete)(taking_a("done"))

    for name, function in functions.items():
        add(name, function)

    @server.resource("static://x")
    async def static() -> str:
        return "static"

    @server.tool
    async def times_run(name: str) -> int:
        """How often a function completed something."""
        return ran[name]

    return server


def bare() -> Server:
    """Entries that say nothing of themselves."""
    server = Server("bare", version="1")
    server.resource("a:b")(answering("b"))
    server.resource("a:c/{a}")(taking_a("c"))
    server.prompt("bare")(answering("bare"))
    return server


def nothing() -> Server:
    """Tools alone."""
    server = Server("nothing")
    server.add(answering("done"), name="done")
    return server


def resources_only() -> Server:
    server = Server("resources", tools=False)
    server.resource("a:b", name="b")(answering("b"))
    return server


def templates_only() -> Server:
    server = Server("templates", tools=False)
    server.resource("a:c/{a}", name="c")(taking_a("c"))
    return server


def prompts_only() -> Server:
    server = Server("prompts", tools=False)
    server.prompt("bare")(answering("bare"))
    return server


def paged() -> Server:
    """Five of each, two on a page."""
    server = Server("paged", page_size=2)
    for at in range(5):
        server.add(answering(f"{at}"), name=f"tool{at}")
        server.resource(f"page://{at}", name=f"resource{at}")(answering(f"{at}"))
        server.resource(f"page{at}://{{a}}", name=f"template{at}")(taking_a(f"{at}"))
        server.prompt(f"prompt{at}")(answering(f"{at}"))

    @server.tool
    async def drop(kind: Literal["resource", "prompt"], name: str) -> str:
        """Remove one."""
        server.remove(name, kind=kind)
        return "dropped"

    return server


def quiet() -> Server:
    """Announces nothing."""
    return shelf(list_changed=False)


OVERLAPPING: dict[str, Callable[[str], Callable[..., Any]]] = {
    "x://{a}": taking_a,
    "x://{a}/{b}": taking_both,
    "x://docs/{b}": taking_b,
    "x://docs/{b}/draft": taking_b,
    "x://{+a}": taking_a,
    "x://docs/one": answering,
}


def overlapping() -> Server:
    """Several templates match; and a tool that registers more. Each answers with the template that was taken."""
    server = Server("overlapping")
    for template, taking in OVERLAPPING.items():
        server.resource(template, name=template)(taking(template))

    @server.tool
    async def register(template: str, variables: Literal["a", "b", "both"]) -> str:
        """Add one more."""
        taking: Any = {"a": taking_a, "b": taking_b, "both": taking_both}[variables]
        try:
            server.resource(template, name=template)(taking(template))
        except SchemaError as problem:
            raise ToolError(str(problem)) from None
        return "registered"

    return server


# Files

CANARY = "canary-yellow-7319"
MAX_BYTES = 1_000
FILES: dict[str, bytes] = {
    "readme.md": "# Read me, ü 🦆\n".encode(),
    "a b%20c.txt": b"odd name",
    "größe.txt": b"not ASCII",
    "dot.png": PNG,
    "empty.txt": b"",
    "bytes.bin": bytes(range(256)),
    "not-utf8.txt": b"caf\xe9",
    "sub/deep/one.txt": b"deep",
    "sub/readme.md": b"# Sub\n",
    "largest.txt": b"x" * MAX_BYTES,
}
TOO_LARGE = "too-large.txt"


def library() -> Server:
    """A folder of files, with what must not be read beside it and in it."""
    place = Path(tempfile.mkdtemp(prefix="resources-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    server = Server("library", rates=None)  # a test asks more often than the limits allow
    server.add_files(write_files(place), uri="file:///docs/", max_bytes=MAX_BYTES)

    @server.tool
    async def where() -> str:
        """The folder that is above."""
        return str(place)

    @server.tool
    async def write(name: str, text: str) -> str:
        """Write a file of the folder anew."""
        (place / "docs" / name).write_text(text)
        return "written"

    return server


def write_files(place: Path) -> Path:
    """Fill the folder `docs` of a place; everything else there has the canary in it."""
    docs = place / "docs"
    for name, data in FILES.items():
        file = docs / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    (docs / TOO_LARGE).write_bytes(b"x" * (MAX_BYTES + 1))
    (place / "canary.txt").write_text(CANARY)
    (place / "docs-too").mkdir()  # its path begins as that of the folder does
    (place / "docs-too" / "canary.txt").write_text(CANARY)
    (docs / "link-out.txt").symlink_to(place / "canary.txt")
    (docs / "link-up.txt").symlink_to("../canary.txt")
    (docs / "link-folder").symlink_to(place / "docs-too")
    (docs / "link-root").symlink_to("/")
    (docs / "link-loop").symlink_to("link-loop")
    (docs / "link-dangling").symlink_to(place / "nowhere")
    (docs / "link-zero").symlink_to("/dev/zero")
    os.mkfifo(docs / "pipe")
    return docs


def naive() -> Server:
    """Templates whose functions open what they are told to in a folder, as a careless author writes them."""
    place = Path(tempfile.mkdtemp(prefix="naive-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    docs = place / "docs"
    (docs / "sub").mkdir(parents=True)
    (docs / "readme.md").write_text("inside")
    (docs / "sub" / "one.txt").write_text("inside")
    (place / "canary.txt").write_text(CANARY)
    server = Server("naive", rates=None)  # a test asks more often than the limits allow

    def read(path: str) -> str:
        try:
            with open(path) as file:
                return file.read(1_000)
        except (OSError, ValueError):
            raise ResourceNotFound() from None

    def joined(name: str) -> str:
        return read(os.path.join(docs, name))

    def queried(name: str = "readme.md") -> str:
        return read(f"{docs}/{name}")

    for template in ("one://{name}", "some:///{+name}", "star://x{/name*}"):
        server.resource(template)(joined)
    server.resource("query://x{?name}")(queried)

    @server.tool
    async def where() -> str:
        """The folder that is above."""
        return str(place)

    return server


# Guards

LONG = "long " * 1_000
FENCES = [
    Rule(verdict="hide", name="hidden resources", uri=["hidden*", "page://private/*"]),
    Rule(verdict="hide", name="hidden prompts", prompts=["hidden*"]),
    Rule(verdict="deny", name="closed resources", kind="resource", uri="closed*"),
    Rule(verdict="deny", name="closed prompts", prompts=["closed"]),
    Rule(verdict="deny", name="no high page", uri="page://*", arguments={"number": {"over": 100}}),
    Rule(verdict="deny", name="no large sums", prompts=["pay"], arguments={"amount": {"over": 100}}),
    Rule(verdict="ask", name="ask about resources", uri="asked*"),
    Rule(verdict="ask", name="ask about prompts", prompts=["asked"]),
]
CONCEALED = ("hidden", "veiled", "dozing")
"""By a rule, by a scope, and because they are switched off."""
ABSENT = "absent"


def fenced(*, conceals: bool = True, **options: Any) -> Server:
    """A resource, a template and a prompt for each guard; the audit log can be read while it serves.

    Each name is that of the resource `name://x`, of the template `name-note://{name}` and of the prompt `name`.
    """
    folder = Path(tempfile.mkdtemp(prefix="fenced-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "trail.db"
    narrow, one = ToolRate(rate="1/day"), ToolRate(concurrent=1)
    options = {
        "policy": Policy(FENCES),
        "rates": Rates(tools={"narrow*": narrow, "prompt:narrow": narrow, "held*": one, "prompt:held": one}),
        "approvals": Approvals(wait=0.05, round=0.005),
        "sanitize": Sanitize(max_text=2_000),
        "secrets": [SECRET],
        "audit": file,
        "trail": TrailSettings(sync="power-cut-loses-last-calls"),
        **options,
    }
    server = Server("fenced", **options)
    ran: Counter[str] = Counter()

    @server.tool
    async def where() -> str:
        """The file of the audit log."""
        return str(file)

    @server.tool
    async def times_run() -> dict[str, int]:
        """How often each resource and prompt ran, and each completion."""
        return ran

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    def add(name: str, answer: Any, **more: Any) -> None:
        def completes(value: str) -> list[str]:
            ran[f"{name} completes"] += 1
            return [f"{name} of {each}" for each in NAMES]

        async def answered(kind: str) -> Any:
            ran[name] += 1
            return await answer(kind) if callable(answer) else answer

        async def resource() -> Any:
            return await answered("resource")

        async def template(name: str) -> Any:
            return await answered("template")

        async def prompt(who: str = "") -> Any:
            return await answered("prompt")

        server.resource(f"{name}://x", name=name, **more)(resource)
        server.resource(f"{name}-note://{{name}}", name=name, complete={"name": completes}, **more)(template)
        server.prompt(name, complete={"who": completes}, **more)(prompt)

    async def waits(kind: str) -> str:
        ran[f"{kind} waits"] += 1
        await asyncio.Event().wait()
        return kind

    async def fails(kind: str) -> str:
        raise ToolError(f"no {kind} {ACTS} {SECRET}")

    async def crashes(kind: str) -> str:
        raise RuntimeError(SECRET)

    for name in ("open", "closed", "asked", "narrow"):
        add(name, name)
    add("scoped", "scoped", scopes={"admin"})
    add("held", waits)
    add("fails", fails)
    add("breaks", crashes)
    add("dirty", f"text {ACTS} {SECRET}", description=f"about {ACTS} {SECRET}", title=f"title {ACTS} {SECRET}")
    add("large", LONG)
    add("quick", waits, timeout=0.05)
    if conceals:
        add("hidden", "hidden")
        add("veiled", "veiled", scopes={"admin"}, hide=True)
        add("dozing", "dozing")
        for uri in ("dozing://x", "dozing-note://{name}"):
            server.disable(uri, kind="resource")
        server.disable("dozing", kind="prompt")

    @server.resource("page://{section}/{number}")
    async def page(section: str, number: int) -> str:
        ran["page"] += 1
        return f"{section} {number}"

    @server.prompt
    async def pay(amount: int) -> str:
        ran["pay"] += 1
        return f"pay {amount}"

    return server


def unconcealed() -> Server:
    """The same without what is hidden from everybody: nobody can tell the two apart."""
    return fenced(conceals=False)


class Kind(NamedTuple):
    """How one of `fenced` is asked for, and what guards call it."""

    kind: str

    @property
    def method(self) -> str:
        return "prompts/get" if self.kind == "prompt" else "resources/read"

    def params(self, name: str) -> Object:
        return {"name": name} if self.kind == "prompt" else {"uri": self.label(name)}

    def label(self, name: str) -> str:
        """What it is called in the audit log."""
        forms = {"resource": f"{name}://x", "template": f"{name}-note://ada", "prompt": f"prompt:{name}"}
        return forms[self.kind]


KINDS = (Kind("resource"), Kind("template"), Kind("prompt"))


def counting() -> Server:
    """A tool, and two that count the Python calls between them, those of transports apart."""
    server = Server("counting", rates=None)  # a test asks more often than the limits allow
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        # A listener gets a request in one piece or two, and remembers the head of one or not.
        if event == "call" and module.startswith("handrail.") and not module.startswith("handrail.transports."):
            calls[f"{module}:{frame.f_code.co_qualname}"] += 1

    @server.tool
    async def start() -> None:
        calls.clear()
        sys.setprofile(profile)

    @server.tool
    async def stop() -> dict[str, int]:
        sys.setprofile(None)
        return calls

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    return server


def counting_resources() -> Server:
    """The same among many resources, templates and prompts."""
    server = counting()
    for at in range(50):
        server.resource(f"static://{at}", name=f"resource{at}")(answering("x"))
        server.resource(f"template{at}://{{a}}", name=f"template{at}", complete={"a": lambda value: [value]})(
            taking_a("x")
        )
        server.prompt(f"prompt{at}")(taking_a("x"))
    return server


def golden() -> Server:
    """For the bytes on record: the names and values of everything are fixed."""
    server = Server("golden", version="1.0.0", page_size=2)
    # The bytes on file were sealed with a key that a server does not take any more.
    server.engine.seal._keys = [hashlib.blake2b(b"k" * 32, person=b"handrail seal").digest()]
    server.engine.clock = lambda: GOLDEN_TIME

    @server.resource(
        "doc://full",
        name="full",
        title="Full dress",
        description="Every member there is.",
        mime_type="text/markdown",
        size=4,
        icons=[ICON],
        annotations=NOTE,
        meta=META,
        cache_seconds=60,
    )
    async def full() -> str:
        return "ü 🦆"

    @server.resource("image://dot", mime_type="image/png")
    async def dot() -> bytes:
        """One point."""
        return PNG

    @server.resource("data://several", mime_type="text/plain")
    async def several() -> list[EmbeddedResource | str]:
        """More than one."""
        return [EmbeddedResource({"uri": "data://one", "mimeType": "text/x-one", "text": "one", "_meta": META}), "two"]

    @server.resource("note://{name}/{page}", title="Notes", mime_type="text/markdown", annotations=NOTE, meta=META)
    async def note(name: str, page: Annotated[int, Meta(ge=1)], call: Call) -> str:
        """A page of a note."""
        if name == "nobody":
            raise ResourceNotFound()
        if name == "asks":
            answer = await call.ask("Your name?", FORM, key="name")
            return f"{answer.action} {answer.content}"
        if name == "fails":
            raise ToolError("No such city: Atlantis")
        return f"page {page} of {name}"

    @server.prompt(title="Review", icons=[ICON], meta=META)
    async def review(
        code: Annotated[str, Meta(title="The code", description="What is looked at.")],
        style: Literal["short", "long"] = "short",
    ) -> str:
        """Ask for a review."""
        return f"Review in {style}: {code}"

    @server.prompt
    async def kinds() -> list[Any]:
        """Every kind of content."""
        return [
            PromptMessage("assistant", Text("annotated", annotations=NOTE, meta=META)),
            Image(PNG, "image/png"),
            Audio(WAV, "audio/wav"),
            ResourceLink("doc://full", "full", title="Full", mime_type="text/markdown", size=4, icons=[ICON]),
            EmbeddedResource({"uri": "doc://full", "mimeType": "text/markdown", "text": "full"}, annotations=NOTE),
        ]

    @server.prompt(complete={"city": lambda value: [city for city in CITIES if value in city]})
    async def asks(call: Call, city: str = "") -> str:
        answer = await call.ask("Your name?", FORM, key="name")
        return f"{answer.action} {answer.content}"

    @server.tool
    async def grows(number: int) -> str:
        """Add a resource and a prompt, and change a resource."""
        server.resource(f"new:{number}")(answering("new"))
        server.prompt(f"new{number}")(answering("new"))
        server.resource_updated("doc://full")
        return "grown"

    return server


# What the tests say and hear


class Way(NamedTuple):
    """A read or a get of what does as it is told: of `act://{what}/{mark}`, or of the prompt `act`."""

    method: str

    def params(self, what: str, mark: str = "x") -> Object:
        if self.method == "resources/read":
            return {"uri": f"act://{what}/{mark}"}
        return {"name": "act", "arguments": {"what": what, "mark": mark}}

    def quick(self) -> Object:
        """What takes longer than it may."""
        if self.method == "resources/read":
            return {"uri": "quick://x"}
        return {"name": "quick", "arguments": {"mark": "x"}}


WAYS = (Way("resources/read"), Way("prompts/get"))


def text_of(answer: Object) -> str:
    """What a resource or a prompt of one text says."""
    result = answer["result"]
    [part] = result["contents"] if "contents" in result else [each["content"] for each in result["messages"]]
    return str(part["text"])


def data_of(part: Object) -> str | bytes:
    """What one of the contents holds."""
    return str(part["text"]) if "text" in part else b64decode(part["blob"], validate=True)


async def converse(
    wire: Wire, method: str, params: Object, reply: Callable[[str, Object], Object]
) -> tuple[Object, list[Object]]:
    """Send a request and answer what it asks; the answer in the end, and the questions as they came."""
    asked: list[Object] = []
    if wire.stateless:
        more: Object = {}
        while True:
            answer = await wire.request(method, {**params, **more})
            result = answer.get("result", {})
            if result.get("resultType") != "input_required":
                return answer, asked
            wanted = result.get("inputRequests", {})
            asked += wanted.values()
            replies = {key: reply(each["method"], each["params"]) for key, each in wanted.items()}
            more = {"requestState": result["requestState"], **({"inputResponses": replies} if replies else {})}
    ident = await wire.ask(method, params)
    while True:
        message = wire.others.pop(0) if wire.others else await wire.receive()
        if message.get("id") == ident and "method" not in message:
            return message, asked
        if "id" in message and "method" in message:
            asked.append({"method": message["method"], "params": message.get("params", {})})
            result = reply(message["method"], message.get("params", {}))
            await wire.send({"jsonrpc": "2.0", "id": message["id"], "result": result})


async def entries(wire: Wire, method: str) -> list[Object]:
    """What is listed, over all pages, as a client that only follows cursors sees it."""
    listed: list[Object] = []
    cursor: Object = {}
    for _ in range(1_000):
        result = (await wire.request(method, cursor))["result"]
        listed += result[LISTS[method]]
        if not result.get("nextCursor"):
            return listed
        cursor = {"cursor": result["nextCursor"]}
    raise AssertionError("the pages do not end")


async def capabilities(wire: Wire) -> Object:
    """What the server declares, in the words of the revision."""
    if wire.stateless:
        declared: Object = (await wire.request("server/discover"))["result"]["capabilities"]
        return declared
    return dict(wire.welcome["capabilities"])
