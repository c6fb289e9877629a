"""What only PostgreSQL shows of a store: versions beside each other, lost connections, rights, and its texts."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from faults import until
from handrail import stores
from handrail.stores import Append, Put, StoreError, postgres as databases
from handrail.stores.postgres import MIGRATIONS, PostgresStore
from patience import PATIENCE
from postgres_servers import PostgresServer, Schema
from requirements import requirement


@asynccontextmanager
async def opened(url: str, name: str = "") -> AsyncIterator[PostgresStore]:
    store = stores.open(url, name=name)
    assert isinstance(store, PostgresStore)
    try:
        yield store
    finally:
        await store.close()


async def test_a_url_opens_a_store_that_machines_share_and_says_what_is_there(schema: Schema) -> None:
    async with opened(schema.url) as store:
        assert store.supports == {"processes", "replicas", "postgres"} and store.durable and not store.path
        report = await store.report()
        assert report.engine.startswith("PostgreSQL 1") and report.losses == ()
        assert report.place == f"postgresql://127.0.0.1:{schema.server.port}/postgres"
        assert schema.server.password not in repr(store) + repr(report) + repr(store.database)
    async with opened(schema.url.replace("postgresql://", "postgres://")) as store:
        assert await store.put("a", b"1")


SECRETS = ("hunter2", "hun/ter2", "1/2", "hun#ter2", "hun?ter2", "h@nter2")


@pytest.mark.parametrize("password", SECRETS)
async def test_a_url_that_cannot_be_read_repeats_no_part_of_a_password(password: str) -> None:
    for host in ("db:x", "db", "[::1"):
        try:
            store = stores.open(f"postgresql://shop:{password}@{host}/shop")
        except ValueError as problem:
            text = str(problem)
            assert text.startswith("the URL of PostgreSQL cannot be read: it has to be postgresql://USER:PASSWORD@")
        else:
            text = repr(store)
            assert text == f"PostgresStore('postgresql://{host}/shop')" and password in ("hunter2", "h@nter2")
        assert not any(part in text for part in (password, "hun", "nter2", "ter2", "1/2"))


WRONG: dict[str, tuple[Callable[[Schema], str], str]] = {
    "password": (
        lambda schema: schema.server.url(password="hunter2"),
        "refuses the user or the password: password auth",
    ),
    "user": (lambda schema: schema.server.url(user="nobody2"), "refuses the user or the password: password auth"),
    "database": (lambda schema: schema.server.url().replace("/postgres", "/shop"), 'database "shop" does not exist'),
    "port": (lambda schema: schema.server.url(port=1), "it cannot be reached: connection refused"),
    "host": (lambda schema: "postgresql://u:hunter2@no-such-host.invalid/db", "it cannot be reached: "),
    "right": (lambda schema: schema.role(), "the tables are not there, or older than this version"),
    "standby": (lambda schema: f"{schema.url}&default_transaction_read_only=on", "it takes no writes: a standby"),
    "fsync": (lambda schema: f"{schema.url}&synchronous_commit=off", "synchronous_commit is off there"),
    "setting": (lambda schema: f"{schema.url}&no_such=1", 'unrecognized configuration parameter "no_such"'),
}


@pytest.mark.parametrize("mistake", WRONG)
async def test_what_is_wrong_with_a_database_is_said_without_a_secret(mistake: str, schema: Schema) -> None:
    url, expected = WRONG[mistake][0](schema), WRONG[mistake][1]
    async with opened(url) as store:
        with pytest.raises(StoreError) as refusal:
            await store.put("a", b"1")
        assert expected in str(refusal.value)
        assert str(refusal.value).startswith("postgresql://")
    for secret in ("hunter2", schema.server.password, url.partition("//")[2].partition("@")[0]):
        assert secret not in str(refusal.value) + store.trouble


# Versions


async def test_processes_that_open_a_new_schema_at_once_make_its_tables_once(schema: Schema) -> None:
    opening = [stores.open(schema.url) for _ in range(8)]
    assert await asyncio.gather(*(store.add("n") for store in opening for _ in range(5))) is not None
    assert await opening[0].get("n") == b"40"
    for store in opening:
        await store.close()
    assert schema.sql("SELECT version, usable_from FROM handrail_schema") == [[str(len(MIGRATIONS)), "1"]]


@pytest.mark.parametrize(("usable_from", "is_refused"), [(1, False), (2, True)])
async def test_the_version_before_goes_on_beside_the_next_and_no_older_one(
    usable_from: int, is_refused: bool, schema: Schema
) -> None:
    async with opened(schema.url) as store:
        await store.put("a", b"1")
    schema.sql(f"UPDATE handrail_schema SET version = {len(MIGRATIONS) + 1}, usable_from = {usable_from}")
    async with opened(schema.url) as store:
        if not is_refused:
            assert await store.get("a") == b"1"
            return
        with pytest.raises(StoreError, match=r"its tables are of a newer Handrail \(version 2, for 2 and newer\)"):
            await store.get("a")
    assert schema.sql("SELECT version FROM handrail_schema") == [[str(len(MIGRATIONS) + 1)]]


# Connections


def connections(schema: Schema, name: str) -> int:
    rows = schema.sql(f"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'handrail {name}'")
    return int(rows[0][0])


async def test_many_calls_share_a_few_connections(schema: Schema) -> None:
    async with opened(schema.url, name="crowd") as store:
        await asyncio.gather(*(store.put(f"k:{i}", b"") for i in range(200)))
        assert 1 <= connections(schema, "crowd") <= databases.MAX_CONNECTIONS
        async with store.subscribe("t"):
            await until(lambda: connections(schema, "crowd") == databases.MAX_CONNECTIONS + 1, "one more listens")
    await until(lambda: connections(schema, "crowd") == 0, "all are closed")


async def test_a_cancelled_call_leaves_its_answer_to_no_other(schema: Schema) -> None:
    async with opened(schema.url) as store:
        await store.commit([Put(f"k:{i}", b"%d" % i) for i in range(10)])
        chance = random.Random(7)
        for _ in range(30):
            calls = {i: asyncio.ensure_future(store.get(f"k:{i}")) for i in range(10)}
            await asyncio.sleep(chance.uniform(0, 0.002))
            for i in chance.sample(range(10), 4):
                calls[i].cancel()
            done = await asyncio.gather(*calls.values(), return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) or each == b"%d" % i for i, each in enumerate(done))


async def test_a_cancelled_commit_is_done_whole_or_not_at_all(schema: Schema) -> None:
    chance = random.Random(7)
    async with opened(schema.url) as store:
        for i in range(40):
            changes: list[Put | Append] = [
                Put(f"a:{i:02}", b""),
                Append(f"log:{i:02}", b"", keep=1),
                Put(f"b:{i:02}", b""),
            ]
            call = asyncio.ensure_future(store.commit(changes))
            await asyncio.sleep(chance.uniform(0, 0.006))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await store.put("next", b"")
        first, second = [[key[2:] for key, _ in await store.scan(prefix)] for prefix in ("a:", "b:")]
        logs = [f"{i:02}" for i in range(40) if await store.read(f"log:{i:02}")]
        assert first == second == logs


async def test_a_change_that_fails_undoes_itself_and_no_other(schema: Schema) -> None:
    async with opened(schema.url) as store:
        calls = [
            store.put("first", b"1"),
            store.commit([Put("half", b"1"), Append("\ud800", b"1", keep=1)]),
            store.commit([Put("first", b"2", if_absent=True), Put("half", b"2")]),
            store.put("last", b"1"),
        ]
        done = [(await asyncio.gather(call, return_exceptions=True))[0] for call in calls]
        assert [type(each) if isinstance(each, Exception) else each for each in done] == [
            True,
            UnicodeEncodeError,
            False,
            True,
        ]
        assert await store.scan("") == [("first", b"1"), ("last", b"1")]


@requirement("P-20", everywhere=True)
async def test_p20_after_a_restart_everything_goes_on_by_itself(schema: Schema, postgres: PostgresServer) -> None:
    async with opened(schema.url) as store, store.subscribe("t") as messages:
        await store.publish("t", b"before")
        assert await anext(messages) == b"before"
        await asyncio.to_thread(postgres.kill)
        tries = [store.put("a", b"1") for _ in range(databases.MAX_CONNECTIONS + 1)]
        refused = await asyncio.gather(*tries, return_exceptions=True)
        assert all(isinstance(each, StoreError) for each in refused), refused
        assert store.trouble
        await asyncio.to_thread(postgres.start)
        assert await store.put("a", b"2") and not store.trouble
        async with asyncio.timeout(PATIENCE):
            await store.publish("t", b"after")
            assert await anext(messages) == b"after"


@requirement("P-20", everywhere=True)
async def test_p20_a_frozen_server_is_not_waited_for_and_takes_no_answer_with_it(
    schema: Schema, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(schema.url) as store:
        await store.put("a", b"1")
        monkeypatch.setattr(databases, "COMMAND_SECONDS", 0.5)
        monkeypatch.setattr(databases, "CONNECT_SECONDS", 0.5)
        postgres.freeze()
        try:
            async with asyncio.timeout(PATIENCE):
                tries = (store.put("a", b"%d" % i) for i in range(20))
                frozen = await asyncio.gather(*tries, return_exceptions=True)
        finally:
            postgres.thaw()
        assert all(isinstance(each, StoreError) and "did not answer in time" in str(each) for each in frozen)
        monkeypatch.undo()
        assert await store.put("a", b"new")
        assert await store.get("a") == b"new"


async def test_a_listener_that_has_missed_messages_is_told_so(schema: Schema, postgres: PostgresServer) -> None:
    async with opened(schema.url) as store, store.subscribe("t") as messages:
        await store.publish("t", b"first")
        assert await anext(messages) == b"first"
        # As after a minute without a connection: numbers that were used, and rows that were swept.
        schema.sql("BEGIN; UPDATE handrail_topics SET last = last + 5; DELETE FROM handrail_messages; COMMIT")
        with pytest.raises(StoreError, match="some messages are gone"):
            await anext(messages)


async def test_messages_reach_other_stores_in_the_order_in_which_they_were_published(schema: Schema) -> None:
    async with opened(schema.url) as one, opened(schema.url) as other, other.subscribe("t") as messages:
        sent = [b"%d" % i for i in range(50)]
        await asyncio.gather(*(one.publish("t", each) for each in sent))
        assert [await anext(messages) for _ in sent] == sent


async def test_without_prepared_statements_as_behind_a_pooler_it_is_the_same(schema: Schema) -> None:
    async with opened(f"{schema.url}&statement_cache_size=0") as store:
        assert await store.put("a", b"1", if_absent=True) and not await store.put("a", b"2", if_absent=True)
        assert await store.add("n", 3) == 3
        assert await store.append("log", b"1", keep=3) == 1
        async with store.subscribe("t") as messages:
            await store.publish("t", b"1")
            assert await anext(messages) == b"1"


FORK = """
import asyncio, os, sys
from handrail import stores
async def main():
    store = stores.open(sys.argv[1])
    await store.put("a", b"1")
    child = os.fork()
    if not child:
        try:
            await store.get("a")
        except Exception as problem:
            print(type(problem).__name__, problem, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(await store.get("a"), flush=True)
    await store.close()
asyncio.run(main())
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on(schema: Schema) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FORK, schema.url]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True)
    refusal, answer = done.stdout.splitlines()
    assert refusal.startswith("StoreError this store was opened by process") and answer == "b'1'"


