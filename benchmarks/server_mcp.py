"""The `mcp` package's high-level server: `server_mcp.py COUNT [PORT]` serves so many tools on stdio, or over HTTP."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.tools import tools

if __name__ == "__main__":
    # By name: the package lives in an environment of its own, where the type checker does not look.
    # Quiet, because a log line per call would be counted against it.
    count, *port = map(int, sys.argv[1:])
    server = import_module("mcp.server").MCPServer("bench", log_level="ERROR")
    for tool in tools(count):
        server.add_tool(tool)
    if port:
        # Plain answers are cheaper than a stream for each. Uvicorn parses with h11 here: mcp does not bring httptools.
        server.run("streamable-http", port=port[0], json_response=True)
    else:
        server.run("stdio")
