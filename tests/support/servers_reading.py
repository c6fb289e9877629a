"""A server whose results are cut, with more to read than fits."""

from __future__ import annotations

from handrail import Server
from handrail.guards.sanitize import Sanitize

CAP = 1_000
LINE = "Line {:,}: naïve ☃, a family 👨‍👩‍👧, \t and an end of its own.\r\n"
TEXT = "".join(LINE.format(number) for number in range(100))


def library() -> Server:
    server = Server("library", sanitize=Sanitize(max_text=CAP))

    @server.tool
    async def book() -> str:
        """Everything there is to read."""
        return TEXT

    return server
