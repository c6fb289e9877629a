"""The private state folder of the user, and the consents stored in it (P-28).

Confirmation of calls before anything is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from handrail.client.mcp_config import ServerEntry
from handrail.client.tools import ListedTool
from handrail.errors import HandrailError
from handrail.guards.tool_definitions import format_changes
from handrail.model import Object, Principal

if TYPE_CHECKING:
    from handrail.guards.policy import Decision

__all__ = ["CALLS_FILE", "Consents", "StateDirectory", "StateError", "state_folder", "write_file"]

CALLS_FILE = "calls.db"  # the audit log of calls from the command line
MAX_BYTES = 256 * 1024
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


class StateError(HandrailError):
    """The folder, or a file in it, is not safe to use."""


def state_folder(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """`$XDG_STATE_HOME/handrail`, else the platform's place for such files."""
    if (state_home := environ.get("XDG_STATE_HOME", "")) and Path(
        state_home
    ).is_absolute():  # relative ones count as unset
        return Path(state_home) / "handrail"
    home = Path(environ.get("USERPROFILE" if platform == "win32" else "HOME") or Path.home())
    if platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "handrail"
    if platform == "darwin":
        return home / "Library" / "Application Support" / "handrail"
    return home / ".local" / "state" / "handrail"


class StateDirectory:
    """Small files in one private folder, which is created at the first write and checked at each use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Any:
        """Return the content of a JSON file; None if there is none, or it is malformed."""
        if not self._check_folder():
            return None
        with contextlib.suppress(FileNotFoundError, ValueError), (self.folder / name).open("rb") as file:
            return json.loads(file.read(MAX_BYTES))
        return None

    def has(self, name: str) -> bool:
        return self._check_folder() and (self.folder / name).exists()

    def write(self, name: str, value: Any) -> None:
        """Replace a JSON file atomically: a reader sees the old content or the new one."""
        self.prepare()
        write_file(self.folder / name, json.dumps(value, indent=1).encode() + b"\n")

    def prepare(self) -> None:
        """Create the folder if it is missing."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        self._check_folder()

    def _check_folder(self) -> bool:
        try:
            status = self.folder.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(status.st_mode):
            raise StateError(f"{self.folder}: not a folder, or a link to one; move it away, or set XDG_STATE_HOME")
        if sys.platform != "win32":  # there the folders of a profile belong to its user
            if status.st_uid != os.geteuid():
                raise StateError(f"{self.folder}: belongs to another user; move it away, or set XDG_STATE_HOME")
            if status.st_mode & 0o022:
                raise StateError(f"{self.folder}: others can write to it; chmod 700 {self.folder}")
        return True


class Consents:
    """The servers of configuration files that may be started.

    One file per server of a configuration holds a hash of its entry: any change requires a new consent.
    """

    def __init__(self, state: StateDirectory) -> None:
        self._state = state

    def has_consent(self, entry: ServerEntry) -> bool:
        record = self._state.read(self._name(entry))
        return isinstance(record, dict) and record.get("digest") == digest(entry)

    def add(self, entry: ServerEntry) -> None:
        self._state.write(self._name(entry), {"server": entry.name, "source": entry.source, "digest": digest(entry)})

    @staticmethod
    def _name(entry: ServerEntry) -> str:
        return f"consent-{_hash([entry.source, entry.name])[:32]}.json"


def digest(entry: ServerEntry) -> str:
    """Return the SHA-256 of all that decides what is started or connected to; possible secrets are hashed first."""
    hashes = [{name: _hash(text) for name, text in each.items()} for each in (entry.env, entry.headers)]
    if entry.auth:
        hashes.append({name: _hash(text) for name, text in entry.auth.items()})
    return _hash([entry.kind, list(entry.command), entry.url, entry.cwd, *hashes, entry.source])


def _hash(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file whole or not at all; it is on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, _NEW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode != 0o600:
            temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


LOCAL_PRINCIPAL = Principal("local")
"""The principal that rules see: the user of this process."""


class Confirmation(Struct, frozen=True):
    """A call to confirm, complete, with the rule or reason that requires it in `why`.

    `claims` are the annotations of the tool; the server may claim anything.
    """

    server: str
    tool: str
    arguments: Object
    claims: Object
    why: str
    definition: ListedTool

    @property
    def difference(self) -> str:
        """The changes of the tool, line by line, safe to print; empty without changes, or if they are unknown."""
        return format_changes(self.definition.changes)


Confirm = Callable[[Confirmation], bool | Awaitable[bool]]


def allow(call: Confirmation) -> bool:
    """Agree to every call without a look: `confirm=allow`."""
    return True


def needs_confirmation(tool: ListedTool, decision: Decision | None = None) -> tuple[str, bool]:
    """Return why a call needs confirmation (empty: it does not), and whether `confirm` is required for it.

    Where it is not required, code that calls the tool counts as consent. With rules, their decision counts. Without
    rules, the claims of an untrusted server never make a call harmless; they can only make it suspicious.
    """
    if tool.changed:
        return tool.change, True
    if decision is not None:
        return (decision.why, True) if decision.verdict == "ask" else ("", False)
    claims = tool.annotations
    only_reads = claims.get("readOnlyHint") is True
    if claims.get("destructiveHint") is True:
        if only_reads:
            return "the server says that the tool destroys, and that it only reads", True
        return "the server says that the tool destroys or overwrites", True
    if tool.trusted and only_reads:
        return "", False
    if not tool.listed:
        return "the server does not list this tool", False
    if only_reads:
        return "the server says that the tool only reads, and the server is not trusted", False
    return "the tool may change something", False
