"""Connections override the settings of the role and the database, and never hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo, sql

from everbeat.store import inspection, migrating, tasks, workers
from everbeat.store.database import Database
from everbeat.store.session import Session
from everbeat.store.statement import EARLIEST, LATEST
from everbeat.store.target import Target
from tests.store.conftest import StoreHarness
from tests.variants import every_nth_quick
from tests.worker.proxy import Proxy


@contextmanager
def database_with(url: str, settings: str = "", creation: str = "") -> Iterator[Target]:
    """Create a separate database."""
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'create database "{name}" {creation}'.encode())
        if settings:
            connection.execute(f'alter database "{name}" set {settings}'.encode())
        try:
            yield Target.parse(conninfo.make_conninfo(url, dbname=name))
        finally:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@contextmanager
def harness_in(target: Target) -> Iterator[StoreHarness]:
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        db = StoreHarness(target, connection)
        db.supervisor("s1", "w1")
        yield db
        db.database.close()


@pytest.mark.parametrize(
    ("settings", "creation"),
    every_nth_quick(
        2,
        [
            ("datestyle = 'SQL, DMY'", ""),
            ("datestyle = 'German'", ""),
            ("timezone = 'Asia/Kathmandu'", ""),
            ("timezone = '<+03:17>-03:17'", ""),
            ("standard_conforming_strings = off", ""),
            ("default_transaction_isolation = 'serializable'", ""),
            ("default_transaction_isolation = 'repeatable read'", ""),
            ("synchronous_commit = off", ""),
            ("search_path = 'nowhere'", ""),
            ("client_encoding = 'LATIN1'", ""),
            ("", "encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'"),
        ],
    ),
)
def test_a_task_completes_under_any_settings_of_the_database(
    database_url: str, settings: str, creation: str
) -> None:
    with database_with(database_url, settings, creation) as target, harness_in(target) as db:
        before = datetime.now(UTC)
        db.send("écho 日本", queue="é")
        (claimed,) = db.claim(names=["écho 日本"])
        assert (claimed.name, claimed.queue) == ("écho 日本", "é")
        assert abs((claimed.enqueued_at - before).total_seconds()) < 5
        assert db.start(claimed) == ["started"]
        assert db.settle(claimed, result='"日本"'.encode()) == "COMPLETED"
        assert db.run(tasks.outcomes([claimed.id]))[claimed.id].result == '"日本"'


@pytest.mark.parametrize(
    ("stored", "read"),
    every_nth_quick(
        2,
        [
            ("9999-12-31 23:59+00", datetime(9999, 12, 31, 23, 59, tzinfo=UTC)),
            ("9999-12-31 23:59-11", LATEST),
            ("infinity", LATEST),
            ("-infinity", EARLIEST),
            ("0044-03-15 BC", EARLIEST),
        ],
    ),
)
def test_a_claim_returns_a_task_with_a_moment_that_python_cannot_represent(
    database_url: str, stored: str, read: datetime
) -> None:
    """Other programs can write any moment that PostgreSQL accepts, and the session has the time zone of the role."""
    with database_with(database_url, "TimeZone = 'Asia/Tokyo'") as target, harness_in(target) as db:
        for _ in range(2):
            db.send()
        db.connection.execute("update everbeat.tasks set sent_at = %s", [stored])
        if read is not EARLIEST:
            db.connection.execute("update everbeat.tasks set good_until = %s", [stored])
        claimed = db.claim(limit=2)
        assert len(claimed) == 2
        assert all(db.start(each) == ["started"] for each in claimed)
        assert [task.sent_at for task in db.run(inspection.tasks(limit=10))] == [read, read]


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
def test_a_connection_uses_read_committed_under_any_isolation_of_the_role(
    database_url: str, isolation: str
) -> None:
    """With the role's isolation, a row that another claim has just taken would raise an error instead of being skipped."""
    settings = f"default_transaction_isolation = '{isolation}'"
    with database_with(database_url, settings) as target, target.connect("everbeat test") as connection:
        row = connection.execute("show transaction_isolation").fetchone()
        assert row == ("read committed",)


def test_a_connection_disables_the_idle_session_timeout_of_the_role(database_url: str) -> None:
    """Otherwise session locks are lost at random, and an observer that loses sessions reports no deaths."""
    with (
        database_with(database_url, "idle_session_timeout = '200ms'") as target,
        target.connect("everbeat test") as connection,
    ):
        time.sleep(0.5)  # idle
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_connection_enables_array_nulls_against_the_setting_of_the_role(database_url: str) -> None:
    """A failure without a retry has no next time, and is in one array with failures that have one."""
    with database_with(database_url, "array_nulls = off") as target, harness_in(target) as db:
        claimed = db.running()
        assert db.settle(claimed, "FAILED", error=b'{"code": "OOPS"}') == "FAILED"


@pytest.mark.parametrize(
    "blow",
    [lambda proxy: proxy.hold_reply(b"workers"), pytest.param(Proxy.stall, marks=pytest.mark.long)],
    ids=["reply", "line"],
)
async def test_a_session_repeats_a_statement_whose_reply_never_arrives(
    db: StoreHarness, blow: Callable[[Proxy], None]
) -> None:
    """A pooler or firewall can drop a connection silently; a worker would hold its tasks and wait."""
    async with Proxy.before(db.target) as proxy:
        session = Session(proxy.target, "everbeat test session", statement_timeout_ms=500)
        assert await session.run(workers.beat_worker("w1")) is True
        blow(proxy)
        asking = asyncio.ensure_future(session.run(workers.beat_worker("w1")))
        await asyncio.sleep(1.0)  # the reply does not come
        assert not asking.done()
        proxy.resume_new_connections()
        async with asyncio.timeout(20):
            assert await asking is True
        await session.drop()


async def test_a_session_and_a_database_agree_that_there_is_no_pooler(db: StoreHarness) -> None:
    session, database = Session(db.target, "everbeat test session"), Database(db.target)
    await session.run(workers.beat_worker("w1"))
    assert session.pooled is False
    assert await database.arun(workers.beat_worker("w1")) is True
    await session.drop()
    await database.aclose()
