"""Credentials on disk: for nobody else's eyes, whole or not at all, and renewed by one process at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from authorization_server import Home
from faults import put_away
from handrail.errors import AuthorizationError
from handrail.oauth.client import OAuth
from handrail.oauth.credentials import FileCredentials, MemoryCredentials
from handrail.oauth.flow import ClientRegistration, Token, TokenGrant
from patience import PATIENCE
from requirements import requirement

NOW = 1_800_000_000.0
KEY = "https://mcp.example/mcp\nclient"
GRANT = TokenGrant(
    "https://id.example",
    "https://mcp.example/mcp",
    "https://id.example/token",
    ClientRegistration("client", "canary-secret", "client_secret_basic", "http://127.0.0.1:1/callback", NOW),
    Token("canary-access", "canary-refresh", ("a",), ("a", "b"), NOW + 1, NOW + 2),
)
ENDLESS = TokenGrant(
    GRANT.issuer, GRANT.resource, GRANT.token_endpoint, ClientRegistration("client"), Token("canary-access")
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions are the promise")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "made" / "credentials"


@pytest.fixture
def kept(folder: Path) -> FileCredentials:
    return FileCredentials(folder)


def saved_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("grants", [[GRANT], [ENDLESS, GRANT], []])
@requirement("P-26")
async def test_what_was_saved_is_loaded(kept: FileCredentials, grants: list[TokenGrant]) -> None:
    stores: list[FileCredentials | MemoryCredentials] = [kept, MemoryCredentials()]
    for store in stores:
        assert await store.load(KEY) == []
        await store.save(KEY, [ENDLESS])
        await store.save(KEY, grants)
        assert await store.load(KEY) == grants
        assert await store.load(f"{KEY}2") == []


@requirement("P-26", "P-34")
async def test_only_the_owner_can_read_them(kept: FileCredentials, folder: Path) -> None:
    before = os.umask(0)
    try:
        await kept.save(KEY, [GRANT])
    finally:
        os.umask(before)
    assert (mode_of(folder), mode_of(saved_file(folder))) == (0o700, 0o600)
    assert "mcp.example" not in saved_file(folder).name


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o722])
@requirement("P-34")
async def test_a_folder_others_can_use_is_refused(kept: FileCredentials, folder: Path, mode: int) -> None:
    await kept.save(KEY, [GRANT])
    os.chmod(folder, mode)
    for act in (lambda: kept.load(KEY), lambda: kept.save(KEY, [])):
        with pytest.raises(AuthorizationError, match=f"can be used by others. Say: chmod 700 {folder}"):
            await act()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
@requirement("P-34")
async def test_a_file_others_can_use_is_refused(kept: FileCredentials, folder: Path, mode: int) -> None:
    await kept.save(KEY, [GRANT])
    saved_file(folder).chmod(mode)
    with pytest.raises(AuthorizationError, match=r"can be used by others\. Say: chmod 600"):
        await kept.load(KEY)


@requirement("P-34")
async def test_a_link_in_place_of_a_file_is_refused(kept: FileCredentials, folder: Path, tmp_path: Path) -> None:
    await kept.save(KEY, [GRANT])
    path = saved_file(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuthorizationError, match="is a link to another file"):
        await kept.load(KEY)
    path.with_name(f"{path.name}.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuthorizationError, match="is a link to another file"):
        async with kept.lock(KEY):
            pass


async def test_a_pipe_in_place_of_a_file_is_refused_at_once(kept: FileCredentials, folder: Path) -> None:
    await kept.save(KEY, [GRANT])
    path = saved_file(folder)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(AuthorizationError, match="is not a file"):
        await kept.load(KEY)


async def test_a_link_of_ours_may_be_the_folder(folder: Path, tmp_path: Path) -> None:
    await FileCredentials(folder).save(KEY, [GRANT])
    (tmp_path / "link").symlink_to(folder)
    assert await FileCredentials(tmp_path / "link").load(KEY) == [GRANT]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@requirement("P-34")
async def test_what_belongs_to_somebody_else_is_refused(kept: FileCredentials, folder: Path, tmp_path: Path) -> None:
    await kept.save(KEY, [GRANT])
    link = tmp_path / "link"
    link.symlink_to(folder)
    os.lchown(link, 12345, 12345)
    with pytest.raises(AuthorizationError, match="belongs to another user"):
        await FileCredentials(link).load(KEY)
    os.chown(saved_file(folder), 12345, 12345)
    with pytest.raises(AuthorizationError, match="belongs to another user"):
        await kept.load(KEY)
    os.chown(folder, 12345, 12345)
    with pytest.raises(AuthorizationError, match="belongs to another user"):
        await kept.load(f"{KEY}2")


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AuthorizationError, match=r"credentials cannot be stored in .*file/x: Not a directory"):
        await FileCredentials(tmp_path / "file" / "x").load(KEY)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"canary",
        b"[]",
        b'{"grants":[{"issuer":"canary"}]}',
        b"{" * 5000,
        b'{"grants":[]' + b" " * 2_000_000 + b"}",
    ],
    ids=["empty", "text", "list", "less", "deep", "long"],
)
@requirement("P-34")
async def test_a_file_that_cannot_be_read_is_set_aside(
    kept: FileCredentials, folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await kept.save(KEY, [GRANT])
    path = saved_file(folder)
    path.write_bytes(content)
    assert await kept.load(KEY) == []
    assert path.with_name(f"{path.name}.corrupt").read_bytes() == content
    assert "set aside" in caplog.text and "canary" not in caplog.text
    await kept.save(KEY, [GRANT])
    assert await kept.load(KEY) == [GRANT]


@requirement("P-34")
async def test_a_save_that_fails_leaves_what_was_there(
    kept: FileCredentials, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kept.save(KEY, [GRANT])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AuthorizationError, match="No space left"):
        await kept.save(KEY, [])
    assert await kept.load(KEY) == [GRANT]
    assert len(os.listdir(folder)) == 1


async def test_one_at_a_time_holds_the_lock(folder: Path) -> None:
    first, second = FileCredentials(folder), FileCredentials(folder, lock_seconds=0)
    async with first.lock(KEY):
        async with second.lock("another key"):
            pass
        with pytest.raises(AuthorizationError, match="another process did not come to an end"):
            async with second.lock(KEY):
                pass
    async with second.lock(KEY):
        pass


async def test_who_stops_waiting_for_the_lock_leaves_nothing_behind(folder: Path) -> None:
    kept = FileCredentials(folder)

    async def waiting() -> None:
        async with kept.lock(KEY):
            raise AssertionError("never reached")

    async with kept.lock(KEY):
        descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        task = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors
    async with kept.lock(KEY):
        pass


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    async with Home(Clock()).running() as running:
        yield running


PROCESS = """
import asyncio, logging, sys
from handrail.oauth.client import OAuth
logging.basicConfig(level="DEBUG", format="%(message)s")
url, folder, now = sys.argv[1:]
print(asyncio.run(OAuth(folder=folder, clock=lambda: float(now)).headers(url)))
"""


@requirement("P-26")
async def test_of_two_processes_one_renews_and_both_have_the_token(home: Home, folder: Path) -> None:
    first = OAuth(folder=folder, browser=home.agree, clock=home.clock)
    assert await first.challenged(home.url, 401, "Bearer")
    await first.close()
    home.held.clear()
    command = [sys.executable, "-c", PROCESS, home.url, str(folder), str(NOW + 3590)]
    pipe = asyncio.subprocess.PIPE
    processes = [await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe) for _ in range(2)]

    async def is_waiting(process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while b"waiting for another process" not in (line := await process.stderr.readline()):
            assert line, "it ended"

    try:
        async with asyncio.timeout(PATIENCE):
            tasks = [asyncio.create_task(is_waiting(process)) for process in processes]
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await home.refresh_came.wait()
            done.pop().result()
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            home.held.set()
            told = [(await process.communicate())[0] for process in processes]
    finally:
        for process in processes:
            await put_away(process)
    assert told[0] == told[1] == f"{{'Authorization': 'Bearer {list(home.issued)[-1]}'}}\n".encode()
    assert home.count("/token", grant_type="refresh_token") == 1
    assert json.loads(saved_file(folder).read_bytes())["grants"][0]["token"]["refresh"] == "refresh-3"


@requirement("P-34")
async def test_no_secret_is_logged_or_shown(home: Home, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    auth = OAuth(folder=folder, browser=home.agree, clock=home.clock)
    assert await auth.challenged(home.url, 401, "Bearer")
    await auth.close()
    own = "\n".join(record.getMessage() for record in caplog.records if record.name == "handrail")
    shown = own + repr(auth) + repr(await FileCredentials(folder).load("x")) + repr(vars(auth))
    for secret in (*home.issued, *(issued.refresh for issued in home.issued.values())):
        assert secret not in shown
