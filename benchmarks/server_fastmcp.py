"""The `fastmcp` package: `server_fastmcp.py COUNT [PORT]` serves so many tools on stdio, or over HTTP."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.tools import tools

if __name__ == "__main__":
    # By name: the package lives in an environment of its own, where the type checker does not look.
    # Quiet, because a log line per call and the banner would be counted against it.
    count, *port = map(int, sys.argv[1:])
    server = import_module("fastmcp").FastMCP("bench")
    for tool in tools(count):
        server.tool(tool)
    if port:
        # Plain answers are cheaper than a stream for each.
        options = {"host": "127.0.0.1", "port": port[0], "json_response": True, "uvicorn_config": {"access_log": False}}
        server.run("http", show_banner=False, log_level="ERROR", **options)
    else:
        server.run("stdio", show_banner=False, log_level="ERROR")
