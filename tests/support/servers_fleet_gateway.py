"""A gateway in front of one command with a state, for the fleet's tests."""

from __future__ import annotations

import sys
from pathlib import Path

from handrail import Gateway

UPSTREAM = Path(__file__).parent / "servers_fleet_upstream.py"

server = Gateway(name="fleet-gateway", version="1")
server.include(f"{sys.executable} {UPSTREAM}", name="counter", prefix="", trusted=True)
