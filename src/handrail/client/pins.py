"""What tools looked like when they were first seen, last agreed to, or locked (P-31)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

from handrail.client.state_dir import State
from handrail.client.tools import ListedTool
from handrail.guards.fingerprint import canonical, comparable, definition, fingerprint
from handrail.guards.lockfile import Locked
from handrail.model import Object
from handrail.text.controls import one_line

MAX_KEPT = 160_000  # characters of definitions, so that their file can always be read again


class Pins:
    """Fingerprints of one server's tools; kept in `state` if there is one, else as long as the client lives.

    Beside them, as far as there is room, the definitions themselves: they say what has changed, and decide nothing
    unless they fit their fingerprint.
    """

    def __init__(self, server: str, state: State | None = None) -> None:
        self._state = state
        self._file = f"pins-{sha256(server.encode()).hexdigest()[:32]}.json"
        self._texts = f"tools-{self._file}"
        known, kept = (state.read(self._file), state.read(self._texts)) if state is not None else (None, None)
        self._lost = known is None and state is not None and state.has(self._file)  # then nothing is as it was
        self._known: dict[str, str] = known if isinstance(known, dict) else {}
        self._kept: dict[str, list[str]] = kept if isinstance(kept, dict) else {}
        self._used = sum(map(_size, self._kept.values()))
        self._revision = ""

    def look(self, tools: list[ListedTool], revision: str) -> None:
        """Mark those that changed; what is new is remembered as it is."""
        before, self._revision = len(self._known), revision
        for tool in tools:
            name = _short(tool.own_name)
            if name not in self._known:
                self._remember(tool)
            tool.changed = self._lost
            if self._known[name] != _pin(tool.fingerprint):
                seen = self._definition(name)
                tool.changed = self._lost or seen is None or not _is_same(tool, *seen, revision)
        if len(self._known) != before:
            self._keep()

    def agree(self, tool: ListedTool) -> None:
        """Somebody has seen the tool as it is now."""
        if tool.changed:
            tool.changed = False
            self._remember(tool)
            self._keep()

    def miss(self, tool: ListedTool) -> None:
        """It is not listed; if it was, and has been seen, that is a change."""
        name = _short(tool.own_name)
        tool.changed = name in self._known
        if seen := self._definition(name):
            tool.compared = seen[0], None

    def _remember(self, tool: ListedTool) -> None:
        name = _short(tool.own_name)
        self._known[name] = _pin(tool.fingerprint)
        self._used -= _size(self._kept.pop(name, None))
        text = [self._revision, canonical(definition(tool.raw)).decode()]
        if self._used + (size := _size(text)) <= MAX_KEPT:
            self._used += size
            self._kept[name] = text

    def _definition(self, name: str) -> tuple[Object, str] | None:
        """What is kept of a tool, and the revision it was listed in."""
        match self._kept.get(name):
            case [str(revision), str(text)]:
                try:
                    said = json.loads(text)
                    return (said, revision) if _pin(fingerprint(said)) == self._known[name] else None
                except (ValueError, TypeError, RecursionError):
                    return None
        return None

    def _keep(self) -> None:
        if self._state is not None:
            self._state.write(self._texts, self._kept)
            self._state.write(self._file, self._known)


class LockedPins:
    """What a lock says of one server's tools. What is agreed to beside it holds until the tool changes again."""

    def __init__(self, lock: Mapping[str, Locked], server: str, *, alone: bool, asks: bool) -> None:
        found = lock.get(server)
        if found is None and alone and len(lock) == 1:
            [found] = lock.values()  # one server of another name: what it is reached by may differ from place to place
        self._since = "the tools were locked"
        if found is None:
            self._since += f" (there is no server {one_line(server)!r} in the lock)"
        self._locked = found or Locked("", "", {})
        self._pins = {name: fingerprint(said) for name, said in self._locked.tools.items()}
        self._asks = asks
        self._agreed: dict[str, str] = {}

    def look(self, tools: list[ListedTool], revision: str) -> None:
        """Mark those that are not what the lock says; unless somebody is to be asked, they are barred."""
        for tool in tools:
            said = self._locked.tools.get(tool.own_name)
            if said is None:
                tool.compared = None, definition(tool.raw)
            elif self._pins[tool.own_name] == tool.fingerprint or _is_same(tool, said, self._locked.revision, revision):
                self._agreed.pop(tool.own_name, None)
                continue
            if self._agreed.get(tool.own_name) != tool.fingerprint:
                self._suspect(tool)

    def agree(self, tool: ListedTool) -> None:
        if tool.changed:
            tool.changed = False
            self._agreed[tool.own_name] = tool.fingerprint

    def miss(self, tool: ListedTool) -> None:
        said = self._locked.tools.get(tool.own_name)
        tool.compared = (None, definition(tool.raw)) if said is None else (said, None)
        self._suspect(tool)

    def _suspect(self, tool: ListedTool) -> None:
        tool.changed, tool.barred, tool.since = True, not self._asks, self._since


def _is_same(tool: ListedTool, said: Object, said_in: str, revision: str) -> bool:
    """Whether a tool that is not listed in the same words is the same, but for its revision."""
    tool.compared = was, now = comparable(said, said_in, definition(tool.raw), revision)
    return canonical(was) == canonical(now)


def _pin(fingerprint: str) -> str:
    return fingerprint[:32]


def _size(text: object) -> int:
    """At most what it takes in a file."""
    return len(json.dumps(text)) + 60 if text else 0


def _short(name: str) -> str:
    """So that a thousand of them always fit, whatever a server calls its tools."""
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
