"""Test the cleanup of left sessions: those of dead trees, and those whose answers stay unread, are ended and no others."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import psycopg
import pytest
from psycopg import Connection, sql
from psycopg.conninfo import make_conninfo

from everbeat.maintenance.cleanup import (
    CHECKS,
    CHECKS_OF_REQUEST,
    RECHECK_S,
    AnswersUnread,
    RequestsPartial,
    SessionsEnded,
    SessionsLeft,
    UselessSessionWatch,
)
from everbeat.store import migrating, retention, workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.nats_server import free_port
from tests.recovering.conftest import ManualObserver, StoreHarness, db, observer
from tests.store.test_remaining_sessions import is_open, partly_sent_by, session_of, unread_by

__all__ = ["db", "observer"]


def leftovers(observer: ManualObserver) -> UselessSessionWatch:
    return UselessSessionWatch(observer.environment())


async def test_the_sessions_of_a_dead_tree_are_ended_and_reported(
    observer: ManualObserver, db: StoreHarness
) -> None:  # J14
    db.run(workers.end_supervisor("s1", how="age"))
    service = leftovers(observer)
    with session_of(db.target, "s1") as dead:
        for _ in range(2):
            await service.tick()
        assert not is_open(dead)
    (told,) = observer.told(SessionsEnded)
    assert isinstance(told, SessionsEnded)
    assert told.sessions == ("everbeat-s1 worker 1.1",)


@pytest.mark.parametrize("may_signal", [False, True])
async def test_sessions_that_the_role_must_not_end_are_reported_once(
    observer: ManualObserver, db: StoreHarness, may_signal: bool
) -> None:  # J14
    schema = db.target.schema
    roles = [f"observer_{schema}", f"tree_{schema}"]
    for role in roles:
        db.connection.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
    rights = "grant usage on schema {schema} to {role}; grant all on all tables in schema {schema} to {role}"
    names = {"schema": sql.Identifier(schema), "role": sql.Identifier(roles[0])}
    db.connection.execute(sql.SQL(rights).format(**names))
    if may_signal:
        db.connection.execute(sql.SQL("grant pg_signal_backend, pg_read_all_stats to {role}").format(**names))
    target = Target(url=make_conninfo(db.target.url, user=roles[0]), schema=schema)
    observer.session = Session(target, "everbeat test observer")
    try:
        own = "update {schema}.supervisors set session_role = %s::regrole where id = 's1'"
        db.connection.execute(db.plain(own), [roles[1]])
        with session_of(db.target, "s1", user=roles[1]) as foreign:
            assert await observer.session.run(workers.end_supervisor("s1", how="age"))
            service = leftovers(observer)
            for _ in range(2):
                await service.tick()
            assert is_open(foreign) is not may_signal
        told = observer.told(SessionsLeft)
        assert len(told) == (not may_signal)
        for each in told:
            assert isinstance(each, SessionsLeft)
            assert (each.sessions, each.roles) == (("everbeat-s1 worker 1.1",), (roles[1],))
    finally:
        await observer.session.drop()
        for role in roles:
            db.connection.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(role)))


def is_locked(db: StoreHarness) -> bool:
    free = "select 1 from {schema}.workers where id = 'w1' for update skip locked"
    return db.connection.execute(db.plain(free)).fetchone() is None


@pytest.mark.parametrize(
    ("halted_by", "checks", "event"),
    [
        pytest.param(unread_by, CHECKS, AnswersUnread, id="unread answer"),
        pytest.param(partly_sent_by, CHECKS_OF_REQUEST, RequestsPartial, id="part of a request"),
    ],
)
async def test_a_session_whose_process_does_not_continue_is_ended_after_several_checks(
    observer: ManualObserver,
    db: StoreHarness,
    halted_by: Callable[[Connection[Any], StoreHarness], AbstractContextManager[None]],
    checks: int,
    event: type[AnswersUnread | RequestsPartial],
) -> None:  # J14
    service = leftovers(observer)
    with session_of(db.target, "s1") as session, halted_by(session, db):
        for _ in range(checks - 1):
            assert await service.tick() == RECHECK_S
            assert is_locked(db)
        await service.tick()
        give_up_at = time.monotonic() + 30
        while is_locked(db):
            assert time.monotonic() < give_up_at
        assert await service.tick() is None
    (told,) = observer.told(event)
    assert isinstance(told, event)
    assert told.sessions == ("everbeat-s1 worker 1.1",)
    for other in {AnswersUnread, RequestsPartial, SessionsEnded, SessionsLeft} - {event}:
        assert observer.told(other) == []


async def test_a_session_that_reads_one_answer_after_another_is_not_ended(
    observer: ManualObserver, db: StoreHarness
) -> None:
    service = leftovers(observer)
    with session_of(db.target, "s1") as session:
        for _ in range(3):
            with unread_by(session, db):
                for _ in range(CHECKS - 1):
                    await service.tick()
        assert is_open(session)
    assert observer.told(AnswersUnread) == []


async def test_a_tcp_session_with_an_unread_answer_is_left_to_the_tcp_timeout(
    new_server: NewServer,
) -> None:
    server = new_server(tcp_port=free_port())
    target = Target.parse(server.tcp_url, schema="everbeat")
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        db = StoreHarness(target, connection)
        db.supervisor("s1", "w1", "w2")
        with session_of(target, "s1") as session, unread_by(session, db):
            assert db.run(retention.remaining_sessions()) == []
            local = StoreHarness(Target.parse(server.url, schema="everbeat"), connection)
            with session_of(local.target, "s1") as other, unread_by(other, local, "w2"):
                found = db.run(retention.remaining_sessions())
                assert [each.pid for each in found] == [other.info.backend_pid]


async def test_unread_answers_that_the_role_must_not_end_are_reported_once(
    new_server: NewServer,
) -> None:  # J14
    server = new_server()
    with psycopg.connect(server.url, autocommit=True) as owner:
        owner.execute("create role app login; create schema everbeat authorization app")
        owner.execute("revoke execute on function pg_terminate_backend(int, bigint) from public")
        target = Target.parse(make_conninfo(server.url, user="app"), schema="everbeat")
        with target.connect("everbeat test") as connection:
            migrating.migrate(connection, target)
            db = StoreHarness(target, connection)
            db.supervisor("s1", "w1")
            session = Session(target, "everbeat test observer")
            observer = ManualObserver(db, session)
            service = leftovers(observer)
            with session_of(target, "s1", user="app") as stuck:
                with unread_by(stuck, db):
                    for _ in range(CHECKS):
                        assert await service.tick() in (RECHECK_S, None)
                    assert await service.tick() is None, "there must be no more checks than usual"
                    assert is_locked(db)
                assert is_open(stuck)
                (told,) = observer.told(SessionsLeft)
                assert isinstance(told, SessionsLeft)
                assert (told.sessions, told.roles) == (("everbeat-s1 worker 1.1",), ("app",))
                stuck.rollback()
                await service.tick()
                assert await observer.session.run(workers.end_supervisor("s1", how="age"))
                await service.tick()
                assert is_open(stuck)
                assert len(observer.told(SessionsLeft)) == 2
            await session.drop()
