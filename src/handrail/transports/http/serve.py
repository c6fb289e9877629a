"""Serving on an address: the endpoint behind the own listener, in one process or several."""

from __future__ import annotations

import logging
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

from handrail import stores
from handrail.engine.core import Engine
from handrail.suggest import check_options, expect
from handrail.transports.http.endpoint import Endpoint
from handrail.transports.http.monitoring import access
from handrail.transports.http.options import EndpointOptions, HttpOptions
from handrail.transports.http1.listen import Address, HttpLimits


def run_endpoint(engine: Engine, address: str | int, options: HttpOptions) -> None:
    """Serve until a signal ends it."""
    from handrail.transports.http1.server import run_http  # raises ModuleNotFoundError without the extra "http"

    check_options("run", options, HttpOptions.__annotations__)
    store, workers = options.get("store"), options.get("workers", 1)
    expect("run: workers", workers, "a number of processes", int)
    ready, metrics = options.get("ready", _print), options.get("metrics")
    if store is not None and stores.is_url(engine.guard_options.get("store")):
        raise ValueError("run: store: the store of the server has the sessions too, for all replicas; leave it out")
    if workers > 1 and options.get("advertise"):
        raise ValueError("advertise: with several workers a call may reach another one: run one process for a replica")
    with ExitStack() as stack:
        if store is None and workers > 1:  # the workers share sessions
            store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="handrail-"))) / "store.sqlite"
        endpoint = Endpoint(
            engine,
            partial(stores.open, "memory:" if store is None else store, durable=False),
            **cast(EndpointOptions, options),
        )
        if options.get("access_log") and not access.hasHandlers():  # no handler is configured
            access.addHandler(logging.StreamHandler())

        def on_ready(url: str) -> None:
            if workers == 1 and is_one_host(Address.parse(address)):
                engine.address = engine.address or url + endpoint.path
            ready(url + endpoint.path)

        run_http(
            endpoint,
            address,
            stop=endpoint.stop,
            limits=options.get("http_limits", HttpLimits()),
            grace=engine.limits.grace_seconds,
            workers=workers,
            certificate=options.get("certificate"),
            key=options.get("key"),
            ready=on_ready,
            second_app=(endpoint.monitor.page, metrics)
            if metrics is not None and endpoint.monitor is not None
            else None,
        )


def is_one_host(address: Address) -> bool:
    """Return whether other replicas can reach this one where it listens: at a path or at all interfaces they cannot."""
    return not address.path and address.host not in ("0.0.0.0", "::")


def _print(url: str) -> None:
    print(f"Serving {url}", file=sys.stderr, flush=True)
