"""Which backends are terminated on the server: those of dead trees, and those that an earlier connection of a session left."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import Connection, sql
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, ExecStatus

from everbeat.store import migrating, retention, workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.store.conftest import StoreHarness


@contextmanager
def session_of(target: Target, tree: str, *, user: str = "postgres") -> Iterator[Connection[Any]]:
    """Open a session of a tree, idle in a transaction."""
    name = f"everbeat-{tree} worker 1.1"
    connection = psycopg.connect(make_conninfo(target.url, user=user), application_name=name)
    try:
        connection.execute("select 1")
        with psycopg.connect(target.url, autocommit=True) as observer:
            waits = "select from pg_stat_activity where pid = %s and wait_event_type = 'Client'"
            while observer.execute(waits, [connection.info.backend_pid]).fetchone() is None:
                pass
        yield connection
    finally:
        connection.close()


def end_remaining(db: StoreHarness) -> list[str]:
    """End the remaining sessions of dead trees, as supervisors do; return their names."""
    found = [each for each in db.run(retention.remaining_sessions()) if each.is_left]
    ended = db.run(retention.end_sessions([each for each in found if each.may_end]))
    return [each.session for each in found if each.pid in ended]


@contextmanager
def unread_by(connection: Connection[Any], db: StoreHarness, row: str = "w1") -> Iterator[None]:
    """Run a statement that locks a row and whose reply stays unread until the block ends."""
    lock = "select repeat('x', 4000000) from (select 1 from {schema}.workers where id = '%s' for update) row, generate_series(1, 3)"
    connection.pgconn.send_query(db.plain(lock % row))
    waits = "select from pg_stat_activity where pid = %s and wait_event = 'ClientWrite'"
    while db.connection.execute(waits, [connection.info.backend_pid]).fetchone() is None:
        pass
    yield
    while connection.pgconn.get_result() is not None:
        pass


@contextmanager
def partly_sent_by(connection: Connection[Any], db: StoreHarness) -> Iterator[None]:
    """Send a statement that locks a row, and the end of its request only when the block ends."""
    lock = db.plain("select from {schema}.workers where id = 'w1' for update")
    connection.pgconn.enter_pipeline_mode()
    connection.pgconn.send_query_params(lock, [])
    connection.pgconn.flush()
    waits = "select from pg_stat_activity where pid = %s and state = 'active' and wait_event = 'ClientRead'"
    while db.connection.execute(waits, [connection.info.backend_pid]).fetchone() is None:
        pass
    yield
    if connection.pgconn.status == ConnStatus.OK:
        connection.pgconn.pipeline_sync()
    while connection.pgconn.status == ConnStatus.OK:
        result = connection.pgconn.get_result()
        if result is not None and result.status == ExecStatus.PIPELINE_SYNC:
            connection.pgconn.exit_pipeline_mode()
            break


def is_open(connection: Connection[Any]) -> bool:
    with suppress(psycopg.OperationalError):
        connection.execute("select 1")
    return not connection.broken


def test_only_sessions_of_dead_trees_are_ended(db: StoreHarness) -> None:  # J14
    for tree in ("alive", "left", "back"):
        db.supervisor(tree)
    db.run(workers.end_supervisor("s1", how="age"))
    db.run(workers.end_supervisor("left", how="left"))
    db.run(workers.end_supervisor("back", how="age"))
    change = "update {schema}.supervisors set session_name = 'everbeat-back' where id = 'alive'"
    db.connection.execute(db.plain(change))  # declared dead, and restarted under another id
    with (
        session_of(db.target, "s1") as dead,
        session_of(db.target, "left") as left,
        session_of(db.target, "back") as back,
        session_of(db.target, "s10") as stranger,
    ):
        assert end_remaining(db) == ["everbeat-s1 worker 1.1"]
        assert [is_open(each) for each in (dead, left, back, stranger)] == [False, True, True, True]


def test_a_session_of_a_dead_tree_that_executes_a_statement_is_not_ended(db: StoreHarness) -> None:
    db.run(workers.end_supervisor("s1", how="age"))
    with session_of(db.target, "s1") as busy, ThreadPoolExecutor(1) as threads:
        working = threads.submit(busy.execute, "select pg_sleep(1)")
        until_busy(db, "everbeat-s1 %", 1)
        assert db.run(retention.remaining_sessions()) == []
        assert working.result() is not None


def test_a_session_is_ended_only_while_the_reply_that_was_seen_is_unread(db: StoreHarness) -> None:  # J14
    with session_of(db.target, "s1") as session:
        assert db.run(retention.remaining_sessions()) == []
        with unread_by(session, db):
            (seen,) = db.run(retention.remaining_sessions())
            assert (seen.session, seen.is_left, seen.may_end) == ("everbeat-s1 worker 1.1", False, True)
        assert db.run(retention.remaining_sessions()) == []
        assert db.run(retention.end_sessions([seen])) == frozenset()
        with unread_by(session, db):  # another statement
            (again,) = db.run(retention.remaining_sessions())
            assert db.run(retention.end_sessions([seen])) == frozenset()
        assert is_open(session)
        with unread_by(session, db):
            (seen,) = db.run(retention.remaining_sessions())
            assert seen != again
            assert db.run(retention.end_sessions([seen])) == {session.info.backend_pid}
        assert not is_open(session)


def test_a_session_that_read_its_reply_after_the_check_is_not_ended(db: StoreHarness) -> None:
    with session_of(db.target, "s1") as session:
        with unread_by(session, db):
            (seen,) = db.run(retention.remaining_sessions())
        assert db.run(retention.end_sessions([seen])) == frozenset()
        assert is_open(session)


def test_a_session_is_ended_while_it_has_a_part_of_the_request_that_was_seen(db: StoreHarness) -> None:
    with session_of(db.target, "s1") as session:
        with partly_sent_by(session, db):
            (seen,) = db.run(retention.remaining_sessions())
            assert (seen.session, seen.is_left, seen.may_end, seen.is_partial) == (
                "everbeat-s1 worker 1.1",
                False,
                True,
                True,
            )
        assert db.run(retention.remaining_sessions()) == []
        assert db.run(retention.end_sessions([seen])) == frozenset()
        with partly_sent_by(session, db):
            (seen,) = db.run(retention.remaining_sessions())
            assert db.run(retention.end_sessions([seen])) == {session.info.backend_pid}
        assert not is_open(session)


def test_a_session_of_another_role_with_the_name_of_a_dead_tree_is_not_ended(db: StoreHarness) -> None:
    role = f"deceiver_{db.target.schema}"
    db.connection.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
    db.run(workers.end_supervisor("s1", how="age"))
    try:
        with session_of(db.target, "s1", user=role) as impostor:
            assert db.run(retention.remaining_sessions()) == []
            assert is_open(impostor)
    finally:
        db.connection.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def test_sessions_of_other_roles_with_a_name_of_everbeat_are_not_counted(
    db: StoreHarness,
) -> None:
    roles = [f"{each}_{db.target.schema}" for each in ("tree", "deceiver")]
    names = {"role": sql.Identifier(roles[0]), "schema": sql.Identifier(db.target.schema)}
    for role in roles:
        db.connection.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
    for text in (
        "grant usage on schema {schema} to {role}",
        "grant select on {schema}.supervisors to {role}",
    ):
        db.connection.execute(sql.SQL(text).format(**names))  # type: ignore[arg-type]
    own = "update {schema}.supervisors set session_role = %s::regrole"
    db.connection.execute(db.plain(own), [roles[0]])
    try:
        with (
            session_of(db.target, "s1", user=roles[0]),
            session_of(db.target, "s1", user=roles[1]),
            psycopg.connect(make_conninfo(db.target.url, user=roles[0])) as looking,
        ):
            row = looking.execute(db.text("inspect/count_connections")).fetchone()
            assert row is not None
            assert row[2] == 1
    finally:
        for role in roles:
            db.connection.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(role)))


def test_a_tree_that_was_declared_dead_does_not_end_its_own_sessions(db: StoreHarness) -> None:
    db.run(workers.end_supervisor("s1", how="age"))
    with session_of(db.target, "s1") as sibling, session_of(db.target, "s1") as own:
        assert own.execute(db.text("worker/list_remaining_sessions")).fetchall() == []
        assert is_open(sibling)


def test_a_session_waits_while_it_has_two_busy_backends_and_ends_idle_ones(
    db: StoreHarness,
) -> None:
    with (
        session_of(db.target, "s1") as idle,
        session_of(db.target, "s1") as first,
        session_of(db.target, "s1") as second,
        session_of(db.target, "s1") as next_one,
        session_of(db.target, "s2") as other,
        ThreadPoolExecutor(2) as threads,
    ):
        next_one.rollback()
        next_one.autocommit = True
        for number, busy in enumerate((first, second), start=1):
            threads.submit(busy.execute, "select pg_sleep(30)")
            until_busy(db, "everbeat-s1 %", number)
        try:
            assert must_wait(next_one, db)
            assert [is_open(each) for each in (idle, other)] == [False, True]
            ended = first.info.backend_pid
            first.cancel()
            first.close()
            until_gone(db, ended)  # a cancelled statement stops earlier than its backend
            assert not must_wait(next_one, db)
        finally:
            for busy in (first, second):
                busy.cancel()


async def test_a_session_reconnects_if_its_role_must_not_terminate_backends(
    new_server: NewServer,
) -> None:  # J11
    server = new_server()
    with psycopg.connect(server.url, autocommit=True) as owner:
        owner.execute("create role app login; create schema everbeat authorization app")
        owner.execute("revoke execute on function pg_terminate_backend(int, bigint) from public")
        target = Target.parse(make_conninfo(server.url, user="app"))
        with target.connect("everbeat test") as connection:
            migrating.migrate(connection, target)
        session = Session(target, "everbeat-s1 worker")
        first = await session.connection()
        name = first.info.parameter_status("application_name") or ""
        with target.connect(name) as idle:
            owner.execute("select pg_terminate_backend(%s, 5000)", [first.info.backend_pid])
            assert await session.run(workers.watch_beats(), patience_s=5) == []
            assert is_open(idle), "this role cannot end it"
        await session.drop()


def must_wait(connection: Connection[Any], db: StoreHarness) -> bool:
    """Return whether a new connection must wait for earlier ones, as a session decides it."""
    row = connection.execute(db.text("worker/check_earlier_sessions")).fetchone()
    assert row is not None
    if row[1]:
        connection.execute(db.text("worker/end_earlier_sessions"), {"pids": row[1]})
    return bool(row[0])


def until_gone(db: StoreHarness, pid: int) -> None:
    """Return when the server has no backend with this process id."""
    while db.connection.execute("select from pg_stat_activity where pid = %s", [pid]).fetchone() is not None:
        pass


def until_busy(db: StoreHarness, like: str, count: int) -> None:
    """Wait until this many sessions with such a name execute a statement."""
    busy = "select count(*) from pg_stat_activity where application_name like %s and state = 'active'"
    while db.connection.execute(busy, [like]).fetchone() != (count,):
        pass
