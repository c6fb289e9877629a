"""Pins: fingerprints of tools from when they were first listed, last confirmed, or locked (P-31)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

from handrail.client.state_dir import StateDirectory
from handrail.client.tools import ListedTool
from handrail.guards.tool_definitions import LockedServer, canonical, comparable, definition, fingerprint
from handrail.model import Object
from handrail.text.controls import one_line

MAX_DEFINITION_CHARACTERS = 160_000  # characters of definitions, so that their file can always be read again


class ToolPins:
    """Fingerprints of one server's tools, in `state` if there is one, else for the lifetime of the client.

    The definitions are stored beside them as far as there is room. They show what has changed; a definition that does
    not fit its fingerprint is ignored.
    """

    def __init__(self, server: str, state: StateDirectory | None = None) -> None:
        self._state = state
        self._pins_file = f"pins-{sha256(server.encode()).hexdigest()[:32]}.json"
        self._definitions_file = f"tools-{self._pins_file}"
        fingerprints, definitions = (
            (state.read(self._pins_file), state.read(self._definitions_file)) if state is not None else (None, None)
        )
        self._is_unreadable = (
            fingerprints is None and state is not None and state.has(self._pins_file)
        )  # then nothing is as it was
        self._fingerprints: dict[str, str] = fingerprints if isinstance(fingerprints, dict) else {}
        self._definitions: dict[str, list[str]] = definitions if isinstance(definitions, dict) else {}
        self._used_characters = sum(map(_size, self._definitions.values()))
        self._revision = ""

    def check(self, tools: list[ListedTool], revision: str) -> None:
        """Mark the tools that changed; a new tool is pinned as it is."""
        before, self._revision = len(self._fingerprints), revision
        for tool in tools:
            name = _name_key(tool.own_name)
            if name not in self._fingerprints:
                self._remember(tool)
            tool.changed = self._is_unreadable
            if self._fingerprints[name] != _short_fingerprint(tool.fingerprint):
                record = self._definition(name)
                tool.changed = self._is_unreadable or record is None or not _is_same(tool, *record, revision)
        if len(self._fingerprints) != before:
            self._save()

    def accept(self, tool: ListedTool) -> None:
        """Pin the tool as it is now: its change was confirmed."""
        if tool.changed:
            tool.changed = False
            self._remember(tool)
            self._save()

    def mark_missing(self, tool: ListedTool) -> None:
        """Mark a tool that is not listed as changed, if it is pinned."""
        name = _name_key(tool.own_name)
        tool.changed = name in self._fingerprints
        if record := self._definition(name):
            tool.definitions = record[0], None

    def _remember(self, tool: ListedTool) -> None:
        name = _name_key(tool.own_name)
        self._fingerprints[name] = _short_fingerprint(tool.fingerprint)
        self._used_characters -= _size(self._definitions.pop(name, None))
        text = [self._revision, canonical(definition(tool.raw)).decode()]
        if self._used_characters + (size := _size(text)) <= MAX_DEFINITION_CHARACTERS:
            self._used_characters += size
            self._definitions[name] = text

    def _definition(self, name: str) -> tuple[Object, str] | None:
        """Return the stored definition of a tool, and the revision it was listed in."""
        match self._definitions.get(name):
            case [str(revision), str(text)]:
                try:
                    stored_definition = json.loads(text)
                    return (
                        (stored_definition, revision)
                        if _short_fingerprint(fingerprint(stored_definition)) == self._fingerprints[name]
                        else None
                    )
                except (ValueError, TypeError, RecursionError):
                    return None
        return None

    def _save(self) -> None:
        if self._state is not None:
            self._state.write(self._definitions_file, self._definitions)
            self._state.write(self._pins_file, self._fingerprints)


class LockedPins:
    """The locked tools of one server. A confirmation of another state holds until the tool changes again."""

    def __init__(
        self, lock: Mapping[str, LockedServer], server: str, *, is_only_server: bool, ask_on_change: bool
    ) -> None:
        server_lock = lock.get(server)
        if server_lock is None and is_only_server and len(lock) == 1:
            [server_lock] = (
                lock.values()
            )  # one server of another name: what it is reached by may differ from place to place
        self._since = "the tools were locked"
        if server_lock is None:
            self._since += f" (there is no server {one_line(server)!r} in the lock)"
        self._locked = server_lock or LockedServer("", "", {})
        self._pins = {name: fingerprint(locked_definition) for name, locked_definition in self._locked.tools.items()}
        self._ask_on_change = ask_on_change
        self._accepted: dict[str, str] = {}

    def check(self, tools: list[ListedTool], revision: str) -> None:
        """Mark the tools that differ from the lock; they are blocked, unless changes are to be confirmed."""
        for tool in tools:
            locked_definition = self._locked.tools.get(tool.own_name)
            if locked_definition is None:
                tool.definitions = None, definition(tool.raw)
            elif self._pins[tool.own_name] == tool.fingerprint or _is_same(
                tool, locked_definition, self._locked.revision, revision
            ):
                self._accepted.pop(tool.own_name, None)
                continue
            if self._accepted.get(tool.own_name) != tool.fingerprint:
                self._mark_changed(tool)

    def accept(self, tool: ListedTool) -> None:
        if tool.changed:
            tool.changed = False
            self._accepted[tool.own_name] = tool.fingerprint

    def mark_missing(self, tool: ListedTool) -> None:
        locked_definition = self._locked.tools.get(tool.own_name)
        tool.definitions = (None, definition(tool.raw)) if locked_definition is None else (locked_definition, None)
        self._mark_changed(tool)

    def _mark_changed(self, tool: ListedTool) -> None:
        tool.changed, tool.is_blocked, tool.change_since = True, not self._ask_on_change, self._since


def _is_same(tool: ListedTool, reference: Object, reference_revision: str, revision: str) -> bool:
    """Return whether a tool differs from its reference only by how its revision writes it."""
    tool.definitions = was, now = comparable(reference, reference_revision, definition(tool.raw), revision)
    return canonical(was) == canonical(now)


def _short_fingerprint(fingerprint: str) -> str:
    return fingerprint[:32]


def _size(text: object) -> int:
    """Return an upper bound of its characters in a file."""
    return len(json.dumps(text)) + 60 if text else 0


def _name_key(name: str) -> str:
    """Return a key of fixed length, so that a thousand of them fit in a file."""
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
