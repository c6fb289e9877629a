"""A gateway in front of one command with a state, and of a server over HTTP if there is one, for the fleet's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from handrail import Gateway
from handrail.engine.core import Limits

UPSTREAM = Path(__file__).parent / "servers_fleet_upstream.py"

server = Gateway(
    name="fleet-gateway", version="1", limits=Limits(grace_seconds=float(os.environ.get("FLEET_GRACE", "3")))
)
server.include(f"{sys.executable} {UPSTREAM}", name="counter", prefix="", trusted=True)
if url := os.environ.get("FLEET_UPSTREAM"):
    server.include(url, name="web", prefix="web_", trusted=True)