def test_a_missing_package_is_named_with_the_command_that_installs_it(schema: Schema) -> None:
    code = f"import sys; sys.modules['asyncpg'] = None\nfrom handrail import stores\nstores.open({schema.url!r})"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert "StoreError: store: postgres needs the package asyncpg: pip install 'handrail[postgres]'" in done.stderr


@pytest.fixture(scope="module")
def certified(postgres: PostgresServer) -> Iterator[tuple[PostgresServer, Path]]:
    """A server with TLS, and the certificate that its own is signed by: itself, for another name than its address."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    start = datetime(2026, 1, 1, tzinfo=UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=36_500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    server = PostgresServer(postgres.programs)
    server.use_certificate(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
    yield server, server.folder / "server.crt"
    server.close()


async def test_tls_is_used_and_a_name_that_does_not_match_is_named(certified: tuple[PostgresServer, Path]) -> None:
    server, authority = certified
    verified = f"sslmode=verify-full&sslrootcert={authority}"
    async with opened(server.url(verified).replace("127.0.0.1", "localhost")) as store:
        assert await store.put("a", b"1")
        rows = server.sql(
            "SELECT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'handrail'"
        )
        assert rows == [["t"]]
    async with opened(server.url(verified)) as store:
        with pytest.raises(StoreError, match=r"certificate is not valid for '127\.0\.0\.1'"):
            await store.put("a", b"1")
    async with opened(server.url("sslmode=verify-full")) as store:
        with pytest.raises(StoreError, match=r"an option of its URL cannot be used|root certificate"):
            await store.put("a", b"1")
