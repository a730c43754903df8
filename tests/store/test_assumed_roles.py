"""A role that logs in and works as another one ("alter role ... set role ..."): how everbeat sees and treats its own sessions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from everbeat.domain.doctor.server import LockHolder, judge_locks, judge_transactions
from everbeat.store import diagnosis, rows
from everbeat.store.database import Database
from everbeat.store.statement import Statement, compose
from everbeat.store.target import Target
from tests.store.conftest import StoreHarness
from tests.store.test_remaining_sessions import is_open, must_wait, session_of, until_busy


@pytest.fixture
def assumed(db: StoreHarness) -> Iterator[Target]:
    """The schema as seen by a login role that works as its owner."""
    login, owner = f"login_{db.target.schema}", f"owner_{db.target.schema}"
    names = {"login": sql.Identifier(login), "owner": sql.Identifier(owner)}
    names["schema"] = sql.Identifier(db.target.schema)
    for text in (
        "create role {owner}", "create role {login} login in role {owner}", "alter role {login} set role {owner}",
        "grant usage on schema {schema} to {owner}", "grant all on all tables in schema {schema} to {owner}",
    ):  # fmt: skip
        db.connection.execute(sql.SQL(text).format(**names))  # type: ignore[arg-type]
    yield Target(url=make_conninfo(db.target.url, user=login), schema=db.target.schema)
    for text in ("drop owned by {owner}", "drop role {login}", "drop role {owner}"):
        db.connection.execute(sql.SQL(text).format(**names))  # type: ignore[arg-type]


def test_a_database_waits_for_a_statement_of_an_assumed_role_that_waits_for_a_lock(
    db: StoreHarness, assumed: Target
) -> None:  # J15
    statement = Statement("commit/read_installation", {}, rows.as_they_are)
    with psycopg.connect(db.target.url) as other:
        other.execute(db.plain("lock table {schema}.installation"))
        threading.Timer(2.0, other.rollback).start()  # five times the patience
        assert Database(assumed, patience_s=0.4).run(statement)


def test_read_session_activity_reports_an_idle_session_of_an_assumed_role_as_idle(
    db: StoreHarness, assumed: Target
) -> None:  # J15
    with session_of(db.target, "s1", user=user_of(assumed)) as idle:
        look = Statement(
            "inspect/read_session_activity", {"pid": idle.info.backend_pid, "name": ""}, rows.as_they_are
        )
        assert Database(assumed).run(look) == [(False, False)]


def test_read_session_activity_restores_the_role_of_its_session(assumed: Target) -> None:
    with assumed.connect("everbeat test") as connection:
        worked_as = connection.execute("select current_user").fetchone()
        look = compose("inspect/read_session_activity", assumed.schema)
        assert connection.execute(look, {"pid": 1, "name": ""}).fetchone() == (False, False)
        assert connection.execute("select current_user").fetchone() == worked_as != (user_of(assumed),)


def test_find_ended_sessions_keeps_a_left_session_of_an_assumed_role_that_still_works(
    db: StoreHarness, assumed: Target
) -> None:
    user = user_of(assumed)
    with (
        session_of(db.target, "s1", user=user) as busy,
        session_of(db.target, "s1", user=user) as idle,
        ThreadPoolExecutor(1) as threads,
    ):
        threads.submit(busy.execute, "select pg_sleep(5)")
        until_busy(db, "everbeat-s1 %", 1)
        pids = [busy.info.backend_pid, idle.info.backend_pid]
        found = Database(assumed).run(
            Statement("inspect/find_ended_sessions", {"pids": pids}, rows.as_they_are)
        )
        assert found == [(idle.info.backend_pid,)]
        busy.cancel()


def test_a_session_of_an_assumed_role_ends_the_idle_backends_that_it_left(
    db: StoreHarness, assumed: Target
) -> None:
    user = user_of(assumed)
    with (
        session_of(db.target, "s1", user=user) as first,
        session_of(db.target, "s1", user=user) as second,
        session_of(db.target, "s1", user=user) as next_one,
    ):
        next_one.rollback()
        next_one.autocommit = True
        worked_as = next_one.execute("select current_user").fetchone()
        must_wait(next_one, db)
        assert [is_open(each) for each in (first, second)] == [False, False]
        assert next_one.execute("select current_user").fetchone() == worked_as


def test_the_doctor_draws_no_conclusion_from_sessions_that_its_role_cannot_see(
    db: StoreHarness, assumed: Target
) -> None:
    client = Database(assumed)
    with (
        psycopg.connect(db.target.url) as holder,
        psycopg.connect(db.target.url) as waiter,
        ThreadPoolExecutor(1) as threads,
    ):
        holder.execute(db.plain("lock table {schema}.tasks"))
        holder.execute("select txid_current()")
        holds = holder.info.backend_pid
        waiter.execute("set application_name = 'everbeat test'")
        threads.submit(waiter.execute, db.plain("select count(*) from {schema}.tasks"))
        holders = Statement(
            "inspect/list_lock_holders", {"schema": assumed.schema, "older_than_ms": 0}, rows.as_they_are
        )
        while not (found := [LockHolder(*row) for row in client.run(holders) if row[0] == holds]):
            pass
        check = judge_locks(found)
        holder.rollback()
        assert "only a role with pg_monitor can see" in check.text
        assert "pg_terminate_backend" not in f"{check.fix}{found[0].command}"
        holder.execute("select txid_current()")
        seen = client.run(diagnosis.long_transactions(older_than_ms=0))
        assert (seen.found, seen.hides) == ((), True)
        assert "that this role can see" in judge_transactions(seen, limit="5m").text
        assert db.run(diagnosis.long_transactions(older_than_ms=0)).found


def user_of(target: Target) -> str:
    """Return the role that logs in."""
    return str(psycopg.conninfo.conninfo_to_dict(target.url)["user"])
