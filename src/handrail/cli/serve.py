"""`handrail serve`: the tools of a Python file, over standard input and output or over HTTP."""

from __future__ import annotations

import sys
from argparse import Namespace

from handrail.cli.codes import Code, Usage
from handrail.cli.guarded import Guarded
from handrail.cli.reload import follow
from handrail.cli.screen import Screen
from handrail.errors import TransportError
from handrail.guards.inert import inert
from handrail.transports.http import HttpOptions

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
    if address is None:
        server.run()
        return Code.OK

    def ready(url: str) -> None:
        if screen.as_json:
            screen.data({"url": url})
        else:
            print(f"Serving {inert(server.name, lines=False)} on {url}", file=sys.stderr, flush=True)

    try:
        options: HttpOptions = {"workers": workers, "ready": ready}
        options |= {"hosts": http.hosts} if http.hosts else {}
        options |= {"origins": http.origins} if http.origins else {}
        options |= {"metrics": http.metrics} if http.metrics else {}
        verifier = guarded.config.identities.verifier()
        options |= {"auth": verifier} if verifier is not None else {}
        options |= {"access_log": True} if http.access_log else {}
        server.run(http=address, **options)
    except OSError as problem:
        raise TransportError(str(problem.strerror or problem)) from None
    except (ValueError, ModuleNotFoundError) as problem:  # an address, or the extra that is not installed
        raise Usage(str(problem)) from None
    return Code.OK
