"""The `mcp` package's high-level client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from typing import Any

from benchmarks.client_loop import Call, Target, take_orders

__all__ = ["connecting"]


def connecting(client: Any, command: Any) -> Callable[[Target, str], AbstractAsyncContextManager[Call]]:
    """`connect` for the class of a client, and that of a command for it to start."""

    @asynccontextmanager
    async def connect(target: Target, revision: str) -> AsyncIterator[Call]:
        server = target if isinstance(target, str) else command(command=target[0], args=target[1:])
        async with client(server, mode="legacy" if revision < "2026" else revision) as connected:

            async def call(tool: str, arguments: dict[str, Any]) -> tuple[str, Any]:
                result = await connected.call_tool(tool, arguments)
                return result.content[0].text, result.structured_content

            yield call

    return connect


if __name__ == "__main__":
    # By name: the package lives in an environment of its own, where the type checker does not look.
    mcp = import_module("mcp")
    take_orders(connecting(mcp.Client, mcp.StdioServerParameters))
