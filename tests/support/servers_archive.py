"""A server whose resources and prompts the console shows: of all kinds, hidden, failing, and hostile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from msgspec import Meta

from handrail import Call, EmbeddedResource, Image, ResourceLink, Server, ToolError
from handrail.model import PromptMessage
from servers_console import png, wav

RUN = "window.ran=1"
HOSTILE = f'<img src=x onerror="{RUN}"><script>{RUN}</script>'
JAVASCRIPT = f"javascript:{RUN}"
SECRET = "hunter2-is-the-secret-of-the-archive"
NOTES = ("ada", "alan", "grace")
TEMPLATE = "archive://notes/{name}/{page}"
FORM = {"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]}


def archive(**options: Any) -> Server:
    server = Server("archive", secrets=[SECRET], **options)
    _texts(server)
    _media(server)
    _prompts(server)
    return server


def _texts(server: Server) -> None:
    @server.resource(
        "archive://readme",
        name="readme",
        title="Read me",
        mime_type="text/markdown",
        size=12,
        annotations={"audience": ["user"], "priority": 0.5, "lastModified": "2026-01-02T03:04:05Z"},
        tags=["shelf"],
    )
    async def readme() -> str:
        """What is here."""
        return f"# Read me\n{SECRET}"

    @server.resource("archive://page", name="page", title=HOSTILE, mime_type="text/html")
    async def page() -> str:
        return HOSTILE

    @server.resource(JAVASCRIPT, name="script", mime_type="text/plain")
    async def script() -> str:
        return JAVASCRIPT

    @server.resource("archive://vault", name="vault", scopes=["vault"], hide=True)
    async def vault() -> str:
        return "gold"

    @server.resource("archive://broken", name="broken")
    async def broken() -> str:
        raise ToolError("The shelf is empty")

    @server.resource(TEMPLATE, name="note", title="Notes", mime_type="text/plain", complete={"name": _names})
    async def note(name: str, page: Annotated[int, Meta(ge=1)] = 1) -> str:
        """A page of a note."""
        return f"page {page + 0} of {name}"


def _names(value: str) -> list[str]:
    return [each for each in NOTES if each.startswith(value)]


def _media(server: Server) -> None:
    contents = {
        "seal": ("image/png", png()),
        "bell": ("audio/wav", wav()),
        "fake": ("image/png", HOSTILE.encode()),
        "blob": ("application/octet-stream", bytes(range(256))),
        "drawing": ("image/svg+xml", f'<svg xmlns="http://www.w3.org/2000/svg" onload="{RUN}"/>'.encode()),
    }
    for name, (mime_type, data) in contents.items():
        server.resource(f"archive://{name}", name=name, mime_type=mime_type)(_answering(data))


def _answering(data: bytes) -> Callable[[], Awaitable[bytes]]:
    async def read() -> bytes:
        return data

    return read


def _prompts(server: Server) -> None:
    @server.prompt(title="A review", complete={"author": _names})
    async def review(
        code: Annotated[str, Meta(description="What is looked at.")],
        style: Literal["short", "long"] = "short",
        author: str = "",
        lines: Annotated[int, Meta(ge=1)] = 10,
    ) -> list[PromptMessage]:
        """Ask for a review."""
        return [
            PromptMessage("user", f"Review {lines + 0} lines of {author}, {style}: {code}"),
            PromptMessage("assistant", "Gladly."),
        ]

    @server.prompt(HOSTILE, description=HOSTILE)
    async def gallery() -> list[PromptMessage]:
        html = {"uri": "archive://page", "mimeType": "text/html", "text": HOSTILE}
        return [
            PromptMessage("user", HOSTILE),
            PromptMessage("user", Image(png(), "image/png")),
            PromptMessage("user", ResourceLink(JAVASCRIPT, HOSTILE)),
            PromptMessage("user", EmbeddedResource(html)),
        ]

    @server.prompt
    async def mood(call: Call) -> str:
        answer = await call.ask("How are you?", FORM)
        return f"{answer.action} {answer.content}"


server = archive()
