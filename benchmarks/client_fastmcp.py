"""The `fastmcp` package's client."""

from __future__ import annotations

from importlib import import_module

from benchmarks.client_loop import take_orders
from benchmarks.client_mcp import connecting

if __name__ == "__main__":
    # By name: the package lives in an environment of its own, where the type checker does not look.
    command = import_module("fastmcp.client.transports").StdioTransport
    take_orders(connecting(import_module("fastmcp").Client, command))
