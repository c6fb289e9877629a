"""A gateway in front of one command with a state, for the fleet's tests."""

from __future__ import annotations

import sys
from pathlib import Path

from handrail import Gateway
from handrail.engine.core import Limits

UPSTREAM = Path(__file__).parent / "servers_fleet_upstream.py"

server = Gateway(name="fleet-gateway", version="1", limits=Limits(grace_seconds=60.0))
server.include(f"{sys.executable} {UPSTREAM}", name="counter", prefix="", trusted=True)
