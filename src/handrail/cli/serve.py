"""`handrail serve`: the tools of a Python file, over standard input and output or over HTTP."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.cli.codes import Code, Usage
from handrail.cli.guarded import Guarded
from handrail.cli.reload import follow
from handrail.cli.screen import Screen
from handrail.cli.source import Source
from handrail.errors import TransportError
from handrail.guards.inert import inert
from handrail.server import Server
from handrail.transports.http import HttpOptions

if TYPE_CHECKING:
    from handrail.console import Console

__all__ = ["run"]


def run(args: Namespace, screen: Screen) -> int:
    guarded = Guarded(args)
    http = guarded.config.http
    address, workers = args.http or http.listen or None, args.workers or http.workers
    if address is None and (args.workers or 1) > 1:
        raise Usage("--workers: several processes share an address, not a pipe; add --http")
    if args.reload and address is not None and workers > 1:
        raise Usage("--reload: works in one process only; leave --workers out")
    source = guarded.source(args.target)
    if args.reload:
        sys.dont_write_bytecode = True  # a file that changes twice in a second would be taken for the first one
    server = source.load()
    if args.reload:
        server = follow(source, server, screen.note)
    guarded.guard(server)
    try:
        with _console(args, guarded, server, source, address, workers) as console:
            _serve(server, guarded, screen, address, workers, console)
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

    workers = 1 if address is None else workers
    with contextlib.ExitStack() as stack:
        shared = None
        if workers > 1:
            shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="handrail-"))) / "console.sqlite"
        console = Console(
            server,
            settings,
            target=source.shown,
            source=source.path,
            transport="stdio" if address is None else "http",
            workers=workers,
            shared=shared,
        )
        stack.enter_context(console.listening(args.console or settings.listen))
        server.alongside(console.serving)
        yield console


def _serve(
    server: Server, guarded: Guarded, screen: Screen, address: str | None, workers: int, console: Console | None
) -> None:
    if address is None:
        if console is not None:
            console.ready = lambda: print(f"Console: {console.link}", file=sys.stderr, flush=True)
        server.run()
        return

    def ready(url: str) -> None:
        if console is not None:
            console.target = console.endpoint = url
        if screen.as_json:
            screen.data({"url": url} if console is None else {"url": url, "console": console.link})
            return
        print(f"Serving {inert(server.name, lines=False)} on {url}", file=sys.stderr, flush=True)
        if console is not None:
            print(f"Console: {console.link}", file=sys.stderr, flush=True)

    http = guarded.config.http
    if console is not None:
        console.target = console.endpoint = f"http://{address}/mcp"  # workers are not told more
    options: HttpOptions = {"workers": workers, "ready": ready}
    options |= {"hosts": http.hosts} if http.hosts else {}
    options |= {"origins": http.origins} if http.origins else {}
    options |= {"metrics": http.metrics} if http.metrics else {}
    verifier = guarded.config.identities.verifier()
    options |= {"auth": verifier} if verifier is not None else {}
    options |= {"access_log": True} if http.access_log else {}
    server.run(http=address, **options)
