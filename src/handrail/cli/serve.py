"""`handrail serve`: the tools of a Python file, over stdio or HTTP. `handrail console`: a link to its console."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec.json import decode

from handrail.cli.exit_codes import ExitCode, UsageError
from handrail.cli.load_server import CommandConfig, ServedSource, reloading_server
from handrail.cli.terminal import Screen
from handrail.engine.catalog import Catalog
from handrail.engine.core import keys_from_environment
from handrail.errors import TransportError
from handrail.gateway.stops import following_stops
from handrail.server import Server
from handrail.text.controls import escape
from handrail.transports.http.options import HttpOptions
from handrail.transports.http.serve import run_endpoint
from handrail.transports.stdio import explain_terminal

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["listen_at", "run_console", "run_serve", "serve"]


def run_serve(args: Namespace, screen: Screen) -> int:
    if (args.target or "").endswith(".json"):
        raise UsageError(f"{args.target}: a file of servers, which `handrail gateway {args.target}` serves")
    command_config = CommandConfig(args, args.target)
    _, workers = listen_at(args, command_config)
    if args.reload and workers > 1:
        raise UsageError("--reload: works in one process only; leave --workers out")
    source = command_config.server_file(args.target)
    if args.reload:
        sys.dont_write_bytecode = True  # a file that changes twice in a second would keep its first bytecode
    server = source.load()
    catalogs = server.engine.catalogs.values()  # with --reload, the server has none before it serves
    if args.reload:
        server = reloading_server(source, server, screen.note)
    return serve(server, source, catalogs, command_config, args, screen)


def listen_at(args: Namespace, command_config: CommandConfig) -> tuple[str | None, int]:
    """Return the address to listen at, None for standard input and output, and the number of processes."""
    try:
        keys_from_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None
    http = command_config.config.http
    address = args.http or http.listen or None
    if address is None and (args.workers or 1) > 1:
        raise UsageError("--workers: several processes share an address, not a pipe; add --http")
    return address, 1 if address is None else args.workers or http.workers


def serve(
    server: Server,
    source: ServedSource,
    catalogs: Iterable[Catalog[Any]],
    command_config: CommandConfig,
    args: Namespace,
    screen: Screen,
) -> int:
    """Guard a server and serve it until it is stopped; `catalogs` have what the settings are checked against."""
    address, workers = listen_at(args, command_config)
    command_config.apply_for_serving(server)
    server.alongside(partial(following_stops, server.engine))
    screen.note(command_config.describe_guards(server, source))
    for warning in command_config.warnings(server, catalogs):
        screen.note(f"careful: {warning}")
    try:
        with _console(args, command_config, server, source, address, workers) as console:
            if address is None:
                if console is not None:
                    console.on_ready = lambda: _print_stderr(f"Console: {console.link}")
                explain_terminal(server.name, source.label)
                server.run()
            else:
                _listen(server, command_config, screen, address, workers, console)
    except OSError as problem:
        raise TransportError(str(problem.strerror or problem)) from None
    except (ValueError, ModuleNotFoundError) as problem:  # a wrong address, or an extra that is not installed
        raise UsageError(str(problem)) from None
    return ExitCode.OK


@contextlib.contextmanager
def _console(
    args: Namespace,
    command_config: CommandConfig,
    server: Server,
    source: ServedSource,
    address: str | None,
    workers: int,
) -> Iterator[Console | None]:
    """Open the console's socket, if a console is configured, before workers are started."""
    settings = command_config.config.console
    if args.console is None and not settings.listen:
        yield None
        return
    from handrail.console import Console

    with contextlib.ExitStack() as stack:
        shared = None
        if workers > 1:
            shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="handrail-"))) / "console.sqlite"
        transport = "stdio" if address is None else "http"
        console = Console(
            server,
            settings,
            target=source.label,
            source=source.path,
            transport=transport,
            workers=workers,
            shared=shared,
        )
        stack.enter_context(console.listening(args.console or settings.listen))
        server.alongside(console.serving)
        yield console


def _listen(
    server: Server, command_config: CommandConfig, screen: Screen, address: str, workers: int, console: Console | None
) -> None:
    def ready(url: str) -> None:
        if console is not None:
            console.set_endpoint(url)
        if screen.as_json:
            screen.data({"url": url} if console is None else {"url": url, "console": console.link})
            return
        _print_stderr(f"Serving {escape(server.name, lines=False)} on {url}")
        if console is not None:
            _print_stderr(f"Console: {console.link}")

    http = command_config.config.http
    http_options = {name: getattr(http, name) for name in ("hosts", "origins", "metrics", "access_log")}
    http_options["advertise"] = http.advertise or os.environ.get("HANDRAIL_ADVERTISE", "")
    http_options["auth"] = command_config.config.identities.verifier()
    options = {"workers": workers, "ready": ready, **{name: value for name, value in http_options.items() if value}}
    run_endpoint(server.engine, address, cast(HttpOptions, options))


def _print_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# `handrail console`


def run_console(args: Namespace, screen: Screen) -> int:
    return asyncio.run(_open_link(args, screen))


async def _open_link(args: Namespace, screen: Screen) -> int:
    from handrail.console.access import ROLES, SessionStore, new_code

    command_config = CommandConfig(args)
    place = command_config.approval_place()
    roles = args.roles.split(",") if args.roles else None
    if unknown := sorted(set(roles or ()) - set(ROLES)):
        raise UsageError(f"--roles: {unknown[0]!r} is not one of {', '.join(ROLES)}")
    if isinstance(place, Path) and not place.exists():
        raise UsageError(f"{place}: nothing has been served from here; `handrail serve FILE --console` opens one")
    store = await command_config.open_store(place)
    try:
        rows = await store.scan("console-at:")
        consoles = [(key.split(":", 1)[1].rpartition(":")[0], decode(value)["url"]) for key, value in rows]
        if args.name:
            consoles = [each for each in consoles if each[0] == args.name]
        if not consoles:
            which = f" of {args.name!r}" if args.name else ""
            raise UsageError(f"no console{which} is open; `handrail serve FILE --console` opens one")
        if len({name for name, _ in consoles}) > 1:
            raise UsageError(f"several are open, name one: {', '.join(sorted({name for name, _ in consoles}))}")
        links = []
        for name, url in consoles:
            code = new_code()
            await SessionStore(store, name, lambda: 0.0).add_code(
                code, args.as_ or command_config.config.console.principal, roles
            )
            links.append(f"{url}/#code={code}")
    finally:
        await store.close()
    for link in links:
        screen.data({"console": link}) if screen.as_json else screen.write(link)
    return ExitCode.OK
