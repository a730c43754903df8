"""The pair of servers that other tests use: it replicates, is promoted, freezes and dies as they expect."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.conftest import NewPair


def test_a_promoted_standby_has_every_synchronous_commit(new_pair: NewPair) -> None:
    pair = new_pair(synchronous=True)
    with psycopg.connect(pair.primary.url, autocommit=True) as connection:
        connection.execute("create table said (word text)")
        connection.execute("insert into said values ('kept')")
    with psycopg.connect(pair.url, target_session_attrs="read-write") as connection:
        assert connection.info.port == int(pair.primary.tcp_url.rpartition(":")[2].partition("/")[0])

    pair.kill_primary()
    pair.promote()

    with psycopg.connect(pair.url, target_session_attrs="read-write", autocommit=True) as connection:
        assert connection.execute("select word from said").fetchall() == [("kept",)]
        connection.execute("insert into said values ('written after the promotion')")


@pytest.mark.long
def test_a_frozen_primary_accepts_connections_and_does_not_reply(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.freeze_primary()
    with pytest.raises(psycopg.OperationalError, match="timeout"):
        psycopg.connect(pair.primary.tcp_url, connect_timeout=2)
    pair.thaw_primary()
    with psycopg.connect(pair.primary.tcp_url, connect_timeout=20) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


@pytest.mark.long
def test_a_commit_waits_for_a_stopped_synchronous_standby(new_pair: NewPair) -> None:
    pair = new_pair(synchronous=True)
    pair.stop_standby()
    notices: list[str] = []
    with (
        psycopg.connect(pair.primary.url, autocommit=True) as waiting,
        psycopg.connect(pair.primary.url, autocommit=True) as watching,
        ThreadPoolExecutor() as threads,
    ):
        waiting.add_notice_handler(lambda notice: notices.append(str(notice.message_primary)))
        committed = threads.submit(waiting.execute, "create table said (word text)")
        cancel = (
            "select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep' and pid = %s"
        )
        while not committed.done():
            watching.execute(cancel, [waiting.info.backend_pid])
    assert any("synchronous replication" in notice for notice in notices)
    pair.start_standby()
    with psycopg.connect(pair.primary.url, autocommit=True) as connection:
        connection.execute("insert into said values ('not held up')")
