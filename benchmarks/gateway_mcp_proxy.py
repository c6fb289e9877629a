"""The `mcp-proxy` package: `gateway_mcp_proxy.py URL` on stdio, `gateway_mcp_proxy.py COMMAND PORT` over HTTP.

It offers an address on stdio and a command over HTTP, and nothing else.
"""

from __future__ import annotations

import shlex
import sys
from importlib import import_module

if __name__ == "__main__":
    # By name: the package lives in an environment of its own, where the type checker does not look.
    # Quiet, because a log line per call would be counted against it.
    target, *port = sys.argv[1:]
    transport = ["--port", port[0], "--", *shlex.split(target)] if port else ["--transport", "streamablehttp", target]
    sys.argv[1:] = ["--log-level", "ERROR", *transport]
    import_module("mcp_proxy.__main__").main()
