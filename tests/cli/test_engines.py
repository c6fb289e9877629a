"""Wrong set-ups of what replicas share: `handrail check` and `doctor` say what is wrong, and what would be right."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cli_runs import handrail
from postgres_servers import Schema
from redis_servers import MEMORY_ONLY, ON_DISK, RedisServer, free_port, require_redis

SECRET = f"hunter2-{secrets.token_hex(8)}"
Place = Callable[[ExitStack], str]
Database = Callable[[Schema], str]


def redis(*options: str, user: str = "", acl: str = "") -> Place:
    """A server with these options; the URL has a password, that of the server or a wrong one."""

    def start(stack: ExitStack) -> str:
        require_redis()
        server = RedisServer(*options)
        stack.callback(server.stop)
        if acl:
            server.command("ACL", "SETUSER", "limited", "on", f">{SECRET}", *acl.split())
        return server.url(f"limited:{SECRET}" if acl else user)

    return start


def read_only_replica(stack: ExitStack) -> str:
    master = RedisServer(*ON_DISK)
    stack.callback(master.stop)
    replica = RedisServer(*ON_DISK, "--replicaof", f"127.0.0.1 {master.port}", "--repl-diskless-sync-delay", "0")
    stack.callback(replica.stop)
    return replica.url()


@contextmanager
def speaking_http() -> Iterator[int]:
    """Something else that listens at the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def not_redis(stack: ExitStack) -> str:
    return f"redis://:{SECRET}@127.0.0.1:{stack.enter_context(speaking_http())}"


def nothing_listens(scheme: str) -> Place:
    return lambda _: f"{scheme}://user:{SECRET}@127.0.0.1:{free_port()}/0"


WRONG: dict[str, tuple[Place, str]] = {
    "redis: wrong password": (redis("--requirepass", "right", user=f":{SECRET}"), "password"),
    "redis: no password": (redis("--requirepass", SECRET), "password"),
    "redis: a user without a command": (
        redis(acl="~* &* +@all -evalsha"),
        "EVALSHA",
    ),
    "redis: a user of other keys": (
        redis(acl="~other:* &* +@all"),
        "may not",
    ),
    "redis: evicts": (redis(*ON_DISK, "--maxmemory-policy", "allkeys-lru"), "noeviction"),
    "redis: no file": (redis(*MEMORY_ONLY), "append"),
    "redis: synced each second": (redis("--appendonly", "yes", "--appendfsync", "everysec"), "appendfsync"),
    "redis: a replica": (read_only_replica, "replica"),
    "redis: nothing listens": (nothing_listens("redis"), "refused"),
    "redis: no such host": (lambda _: f"redis://:{SECRET}@nowhere.invalid:6379", "nowhere.invalid"),
    "redis: no such database": (lambda stack: redis(*ON_DISK)(stack).replace("/0", "/99"), "last slash"),
    "redis: something else listens": (not_redis, "not Redis"),
    "redis: TLS where there is none": (
        lambda stack: redis(*ON_DISK)(stack).replace("redis://", f"rediss://:{SECRET}@"),
        "TLS",
    ),
}
WRONG_DATABASES: dict[str, tuple[Database, str]] = {
    "nothing listens": (
        lambda schema: schema.server.url(port=free_port(), password=SECRET),
        "refused",
    ),
    "no such host": (lambda _: f"postgresql://shop:{SECRET}@nowhere.invalid/shop", "nowhere.invalid"),
    "wrong password": (lambda schema: schema.server.url(password=SECRET), "password"),
    "no such role": (lambda schema: schema.server.url(user="missing", password=SECRET), "password"),
    "no such database": (lambda schema: schema.server.url().replace("/postgres", "/missing"), "missing"),
    "may not make tables": (lambda schema: schema.role(), "handrail audit prepare"),
    "no TLS": (lambda schema: schema.url + "&sslmode=require", "SSL"),
    "loses the last commits": (lambda schema: schema.url + "&options=-csynchronous_commit=off", "synchronous_commit"),
    "a setting that is none": (lambda schema: schema.url + "&sslmod=require", "sslmod"),
}


def says(words: tuple[str, ...], home: Path, expected: str, password: str) -> None:
    done = handrail(*words, home=home)
    text = done.stdout + done.stderr
    assert expected in text
    assert SECRET not in text
    assert password not in text
    assert "Traceback" not in text


@pytest.mark.parametrize("command", ["check", "doctor"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_redis_is_named(case: str, command: str, tmp_path: Path) -> None:
    start, expected = WRONG[case]
    with ExitStack() as stack:
        place = start(stack)
        says(("doctor", place) if command == "doctor" else ("check", "--store", place), tmp_path, expected, SECRET)


@pytest.mark.parametrize("command", ["check", "doctor"])
@pytest.mark.parametrize("case", WRONG_DATABASES)
def test_a_wrong_postgres_is_named(case: str, command: str, tmp_path: Path, schema: Schema) -> None:
    url, expected = WRONG_DATABASES[case]
    place = url(schema)
    words = ("doctor", place) if command == "doctor" else ("check", "--audit", place)
    says(words, tmp_path, expected, schema.server.password)
