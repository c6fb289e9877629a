"""Handrail's gateway: `gateway_handrail.py TARGETS [FOLDER] [PORT]` on stdio, or over HTTP.

TARGETS is a command, an address, or an `mcpServers` configuration as JSON. The audit is written to FOLDER.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.server_handrail import NEVER_MET
from handrail import Server
from handrail.guards import Policy, Rule

__all__ = ["build"]


def build(targets: str, folder: str = "") -> Server:
    # The upstreams of the benchmark do not say what their tools do. Without the rule each call would be asked about.
    server = Server("bench", rates=NEVER_MET, policy=Policy([Rule(verdict="allow")]))
    if folder:
        server.guard(audit=Path(folder, f"{os.getpid()}.db"))
    included: Any = msgspec.json.decode(targets) if targets.startswith("{") else targets
    server.include(included, trusted=True)
    return server


def main() -> None:
    targets, *more = sys.argv[1:]
    http = f"127.0.0.1:{more.pop()}" if more and more[-1].isdecimal() else None
    build(targets, *more).run(http=http)


if __name__ == "__main__":
    main()
