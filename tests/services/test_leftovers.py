"""Sessions of dead trees, and sessions whose answer nobody reads, are ended on the server: no others, and what the role must not end is
reported."""

from __future__ import annotations

import time

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from everbeat.config import RecoveryConfig
from everbeat.services.leftovers import (
    LOOK_AGAIN_S,
    LOOKS,
    AnswersUnread,
    Leftovers,
    SessionsEnded,
    SessionsLeft,
)
from everbeat.store import migrating, sweeping, workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.nats_server import free_port
from tests.services.conftest import Hands, Onlooker, hands, onlooker
from tests.store.test_remaining_sessions import is_open, session_of, unread_by

__all__ = ["hands", "onlooker"]


def leftovers(onlooker: Onlooker) -> Leftovers:
    return Leftovers(onlooker.session, RecoveryConfig(), events=onlooker.events)


async def test_the_sessions_of_a_dead_tree_are_ended_and_reported(
    onlooker: Onlooker, hands: Hands
) -> None:  # J14
    hands.run(workers.end_supervisor("s1", how="age"))
    service = leftovers(onlooker)
    with session_of(hands.target, "s1") as dead:
        for _ in range(2):
            await service.tick()
        assert not is_open(dead)
    (told,) = onlooker.told(SessionsEnded)
    assert isinstance(told, SessionsEnded)
    assert told.sessions == ("everbeat-s1 worker 1.1",)


@pytest.mark.parametrize("may_signal", [False, True])
async def test_sessions_that_the_role_must_not_end_are_reported_once(
    onlooker: Onlooker, hands: Hands, may_signal: bool
) -> None:  # J14
    schema = hands.target.schema
    roles = [f"observer_{schema}", f"tree_{schema}"]
    for role in roles:
        hands.connection.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
    rights = "grant usage on schema {schema} to {role}; grant all on all tables in schema {schema} to {role}"
    names = {"schema": sql.Identifier(schema), "role": sql.Identifier(roles[0])}
    hands.connection.execute(sql.SQL(rights).format(**names))
    if may_signal:
        hands.connection.execute(
            sql.SQL("grant pg_signal_backend, pg_read_all_stats to {role}").format(**names)
        )
    observer = Target(url=make_conninfo(hands.target.url, user=roles[0]), schema=schema)
    onlooker.session = Session(observer, "everbeat test observer")
    try:
        own = "update {schema}.supervisors set session_role = %s::regrole where id = 's1'"
        hands.connection.execute(hands.plain(own), [roles[1]])
        with session_of(hands.target, "s1", user=roles[1]) as foreign:
            assert await onlooker.session.run(workers.end_supervisor("s1", how="age"))
            service = leftovers(onlooker)
            for _ in range(2):
                await service.tick()
            assert is_open(foreign) is not may_signal
        told = onlooker.told(SessionsLeft)
        assert len(told) == (not may_signal)
        for each in told:
            assert isinstance(each, SessionsLeft)
            assert (each.sessions, each.roles) == (("everbeat-s1 worker 1.1",), (roles[1],))
    finally:
        await onlooker.session.drop()
        for role in roles:
            hands.connection.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(role)))


def is_locked(hands: Hands) -> bool:
    free = "select 1 from {schema}.workers where id = 'w1' for update skip locked"
    return hands.connection.execute(hands.plain(free)).fetchone() is None


async def test_a_session_whose_answer_stays_unread_is_ended_after_several_looks_and_reported(
    onlooker: Onlooker, hands: Hands
) -> None:  # J14
    service = leftovers(onlooker)
    with session_of(hands.target, "s1") as session, unread_by(session, hands):
        for _ in range(LOOKS - 1):
            assert await service.tick() == LOOK_AGAIN_S
            assert is_locked(hands)
        await service.tick()
        give_up_at = time.monotonic() + 30
        while is_locked(hands):
            assert time.monotonic() < give_up_at
        assert await service.tick() is None
    (told,) = onlooker.told(AnswersUnread)
    assert isinstance(told, AnswersUnread)
    assert told.sessions == ("everbeat-s1 worker 1.1",)
    assert onlooker.told(SessionsEnded) == onlooker.told(SessionsLeft) == []


async def test_a_session_that_reads_one_answer_after_another_is_not_ended(
    onlooker: Onlooker, hands: Hands
) -> None:
    service = leftovers(onlooker)
    with session_of(hands.target, "s1") as session:
        for _ in range(3):
            with unread_by(session, hands):
                for _ in range(LOOKS - 1):
                    await service.tick()
        assert is_open(session)
    assert onlooker.told(AnswersUnread) == []


async def test_a_session_over_tcp_is_left_to_the_timeout_that_sees_whether_its_client_reads(
    new_server: NewServer,
) -> None:
    server = new_server(tcp_port=free_port())
    target = Target.parse(server.tcp_url, schema="everbeat")
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        hands = Hands(target, connection)
        hands.supervisor("s1", "w1", "w2")
        with session_of(target, "s1") as session, unread_by(session, hands):
            assert hands.run(sweeping.remaining_sessions()) == []
            local = Hands(Target.parse(server.url, schema="everbeat"), connection)
            with session_of(local.target, "s1") as other, unread_by(other, local, "w2"):
                found = hands.run(sweeping.remaining_sessions())
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
            hands = Hands(target, connection)
            hands.supervisor("s1", "w1")
            session = Session(target, "everbeat test observer")
            onlooker = Onlooker(hands, session)
            service = leftovers(onlooker)
            with session_of(target, "s1", user="app") as stuck:
                with unread_by(stuck, hands):
                    for _ in range(LOOKS):
                        assert await service.tick() in (LOOK_AGAIN_S, None)
                    assert await service.tick() is None, "no more looks than usual"
                    assert is_locked(hands)
                assert is_open(stuck)
                (told,) = onlooker.told(SessionsLeft)
                assert isinstance(told, SessionsLeft)
                assert (told.sessions, told.roles) == (("everbeat-s1 worker 1.1",), ("app",))
                stuck.rollback()
                await service.tick()
                assert await onlooker.session.run(workers.end_supervisor("s1", how="age"))
                await service.tick()
                assert is_open(stuck)
                assert len(onlooker.told(SessionsLeft)) == 2
            await session.drop()
