"""Sessions that a client abandoned while they waited for a standby are counted until the server has ended them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from everbeat.errors import DatabaseUnreachable
from everbeat.store.connection import WatchedConnection
from everbeat.store.retention import MOST_LEFT, LeftSessions
from everbeat.store.statement import Row
from tests.store.conftest import StoreHarness


def gone(db: StoreHarness, left: LeftSessions, connection: WatchedConnection) -> list[Row]:
    """Return the abandoned sessions that a new connection reports as ended."""
    question = left.question(connection)
    assert question is not None
    return connection.execute(db.text(question.name), question.parameters).fetchall()


@contextmanager
def at_work(connection: WatchedConnection, db: StoreHarness) -> Iterator[None]:
    """Let the session wait for a lock until the block ends."""
    db.connection.execute("select pg_advisory_lock(815)")
    waiting = threading.Thread(target=connection.execute, args=["select pg_advisory_xact_lock_shared(815)"])
    waiting.start()
    seen = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    while not db.connection.execute(seen, [connection.server_pid]).fetchall():
        assert waiting.is_alive()
    try:
        yield
    finally:
        db.connection.execute("select pg_advisory_unlock(815)")
        waiting.join()


def test_a_session_that_is_left_during_the_check_of_another_connection_stays_counted(
    db: StoreHarness,
) -> None:
    left = LeftSessions()
    with ExitStack() as stack:
        ended, later, new = (stack.enter_context(db.target.connect("everbeat test")) for _ in range(3))
        left.add(ended)
        found = gone(db, left, new)
        assert found == [(ended.server_pid,)]
        left.add(later)
        left.require_room(new, found)
        question = left.question(new)
        assert question is not None
        assert question.parameters == {"pids": [later.server_pid]}


def test_a_server_with_the_maximum_of_left_sessions_gets_no_further_statement(db: StoreHarness) -> None:
    left = LeftSessions()
    with ExitStack() as stack:
        new, *others = (stack.enter_context(db.target.connect("everbeat test")) for _ in range(MOST_LEFT + 1))
        for each in others:
            left.add(each)
        with at_work(others[0], db):
            assert len(gone(db, left, new)) == MOST_LEFT - 1
        with pytest.raises(DatabaseUnreachable, match=f"{MOST_LEFT} earlier statements"):
            left.require_room(new, [])
        left.require_room(new, gone(db, left, new))
        assert left.question(new) is None
