"""`handrail serve`: the tools of a Python file, over standard input and output or over HTTP."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from handrail.cli.exit_codes import Code, Usage
from handrail.cli.guarded_server import Guarded
from handrail.cli.load_server import Source
from handrail.cli.reload import follow
from handrail.cli.terminal import Screen
from handrail.engine.core import key_from_environment
from handrail.errors import TransportError
from handrail.server import Server
from handrail.text.controls import inert
from handrail.transports.http.serve import HttpOptions, run_endpoint
from handrail.transports.stdio import explain_terminal

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["run_serve"]


def run_serve(args: Namespace, screen: Screen) -> int:
    try:
        key_from_environment()
    except ValueError as weak:
        raise Usage(str(weak)) from None
    guarded = Guarded(args, args.target)
    http = guarded.config.http
    address = args.http or http.listen or None
    workers = 1 if address is None else args.workers or http.workers
    if address is None and (args.workers or 1) > 1:
        raise Usage("--workers: several processes share an address, not a pipe; add --http")
    if args.reload and workers > 1:
        raise Usage("--reload: works in one process only; leave --workers out")
    source = guarded.source(args.target)
    if args.reload:
        sys.dont_write_bytecode = True  # a file that changes twice in a second would be taken for the first one
    server = source.load()
    catalog = server.engine.catalog  # one that follows its file has no tools before it serves
    if args.reload:
        server = follow(source, server, screen.note)
    guarded.guard(server)
    screen.note(guarded.in_force(server, source))
    for doubt in guarded.doubts(server, catalog):
        screen.note(f"careful: {doubt}")
    try:
        with _console(args, guarded, server, source, address, workers) as console:
            if address is None:
                if console is not None:
                    console.ready = lambda: _tell(f"Console: {console.link}")
                explain_terminal(server.name, source.shown)
                server.run()
            else:
                _listen(server, guarded, screen, address, workers, console)
    except OSError as problem:
        raise TransportError(str(problem.strerror or problem)) from None
    except (ValueError, ModuleNotFoundError) as problem:  # an address, or the extra that is not installed
        raise Usage(str(problem)) from None
    return Code.OK


@contextlib.contextmanager
def _console(
    args: Namespace, guarded: Guarded, server: Server, source: Source, address: str | None, workers: int
) -> Iterator[Console | None]:
    """The console, if one is asked for, with its socket: before there are workers."""
    settings = guarded.config.console
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
            target=source.shown,
            source=source.path,
            transport=transport,
            workers=workers,
            shared=shared,
        )
        stack.enter_context(console.listening(args.console or settings.listen))
        server.alongside(console.serving)
        yield console


def _listen(
    server: Server, guarded: Guarded, screen: Screen, address: str, workers: int, console: Console | None
) -> None:
    def ready(url: str) -> None:
        if console is not None:
            console.target = console.endpoint = url
        if screen.as_json:
            screen.data({"url": url} if console is None else {"url": url, "console": console.link})
            return
        _tell(f"Serving {inert(server.name, lines=False)} on {url}")
        if console is not None:
            _tell(f"Console: {console.link}")

    http = guarded.config.http
    said = {name: getattr(http, name) for name in ("hosts", "origins", "metrics", "access_log")}
    said["auth"] = guarded.config.identities.verifier()
    options = {"workers": workers, "ready": ready, **{name: value for name, value in said.items() if value}}
    run_endpoint(server.engine, address, cast(HttpOptions, options))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
