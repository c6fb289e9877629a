"""Event streams: messages as server-sent events."""

from __future__ import annotations

KEEP_ALIVE = b": keep-alive\n\n"


def event(data: bytes, *, ident: str = "", name: str = "", retry_ms: int = 0) -> bytes:
    """One event. `data` is one line, as every message of ours is; empty data only carries the id and the retry time."""
    head = f"event: {name}\n" if name else ""
    head += f"id: {ident}\n" if ident else ""
    head += f"retry: {retry_ms}\n" if retry_ms else ""
    return head.encode() + (b"data: " + data if data else b"data:") + b"\n\n"
