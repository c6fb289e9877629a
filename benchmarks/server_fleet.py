"""A replica: `server_fleet.py VARIANT URL [PORT]`. Its limits are its own, or shared in Redis, leased or exact.

All variants have the same guards, the same store for sessions, and the tools of `server_guards.py`.
"""

from __future__ import annotations

import sys

from benchmarks.server_guards import NEVER_MET, reply, rules
from handrail import Server
from handrail.guards.limits import Rates
from handrail.guards.policy import Policy

__all__ = ["build"]


def build(variant: str, url: str) -> Server:
    rates = Rates(
        principal=NEVER_MET,
        address=NEVER_MET,
        lists="",
        shared=variant != "alone",
        exact=variant == "exact",
        local=True,
    )
    server = Server(f"bench-{variant}", rates=rates, policy=Policy(rules()), store=url, accept_loss=True)
    server.tool(reply)
    return server


if __name__ == "__main__":
    variant, url, *port = sys.argv[1:]
    if port:
        build(variant, url).run(http=f"127.0.0.1:{port[0]}")
    else:
        build(variant, url).run()
