"""Reading an audit log in PostgreSQL from outside, a few rows at a time, by a cursor of the server.

It needs the right to SELECT and no other, and sees the log as it was when a reading began. Each reading has a loop and
a connection of its own: it is for a thread in which no loop runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import asyncpg

from handrail.audit.format import TrailError
from handrail.stores.postgres import CONNECT_SECONDS, DATABASE_ERRORS, PostgresDatabase, PostgresUrl, close_connection

if TYPE_CHECKING:
    from asyncpg import Connection, Record
    from asyncpg.cursor import Cursor

__all__ = ["PostgresLog"]

FETCH_ROWS = 100
FETCH_SECONDS = 30.0


class PostgresLog:
    """The audit log in a database. Numbers are positions: they grow in the order in which records were inserted."""

    damage = ""  # what can be read of a table is whole

    def __init__(self, url: str) -> None:
        try:
            self._url = PostgresUrl.parse(url)
        except ValueError as problem:
            raise TrailError(str(problem)) from None
        self._database = PostgresDatabase(self._url, durable=False, application="handrail audit")
        self.name = self._url.name

    def lines(self, after: int = 0) -> Iterator[tuple[str, bytes]]:
        """Each record, in the order of all writers, with where it stands."""
        sql = "SELECT chain, number, line FROM handrail_audit WHERE position > $1 ORDER BY position"
        for chain, number, line in self._rows(sql, after):
            yield f"chain {chain}, record {number}", line + b"\n"

    def chains(self) -> Iterator[tuple[str, Iterator[tuple[str, bytes]]]]:
        """Each writer's chain, with its records in their order."""
        rows = self._rows("SELECT chain, number, line FROM handrail_audit ORDER BY chain, number")
        for chain, group in groupby(rows, itemgetter(0)):
            yield chain, ((f"chain {chain}, record {number}", line + b"\n") for _, number, line in group)

    @property
    def span(self) -> tuple[int, int]:
        """The positions of the first record and the last; 0 where there is none."""
        ((first, last),) = self._rows("SELECT min(position), max(position) FROM handrail_audit")
        return first or 0, last or 0

    def newest_first(self, before: int = 0) -> Iterator[tuple[int, bytes]]:
        """Each record with its position, down from the last before `before`; not checked."""
        sql = "SELECT position, line FROM handrail_audit WHERE position < $1 ORDER BY position DESC"
        return ((position, line) for position, line in self._rows(sql, before or 1 << 62))

    def salvage(self) -> Iterator[bytes]:
        """Yield all records: a database that is damaged is mended with its own tools."""
        return (line for _, line in self.lines())

    def _rows(self, sql: str, *args: Any) -> Iterator[Record]:
        with asyncio.Runner() as runner:
            try:
                db, cursor = runner.run(self._open(sql, args))
                try:
                    while rows := runner.run(cursor.fetch(FETCH_ROWS, timeout=FETCH_SECONDS)):
                        yield from rows
                finally:
                    runner.run(close_connection(db))
            except asyncpg.UndefinedTableError:
                raise TrailError(f"{self.name}: there is no audit log: no server has used it yet") from None
            except (*DATABASE_ERRORS, ValueError) as problem:
                raise TrailError(str(self._database.error(problem))) from None

    async def _open(self, sql: str, args: tuple[Any, ...]) -> tuple[Connection[Record], Cursor[Record]]:
        db = await asyncpg.connect(
            self._url.dsn, timeout=CONNECT_SECONDS, statement_cache_size=self._url.statement_cache_size
        )
        try:
            await db.transaction(isolation="repeatable_read", readonly=True).start()
            return db, await db.cursor(sql, *args, timeout=FETCH_SECONDS)
        except BaseException:
            db.terminate()
            raise
