"""The sessions of dead trees are ended on the server: of no other tree, and where the role must not, that is reported."""

from __future__ import annotations

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from everbeat.config import RecoveryConfig
from everbeat.services.leftovers import Leftovers, SessionsEnded, SessionsLeft
from everbeat.store import workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from tests.services.conftest import Hands, Onlooker, hands, onlooker
from tests.store.test_remaining_sessions import is_open, session_of

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
