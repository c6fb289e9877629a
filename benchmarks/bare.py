"""The floor: the loop anyone would write with msgspec, without validation, errors or limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    tools: dict[str, Callable[..., dict[str, Any]]] = {"echo": echo, "add": add, "length": length, "letters": letters}
    tools |= {f"filler_{number}": echo for number in range(len(tools), count)}
    listed = [{"name": name, "inputSchema": {"type": "object"}} for name in tools]
    write, flush = sys.stdout.buffer.write, sys.stdout.buffer.flush
    for line in sys.stdin.buffer:
        message = msgspec.json.decode(line)
        method = message["method"]
        if method == "tools/call":
            params = message["params"]
            result = tools[params["name"]](**params["arguments"])
        elif method == "tools/list":
            result = {"tools": listed}
        elif method == "initialize":
            result = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "bare", "version": "1"},
            }
        else:
            continue
        write(msgspec.json.encode({"jsonrpc": "2.0", "id": message["id"], "result": result}) + b"\n")
        flush()


def echo(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}


def add(a: float, b: float) -> dict[str, Any]:
    structured = {"sum": a + b}
    text = msgspec.json.encode(structured).decode()
    return {"content": [{"type": "text", "text": text}], "structuredContent": structured}


def length(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(len(text))}]}


def letters(count: int) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": "x" * count}]}


if __name__ == "__main__":
    main()
