"""Storage of grants: in memory, or in files that only their owner can read.

A key stands for an MCP server and the client id used with it; under it is a grant per issuer, the one in use first. A
server that changes its authorization server never gets a token that another one issued.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from msgspec import Struct, json

from handrail.errors import AuthorizationError
from handrail.oauth.flow import TokenGrant

if sys.platform != "win32":
    import fcntl

__all__ = ["Credentials", "FileCredentials", "MemoryCredentials"]

log = logging.getLogger("handrail")

MAX_FILE_BYTES = 1024 * 1024
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.01, 0.2


class Credentials(Protocol):
    """Where grants are kept."""

    is_live: bool
    """Others add grants and revoke them at any time, so they are read before each request."""

    async def load(self, key: str) -> list[TokenGrant]: ...
    async def save(self, key: str, grants: list[TokenGrant]) -> None: ...
    def lock(self, key: str) -> AbstractAsyncContextManager[None]:
        """Hold the lock of `key` among all processes: a refresh token that is used twice is lost."""


class MemoryCredentials:
    """Grants that last as long as the process."""

    is_live = False

    def __init__(self) -> None:
        self._grants: dict[str, list[TokenGrant]] = {}

    async def load(self, key: str) -> list[TokenGrant]:
        return self._grants.get(key, [])

    async def save(self, key: str, grants: list[TokenGrant]) -> None:
        self._grants[key] = grants

    def lock(self, key: str) -> nullcontext[None]:
        return nullcontext()  # not shared, and its owner does one thing at a time per key


class FileCredentials:
    """A file per key in `folder`, which is created if it is missing; for several processes of one user.

    A folder or file that another user owns or can read is refused. A file that cannot be decoded is set aside, and the
    user has to log in again.
    """

    is_live = False

    def __init__(self, folder: str | os.PathLike[str], *, lock_seconds: float = 60) -> None:
        if sys.platform == "win32":
            raise NotImplementedError("credentials in a folder need a system with POSIX permissions")
        self._folder = Path(folder)
        self._lock_seconds = lock_seconds

    async def load(self, key: str) -> list[TokenGrant]:
        """Return the grants that any process saved last."""
        return await asyncio.to_thread(self._load, key)

    def _load(self, key: str) -> list[TokenGrant]:
        name = _name(key)
        with self._open_folder() as folder:
            try:
                with open(self._open_checked(name, os.O_RDONLY, folder), "rb") as file:
                    return json.decode(file.read(MAX_FILE_BYTES), type=_Content).grants
            except FileNotFoundError:
                return []
            except (ValueError, RecursionError) as wrong:
                os.replace(name, f"{name}.corrupt", src_dir_fd=folder, dst_dir_fd=folder)
                error_name = type(wrong).__name__  # not its text: that may quote the file
                log.warning("oauth: credentials file %s malformed (%s), set aside", self._folder / name, error_name)
                return []

    async def save(self, key: str, grants: list[TokenGrant]) -> None:
        """Replace the grants under `key`; they are on the disk when this returns."""
        await asyncio.to_thread(self._save, key, grants)

    def _save(self, key: str, grants: list[TokenGrant]) -> None:
        name, draft = _name(key), f".{secrets.token_hex(8)}"
        with self._open_folder() as folder:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(json.encode(_Content(grants)))
                    file.flush()
                    os.fsync(descriptor)
                os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=folder)
                raise

    @asynccontextmanager
    async def lock(self, key: str) -> AsyncIterator[None]:
        name = f"{_name(key)}.lock"
        with self._open_folder() as folder:
            descriptor = self._open_checked(name, os.O_RDWR | os.O_CREAT, folder)
        try:
            try:
                async with asyncio.timeout(self._lock_seconds):
                    await _acquire_lock(descriptor)
            except TimeoutError:
                raise AuthorizationError(
                    f"another process did not come to an end with {self._folder / name} in {self._lock_seconds:g} s"
                ) from None
            yield
        finally:
            os.close(descriptor)  # releases the lock

    @contextmanager
    def _open_folder(self) -> Iterator[int]:
        """Yield a descriptor of the folder, so that all access is in the folder that was checked."""
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            if self._folder.lstat().st_uid != os.geteuid():  # the owner of a link decides where it leads
                raise AuthorizationError(f"{self._folder} belongs to another user")
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _check(os.fstat(descriptor), self._folder, "700")
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as failed:
            raise AuthorizationError(f"credentials cannot be stored in {self._folder}: {failed.strerror}") from failed

    def _open_checked(self, name: str, flags: int, folder: int) -> int:
        path = self._folder / name
        try:
            # Non-blocking, since the name may be a pipe.
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
        except OSError as failed:
            if failed.errno == errno.ELOOP:
                raise AuthorizationError(f"{path} is a link to another file", hint="Remove it.") from None
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise AuthorizationError(f"{path} is not a file")
            _check(status, path, "600")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


class _Content(Struct):
    grants: list[TokenGrant]
    version: int = 1


def _name(key: str) -> str:
    return f"{sha256(key.encode()).hexdigest()[:32]}.json"


def _check(status: os.stat_result, path: Path, mode: str) -> None:
    if status.st_uid != os.geteuid():
        raise AuthorizationError(f"{path} belongs to another user")
    if status.st_mode & 0o077:
        raise AuthorizationError(f"{path} can be used by others", hint=f"Say: chmod {mode} {path}")


async def _acquire_lock(descriptor: int) -> None:
    """Wait for the lock in small steps: a thread that blocks on it could not be cancelled."""
    pause = FIRST_PAUSE_SECONDS
    while sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if pause == FIRST_PAUSE_SECONDS:
                log.debug("waiting for another process to renew a token")
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
