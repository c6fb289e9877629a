"""A gateway with one upstream server, whose names stay as they are: what the official conformance suite talks to.

Run it with the revision to speak to the upstream, and the upstream's address or command: it prints its own URL and
serves until it is told to stop. Whether a call needs a person's approval is no matter of the suite: all are allowed.
"""

from __future__ import annotations

import sys

from handrail import Server
from handrail.guards import Policy, Rule

if __name__ == "__main__":
    _, revision, *target = sys.argv
    gateway = Server("gateway", version="1.0.0", policy=Policy([Rule(verdict="allow")]))
    gateway.include(target if len(target) > 1 else target[0], name="upstream", trusted=True, revision=revision)
    gateway.run(http="127.0.0.1:0", ready=lambda url: print(url, flush=True))
    spoken = gateway.upstreams["upstream"].revision
    sys.exit(None if spoken == revision else f"the upstream was spoken to in {spoken or 'no revision'}")
