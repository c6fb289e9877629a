"""The server of the fleet: two tools, one of which a person has to approve."""

from __future__ import annotations

import os
import socket
from typing import Annotated

from msgspec import Meta

from handrail import Server

server = Server("shop", version="1.0.0", instructions="Look up an order before you cancel it.")


@server.tool(read_only=True)
async def find_order(order: Annotated[int, Meta(ge=1, description="The number of the order.")]) -> str:
    """Return the state of an order."""
    return f"order {order} is on its way (said by {socket.gethostname()}, process {os.getpid()})"


@server.tool(destructive=True)
async def cancel_order(order: Annotated[int, Meta(ge=1, description="The number of the order.")]) -> str:
    """Cancel an order."""
    return f"order {order} is cancelled"
