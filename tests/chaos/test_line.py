"""The line applies its faults to a real conversation with PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.errors import DatabaseUnreachable
from everbeat.store import migrating, tasks
from everbeat.store.database import Database
from everbeat.store.plan import run_plan
from everbeat.store.target import Target
from tests.chaos.line import Line, Lines


@pytest.fixture
def lines() -> Iterator[Lines]:
    made = Lines()
    yield made
    made.close()


@pytest.fixture
def line(lines: Lines, database_url: str, schema: str) -> Line:
    target = Target(database_url, schema)
    with target.connect("line test") as connection:
        migrating.migrate(connection, target)
    return lines.open(database_url)


def new_task() -> tasks.NewTask:
    return tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")


def stored(url: str, schema: str) -> set[UUID]:
    with psycopg.connect(url) as connection:
        query = sql.SQL("select id from {}.tasks").format(sql.Identifier(schema))
        return {row[0] for row in connection.execute(query)}


@pytest.mark.parametrize("before", [0, 8], ids=["new statement", "prepared statement"])
def test_the_line_loses_the_reply_to_a_write_after_its_commit(
    line: Line, database_url: str, schema: str, before: int
) -> None:  # L commit unknown
    target = Target(line.url, schema)
    impatient = Database(target, patience_s=0)
    for _ in range(before):
        impatient.run(tasks.insert_task(new_task(), channel=target.channel))
    line.to_lose["send"] = 1
    task = new_task()
    with pytest.raises(DatabaseUnreachable):
        impatient.run(tasks.insert_task(task, channel=target.channel))
    assert task.id in stored(database_url, schema)
    assert line.lost == {"send": 1}
    # A repeated send gets the first reply.
    assert run_plan(Database(target), tasks.send_task(task, channel=target.channel)) == task.id
    assert len(stored(database_url, schema)) == before + 1


def test_the_line_loses_no_reply_of_other_verbs_or_failed_writes(line: Line, schema: str) -> None:
    target = Target(line.url, schema)
    line.to_lose["settle"] = 1
    Database(target, patience_s=0).run(tasks.insert_task(new_task(), channel=target.channel))
    line.to_lose["send"] = 1
    gone = Target(line.url, "no_such_schema")
    with pytest.raises(Exception, match="no_such_schema"):
        Database(gone, patience_s=0).run(tasks.insert_task(new_task(), channel=target.channel))
    assert line.lost == {}
    assert line.to_lose["send"] == 1


def test_a_cut_line_rejects_connections_until_it_is_joined(line: Line, lines: Lines) -> None:
    with psycopg.connect(line.url, autocommit=True) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
        lines.do(line.cut)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(line.url)
    lines.do(line.join)
    with psycopg.connect(line.url) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_stalled_line_delivers_late(line: Line, lines: Lines, database_url: str, schema: str) -> None:
    target = Target(line.url, schema)
    connection = psycopg.connect(line.url, autocommit=True)
    connection.execute("select 1")
    lines.do(line.stall)
    query = sql.SQL("delete from {}.tasks").format(sql.Identifier(schema))
    connection.pgconn.send_query(query.as_bytes(connection))
    connection.pgconn.flush()
    connection.close()
    # The client is gone, and its statement is still running.
    task = new_task()
    Database(Target(database_url, schema)).run(tasks.insert_task(task, channel=target.channel))
    lines.do(line.flow)
    deadline = time.monotonic() + 10
    while task.id in stored(database_url, schema):
        assert time.monotonic() < deadline, "held data never arrived"
        time.sleep(0.02)  # the database sends no event when the statement arrives


def test_a_delayed_line_is_slow(line: Line) -> None:
    with psycopg.connect(line.url, autocommit=True) as connection:
        line.delay_s = 0.1
        began = time.monotonic()
        connection.execute("select 1")
        assert time.monotonic() - began >= 0.2
