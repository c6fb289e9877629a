"""What a client can be given, and how each is reached: a URL, a command, a file, a server object, configuration."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from handrail.client.mcp_config import Entry, EntryError, read_entries
from handrail.errors import ConfirmationRequired, Denied
from handrail.transports.base import Link
from handrail.transports.http_client import Authorizer, Web
from handrail.transports.inside import Inside
from handrail.transports.subprocess import Child

Transport = Literal["auto", "streamable", "sse"]


class Target(Struct):
    """A server to talk to: its name here, how to reach it, and what its era is remembered by.

    `if_done` is what to try if it ends as if all were done.
    """

    name: str
    make: Callable[[], Link]
    key: str = ""
    if_done: str = ""


class Reach(Struct):
    """How servers are reached."""

    transport: Transport = "auto"  # over HTTP; "sse" is that of 2024
    headers: Mapping[str, str] | None = None
    auth: Authorizer | None = None
    env: Mapping[str, str] | None = None
    cwd: str | Path | None = None
    agree: Callable[[Entry], bool] | None = None  # to a command out of a configuration file
    on_stderr: Callable[[str], None] | None = None
    connect_seconds: float = 10.0


def targets(thing: Any, reach: Reach) -> list[Target]:
    """One server, or several for a configuration with several."""
    if hasattr(thing, "connect") and hasattr(thing, "serving"):
        return [Target(getattr(thing, "name", "server"), partial(Inside, thing))]
    if isinstance(thing, Entry):
        return [_entry(thing, reach)]
    is_file = isinstance(thing, str) and thing.endswith((".py", ".json")) and os.path.isfile(thing)
    if is_file or isinstance(thing, Path):
        path = thing = Path(thing)
        if path.suffix != ".json":
            made = _command((sys.executable, str(path)), reach, path.stem)
            command = shlex.join(("handrail", "serve", str(path)))
            made.if_done = f"Does it call server.run()? If not, the command `{command}` serves it"
            return [made]
    if isinstance(thing, Mapping | Path):
        entries = read_entries(thing, os.environ)
        if all(each.disabled for each in entries):
            why = "all its servers are disabled" if entries else "no servers in it"
            raise EntryError(str(thing) if isinstance(thing, Path) else "", [f"{why}; there is nothing to connect to"])
        return [_entry(each, reach) for each in entries if not each.disabled]
    if isinstance(thing, str):
        is_url = thing.startswith(("http://", "https://"))
        return [_url(thing, reach) if is_url else _command(shlex.split(thing), reach)]
    if isinstance(thing, Sequence) and thing and all(isinstance(each, str | os.PathLike) for each in thing):
        return [_command([os.fspath(each) for each in thing], reach)]
    raise TypeError(f"Client: {thing!r:.100} is not a URL, a command, a file, a Server or a configuration")


def _entry(entry: Entry, reach: Reach) -> Target:
    # No configuration file becomes a command, or sends what it finds in our environment, unseen (P-28).
    if entry.source and reach.agree is None:
        hint = "See what it does (`handrail config`), and agree with Client(…, agree=…)"
        raise ConfirmationRequired("a server of a configuration file was not agreed to", server=entry.name, hint=hint)
    if entry.source and reach.agree is not None and not reach.agree(entry):
        raise Denied("the server was not agreed to", server=entry.name)
    if entry.url:
        transport: Transport = "sse" if entry.kind == "sse" else reach.transport
        headers = {**(reach.headers or {}), **entry.headers}
        return _url(entry.url, replace(reach, headers=headers, transport=transport), entry.name)
    reach = replace(reach, env={**(reach.env or {}), **entry.env}, cwd=entry.cwd or reach.cwd)
    return _command(entry.command, reach, entry.name)


def _url(url: str, reach: Reach, name: str = "") -> Target:
    make = partial(Web, url, headers=reach.headers, auth=reach.auth)
    make = partial(make, transport=reach.transport, connect_seconds=reach.connect_seconds)
    make()  # what is wrong with it is told now, not at the first request
    return Target(name or urlsplit(url).hostname or url, make, url)


def _command(command: Sequence[str], reach: Reach, name: str = "") -> Target:
    make = partial(Child, tuple(command), env=reach.env, cwd=reach.cwd, on_stderr=reach.on_stderr)
    make()
    return Target(name or Path(command[0]).name, make, f"{shlex.join(command)} in {reach.cwd or ''}")
