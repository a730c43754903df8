"""Sessions on which a client hung up while they waited for a standby: counted until the server has ended them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from everbeat.errors import DatabaseUnreachable
from everbeat.store.left_sessions import MOST_LEFT, LeftSessions
from everbeat.store.silence import WatchedConnection
from everbeat.store.statement import Row
from tests.store.conftest import Hands


def gone(hands: Hands, left: LeftSessions, connection: WatchedConnection) -> list[Row]:
    """What a new connection learns about the sessions that were left."""
    question = left.question(connection)
    assert question is not None
    return connection.execute(hands.text(question.name), question.parameters).fetchall()


@contextmanager
def at_work(connection: WatchedConnection, hands: Hands) -> Iterator[None]:
    """The session waits for a lock until the block ends."""
    hands.connection.execute("select pg_advisory_lock(815)")
    waiting = threading.Thread(target=connection.execute, args=["select pg_advisory_xact_lock_shared(815)"])
    waiting.start()
    seen = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    while not hands.connection.execute(seen, [connection.server_pid]).fetchall():
        assert waiting.is_alive()
    try:
        yield
    finally:
        hands.connection.execute("select pg_advisory_unlock(815)")
        waiting.join()


def test_a_session_that_is_left_while_another_connection_asks_stays_counted(hands: Hands) -> None:
    left = LeftSessions()
    with ExitStack() as stack:
        ended, later, new = (stack.enter_context(hands.target.connect("everbeat test")) for _ in range(3))
        left.add(ended)
        found = gone(hands, left, new)
        assert found == [(ended.server_pid,)]
        left.add(later)
        left.require_room(new, found)
        question = left.question(new)
        assert question is not None
        assert question.parameters == {"pids": [later.server_pid]}


def test_a_server_that_still_has_the_most_sessions_gets_no_further_statement(hands: Hands) -> None:
    left = LeftSessions()
    with ExitStack() as stack:
        new, *others = (
            stack.enter_context(hands.target.connect("everbeat test")) for _ in range(MOST_LEFT + 1)
        )
        for each in others:
            left.add(each)
        with at_work(others[0], hands):
            assert len(gone(hands, left, new)) == MOST_LEFT - 1
        with pytest.raises(DatabaseUnreachable, match=f"{MOST_LEFT} earlier statements"):
            left.require_room(new, [])
        left.require_room(new, gone(hands, left, new))
        assert left.question(new) is None
