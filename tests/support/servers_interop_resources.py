"""The server whose resources, templates and prompts clients of others list, read, subscribe to and complete.

Run by `subject.py servers_interop_resources:served [http]`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from handrail import Server
from servers_resources import shelf

PAGE = 9
"""Entries of a page: fewer than there are resources, templates and prompts, so that every client has to turn pages.

All tools fit, because clients of `mcp` list one page of them and warn of a call to a tool that is not there.
"""

FILES = {"readme.md": b"# Read me\n", "größe x.txt": "ü".encode(), "sub/dot.bin": bytes(range(256))}


def served() -> Server:
    """Every kind of resource, template and prompt on several pages, and a folder of files."""
    place = Path(tempfile.mkdtemp(prefix="interop-"))

    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        # Not `atexit`: a server on a pipe that is told to end by a signal leaves without it.
        yield
        shutil.rmtree(place)

    server = shelf(page_size=PAGE, lifespan=lifespan)
    folder = place / "docs"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    server.add_files(folder, uri="file:///docs/")

    @server.resource("last://{name}", mime_type="text/plain")
    async def last(name: str) -> str:
        """On the last page."""
        return f"last {name}"

    return server
