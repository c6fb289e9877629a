"""What tools looked like when they were first seen, or last agreed to (P-31)."""

from __future__ import annotations

from hashlib import sha256

from handrail.client.listing import ListedTool
from handrail.client.state import State


class Pins:
    """Fingerprints of one server's tools; kept in `state` if there is one, else as long as the client lives."""

    def __init__(self, server: str, state: State | None = None) -> None:
        self._state = state
        self._file = f"pins-{sha256(server.encode()).hexdigest()[:32]}.json"
        kept = state.read(self._file) if state is not None else None
        self._lost = kept is None and state is not None and state.has(self._file)  # then nothing is as it was
        self._known: dict[str, str] = dict(kept) if isinstance(kept, dict) else {}

    def look(self, tools: list[ListedTool]) -> None:
        """Mark those that changed; what is new is remembered as it is."""
        before = len(self._known)
        for tool in tools:
            pin = tool.fingerprint[:32]
            tool.changed = self._known.setdefault(_short(tool.own_name), pin) != pin or self._lost
        if len(self._known) != before:
            self._keep()

    def agree(self, tool: ListedTool) -> None:
        """Somebody has seen the tool as it is now."""
        if tool.changed:
            tool.changed = False
            self._known[_short(tool.own_name)] = tool.fingerprint[:32]
            self._keep()

    def _keep(self) -> None:
        if self._state is not None:
            self._state.write(self._file, self._known)

    def knows(self, name: str) -> bool:
        return _short(name) in self._known


def _short(name: str) -> str:
    """So that a thousand of them always fit, whatever a server calls its tools."""
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
