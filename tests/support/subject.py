"""The server the tests talk to: in memory through `make`, over stdio by running this file with a variant's name."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from handrail import (
    Audio,
    Call,
    EmbeddedResource,
    Form,
    Image,
    Limits,
    ResourceLink,
    Roots,
    Sample,
    Server,
    Text,
    ToolError,
    ToolResult,
)
from handrail.engine.pipeline import Handler

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000a49444154789c6360000002000154a24f5f"
    "0000000049454e44ae426082"
)
WAV = bytes.fromhex("524946462400000057415645666d74201000000001000100401f0000401f0000010008006461746100000000")
SECRET = "s3cr3t-hunter2"


@dataclass
class Sum:
    sum: float


@dataclass
class Name:
    name: str


@dataclass
class Order:
    """A form with every kind of field."""

    name: str
    count: int = 1
    express: bool = False
    size: Literal["small", "large"] = "small"


def add_tools(server: Server) -> None:
    ran: dict[str, int] = {}
    stopped: list[str] = []

    def count(name: str) -> None:
        ran[name] = ran.get(name, 0) + 1

    @server.tool
    async def echo(text: str) -> str:
        """Give the text back."""
        return text

    @server.tool(title="Adder", annotations={"readOnlyHint": True}, meta={"example.org/x": 1})
    async def add(a: float, b: float) -> Sum:
        """Add two numbers."""
        count("add")
        return Sum(a + b)

    @server.tool
    async def times_run(name: str) -> int:
        """How often a tool ran."""
        return ran.get(name, 0)

    @server.tool(inline=True)
    def inline_echo(text: str) -> str:
        """Give the text back, on the loop."""
        return text

    @server.tool
    def thread_echo(text: str) -> str:
        """Give the text back, from a worker thread."""
        return f"{text} {threading.current_thread() is threading.main_thread()}"

    @server.tool
    async def bounded(
        days: Annotated[int, "From 1 to 10"],
        units: Literal["metric", "imperial"] = "metric",
    ) -> str:
        """A number and a choice."""
        count("bounded")
        return f"{days} {units}"

    @server.tool
    async def nothing() -> None:
        """No arguments, no answer."""

    @server.tool
    async def list_numbers() -> list[int]:
        """A list."""
        return [2, 3, 5]

    @server.tool(output_schema={"type": ["null", "string", "number", "boolean"]})
    async def any_value(kind: Literal["null", "string", "number", "boolean"]) -> Any:
        """A value of a simple kind."""
        return {"null": None, "string": "text", "number": 1.5, "boolean": True}[kind]

    @server.tool
    async def plain_dict() -> dict[str, Any]:
        """An object without a schema of its own."""
        return {"a": 1, "b": [True, None]}

    @server.tool
    async def picture() -> Image:
        """An image."""
        return Image(PNG, "image/png", annotations={"audience": ["user"], "priority": 0.9})

    @server.tool
    async def sound() -> Audio:
        """A sound."""
        return Audio(WAV, "audio/wav")

    @server.tool
    async def link() -> ResourceLink:
        """A link."""
        return ResourceLink(
            "file:///project/src/main.rs", "main.rs", description="Primary entry point", mime_type="text/x-rust"
        )

    @server.tool
    async def embedded() -> EmbeddedResource:
        """A resource inside, annotated inside and outside."""
        return EmbeddedResource(
            {
                "uri": "file:///a.txt",
                "mimeType": "text/plain",
                "text": "hello",
                "annotations": {"audience": ["assistant"], "lastModified": "2025-05-03T14:30:00Z"},
            },
            annotations={"priority": 0.5},
        )

    @server.tool
    async def annotated() -> list[Text]:
        """Texts with annotations."""
        note = {"audience": ["user", "assistant"], "priority": 0.7, "lastModified": "2025-05-03T14:30:00Z"}
        return [Text("one", annotations=note, meta={"example.org/y": 2}), Text("two")]

    @server.tool
    async def mixed() -> ToolResult:
        """Structured data beside a picture."""
        return ToolResult([Text("look"), Image(PNG, "image/png")], structured={"n": 1}, meta={"example.org/z": 3})

    @server.tool
    async def fails(text: str = "it did not work") -> str:
        """Tells the model what went wrong."""
        raise ToolError(text, status="failed")

    @server.tool
    async def crashes() -> str:
        """Raises what nobody expected."""
        raise RuntimeError(f"the password is {SECRET}")

    @server.tool
    async def exits() -> str:
        """Tries to end the process."""
        sys.exit(3)

    @server.tool(output_schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    async def lies() -> dict[str, Any]:
        """Breaks its own schema."""
        return {"n": "many"}

    @server.tool
    async def not_finite() -> dict[str, float]:
        """Returns what JSON cannot say."""
        return {"x": float("nan")}

    @server.tool
    async def surrogate() -> str:
        """Returns a text that is not Unicode."""
        return "\ud800"

    @server.tool(dangerous="may contain instructions from strangers")
    async def risky() -> str:
        """Output to be handled with care."""
        return "whatever"

    @server.tool
    async def progresses(call: Call) -> str:
        """Reports progress, once backwards."""
        await call.progress(0, 100, "begun")
        await call.progress(50, 100, "half")
        await call.progress(40, 100, "backwards")
        await call.progress(100, 100, "done")
        return "done"

    @server.tool
    async def logs(call: Call, secret: str = "") -> str:
        """Logs at three levels."""
        await call.log("debug", "small")
        await call.log("info", {"step": 1}, logger="subject")
        await call.log("error", "big")
        return "logged"

    @server.tool(timeout=(1.0, 1.5))
    async def sleeps(heartbeat: bool = False, call: Call = None) -> str:  # type: ignore[assignment]  # always given
        """Never ends by itself."""
        while True:
            await asyncio.sleep(0.05)
            if heartbeat:
                await call.progress(asyncio.get_running_loop().time())

    @server.tool
    async def waits(mark: str) -> str:
        """Waits until it is cancelled, and remembers that it was."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(mark)
        return "never"

    @server.tool
    async def was_stopped(mark: str) -> bool:
        """Whether `waits` was cancelled."""
        return mark in stopped

    @server.tool
    async def after(seconds: float, text: str) -> str:
        """Answers later."""
        await asyncio.sleep(seconds)
        return text

    @server.tool
    async def when(path: str, text: str) -> str:
        """Answers when a file is there."""
        while not await asyncio.to_thread(os.path.exists, path):  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.005)
        return text

    @server.tool
    async def asks(call: Call) -> str:
        """Asks for a name."""
        answer = await call.ask("Your name?", Name)
        return f"{answer.action} {answer.content.name if answer.content else '-'}"

    @server.tool
    async def asks_twice(call: Call) -> str:
        """Asks for a name, then a colour."""
        first = await call.ask("Your name?", Name, key="step1")
        colour = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
        second = await call.ask(f"Your colour, {first.content.name}?", colour, key="step2")
        return f"{first.content.name} {second.content['colour']}"

    @server.tool
    async def asks_order(call: Call) -> str:
        """A form with every kind of field."""
        answer = await call.ask("Your order?", Order)
        return f"{answer.action} {answer.content}"

    @server.tool
    async def asks_choices(call: Call) -> str:
        """A form with titled choices and several to choose."""
        schema = {
            "type": "object",
            "properties": {
                "one": {"type": "string", "oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]},
                "many": {"type": "array", "items": {"type": "string", "enum": ["x", "y", "z"]}},
            },
            "required": ["one", "many"],
        }
        answer = await call.ask("Choose", schema)
        return f"{answer.action} {answer.content}"

    @server.tool
    def asks_blocking(call: Call) -> str:
        """Asks from a worker thread."""
        answer = call.blocking.ask("Your name?", Name)
        return f"{answer.action} {answer.content}"

    @server.tool
    async def asks_url(call: Call) -> str:
        """Sends the user to a page."""
        answer = await call.ask_url("Sign in first", "https://example.com/connect")
        return answer.action

    @server.tool
    async def samples(call: Call) -> str:
        """Asks the client's model."""
        answer = await call.sample("What is the capital of France?", max_tokens=100)
        return f"LLM response: {answer['content']}"

    @server.tool
    async def wants_roots(call: Call) -> str:
        """Asks for the client's folders."""
        return ", ".join(root["uri"] for root in await call.roots())

    @server.tool
    async def asks_all(call: Call) -> str:
        """Asks three things at once."""
        found = await call.ask_all(
            {"user_name": Form("Your name?", Name), "greeting": Sample("Greet", max_tokens=50), "folders": Roots()}
        )
        return f"{found['user_name'].content.name} {found['greeting']['role']} {len(found['folders'])}"

    @server.tool
    async def requires(call: Call, capability: str = "sampling") -> str:
        """Goes on only with a capability."""
        call.require(capability)
        return "fine"

    @server.tool
    async def add_tool(name: str) -> str:
        """Adds a tool while running."""

        async def added() -> str:
            """Was not there before."""
            return "new"

        server.add(added, name=name)
        return "added"

    @server.tool
    async def remove_tool(name: str) -> str:
        """Removes a tool while running."""
        server.remove(name)
        return "removed"

    @server.tool
    def prints() -> str:
        """Writes to standard output in every way there is."""
        print("printed")
        sys.stdout.flush()
        os.write(1, b"written by a C library\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        subprocess.run(["cat"], check=True)  # would eat the wire
        return "printed"

    @server.tool
    async def big(size: int) -> str:
        """A long text."""
        return "x" * size

    @server.tool
    async def state(call: Call) -> str:
        """What the lifespan gave, and who calls."""
        return f"{call.state} {call.client.name} {call.revision.name} {call.principal.id} {call.deadline > 0}"

    @server.tool
    async def ignores_cancel(mark: str) -> str:
        """Will not be stopped."""
        stopped.append(f"{mark} started")
        for _ in range(200):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return "at last"

    @server.tool
    def blocks(mark: str, call: Call) -> str:
        """A `def` tool that looks at the flag."""
        gate = threading.Event()
        while not call.cancelled:
            gate.wait(0.01)
        stopped.append(mark)
        return "stopped"


@contextlib.asynccontextmanager
async def lifespan(server: Server) -> AsyncIterator[str]:
    yield "the state"


def _default() -> Server:
    server = Server("subject", version="1.2.3", title="The subject", instructions="Be kind.", lifespan=lifespan)
    add_tools(server)
    return server


def _paged() -> Server:
    server = Server("paged", page_size=2)
    for at in range(5):
        server.add(_numbered(at), name=f"tool{at}")
    return server


def _many() -> Server:
    server = Server("many")
    for at in range(500):
        server.add(_numbered(at), name=f"tool{at}")
    return server


def _numbered(at: int) -> Callable[[], Any]:
    async def numbered() -> int:
        """A tool with a number."""
        return at

    return numbered


def _without_tools() -> Server:
    return Server("without", tools=False)


def _empty() -> Server:
    return Server("empty")


def _quiet() -> Server:
    server = Server("quiet", list_changed=False)
    add_tools(server)
    return server


def _modern() -> Server:
    server = Server("modern", revisions=["2026-07-28"], identify=False)
    add_tools(server)
    return server


def _broken() -> Server:
    server = Server("broken")
    add_tools(server)

    @server.middleware
    async def breaks(call: Call, following: Handler) -> ToolResult:
        if call.name == "add":
            raise RuntimeError(f"a bug in the server: {SECRET}")
        return await following(call)

    return server


def _small() -> Server:
    limits = Limits(max_message_bytes=64 * 1024, max_calls=4, max_unsent_bytes=16 * 1024)
    server = Server("small", limits=limits, workers=1)
    add_tools(server)
    return server


VARIANTS = {
    "default": _default,
    "paged": _paged,
    "many": _many,
    "without": _without_tools,
    "empty": _empty,
    "quiet": _quiet,
    "modern": _modern,
    "broken": _broken,
    "small": _small,
}


def make(variant: str = "default") -> Server:
    """A fresh server: one of `VARIANTS`, or `module:function` of another file in this folder."""
    if ":" in variant:
        module, function = variant.split(":")
        server: Server = getattr(importlib.import_module(module), function)()
        return server
    return VARIANTS[variant]()


def serve_http(server: Server) -> None:
    """Listen, and say where on standard output; end when asked to, or when standard input does."""
    # A private copy: the tools get an empty one.
    lifeline, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def follow() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    server.run(http="127.0.0.1:0", ready=lambda url: print(url, flush=True))


def serve(variant: str = "default", transport: str = "stdio") -> None:
    """What a process of its own does."""
    if transport == "http":
        serve_http(make(variant))
    else:
        make(variant).run()


if __name__ == "__main__":
    serve(*sys.argv[1:])
