"""The `fastmcp` package: `server_fastmcp.py COUNT` serves so many tools on stdio."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.tools import tools

if __name__ == "__main__":
    # By name: the package lives in an environment of its own, where the type checker does not look.
    # Quiet, because a log line per call and the banner would be counted against it.
    server = import_module("fastmcp").FastMCP("bench")
    for tool in tools(int(sys.argv[1])):
        server.tool(tool)
    server.run("stdio", show_banner=False, log_level="ERROR")
