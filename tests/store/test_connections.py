"""Connections are ours, whatever a role or database is set to, and never hang."""

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

from everbeat.store import inspect, migrating, tasks, workers
from everbeat.store.database import Database
from everbeat.store.moments import EARLIEST, LATEST
from everbeat.store.session import Session
from everbeat.store.target import Target
from tests.store.conftest import Hands
from tests.worker.proxy import Proxy


@contextmanager
def database_with(url: str, settings: str = "", creation: str = "") -> Iterator[Target]:
    """A database of its own."""
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
def hands_in(target: Target) -> Iterator[Hands]:
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        hands = Hands(target, connection)
        hands.supervisor("s1", "w1")
        yield hands
        hands.database.close()


@pytest.mark.parametrize(
    ("settings", "creation"),
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
)
def test_a_task_lives_whatever_the_database_is_set_to(
    database_url: str, settings: str, creation: str
) -> None:
    with database_with(database_url, settings, creation) as target, hands_in(target) as hands:
        before = datetime.now(UTC)
        hands.send("écho 日本", queue="é")
        (claimed,) = hands.claim(names=["écho 日本"])
        assert (claimed.name, claimed.queue) == ("écho 日本", "é")
        assert abs((claimed.enqueued_at - before).total_seconds()) < 5
        assert hands.start(claimed) == ["started"]
        assert hands.settle(claimed, result='"日本"'.encode()) == "COMPLETED"
        assert hands.run(tasks.outcomes([claimed.id]))[claimed.id].result == '"日本"'


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ("9999-12-31 23:59+00", datetime(9999, 12, 31, 23, 59, tzinfo=UTC)),
        ("9999-12-31 23:59-11", LATEST),
        ("infinity", LATEST),
        ("-infinity", EARLIEST),
        ("0044-03-15 BC", EARLIEST),
    ],
)
def test_a_moment_that_python_cannot_hold_keeps_nobody_from_being_claimed(
    database_url: str, stored: str, read: datetime
) -> None:
    """Whoever writes to the table may write what PostgreSQL can hold, and reads it in the time zone of the role."""
    with database_with(database_url, "TimeZone = 'Asia/Tokyo'") as target, hands_in(target) as hands:
        for _ in range(2):
            hands.send()
        hands.connection.execute("update everbeat.tasks set sent_at = %s", [stored])
        if read is not EARLIEST:
            hands.connection.execute("update everbeat.tasks set good_until = %s", [stored])
        claimed = hands.claim(limit=2)
        assert len(claimed) == 2
        assert all(hands.start(each) == ["started"] for each in claimed)
        assert [task.sent_at for task in hands.run(inspect.tasks(limit=10))] == [read, read]


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
def test_claims_side_by_side_do_not_conflict_under_a_strict_isolation(
    database_url: str, isolation: str
) -> None:
    """In the role's isolation a row that another claim has just taken is an error, and not skipped."""
    settings = f"default_transaction_isolation = '{isolation}'"
    with database_with(database_url, settings) as target, target.connect("everbeat test") as connection:
        row = connection.execute("show transaction_isolation").fetchone()
        assert row == ("read committed",)


def test_an_idle_session_is_kept_whatever_the_role_says(database_url: str) -> None:
    """Otherwise a session lock is lost every so often, and an observer that loses sessions judges nobody."""
    with (
        database_with(database_url, "idle_session_timeout = '200ms'") as target,
        target.connect("everbeat test") as connection,
    ):
        time.sleep(0.5)  # idle
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_list_holds_nulls_whatever_the_role_says(database_url: str) -> None:
    """A failure without a retry has no moment of its next one, and stands in one list with others that do."""
    with database_with(database_url, "array_nulls = off") as target, hands_in(target) as hands:
        claimed = hands.running()
        assert hands.settle(claimed, "FAILED", error=b'{"code": "OOPS"}') == "FAILED"


@pytest.mark.parametrize(
    "blow", [lambda proxy: proxy.hold_reply(b"workers"), Proxy.stall], ids=["reply", "line"]
)
async def test_a_reply_that_never_comes_is_not_waited_for_for_ever(
    hands: Hands, blow: Callable[[Proxy], None]
) -> None:
    """Nobody tells when a pooler or firewall forgets a connection; a worker would hold its tasks, and wait."""
    async with Proxy.before(hands.target) as proxy:
        session = Session(proxy.target, "everbeat test session", statement_timeout_ms=500)
        assert await session.run(workers.beat_worker("w1")) is True
        blow(proxy)
        asking = asyncio.ensure_future(session.run(workers.beat_worker("w1")))
        await asyncio.sleep(1.0)  # the reply does not come
        assert not asking.done()
        proxy.mend_for_new_lines()
        async with asyncio.timeout(20):
            assert await asking is True
        await session.drop()


async def test_both_doors_agree_on_what_is_between(hands: Hands) -> None:
    session, database = Session(hands.target, "everbeat test session"), Database(hands.target)
    await session.run(workers.beat_worker("w1"))
    assert session.pooled is False
    assert await database.arun(workers.beat_worker("w1")) is True
    await session.drop()
    await database.aclose()
