"""Targets of a client: a URL, a command, a file, a server object, or a configuration."""

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

from handrail.client.mcp_config import EntryError, ServerEntry, read_entries
from handrail.errors import ConfirmationRequired, Denied
from handrail.transports.base import ClientTransport
from handrail.transports.http_client import Authorizer, HttpClientTransport
from handrail.transports.subprocess import SubprocessTransport

Transport = Literal["auto", "streamable", "sse"]


class ServerTarget(Struct):
    """A server: its name, its transport, and the key under which its kind of negotiation is cached.

    `exit_hint` is the hint if the process ends with code 0.
    """

    name: str
    make_transport: Callable[[], ClientTransport]
    key: str = ""
    exit_hint: str = ""


class ConnectOptions(Struct):
    """Options of connections."""

    transport: Transport = "auto"  # over HTTP; "sse" is that of 2024
    headers: Mapping[str, str] | None = None
    auth: Authorizer | None = None
    env: Mapping[str, str] | None = None
    cwd: str | Path | None = None
    agree: Callable[[ServerEntry], bool] | None = None  # to a command out of a configuration file
    on_stderr: Callable[[str], None] | None = None
    connect_seconds: float = 10.0


def targets(thing: Any, options: ConnectOptions) -> list[ServerTarget]:
    """Return the servers of a target: several for a configuration with several."""
    if hasattr(thing, "connect") and hasattr(thing, "serving"):
        from handrail.transports.memory import MemoryTransport  # loads the engine, which other targets do without

        return [ServerTarget(getattr(thing, "name", "server"), partial(MemoryTransport, thing))]
    if isinstance(thing, ServerEntry):
        return [_entry(thing, options)]
    is_file = isinstance(thing, str) and thing.endswith((".py", ".json")) and os.path.isfile(thing)
    if is_file or isinstance(thing, Path):
        path = thing = Path(thing)
        if path.suffix != ".json":
            target = _command((sys.executable, str(path)), options, path.stem)
            command = shlex.join(("handrail", "serve", str(path)))
            target.exit_hint = f"Does it call server.run()? If not, the command `{command}` serves it"
            return [target]
    if isinstance(thing, Mapping | Path):
        entries = read_entries(thing, os.environ)
        if all(each.disabled for each in entries):
            why = "all its servers are disabled" if entries else "no servers in it"
            raise EntryError(str(thing) if isinstance(thing, Path) else "", [f"{why}; there is nothing to connect to"])
        return [_entry(each, options) for each in entries if not each.disabled]
    if isinstance(thing, str):
        is_url = thing.startswith(("http://", "https://"))
        return [_url(thing, options) if is_url else _command(shlex.split(thing), options)]
    if isinstance(thing, Sequence) and thing and all(isinstance(each, str | os.PathLike) for each in thing):
        return [_command([os.fspath(each) for each in thing], options)]
    raise TypeError(f"Client: {thing!r:.100} is not a URL, a command, a file, a Server or a configuration")


def _entry(entry: ServerEntry, options: ConnectOptions) -> ServerTarget:
    # No configuration file starts a command, or sends values of the environment, without consent (P-28).
    if entry.source and options.agree is None:
        hint = "See what it does (`handrail config`), and agree with Client(…, agree=…)"
        raise ConfirmationRequired("a server of a configuration file was not agreed to", server=entry.name, hint=hint)
    if entry.source and options.agree is not None and not options.agree(entry):
        raise Denied("the server was not agreed to", server=entry.name)
    if entry.url:
        transport: Transport = "sse" if entry.kind == "sse" else options.transport
        headers = {**(options.headers or {}), **entry.headers}
        return _url(entry.url, replace(options, headers=headers, transport=transport), entry.name)
    options = replace(options, env={**(options.env or {}), **entry.env}, cwd=entry.cwd or options.cwd)
    return _command(entry.command, options, entry.name)


def _url(url: str, options: ConnectOptions, name: str = "") -> ServerTarget:
    make_transport = partial(HttpClientTransport, url, headers=options.headers, auth=options.auth)
    make_transport = partial(make_transport, transport=options.transport, connect_seconds=options.connect_seconds)
    make_transport()  # a bad URL or option raises here, not at the first request
    return ServerTarget(name or urlsplit(url).hostname or url, make_transport, url)


def _command(command: Sequence[str], options: ConnectOptions, name: str = "") -> ServerTarget:
    make_transport = partial(
        SubprocessTransport, tuple(command), env=options.env, cwd=options.cwd, on_stderr=options.on_stderr
    )
    make_transport()
    return ServerTarget(name or Path(command[0]).name, make_transport, f"{shlex.join(command)} in {options.cwd or ''}")
