"""What is believed of an upstream's tools: pinned definitions, and the classes that a person has accepted (P-31).

An upstream that the operator has named is not yet trusted. Its definitions are pinned at first sight. Until a person
has accepted a class for a tool (`handrail trust NAME`), neither its hints nor its name decide anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from handrail.client.state_dir import write_file
from handrail.guards.tool_definitions import (
    Change,
    LockedServer,
    change_kinds,
    comparable,
    compare_definitions,
    definition,
    fingerprint,
    lock_text,
    read_lock,
)
from handrail.model import Json, Object

__all__ = ["ACCEPTED_HINTS", "LockFile", "Pins", "ToolClass", "Verdict", "propose_class"]

ToolClass = Literal["reads", "writes", "destroys"]
ACCEPTED_HINTS: Mapping[str, Object] = {
    "reads": {"readOnlyHint": True, "destructiveHint": False},
    "writes": {"readOnlyHint": False, "destructiveHint": False},
    "destroys": {"readOnlyHint": False, "destructiveHint": True},
}
"""What an accepted class says to rules, in place of the upstream's hints."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_DESTROYS = frozenset(
    "delete remove drop purge destroy kill cancel revoke erase wipe truncate reset uninstall terminate force execute"
    " exec run shell command eval sql query_write overwrite unpublish deprovision disable".split()
)
_WRITES = frozenset(
    "write create update set add insert edit append move rename put post send publish upload save patch modify apply"
    " commit push merge install enable import assign upsert copy store register invite reply comment start stop"
    " make new build generate configure subscribe checkout stage click fill type press drag navigate".split()
)
_READS = frozenset(
    "read get list search find query fetch show view describe count check status diff log info lookup browse download"
    " export inspect summarize compare calculate add_numbers convert echo ping now time current think translate tree"
    " open stat head help validate print select explain analyze analyse".split()
)


def propose_class(tool: Mapping[str, Json]) -> ToolClass:
    """Return a proposal for the class of a tool, by the words of its name, then by its hints; when unsure, the worse.

    It decides nothing: a person accepts it.
    """
    words = [word.lower() for word in _WORD.findall(str(tool.get("name", "")))]
    hints = tool.get("annotations")
    hints = hints if type(hints) is dict else {}
    if not _DESTROYS.isdisjoint(words) or hints.get("destructiveHint") is True:
        return "destroys"
    if not _WRITES.isdisjoint(words):
        return "writes"
    if not _READS.isdisjoint(words) or hints.get("readOnlyHint") is True:
        return "reads"
    return "writes" if hints.get("destructiveHint") is False else "destroys"


class Verdict(Struct, frozen=True):
    """What is known of one tool: its accepted class, whether it is new or changed, and why it is withheld."""

    state: Literal["listed", "new", "quarantined"]
    accepted: str = ""  # a ToolClass, if a person has accepted one
    withheld: str = ""
    changes: tuple[Change, ...] = ()


class LockFile:
    """A `tools.lock` that several upstreams of one gateway share. Without a path it lasts as long as the process."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.servers: dict[str, LockedServer] = {}
        self._stamp: tuple[int, int, int] | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Read the file if it has changed since; return whether it has. LockError if it cannot be used."""
        if self.path is None:
            return False
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # also of a file that cannot be used: that is said once
        self.servers = read_lock(self.path)
        return True

    def update(self, name: str, server: LockedServer) -> None:
        """Replace one server of the file, as it is now."""
        self.refresh()
        self.servers = {**self.servers, name: server}
        if self.path is not None:
            write_file(self.path, lock_text(self.servers).encode(), 0o644)
            status = self.path.stat()
            self._stamp = status.st_mtime_ns, status.st_size, status.st_ino


class Pins:
    """The pinned tools of one upstream."""

    def __init__(self, lock: LockFile, name: str, target: str, new: str, pass_changes: frozenset[str]) -> None:
        self._lock = lock
        self._name = name
        self._target = target
        self._new = new
        self._pass_changes = pass_changes

    @property
    def locked(self) -> LockedServer | None:
        return self._lock.servers.get(self._name)

    def judge(self, tools: Mapping[str, Object], revision: str) -> dict[str, Verdict]:
        """Return the verdict on each listed tool. At first sight all are pinned as they are."""
        locked = self.locked
        if locked is None:
            self._pin(tools, revision)
            return dict.fromkeys(tools, Verdict("listed"))
        # What was accepted is of the server it was accepted of: another command or address is another server.
        classes = locked.classes if locked.target in ("", self._target) else {}
        verdicts: dict[str, Verdict] = {}
        passed: dict[str, Object] = {}
        for name, tool in tools.items():
            pinned = locked.tools.get(name)
            accepted = classes.get(name, "")
            if pinned is None:
                hides = f"is new and was not accepted; `handrail trust {self._name}` shows it"
                state: Literal["new", "listed"] = "listed" if self._new == "allow" else "new"
                verdicts[name] = Verdict(state, withheld=hides if self._new == "hide" else "")
                if self._new == "allow":
                    passed[name] = tool
                continue
            if fingerprint(pinned) == fingerprint(tool):
                verdicts[name] = Verdict("listed", accepted)
                continue
            was, now = comparable(pinned, locked.revision, definition(tool), revision)
            changes = compare_definitions(was, now)
            kinds = change_kinds(changes)
            if not changes:
                verdicts[name] = Verdict("listed", accepted)
            elif self._pass_changes.issuperset(kinds):
                verdicts[name] = Verdict("listed", accepted)
                passed[name] = tool
            else:
                why = f"has changed since it was accepted ({', '.join(kinds)}), and is held back;"
                why += f" `handrail trust {self._name}` shows the difference and accepts it"
                verdicts[name] = Verdict("quarantined", accepted, why, tuple(changes))
        if passed:
            same = {each: tools[each] for each, verdict in verdicts.items() if verdict.state == "listed"}
            self._pin({**locked.tools, **same, **passed}, revision, locked.classes)
        return verdicts

    def accept(self, tools: Mapping[str, Object], classes: Mapping[str, str], revision: str) -> None:
        """Pin these definitions in place of the earlier ones, with the classes that a person has accepted."""
        locked = self.locked or LockedServer("", "", {})
        self._pin({**locked.tools, **tools}, revision, {**locked.classes, **classes})

    def _pin(self, tools: Mapping[str, Object], revision: str, classes: Mapping[str, str] | None = None) -> None:
        definitions = {name: definition(tool) for name, tool in tools.items()}
        self._lock.update(self._name, LockedServer(self._target, revision, definitions, dict(classes or {})))
