"""The proxy of the `fastmcp` package: `gateway_fastmcp.py TARGET [one] [PORT]` offers a command or an address.

As its users write it, it connects to the upstream anew for each request. With `one` it is given a client that is
connected already, and uses the session of that client for all callers.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from importlib import import_module
from typing import Any


async def main() -> None:
    # By name: the package lives in an environment of its own, where the type checker does not look.
    # Quiet, because a log line per call and the banner would be counted against it.
    target, *more = sys.argv[1:]
    upstream: Any = target
    if not target.startswith("http"):
        command, *arguments = shlex.split(target)
        upstream = import_module("fastmcp.client.transports").StdioTransport(command, arguments)
    create_proxy = import_module("fastmcp.server").create_proxy
    if "one" not in more:
        await serve(create_proxy(upstream, name="bench"), more)
        return
    async with import_module("fastmcp").Client(upstream, mode="legacy") as client:
        await serve(create_proxy(client, name="bench"), more)


async def serve(proxy: Any, more: list[str]) -> None:
    if more and more[-1].isdecimal():
        # Plain answers are cheaper than a stream for each.
        options = {"host": "127.0.0.1", "json_response": True, "uvicorn_config": {"access_log": False}}
        await proxy.run_async("http", show_banner=False, log_level="ERROR", port=int(more[-1]), **options)
    else:
        await proxy.run_async("stdio", show_banner=False, log_level="ERROR")


if __name__ == "__main__":
    asyncio.run(main())
