"""A gateway in a process of its own, for upstreams that kill it: `gateways_attacked:made`, told by its environment."""

from __future__ import annotations

import json
import os
import sys
from hashlib import sha256
from typing import Any

import upstreams_hostile
from handrail import Server
from handrail.guards import Approvals, Policy, Rule

__all__ = ["OPTIONS", "made"]

OPTIONS = "HANDRAIL_TEST_GATEWAY"
KEY = sha256(b"one").digest()  # that the next process has as well
COMMAND = [sys.executable, "-S", "-E", upstreams_hostile.__file__]


def made() -> Server:
    """`upstreams` are behaviours or addresses by name, with one `diary`; `asks` are tools that need an approval."""
    options: dict[str, Any] = json.loads(os.environ[OPTIONS])
    rules = [Rule(verdict="ask", tools=options["asks"])] if options.get("asks") else []
    server = Server(
        "gateway",
        keys=[KEY],
        audit=options["audit"],  # None: there is none
        policy=Policy([*rules, Rule(verdict="allow")]),
        approvals=Approvals(wait=0.05, round=0.005),
        rates=None,  # attacks come faster than callers may
    )
    for name, behaviour in options["upstreams"].items():
        target = behaviour if behaviour.startswith("http://") else [*COMMAND, behaviour, options["diary"]]
        server.include(target, name=name, prefix=f"{name}_", trusted=True, timeout=options.get("timeout", 60.0))
    return server


if __name__ == "__main__":  # several processes on one port; where it listens is the only line of its output
    made().run(http="127.0.0.1:0", workers=2, ready=lambda url: print(url, flush=True))
