"""Handrail's client as its users write it, with default settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.client_loop import Call, Target, take_orders
from handrail import Client


@asynccontextmanager
async def connect(target: Target, revision: str) -> AsyncIterator[Call]:
    async with Client(target, revision=revision) as client:

        async def call(tool: str, arguments: dict[str, Any]) -> tuple[str, Any]:
            result = await client.call(tool, arguments)
            return result.text, result.data

        yield call


if __name__ == "__main__":
    take_orders(connect)
