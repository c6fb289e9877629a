"""A real PostgreSQL server for the tests of one process, on a free port, with a schema of its own for each test."""

from __future__ import annotations

import itertools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pytest

from patience import PATIENCE

SETTINGS = "fsync=on shared_buffers=16MB max_connections=60 restart_after_crash=off wal_level=minimal max_wal_senders=0"
_COUNT = itertools.count(1)


def binaries() -> Path | None:
    """Return the folder of `initdb`, the newest where there are several."""
    on_path = shutil.which("initdb")
    folders = [Path(on_path).resolve().parent] if on_path else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: int(each.parent.name), reverse=True)
    return next((each for each in folders if (each / "postgres").exists()), None)


class PostgresServer:
    """PostgreSQL in a folder of its own. It refuses to run as root, and is another user's then."""

    user = "handrail"

    def __init__(self, programs: Path) -> None:
        self.programs = programs
        parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where a sync costs no time
        self.folder = Path(tempfile.mkdtemp(prefix="handrail-postgres-", dir=parent))
        self.password = secrets.token_hex(8)
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._as_user: list[str] = []
        password_file = self.folder / "password"
        password_file.write_text(self.password)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            for each in (self.folder, password_file):
                os.chown(each, nobody.pw_uid, nobody.pw_gid)
            self._as_user = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
        options = (
            f"-D {self.data} -U {self.user} -E UTF8 --locale=C -A scram-sha-256 --pwfile={password_file} --no-sync"
        )
        subprocess.run(
            [*self._as_user, str(programs / "initdb"), *options.split()],
            check=True,
            capture_output=True,
            cwd="/",
        )
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def url(self, query: str = "", *, user: str = "", password: str = "", port: int = 0) -> str:
        credentials = f"{user or self.user}:{password or self.password}"
        return f"postgresql://{credentials}@127.0.0.1:{port or self.port}/postgres{query and '?' + query}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *settings: str) -> None:
        """Start it, or do nothing if it runs. It answers when this returns."""
        if self._process is not None and self._process.poll() is None:
            return
        (self.data / "postmaster.pid").unlink(missing_ok=True)  # of one that was killed, with all its children
        where = ("listen_addresses=127.0.0.1", f"port={self.port}", f"unix_socket_directories={self.folder}")
        options = [f"-c{each}" for each in (*SETTINGS.split(), *where, *settings)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._as_user, str(self.programs / "postgres"), "-D", str(self.data), *options],
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        # It must not outlive this process, however that ends: then the pipe ends, too.
        script = f"read line; kill -QUIT {self.pid} 2>/dev/null; sleep 1; rm -rf {self.folder}"
        self._watcher = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)
        deadline = time.monotonic() + PATIENCE
        while self._psql("SELECT 1", check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it and all its children, as a crash of the machine does."""
        children = self.children()
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
        os.kill(self.pid, signal.SIGKILL)
        for child in children:
            _signal(child, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        for child in children:
            deadline = time.monotonic() + PATIENCE
            while _is_alive(child) and time.monotonic() < deadline:
                time.sleep(0.005)

    def freeze(self) -> None:
        for each in [self.pid, *self.children()]:
            _signal(each, signal.SIGSTOP)

    def thaw(self) -> None:
        for each in [self.pid, *self.children()]:
            _signal(each, signal.SIGCONT)

    def use_certificate(self, certificate: bytes, key: bytes) -> None:
        """Restart it with TLS."""
        self.kill()
        owner = self.data.stat()
        for name, content in (("server.crt", certificate), ("server.key", key)):
            path = self.folder / name
            path.write_bytes(content)
            path.chmod(0o600)
            os.chown(path, owner.st_uid, owner.st_gid)
        self.start("ssl=on", f"ssl_cert_file={self.folder}/server.crt", f"ssl_key_file={self.folder}/server.key")

    def children(self) -> list[int]:
        return [int(each) for each in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def sql(self, text: str, *, schema: str = "public") -> list[list[str]]:
        """Return the rows of what the superuser asks, in a session of its own."""
        done = self._psql(f"SET search_path = {schema};\n{text}")
        return [line.split("\t") for line in done.stdout.decode().splitlines()]

    def _psql(self, text: str, *, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        command = [str(self.programs / "psql"), "-XqAt", "-F\t", "-vON_ERROR_STOP=1", self.url()]
        done = subprocess.run(command, input=text.encode(), capture_output=True)
        assert not check or not done.returncode, done.stderr.decode()
        return done

    @cached_property
    def version(self) -> str:
        return self.sql("SHOW server_version")[0][0]


class Schema:
    """A schema for one test, as the tables of one store are in. Its clock stands still until the test turns it."""

    def __init__(self, server: PostgresServer, *, clock: bool = False) -> None:
        server.start()
        self.server = server
        self.name = f"test_{next(_COUNT)}"
        path = self.name
        self.sql(f"CREATE SCHEMA {self.name}")
        if clock:
            # Named before the built-in functions, this one is taken for theirs.
            path = f"{self.name},pg_catalog"
            self.sql("CREATE TABLE clock (now float8); INSERT INTO clock VALUES (1000)")
            self.sql(
                "CREATE FUNCTION clock_timestamp() RETURNS timestamptz STABLE LANGUAGE sql"
                f" AS 'SELECT to_timestamp(now) FROM {self.name}.clock'"
            )
        self.search_path = path
        self.url = server.url(f"search_path={path}")

    def sql(self, text: str) -> list[list[str]]:
        return self.server.sql(text, schema=self.name)

    def rows(self, table: str) -> int:
        return int(self.sql(f"SELECT count(*) FROM handrail_{table}")[0][0])

    def set_clock(self, now: float) -> None:
        self.sql(f"UPDATE clock SET now = {now!r}")

    def role(self, *grants: str) -> str:
        """Make a role that has these rights and no others; return the URL that signs it in."""
        name, password = f"{self.name}_role_{next(_COUNT)}", secrets.token_hex(8)
        self.sql(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'; GRANT USAGE ON SCHEMA {self.name} TO {name}")
        for grant in grants:
            self.sql(f"GRANT {grant} TO {name}")
        return self.server.url(f"search_path={self.search_path}", user=name, password=password)

    def drop(self) -> None:
        self.server.start()
        self.sql(f"DROP SCHEMA {self.name} CASCADE")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all tests of a process. HANDRAIL_REQUIRE_PEERS=1 turns the skip into a failure."""
    programs = binaries()
    if programs is None:
        reason = "PostgreSQL is not installed: initdb is neither on the path nor under /usr/lib/postgresql"
        if os.environ.get("HANDRAIL_REQUIRE_PEERS") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    server = PostgresServer(programs)
    yield server
    server.close()


@pytest.fixture
def schema(postgres: PostgresServer) -> Iterator[Schema]:
    """A schema of the test's own, with the clock of the server."""
    made = Schema(postgres)
    yield made
    made.drop()
