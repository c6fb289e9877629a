"""The server that clients of others list, read, subscribe to, prompt and complete.

Run by `subject.py servers_interop_resources:served [http]`.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from handrail import Server
from servers_resources import shelf

PAGE = 9
"""Entries: fewer than there are resources, templates and prompts, so that everybody has to turn pages."""

FILES = {"readme.md": b"# Read me\n", "größe x.txt": "ü".encode(), "sub/dot.bin": bytes(range(256))}


def served() -> Server:
    """Every kind of resource, template and prompt on several pages, and a folder of files."""
    server = shelf(page_size=PAGE)
    folder = Path(tempfile.mkdtemp(prefix="interop-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    server.add_files(folder, uri="file:///docs/")
    return server
